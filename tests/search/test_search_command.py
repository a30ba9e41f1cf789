"""`whet search` with real trials: ordinary runs, resumable, killed and stopped; what it prints and writes."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forkserver import Popen, fork_of

pytest.importorskip("optuna")
from whet.core.json_lines import read_json_lines
from whet.core.run_folder import read_status
from whet.search import results

SHIPPED = Path(__file__).parents[2] / "recipes" / "search-tiny.yaml"
SMALL = (
    "train.steps=4", "train.optimizer.lr={search: log, low: 1e-4, high: 1e-2, count: 2}", "search.max_trials=2",
    "search.divisor=2", "search.max_rungs=2", "search.mode=aggressive", "search.concurrent=2",
)  # fmt: skip


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(run / "metrics.jsonl")[0] if "loss" in line]


def test_the_picture_names_values_beyond_its_axis():
    trials = [SimpleNamespace(value=value) for value in (0.3, 0.31, 0.33, 0.9, None)]
    assert results._outlier_note(SimpleNamespace(trials=trials), True) == " Beyond the axis, drawn at its edge: 0.9."
    assert results._outlier_note(SimpleNamespace(trials=trials[:3]), True) == ""


def test_trials_are_runs_and_one_that_was_stopped_at_a_rung_continues_as_if_it_had_not(whet, recipe, tmp_path):
    folder = tmp_path / "search"
    ended = whet("search", recipe, *SMALL, f"run.dir={folder}", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["trials"][0]["rungs"].keys() == {"2", "4"}
    assert all(steps_of(folder / f"trial-00{n}") in ([1, 2], [1, 2, 3, 4]) for n in (0, 1))
    states = {run["name"]: run["state"] for run in json.loads(whet("runs", "list", folder, "--json").out)["runs"]}
    assert set(states) == {"trial-000", "trial-001"}
    assert set(states.values()) <= {"finished", "stopped"}
    page = (folder / "search.html").read_text()
    assert "val_loss by parameter" in page

    best = Path(found["best"]["run"])
    alone = tmp_path / "alone"
    number = found["best"]["trial"]
    assert whet("train", folder / "recipes" / f"trial-{number:03d}.yaml", f"run.dir={alone}").code == 0
    same = ("step", "loss", "grad_norm", "lr", "tokens")
    lines, expected = (
        [{key: line[key] for key in same} for line in read_json_lines(run / "metrics.jsonl")[0] if "loss" in line]
        for run in (best, alone)
    )
    assert lines == expected

    again = whet("search", recipe, *SMALL, f"run.dir={folder}", "--resume", "--json")
    assert json.loads(again.out) == found


def test_the_preview_runs_nothing(whet, recipe, tmp_path):
    ended = whet("search", recipe, *SMALL, f"run.dir={tmp_path / 'search'}", "--preview")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[1].split() == ["bracket", "rung", "steps", "trials", "tokens"]
    assert not (tmp_path / "search").exists()


def test_an_error_in_a_range_is_one_line(whet, recipe):
    ended = whet("search", recipe, "train.optimizer.lr={search: log, low: 1e-4}")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: command line, train.optimizer.lr=")
    assert "train.optimizer.lr.high: missing" in ended.err


def start_search(recipe: str, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "whet", "search", recipe, *settings, f"run.dir={folder}", "--quiet"]
    return Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_step(search: Path, step: int) -> None:
    """Until any trial has made so many steps: which one continues at a rung depends on who comes first."""
    until = time.monotonic() + 200
    while not any(step in steps_of(run) for run in search.glob("trial-*")):
        assert time.monotonic() < until
        time.sleep(0.02)


LONG = ("train.steps=40", "search.max_trials=3", "search.divisor=2", "search.max_rungs=2", "search.mode=aggressive",
        "search.concurrent=2", "checkpoint.every=5", SMALL[1])  # fmt: skip


@pytest.mark.slow
def test_a_search_killed_in_a_rung_goes_on_without_a_trial_twice(whet, recipe, tmp_path):
    folder = tmp_path / "search"
    process = start_search(recipe, folder, *LONG)
    wait_for_step(folder, 22)  # in its second rung
    os.kill(fork_of(process.pid), signal.SIGKILL)
    process.wait()
    before = {run.name: steps_of(run) for run in folder.glob("trial-*") if run.is_dir()}
    ended = whet("search", recipe, *LONG, f"run.dir={folder}", "--resume", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert sorted(trial["number"] for trial in found["trials"]) == [0, 1, 2]
    for trial in found["trials"]:
        steps = steps_of(Path(trial["folder"]))
        assert steps == list(range(1, trial["step"] + 1))
        assert steps[: len(before.get(Path(trial["folder"]).name, []))] == before.get(Path(trial["folder"]).name, [])
    whole = tmp_path / "whole"
    expected = json.loads(whet("search", recipe, *LONG, f"run.dir={whole}", "--json").out)
    one, other = ({t["number"]: (t["values"], t["rungs"]) for t in each["trials"]} for each in (found, expected))
    assert one.keys() == other.keys()
    assert all(one[n][0] == other[n][0] for n in one)
    assert all(one[n][1].get(rung, value) == value for n in one for rung, value in other[n][1].items())


@pytest.mark.slow
def test_ctrl_c_stops_the_trials_with_checkpoints(whet, recipe, tmp_path):
    folder = tmp_path / "search"
    process = start_search(recipe, folder, *LONG)
    wait_for_step(folder, 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors.decode()
    runs = [run for run in folder.glob("trial-*") if run.is_dir()]
    assert runs
    for run in runs:
        status = read_status(run)
        assert status["state"] == "stopped"
        assert not status["step"] or (run / "checkpoints" / f"step-{status['step']:06d}" / "manifest.json").exists()
    assert whet("search", recipe, *LONG, f"run.dir={folder}", "--resume").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["asha", "tpe", "random", "grid"])
def test_the_shipped_search_finds_the_planted_decade(whet, tmp_path, method):
    folder = tmp_path / "search"
    ended = whet("search", SHIPPED, f"search.method={method}", f"run.dir={folder}", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert 1e-2 <= found["best"]["values"]["train.optimizer.lr"] * (1 + 1e-9) <= 1e-1 * (1 + 2e-9)


@pytest.mark.slow
def test_asha_finds_the_best_of_random_search_with_less_than_two_fifths_of_its_tokens(whet, tmp_path):
    shares, losses = [], []
    for seed in range(1, 6):
        found = {}
        for method in ("asha", "random"):
            folder = tmp_path / f"{method}-{seed}"
            ended = whet(
                "search", SHIPPED, f"search.method={method}", f"run.seed={seed}", f"run.dir={folder}", "--json"
            )
            assert ended.code == 0, ended.err
            found[method] = json.loads(ended.out)
        shares.append(found["asha"]["tokens"] / found["random"]["tokens"])
        losses.append(found["asha"]["best"]["value"] / found["random"]["best"]["value"])
    assert statistics.median(shares) < 0.4
    assert statistics.median(losses) < 1.01
