"""A token that straddles the start of an answer: every word of an answer is supervised, whatever its prompt ends with,
and the prompt's ids end where the supervised ones begin."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from examples import examples
from whet.core.errors import BadRecordError
from whet.data.conversation import Conversation, Message, Origin
from whet.data.render.renderer import PROMPT_DIFFERS, Rendered, Renderer
from whet.preflight.store_comparison import find_straddling_tokens

from .render_helpers import render, supervised_text
from .template_families import small_tokenizer

MARKERS = ["<|im_start|>", "<|im_end|>"]
CORPUS = [
    'user assistant the answer and so an answering answers, Yes No  1 2  the\tThe\tan\nThe\n\nYes \n It: is a "the' * 3
]
OPENINGS = (
    "Assistant: ", "Assistant:  ", "Assistant:\t", "Assistant:\n", "Assistant:\n\n", "Assistant: \n", "answer", "an",
    '"', "<|im_start|> ", "<|im_start|>\n", "<|im_start|>assistant\n", "<|im_start|>", " ",
)  # fmt: skip
OPEN_WORDS = ("answer", "an", '"')  # an answer may continue the word, so there is no place where every prompt ends
WORDS = st.sampled_from(
    ["the", "The answer", "Yes", "No", "s", "ing", "1", "42", "é", "語", "😀", "\n", "\n\n", " ", "  ", "\t", "an", '"']
)
TEXT = st.lists(WORDS, min_size=1, max_size=4).map("".join).filter(str.strip)


@cache
def _backend(kind: str) -> str:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "sentencepiece":  # as Llama 2's: words carry the space before them, also the first of a text
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        words = itertools.chain.from_iterable(pre_tokenizers.Metaspace().pre_tokenize_str(text) for text in CORPUS)
        backend.train_from_iterator([word.replace("▁", " ").lstrip() for word, _ in words], trainer)
        return json.dumps(json.loads(backend.to_str()) | {"added_tokens": []})  # bytes are ordinary tokens
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    if kind == "llama3":  # a word carries any character before it but a line break
        pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        splits = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    else:  # as SmolLM2's
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return str(backend.to_str())


KINDS = ("smollm2", "llama3", "sentencepiece")


@cache
def tokenizer_for(kind: str, opening: str) -> PreTrainedTokenizerFast:
    """Questions and answers in plain text; `opening` is the generation prompt."""
    backend = Tokenizer.from_str(_backend(kind))
    backend.add_special_tokens(MARKERS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    opening = opening.replace("\n", "\\n").replace("\t", "\\t")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '" + opening + "' + m['content'] + '<|im_end|>' }}"
        "{% else %}{{ 'Q: ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + opening + "' }}{% endif %}"
    )
    return tokenizer


def conversation_of(*texts: str) -> Conversation:
    roles = itertools.cycle(["user", "assistant"])
    return Conversation(tuple(Message(role, text) for role, text in zip(roles, texts, strict=False)), Origin("a", 1))


def rendered_by(renderer: Renderer, conversation: Conversation) -> Rendered:
    found = renderer.render_items([conversation])[0]
    assert not isinstance(found, BadRecordError)
    return found


@cache
def renderer_for(kind: str, opening: str, cached: bool) -> Renderer:
    renderer = Renderer(tokenizer_for(kind, opening), "assistant", cached=cached)
    rendered_by(renderer, conversation_of("Hi", "Yes"))
    return renderer


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(400, 25), deadline=None)
@given(st.sampled_from(OPENINGS), TEXT, TEXT, st.lists(TEXT, max_size=2).filter(lambda texts: len(texts) != 1))
@example("Assistant: ", "Hi", "Yes", [])
@example("Assistant: ", "Hi", "42", [])
@example("Assistant: ", "Hi", "😀", ["Yes", "No"])
def test_every_character_of_an_answer_is_supervised(
    kind: str, opening: str, question: str, answer: str, more: list[str]
) -> None:
    conversation = conversation_of(question, answer, *more)
    renderer = renderer_for(kind, opening, cached=False)
    rendered = rendered_by(renderer, conversation)
    cached = rendered_by(renderer_for(kind, opening, cached=True), conversation)
    assert rendered.ids.tolist() == cached.ids.tolist() == renderer.text.reference_ids(conversation)
    assert rendered.loss.tolist() == cached.loss.tolist()

    text, at = "", 0
    answers, given_up_to = [], []
    for message in conversation.messages:
        text += opening if message.role == "assistant" else "Q: "
        if message.role == "assistant":
            whitespace = len(message.content) - len(message.content.lstrip())
            answers.append((len(text) + whitespace, len(text) + len(message.content) + len("<|im_end|>")))
            given_up_to.append(len(text) - (0 if whitespace else len(opening) - len(opening.rstrip())))
        text += message.content + ("<|im_end|>" if message.role == "assistant" else "\n")
    encoding = renderer.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    is_answer = [any(start <= i < end for start, end in answers) for i in range(len(text))]
    may_be_learned = [
        any(given <= i < end for given, (_, end) in zip(given_up_to, answers, strict=True)) for i in range(len(text))
    ]
    for (_, end), learned in zip(encoding.offsets, rendered.loss.tolist(), strict=True):
        start, at = min(at, end), max(at, end)
        assert learned or not any(is_answer[start:end])
        assert not learned or start == end or any(may_be_learned[start:end])

    # The ids of a prompt are those before its answer.
    prompt = renderer.prompt_ids([Message("user", question)])
    first = rendered.loss.tolist().index(1)
    if not answer[0].isspace() and opening not in OPEN_WORDS:
        assert prompt == rendered.ids[:first].tolist()
        end = rendered.ids.tolist().index(renderer.end_of_turn())
        assert renderer.decode_answer(rendered.ids[first:end].tolist()) == answer


@pytest.mark.parametrize(
    ("opening", "answer", "found"),
    [
        ("Assistant: ", "the", ([" "], [" the"], True)),
        ("Assistant: ", "42", None),  # the prompt has the same tokens by itself
        ("Assistant:\n", "the", None),
        (" answer", "ing", ([" answer"], [" answering"], False)),
        ("Assistant: ", "\nthe", ([" "], [" \n"], False)),
    ],
)
def test_tokens_shared_by_prompt_and_answer(
    opening: str, answer: str, found: tuple[list[str], list[str], bool] | None
) -> None:
    renderer = renderer_for("llama3", opening, cached=False)
    conversation = conversation_of("Hi", answer)
    tokens = [each[1:] for each in find_straddling_tokens(renderer, conversation)]
    assert tokens == ([] if found is None else [found])


def test_a_token_of_whitespace_alone_is_not_supervised() -> None:
    tokenizer = tokenizer_for("llama3", "Assistant: ")
    found = render(tokenizer, [("user", "Hi"), ("assistant", "\nthe")])
    assert supervised_text(tokenizer, found) == "the<|im_end|>"


def test_a_prompt_that_ends_in_a_space_leaves_it_to_the_answer() -> None:
    for kind in KINDS:
        tokenizer = tokenizer_for(kind, "Assistant: ")
        for answer in ("the", "Yes", "42"):
            found = render(tokenizer, [("user", "Hi"), ("assistant", answer)])
            assert supervised_text(tokenizer, found).lstrip(" ") == f"{answer}<|im_end|>"
            assert tokenizer.decode(found.ids[found.loss == 0]).endswith("Assistant:")


@pytest.mark.parametrize(
    ("prompt", "header", "answer", "differs"),
    [
        ("<think>\n", "<think></think>", "Yes", True),  # as Nemotron 3 without reasoning
        ("<think>\n", "<think>\n\n</think>\n\n", "Yes", True),  # as Qwen3.5: one token for both line breaks
        ("<think>\n", "<think>\n", "Hm\n</think>\n\nYes", False),
        ("\n\n", "\n\n", "Yes", False),
        ("\n\n", "\n\n", " Yes", True),  # GPT-2's pattern joins line breaks before a space, and before a marker
        ("\n\n", "\n\n", "<tool_call>", True),
        ("\n", "\n", "<tool_call>", False),
        ("\n", "\n", "\n\nYes", True),
    ],
)
def test_whitespace_with_other_tokens_than_in_the_prompt_is_noted(
    prompt: str, header: str, answer: str, differs: bool
) -> None:
    prompt, header = (f"{{{{ {'<|im_start|>assistant' + text!r} }}}}" for text in (prompt, header))
    template = (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{header}{{% endif %}}{{{{ m.content }}}}<|im_end|>"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )
    tokenizer = small_tokenizer(template, [*MARKERS, "<tool_call>", "<think>", "</think>"], eos="<|im_end|>")
    renderer = Renderer(tokenizer, "assistant")
    for _ in range(3):  # from the cache, too
        assert (PROMPT_DIFFERS in rendered_by(renderer, conversation_of("Hi", answer)).notes) == differs


def test_whitespace_that_a_marker_swallows_has_no_tokens_of_its_own() -> None:
    template = "{% for m in messages %}<|im_start|> {{ m.content }}<|im_end|>{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    renderer = Renderer(small_tokenizer(template, MARKERS, eos="<|im_end|>", strips_markers=True), "assistant")
    for _ in range(3):
        assert rendered_by(renderer, conversation_of("Hi", "Yes")).notes == ()
