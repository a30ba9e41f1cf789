"""Pages that are open do not slow a run: fifty event streams, on another core."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

CLIENTS, PHASES, PHASE_S = 50, 12, 4.0

_READERS = """
import sys, threading, urllib.request
def read():
    with urllib.request.urlopen(sys.argv[1], timeout=600) as stream:
        while stream.read1(65536): pass
for _ in range(int(sys.argv[2])): threading.Thread(target=read, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.slow
def test_fifty_pages_make_steps_at_most_two_percent_slower(tmp_path: Path, recipe: str) -> None:
    """Phases with and without clients take turns in one run; what phases without clients differ by is noise."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores: one for the run, one for the page")
    runs = tmp_path / "runs"
    train = ["taskset", "-c", str(cores[0]), sys.executable, "-m", "whet", "train", recipe, f"run.dir={runs / 'live'}",
             "train.steps=1000000", "checkpoint.every=1000000", "eval.every=1000000"]  # fmt: skip
    page = ["taskset", "-c", str(cores[1]), sys.executable, "-m", "whet", "dash", str(runs), "--json"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    metrics = runs / "live" / "metrics.jsonl"
    with subprocess.Popen(train, **quiet, start_new_session=True) as run:  # type: ignore[call-overload]
        try:
            while not metrics.exists() or metrics.stat().st_size < 20_000:
                assert run.poll() is None
                time.sleep(0.2)
            with subprocess.Popen(page, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                ratio, noise = measure(f"{url}api/live?run=live", metrics, cores[1])
                server.send_signal(signal.SIGINT)
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    assert ratio - 1 <= 0.02 + noise, f"{ratio:.3f} times as long, noise {noise:.3f}"


def measure(address: str, metrics: Path, core: int) -> tuple[float, float]:
    """How much longer steps are with clients, and how much phases without any differ."""
    medians: dict[bool, list[float]] = {True: [], False: []}
    for phase in range(PHASES):
        with_clients = phase % 2 == 1
        readers = None
        if with_clients:
            command = ["taskset", "-c", str(core), sys.executable, "-c", _READERS, address, str(CLIENTS)]
            readers = subprocess.Popen(command, stdin=subprocess.PIPE)
            time.sleep(1.0)
        start = metrics.stat().st_size
        time.sleep(PHASE_S)
        with metrics.open("rb") as file:
            file.seek(start)
            lines = [json.loads(line) for line in file.read().splitlines()[1:] if line.endswith(b"}")]
        medians[with_clients].append(statistics.median(line["step_s"] for line in lines if "step_s" in line))
        if readers is not None:
            assert readers.poll() is None
            readers.kill()
            readers.wait()
    off, on = medians[False], medians[True]
    ratios = [b / ((a + c) / 2) for a, b, c in zip(off, on, [*off[1:], off[-1]], strict=True)]
    noise = statistics.median(abs(a - b) / b for a, b in itertools.pairwise(off))
    return statistics.median(ratios), noise


@pytest.mark.slow
def test_two_hundred_runs_and_a_million_lines_paint_within_two_seconds(tmp_path: Path) -> None:
    from runs.made_runs import make_run

    line = json.dumps({"time": 1.5, "step": 0, "epoch": 1.0, "loss": 1.25, "accuracy": 0.5, "grad_norm": 1.0,
                       "conversations": 1, "tokens": 10, "supervised_tokens": 5, "flops": 1e9, "tokens_per_s": 100.0,
                       "mfu": None, "peak_gib": 1.0, "step_s": 0.1, "data_s": 0.001})  # fmt: skip
    for number in range(200):
        run = make_run(tmp_path / f"run-{number:03}")
        lines = (line.replace('"step": 0', f'"step": {step}') for step in range(1, 5001))
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "whet", "dash", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            times = {}
            for path in ("api/runs", "api/runs", "api/run?run=run-007", "api/run/curves?run=run-007"):
                began = time.monotonic()
                with urllib.request.urlopen(url + path, timeout=60) as answer:
                    assert len(answer.read()) > 1000
                times[path] = time.monotonic() - began
        finally:
            server.send_signal(signal.SIGINT)
    assert times["api/runs"] < 2
    assert times["api/run?run=run-007"] + times["api/run/curves?run=run-007"] < 2
