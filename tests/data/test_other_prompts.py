"""Generation prompts with other text than the conversation before the last message."""

from __future__ import annotations

import pytest

from whet.data.render.renderer import CONTEXT_DIFFERS, Rendered, Renderer

from .render_helpers import conversation_of, tokenizer_with
from .template_families import CHATML_TEMPLATE

TURNS = [("user", "Hi"), ("assistant", "Yes"), ("user", "More?"), ("assistant", "No.")]


@pytest.mark.parametrize(
    ("before", "noted"),
    [
        ("{% if add_generation_prompt %}Be kind.\n{% endif %}", [2, 4]),  # as vLLM's template for Muse Glimmer
        ("{% if messages[-1].role == 'user' %}Be kind.\n{% endif %}", [2, 4]),
        ("{% if messages | length < 3 %}Be kind.\n{% endif %}", [4]),
        ("Be kind.\n", []),
    ],
)
def test_other_text_before_the_last_message_of_a_prompt_is_noted(before: str, noted: list[int]) -> None:
    tokenizer = tokenizer_with(before + CHATML_TEMPLATE)
    renderer = Renderer(tokenizer, "assistant")
    for count in (2, 4) * 3:  # from the cache, too
        [found] = renderer.render_items([conversation_of(*TURNS[:count])])
        assert isinstance(found, Rendered)
        assert found.notes == ((CONTEXT_DIFFERS,) if count in noted else ())
