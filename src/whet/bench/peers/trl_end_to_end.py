"""The script of `trl sft`, timed by stage: `python trl_end_to_end.py SETTINGS.json`. Does not import whet.

TRL's own script runs unchanged; a subclass of its trainer notes when each stage ends.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from timed_sft import run_script

_DEVICE_STAGES = ("first validation", "first step", "training", "validation")
"""They end when the device has finished."""


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Run `trl sft --config CONFIG`; returns the Unix time at which each stage ended, in order."""
    import torch
    import trl
    from transformers import TrainerCallback
    from trl.scripts import sft

    ends: list[tuple[str, float]] = []
    trainers: list[Any] = []

    def end_stage(stage: str) -> None:
        if stage in _DEVICE_STAGES and settings["device"] != "cpu":
            torch.accelerator.synchronize()
        ends.append((stage, time.time()))
        sys.stderr.write(f"{stage} ended at {ends[-1][1]:.3f}\n")  # for whoever waits
        sys.stderr.flush()

    class Clock(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                end_stage("first step")

    class TimedTrainer(trl.SFTTrainer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            end_stage("data")
            trainers.append(self)
            super().__init__(*arguments, **more, callbacks=[Clock()])
            end_stage("model")

        def _prepare_dataset(self, *arguments: Any, **more: Any) -> Any:  # the constructor tokenizes the data
            end_stage("model")
            prepared = super()._prepare_dataset(*arguments, **more)
            end_stage("data")
            return prepared

        def evaluate(self, *arguments: Any, **more: Any) -> Any:
            is_first = self.state.global_step == 0
            end_stage("first step" if is_first else "training")
            results = super().evaluate(*arguments, **more)
            end_stage("first validation" if is_first else "validation")
            return results

        def train(self, *arguments: Any, **more: Any) -> Any:
            result = super().train(*arguments, **more)
            end_stage("training")
            return result

    parser = sft.make_parser()
    arguments = parser.parse_args_and_config(["--config", settings["config_file"]])
    trl.SFTTrainer = TimedTrainer
    end_stage("start")
    sft.main(*arguments)
    end_stage("export")
    state = trainers[0].state
    losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    return {"ends": ends, "steps": state.global_step, "val_loss": losses}


if __name__ == "__main__":
    run_script(run)
