"""Rendering: ids are the template's, the mask is exact, and what cannot be exact is refused with the reason."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples import examples
from whet.core.errors import WhetError
from whet.data.conversation import Conversation, Message, Origin, PlainText
from whet.data.render.layout_cache import Layout
from whet.data.render.renderer import Rendered, Renderer
from whet.data.render.template_text import PROBE
from whet.model.load.builtin_models import builtin_folder

from .render_helpers import (
    chatml_with,
    conversation_of,
    expected_loss,
    refusal,
    render,
    smollm2,
    supervised_text,
    tokenizer_with,
    transformers_ids,
)
from .template_families import (
    CHATML,
    CHATML_TEMPLATE,
    FAMILIES,
    GEMMA,
    LLAMA2,
    MISTRAL,
    PHI3,
    QWEN3,
    Family,
    small_tokenizer,
    tokenizer_of,
)

EDGES = (
    "", " ", "\n", "\n\n", "\t", "  two", "two  ", "\u00a0", "\u3000", '"', "'", "\\", "\\n", "user", "assistant",
    "system",
    "<|im_end|>", "<|im_start|>user\nHi<|im_end|>", "<|im_end", "im_end|>", "</s>", "[/INST]", "[INST] ", "<s>",
    "<end_of_turn>", "<|eot_id|>", "<|end|>", "<｜Assistant｜>", "<think>\n", "</think>", "{{ m }}", "{% if x %}", "#}",
    "naïve", "日本語", "😀", "👩‍👩‍👧", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "e\u0301", "\u202eabc", "\x00", "\x1f", "\ufeff", "ÿ", "0", "1234", "none",
)  # fmt: skip
LETTERS = st.characters(exclude_categories=["Cs"]).filter(lambda char: not 0x40000 <= ord(char) < 0xE0000)
TEXT = st.lists(st.sampled_from(EDGES) | st.text(LETTERS, max_size=6), max_size=3).map("".join)
SPOKEN = st.tuples(TEXT, st.sampled_from("zZ7é語😀"), TEXT).map("".join)  # with something that no template strips


@st.composite
def dialogues(draw: st.DrawFn, system: bool = True) -> list[tuple[str, str]]:
    turns = [("system", draw(SPOKEN))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [("user", draw(SPOKEN)), ("assistant", draw(SPOKEN))]
    return turns


# Ids and masks, against an oracle by hand


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_supervised_text_of_each_template_family(family: Family) -> None:
    turns = [("user", "What is it?"), ("assistant", "The answer."), ("user", "More"), ("assistant", "this ")]
    tokenizer = tokenizer_of(family)
    stops = (tokenizer.convert_tokens_to_ids(family.stop),) if family.stop else ()
    learned = "¦".join(text for text, flag in family.pieces(turns) if flag)
    assert supervised_text(tokenizer, render(tokenizer, turns, stop_ids=stops)) == learned


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=examples(80, 15), deadline=None)
@given(data=st.data())
def test_ids_match_transformers_and_the_mask_is_exact(family: Family, data: st.DataObject) -> None:
    turns = data.draw(dialogues(system=family.takes_system))
    tokenizer, pieces = tokenizer_of(family), family.pieces(turns)
    stops = (tokenizer.convert_tokens_to_ids(family.stop),) if family.stop else ()
    rendered = render(tokenizer, turns, stop_ids=stops)
    assert rendered.ids.tolist() == transformers_ids(tokenizer, turns)
    assert rendered.ids.tolist() == tokenizer("".join(text for text, _ in pieces), add_special_tokens=False).input_ids
    assert rendered.loss.tolist() == expected_loss(tokenizer, pieces)
    assert rendered.supervises_end


@settings(max_examples=examples(60, 15), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), TEXT), min_size=1, max_size=4), SPOKEN)
@example([("user", "")], "z")
@example([("user", "assistant")], '"z"')
def test_the_mask_is_exact_for_prompts_of_any_content_and_role(prompts: list[tuple[str, str]], answer: str) -> None:
    turns = [*prompts, ("assistant", answer)]
    tokenizer = tokenizer_of(CHATML)
    rendered = render(tokenizer, turns)
    assert rendered.ids.tolist() == transformers_ids(tokenizer, turns)
    assert rendered.loss.tolist() == expected_loss(tokenizer, CHATML.pieces(turns))


@settings(max_examples=examples(15), deadline=None)
@given(dialogues())
def test_the_mask_is_exact_with_a_real_tokenizer(turns: list[tuple[str, str]]) -> None:
    tokenizer = smollm2()
    if turns[0][0] != "system":  # its template would add a system turn of its own
        turns = [("system", "z"), *turns]
    # It has no tokens at all for some bytes, such as most control characters, and leaves them out.
    turns = [(role, "".join(char for char in content if tokenizer(char).input_ids)) for role, content in turns]
    rendered = render(tokenizer, turns)
    assert rendered.ids.tolist() == transformers_ids(tokenizer, turns)
    assert rendered.loss.tolist() == expected_loss(tokenizer, CHATML.pieces(turns))


def test_a_template_may_add_a_system_turn() -> None:
    tokenizer = smollm2()
    turns = [("user", "Hi"), ("assistant", "Hello")]
    rendered = render(tokenizer, turns)
    assert rendered.ids.tolist() == transformers_ids(tokenizer, turns)
    assert "helpful" in tokenizer.decode(rendered.ids)
    assert supervised_text(tokenizer, rendered) == "Hello<|im_end|>"


def test_a_batch_renders_like_single_conversations() -> None:
    tokenizer = tokenizer_of(CHATML)
    renderer = Renderer(tokenizer, "assistant")
    dialogues_ = [[("user", "x" * n), ("assistant", "y" * (9 - n))] for n in range(1, 9)]
    together = renderer.encode_layouts([renderer.layout(conversation_of(*turns)) for turns in dialogues_])
    for turns, result in zip(dialogues_, together, strict=True):
        assert isinstance(result, Rendered)
        assert result.ids.tolist() == transformers_ids(tokenizer, turns)
        assert supervised_text(tokenizer, result) == f"{turns[1][1]}<|im_end|>"


def test_truncation_and_padding_of_the_tokenizer_are_disabled() -> None:
    tokenizer = small_tokenizer(CHATML_TEMPLATE, CHATML.markers, eos="<|im_end|>")
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    turns = [("user", "Hi"), ("assistant", "Hello there")]
    assert render(tokenizer, turns).ids.tolist() == transformers_ids(tokenizer_of(CHATML), turns)


def test_a_token_that_straddles_the_start_is_supervised() -> None:
    # Words carry the space before them, so " Yes" is one token, and that space is the header's.
    vocabulary = {text: i for i, text in enumerate(["<unk>", "<e>", "▁", "▁u:", "▁Hi", "▁a:", "▁Yes", "s"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["<e>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ' ' + m['role'][0] + ': ' + m['content'] + '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' a: ' }}{% endif %}"
    )
    rendered = render(tokenizer, [("user", "Hi"), ("assistant", "Yes s")])
    pieces = tokenizer.convert_ids_to_tokens(rendered.ids.tolist())
    assert pieces[:3] == ["▁u:", "▁Hi", "<e>"]
    assert dict(zip(pieces, rendered.loss.tolist(), strict=True)) == {
        "▁u:": 0, "▁Hi": 0, "▁a:": 0, "▁Yes": 1, "<unk>": 1, "<e>": 1,
    }  # fmt: skip
    assert Renderer(tokenizer, "assistant").prompt_ids([Message("user", "Hi")]) == rendered.ids[:4].tolist()


def test_markers_inside_the_content_end_nothing() -> None:
    turns = [("user", "a<|im_end|>b"), ("assistant", "c<|im_end|>\n<|im_start|>user\nd")]
    tokenizer = tokenizer_of(CHATML)
    rendered = render(tokenizer, turns)
    assert supervised_text(tokenizer, rendered) == "c<|im_end|>\n<|im_start|>user\nd<|im_end|>"


def test_a_template_may_search_the_content_for_constants() -> None:
    template = CHATML_TEMPLATE.replace("m['content']", "('[' if '</think>' in m['content'] else '(') + m['content']")
    tokenizer = tokenizer_with(template)
    rendered = render(tokenizer, [("user", "Hi"), ("assistant", "so</think>Yes")])
    assert supervised_text(tokenizer, rendered) == "[so</think>Yes<|im_end|>"


def test_the_end_of_turn_is_the_first_stop_id() -> None:
    turns = [("user", "Hi"), ("assistant", "Yes")]
    tokenizer = tokenizer_of(PHI3)
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    assert supervised_text(tokenizer, render(tokenizer, turns, stop_ids=(stop,))) == "Yes<|end|>"
    assert supervised_text(tokenizer, render(tokenizer, turns)) == "Yes<|end|><|endoftext|>"


# What is learned


def test_train_on_last_supervises_the_last_assistant_turn_only() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    tokenizer = tokenizer_of(CHATML)
    assert supervised_text(tokenizer, render(tokenizer, turns, "last")) == "d<|im_end|>"
    assert supervised_text(tokenizer, render(tokenizer, turns)) == "b<|im_end|>¦d<|im_end|>"


def test_train_on_all_supervises_every_token_but_the_first() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "only a question")]
    for conversation in (turns, turns[2:]):
        rendered = render(tokenizer_of(CHATML), conversation, "all")
        assert rendered.ids.tolist() == transformers_ids(tokenizer_of(CHATML), conversation)
        assert rendered.loss.tolist() == [0] + [1] * (len(rendered.ids) - 1)


def test_train_on_all_accepts_any_template() -> None:
    tokenizer = chatml_with("m['content']", "m['content'] | upper")
    assert "HI" in tokenizer.decode(render(tokenizer, [("user", "hi")], "all").ids)


def test_train_on_all_knows_whether_the_text_ends_with_the_eos() -> None:
    turns = [("user", "a"), ("assistant", "b")]
    assert render(tokenizer_of(LLAMA2), turns, "all").supervises_end


# The prompt


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_prompt_ids_are_those_before_the_answer(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    prompt = Renderer(tokenizer, "assistant").prompt_ids([Message("user", "What is it?")])
    rendered = render(tokenizer, [("user", "What is it?"), ("assistant", "this")])
    header = rendered.ids[: rendered.loss.tolist().index(1)].tolist()
    assert prompt[: len(header)] == header
    assert tokenizer.decode(prompt[len(header) :]) in ("", "<think>\n")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_prompt_and_supervised_text_make_up_the_conversation(family: Family) -> None:
    """What the model is trained to say is what it would be asked to say (a prefill of the prompt aside)."""
    tokenizer = tokenizer_of(family)
    renderer = Renderer(tokenizer, "assistant", [tokenizer.convert_tokens_to_ids(family.stop)] if family.stop else [])
    layout = renderer.layout(conversation_of(("user", "What is it?"), ("assistant", "this")))
    start, marker, end = layout.spans[0]
    prompt = renderer.prompt_text([Message("user", "What is it?")])
    assert prompt.removesuffix("<think>\n") == layout.text[:start]
    assert layout.text[start:marker].strip().endswith("this")
    assert layout.text[marker:end] in family.markers


# Dates


def test_a_template_with_a_date_has_todays_or_the_one_it_is_given() -> None:
    tokenizer = tokenizer_with(CHATML_TEMPLATE + "{% if false %}{{ strftime_now('%Y') }}{% endif %}")
    assert Renderer(tokenizer, "assistant").text.chat_template.today == datetime.date.today().isoformat()
    assert Renderer(tokenizer, "assistant", today="2001-02-03").text.chat_template.today == "2001-02-03"


def test_a_template_without_a_date_has_none_in_its_key() -> None:
    assert Renderer(tokenizer_of(CHATML), "assistant").text.chat_template.today is None
    assert Renderer(tokenizer_of(CHATML), "assistant", today="2001-02-03").text.chat_template.today is None


# The end of turn


@pytest.mark.parametrize(
    ("family", "marker"),
    [(CHATML, "<|im_end|>"), (LLAMA2, "</s>"), (GEMMA, "<end_of_turn>"), (QWEN3, "<|im_end|>")],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_the_end_of_turn_is_known_whatever_is_trained_on(family: Family, marker: str, train_on: str) -> None:
    tokenizer = tokenizer_of(family)
    assert Renderer(tokenizer, train_on).end_of_turn() == tokenizer.convert_tokens_to_ids(marker)


def test_a_template_without_an_exact_end_of_turn_has_none() -> None:
    assert Renderer(chatml_with("'<|im_end|>' + ", ""), "all").end_of_turn() is None
    assert Renderer(chatml_with("m['content']", "m['content'] | upper"), "all").end_of_turn() is None


# Refusals


def test_a_template_that_uppercases_is_refused() -> None:
    error = refusal(chatml_with("m['content']", "m['content'] | upper"), ("user", "Hi"), ("assistant", "Yes"))
    assert error.reason == "template rewrites"
    assert "it writes 'I<|im_end|>\\n<|im_start|>assistant\\nYES<|i' instead of 'i<|im_end|>" in str(error)


def test_a_template_that_escapes_is_refused_only_where_it_changes_the_text() -> None:
    tokenizer = chatml_with("m['content']", "m['content'] | replace('&', '&amp;')")
    assert supervised_text(tokenizer, render(tokenizer, [("user", "a"), ("assistant", "b")])) == "b<|im_end|>"
    tokenizer = chatml_with("m['content']", "m['content'] | e")
    assert refusal(tokenizer, ("user", "a"), ("assistant", "b < c")).reason == "template rewrites"


def test_a_template_that_depends_on_the_length_of_words_is_still_exact_or_refused() -> None:
    tokenizer = chatml_with("m['content']", "m['content'] | truncate(5, true, '')")
    assert refusal(tokenizer, ("user", "Hi"), ("assistant", "much too long")).reason == "template drops text"


def test_a_template_that_repeats_content_is_refused() -> None:
    tokenizer = chatml_with("m['content']", "m['content'] + m['content']")
    assert refusal(tokenizer, ("user", "Hi"), ("assistant", "Yes")).reason == "template repeats text"


def test_a_template_that_drops_a_role_is_refused_and_the_message_is_named() -> None:
    template = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + CHATML_TEMPLATE
    error = refusal(tokenizer_with(template), ("user", "Hi"), ("system", "Be kind"), ("assistant", "Yes"))
    assert error.reason == "template drops text"
    assert "message 2 (role 'system')" in str(error)


def test_a_template_that_drops_part_of_an_earlier_answer_is_refused() -> None:
    template = CHATML_TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")
    turns = [("user", "Hi"), ("assistant", "hmm</think>Yes")]
    error = refusal(tokenizer_with(template), *turns)
    assert error.reason == "template drops text"
    assert "message 2 (role 'assistant')" in str(error)


def test_a_template_that_reverses_the_content_is_refused() -> None:
    error = refusal(chatml_with("m['content']", "m['content'][::-1]"), ("user", "Hi"), ("assistant", "Yes"))
    assert error.reason == "template reorders text"


def test_a_template_that_interleaves_messages_is_refused() -> None:
    template = (
        "{{ '<|im_start|>' + messages[1]['content'][0] + messages[0]['content'] + messages[1]['content'][1:] + "
        "'<|im_end|>' }}"
    )
    error = refusal(tokenizer_with(template), ("user", "Hi"), ("assistant", "Yes"))
    assert error.reason == "template reorders text"


def test_a_template_that_reverses_the_conversation_is_refused() -> None:
    template = CHATML_TEMPLATE.replace("in messages", "in messages | reverse")
    assert refusal(tokenizer_with(template), ("user", "Hi"), ("assistant", "Yes")).reason == "no common header"


def test_a_template_without_end_of_turn_is_refused() -> None:
    error = refusal(chatml_with("'<|im_end|>' + ", ""), ("user", "Hi"), ("assistant", "Yes"))
    assert error.reason == "no end of turn"
    assert "message 2" in str(error)


def test_an_end_marker_that_only_closes_the_conversation_ends_no_earlier_turn() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|im_end|>' }}"
    )
    tokenizer = tokenizer_with(template)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert refusal(tokenizer, *turns).reason == "no end of turn"
    assert supervised_text(tokenizer, render(tokenizer, turns, "last")) == "d\n<|im_end|>"


def test_a_template_whose_generation_prompt_is_another_header_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|im_end|>' if m['role'] == 'assistant' else '' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    )
    assert refusal(tokenizer_with(template), ("user", "a"), ("assistant", "b")).reason == "no common header"


def test_a_turn_that_starts_differently_from_its_prompt_is_refused() -> None:
    """Whether the model has to produce `<|b|>`, nobody can say: its prompt ends with `<|a|>`."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ '<|b|>' if m['role'] == 'assistant' else '' }}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<|a|>' }}{% endif %}"
    )
    tokenizer = tokenizer_with(template, ("<|im_start|>", "<|im_end|>", "<|a|>", "<|b|>"))
    assert refusal(tokenizer, ("user", "Hi"), ("assistant", "Yes")).reason == "no common header"


def test_the_error_of_a_template_that_raises_is_reported() -> None:
    error = refusal(tokenizer_of(GEMMA), ("system", "Be kind"), ("user", "Hi"), ("assistant", "Yes"))
    assert error.reason == "template refuses"
    assert "System role not supported" in str(error)


def test_a_template_that_raises_on_two_users_in_a_row_is_refused() -> None:
    error = refusal(tokenizer_of(LLAMA2), ("user", "Hi"), ("user", "Ho"), ("assistant", "Yes"))
    assert error.reason == "template refuses"
    assert "roles must alternate" in str(error)


def test_a_conversation_that_starts_with_the_assistant_has_no_prompt_and_is_refused() -> None:
    assert refusal(tokenizer_of(CHATML), ("assistant", "Yes"), ("user", "Hi")).reason == "starts with the assistant"


@pytest.mark.parametrize("empty", ["", " ", "\n\t ", "\u3000"])
def test_an_empty_assistant_turn_is_refused(empty: str) -> None:
    error = refusal(tokenizer_of(CHATML), ("user", "Hi"), ("assistant", empty))
    assert error.reason == "empty turn"
    assert "message 2" in str(error)


def test_an_empty_turn_may_be_unsupervised() -> None:
    turns = [("user", "Hi"), ("assistant", ""), ("user", "Well?"), ("assistant", "Yes")]
    tokenizer = tokenizer_of(CHATML)
    assert supervised_text(tokenizer, render(tokenizer, turns, "last")) == "Yes<|im_end|>"


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_no_assistant_turn_is_refused(train_on: str) -> None:
    assert refusal(tokenizer_of(CHATML), ("user", "Hi"), train_on=train_on).reason == "no assistant turn"


@pytest.mark.parametrize("code", [0x40000, 0xDFFFF])
def test_unassigned_characters_are_refused(code: int) -> None:
    error = refusal(tokenizer_of(CHATML), ("user", chr(code)), ("assistant", "Yes"))
    assert error.reason == "unassigned characters"


@pytest.mark.parametrize("code", [0x3FFFF, 0xE0000, 0x10FFFF])
def test_code_points_next_to_the_sentinels_are_accepted(code: int) -> None:
    tokenizer = tokenizer_of(CHATML)
    rendered = render(tokenizer, [("user", "Hi"), ("assistant", chr(code))])
    assert supervised_text(tokenizer, rendered) == chr(code) + "<|im_end|>"


def test_more_characters_than_sentinels_are_refused() -> None:
    error = refusal(tokenizer_of(CHATML), ("user", "a" * 0xA0000), ("assistant", "Yes"))
    assert error.reason == "too long to mask"


def test_an_end_marker_that_swallows_whitespace_before_it_is_refused() -> None:
    backend = Tokenizer.from_str(
        tokenizer_of(CHATML).backend_tokenizer.to_str().replace('"lstrip":false', '"lstrip":true')
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML_TEMPLATE
    tokens = tokenizer("a <|im_end|>").input_ids
    assert len(tokens) == 2, "the marker should take the space before it"
    assert refusal(tokenizer, ("user", "Hi"), ("assistant", "Yes ")).reason == "markers are no tokens"


def test_a_marker_that_is_no_token_is_no_marker() -> None:
    tokenizer = small_tokenizer(CHATML_TEMPLATE, ("<|im_start|>",))
    assert refusal(tokenizer, ("user", "Hi"), ("assistant", "Yes")).reason == "no end of turn"


# The tokenizer


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "some/model"

    with pytest.raises(WhetError, match=r"some/model is a slow tokenizer.*tokenizer\.json"):
        Renderer(Slow(), "assistant")  # type: ignore[arg-type]


def test_without_a_template_conversations_are_refused_with_a_remedy_and_plain_text_is_not() -> None:
    renderer = Renderer(small_tokenizer(None, ()), "assistant")
    assert renderer.end_of_turn() is None
    assert isinstance(renderer.render_items([PlainText("hello", Origin("a", 1))])[0], Rendered)
    for refused in (lambda: renderer.render_items([PROBE]), lambda: renderer.prompt_ids(PROBE.messages[:1])):
        with pytest.raises(WhetError, match=r"no chat template.*`template: chatml`"):
            refused()


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(WhetError, match="not valid Jinja"):
        Renderer(small_tokenizer("{% for m in messages %}", ()), "assistant")


def test_a_template_with_generation_tags_is_accepted() -> None:
    template = CHATML_TEMPLATE.replace("{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'").replace(
        "+ '\n' }}{% endfor %}", "+ '\n' }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = tokenizer_with(template)
    assert supervised_text(tokenizer, render(tokenizer, [("user", "a"), ("assistant", "b")])) == "b<|im_end|>"


def test_stop_markers_are_the_eos_and_stop_ids() -> None:
    tokenizer = tokenizer_of(PHI3)
    assert Renderer(tokenizer, "assistant").stop_markers == ["<|endoftext|>"]
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    assert Renderer(tokenizer, "assistant", [stop]).stop_markers == sorted(["<|end|>", "<|endoftext|>"])


def test_ids_and_loss_have_the_types_that_the_store_writes() -> None:
    rendered = render(tokenizer_of(CHATML), [("user", "a"), ("assistant", "b")])
    assert (rendered.ids.dtype, rendered.loss.dtype) == (np.int32, np.uint8)


def test_no_layouts_render_to_nothing() -> None:
    assert Renderer(tokenizer_of(CHATML), "assistant").encode_layouts([]) == []


def test_a_layout_names_start_marker_and_end_of_each_turn() -> None:
    layout = Renderer(tokenizer_of(CHATML), "assistant").layout(conversation_of(("user", "Hi"), ("assistant", "Yes")))
    assert isinstance(layout, Layout)
    [(start, marker, end)] = layout.spans
    assert (layout.text[start:marker], layout.text[marker:end]) == ("Yes", "<|im_end|>")


def test_system_text_before_the_last_user_turn_is_never_supervised() -> None:
    turns = [("system", "Be kind"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    tokenizer = tokenizer_of(MISTRAL)
    assert supervised_text(tokenizer, render(tokenizer, turns)) == " b</s>¦ d</s>"


def test_reasoning_tags_added_to_the_last_turn_are_supervised_there_only() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    tokenizer = tokenizer_of(QWEN3)
    learned = supervised_text(tokenizer, render(tokenizer, turns))
    assert learned == "b<|im_end|>¦<think>\n\n</think>\n\nd<|im_end|>"


def test_templates_that_need_content_parts_get_them_in_prompts_too() -> None:
    """Trained on what a user says, a model must be asked it as well."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
    tokenizer.chat_template = (
        "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{%- for p in m['content'] -%}"
        "{%- if p['type'] == 'text' -%}{{ p['text'] }}{%- endif -%}{%- endfor -%}<|im_end|>\n{% endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{% endif -%}"
    )
    renderer = Renderer(tokenizer, "assistant")
    talk = Conversation((Message("user", "Hello there"), Message("assistant", "Yes")), Origin("x", 1))
    prompt = renderer.prompt_text([Message("user", "Hello there")])
    assert "Hello there" in prompt
    assert renderer.layout(talk).text.startswith(prompt)
