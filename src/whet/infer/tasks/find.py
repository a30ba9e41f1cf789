"""Tasks by the names, files and options that the user gives."""

from __future__ import annotations

from whet.infer.config import EvalConfig, TaskConfig
from whet.infer.tasks.builtin import builtin_task
from whet.infer.tasks.files import file_task
from whet.infer.tasks.task import Task

_found: dict[str, list[tuple[Task, int]]] = {}
"""The tasks of one configuration: a run asks the same questions to its end, whatever becomes of the files."""


def find_tasks(config: EvalConfig) -> list[tuple[Task, int]]:
    """Each task and how many of its examples are wanted; a WhetError names what is wrong with one, before anything is
    computed."""
    found = [(_find(task, config), task.examples or config.examples) for task in config.tasks]
    _found.clear()
    _found[_key(config)] = found
    return found


def known_tasks(config: EvalConfig) -> list[tuple[Task, int]]:
    """As they were found the last time, if that was for the same configuration."""
    return _found.get(_key(config)) or find_tasks(config)


def _key(config: EvalConfig) -> str:
    return config.model_dump_json(include={"tasks", "examples", "sandbox"})


def _find(task: TaskConfig, config: EvalConfig) -> Task:
    if task.builtin is not None:
        return builtin_task(task)
    return file_task(task, task.examples or config.examples, config.sandbox)
