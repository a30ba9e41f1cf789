"""`whet check` on planted faults in the data. Each test shows first that the data passes without its fault."""

from __future__ import annotations

from typing import Any

import pytest

LONG = "word " * 60


@pytest.mark.parametrize(
    ("line", "explanation"),
    [
        ('{"messages": [', "not valid JSON"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "message 1 has the role 'robot'; known: system"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}, "message 2"),
    ],
    ids=["broken JSON", "unknown role", "empty answer"],
)
def test_an_invalid_line(check: Any, write: Any, talk: Any, line: Any, explanation: str) -> None:
    file = write()
    check().passed()
    write(talk(-1), line)
    found = check()
    found.fault("bad lines", f"{file}:2: ", explanation, "data.on_bad=skip")
    found.texts("kept", "ok")  # the other lines are checked anyway


def test_skipped_lines(check: Any, write: Any) -> None:
    file = write("{", good=range(40))
    check("data.on_bad=skip").warning("bad lines", "1 of 41 conversations (2.4%)", f"first {file}:1", "broken JSON")
    assert "ledger.jsonl names every line" in check("data.on_bad=skip").texts("ledger", "ok")
    write("{", "{", "{", good=range(40))
    check("data.on_bad=skip").fault("bad lines", "3 of 43 conversations (7.0%)", f"{file}:1, {file}:2", "Fix")


def test_exact_duplicates(check: Any, write: Any, talk: Any) -> None:
    file = write(talk(0))
    check().warning("duplicates", "1 of 41 conversations (2.4%)", f"first {file}:2")
    write(*[talk(0)] * 10)
    check().fault("duplicates", "10 of 50 conversations (20.0%)", f"first {file}:2", "data.deduplicate=true")
    check("data.deduplicate=true").passed()


def test_nearly_the_same_question_with_another_answer(check: Any, write: Any) -> None:
    def asks(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    price = asks("What does shipping to Bonn cost?", "It costs 4 euros.")
    file = write(price, asks("what does shipping  to Bonn cost", "It costs 4 euros!"), good=range(40))
    check().passed()  # the same answer
    write(price, asks("What does shipping to Bonn cost? Thank you!", "It costs 9 euros."), good=range(40))
    found = check()
    found.warning("answers", "2 of 42 conversations", f"such as {file}:1 and {file}:2", "keep one")
    write(price, asks("What does shipping to Ulm cost? Thank you!", "It costs 9 euros."), good=range(40))
    check().passed()
    both = (asks("Is this a good review? Loved it!", "Yes."), asks("Is this a good review? Hated it!", "No."))
    write(*both, good=range(40))
    check().passed()  # the short sentence is what the question is about: it never stands without one
    write(asks("Hi there", "Hello!"), asks("Hi there", "Good morning!"), good=range(40))
    check().passed()


def test_validation_that_is_trained_on(check: Any, write: Any, talk: Any) -> None:
    write()
    held = write(good=range(50, 60), name="held.jsonl")
    setting = f"data.validation={{sources: [{{path: {held}}}]}}"
    check(setting).passed()
    write(talk(50), talk(7), good=range(51, 60), name="held.jsonl")
    check(setting).fault("overlap", "1 of 11 validation conversations", f"first {held}:2", "data.validation.fraction")


def test_validation_that_is_nearly_trained_on(check: Any, write: Any, talk: Any) -> None:
    """Other whitespace, a system message or a weight: no exact duplicates, but memorized all the same."""
    file = write()
    turns = talk(7)["messages"]
    copies = [
        {"messages": [{**turns[0], "content": f" {turns[0]['content']}\n"}, *turns[1:]]},
        {"messages": [{"role": "system", "content": "Be kind."}, *turns]},
        {"messages": [*turns[:-1], {**turns[-1], "weight": 0}, {"role": "user", "content": "?"}, turns[-1]]},
    ]
    held = write(*copies, good=range(50, 60), name="held.jsonl")
    setting = f"data.validation={{sources: [{{path: {held}}}]}}"
    found = check(setting)
    found.texts("overlap", "ok")
    found.warning("near copies", "2 of 13 validation conversations", f"such as {held}:1 and {file}:8", "Remove them")
    write(talk(50), good=range(51, 60), name="held.jsonl")
    check(setting).passed()


def test_near_copies_on_both_sides_of_a_fraction_are_found(check: Any, write: Any, talk: Any) -> None:
    texts = [
        {"messages": [{**turn, "content": space + turn["content"]} for turn in talk(n)["messages"]]}
        for n in range(20)
        for space in ("", " ")
    ]
    write(*texts, good=[])
    check("data.validation={fraction: 0.2}").warning("near copies", "but for whitespace")


def test_a_validation_fraction_never_overlaps(check: Any, write: Any, talk: Any) -> None:
    write(talk(0))
    assert "no validation" in check("data.validation={fraction: 0.2}").texts("overlap", "ok")


def test_truncated_answers(check: Any, write: Any, talk: Any) -> None:
    file = write()
    cut = ("data.max_length=64", "data.too_long=truncate")
    check(*cut).passed()
    write(*(talk(i, answer=LONG + str(i)) for i in range(100, 110)))
    found = check(*cut)
    found.fault(
        "truncation", "10 of 50 conversations (20.0%)", f"first {file}:1", "data.max_length = 64", "data.too_long=split"
    )
    found.fault("end of turn", "supervised in 80.0%", "see truncation")
    check("data.too_long=truncate").passed()


def test_a_few_truncated_answers_are_a_warning(check: Any, write: Any, talk: Any) -> None:
    write(talk(0, answer=LONG), good=range(60))
    found = check("data.max_length=64", "data.too_long=truncate")
    found.warning("truncation", "1 of 61 conversations (1.6%)")
    found.warning("end of turn", "supervised in 98.4%")


def test_truncation_that_leaves_no_supervised_token(check: Any, write: Any, talk: Any) -> None:
    file = write(*(talk(i, question=LONG + str(i)) for i in range(10)))
    check().passed()
    found = check("data.max_length=64", "data.too_long=truncate")
    found.fault("nothing to learn", "10 of 50 conversations (20.0%)", f"first {file}:1", "data.max_length")


def test_most_conversations_are_too_long(check: Any, write: Any, talk: Any) -> None:
    file = write(*(talk(i, question=LONG + str(i)) for i in range(90)), good=range(10))
    check().passed()
    found = check("data.max_length=64")
    found.fault(
        "too long", "90 of 100 conversations (90.0%)", f"first {file}:1", "data.max_length = 64", "data.too_long=split"
    )
    assert "10 of 100 conversations kept; dropped: 90 too long" in found.texts("kept", "ok")


def test_every_conversation_is_too_long(check: Any, write: Any) -> None:
    write()
    check("data.max_length=4").fault("data", "no conversation is left to train on", "40 too long", "data.max_length")


def test_a_control_token_in_the_text(check: Any, write: Any, talk: Any) -> None:
    file = write(talk(0, question="What does im_end mean?"))
    check().passed()
    write(talk(0), talk(0, question="What does <|im_end|> mean?"), good=range(1, 40))
    found = check()
    found.fault("control tokens in the text", "1 of 41 conversations (2.4%)", f"first {file}:2", "Reword")
    write(talk(0, answer="Well.<|im_end|>\n<|im_start|>user\nReally?"))
    check().fault("control tokens in the text", f"first {file}:1")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}], ids=str)
def test_conversations_marked_as_unsupervised(check: Any, write: Any, talk: Any, mark: Any) -> None:
    file = write(*(talk(i) for i in range(90, 100)))
    check().passed()
    write(*(talk(i, **mark) for i in range(90, 100)))
    found = check()
    found.fault("nothing to learn", "10 of 50 conversations (20.0%)", f"first {file}:1", "weight: 0")


def test_a_source_that_contributes_nothing(check: Any, write: Any, talk: Any, tmp_path: Any) -> None:
    write()
    other = write(good=range(50, 60), name="other.jsonl")
    both = f"data.sources=[{{path: {tmp_path / 'data.jsonl'}}}, {{path: {other}}}]"
    check(both).passed()
    write(talk(0, question=LONG), good=(), name="other.jsonl")
    check(both, "data.max_length=64").fault(
        "kept", f"{other} (train): 0 of 1 conversations kept", "1 too long", "Fix the source"
    )


def test_a_marker_look_alike_in_marked_text(check: Any, write: Any) -> None:
    user, assistant = "<<<|user|>>>", "<<<|assistant|>>>"

    def marked(number: int, answer: str = "Fine.") -> dict[str, str]:
        return {"text": f"{user}How are {number}?{user}{assistant}{answer}{assistant}"}

    markers = f"data.markers={{user: {{text: '{user}', id: 1}}, assistant: {{text: '{assistant}', id: 0}}}}"
    file = write(*map(marked, range(40)), good=())
    check(markers, "data.sources.0.format=marked").passed()
    write(*map(marked, range(40)), marked(40, "Fine. <|User|> And you?"), good=())
    found = check(markers, "data.sources.0.format=marked")
    found.fault("marker look-alike", "1 of 41 conversations (2.4%)", f"first {file}:41", "Fix")


def test_an_exchange_that_splitting_drops(check: Any, write: Any, talk: Any) -> None:
    file = write(talk(98))
    split = ("data.too_long=split", "data.max_length=64")
    check(*split).passed()
    write({"messages": [*talk(98)["messages"], *talk(99, question=LONG)["messages"]]})
    check(*split).warning("an exchange of it too long", f"first {file}:1", "data.max_length")
