"""From the command to the step: three calls, so that a reader or a debugger can follow them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from whet.training import trainer


def test_three_calls_lead_from_the_command_to_the_step(
    whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []
    train_step = trainer.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        names, frame = [f"{train_step.__module__}.{train_step.__name__}"], sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.split(".")[0] == "whet":
                names.append(f"{module}.{frame.f_code.co_name}")
            frame = frame.f_back
        stacks.append(names[::-1])
        return train_step(*args, **kwargs)

    monkeypatch.setattr(trainer, "train_step", watched)
    assert whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=2", "export.at_end=none").code == 0
    assert len(stacks) == 2
    for stack in stacks:
        assert stack[stack.index("whet.cli.train.train") :] == [
            "whet.cli.train.train",
            "whet.run.lifecycle.run_training",
            "whet.training.trainer.train",
            "whet.training.step.train_step",
        ]
