"""Masks against the `{% generation %}` marks that trl's training templates carry: written by others, by hand.

They mark more than the model has to produce. What is marked by them and not learned here must be one of: a header or
prefill that the prompt gives, text after the end of turn, the end of an earlier turn that the template rewrites.
"""

from __future__ import annotations

import numpy as np
import pytest

from whet.data.conversation import Conversation
from whet.data.render.layout_cache import Layout
from whet.data.render.renderer import Renderer

from .test_trl_templates import as_dicts, full, layout_or_reason, supervised_characters
from .trl_templates import FIXED, TRL_TEMPLATES, TrlTemplate

MARKED = [template for template in TRL_TEMPLATES if "generation %}" in template.source]
UNWEIGHTED = {name: conversation for name, conversation in FIXED.items() if name != "weight"}  # marks know no weights

pytestmark = pytest.mark.skipif(not MARKED, reason="trl, whose marked templates are compared, is not installed")


def runs(flags: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("template", MARKED, ids=lambda template: template.name)
def test_generation_tags_cover_the_mask_plus_header_or_trailing_text(template: TrlTemplate) -> None:
    compared = sum(_compare(template, conversation) for conversation in UNWEIGHTED.values())
    assert compared >= 5


def _compare(template: TrlTemplate, conversation: Conversation) -> bool:
    renderer = full(template, "assistant")
    layout = layout_or_reason(renderer, conversation)
    if not isinstance(layout, Layout):
        return False
    [rendered] = renderer.encode_layouts([layout])
    marks = renderer.tokenizer.apply_chat_template(
        as_dicts(conversation.messages, renderer), tools=list(conversation.tools) or None, return_dict=True,
        return_assistant_tokens_mask=True,
    )["assistant_masks"]  # fmt: skip
    mine = supervised_characters(renderer, layout.text, rendered.loss)
    theirs = supervised_characters(renderer, layout.text, np.array(marks))
    assert not (mine & ~theirs).any(), "learned, but not marked"
    prompts = _prompts(renderer, conversation)
    for start, end in runs(theirs & ~mine):
        assert _is_given(layout, start, end, prompts) or _comes_after(template, layout, start, end)
    return True


def _prompts(renderer: Renderer, conversation: Conversation) -> list[str]:
    """The generation prompt of each turn."""
    return [
        renderer.text.apply(conversation.messages[:turn], conversation.tools, prompt=True)
        for turn, message in enumerate(conversation.messages)
        if message.role == "assistant"
    ]


def _is_given(layout: Layout, start: int, end: int, prompts: list[str]) -> bool:
    """Up to where a turn starts, and its prompt has it. A token may straddle the start with whitespace."""
    return any(
        start < begin <= end and not layout.text[begin:end].strip() and layout.text[start:begin] in prompt
        for (begin, _, _), prompt in zip(layout.spans, prompts, strict=True)
    )


def _comes_after(template: TrlTemplate, layout: Layout, start: int, end: int) -> bool:
    """Whitespace and markers right behind a turn; a marker alone where the end is rewritten."""
    rest = layout.text[start:end]
    for marker in template.markers:
        rest = rest.replace(marker, "")
    return not rest.strip() and any(start == finish for *_, finish in layout.spans)
