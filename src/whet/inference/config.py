"""Settings of evaluation: `eval` and its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.core.config import Section, config_error
from whet.core.files import user_path
from whet.core.plugins import require_plugin

SCORERS = ("exact", "number", "contains", "regex", "json", "json-schema", "bleu", "chrf", "rouge")
_BUILTIN_PREFIX = "builtin:"


class TaskConfig(Section):
    """A task: a built-in one or a file. A plain string is its path, or PATH:SCORER."""

    path: str = Field(
        description="A built-in task such as orders, or a file of questions with answers: prompt or messages with "
        "answer, MMLU, ARC, GSM8K, HumanEval, or conversations, whose last message is the correct answer."
    )
    name: str | None = Field(default=None, description="The task's name; absent: the file name without extension.")
    scorer: str | None = Field(
        default=None,
        description=f"How answers are scored: {', '.join(SCORERS)}, or one of your own (docs/python.md); absent: by "
        "the file's format (multiple choice by letters, GSM8K by number, HumanEval by its tests), else exact.",
    )
    pattern: str | None = Field(
        default=None,
        description="For scorer regex: the last match in the answer, or its first group, must equal the correct "
        "answer; absent: the correct answer is itself a pattern.",
    )
    schema_file: str | None = Field(
        default=None,
        description="For scorer json-schema: a file with the schema; absent: each record has a field schema.",
    )
    split: str | None = Field(default=None, description="The split of a dataset.")
    subset: str | None = Field(default=None, description="The configuration of a dataset on the hub.")
    fields: dict[str, str] | None = Field(
        default=None, description="The names of prompt, messages and answer in the file, such as {prompt: text}."
    )
    system: str | None = Field(default=None, description="A system message for every question.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Maximum tokens of an answer; absent: the default of the format, or 256."
    )
    calculator: bool | None = Field(
        default=None,
        description="Whether the model may use the calculator: true offers it as a tool in the chat template; absent: "
        "only inline calculations are evaluated, if the tokenizer has nanochat's special tokens for them.",
    )
    examples: int | None = Field(default=None, ge=1, description="Number of examples; absent: eval.examples.")

    @field_validator("scorer")
    @classmethod
    def _scorer_exists(cls, scorer: str | None) -> str | None:
        if scorer is not None and scorer not in SCORERS:
            require_plugin("scorers", scorer, SCORERS)
        return scorer

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return parse_task_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> TaskConfig:
        if self.pattern is not None and self.scorer != "regex":
            raise config_error("pattern", "only scorer: regex has a pattern. Set scorer: regex, or remove the pattern")
        if self.schema_file is not None and self.scorer != "json-schema":
            raise config_error(
                "schema_file", "only scorer: json-schema has a schema_file. Set scorer: json-schema, or remove it"
            )
        return self

    @property
    def builtin(self) -> str | None:
        """The name of a built-in task; None for a file."""
        if self.path.startswith(_BUILTIN_PREFIX):
            return self.path.removeprefix(_BUILTIN_PREFIX)
        return None if any(sign in self.path for sign in "/.:") else self.path

    @property
    def title(self) -> str:
        """The name in results: task/TITLE."""
        return self.name or self.builtin or Path(self.path).name.split(".")[0] or self.path


def parse_task_text(text: str) -> dict[str, str]:
    """PATH or PATH:SCORER; an existing file is always a path, even if its name contains a colon."""
    path, colon, scorer = text.rpartition(":")
    if not colon or path in ("builtin", "hub") or user_path(text).exists():
        return {"path": text}
    return {"path": path, "scorer": scorer}


class EvalConfig(Section):
    """Evaluation during training, and the defaults of `whet eval`."""

    alternatives = (("rows", "tokens"),)

    every: int | None = Field(
        default=None, ge=1, description="Steps between evaluations; absent: only at the start and the end."
    )
    rows: int | None = Field(
        default=None,
        ge=1,
        description="Maximum packed rows of validation data, chosen evenly; absent: all.",
    )
    tokens: int | None = Field(
        default=None, ge=1, description="Alternative: room for tokens, in whole rows, like train.batch.tokens."
    )
    at_start: bool = Field(default=True, description="Evaluate before the first step too.")
    tasks: list[TaskConfig] = Field(default=[], description="Tasks by name or file, such as [orders, my.jsonl:number].")
    prompts: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None,
        description="Messages that the model answers at every evaluation; the answers go to samples.jsonl. Absent: "
        "the beginnings of a few validation conversations, if there are no tasks; []: none.",
    )
    metrics: list[str] = Field(
        default=[],
        description="Your own metrics over all answers to tasks and prompts, named by their entry points in "
        "whet.metrics (docs/python.md); each becomes metric/NAME, and higher is better.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Early stopping: end the run after this many evaluations in a row without an improvement of "
        "eval.best; the best checkpoint is kept and exported. Absent: never.",
    )
    examples: int = Field(default=64, ge=1, description="Examples of each task.")
    minutes: float | None = Field(
        default=None,
        gt=0,
        description="Time limit for all tasks of an evaluation, shared evenly between them; if it ends a task early, "
        "the number of scored examples is reported. Absent: no limit.",
    )
    sandbox: Literal["strict", "limits"] = Field(
        default="strict",
        description="How generated code runs. strict: without network or access to this machine's files, and not at "
        "all if the system does not permit such a sandbox. limits: with limits on time, memory and system calls, "
        "but with access to this machine's files and processes.",
    )
    best: str = Field(
        default="val_loss",
        description="The metric of checkpoints/best and checkpoint.keep_best, such as val_loss or task/orders; higher "
        "is better for tasks, accuracies and metrics of your own, lower for all others.",
    )

    @field_validator("metrics")
    @classmethod
    def _metrics_exist(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            require_plugin("metrics", name)
        return metrics

    @model_validator(mode="after")
    def _names_differ(self) -> EvalConfig:
        titles = [task.title for task in self.tasks]
        duplicate = next((title for title in titles if titles.count(title) > 1), None)
        if duplicate is not None:
            raise config_error("tasks", f"two tasks have the name {duplicate}. Rename one: {{path: FILE, name: OTHER}}")
        return self

    @property
    def task_names(self) -> list[str]:
        return [task.title for task in self.tasks]
