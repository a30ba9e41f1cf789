"""Tasks from a user's file: format detection (HumanEval, multiple choice, GSM8K, question and answer, conversations) and parsing."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from whet.core.errors import BadRecordError, WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, Origin
from whet.data.read import formats
from whet.data.read.container import DecodedRecord, RawRecord
from whet.data.read.locate import locate_containers
from whet.data.read.messages import parse_message_list
from whet.data.read.record_fields import decode_list, describe_type, require_field, require_nonempty
from whet.data.read.sources import SourceReader
from whet.inference.config import TaskConfig
from whet.inference.sandbox import SandboxMode
from whet.inference.tasks.scorers import HUMAN_EVAL_FIELDS as PROGRAM
from whet.inference.tasks.scorers import human_eval_prompt as program_question
from whet.inference.tasks.scorers import make_scorer, make_unit_test_scorer, score_exact
from whet.inference.tasks.task import Example, Scorer, Task

# The records of a file of questions: what kind they are, and the example that each becomes.

_PROMPT_KEYS, _MESSAGES_KEYS, _ANSWER_KEYS = ("prompt", "question", "input"), ("messages",), ("answer", "answers")

ParseRecord = Callable[[Any, Origin, tuple[dict[str, Any], ...]], Example]


class TaskFormat(NamedTuple):
    """What records of a file are, how one is read, and what is usual for them."""

    name: str
    parse: ParseRecord
    scorer: str
    max_new_tokens: int


def detect_task_format(record: Any, fields: Mapping[str, str]) -> TaskFormat | None:
    """By the first record of a file; None if it is no question with an answer, but perhaps a conversation."""
    record = normalize_choices(record)
    if not isinstance(record, dict):
        return None
    if record.keys() >= PROGRAM:
        return TaskFormat("HumanEval", _parse_human_eval, "tests", 512)
    if formats.recognise_multiple_choice(record, {}):
        return TaskFormat("multiple choice", _parse_multiple_choice, "letters", 1)
    if formats.recognise_gsm8k(record, {}):
        return TaskFormat("GSM8K", _parse_gsm8k, "number", 400)
    prompt = _find_key(record, "prompt", _PROMPT_KEYS, fields) or _find_key(record, "messages", _MESSAGES_KEYS, fields)
    answer = _find_key(record, "answer", _ANSWER_KEYS, fields)
    if prompt and answer and "choices" not in record:
        return TaskFormat("questions", _question_parser(fields), "exact", 256)
    return None


def normalize_choices(record: Any) -> Any:
    """Other ways to write choices as the usual one, a list: a column for each (question, A, B, C, D, answer), and ARC's
    own file, in which they stand inside of the question."""
    if not isinstance(record, dict):
        return record
    inner = record.get("question")
    if isinstance(inner, dict) and "stem" in inner and isinstance(inner.get("choices"), list):
        given = [each if isinstance(each, dict) else {} for each in inner["choices"]]
        choices = {name: [each.get(name) for each in given] for name in ("text", "label")}
        return {"question": inner["stem"], "choices": choices, "answerKey": record.get("answerKey")}
    if not {"A", "B", "answer"} <= record.keys() or "choices" in record:
        return record
    question = record.get("question", record.get("prompt"))
    letters = [letter for letter in ascii_uppercase if record.get(letter) not in (None, "")]
    if letters != list(ascii_uppercase[: len(letters)]):  # without the empty one, later letters would mean others
        return {"question": question, "choices": {"label": letters, "text": [str(record[each]) for each in letters]},
                "answer": record["answer"]}  # fmt: skip
    return {"question": question, "choices": [str(record[letter]) for letter in letters], "answer": record["answer"]}


def _parse_multiple_choice(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
    record = normalize_choices(record)
    names = formats.recognise_multiple_choice(record, {})
    question, choices, right = formats.read_multiple_choice(
        record, names[0] if names else {"question": "question", "choices": "choices", "answer": "answer"}
    )
    asked = {"role": "user", "content": formats.multiple_choice_prompt(question, choices)}
    return Example((*opening, asked), (ascii_uppercase[right],), str(origin), len(choices))


def _parse_gsm8k(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
    asked, answer = formats.parse_gsm8k(record, {"question": "question", "answer": "answer"}, origin).messages
    return Example((*opening, asked.as_dict()), (answer.content,), str(origin))


def _parse_human_eval(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
    more = {name: require_nonempty(require_field(record, name), f"'{name}'") for name in PROGRAM}
    asked = {"role": "user", "content": program_question(more["prompt"])}
    solution = record.get("canonical_solution")
    return Example((*opening, asked), (str(solution or ""),), str(origin), more=more)


def _question_parser(fields: Mapping[str, str]) -> ParseRecord:
    def parse(record: Any, origin: Origin, opening: tuple[dict[str, Any], ...]) -> Example:
        if not isinstance(record, dict):
            raise BadRecordError(
                "not an object", f"a record is an object with a prompt and an answer, this is {describe_type(record)}"
            )
        turns = _find_key(record, "messages", _MESSAGES_KEYS, fields)
        if turns:
            asked = tuple(turn.as_dict() for turn in parse_message_list(decode_list(record[turns], f"'{turns}'")))
            if asked[-1]["role"] == "assistant":
                raise BadRecordError("bad messages", f"the last of '{turns}' is the assistant's; end with a question")
        else:
            name = _find_key(record, "prompt", _PROMPT_KEYS, fields) or fields.get("prompt", "prompt")
            asked = ({"role": "user", "content": require_nonempty(require_field(record, name), f"'{name}'")},)
        more = {"schema": record["schema"]} if isinstance(record.get("schema"), (dict, bool)) else {}
        before = () if asked[0]["role"] == "system" else opening
        return Example((*before, *asked), _right_answers(record, fields), str(origin), more=more)

    return parse


def _right_answers(record: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[str, ...]:
    """One, or a list of which any will do; numbers and objects as JSON writes them."""
    name = _find_key(record, "answer", _ANSWER_KEYS, fields)
    value = None if name is None else record[name]
    given = value if isinstance(value, list) else [value]
    texts = [
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in given if each is not None
    ]
    if not texts or not all(text.strip() for text in texts):
        keys = ", ".join(map(repr, list(record)[:20]))
        what = f"'{name}' is empty" if name else f"it has {keys}"
        raise BadRecordError(
            "no answer",
            f"there is no right answer to compare with ({what}). Add 'answer', or name it: fields: {{answer: NAME}}",
        )
    return tuple(texts)


def _find_key(record: Mapping[str, Any], field: str, usual: tuple[str, ...], fields: Mapping[str, str]) -> str | None:
    """The name under which a record has a field."""
    names = (fields[field],) if field in fields else usual
    return next((name for name in names if record.get(name) is not None), None)


# A file of the user's as a task. Any that whet can read will do, if each record has a question and a right answer.

_MMLU_COLUMNS = 6
_DEFAULT_MAX_NEW_TOKENS = 256


def load_file_task(config: TaskConfig, count: int, mode: SandboxMode) -> Task:
    """The task of a file. Its first `count` records are read at once, so that a fault in them is told before anything
    is computed."""
    opening = ({"role": "system", "content": config.system},) if config.system else ()
    try:
        found = _read_examples(config, opening, count)
    except WhetError as error:  # the reader speaks of sources
        text = str(error).replace("data.sources: ", "", 1)
        raise WhetError(text if text.startswith("eval.tasks") else f"eval.tasks: {text}") from None
    kind, examples = found
    if not examples:
        raise WhetError(f"eval.tasks: {config.path}: there is not one record in it")
    scorer = _choose_scorer(config, kind, mode)
    if scorer.empty is None:
        for example in examples:
            scorer.score("", example)  # a right answer that cannot be judged by is told of now
    return Task(
        config.title, lambda number: examples[:number],
        config.max_new_tokens or (kind.max_new_tokens if kind else _DEFAULT_MAX_NEW_TOKENS), scorer, config.calculator,
    )  # fmt: skip


def _choose_scorer(config: TaskConfig, kind: TaskFormat | None, mode: SandboxMode) -> Scorer:
    usual = kind.scorer if kind else "exact"
    if usual in ("letters", "tests") and config.scorer is not None:
        raise WhetError(
            f"eval.tasks: {config.title}: this file is {kind.name if kind else ''}, which is judged by its {usual}; "
            "remove the scorer"
        )
    if usual == "letters":
        return Scorer("letters", score_exact)
    return make_unit_test_scorer(mode) if usual == "tests" else make_scorer(config, config.scorer or usual)


def _read_examples(
    config: TaskConfig, opening: tuple[dict[str, Any], ...], count: int
) -> tuple[TaskFormat | None, list[Example]]:
    fields = config.fields or {}
    unknown = [field for field in fields if field not in ("prompt", "messages", "answer")]
    if unknown:
        raise WhetError(f"{config.path}: fields: there is no {unknown[0]!r}; known are prompt, messages, answer")
    records = _raw_records(config)
    first = next(records, None)
    if first is None:
        return None, []
    raw = itertools.islice(itertools.chain([first], records), count)
    try:
        kind = detect_task_format(first.decode(), fields)
    except BadRecordError as error:
        raise WhetError(f"{first.file}:{first.line}: {error}") from None
    if kind is None:
        return None, _conversation_examples(config, opening, count, first.decode())
    return kind, [_parse_example(kind, each, opening) for each in raw]


def _parse_example(kind: TaskFormat, raw: RawRecord, opening: tuple[dict[str, Any], ...]) -> Example:
    try:
        return kind.parse(raw.decode(), Origin(raw.file, raw.line), opening)
    except BadRecordError as error:
        raise WhetError(f"{raw.file}:{raw.line}: {error}") from None


def _conversation_examples(
    config: TaskConfig, opening: tuple[dict[str, Any], ...], count: int, first: Any
) -> list[Example]:
    """The last turn of each conversation is the right answer to what stands before it."""
    try:
        reader = SourceReader(_source_config(config))
    except WhetError as error:
        if "not recognised" not in str(error):
            raise
        keys = ", ".join(map(repr, list(first)[:20])) if isinstance(first, dict) else "no fields"
        raise WhetError(
            f"{config.path}:1: a record needs a question and a right answer, such as "
            f'{{"prompt": "…", "answer": "…"}}, and this one has {keys}. Name them: fields: {{prompt: NAME, answer: '
            "NAME}"
        ) from None
    return [_example_from_conversation(reader.parse(raw), opening) for raw in itertools.islice(reader.records(), count)]


def _example_from_conversation(item: object, opening: tuple[dict[str, Any], ...]) -> Example:
    if isinstance(item, BadRecord):
        raise WhetError(f"{item.origin}: {item.explanation}")
    if not isinstance(item, Conversation):
        raise WhetError(f"{getattr(item, 'origin', '')}: this is text without turns, so there is nothing to ask")
    *asked, answer = item.messages
    if answer.role != "assistant" or not asked:
        raise WhetError(f"{item.origin}: there is no right answer: the conversation must end with the assistant's")
    before = () if asked[0].role == "system" else opening
    return Example((*before, *(turn.as_dict() for turn in asked)), (answer.content,), str(item.origin))


def _raw_records(config: TaskConfig) -> Iterator[RawRecord]:
    if _is_mmlu_csv(Path(config.path).expanduser()):
        return _read_mmlu_csv(config.path)
    containers = locate_containers(_source_config(config), example='{"prompt": "3 + 4 = ", "answer": "7"}')
    return itertools.chain.from_iterable(each.records() for each in containers)


def _source_config(config: TaskConfig) -> Source:
    return Source(path=config.path, split=config.split, subset=config.subset)


def _is_mmlu_csv(path: Path) -> bool:
    """MMLU's own CSV files name no columns: question, four choices, letter."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        row = next(csv.reader(file), [])
    return len(row) == _MMLU_COLUMNS and row[-1].strip() in ascii_uppercase[:4]


def _read_mmlu_csv(name: str) -> Iterator[RawRecord]:
    with Path(name).expanduser().open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for row in reader:
            if len(row) != _MMLU_COLUMNS:
                raise WhetError(
                    f"{name}:{reader.line_num}: this row has {len(row)} columns; the first has {_MMLU_COLUMNS}"
                )
            record = {"question": row[0], "choices": row[1:-1], "answer": row[-1].strip()}
            yield RawRecord(reader.line_num, DecodedRecord(record), name)
