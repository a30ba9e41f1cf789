"""Answers that share a token with their prompt, so that engines which encode the prompt by itself give other ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation
from whet.data.render.renderer import Renderer

_SHOWN_CHARACTERS = 24  # of a prompt


class StraddlingTokens(NamedTuple):
    """The end of a prompt that has other tokens before its answer than by itself."""

    prompt: str
    """The last characters of the prompt."""
    alone: list[str]
    """The tokens of its end by itself, as text."""
    with_answer: list[str]
    """Those in the conversation; the last one may hold text of both."""
    is_in_prompts: bool
    """whet prompts with the ids before the answer's first supervised token."""


def find_straddling_tokens(renderer: Renderer, conversation: Conversation) -> Iterator[StraddlingTokens]:
    """One for each answer whose prompt is encoded by itself to other ids than in the conversation."""
    encode = renderer.tokenizer.backend_tokenizer.encode
    conversation, text = renderer.text.apply_with_arguments(conversation)
    whole = encode(text, add_special_tokens=False)
    for turn, message in enumerate(conversation.messages):
        if turn == 0 or message.role != "assistant":
            continue
        try:
            prompt = renderer.text.apply(conversation.messages[:turn], conversation.tools, prompt=True)
        except BadRecordError:  # no prompt ends here
            continue
        alone = encode(prompt, add_special_tokens=False)
        if whole.ids[: len(alone)] == alone.ids or not text.startswith(prompt):
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone.ids, whole.ids, strict=False)))
        own = renderer.encode_prompt(prompt)
        with_answer = _token_texts(text, whole.offsets, same, len(prompt))
        shared = text[len(prompt) : whole.offsets[same + len(with_answer) - 1][1]]
        yield StraddlingTokens(
            prompt.rpartition("\n")[2][-_SHOWN_CHARACTERS:] or prompt[-_SHOWN_CHARACTERS:],
            _token_texts(prompt, alone.offsets, same, len(prompt)),
            with_answer,
            whole.ids[: len(own)] == own and (not shared or bool(shared.strip())),
        )


def _token_texts(text: str, offsets: Sequence[tuple[int, int]], first: int, position: int) -> list[str]:
    """The tokens from number `first` to the one that reaches `position`, as text."""
    start = max((end for _, end in offsets[:first]), default=0)
    texts = []
    for _, end in offsets[first:]:
        if start >= position:
            break
        texts.append(text[start:end])
        start = end
    return texts
