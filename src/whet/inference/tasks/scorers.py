"""Scorers: exact match, numbers, patterns, JSON, BLEU, chrF, ROUGE, and unit tests run in the sandbox (HumanEval)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

import regex

from whet.core.console import warn
from whet.core.errors import WhetError
from whet.inference.config import TaskConfig
from whet.inference.sandbox import SandboxLimits, SandboxMode, require_sandbox, run_program
from whet.inference.tasks.task import Example, Scorer

# Judging an answer in text: exact, by a number, by what it contains, as JSON, by overlap with the right one.

_NUMBER_PATTERN = regex.compile(r"((?<![\w)])[-−+])?[$€£]?(\d[\d,]*(?:\.\d+)?|\.\d+)")
_CODE_BLOCK = regex.compile(r"```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```", regex.DOTALL)
_PATTERN_TIMEOUT_S = 2.0
"""For a pattern of the user's and one answer: some try more ways to fit a text than there is time for."""


def make_scorer(config: TaskConfig, name: str) -> Scorer:
    """The scorer of a name, with what the task says about it; a WhetError where a package or setting is missing."""
    return _SCORER_FACTORIES[name](config)


def score_exact(answer: str, example: Example) -> float:
    """It is the right answer, spaces around it aside."""
    return float(answer.strip() in (each.strip() for each in example.answers))


def score_number(answer: str, example: Example) -> float:
    """The number after the last ####, or else the last one in the answer, is the right one."""
    said, right = last_number(answer), [last_number(each) for each in example.answers]
    if None in right:
        raise WhetError(f"{example.place}: there is no number in the right answer. Use another scorer, such as exact")
    return float(said is not None and said in right)


def last_number(text: str) -> Decimal | None:
    """Of `… #### 1,234.` it is 1234; of text without a mark the last number there is. A sign stands before the number
    or its currency; in 10-5 there is none."""
    _, mark, after = text.rpartition("####")
    found = _NUMBER_PATTERN.search(after) if mark else None
    found = found or next(iter([*_NUMBER_PATTERN.finditer(text)][::-1]), None)
    try:
        return Decimal(f"{found[1] or ''}{found[2]}".replace(",", "").replace("−", "-")) if found else None
    except InvalidOperation:
        return None


def score_contains(answer: str, example: Example) -> float:
    """A right answer stands somewhere in it; upper and lower case are the same."""
    said = answer.casefold()
    return float(any(each.strip().casefold() in said for each in example.answers))


def extract_code_block(text: str) -> str:
    """What stands in the first ``` block, or the whole where there is none."""
    found = _CODE_BLOCK.search(text)
    return found.group(1) if found else text.strip()


def _regex_scorer(config: TaskConfig) -> Scorer:
    if config.pattern is None:
        return Scorer("regex", _score_answer_patterns)
    try:
        pattern = regex.compile(config.pattern, regex.MULTILINE)
    except regex.error as error:
        raise WhetError(
            f"eval.tasks: {config.title}: pattern {config.pattern!r} is no regular expression: {error}"
        ) from None

    def score(answer: str, example: Example) -> float:
        try:
            found = next(iter([*pattern.finditer(answer, timeout=_PATTERN_TIMEOUT_S)][::-1]), None)
        except TimeoutError:
            return _pattern_timeout(pattern.pattern, example)
        said = "" if found is None else (found.group(1) or "") if pattern.groups else found.group()
        return float(found is not None and score_exact(said, example))

    return Scorer("regex", score)


def _score_answer_patterns(answer: str, example: Example) -> float:
    for each in example.answers:
        try:
            if regex.search(each, answer, regex.MULTILINE, timeout=_PATTERN_TIMEOUT_S):
                return 1.0
        except regex.error as error:
            raise WhetError(f"{example.place}: the answer {each!r} is no regular expression: {error}") from None
        except TimeoutError:
            _pattern_timeout(each, example)
    return 0.0


def _pattern_timeout(pattern: str, example: Example) -> float:
    warn(
        f"{example.place}: the pattern {pattern!r} was not done with an answer after {_PATTERN_TIMEOUT_S:.0f} s, so the answer "
        "counts as wrong. Write it without repetitions inside repetitions, such as (a+)+"
    )
    return 0.0


def _score_json(answer: str, example: Example) -> float:
    said, right = _parse_json(answer), [_parse_json(each) for each in example.answers]
    if _NOT_JSON in right:
        raise WhetError(f"{example.place}: the right answer is no JSON, so none can be right. Use another scorer")
    return float(said is not _NOT_JSON and any(_json_equal(said, each) for each in right))


def _json_equal(one: Any, other: Any) -> bool:
    """Equal; true is not 1, as Python has it."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_json_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_json_equal, one, other))
    return bool(one == other)


_NOT_JSON = object()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(extract_code_block(text))
    except (ValueError, RecursionError):
        return _NOT_JSON


def _json_schema_scorer(config: TaskConfig) -> Scorer:
    try:
        import jsonschema
    except ImportError:
        raise _missing_package(config, "json-schema") from None
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
        said = _parse_json(answer)
        return float(said is not _NOT_JSON and kind(schema).is_valid(said))

    return Scorer("json-schema", score)


def _sacrebleu_scorer(name: str, config: TaskConfig) -> Scorer:
    """BLEU and chrF of sacrebleu: by sentence for each example, and over all of them as papers give it."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise _missing_package(config, name) from None
    metric = BLEU(effective_order=True) if name == "bleu" else CHRF()
    corpus = BLEU() if name == "bleu" else metric

    def score(answer: str, example: Example) -> float:
        return min(1.0, float(metric.sentence_score(answer, list(example.answers)).score) / 100)

    def whole(answers: Sequence[str], examples: Sequence[Example]) -> float:
        most = max(len(example.answers) for example in examples)
        references = [[_reference_at(example, number) for example in examples] for number in range(most)]
        return float(corpus.corpus_score(list(answers), references).score) / 100

    return Scorer(name, score, graded=True, whole=whole)


def _reference_at(example: Example, number: int) -> str | None:
    return example.answers[number] if number < len(example.answers) else None


def _rouge_scorer(config: TaskConfig) -> Scorer:
    """The F-measure of the longest common subsequence of words, with the best of the right answers."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise _missing_package(config, "rouge") from None
    judge = RougeScorer(["rougeL"], use_stemmer=False)

    def score(answer: str, example: Example) -> float:
        return max(float(judge.score(each, answer)["rougeL"].fmeasure) for each in example.answers)

    return Scorer("rouge", score, graded=True)


def _missing_package(config: TaskConfig, name: str) -> WhetError:
    return WhetError(
        f"eval.tasks: {config.title}: scorer {name} needs a package that is not installed. "
        "pip install 'whet[eval]', or choose another scorer"
    )


_SCORER_FACTORIES: dict[str, Callable[[TaskConfig], Scorer]] = {
    "exact": lambda _: Scorer("exact", score_exact),
    "number": lambda _: Scorer("number", score_number),
    "contains": lambda _: Scorer("contains", score_contains),
    "regex": _regex_scorer,
    "json": lambda _: Scorer("json", _score_json),
    "json-schema": _json_schema_scorer,
    "bleu": partial(_sacrebleu_scorer, "bleu"),
    "chrf": partial(_sacrebleu_scorer, "chrf"),
    "rouge": _rouge_scorer,
}


# HumanEval: the model completes a Python function, and tests decide. What it writes is run in the sandbox only.

HUMAN_EVAL_FIELDS = frozenset({"prompt", "test", "entry_point"})


def human_eval_prompt(prompt: str) -> str:
    """The user's turn; how it is put is whet's own."""
    wish = "Complete this Python function. Answer with the whole function in one ```python block."
    return f"{wish}\n\n```python\n{prompt.rstrip()}\n```"


def make_unit_test_scorer(mode: SandboxMode) -> Scorer:
    """Right is what passes the tests. A SandboxError at once where nothing can be run."""
    require_sandbox(mode)
    return Scorer("tests", partial(_passes_tests, mode), empty=0.0, waits=True, verbatim=True)


def _passes_tests(mode: SandboxMode, answer: str, example: Example) -> float:
    """The last line must be a word that is printed after the tests: a program that ends early, with whatever exit code,
    has not passed them. One that sets out to deceive could read the word; models that were not made to do not."""
    word = secrets.token_hex(16)
    outcome = run_program(f"{assemble_program(answer, example)}\nprint()\nprint({word!r})\n", SandboxLimits(), mode)
    return float(outcome.code == 0 and outcome.out.rstrip("\n").rpartition("\n")[2] == word)


def assemble_program(answer: str, example: Example) -> str:
    """The function as answered, below what the prompt has above it, and its tests. An answer without the function's
    head is taken for its body."""
    prompt, name = example.more["prompt"], example.more["entry_point"]
    code, head = extract_code_block(answer) if "```" in answer else answer, rf"^def\s+{re.escape(name)}\b"
    if re.search(head, code, re.MULTILINE):
        above = re.split(head, prompt, maxsplit=1, flags=re.MULTILINE)[0]
        code = f"{above}\n{code}"
    else:
        code = prompt + code
    return f"{code}\n\n{example.more['test']}\n\ncheck({name})"
