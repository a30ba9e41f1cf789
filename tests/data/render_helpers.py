"""Helpers of renderer tests: render a conversation, and what of it is supervised."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from small_models import smollm2_folder
from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message, Origin
from whet.data.render.renderer import Rendered, Renderer

from .template_families import (
    CHATML_TEMPLATE,
    Turns,
    small_tokenizer,
)


def conversation_of(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns), Origin("here", 1))


def render(
    tokenizer: PreTrainedTokenizerFast, turns: Turns, train_on: str = "assistant", stop_ids: tuple[int, ...] = ()
) -> Rendered:
    renderer = Renderer(tokenizer, train_on, stop_ids)
    [result] = renderer.encode_layouts([renderer.layout(conversation_of(*turns))])
    if isinstance(result, BadRecordError):
        raise result
    return result


def refusal(tokenizer: PreTrainedTokenizerFast, *turns: tuple[str, str], train_on: str = "assistant") -> BadRecordError:
    with pytest.raises(BadRecordError) as caught:
        render(tokenizer, turns, train_on)
    return caught.value


def transformers_ids(tokenizer: PreTrainedTokenizerFast, turns: Turns) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def supervised_text(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> str:
    """The supervised tokens as text, turns separated by ¦."""
    texts, run = [], []
    for i, token in enumerate(rendered.ids):
        if rendered.loss[i]:
            run.append(int(token))
        if run and (i + 1 == len(rendered.ids) or not rendered.loss[i + 1]):
            texts.append(tokenizer.decode(run))
            run = []
    return "¦".join(texts)


def tokenizer_with(template: str, markers: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")) -> PreTrainedTokenizerFast:
    return small_tokenizer(template, markers, eos="<|im_end|>")


def chatml_with(old: str, new: str) -> PreTrainedTokenizerFast:
    """ChatML with one thing different."""
    assert old in CHATML_TEMPLATE
    return tokenizer_with(CHATML_TEMPLATE.replace(old, new))


def expected_loss(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> list[int]:
    """A token is supervised if its first character is in a supervised piece."""
    supervised = [flag for text, flag in pieces for _ in text]
    text = "".join(text for text, _ in pieces)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [int(supervised[start]) for start, _ in encoded["offset_mapping"]]


@cache
def smollm2() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2_folder())
