"""A thread beside a run, on rank 0: counts device hours and energy into usage.json, and tells run.notify when the run
stalls. Nothing in training waits for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from whet.config import Config
from whet.core import launch_env
from whet.core.console import info, warn
from whet.core.costs import predicted_costs, read_prediction, read_sessions, write_usage
from whet.core.errors import StoppedError, WhetError
from whet.core.heartbeat import PHASE, describe_phase
from whet.core.json_lines import read_json_lines
from whet.core.notify import Notifier
from whet.core.run_folder import SUPERVISOR_VARIABLE, read_status
from whet.core.signals import StopRequested
from whet.data.prepare.workers import fork_lock

_PERIOD_S, _LOCK_S = 10.0, 0.5
_STEPS_TO_PREDICT = 5
_STALL_S = 600.0
"""Without progress in a phase that is bounded: far longer than a step, and before the watchdog of several processes
ends the run (parallel.timeout)."""


class RunMonitor:
    """Counts what a run uses, from its start to `close`."""

    def __init__(
        self, run: Path, devices: int, notifier: Notifier, stall_s: float, period_s: float = _PERIOD_S
    ) -> None:
        self._run, self._notifier, self._stall_s, self._period_s = run, notifier, stall_s, period_s
        self._earlier = read_sessions(run)
        self._began, self._last = time.monotonic(), time.monotonic()
        self._session: dict[str, Any] = {
            "started": time.time(), "seconds": 0.0, "devices": devices, "joules": None,
        }  # fmt: skip
        self._predicted = read_prediction(run)
        """The first prediction is kept: it is compared with what the run has cost in the end."""
        self._told_of = -1.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="whet-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and write the session a last time."""
        self._closed.set()
        self._thread.join(timeout=10.0)

    def _run_thread(self) -> None:
        is_open = True
        while is_open:
            is_open = not self._closed.wait(self._period_s)
            if not fork_lock.acquire(timeout=_LOCK_S):  # the model is being loaded
                continue
            try:
                self._count()
                self._check_progress()
            except Exception as error:  # whatever it is, the run goes on
                warn(f"{self._run / 'usage.json'}: {type(error).__name__}: {error}. Costs are no longer counted")
                return
            finally:
                fork_lock.release()

    def _count(self) -> None:
        now, watts = time.monotonic(), power_draw(int(self._session["devices"] or 1))
        if watts is not None:
            self._session["joules"] = (self._session["joules"] or 0.0) + watts * (now - self._last)
        self._last = now
        self._session["seconds"] = now - self._began
        if (self._run / "config.yaml").exists():  # not before the folder is a run, and not after it was deleted
            with contextlib.suppress(OSError):
                is_new = self._predicted is None and self._predict()
                write_usage(self._run, [*self._earlier, self._session], self._predicted)
                costs = predicted_costs(self._run) if is_new else None
                if costs is not None and costs.is_worth_predicting:
                    info(f"predicted for the whole run: {costs}")

    def _predict(self) -> bool:
        """Predict the whole run from its first steps, while it has most of them before it."""
        lines = read_json_lines(self._run / "metrics.jsonl")[0] if (self._run / "metrics.jsonl").is_file() else []
        times = [line["step_s"] for line in lines if line.get("tokens_per_s") and type(line.get("step_s")) is float]
        status = read_status(self._run)
        steps = (status.get("steps") or 0) - (status.get("step_offset") or 0)
        if len(times) < _STEPS_TO_PREDICT or len(times) > steps / 2:
            return False
        startup = next((line["time"] for line in lines if "loss" in line), 0.0) - float(self._session["started"] or 0)
        seconds, used = max(0.0, startup) + steps * median(times), float(self._session["seconds"] or 1)
        joules = self._session["joules"]
        self._predicted = {
            "seconds": seconds, "devices": self._session["devices"],
            "joules": None if joules is None else joules / used * seconds,
        }  # fmt: skip
        return True

    def _check_progress(self) -> None:
        since, silent_s = PHASE.since, time.monotonic() - PHASE.since
        if PHASE.unbounded or silent_s < self._stall_s or since == self._told_of:
            return
        self._told_of = since
        text = f"no progress for {silent_s / 60:.0f} minutes: {describe_phase(PHASE.snapshot())}"
        warn(text)
        self._notifier.send("stalled", text, step=PHASE.step)


@contextlib.contextmanager
def monitor_run(config: Config, is_on: bool) -> Iterator[None]:
    """Count what the run uses and tell run.notify how it ends. `is_on`: in the process that owns its folder."""
    if not is_on:
        yield
        return
    notifier = Notifier(config.run.notify, config.folder)
    stall_s = min(_STALL_S, 30.0 * config.parallel.timeout)
    monitor = RunMonitor(config.folder, _device_count(config), notifier, stall_s)
    try:
        yield
    except (StoppedError, StopRequested, KeyboardInterrupt, GeneratorExit):
        monitor.close()
        raise
    except BaseException as error:
        monitor.close()
        if SUPERVISOR_VARIABLE not in os.environ:  # `whet launch` may start it again, and tells when it gives up
            status = _status(config.folder)
            reason = str(error) or type(error).__name__
            notifier.send("failed", reason, step=status.get("step"), steps=status.get("steps"))
            notifier.wait()
        raise
    monitor.close()
    status = _status(config.folder)
    if status.get("state") == "finished":
        done = f"{status.get('step')} of {status.get('steps')} steps"
        notifier.send("finished", done, step=status.get("step"), steps=status.get("steps"))
        notifier.wait()


def _device_count(config: Config) -> int:
    """Devices of the run; processes that share a GPU count once."""
    world, local = launch_env.world_size(), launch_env.local_world_size()
    if not config.launch.share_gpu or not torch.cuda.is_available():
        return world
    return max(1, world // local * min(local, torch.cuda.device_count()))


def _status(folder: Path) -> dict[str, object]:
    with contextlib.suppress(WhetError):
        return read_status(folder)
    return {}


def power_draw(devices: int) -> float | None:
    """Watts of all GPUs of the run, as far as this machine's tell for the others; None without a GPU that tells."""
    if not torch.cuda.is_available():
        return None
    here = min(launch_env.local_world_size(), torch.cuda.device_count(), devices)
    if torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # needs NVML's or ROCm's Python package
            return sum(torch.cuda.power_draw(index) / 1000 for index in range(here)) / here * devices
    return _power_by_nvidia_smi(here, devices)


def _power_by_nvidia_smi(here: int, devices: int) -> float | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [program, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    command += [f"--id={visible}"] if visible else []
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        found = [float(line) for line in printed.split("\n") if line.strip()][:here]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return sum(found) / len(found) * devices if found else None
