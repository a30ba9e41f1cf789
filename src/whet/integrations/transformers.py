"""A callback with which a script of transformers' `Trainer`, or TRL's, writes a run folder of whet:

    trainer = SFTTrainer(..., callbacks=[WhetCallback("runs/my-sft")])

`whet runs`, `whet report` and `whet dash` then show the run, and `whet runs stop` stops it. `whet search` can start the
script as a trial, and then stops it at rungs and continues it:

    trainer.train(resume_from_checkpoint=whet.checkpoint)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, __version__
from transformers.trainer_utils import get_last_checkpoint

from whet.core.console import info, warn
from whet.core.display import mask_settings
from whet.core.errors import ExitCode, WhetError, first_line
from whet.core.files import atomic_write, move_aside
from whet.core.heartbeat import PHASE
from whet.core.json_lines import JsonLinesWriter, read_json_lines
from whet.core.launch_env import search_trial
from whet.core.run_folder import RunFolder, write_config
from whet.core.signals import stop_signals
from whet.core.yaml import dump_yaml

_KEYS = {
    "learning_rate": "lr", "mean_token_accuracy": "accuracy", "num_tokens": "tokens", "num_input_tokens_seen": "tokens",
    "eval_loss": "val_loss", "eval_mean_token_accuracy": "val_accuracy",
}  # fmt: skip
"""The keys of Trainer's and TRL's logs that have another name in metrics.jsonl."""
_SPEEDS = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second")
"""The ends of keys about an evaluation's speed, which are left out."""
_TRAINER_FOLDER = "trainer"
"""In a trial's run folder: Trainer's checkpoints."""
_SUMMARY = "train_runtime"
"""A key of the line that Trainer logs after the last step. It repeats what the steps have told."""


class WhetCallback(TrainerCallback):
    """Writes config.yaml, status.json, metrics.jsonl and events.jsonl of a run folder.

    SIGTERM, SIGUSR1, SIGHUP and a file `stop` in the folder end training after the current step, with a checkpoint of
    Trainer's; `stopped` then tells it from training that is complete. `trainer.train(resume_from_checkpoint=True)`
    continues the run folder. A new training moves an earlier run in the folder aside. Without a disk to write to,
    training goes on.

    In a trial of `whet search`, the folder, Trainer's `output_dir` and its `max_steps` are those of the trial, and
    training ends at the trial's next rung, after an evaluation and a checkpoint.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, project: str | None = None, tags: Sequence[str] = ()
    ) -> None:
        """`folder`: default runs/NAME, with the name of Trainer's `output_dir`."""
        self.stopped = False
        """Whether a signal, `whet runs stop` or a rung of `whet search` has ended training before its last step."""
        self._trial = search_trial()
        self._given, self._project, self._tags = folder, project, list(tags)
        self._is_at_rung = False
        self._folder: RunFolder | None = None  # of the first process, while it trains
        self._signals: list[int] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._trainer_code: CodeType | None = None

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint from which `whet search` continues a trial; None for a new trial, and outside a search."""
        folder = None if self._trial is None else Path(self._trial.folder, _TRAINER_FOLDER)
        found: str | None = get_last_checkpoint(str(folder)) if folder is not None and folder.is_dir() else None
        return found

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """In a trial, train for its length and into its folder."""
        if self._trial is not None:
            args.output_dir, args.max_steps = str(Path(self._trial.folder, _TRAINER_FOLDER)), self._trial.steps
            args.save_total_limit = args.save_total_limit or 1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the folder; raises a WhetError if another process uses it, or if a trial has nothing to evaluate on."""
        if self._trial is not None:
            _require_eval_dataset(_find_trainer(sys._getframe()))
        self._end("failed", ExitCode.FAILED, "training ended with an error")  # of an earlier `train` of this process
        self.stopped = self._is_at_rung = False
        self._signals.clear()
        self._install_handlers()
        if not state.is_world_process_zero:
            return
        if self._trial is not None:
            path = Path(self._trial.folder)
            if state.global_step == 0 and self.checkpoint is not None:
                warn(
                    f"WhetCallback: this trial trains again from step 0, though {self.checkpoint} exists. Continue it: "
                    "trainer.train(resume_from_checkpoint=callback.checkpoint)"
                )
        else:
            path = Path("runs", Path(args.output_dir).name) if self._given is None else Path(self._given)
            if state.global_step == 0:
                _move_aside(path)
        folder = RunFolder(path)
        if not folder.holds_run() and self._trial is None:
            folder.require_empty()
        write_config(path, dump_yaml(self._describe(path, args, state, kwargs.get("model"))))
        _drop_later_lines(path / "metrics.jsonl", state.global_step)
        self._metrics = JsonLinesWriter(path / "metrics.jsonl")
        self._events = JsonLinesWriter(path / "events.jsonl")
        self._logged_at, self._logged_step, self._logged_tokens = time.time(), state.global_step, 0
        self._earlier_tokens = max(
            (int(line.get("tokens") or 0) for line in read_json_lines(path / "metrics.jsonl")[0]), default=0
        )
        self._folder = folder
        PHASE.enter("training", state.global_step)
        folder.set_status("running", state.global_step, state.max_steps)
        atexit.register(self._end_at_exit)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Write the heartbeat, and end training where that is requested."""
        self._beat("training", state)
        is_requested = bool(self._signals) or (self._folder is not None and self._folder.stop_requested())
        if _on_any_rank(is_requested, args.device):
            self.stopped = state.global_step < state.max_steps
            # logged, because TRL counts tokens from the start of a process, and the next one has to know them
            control.should_log = control.should_save = control.should_training_stop = True
        if self._trial is not None and state.global_step >= self._trial.until:
            self._is_at_rung = self.stopped = state.global_step < state.max_steps
            control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = True
        return control

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._beat("training", state)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._beat("evaluating", state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: Mapping[str, Any] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Write a line of metrics.jsonl, and an event where the loss or the gradient is not finite."""
        if self._folder is None or not logs or _SUMMARY in logs:
            return
        line: dict[str, Any] = {"time": time.time(), "step": state.global_step, **whet_metrics(logs)}
        if "loss" in line:
            line |= self._speed(line)
        with self._writing():
            self._metrics.write({key: _finite_or_none(value) for key, value in line.items()})
            wrong = [key for key in ("loss", "grad_norm") if key in line and _finite_or_none(line[key]) is None]
            if wrong:
                reason = f"{' and '.join(wrong)} not finite"
                event = {"time": line["time"], "step": line["step"], "kind": "nonfinite", "reason": reason}
                self._events.write(event | {"action": "take"})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write how training ended."""
        self._beat("training", state)
        if self._is_at_rung:
            self._end("stopped", ExitCode.DONE, None)
        elif self.stopped:
            reason = "stopped on request; trainer.train(resume_from_checkpoint=True) continues it"
            self._end("stopped", ExitCode.STOPPED, reason)
            if state.is_world_process_zero:
                info("stopped on request, after saving a checkpoint")
        else:
            is_early = state.global_step < state.max_steps
            self._end("finished", ExitCode.DONE, "ended early by another callback" if is_early else None)

    def _describe(self, path: Path, args: TrainingArguments, state: TrainerState, model: Any) -> dict[str, Any]:
        """What config.yaml says: whet's keys where they have a meaning here, and all of Trainer's arguments."""
        run = {"name": path.name, "dir": str(path.absolute()), "project": self._project, "tags": self._tags}
        settings: dict[str, Any] = {"run": {key: value for key, value in run.items() if value is not None}}
        config = getattr(model, "config", None)
        settings["model"] = {"path": getattr(config, "_name_or_path", "") or type(model).__name__}
        for adapter in getattr(model, "peft_config", {}).values():
            settings["adapter"] = {"method": str(adapter.peft_type.value).lower(), "rank": getattr(adapter, "r", None)}
        settings["train"] = {"steps": state.max_steps}
        arguments = json.loads(json.dumps(args.to_dict(), default=str))
        settings["trainer"] = {"script": sys.argv[0], "transformers": __version__, "arguments": arguments}
        masked: dict[str, Any] = mask_settings(settings)
        return masked

    def _speed(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Seconds and tokens per second of the steps since the last line."""
        seconds, steps = line["time"] - self._logged_at, line["step"] - self._logged_step
        tokens = int(line.get("tokens") or 0)
        if tokens and not self._logged_tokens and self._counts_whole_run(tokens, line["step"]):
            self._earlier_tokens = 0
        tokens += self._earlier_tokens if tokens else 0
        speed = {"step_s": seconds / max(1, steps)}
        if self._logged_tokens and seconds > 0:
            speed["tokens_per_s"] = (tokens - self._logged_tokens) / seconds
        self._logged_at, self._logged_step, self._logged_tokens = line["time"], line["step"], tokens
        return ({"tokens": tokens} if tokens else {}) | speed

    def _counts_whole_run(self, tokens: int, step: int) -> bool:
        """Where a run continues, Trainer counts on, and TRL begins anew: whichever fits the tokens of earlier steps."""
        before, since = self._logged_step, step - self._logged_step
        if not before or since <= 0:
            return True
        usual = self._earlier_tokens / before
        return tokens >= self._earlier_tokens and abs(tokens / step - usual) < abs(tokens / since - usual)

    def _beat(self, phase: str, state: TrainerState) -> None:
        if self._folder is not None:
            PHASE.enter(phase, state.global_step)
            with self._writing():
                self._folder.heartbeat(state.global_step, state.max_steps)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or a deleted folder ends the record, not the training."""
        try:
            yield
        except (OSError, WhetError) as error:
            warn(f"WhetCallback: {first_line(error)}. Training goes on, but nothing is recorded")
            self._release()

    def _end(self, state: str, exit_code: ExitCode, reason: str | None) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._handlers.clear()
        if self._folder is None:
            return
        with self._writing():
            self._metrics.close()
            self._events.close()
            self._folder.set_ended(state, exit_code, reason)
        self._release()

    def _release(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.close()
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Trainer calls no callback when training raises: the interpreter's last exception tells why."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, KeyboardInterrupt):
            self._end("stopped", ExitCode.INTERRUPTED, "interrupted; the last checkpoint is good")
        else:
            reason = "the process ended" if error is None else f"{type(error).__name__}: {first_line(error)}"
            self._end("failed", ExitCode.FAILED, reason)

    def _install_handlers(self) -> None:
        """Ctrl-C stays Python's: in a notebook, it means now."""
        if threading.current_thread() is not threading.main_thread():
            return
        trainer = _find_trainer(sys._getframe())
        self._trainer_code = None if trainer is None else trainer[1]
        wanted = [number for number in stop_signals() if number != signal.SIGINT]
        self._handlers = {number: signal.signal(number, self._on_signal) for number in wanted}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Request a stop; after training has raised, what the signal did before."""
        if self._trainer_code is None or any(each.f_code is self._trainer_code for each in _frames(frame)):
            self._signals.append(number)
            return
        signal.signal(number, self._handlers.get(signal.Signals(number)) or signal.SIG_DFL)
        signal.raise_signal(number)


def whet_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log of Trainer or TRL by whet's keys; those that whet does not have keep their name, `eval_` in
    it as `val_`. Several evaluation sets have keys such as eval_NAME_loss."""
    found: dict[str, float] = {}
    for key, value in logs.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or key in ("step", "time"):
            continue
        if key in _KEYS:
            found[_KEYS[key]] = value
        elif not key.startswith("eval_"):
            found[key] = value
        elif key.endswith("_loss"):
            found[f"val_loss/{key.removeprefix('eval_').removesuffix('_loss')}"] = value
        elif key.endswith("_mean_token_accuracy"):
            found[f"val_accuracy/{key.removeprefix('eval_').removesuffix('_mean_token_accuracy')}"] = value
        elif not key.endswith(_SPEEDS):
            found[f"val_{key.removeprefix('eval_')}"] = value
    if any(key.startswith("val_") for key in found):
        found.pop("tokens", None)  # of training, logged beside the evaluation
    return found


def _move_aside(path: Path) -> None:
    """Rename the folder of an earlier run, if there is one and no process uses it."""
    if (path / "config.yaml").exists():
        RunFolder(path).close()
        info(f"the earlier run is now in {move_aside(path)}")


def _drop_later_lines(file: Path, step: int) -> None:
    """A resumed training repeats what came after its checkpoint, which Trainer saves after the step's evaluation."""
    if file.exists():
        kept = [line for line in read_json_lines(file)[0] if isinstance(line.get("step"), int) and line["step"] <= step]
        atomic_write(file, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in kept))


def _on_any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on one of the processes: all must end after the same step."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flag
    flags = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
    return bool(flags.item())


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _find_trainer(frame: FrameType) -> tuple[Trainer, CodeType] | None:
    """The trainer that calls this callback, and the code of its `train`, which is on the stack as long as training
    lasts."""
    found = [(each.f_locals["self"], each.f_code) for each in _frames(frame) if _is_of_trainer(each)]
    return found[-1] if found else None


def _is_of_trainer(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), Trainer)


def _require_eval_dataset(found: tuple[Trainer, CodeType] | None) -> None:
    """Trainer itself would find it missing at the trial's first rung, after so many steps."""
    if found is not None and getattr(found[0], "eval_dataset", None) is None:
        raise WhetError(
            f"{type(found[0]).__name__}: eval_dataset is missing: `whet search` compares trials by their eval_loss. "
            "Pass one to the trainer"
        )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
