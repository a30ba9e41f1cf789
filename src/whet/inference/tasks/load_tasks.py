"""Tasks from the configuration: built-in ones by name, others from files.

Files may contain HumanEval, multiple choice, GSM8K, questions with answers, or conversations.
"""

from __future__ import annotations

import csv
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from whet.core.errors import BadRecordError, WhetError
from whet.core.files import user_path
from whet.core.yaml import dump_yaml_inline
from whet.data.builtin import BUILTIN_GENERATORS
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation, Message, Origin
from whet.data.read.containers.container import DecodedRecord, RawRecord
from whet.data.read.containers.locate import locate_containers
from whet.data.read.detection import suggest_fields
from whet.data.read.records import question_formats
from whet.data.read.records.messages import RECORD_FIELDS, add_system_prompt, parse_message_list
from whet.data.read.records.record_fields import (
    decode_list,
    describe_type,
    find_optional,
    require_field,
    require_nonempty,
    require_text,
)
from whet.data.read.records.tools import parse_tools
from whet.data.read.sources import SourceReader
from whet.inference.config import EvalConfig, TaskConfig
from whet.inference.sandbox.sandbox import SandboxMode
from whet.inference.tasks.scorers import (
    HUMAN_EVAL_FIELDS,
    human_eval_prompt,
    make_scorer,
    make_unit_test_scorer,
    score_exact,
)
from whet.inference.tasks.task import Example, Scorer, Task

_PROMPT_KEYS, _MESSAGES_KEYS, _ANSWER_KEYS = ("prompt", "question", "input"), ("messages",), ("answer", "answers")

Messages = tuple[Message, ...]
ParseRecord = Callable[[Any, Origin, Messages], Example]
"""(record, origin, messages to prepend) → example"""
_BUILTIN_TASKS = {
    "orders": ("exact", 64),
    "spelling": ("exact", 64),
    "spelling-bee": ("number", 256),
    "arithmetic": ("number", 128),
}
"""Scorer and max_new_tokens by name. Their examples are the held-out parts of whet's data generators."""


_loaded: dict[str, list[tuple[Task, int]]] = {}
"""The tasks of the last configuration: a run keeps its examples even if their files change."""


def load_tasks(config: EvalConfig) -> list[tuple[Task, int]]:
    """(task, number of examples) of every configured task. Reads their files now; a WhetError for an invalid one."""
    tasks = [(_load_task(task, config), task.examples or config.examples) for task in config.tasks]
    _loaded.clear()
    _loaded[_cache_key(config)] = tasks
    return tasks


def loaded_tasks(config: EvalConfig) -> list[tuple[Task, int]]:
    """The tasks of the last `load_tasks` if it had the same configuration; else they are loaded now."""
    return _loaded.get(_cache_key(config)) or load_tasks(config)


def _cache_key(config: EvalConfig) -> str:
    return config.model_dump_json(include={"tasks", "examples", "sandbox"})


def _load_task(task: TaskConfig, config: EvalConfig) -> Task:
    if task.builtin is not None:
        return make_builtin_task(task)
    return load_file_task(task, task.examples or config.examples, config.sandbox)


def make_builtin_task(config: TaskConfig) -> Task:
    """A built-in task; a WhetError for an unknown name."""
    name = config.builtin
    if name not in _BUILTIN_TASKS:
        raise WhetError(
            f"eval.tasks: unknown task '{name}'; built in are: {', '.join(_BUILTIN_TASKS)}. For a file give its path, "
            "such as ./my.jsonl"
        )
    for key in ("fields", "split", "subset"):
        if getattr(config, key) is not None:
            raise WhetError(f"eval.tasks: {config.title}: {key} applies to files only; remove it")
    default_scorer, max_new_tokens = _BUILTIN_TASKS[name]
    examples: Callable[[int], list[Example]] = partial(_builtin_examples, name, config.system)
    scorer = make_scorer(config, config.scorer or default_scorer)
    return Task(config.title, examples, config.max_new_tokens or max_new_tokens, scorer, config.calculator)


def _builtin_examples(name: str, system: str | None, count: int) -> list[Example]:
    opening = (Message("system", system),) if system else ()
    conversations = BUILTIN_GENERATORS[f"builtin:{name}"]("held-out", "remove")
    examples = []
    for number, conversation in enumerate(itertools.islice(conversations, count), 1):
        *question, answer = conversation.messages
        examples.append(Example((*opening, *question), (answer.content,), f"builtin:{name}, number {number}"))
    return examples


# A task from a file in any format that whet reads, if each record has a question and a correct answer.

_MMLU_COLUMNS = 6
_DEFAULT_MAX_NEW_TOKENS = 256


def load_file_task(config: TaskConfig, count: int, mode: SandboxMode) -> Task:
    """The task of a file. Reads its first `count` records now, so that errors appear before a model is loaded."""
    opening = (Message("system", config.system),) if config.system else ()
    try:
        format_, examples = _read_examples(config, opening, count)
    except WhetError as error:  # the readers' messages name data.sources
        text = str(error).replace("data.sources: ", "", 1)
        raise WhetError(text if text.startswith("eval.tasks") else f"eval.tasks: {text}") from None
    if not examples:
        raise WhetError(f"eval.tasks: {config.path}: the file has no records")
    scorer = _choose_scorer(config, format_, mode)
    if scorer.empty_score is None:
        for example in examples:
            scorer.score("", example)  # raises for a correct answer that this scorer cannot use
    default = format_.max_new_tokens if format_ else _DEFAULT_MAX_NEW_TOKENS
    return Task(
        config.title, lambda n: examples[:n], config.max_new_tokens or default, scorer, config.calculator
    )  # fmt: skip


def _choose_scorer(config: TaskConfig, format_: TaskFormat | None, mode: SandboxMode) -> Scorer:
    default = format_.scorer if format_ else "exact"
    if default in ("letters", "tests") and config.scorer is not None:
        raise WhetError(
            f"eval.tasks: {config.title}: scorer {config.scorer} does not apply: a {format_.name if format_ else ''} "
            f"file is scored by {default}. Remove the scorer"
        )
    if default == "letters":
        return Scorer("letters", score_exact)
    return make_unit_test_scorer(mode) if default == "tests" else make_scorer(config, config.scorer or default)


def _read_examples(config: TaskConfig, opening: Messages, count: int) -> tuple[TaskFormat | None, list[Example]]:
    fields = config.fields or {}
    unknown = [field for field in fields if field not in ("prompt", "messages", "answer")]
    if unknown:
        raise WhetError(f"{config.path}: fields: unknown field {unknown[0]!r}; use prompt, messages or answer")
    records = _raw_records(config)
    first = next(records, None)
    if first is None:
        return None, []
    raw = itertools.islice(itertools.chain([first], records), count)
    try:
        format_ = detect_task_format(first.decode(), fields)
    except BadRecordError as error:
        raise WhetError(f"{first.file}:{first.line}: {error}") from None
    if format_ is None:
        return None, _conversation_examples(config, opening, count, first.decode())
    return format_, [_parse_example(format_, each, opening) for each in raw]


def _parse_example(format_: TaskFormat, raw: RawRecord, opening: Messages) -> Example:
    try:
        return format_.parse(raw.decode(), Origin(raw.file, raw.line), opening)
    except (BadRecordError, RecursionError) as error:
        raise WhetError(f"{raw.file}:{raw.line}: {error}") from None


def _conversation_examples(config: TaskConfig, opening: Messages, count: int, first: Any) -> list[Example]:
    """The last message of each conversation is the correct answer to the messages before it."""
    try:
        reader = SourceReader(_source_config(config))
    except WhetError as error:
        if "not recognised" not in str(error):
            raise
        keys = ", ".join(map(repr, list(first)[:20])) if isinstance(first, dict) else "no fields"
        near = suggest_fields([first], {})
        known = near.fields if near else {}
        fields = {"prompt": known.get("prompt", "NAME"), "answer": known.get("completion", "NAME")}
        setting = f"eval.tasks=[{dump_yaml_inline({'path': config.path, 'fields': fields})}]"
        raise WhetError(
            f"{config.path}:1: a record needs a question and a correct answer, such as "
            f'{{"prompt": "…", "answer": "…"}}; this one has {keys}. Name its fields: {shlex.quote(setting)}'
        ) from None
    return [_example_from_conversation(reader.parse(raw), opening) for raw in itertools.islice(reader.records(), count)]


def _example_from_conversation(item: object, opening: Messages) -> Example:
    if isinstance(item, BadRecord):
        raise WhetError(f"{item.origin}: {item.explanation}")
    if not isinstance(item, Conversation):
        raise WhetError(f"{getattr(item, 'origin', '')}: plain text has no question and answer. Use conversations")
    *question, answer = item.messages
    if answer.role != "assistant" or not question:
        raise WhetError(f"{item.origin}: no correct answer: the conversation must end with an assistant message")
    before = () if question[0].role == "system" else opening
    return Example((*before, *question), (answer.content,), str(item.origin), tools=item.tools)


def _raw_records(config: TaskConfig) -> Iterator[RawRecord]:
    if _is_mmlu_csv(user_path(config.path)):
        return _read_mmlu_csv(config.path)
    containers = locate_containers(_source_config(config), example='{"prompt": "3 + 4 = ", "answer": "7"}')
    return itertools.chain.from_iterable(each.records() for each in containers)


def _source_config(config: TaskConfig) -> Source:
    return Source(path=config.path, split=config.split, subset=config.subset)


def _is_mmlu_csv(path: Path) -> bool:
    """Whether it is one of MMLU's own CSV files, which have no header: question, four choices, letter."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        row = next(csv.reader(file), [])
    return len(row) == _MMLU_COLUMNS and row[-1].strip() in ascii_uppercase[:4]


def _read_mmlu_csv(name: str) -> Iterator[RawRecord]:
    with user_path(name).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for row in reader:
            if len(row) != _MMLU_COLUMNS:
                raise WhetError(
                    f"{name}:{reader.line_num}: this row has {len(row)} columns, the first has {_MMLU_COLUMNS}"
                )
            record = {"question": row[0], "choices": row[1:-1], "answer": row[-1].strip()}
            yield RawRecord(reader.line_num, DecodedRecord(record), name)


# The formats of records.


class TaskFormat(NamedTuple):
    """A kind of record: how to parse one, and the default scorer and answer length."""

    name: str
    parse: ParseRecord
    scorer: str
    max_new_tokens: int


def detect_task_format(record: Any, fields: Mapping[str, str]) -> TaskFormat | None:
    """The format of a file, from its first record; None for what may be a conversation."""
    if not isinstance(record, dict):
        return None
    if record.keys() >= HUMAN_EVAL_FIELDS:
        return TaskFormat("HumanEval", _parse_human_eval, "tests", 512)
    if question_formats.recognise_multiple_choice(record, {}):
        return TaskFormat("multiple choice", _parse_multiple_choice, "letters", 1)
    if question_formats.recognise_gsm8k(record, {}):
        return TaskFormat("GSM8K", _parse_gsm8k, "number", 400)
    prompt = _find_key(record, "prompt", _PROMPT_KEYS, fields) or _find_key(record, "messages", _MESSAGES_KEYS, fields)
    answer = _find_key(record, "answer", _ANSWER_KEYS, fields)
    if prompt and answer and "choices" not in record:
        return TaskFormat("questions", _question_parser(fields), "exact", 256)
    return None


def _parse_multiple_choice(record: Any, origin: Origin, opening: Messages) -> Example:
    names = question_formats.recognise_multiple_choice(record, {})
    question, choices, right = question_formats.read_multiple_choice(
        record, names[0] if names else {"question": "question", "choices": "choices", "answer": "answer"}
    )
    messages = _open([Message("user", question_formats.multiple_choice_prompt(question, choices))], record, opening)
    return Example(messages, (ascii_uppercase[right],), str(origin), len(choices))


def _parse_gsm8k(record: Any, origin: Origin, opening: Messages) -> Example:
    *question, answer = question_formats.parse_gsm8k(
        record, {"question": "question", "answer": "answer"}, origin
    ).messages
    return Example(_open(question, record, opening), (answer.content,), str(origin))


def _open(messages: Sequence[Message], record: Mapping[str, Any], opening: Messages) -> Messages:
    """The messages, after the record's own system prompt or else the task's."""
    whole = tuple(add_system_prompt(messages, record, {}))
    return whole if whole[0].role == "system" else (*opening, *whole)


def _parse_human_eval(record: Any, origin: Origin, opening: Messages) -> Example:
    extra = {name: require_nonempty(require_field(record, name), f"'{name}'") for name in HUMAN_EVAL_FIELDS}
    question = Message("user", human_eval_prompt(extra["prompt"]))
    solution = record.get("canonical_solution")
    return Example((*opening, question), (str(solution or ""),), str(origin), extra=extra)


def _question_parser(fields: Mapping[str, str]) -> ParseRecord:
    def parse(record: Any, origin: Origin, opening: Messages) -> Example:
        if not isinstance(record, dict):
            raise BadRecordError(
                "not an object",
                f"a record must be an object with a prompt and an answer; this is {describe_type(record)}",
            )
        key = _find_key(record, "messages", _MESSAGES_KEYS, fields)
        if key:
            turns = decode_list(record[key], f"'{key}'")
            if not isinstance(turns, list) or not turns:
                raise BadRecordError("bad messages", f"'{key}' must be a list of messages, not {describe_type(turns)}")
            messages = parse_message_list(turns)
            if messages[-1].role == "assistant":
                raise BadRecordError(
                    "bad messages", f"the last message of '{key}' is the assistant's; end with a question"
                )
        else:
            key = _find_key(record, "prompt", _PROMPT_KEYS, fields) or fields.get("prompt", "prompt")
            messages = (Message("user", require_nonempty(require_field(record, key), f"'{key}'")),)
        extra = {"schema": record["schema"]} if isinstance(record.get("schema"), (dict, bool)) else {}
        name, tools = find_optional(record, "tools", RECORD_FIELDS["tools"], {})
        return Example(
            _open(messages, record, opening), _correct_answers(record, fields), str(origin),
            tools=parse_tools(tools, name), extra=extra,
        )  # fmt: skip

    return parse


def _correct_answers(record: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[str, ...]:
    """One answer, or a list of alternatives; numbers and objects are written as JSON."""
    name = _find_key(record, "answer", _ANSWER_KEYS, fields)
    value = None if name is None else record[name]
    values = value if isinstance(value, list) else [value]
    texts = [
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values if each is not None
    ]
    if not texts or not all(text.strip() for text in texts):
        keys = ", ".join(map(repr, list(record)[:20]))
        found = f"'{name}' is empty" if name else f"the record has {keys}"
        raise BadRecordError(
            "no answer", f"no correct answer ({found}). Add 'answer', or name its field: fields: {{answer: NAME}}"
        )
    return tuple(require_text(text, f"'{name}'") for text in texts)


def _find_key(
    record: Mapping[str, Any], field: str, defaults: tuple[str, ...], fields: Mapping[str, str]
) -> str | None:
    """The key of a field in a record: the configured one, or the first default that is present."""
    names = (fields[field],) if field in fields else defaults
    return next((name for name in names if record.get(name) is not None), None)
