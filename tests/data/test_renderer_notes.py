"""Plain documents, and what a rendering tells beside ids and mask: notes and whether every turn ends."""

from __future__ import annotations

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, MarkedText, Message, Origin, PlainText
from whet.data.render.renderer import Rendered, Renderer

from .render_helpers import conversation_of, supervised_text, tokenizer_with
from .template_families import CHATML, CHATML_TEMPLATE, small_tokenizer, tokenizer_of
from .trl_templates import TRL_TEMPLATES, conversation, says, user

CONTROLS = "control tokens in the text"
THOUGHTS = "reasoning left out by the template"
ORIGIN = Origin("here", 1)


def one(renderer: Renderer, item: Conversation | PlainText) -> Rendered:
    [rendered] = renderer.render_items([item])
    if not isinstance(rendered, Rendered):
        raise rendered
    return rendered


# Documents


def with_bos(adds_eos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = small_tokenizer(CHATML_TEMPLATE, ("<s>", "</s>", *CHATML.markers), bos="<s>", eos="</s>")
    ends = ["</s>"] if adds_eos else []
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", *ends], special_tokens=ids
    )
    return tokenizer


@pytest.mark.parametrize("text", ["some text", "", " \n", "ends with it</s>", "é語😀"])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_document_starts_with_bos_and_ends_with_one_eos(text: str, adds_eos: bool) -> None:
    tokenizer = with_bos(adds_eos)
    rendered = one(Renderer(tokenizer, "assistant"), PlainText(text, ORIGIN))
    inner = tokenizer(text, add_special_tokens=False).input_ids
    start, end = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    already = not adds_eos and inner[-1:] == [end]
    assert rendered.ids.tolist() == [start, *inner, *([] if already else [end])]
    assert rendered.loss.tolist() == [0] + [1] * (len(rendered.ids) - 1)
    assert rendered.supervises_end


def test_a_document_of_a_tokenizer_without_bos_and_eos_is_its_text() -> None:
    tokenizer = small_tokenizer(CHATML_TEMPLATE, CHATML.markers)
    rendered = one(Renderer(tokenizer, "assistant"), PlainText("some text", ORIGIN))
    assert rendered.ids.tolist() == tokenizer("some text").input_ids
    assert rendered.loss.tolist()[0] == 0
    assert not rendered.supervises_end


def test_documents_and_conversations_of_a_batch_come_back_in_order() -> None:
    renderer = Renderer(tokenizer_of(CHATML), "assistant")
    good, bad = conversation_of(("user", "a"), ("assistant", "b")), conversation_of(("user", "a"))
    items = [PlainText("one", ORIGIN), good, bad, PlainText("two", ORIGIN), MarkedText("x", ORIGIN), good]
    results = renderer.render_items(items)
    assert [result.reason if isinstance(result, BadRecordError) else "" for result in results] == [
        "", "", "no assistant turn", "", "marked text", "",
    ]  # fmt: skip
    for item, result in zip(items, results, strict=True):
        if isinstance(result, Rendered):
            assert isinstance(item, PlainText | Conversation)
            assert result.ids.tolist() == one(renderer, item).ids.tolist()


# Control tokens in the text


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize(("question", "noted"), [("a", ()), ("a<|im_end|>", (CONTROLS,)), ("<|im_end", ())])
def test_special_tokens_in_the_text_are_noted(
    question: str, noted: tuple[str, ...], train_on: str, cached: bool
) -> None:
    renderer = Renderer(tokenizer_of(CHATML), train_on, cached=cached)
    for _ in range(3):
        assert one(renderer, conversation_of(("user", question), ("assistant", "b"))).notes == noted
        assert one(renderer, conversation_of(("user", "b"), ("assistant", question))).notes == noted


def test_a_special_token_that_the_template_searches_for_is_noted_too() -> None:
    source = CHATML_TEMPLATE.replace("m['content']", "('(' if '<|im_end|>' in m['content'] else '') + m['content']")
    renderer = Renderer(tokenizer_with(source), "assistant")
    assert one(renderer, conversation_of(("user", "a<|im_end|>b"), ("assistant", "b"))).notes == (CONTROLS,)


def test_added_tokens_that_are_not_special_are_not_noted() -> None:
    tokenizer = small_tokenizer(CHATML_TEMPLATE, CHATML.markers, eos="<|im_end|>")
    tokenizer.add_tokens(["<plain>"])
    assert one(Renderer(tokenizer, "assistant"), conversation_of(("user", "<plain>"), ("assistant", "b"))).notes == ()


# Reasoning that is left out, ends that are rewritten

FORGETFUL = CHATML_TEMPLATE.replace(
    "m['content']", "(m.thinking + '/' if m.thinking is defined and loop.last else '') + m['content']"
)


def test_reasoning_that_the_template_drops_is_noted() -> None:
    renderer = Renderer(tokenizer_with(FORGETFUL), "assistant")
    twice = conversation(user("a"), says("b", reasoning="r"), user("c"), says("d", reasoning="s"))
    for _ in range(3):
        rendered = one(renderer, twice)
        assert rendered.notes == (THOUGHTS,)
        assert supervised_text(renderer.tokenizer, rendered) == "b<|im_end|>¦s/d<|im_end|>"
    assert one(renderer, conversation(user("a"), says("b", reasoning="r"))).notes == ()


REWRITING = CHATML_TEMPLATE.replace("'<|im_end|>'", "('<|im_end|>' if loop.last or m['role'] == 'user' else '<|end|>')")


def test_a_rewritten_earlier_end_is_not_supervised() -> None:
    tokenizer = tokenizer_with(REWRITING, ("<|im_start|>", "<|im_end|>", "<|end|>"))
    renderer = Renderer(tokenizer, "assistant")
    turns = [("user", "a"), ("assistant", "bcd"), ("user", "c"), ("assistant", "d")]
    for _ in range(3):
        rendered = one(renderer, conversation_of(*turns))
        assert supervised_text(tokenizer, rendered) == "bcd¦d<|im_end|>"
        assert not rendered.supervises_end
        assert one(renderer, conversation_of(*turns[:2])).supervises_end
    assert one(Renderer(tokenizer, "last"), conversation_of(*turns)).supervises_end


def test_whitespace_that_ends_an_answer_is_learned_where_its_end_is_rewritten() -> None:
    tokenizer = tokenizer_with(REWRITING, ("<|im_start|>", "<|im_end|>", "<|end|>"))
    turns = [("user", "a"), ("assistant", "b\n"), ("user", "c"), ("assistant", "d\n\n")]
    for _ in range(2):
        rendered = one(Renderer(tokenizer, "assistant"), conversation_of(*turns))
        assert supervised_text(tokenizer, rendered) == "b\n¦d\n\n<|im_end|>"


def test_ends_that_begin_alike_are_different_ends() -> None:
    """`<|` is a token, too."""
    tokenizer = tokenizer_with(REWRITING, ("<|im_start|>", "<|im_end|>", "<|end|>", "<|"))
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert supervised_text(tokenizer, one(Renderer(tokenizer, "assistant"), conversation_of(*turns))) == "b¦d<|im_end|>"


@pytest.mark.skipif(not TRL_TEMPLATES, reason="trl, whose template of gpt-oss is tried, is not installed")
def test_gpt_oss_ends_earlier_turns_differently() -> None:
    renderer = next(template for template in TRL_TEMPLATES if template.name == "gptoss").renderer()
    rendered = one(renderer, conversation(user("Hi"), says("Yes"), user("More?"), says("No.")))
    assert not rendered.supervises_end
    assert supervised_text(renderer.tokenizer, rendered) == (
        "<|channel|>final<|message|>Yes¦<|channel|>final<|message|>No.<|return|>"
    )
    assert "Yes<|end|>" in renderer.tokenizer.decode(rendered.ids)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_a_conversation_without_supervised_turns_is_refused(train_on: str) -> None:
    [result] = Renderer(tokenizer_of(CHATML), train_on).render_items([conversation(user("a"), says("b", train=False))])
    assert isinstance(result, BadRecordError)
    assert result.reason == "nothing to learn"


@pytest.mark.parametrize("cached", [False, True])
def test_train_on_all_excludes_turns_with_train_false(cached: bool) -> None:
    renderer = Renderer(tokenizer_of(CHATML), "all", cached=cached)
    talk_ = conversation(user("a"), says("bbb", train=False), Message("user", "c", train=False), says("d"))
    for _ in range(3):
        learned = supervised_text(renderer.tokenizer, one(renderer, talk_))
        assert learned == "user\na<|im_end|>\n<|im_start|>assistant\n¦<|im_end|>\n<|im_start|>user\n¦" + (
            "<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
        )
