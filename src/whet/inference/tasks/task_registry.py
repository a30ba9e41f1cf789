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

# Tasks that need no file: the held-out parts of what whet can generate, which no training on the others shows.

_BUILTIN_TASKS = {
    "orders": ("exact", 64),
    "spelling": ("exact", 64),
    "spelling-bee": ("number", 256),
    "arithmetic": ("number", 128),
}
"""By name: the scorer, and tokens for an answer."""


def builtin_task_names() -> list[str]:
    return list(_BUILTIN_TASKS)


def make_builtin_task(config: TaskConfig) -> Task:
    """A task that is built in; a WhetError that lists them for another name."""
    name = config.builtin
    if name not in _BUILTIN_TASKS:
        raise WhetError(
            f"eval.tasks: there is no task '{name}'; known are: {', '.join(_BUILTIN_TASKS)}. Or give the path of a file, "
            "such as ./my.jsonl"
        )
    for key in ("fields", "split", "subset"):
        if getattr(config, key) is not None:
            raise WhetError(f"eval.tasks: {config.title}: {key} is for files and means nothing here; remove it")
    scorer, longest = _BUILTIN_TASKS[name]
    examples: Callable[[int], list[Example]] = partial(_builtin_examples, name, config.system)
    judge = make_scorer(config, config.scorer or scorer)
    return Task(config.title, examples, config.max_new_tokens or longest, judge, config.calculator)


def _builtin_examples(name: str, system: str | None, count: int) -> list[Example]:
    opening = ({"role": "system", "content": system},) if system else ()
    found = []
    for number, sample in enumerate(
        itertools.islice(BUILTIN_GENERATORS[f"builtin:{name}"]("held-out", "remove"), count), 1
    ):
        *asked, answer = sample.messages
        messages = (*opening, *(message.as_dict() for message in asked))
        found.append(Example(messages, (answer.content,), f"builtin:{name}, number {number}"))
    return found


# Tasks by the names, files and options that the user gives.

_loaded: dict[str, list[tuple[Task, int]]] = {}
"""The tasks of one configuration: a run asks the same questions to its end, whatever becomes of the files."""


def load_tasks(config: EvalConfig) -> list[tuple[Task, int]]:
    """Each task and how many of its examples are wanted; a WhetError names what is wrong with one, before anything is
    computed."""
    found = [(_load_task(task, config), task.examples or config.examples) for task in config.tasks]
    _loaded.clear()
    _loaded[_cache_key(config)] = found
    return found


def loaded_tasks(config: EvalConfig) -> list[tuple[Task, int]]:
    """As they were found the last time, if that was for the same configuration."""
    return _loaded.get(_cache_key(config)) or load_tasks(config)


def _cache_key(config: EvalConfig) -> str:
    return config.model_dump_json(include={"tasks", "examples", "sandbox"})


def _load_task(task: TaskConfig, config: EvalConfig) -> Task:
    if task.builtin is not None:
        return make_builtin_task(task)
    return load_file_task(task, task.examples or config.examples, config.sandbox)
