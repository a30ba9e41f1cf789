"""A file of the user's as a task. Any that whet can read will do, if each record has a question and a right answer."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.containers.base import Raw, Ready
from whet.data.containers.locate import locate
from whet.data.containers.tables import Row, without_nulls
from whet.data.conversation import BadLine, BadRecordError, Conversation, Origin
from whet.data.decode import decode
from whet.data.sources import Reader
from whet.infer.config import TaskConfig
from whet.infer.sandbox import Mode
from whet.infer.scorers import exact, make_scorer
from whet.infer.tasks.human_eval import tests_scorer
from whet.infer.tasks.records import Kind, kind_of
from whet.infer.tasks.task import Example, Scorer, Task

_MMLU_COLUMNS = 6
_USUAL_TOKENS = 256


def file_task(config: TaskConfig, count: int, mode: Mode) -> Task:
    """The task of a file. Its first `count` records are read at once, so that a fault in them is told before anything
    is computed."""
    opening = ({"role": "system", "content": config.system},) if config.system else ()
    try:
        found = _examples(config, opening, count)
    except WhetError as error:  # the reader speaks of sources
        text = str(error).replace("data.sources: ", "", 1)
        raise WhetError(text if text.startswith("eval.tasks") else f"eval.tasks: {text}") from None
    kind, examples = found
    if not examples:
        raise WhetError(f"eval.tasks: {config.path}: there is not one record in it")
    scorer = _scorer(config, kind, mode)
    if scorer.empty is None:
        for example in examples:
            scorer.score("", example)  # a right answer that cannot be judged by is told of now
    return Task(
        config.title, lambda number: examples[:number],
        config.max_new_tokens or (kind.max_new_tokens if kind else _USUAL_TOKENS), scorer, config.calculator,
    )  # fmt: skip


def _scorer(config: TaskConfig, kind: Kind | None, mode: Mode) -> Scorer:
    usual = kind.scorer if kind else "exact"
    if usual in ("letters", "tests") and config.scorer is not None:
        raise WhetError(
            f"eval.tasks: {config.title}: this file is {kind.name if kind else ''}, which is judged by its {usual}; "
            "remove the scorer"
        )
    if usual == "letters":
        return Scorer("letters", exact)
    return tests_scorer(mode) if usual == "tests" else make_scorer(config, config.scorer or usual)


def _examples(config: TaskConfig, opening: tuple[dict[str, Any], ...], count: int) -> tuple[Kind | None, list[Example]]:
    fields = config.fields or {}
    unknown = [field for field in fields if field not in ("prompt", "messages", "answer")]
    if unknown:
        raise WhetError(f"{config.path}: fields: there is no {unknown[0]!r}; known are prompt, messages, answer")
    records = _records(config)
    first = next(records, None)
    if first is None:
        return None, []
    raw = itertools.islice(itertools.chain([first], records), count)
    try:
        kind = kind_of(_value(first), fields)
    except BadRecordError as error:
        raise WhetError(f"{first.file}:{first.line}: {error}") from None
    if kind is None:
        return None, _conversations(config, opening, count, _value(first))
    return kind, [_example(kind, each, opening) for each in raw]


def _example(kind: Kind, raw: Raw, opening: tuple[dict[str, Any], ...]) -> Example:
    try:
        return kind.parse(_value(raw), Origin(raw.file, raw.line), opening)
    except BadRecordError as error:
        raise WhetError(f"{raw.file}:{raw.line}: {error}") from None


def _conversations(config: TaskConfig, opening: tuple[dict[str, Any], ...], count: int, first: Any) -> list[Example]:
    """The last turn of each conversation is the right answer to what stands before it."""
    try:
        reader = Reader(_source(config))
    except WhetError as error:
        if "not recognised" not in str(error):
            raise
        keys = ", ".join(map(repr, list(first)[:20])) if isinstance(first, dict) else "no fields"
        raise WhetError(
            f"{config.path}:1: a record needs a question and a right answer, such as "
            f'{{"prompt": "…", "answer": "…"}}, and this one has {keys}. Name them: fields: {{prompt: NAME, answer: '
            "NAME}"
        ) from None
    return [_last_turn(reader.parse(raw), opening) for raw in itertools.islice(reader.records(), count)]


def _last_turn(item: object, opening: tuple[dict[str, Any], ...]) -> Example:
    if isinstance(item, BadLine):
        raise WhetError(f"{item.origin}: {item.explanation}")
    if not isinstance(item, Conversation):
        raise WhetError(f"{getattr(item, 'origin', '')}: this is text without turns, so there is nothing to ask")
    *asked, answer = item.messages
    if answer.role != "assistant" or not asked:
        raise WhetError(f"{item.origin}: there is no right answer: the conversation must end with the assistant's")
    before = () if asked[0].role == "system" else opening
    return Example((*before, *(turn.as_dict() for turn in asked)), (answer.content,), str(item.origin))


def _records(config: TaskConfig) -> Iterator[Raw]:
    if _is_mmlu_sheet(Path(config.path).expanduser()):
        return _mmlu_sheet(config.path)
    containers = locate(_source(config), example='{"prompt": "3 + 4 = ", "answer": "7"}')
    return itertools.chain.from_iterable(each.records() for each in containers)


def _source(config: TaskConfig) -> Source:
    return Source(path=config.path, split=config.split, subset=config.subset)


def _value(raw: Raw) -> Any:
    if isinstance(raw.value, bytes):
        return decode(raw.value)
    record = raw.value.record()  # type: ignore[attr-defined]
    return without_nulls(record) if isinstance(raw.value, Row) else record


def _is_mmlu_sheet(path: Path) -> bool:
    """MMLU's own CSV files name no columns: question, four choices, letter."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        row = next(csv.reader(file), [])
    return len(row) == _MMLU_COLUMNS and row[-1].strip() in ascii_uppercase[:4]


def _mmlu_sheet(name: str) -> Iterator[Raw]:
    with Path(name).expanduser().open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for row in reader:
            if len(row) != _MMLU_COLUMNS:
                raise WhetError(
                    f"{name}:{reader.line_num}: this row has {len(row)} columns; the first has {_MMLU_COLUMNS}"
                )
            record = {"question": row[0], "choices": row[1:-1], "answer": row[-1].strip()}
            yield Raw(reader.line_num, Ready(record), name)
