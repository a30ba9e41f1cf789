"""A search over a script of the user's, such as one of transformers' `Trainer` or TRL with WhetCallback:

    run: {name: sft-rate}
    script:
      command: python sft.py --model_name Qwen/Qwen3-0.6B
      steps: 400
      arguments:
        learning_rate: {search: log, low: 1e-6, high: 1e-4}
        packing: true
    search: {max_trials: 16}

A trial is `python sft.py --model_name … --learning_rate=3.1e-05 --packing=true`; WhetCallback takes the trial's folder,
its length and its next rung from the environment.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from whet.config import Config, RunConfig
from whet.core.config import Section, config_error
from whet.core.files import user_path
from whet.launch.config import LaunchConfig
from whet.launch.local import python_script
from whet.search.config import SearchConfig

_ArgumentValue = str | int | float | bool | None | list[str | int | float | bool]


class ScriptSettings(Section):
    """What a trial starts."""

    command: str | list[str] = Field(
        description="The command of a trial, such as python sft.py; a list of words is used unchanged. A .py script by "
        "itself runs with whet's Python."
    )
    steps: int = Field(ge=1, description="The length of a whole trial; WhetCallback sets Trainer's max_steps to it.")
    arguments: dict[str, _ArgumentValue] = Field(
        default={},
        description="Appended to the command as --NAME=VALUE, a list as --NAME VALUE VALUE; null leaves an argument "
        "out. Write ranges here.",
    )
    greater_is_better: bool | None = Field(
        default=None,
        description="Whether higher values of search.metric are better; needed for metrics that are neither losses "
        "nor accuracies.",
    )

    @model_validator(mode="after")
    def _check_command(self) -> ScriptSettings:
        words = self._split_command()
        if not words:
            raise config_error("command", "the command is empty. Give one, such as python sft.py")
        script = python_script(words)
        if script is not None and not Path(script).expanduser().is_file():
            raise config_error("command", f"{script}: no such file. Paths are relative to the working directory")
        if script != words[0] and shutil.which(words[0]) is None:
            raise config_error("command", f"{words[0]}: no such program on this machine")
        return self

    def _split_command(self) -> list[str]:
        try:
            return shlex.split(self.command) if isinstance(self.command, str) else self.command
        except ValueError as error:
            raise config_error("command", f"{self.command!r}: {error}. Close it") from None

    def argv(self) -> list[str]:
        """The command with its arguments."""
        command = self._split_command()
        words = [sys.executable, *command] if python_script(command) == command[0] else list(command)
        for name, value in self.arguments.items():
            if isinstance(value, list):
                words += [f"--{name}", *map(_as_text, value)]
            elif value is not None:
                words.append(f"--{name}={_as_text(value)}")
        return words


class ScriptConfig(Section):
    """The recipe of a search over a script, or of one of its trials."""

    run: RunConfig = Field(default=RunConfig())
    script: ScriptSettings
    launch: LaunchConfig = Field(default=LaunchConfig())
    search: SearchConfig | None = Field(default=None)

    @property
    def folder(self) -> Path:
        """Of the search, or of the trial."""
        return user_path(self.run.dir or f"runs/{self.run.name}")


TrialConfig = Config | ScriptConfig


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
