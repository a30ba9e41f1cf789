"""Generation prompts with other text than the conversation before the last message."""

from __future__ import annotations

import pytest

from whet.data.conversation import Message
from whet.data.render.renderer import CONTEXT_DIFFERS, Rendered, Renderer

from .render_helpers import chatml_with, conversation_of, refusal, render, supervised_text, tokenizer_with
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


REMINDER = CHATML_TEMPLATE.replace(
    "'<|im_end|>'", "(' Be brief.' if m.role == 'user' and loop.revindex <= 2 else '') + '<|im_end|>'"
)


def test_a_reminder_after_the_last_question_alone_leaves_the_last_answer_to_learn() -> None:
    tokenizer = tokenizer_with(REMINDER)
    error = refusal(tokenizer, *TURNS)
    assert error.reason == "no common header"
    assert str(error).endswith("The last answer alone can be learned: data.train_on=last")
    assert "data.train_on" not in str(refusal(chatml_with("assistant\n' }}", "bot\n' }}"), *TURNS))
    assert supervised_text(tokenizer, render(tokenizer, TURNS, "last")) == "No.<|im_end|>"


@pytest.mark.parametrize(
    ("header", "prompt"),
    [(" ", ""), ("\n", ""), ("\n  ", "\n"), ("\n", "\n"), (" ", " ")],
)
def test_whitespace_that_the_template_writes_before_an_answer_is_no_part_of_it(header: str, prompt: str) -> None:
    """As in Mistral's and Vicuna's templates: the next prompt would have it twice."""
    template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role + ({header!r} if m.role == 'assistant' else ' ') }}}}"
        f"{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant' + {prompt!r} }}}}{{% endif %}}"
    )
    renderer = Renderer(tokenizer_with(template), "assistant")
    given = len(renderer.prompt_ids([Message("user", "Hi")]))
    for answer in ("Yes", "the answer"):
        found = render(renderer.tokenizer, [("user", "Hi"), ("assistant", answer)])
        assert renderer.decode_answer(found.ids[given:-1].tolist()) == answer
