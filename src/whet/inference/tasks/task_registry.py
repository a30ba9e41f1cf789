"""Tasks from the configuration: built-in ones by name, others from files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from whet.core.errors import WhetError
from whet.data.builtin import BUILTIN_GENERATORS
from whet.inference.config import EvalConfig, TaskConfig
from whet.inference.tasks.scorers import make_scorer
from whet.inference.tasks.task import Example, Task
from whet.inference.tasks.task_files import load_file_task

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
    opening = ({"role": "system", "content": system},) if system else ()
    conversations = BUILTIN_GENERATORS[f"builtin:{name}"]("held-out", "remove")
    examples = []
    for number, conversation in enumerate(itertools.islice(conversations, count), 1):
        *question, answer = conversation.messages
        messages = (*opening, *(message.as_dict() for message in question))
        examples.append(Example(messages, (answer.content,), f"builtin:{name}, number {number}"))
    return examples
