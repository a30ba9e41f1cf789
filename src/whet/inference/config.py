"""Settings of evaluation: `eval` and its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from whet.core.config import Section, config_error

ScorerName = Literal["exact", "number", "contains", "regex", "json", "json-schema", "bleu", "chrf", "rouge"]
SCORERS: tuple[str, ...] = ScorerName.__args__  # type: ignore[attr-defined]
_BUILTIN_PREFIX = "builtin:"


class TaskConfig(Section):
    """A task: one that is built in, or a file of yours. A text alone is its path, or PATH:SCORER."""

    path: str = Field(
        description="A built-in task such as orders, or a file with questions and answers: prompt or messages with "
        "answer, MMLU, ARC, GSM8K, HumanEval, or conversations, whose last answer is then the right one."
    )
    name: str | None = Field(default=None, description="What to call it; the file's name without ending if absent.")
    scorer: ScorerName | None = Field(
        default=None,
        description="How an answer is judged; absent: by the file's kind (choices by their letters, GSM8K by number, "
        "HumanEval by its tests), else exact.",
    )
    pattern: str | None = Field(
        default=None,
        description="Of regex: what it finds last in the answer, or its first group, must be the right answer; absent: "
        "the right answer is itself a pattern.",
    )
    schema_file: str | None = Field(
        default=None, description="Of json-schema: the schema; absent: each record has its own as schema."
    )
    split: str | None = Field(default=None, description="Of a data set: its split.")
    subset: str | None = Field(default=None, description="Of a data set on the hub: the name of its configuration.")
    fields: dict[str, str] | None = Field(
        default=None, description="Names in your file for prompt, messages and answer, such as {prompt: text}."
    )
    system: str | None = Field(default=None, description="A system message before each question.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="The longest answer; absent: what is usual for such a task, or 256."
    )
    calculator: bool | None = Field(
        default=None,
        description="Whether the model may use the calculator: true offers it as its chat template does; absent: what "
        "it writes between nanochat's markers, if its tokenizer has them, is worked out.",
    )
    examples: int | None = Field(default=None, ge=1, description="How many; absent: eval.examples.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return parse_task_text(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> TaskConfig:
        if self.pattern is not None and self.scorer != "regex":
            raise config_error("pattern", "it is for scorer: regex. Set that, or remove the pattern")
        if self.schema_file is not None and self.scorer != "json-schema":
            raise config_error("schema_file", "it is for scorer: json-schema. Set that, or remove it")
        return self

    @property
    def builtin(self) -> str | None:
        """The name of a task that is built in; None for a file."""
        if self.path.startswith(_BUILTIN_PREFIX):
            return self.path.removeprefix(_BUILTIN_PREFIX)
        return None if any(sign in self.path for sign in "/.:") else self.path

    @property
    def title(self) -> str:
        """What results are filed under: task/TITLE."""
        return self.name or self.builtin or Path(self.path).name.split(".")[0] or self.path


def parse_task_text(text: str) -> dict[str, str]:
    """PATH or PATH:SCORER. What stands there as a file is taken for that, whatever it is called."""
    path, colon, scorer = text.rpartition(":")
    if not colon or path in ("builtin", "hub") or Path(text).expanduser().exists():
        return {"path": text}
    return {"path": path, "scorer": scorer}


class EvalConfig(Section):
    """Measuring while training."""

    every: int | None = Field(default=None, ge=1, description="Steps between evaluations; absent: start and end only.")
    rows: int | None = Field(
        default=None,
        ge=1,
        description="At most so many packed rows of the validation data, evenly chosen; absent: all.",
    )
    at_start: bool = Field(default=True, description="Measure the untrained model too, as the line to beat.")
    tasks: list[TaskConfig] = Field(
        default=[], description="Questions to ask, by name or file, such as [orders, my.jsonl:number]."
    )
    examples: int = Field(default=64, ge=1, description="Held-out examples of each task.")
    minutes: float | None = Field(
        default=None,
        gt=0,
        description="Time for all tasks of one evaluation, shared evenly; what is not asked by then is left out, and "
        "how many were asked is told. Absent: no limit.",
    )
    sandbox: Literal["strict", "limits"] = Field(
        default="strict",
        description="How generated code is run: strict without network or files of this machine, or not at all where "
        "the system does not permit that; limits with bounds on time and memory only.",
    )
    best: str = Field(
        default="val_loss",
        description="Which measure checkpoints/best and checkpoint.keep_best go by, such as val_loss or task/orders; "
        "higher is better for tasks and accuracies, lower for all else.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> EvalConfig:
        titles = [task.title for task in self.tasks]
        twice = next((title for title in titles if titles.count(title) > 1), None)
        if twice is not None:
            raise config_error(
                "tasks", f"two tasks are called {twice}. Give one another name: {{path: FILE, name: OTHER}}"
            )
        return self

    @property
    def task_names(self) -> list[str]:
        return [task.title for task in self.tasks]
