"""Scorers: exact match, numbers, patterns, JSON, BLEU, chrF, ROUGE, and unit tests run in the sandbox (HumanEval)."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from importlib.util import find_spec
from typing import Any

import regex

from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.files import read_text, user_path
from whet.core.limits import limited
from whet.core.plugins import load_plugin, require_number
from whet.data.read.records.record_fields import describe_type
from whet.inference.config import TaskConfig
from whet.inference.sandbox.sandbox import SandboxLimits, SandboxMode, require_sandbox, run_program
from whet.inference.tasks.task import Example, Scorer

_NUMBER_PATTERN = regex.compile(r"((?<![\w)])[-−+])?[$€£]?(\d[\d,]*(?:\.\d+)?|\.\d+)")
_CODE_BLOCK_START = regex.compile(r"```[\w+-]*[ \t]*\n")
_PATTERN_TIMEOUT_S, _SCHEMA_TIMEOUT_S = 2.0, 2.0
"""For one match of a pattern, which may backtrack exponentially, and for one answer against a JSON schema."""


def make_scorer(config: TaskConfig, name: str) -> Scorer:
    """The scorer with this name and the task's settings; a WhetError if a package or setting is missing."""
    if name in _SCORER_FACTORIES:
        return _SCORER_FACTORIES[name](config)
    place = f"eval.tasks: {config.title}: scorer"
    own = load_plugin("scorers", name, place)
    return Scorer(
        name, lambda answer, example: require_number(own(answer, example), f"{place} {name!r}", 0.0, 1.0), graded=True
    )


def score_exact(answer: str, example: Example) -> float:
    """Equal to a correct answer, ignoring surrounding whitespace."""
    return float(answer.strip() in (each.strip() for each in example.answers))


def score_number(answer: str, example: Example) -> float:
    """The number after the last ####, or else the last number, is that of a correct answer."""
    found, expected = last_number(answer), [last_number(each) for each in example.answers]
    if None in expected:
        raise WhetError(f"{example.origin}: the correct answer has no number. Use another scorer, such as exact")
    return float(found is not None and found in expected)


def last_number(text: str) -> Decimal | None:
    """1234 for `… #### 1,234.`; without #### the last number in the text. A minus counts as a sign only in front of the
    number or its currency symbol: the last number of 10-5 is 5."""
    _, marker, after = text.rpartition("####")
    found = _NUMBER_PATTERN.search(after) if marker else None
    found = found or next(iter([*_NUMBER_PATTERN.finditer(text)][::-1]), None)
    try:
        return Decimal(f"{found[1] or ''}{found[2]}".replace(",", "").replace("−", "-")) if found else None
    except InvalidOperation:
        return None


def score_contains(answer: str, example: Example) -> float:
    """Contains a correct answer, ignoring case."""
    text = answer.casefold()
    return float(any(each.strip().casefold() in text for each in example.answers))


def extract_code_block(text: str) -> str:
    """The content of the first ``` block, or the whole text if there is none."""
    start = _CODE_BLOCK_START.search(text)
    end = text.find("```", start.end()) if start else -1
    return text[start.end() : end].rstrip(" \t").removesuffix("\n") if start and end >= 0 else text.strip()


def _regex_scorer(config: TaskConfig) -> Scorer:
    if config.pattern is None:
        return Scorer("regex", _score_answer_patterns)
    try:
        pattern = regex.compile(config.pattern, regex.MULTILINE)
    except (regex.error, RecursionError, OverflowError) as error:
        raise WhetError(
            f"eval.tasks: {config.title}: pattern {config.pattern!r} is not a regular expression: {error}"
        ) from None

    def score(answer: str, example: Example) -> float:
        try:
            found = next(iter([*pattern.finditer(answer, timeout=_PATTERN_TIMEOUT_S)][::-1]), None)
        except TimeoutError:
            return _pattern_timeout(pattern.pattern, example)
        matched = "" if found is None else (found.group(1) or "") if pattern.groups else found.group()
        return float(found is not None and score_exact(matched, example))

    return Scorer("regex", score)


def _score_answer_patterns(answer: str, example: Example) -> float:
    for each in example.answers:
        try:
            if regex.search(each, answer, regex.MULTILINE, timeout=_PATTERN_TIMEOUT_S):
                return 1.0
        except (regex.error, RecursionError, OverflowError) as error:
            raise WhetError(f"{example.origin}: the answer {each!r} is not a regular expression: {error}") from None
        except TimeoutError:
            _pattern_timeout(each, example)
    return 0.0


def _pattern_timeout(pattern: str, example: Example) -> float:
    warn(
        f"{example.origin}: matching pattern {pattern!r} against an answer took longer than {_PATTERN_TIMEOUT_S:.0f} "
        "s; the answer counts as wrong. Avoid nested repetitions such as (a+)+"
    )
    return 0.0


def _score_json(answer: str, example: Example) -> float:
    value, expected = _parse_json(answer), [_parse_json(each) for each in example.answers]
    if _NOT_JSON in expected:
        raise WhetError(f"{example.origin}: the correct answer is not valid JSON. Use another scorer")
    return float(value is not _NOT_JSON and any(_json_equal(value, each) for each in expected))


def _json_equal(one: Any, other: Any) -> bool:
    """Equal as JSON values: unlike in Python, true is not 1. Without recursion: whatever was parsed is compared, while
    the depth at which Python gives up differs between versions."""
    pairs = [(one, other)]
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs.extend((one[key], other[key]) for key in one)
        elif isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs.extend(zip(one, other, strict=True))
        elif isinstance(one, bool) or isinstance(other, bool):
            if one is not other:
                return False
        elif one != other:
            return False
    return True


_NOT_JSON = object()


def _parse_json(text: str) -> Any:
    try:
        return json.loads(extract_code_block(text), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_schema_scorer(config: TaskConfig) -> Scorer:
    if find_spec("jsonschema") is None:
        raise _missing_package(config, "json-schema")
    own = None
    if config.schema_file is not None:
        try:
            own = json.loads(read_text(user_path(config.schema_file)))
        except (OSError, ValueError, RecursionError) as error:
            raise WhetError(
                f"eval.tasks: {config.title}: schema_file {config.schema_file} cannot be read: {error}"
            ) from None

    def score(answer: str, example: Example) -> float:
        schema = example.extra.get("schema", own)
        if schema is None:
            raise WhetError(f"{example.origin}: no JSON schema. Add 'schema' to the record, or set schema_file")
        validator = _make_validator(schema, example.origin)
        value = _parse_json(answer)
        if value is _NOT_JSON:
            return 0.0
        try:
            with limited(_SCHEMA_TIMEOUT_S, TimeoutError):
                return float(validator.is_valid(value))
        except TimeoutError as error:
            warn(
                f"{example.origin}: validating an answer was ended: {error}; the answer counts as wrong. Avoid "
                "patterns with nested repetitions such as (a+)+, and schemas that refer to themselves more than once"
            )
        except (RecursionError, OverflowError):  # a schema that refers to itself without end, a number beyond floats
            pass
        return 0.0

    return Scorer("json-schema", score)


def _make_validator(schema: Any, origin: str) -> Any:
    """The validator of a schema; a WhetError for one that is invalid or refers to another, which is not fetched."""
    import jsonschema
    from jsonschema_specifications import REGISTRY  # the metaschemas, without a way to fetch more

    try:
        with limited(_SCHEMA_TIMEOUT_S, TimeoutError):
            if not isinstance(schema, (dict, bool)):
                raise jsonschema.SchemaError(f"it must be an object, not {describe_type(schema)}")
            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            missing = _unresolvable_reference(schema, REGISTRY)
    except jsonschema.SchemaError as error:
        raise WhetError(f"{origin}: invalid JSON schema: {error.message}") from None
    except (RecursionError, TimeoutError, TypeError, ValueError) as error:
        raise WhetError(f"{origin}: the JSON schema cannot be used: {error}. Simplify it") from None
    if missing is not None:
        raise WhetError(
            f"{origin}: the JSON schema refers to {missing!r}, which it does not contain. whet fetches nothing: write "
            "the definition into the schema, under $defs"
        )
    return kind(schema, registry=REGISTRY)


def _unresolvable_reference(schema: Any, registry: Any) -> str | None:
    """The first $ref that leads out of the schema, or nowhere in it."""
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    whole = Resource.from_contents(schema, default_specification=DRAFT202012)
    waiting = [(whole, registry.resolver_with_root(whole))]
    while waiting:
        part, resolver = waiting.pop()
        if isinstance(part.contents, dict):
            for reference in (part.contents.get(key, "#") for key in ("$ref", "$dynamicRef")):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    return str(reference)
        waiting += [(inner, resolver.in_subresource(inner)) for inner in part.subresources()]
    return None


def _sacrebleu_scorer(name: str, config: TaskConfig) -> Scorer:
    """sacrebleu's BLEU and chrF: sentence scores for each example, and the corpus score that papers report."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise _missing_package(config, name) from None
    metric = BLEU(effective_order=True) if name == "bleu" else CHRF()
    corpus = BLEU() if name == "bleu" else metric

    def score(answer: str, example: Example) -> float:
        return min(1.0, float(metric.sentence_score(answer, list(example.answers)).score) / 100)

    def corpus_score(answers: Sequence[str], examples: Sequence[Example]) -> float:
        # sacrebleu wants the i-th reference of all examples in one list, None where an example has fewer
        references = [list(column) for column in itertools.zip_longest(*(example.answers for example in examples))]
        return float(corpus.corpus_score(list(answers), references).score) / 100

    return Scorer(name, score, graded=True, corpus_score=corpus_score)


def _rouge_scorer(config: TaskConfig) -> Scorer:
    """ROUGE-L: the F-measure of the longest common subsequence of words; the best over the correct answers."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise _missing_package(config, "rouge") from None
    metric = RougeScorer(["rougeL"], use_stemmer=False)

    def score(answer: str, example: Example) -> float:
        return max(float(metric.score(each, answer)["rougeL"].fmeasure) for each in example.answers)

    return Scorer("rouge", score, graded=True)


def _missing_package(config: TaskConfig, name: str) -> WhetError:
    return WhetError(
        f"eval.tasks: {config.title}: scorer {name} needs packages that are not installed. "
        "Install them with: pip install 'whet[eval]'"
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


# HumanEval: the model completes a Python function, which must pass unit tests. Its code runs in the sandbox only.

HUMAN_EVAL_FIELDS = frozenset({"prompt", "test", "entry_point"})


def human_eval_prompt(prompt: str) -> str:
    """The user message. The instruction is whet's own, not part of HumanEval."""
    instruction = "Complete this Python function. Answer with the whole function in one ```python block."
    return f"{instruction}\n\n```python\n{prompt.rstrip()}\n```"


def make_unit_test_scorer(mode: SandboxMode) -> Scorer:
    """1 for a program that passes its tests. Raises a SandboxError at once if the sandbox does not work here."""
    require_sandbox(mode)
    return Scorer("tests", partial(_passes_tests, mode), empty_score=0.0, is_io_bound=True, verbatim=True)


def _passes_tests(mode: SandboxMode, answer: str, example: Example) -> float:
    """The program must exit with 0 and print a random token after its tests: one that exits early has not passed them.
    A program written to cheat could read the token from its own source."""
    token = secrets.token_hex(16)
    result = run_program(f"{assemble_program(answer, example)}\nprint()\nprint({token!r})\n", SandboxLimits(), mode)
    return float(result.exit_code == 0 and result.out.rstrip("\n").rpartition("\n")[2] == token)


def assemble_program(answer: str, example: Example) -> str:
    """The prompt's imports and helpers, the function from the answer, and its tests. An answer without a `def` line of
    the function counts as its body."""
    prompt, name = example.extra["prompt"], example.extra["entry_point"]
    code, head = extract_code_block(answer) if "```" in answer else answer, rf"^def\s+{re.escape(name)}\b"
    if re.search(head, code, re.MULTILINE):
        above = re.split(head, prompt, maxsplit=1, flags=re.MULTILINE)[0]
        code = f"{above}\n{code}"
    else:
        code = prompt + code
    return f"{code}\n\n{example.extra['test']}\n\ncheck({name})"
