"""Every scorer on right, wrong and malformed answers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from whet.core.errors import WhetError
from whet.data.conversation import Message
from whet.inference.calculator_tool import parse_calculator_call
from whet.inference.config import TaskConfig
from whet.inference.tasks import scorers
from whet.inference.tasks.scorers import extract_code_block, last_number, make_scorer
from whet.inference.tasks.task import Example


def example(*answers: str, **extra: Any) -> Example:
    return Example((Message("user", "?"),), answers, "my.jsonl:3", extra=extra)


def points(scorer: str, answer: str, right: Example, **options: Any) -> float:
    if scorer == "json-schema":
        pytest.importorskip("jsonschema")
    config = TaskConfig(path="my.jsonl", scorer=scorer, **options)  # type: ignore[arg-type]
    return make_scorer(config, scorer).score(answer, right)


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "score"),
    [
        ("exact", " Paris\n", "Paris", 1),
        ("exact", "paris", "Paris", 0),
        ("exact", "Paris.", "Paris", 0),
        ("number", "48/2 = 24, so\n#### 24", "… #### 24", 1),
        ("number", "It is $1,234.00 in all.", "1234", 1),
        ("number", "#### 24 and then 25", "24", 1),
        ("number", "−3", "-3", 1),
        ("number", "24", "25", 0),
        ("number", "no idea", "25", 0),
        ("json", '{"vip": 1}', '{"vip": true}', 0),
        ("json", '[{"vip": true, "n": 1.0}]', '[{"n": 1, "vip": true}]', 1),
        ("contains", "The answer is PARIS, I think", "Paris", 1),
        ("contains", "Par is", "Paris", 0),
        ("regex", "on 2024-05-01", r"\d{4}-\d\d-\d\d", 1),
        ("regex", "on May 1", r"\d{4}-\d\d-\d\d", 0),
        ("json", '{"b": 2, "a": 1.0}', '{"a": 1, "b": 2}', 1),
        ("json", '```json\n{"a": 1}\n```', '{"a": 1}', 1),
        ("json", '{"a": 1} and more', '{"a": 1}', 0),
        ("json", "[" * 100_000, "[1]", 0),
        ("json", "", "null", 0),
    ],
)
def test_answers(scorer: str, answer: str, right: str, score: int) -> None:
    assert points(scorer, answer, example(right)) == score


@pytest.mark.parametrize("scorer", ["exact", "number", "contains", "json"])
def test_any_of_several_correct_answers_counts(scorer: str) -> None:
    assert points(scorer, "2", example("1", "2")) == 1
    assert points(scorer, "3", example("1", "2")) == 0


def test_a_pattern_finds_the_answer_in_the_answer() -> None:
    how = {"pattern": r"Answer: *(\w+)"}
    assert points("regex", "Answer: red? No.\nAnswer: blue", example("blue"), **how) == 1
    assert points("regex", "Answer: red", example("blue"), **how) == 0
    assert points("regex", "blue", example("blue"), **how) == 0
    assert points("regex", "it is 12 or 13", example("13"), pattern=r"\d+") == 1


def test_an_invalid_pattern_is_an_error() -> None:
    with pytest.raises(WhetError, match=re.escape("eval.tasks: my: pattern '(' is not a regular expression")):
        points("regex", "x", example("x"), pattern="(")
    with pytest.raises(WhetError, match=r"my\.jsonl:3: the answer '\(' is not a regular expression"):
        points("regex", "x", example("("))


def test_a_pattern_with_exponential_backtracking_times_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scorers, "_PATTERN_TIMEOUT_S", 0.05)
    endless = "a" * 40 + "!"
    assert points("regex", endless, example("yes"), pattern=r"(a|aa)+(b|bb)+$|(a|a?)+$") == 0
    assert points("regex", endless, example(r"(a|aa)+(b|bb)+$", "!$")) == 1  # the next correct answer still counts
    assert capsys.readouterr().err.count("my.jsonl:3: matching pattern") == 2


@pytest.mark.parametrize(("text", "number"), [
    ("a 7. b", "7"), ("1,000,000", "1000000"), (".5", "0.5"), ("x", None), ("10-5", "5"), ("(1+2)-5", "5"),
    ("it is -5", "-5"), ("-$5.20", "-5.2"), ("$-5", "-5"), ("#### −€1,000", "-1000"), ("B-52", "52"),
])  # fmt: skip
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else format(found.normalize(), "f")) == number


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


def test_json_by_a_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for answer, score in (('{"n": 1}', 1), ('{"n": "1"}', 0), ("{}", 0), ("n = 1", 0)):
        assert points("json-schema", answer, example("-", schema=SCHEMA)) == score
        assert points("json-schema", answer, example("-"), schema_file=str(file)) == score
    with pytest.raises(WhetError, match=r"my\.jsonl:3: no JSON schema"):
        points("json-schema", "{}", example("-"))
    with pytest.raises(WhetError, match=r"my\.jsonl:3: invalid JSON schema"):
        points("json-schema", "{}", example("-", schema={"type": "lizard"}))


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_overlap_with_translations(name: str) -> None:
    pytest.importorskip("sacrebleu")
    scorer = make_scorer(TaskConfig(path="my.jsonl"), name)
    right = example("the cat sat on the mat today", "a cat was on the mat today")
    scores = [scorer.score(text, right) for text in ("the cat sat on the mat today", "the cat sat on a rug", "xyz", "")]
    assert scores[0] == pytest.approx(1)
    assert scores[0] > scores[1] > scores[2] >= scores[3] == 0
    assert scorer.graded
    assert scorer.corpus_score
    assert scorer.corpus_score(["the cat sat on the mat today", "x"], [right, example("x")]) == pytest.approx(1)


def test_overlap_with_summaries() -> None:
    pytest.importorskip("rouge_score")
    assert points("rouge", "the cat sat", example("dogs run", "the cat sat")) == 1
    assert points("rouge", "the cat ran", example("the cat sat")) == pytest.approx(2 / 3)
    assert points("rouge", "", example("the cat sat")) == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, scorer in (
        ("jsonschema", "json-schema"),
        ("sacrebleu.metrics", "bleu"),
        ("rouge_score.rouge_scorer", "rouge"),
    ):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(WhetError, match=rf"scorer {scorer} needs packages.*pip install 'whet\[eval\]'"):
            make_scorer(TaskConfig(path="my.jsonl"), scorer)


@pytest.mark.parametrize("scorer", ["number", "json"])
def test_a_correct_answer_that_the_scorer_cannot_use_is_an_error(scorer: str) -> None:
    """Otherwise every model would score 0."""
    with pytest.raises(WhetError, match=re.escape("my.jsonl:3")):
        points(scorer, "4", example("Paris is it"))


# Schemas, patterns and answers that never end


def refuse_network(*_: Any) -> None:
    raise AssertionError("the network was asked")


@pytest.mark.parametrize("answer", ["1", "", "{}"])
@pytest.mark.parametrize("reference", ["https://example.org/other.json", "file:///etc/hostname", "#/nowhere", "#name"])
def test_a_reference_out_of_the_schema_is_named_and_not_fetched(
    reference: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", refuse_network)
    monkeypatch.setattr("urllib.request.urlopen", refuse_network)
    for schema in ({"$ref": reference}, {"properties": {"a": {"items": {"$ref": reference}}}}):
        with pytest.raises(WhetError, match=rf"my\.jsonl:3: .*{re.escape(reference)}.*\$defs"):
            points("json-schema", answer, example("-", schema=schema))


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"$id": "https://example.org/a", "$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}, "1"),
        ({"$defs": {"n": {"$id": "https://example.org/n", "type": "integer"}}, "$ref": "https://example.org/n"}, "1"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, '{"type": "integer"}'),
        ({"properties": {"$ref": {"type": "integer"}}}, '{"$ref": 1}'),
        ({"items": {"$ref": "#"}, "type": "array"}, "[[], [[]]]"),
    ],
    ids=["$defs", "$id inside", "a metaschema", "a property of that name", "itself"],
)
def test_references_within_the_schema_are_followed(schema: Any, answer: str) -> None:
    assert points("json-schema", answer, example("-", schema=schema)) == 1
    assert points("json-schema", '"no"', example("-", schema={**schema, "not": {"type": "string"}})) == 0


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"pattern": "^(a+)+$"}, '"' + "a" * 60 + '!"'),
        ({"patternProperties": {"^(a|a)*$": {}}}, '{"' + "a" * 60 + '!": 1}'),
        ({"$ref": "#"}, "1"),
        ({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, "1"),
        ({"anyOf": [{"items": {"$ref": "#"}, "type": "array"}] * 8}, "[" * 40 + "1" + "]" * 40),
        ({"multipleOf": 0.1}, "1" + "0" * 400),
        ({"multipleOf": 0.1}, "1e400"),
        ({"type": "number"}, "NaN"),
        ({"type": "number"}, "-Infinity"),
        ({"type": "integer"}, "1" * 5000),
        ({"items": {"$ref": "#"}, "type": "array"}, "[" * 600 + "]" * 600),
        ({"type": "array"}, "[" * 100_000 + "]" * 100_000),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_has_no_end_is_a_wrong_answer(schema: Any, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "_SCHEMA_TIMEOUT_S", 0.1)
    began = time.thread_time()
    assert points("json-schema", answer, example("-", schema=schema)) == 0
    assert time.thread_time() - began < 10


@pytest.mark.parametrize(
    "schema", [{"pattern": "("}, {"$schema": []}, {"type": 7}, {"$ref": 7}, 7, "x", [], {"minimum": "a"}], ids=repr
)
def test_a_broken_schema_is_named(schema: Any) -> None:
    with pytest.raises(WhetError, match=r"my\.jsonl:3: .*JSON schema"):
        points("json-schema", "1", example("-", schema=schema))


def test_a_schema_nested_too_deeply_is_named(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"not": ' * 50_000 + "{}" + "}" * 50_000)
    with pytest.raises(WhetError, match=r"schema_file .*schema\.json cannot be read"):
        points("json-schema", "1", example("-"), schema_file=str(file))
    schema: Any = {}
    for _ in range(400):
        schema = {"not": schema}
    with pytest.raises(WhetError, match=r"my\.jsonl:3: the JSON schema cannot be used.*Simplify it"):
        points("json-schema", "1", example("-", schema=schema))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_json_nested_deeply_is_compared(opening: str, closing: str) -> None:
    """As deep as every Python parses: 3.11 to 1,000 levels with the calls around it, 3.12.1 to 1,500."""

    def deep(value: str) -> str:
        return opening * 700 + value + closing * 700

    assert points("json", deep("1"), example(deep("1.0"))) == 1
    assert points("json", deep("2"), example(deep("1"))) == 0
    assert points("json", deep("true"), example(deep("1"))) == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```py\na\n```", "a"),
        ("x ```\na\n\n  ``` y", "a\n"),
        ("```json\n  {} ```", "  {}"),
        ("```\n```", ""),
        ("``` not a block", "``` not a block"),
        ("```\nno end", "```\nno end"),
        ("```c++ \n1\n```\n```\n2\n```", "1"),
    ],
)
def test_code_blocks(text: str, code: str) -> None:
    assert extract_code_block(text) == code


def test_a_code_block_of_spaces_takes_no_time() -> None:
    began = time.thread_time()
    assert extract_code_block("```\n" + " " * 200_000) == "```"
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("text", ['{"a":' * 5000, "{" * 100_000, '{"name": "calculator", "arguments": ' + "[" * 5000])
def test_a_call_that_never_ends_is_no_call(text: str) -> None:
    began = time.thread_time()
    assert parse_calculator_call(text) is None
    assert time.thread_time() - began < 2
