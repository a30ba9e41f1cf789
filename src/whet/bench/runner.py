"""The benchmark: prepare the workload, run each contender in turn, write bench.json and bench.md."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import whet
from whet.bench import child_process
from whet.bench.contenders import (
    Contender,
    needs_weight_files,
    peer_config,
    peer_config_comment,
    peer_notes,
    whet_contender,
)
from whet.bench.random_weights import delete_weights
from whet.bench.results import StepTimings, compute_throughput, results_markdown, step_variation, variation_warnings
from whet.bench.workload import BenchInputs, BenchSettings, prepare_inputs
from whet.config import Config, read_config
from whet.core.console import info
from whet.core.errors import ExitCode, RunFailedError, WhetError
from whet.core.files import atomic_write, read_json, read_json_lines, require_disk_space, write_json
from whet.core.yaml import dump_yaml

_BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4}


class ContenderError(Exception):
    """A contender did not come to its end; the others go on."""


def run_benchmark(terms: BenchSettings, peers: list[Contender], out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure whet and its peers. Everything is in `out`; the result is what bench.json holds."""
    config = _prepare_folder(terms, out, overrides)
    info("preparing the conversations")
    material = prepare_inputs(config, terms, out)
    result: dict[str, Any] = {
        "finished": False,
        "terms": asdict(terms),
        "overrides": list(overrides),
        "device": terms.device,
        "model": {**asdict(material.load), "flops_per_token": material.load.per_token},
        "data": {
            "from": config.data.sources[0].path,
            "conversations": material.count,
            "tokens": material.tokens,
            "dropped": material.dropped,
            "mean_length": material.tokens / material.count,
        },
        "contenders": [],
    }
    try:
        for contender in [whet_contender(), *peers]:
            result["contenders"].append(_measure_contender(contender, terms, material, out, overrides))
            result["device"] = _device_name(config) or result["device"]
            write_json(out / "bench.json", result)
    finally:
        delete_weights(material.model)
    _add_ratios(result)
    atomic_write(out / "bench.md", results_markdown(result))
    write_json(out / "bench.json", result)
    return result


def _prepare_folder(terms: BenchSettings, out: Path, overrides: Sequence[str]) -> Config:
    """Write whet's recipe into the folder, which holds nothing of anyone else's, and read it as `whet train` will."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "bench.json").exists())):
        raise WhetError(f"--out {out}: this is not a folder of an earlier comparison. Give a new or empty one")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", {"finished": False, "terms": asdict(terms), "overrides": list(overrides)})
    recipe = out / "whet.yaml"
    head = " ".join(["# whet train", str(recipe), "--dry-run", *overrides])
    atomic_write(recipe, f"{head}\n{dump_yaml(terms.recipe(out / 'whet'))}")
    return read_config(recipe, overrides)


def _measure_contender(
    contender: Contender, terms: BenchSettings, material: BenchInputs, out: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """What bench.json says of one contender."""
    ours = contender.name == "whet"
    version = whet.__version__ if ours else contender.versions.get(contender.name)
    account: dict[str, Any] = {
        "tool": contender.name, "title": contender.title, "version": version or "", "versions": contender.versions,
        "state": "not installed", "notes": [], "speed": None, "ratio": None,
    }  # fmt: skip
    if version is None:
        info(f"{contender.title} is not installed in {contender.python}; it is left out")
        return account
    began = time.time()
    info(f"{contender.title} {version}: training")
    try:
        if ours:
            started, found = _run_whet(contender, out, overrides)
        else:
            account["notes"] = peer_notes(contender, terms)
            started, found = _run_peer(contender, terms, material, out)
        steps = StepTimings(found.pop("ended"), found.pop("tokens"), found.pop("supervised"))
        if len(steps.ended) <= terms.warm:
            raise ContenderError(f"it ended after {len(steps.ended)} steps")
    except ContenderError as error:
        info(f"{contender.title} {version}: failed after {time.time() - began:.0f} s: {error}", style="yellow")
        return account | {"state": "failed", "error": str(error), "log": f"{contender.name}.log"}
    if "waited" in found:
        part = statistics.fmean(found["waited"][terms.warm :])
        account["notes"].append(f"it waited for data for {part:.2%} of the time")
    measured = compute_throughput(steps, terms.warm, started, material.load)
    even = step_variation(steps, terms.warm)
    account["notes"] += variation_warnings(even)
    info(
        f"{contender.title} {version}: {measured.tokens_per_s:,.0f} tokens/s, {found['peak_gib']:.1f} GiB "
        f"({time.time() - began:.0f} s)"
    )
    return account | {
        "state": "measured", "speed": asdict(measured), "evenness": asdict(even), **found, "steps": asdict(steps)
    }  # fmt: skip


def _run_whet(contender: Contender, out: Path, overrides: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """A run as any user starts it, but for --dry-run: nobody wants the weights. It is measured by its metrics."""
    command = [contender.python, "-m", "whet", "train", str(out / "whet.yaml"), *overrides, "--dry-run", "--json"]
    ended = child_process.run_process(command, out / "whet.log", contender.environment())
    _require_success(ended, out / "whet.log", _json_error(ended.out))
    run = Path(json.loads(ended.out)["run"])
    lines = [line for line in read_json_lines(run / "metrics.jsonl") if "step_s" in line]
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
    contender: Contender, terms: BenchSettings, material: BenchInputs, out: Path
) -> tuple[float, dict[str, Any]]:
    if needs_weight_files(contender, terms):
        _write_weight_files(terms, material, out)
    name = contender.name
    config = peer_config(contender, terms, material.model, material.conversations, out / f"{name}-output")
    result, settings = out / f"{name}.result.json", out / f"{name}.json"
    result.unlink(missing_ok=True)
    atomic_write(out / f"{name}.yaml", f"{peer_config_comment(contender)}\n{dump_yaml(config)}")
    write_json(
        settings,
        {
            "config": config, "conversations": str(material.conversations), "result": str(result),
            "device": terms.device,
        },
    )  # fmt: skip
    command = [contender.python, str(contender.script), str(settings)]
    ended = child_process.run_process(command, out / f"{name}.log", contender.environment())
    found: dict[str, Any] = read_json(result) if result.exists() else {}
    _require_success(ended, out / f"{name}.log", found.get("error"))
    return ended.began, found | {"config": f"{name}.yaml"}


def _write_weight_files(terms: BenchSettings, material: BenchInputs, out: Path) -> None:
    if any(material.model.glob("*.safetensors")):
        return
    size = material.load.weights * _BYTES_PER_WEIGHT[terms.weights]
    require_disk_space(out, size, "the random weights that a peer reads from files")
    info(f"writing {size / 2**30:.1f} GiB of random weights for those who read files; they are deleted at the end")
    command = [sys.executable, "-m", "whet.bench.random_weights", str(material.model), terms.weights]
    ended = child_process.run_process(command, out / "weights.log", whet_contender().environment())
    if ended.code:
        raise RunFailedError(f"random weights could not be written: {child_process.last_log_line(out / 'weights.log')}")


def _require_success(ended: child_process.ProcessResult, log: Path, error: str | None) -> None:
    if ended.code or error:
        died = f"killed by {ended.killed_by}" if ended.killed_by else None
        raise ContenderError(
            error or died or child_process.last_log_line(log) or f"it ended with exit code {ended.code}"
        )


def _json_error(out: str) -> str | None:
    """What `whet train --json` says went wrong."""
    try:
        error = json.loads(out).get("error")
    except ValueError:
        return None
    return None if error is None else str(error)


def _device_name(config: Config) -> str | None:
    """What whet's run called it; asking the driver here would take memory from the contenders."""
    plan = config.folder.with_name(f"{config.folder.name}-dry") / "plan.json"
    return str(read_json(plan)["device_name"]) if plan.exists() else None


def _add_ratios(result: dict[str, Any]) -> None:
    """Add how many times as fast whet was, and how the whole ended: it is whet's own run that must have worked."""
    ours, *peers = result["contenders"]
    for peer in peers:
        if ours["speed"] and peer["speed"]:
            peer["ratio"] = ours["speed"]["tokens_per_s"] / peer["speed"]["tokens_per_s"]
    result["finished"] = True
    result["exit_code"] = ExitCode.DONE if ours["state"] == "measured" else ExitCode.FAILED
