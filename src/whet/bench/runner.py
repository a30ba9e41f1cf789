"""The benchmark: prepare the workload, run each contender in a process of its own, write bench.json and bench.md."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import whet
from whet.bench.contenders import (
    Contender,
    needs_weight_files,
    peer_config,
    peer_config_comment,
    peer_notes,
    whet_contender,
)
from whet.bench.results import StepTimings, compute_throughput, results_markdown, step_variation, variation_warnings
from whet.bench.workload import BenchInputs, BenchSettings, delete_weights, prepare_inputs
from whet.config import Config, read_config
from whet.core.console import info
from whet.core.errors import ExitCode, RunFailedError, WhetError
from whet.core.files import atomic_write, read_json, require_disk_space, write_json
from whet.core.json_lines import read_json_lines
from whet.core.signals import collect_stop_signals, raise_on_stop_signals
from whet.core.yaml import dump_yaml

_BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4}


class ContenderError(Exception):
    """A contender failed; the others still run."""


def run_benchmark(
    settings: BenchSettings, peers: list[Contender], out: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """Measure whet and its peers. All files are in `out`; returns the content of bench.json."""
    config = _prepare_folder(settings, out, overrides)
    info("preparing the data")
    inputs = prepare_inputs(config, settings, out)
    result: dict[str, Any] = {
        "finished": False,
        "terms": asdict(settings),
        "overrides": list(overrides),
        "device": settings.device,
        "model": {**asdict(inputs.flops), "flops_per_token": inputs.flops.per_token},
        "data": {
            "from": config.data.sources[0].path,
            "conversations": inputs.count,
            "tokens": inputs.tokens,
            "dropped": inputs.dropped,
            "mean_length": inputs.tokens / inputs.count,
        },
        "contenders": [],
    }
    try:
        for contender in [whet_contender(), *peers]:
            result["contenders"].append(_measure_contender(contender, settings, inputs, out, overrides))
            result["device"] = _device_name(config) or result["device"]
            write_json(out / "bench.json", result)
    finally:
        delete_weights(inputs.model)
    _add_ratios(result)
    atomic_write(out / "bench.md", results_markdown(result))
    write_json(out / "bench.json", result)
    return result


def open_output_folder(out: Path) -> None:
    """Create --out, or take the folder of an earlier benchmark."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "bench.json").exists())):
        raise WhetError(f"--out {out}: the folder has other files than a benchmark's. Give a new or empty one")
    out.mkdir(parents=True, exist_ok=True)


def _prepare_folder(settings: BenchSettings, out: Path, overrides: Sequence[str]) -> Config:
    """Write whet's recipe into a new folder, or that of an earlier benchmark, and read it as `whet train` will."""
    open_output_folder(out)
    write_json(out / "bench.json", {"finished": False, "terms": asdict(settings), "overrides": list(overrides)})
    recipe = out / "whet.yaml"
    head = " ".join(["# whet train", str(recipe), "--dry-run", *overrides])
    atomic_write(recipe, f"{head}\n{dump_yaml(settings.recipe(out / 'whet'))}")
    return read_config(recipe, overrides)


def _measure_contender(
    contender: Contender, settings: BenchSettings, inputs: BenchInputs, out: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """The entry of one contender in bench.json."""
    is_whet = contender.name == "whet"
    version = whet.__version__ if is_whet else contender.versions.get(contender.name)
    entry: dict[str, Any] = {
        "tool": contender.name, "title": contender.title, "version": version or "", "versions": contender.versions,
        "state": "not installed", "notes": [], "speed": None, "ratio": None,
    }  # fmt: skip
    if version is None:
        info(f"{contender.title} is not installed in {contender.python}; left out")
        return entry
    began = time.time()
    info(f"{contender.title} {version}: training")
    try:
        if is_whet:
            started, found = _run_whet(contender, out, overrides)
        else:
            entry["notes"] = peer_notes(contender, settings)
            started, found = _run_peer(contender, settings, inputs, out)
        steps = StepTimings(found.pop("ended"), found.pop("tokens"), found.pop("supervised"))
        if len(steps.ended) <= settings.warm:
            raise ContenderError(f"stopped after {len(steps.ended)} steps")
    except ContenderError as error:
        info(f"{contender.title} {version}: failed after {time.time() - began:.0f} s: {error}", style="yellow")
        return entry | {"state": "failed", "error": str(error), "log": f"{contender.name}.log"}
    if "waited" in found:
        share = statistics.fmean(found["waited"][settings.warm :])
        entry["notes"].append(f"waited for data {share:.2%} of the time")
    throughput = compute_throughput(steps, settings.warm, started, inputs.flops)
    variation = step_variation(steps, settings.warm)
    entry["notes"] += variation_warnings(variation)
    info(
        f"{contender.title} {version}: {throughput.tokens_per_s:,.0f} tokens/s, {found['peak_gib']:.1f} GiB "
        f"({time.time() - began:.0f} s)"
    )
    return entry | {
        "state": "measured", "speed": asdict(throughput), "evenness": asdict(variation), **found, "steps": asdict(steps)
    }  # fmt: skip


def _run_whet(contender: Contender, out: Path, overrides: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """`whet train --dry-run`, which saves no weights; the numbers come from its metrics.jsonl."""
    command = [contender.python, "-m", "whet", "train", str(out / "whet.yaml"), *overrides, "--dry-run", "--json"]
    ended = run_process(command, out / "whet.log", contender.environment())
    require_success(ended, out / "whet.log", json_error(ended.out))
    run = Path(json.loads(ended.out)["run"])
    lines = [line for line in read_json_lines(run / "metrics.jsonl")[0] if "step_s" in line]
    before = [{"tokens": 0, "supervised_tokens": 0}, *lines]
    return ended.began, {
        "ended": [line["time"] for line in lines],
        "tokens": [line["tokens"] - last["tokens"] for last, line in zip(before, lines, strict=False)],
        "supervised": [
            line["supervised_tokens"] - last["supervised_tokens"] for last, line in zip(before, lines, strict=False)
        ],
        "peak_gib": lines[-1]["peak_gib"],
        "waited": [line["data_s"] / line["step_s"] for line in lines],
        "config": "whet.yaml",
    }


def _run_peer(
    contender: Contender, settings: BenchSettings, inputs: BenchInputs, out: Path
) -> tuple[float, dict[str, Any]]:
    if needs_weight_files(contender, settings):
        _write_weight_files(settings, inputs, out)
    name = contender.name
    config = peer_config(contender, settings, inputs.model, inputs.conversations, out / f"{name}-output")
    result, settings_file = out / f"{name}.result.json", out / f"{name}.json"
    result.unlink(missing_ok=True)
    atomic_write(out / f"{name}.yaml", f"{peer_config_comment(contender)}\n{dump_yaml(config)}")
    write_json(
        settings_file,
        {
            "config": config, "conversations": str(inputs.conversations), "result": str(result),
            "device": settings.device,
        },
    )  # fmt: skip
    command = [contender.python, str(contender.script), str(settings_file)]
    ended = run_process(command, out / f"{name}.log", contender.environment())
    found: dict[str, Any] = read_json(result) if result.exists() else {}
    require_success(ended, out / f"{name}.log", found.get("error"))
    return ended.began, found | {"config": f"{name}.yaml"}


def _write_weight_files(settings: BenchSettings, inputs: BenchInputs, out: Path) -> None:
    if any(inputs.model.glob("*.safetensors")):
        return
    size = inputs.flops.weights * _BYTES_PER_WEIGHT[settings.weights]
    require_disk_space(out, size, "random weights for peers that load files")
    info(f"writing {size / 2**30:.1f} GiB of random weights for peers that load files; they are deleted at the end")
    command = [sys.executable, "-m", "whet.bench.workload", str(inputs.model), settings.weights]
    ended = run_process(command, out / "weights.log", whet_contender().environment())
    if ended.code:
        raise RunFailedError(f"random weights could not be written: {last_log_line(out / 'weights.log')}")


def require_success(ended: ProcessResult, log: Path, error: str | None) -> None:
    """Raise a ContenderError if a process failed: with its error, if it wrote one, or the last line of its log."""
    if ended.code or error:
        died = f"killed by {ended.killed_by}" if ended.killed_by else None
        raise ContenderError(error or died or last_log_line(log) or f"exit code {ended.code}")


def json_error(out: str) -> str | None:
    """The error that `whet train --json` printed."""
    try:
        error = json.loads(out).get("error")
    except ValueError:
        return None
    return None if error is None else str(error)


def _device_name(config: Config) -> str | None:
    """The device name from whet's run; initialising the driver here would take memory from the contenders."""
    plan = config.folder.with_name(f"{config.folder.name}-dry") / "plan.json"
    return str(read_json(plan)["device_name"]) if plan.exists() else None


def _add_ratios(result: dict[str, Any]) -> None:
    """Add whet's speed relative to each peer, and the exit code, which depends on whet's own run only."""
    ours, *peers = result["contenders"]
    for peer in peers:
        if ours["speed"] and peer["speed"]:
            peer["ratio"] = ours["speed"]["tokens_per_s"] / peer["speed"]["tokens_per_s"]
    result["finished"] = True
    result["exit_code"] = exit_code(ours)


def exit_code(ours: dict[str, Any]) -> ExitCode:
    """It depends on whet's own run only."""
    return ExitCode.DONE if ours["state"] == "measured" else ExitCode.FAILED


# Child processes of the benchmark: stderr goes to a log, and they end with their parent.

_TERMINATE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The exit code, the times and the output of a process."""

    code: int
    began: float
    """Unix time."""
    seconds: float
    out: str

    @property
    def killed_by(self) -> str | None:
        """The name of the signal that ended it, if one did."""
        return signal.Signals(-self.code).name if self.code < 0 else None


def run_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> ProcessResult:
    """Run a command to its end; stderr goes to `log`. Ctrl-C and SIGTERM end it together with this process."""
    signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as stderr, raise_on_stop_signals():
        began = time.time()
        try:
            # a signal between the start of the process and the assignment would leave it running
            with collect_stop_signals(signals, lambda: None):
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=dict(environment),
                    start_new_session=True,
                )  # fmt: skip
            if signals:
                raise KeyboardInterrupt
            out, _ = process.communicate()
        except BaseException:
            if process is not None:
                _terminate(process)
            raise
        finally:
            if process is not None:
                _signal_group(process, signal.SIGKILL)  # leftover workers would disturb the next contender
    return ProcessResult(process.returncode, began, time.time() - began, out.decode(errors="replace"))


def last_log_line(log: Path) -> str:
    """The last non-empty line of a log; of a traceback, the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(_TERMINATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
