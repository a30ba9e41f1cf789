"""Judging an answer in text: exact, by a number, by what it contains, as JSON, by overlap with the right one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

import regex

from whet.core.console import warn
from whet.core.errors import WhetError
from whet.infer.config import TaskConfig
from whet.infer.tasks.task import Example, Scorer

_NUMBER = regex.compile(r"((?<![\w)])[-−+])?[$€£]?(\d[\d,]*(?:\.\d+)?|\.\d+)")
_FENCED = regex.compile(r"```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```", regex.DOTALL)
_SECONDS = 2.0
"""For a pattern of the user's and one answer: some try more ways to fit a text than there is time for."""


def make_scorer(config: TaskConfig, name: str) -> Scorer:
    """The scorer of a name, with what the task says about it; a WhetError where a package or setting is missing."""
    return _MADE[name](config)


def exact(answer: str, example: Example) -> float:
    """It is the right answer, spaces around it aside."""
    return float(answer.strip() in (each.strip() for each in example.answers))


def number(answer: str, example: Example) -> float:
    """The number after the last ####, or else the last one in the answer, is the right one."""
    said, right = last_number(answer), [last_number(each) for each in example.answers]
    if None in right:
        raise WhetError(f"{example.place}: there is no number in the right answer. Use another scorer, such as exact")
    return float(said is not None and said in right)


def last_number(text: str) -> Decimal | None:
    """Of `… #### 1,234.` it is 1234; of text without a mark the last number there is. A sign stands before the number
    or its currency; in 10-5 there is none."""
    _, mark, after = text.rpartition("####")
    found = _NUMBER.search(after) if mark else None
    found = found or next(iter([*_NUMBER.finditer(text)][::-1]), None)
    try:
        return Decimal(f"{found[1] or ''}{found[2]}".replace(",", "").replace("−", "-")) if found else None
    except InvalidOperation:
        return None


def contains(answer: str, example: Example) -> float:
    """A right answer stands somewhere in it; upper and lower case are the same."""
    said = answer.casefold()
    return float(any(each.strip().casefold() in said for each in example.answers))


def fenced(text: str) -> str:
    """What stands in the first ``` block, or the whole where there is none."""
    found = _FENCED.search(text)
    return found.group(1) if found else text.strip()


def _regex(config: TaskConfig) -> Scorer:
    if config.pattern is None:
        return Scorer("regex", _fits_a_pattern)
    try:
        pattern = regex.compile(config.pattern, regex.MULTILINE)
    except regex.error as error:
        raise WhetError(
            f"eval.tasks: {config.title}: pattern {config.pattern!r} is no regular expression: {error}"
        ) from None

    def score(answer: str, example: Example) -> float:
        try:
            found = next(iter([*pattern.finditer(answer, timeout=_SECONDS)][::-1]), None)
        except TimeoutError:
            return _endless(pattern.pattern, example)
        said = "" if found is None else (found.group(1) or "") if pattern.groups else found.group()
        return float(found is not None and exact(said, example))

    return Scorer("regex", score)


def _fits_a_pattern(answer: str, example: Example) -> float:
    for each in example.answers:
        try:
            if regex.search(each, answer, regex.MULTILINE, timeout=_SECONDS):
                return 1.0
        except regex.error as error:
            raise WhetError(f"{example.place}: the answer {each!r} is no regular expression: {error}") from None
        except TimeoutError:
            _endless(each, example)
    return 0.0


def _endless(pattern: str, example: Example) -> float:
    warn(
        f"{example.place}: the pattern {pattern!r} was not done with an answer after {_SECONDS:.0f} s, so the answer "
        "counts as wrong. Write it without repetitions inside repetitions, such as (a+)+"
    )
    return 0.0


def _same_json(answer: str, example: Example) -> float:
    said, right = _json(answer), [_json(each) for each in example.answers]
    if _NONE in right:
        raise WhetError(f"{example.place}: the right answer is no JSON, so none can be right. Use another scorer")
    return float(said is not _NONE and any(_alike(said, each) for each in right))


def _alike(one: Any, other: Any) -> bool:
    """Equal; true is not 1, as Python has it."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


_NONE = object()


def _json(text: str) -> Any:
    try:
        return json.loads(fenced(text))
    except (ValueError, RecursionError):
        return _NONE


def _json_schema(config: TaskConfig) -> Scorer:
    try:
        import jsonschema
    except ImportError:
        raise _missing(config, "json-schema") from None
    own = None
    if config.schema_file is not None:
        try:
            own = json.loads(Path(config.schema_file).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise WhetError(
                f"eval.tasks: {config.title}: schema_file {config.schema_file} cannot be read: {error}"
            ) from None

    def score(answer: str, example: Example) -> float:
        schema = example.more.get("schema", own)
        if schema is None:
            raise WhetError(f"{example.place}: there is no schema to judge by. Give the record one, or set schema_file")
        try:
            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise WhetError(f"{example.place}: this is no JSON schema: {error.message}") from None
        said = _json(answer)
        return float(said is not _NONE and kind(schema).is_valid(said))

    return Scorer("json-schema", score)


def _overlap(name: str, config: TaskConfig) -> Scorer:
    """BLEU and chrF of sacrebleu: by sentence for each example, and over all of them as papers give it."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise _missing(config, name) from None
    metric = BLEU(effective_order=True) if name == "bleu" else CHRF()
    corpus = BLEU() if name == "bleu" else metric

    def score(answer: str, example: Example) -> float:
        return min(1.0, float(metric.sentence_score(answer, list(example.answers)).score) / 100)

    def whole(answers: Sequence[str], examples: Sequence[Example]) -> float:
        most = max(len(example.answers) for example in examples)
        references = [[_at(example, number) for example in examples] for number in range(most)]
        return float(corpus.corpus_score(list(answers), references).score) / 100

    return Scorer(name, score, graded=True, whole=whole)


def _at(example: Example, number: int) -> str | None:
    return example.answers[number] if number < len(example.answers) else None


def _rouge(config: TaskConfig) -> Scorer:
    """The F-measure of the longest common subsequence of words, with the best of the right answers."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise _missing(config, "rouge") from None
    judge = RougeScorer(["rougeL"], use_stemmer=False)

    def score(answer: str, example: Example) -> float:
        return max(float(judge.score(each, answer)["rougeL"].fmeasure) for each in example.answers)

    return Scorer("rouge", score, graded=True)


def _missing(config: TaskConfig, name: str) -> WhetError:
    return WhetError(
        f"eval.tasks: {config.title}: scorer {name} needs a package that is not installed. "
        "pip install 'whet[eval]', or choose another scorer"
    )


_MADE: dict[str, Callable[[TaskConfig], Scorer]] = {
    "exact": lambda _: Scorer("exact", exact),
    "number": lambda _: Scorer("number", number),
    "contains": lambda _: Scorer("contains", contains),
    "regex": _regex,
    "json": lambda _: Scorer("json", _same_json),
    "json-schema": _json_schema,
    "bleu": partial(_overlap, "bleu"),
    "chrf": partial(_overlap, "chrf"),
    "rouge": _rouge,
}
