"""What must hold of every rendering, tried on all chat templates that trl ships.

Nothing here is specific to a template: expected ids come from transformers, expected masks from identifiable texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples import examples
from small_models import smollm2_folder
from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message
from whet.data.render.layout_cache import Layout
from whet.data.render.renderer import Rendered, Renderer

from .conversation_strategies import conversations, plain_variant
from .trl_templates import FIXED, TRL_TEMPLATES, TrlTemplate

pytestmark = pytest.mark.skipif(not TRL_TEMPLATES, reason="trl, whose chat templates are tried, is not installed")

EVERY = pytest.mark.parametrize("template", TRL_TEMPLATES, ids=lambda template: template.name)
SOME = pytest.mark.parametrize(
    "template",
    [
        pytest.param(template, marks=() if number % 3 == 0 else pytest.mark.slow)
        for number, template in enumerate(sorted(TRL_TEMPLATES, key=lambda each: each.name.endswith("_training")))
    ],
    ids=lambda template: template.name,
)
"""Random conversations: a third of the templates. Fixed ones are tried on every template."""
FEW = settings(
    max_examples=examples(6, 2), deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def layout_or_reason(renderer: Renderer, conversation: Conversation) -> Layout | str:
    try:
        return renderer.layout(conversation)
    except BadRecordError as error:
        return error.reason


def rendered_or_reason(renderer: Renderer, conversation: Conversation) -> Rendered | str:
    [result] = renderer.render_items([conversation])
    return result.reason if isinstance(result, BadRecordError) else result


def same(a: Rendered | str, b: Rendered | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return (a.ids.tolist(), a.loss.tolist(), a.supervises_end, a.notes) == (
        b.ids.tolist(),
        b.loss.tolist(),
        b.supervises_end,
        b.notes,
    )


def as_dicts(messages: Iterable[Message], renderer: Renderer) -> list[dict[str, Any]]:
    return renderer.text.as_dicts(list(messages))


def supervised_characters(renderer: Renderer, text: str, loss: np.ndarray) -> np.ndarray:
    """Of each character whether a learned token has it."""
    learned = np.zeros(len(text), dtype=bool)
    offsets = renderer.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for (start, end), flag in zip(offsets, loss, strict=True):
        if flag:
            learned[start:end] = True
    return learned


def cores(*values: Any) -> list[str]:
    """The cores in texts, also of nested ones."""
    return [
        core for value in values for core in re.findall("«[0-9]+»", value if isinstance(value, str) else str(value))
    ]


def cores_of(message: Message) -> list[str]:
    return cores(message.reasoning, message.content, *(call.arguments for call in message.tool_calls))


def is_supervised(conversation: Conversation, number: int, train_on: str) -> bool:
    message = conversation.messages[number]
    later = [m for m in conversation.messages[number + 1 :] if m.role == "assistant"]
    return message.role == "assistant" and message.train is not False and not (train_on == "last" and later)


def apply_chat_template(renderer: Renderer, conversation: Conversation, **options: Any) -> Any:
    apply = partial(renderer.tokenizer.apply_chat_template, tools=list(conversation.tools) or None, **options)
    try:
        return apply(as_dicts(conversation.messages, renderer))
    except TypeError:  # DeepSeek-V3 concatenates the arguments of calls
        return apply(as_dicts(conversation.with_text_arguments().messages, renderer))


# Every property of one rendering


def check(renderer: Renderer, conversation: Conversation, layout: Layout, rendered: Rendered) -> None:
    tokenizer, text = renderer.tokenizer, layout.text
    truth = apply_chat_template(renderer, conversation, return_dict=False)
    assert rendered.ids.tolist() == truth
    learned = supervised_characters(renderer, text, rendered.loss)
    for number, message in enumerate(conversation.messages):
        wanted = is_supervised(conversation, number, renderer.train_on)
        for core in cores_of(message):
            places = [match.start() for match in re.finditer(core, text)]
            flags = {bool(flag) for at in places for flag in learned[at : at + len(core)]}
            assert flags <= {wanted}, f"{core} of message {number + 1}: {flags}"
            assert places or (wanted and "reasoning left out by the template" in rendered.notes) or not wanted
    turns = [i for i in range(len(conversation.messages)) if is_supervised(conversation, i, renderer.train_on)]
    assert len(turns) == len(layout.spans)
    markers = set(tokenizer.get_added_vocab())
    for turn, (start, marker, end) in zip(turns, layout.spans, strict=True):
        assert set(cores_of(conversation.messages[turn])) >= set(cores(text[start:marker]))
        assert marker == end or text[marker:end] in markers
        assert learned[marker:end].all()
        assert not learned[end : end + 1].any(), "something is learned behind the end of turn"
        assert not learned[start - 1 : start].any(), "something is learned before the start of the turn"
        starts_where_the_prompt_ends(renderer, conversation, turn, text[:start])
    assert rendered.supervises_end == all(marker < end for _, marker, end in layout.spans)
    outside = np.ones(len(text), dtype=bool)
    for start, _, end in layout.spans:
        outside[start:end] = False
    assert not learned[outside].any()


_PREFILL = re.compile(r"\s*([<\[|][^<>\[\]]*think[^<>\[\]]*[>\]]\s*)*", re.IGNORECASE)


def starts_where_the_prompt_ends(renderer: Renderer, conversation: Conversation, turn: int, before: str) -> None:
    """Behind the last text before the turn, prompt and conversation agree, up to a prefill that the turn has not."""
    before_it = replace(conversation, messages=conversation.messages[:turn])
    prompt = apply_chat_template(renderer, before_it, tokenize=False, add_generation_prompt=True)
    given = re.split("«[0-9]+»", prompt)[-1]
    header = re.split("«[0-9]+»", before)[-1]
    assert given.startswith(header), f"{header!r} is not what the prompt gives: {given!r}"
    assert _PREFILL.fullmatch(given[len(header) :]), f"{given[len(header) :]!r} is given, but learned"


# Tried on every template


@cache
def warm(template: TrlTemplate, train_on: str) -> Renderer:
    """A renderer that keeps all cached layouts and never verifies them."""
    renderer = template.renderer(train_on)
    assert renderer._layout_cache is not None
    renderer._layout_cache.should_verify = lambda _: False  # type: ignore[method-assign]
    return renderer


@cache
def full(template: TrlTemplate, train_on: str) -> Renderer:
    return template.renderer(train_on, cached=False)


@SOME
@FEW
@given(conversation=conversations())
def test_ids_match_transformers_and_only_answers_are_supervised(
    template: TrlTemplate, conversation: Conversation
) -> None:
    renderer = full(template, "assistant")
    layout, rendered = layout_or_reason(renderer, conversation), rendered_or_reason(renderer, conversation)
    assert layout_or_reason(warm(template, "assistant"), conversation) == layout, "what was met before matters"
    if isinstance(layout, Layout) and isinstance(rendered, Rendered):
        check(renderer, conversation, layout, rendered)
        last = rendered_or_reason(full(template, "last"), conversation)
        if isinstance(last, Rendered):
            assert last.ids.tolist() == rendered.ids.tolist()
            assert (last.loss <= rendered.loss).all()
            check(full(template, "last"), conversation, full(template, "last").layout(conversation), last)
        else:
            assert last == "nothing to learn"


@SOME
@FEW
@given(conversation=conversations(calls=False), train_on=st.sampled_from(["assistant", "last", "all"]))
def test_the_cache_changes_nothing(template: TrlTemplate, conversation: Conversation, train_on: str) -> None:
    wanted = layout_or_reason(full(template, train_on), conversation)
    renderer = warm(template, train_on)
    layout_or_reason(renderer, plain_variant(conversation, "x"))
    served = layout_or_reason(renderer, plain_variant(conversation, "yy"))
    assert served == layout_or_reason(full(template, train_on), plain_variant(conversation, "yy"))
    assert layout_or_reason(renderer, conversation) == wanted
    assert same(rendered_or_reason(renderer, conversation), rendered_or_reason(full(template, train_on), conversation))


# The layout_or_reason of fixed conversations

REFUSED = {
    "cohere cohere2 cohere2_training cohere_training gemma3 gemma3_training llava_next llava_next_training": {
        "template drops text": "reason reason2", "template refuses": "call call2",
    },
    "deepseek_r1_distill": {"template drops text": "reason reason2 inline call call2"},
    "deepseek_r1_distill_training idefics3 idefics3_training lfm2 lfm2_training llama3 llama3_training phi3 phi3_5 "
    "phi3_5_training phi3_training qwen2_5_vl qwen2_5_vl_training smolvlm smolvlm_training": {
        "template drops text": "reason reason2 call call2",
    },
    "deepseekv3 deepseekv3_training": {"template drops text": "reason reason2 inline"},
    "diffusion_gemma diffusion_gemma_training gemma4_v5": {
        "no end of turn": "call", "template reorders text": "call2",
    },
    "gemma gemma_training": {"template refuses": "system call call2", "template drops text": "reason reason2"},
    "gemma4 gemma4_v3 gemma4_v4": {
        "template drops text": "reason reason2", "no end of turn": "call", "template reorders text": "call2",
    },
    "gemma4_v2 lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training qwen3_instruct_2507 qwen3_instruct_2507_training "
    "qwen3_vl qwen3_vl_training": {"template drops text": "reason reason2"},
    "llama3_1 llama3_2": {"template drops text": "reason reason2", "template refuses": "call2"},
    "glm4moe": {"no end of turn": " ".join(FIXED)},
    "gptoss gptoss_training muse_glimmer muse_glimmer_training": {"template drops text": "call2"},
}  # fmt: skip
"""Template → reason → conversations; all others are placed."""


@EVERY
def test_outcome_of_every_template_and_conversation(template: TrlTemplate) -> None:
    pinned = {name: refused for names, refused in REFUSED.items() for name in names.split()}.get(template.name, {})
    renderer, found = template.renderer(), dict[str, list[str]]()
    for name, conversation in FIXED.items():
        rendered = rendered_or_reason(renderer, conversation)
        if isinstance(rendered, str):
            found.setdefault(rendered, []).append(name)
            continue
        check(renderer, conversation, renderer.layout(conversation), rendered)
        assert same(rendered, rendered_or_reason(renderer, conversation))
    assert {reason: " ".join(names) for reason, names in found.items()} == pinned


def test_there_are_templates_enough() -> None:
    assert len(TRL_TEMPLATES) >= 20


# With a real tokenizer


@cache
def _real(name: str) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    return next(template for template in TRL_TEMPLATES if template.name == name).fitted(tokenizer)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss"])
@FEW
@given(conversation=conversations())
def test_masks_are_exact_with_a_real_tokenizer_too(name: str, conversation: Conversation) -> None:
    tokenizer = _real(name)
    template = next(template for template in TRL_TEMPLATES if template.name == name)
    renderer = template.renderer(tokenizer=tokenizer)
    layout, rendered = layout_or_reason(renderer, conversation), rendered_or_reason(renderer, conversation)
    if isinstance(layout, Layout) and isinstance(rendered, Rendered):
        check(renderer, conversation, layout, rendered)
