"""A run survives: killed, stopped or broken off, it goes on bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Exact = Callable[[Path], list[dict[str, Any]]]
State = Callable[[Path], dict[str, bytes]]
FULL = ("train.precision=fp64",)
LORA = ("adapter.rank=4", "adapter.dropout=0.2", "train.micro_rows=2")


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_text()))


def unfinished(finished: Path, folder: Path, keep: str | None) -> Path:
    """A copy of a finished run as a crash would have left it, with one checkpoint or none."""
    shutil.copytree(finished, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.is_dir() and checkpoint.name != keep:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "exports", ignore_errors=True)
    before = status(folder)
    (folder / "status.json").write_text(json.dumps({**before, "state": "running", "exit_code": None}))
    return folder


@pytest.mark.parametrize("options", [FULL, LORA], ids=["full", "lora with dropout"])
def test_a_killed_run_continues_bit_for_bit(
    options: tuple[str, ...], whet: Any, start: Any, wait_for_lines: Any, wait_for_checkpoint: Any,
    recipe: str, tmp_path: Path, exact_of: Exact, state_of: State,
) -> None:  # fmt: skip
    arguments = ["train", recipe, "train.steps=30", "eval.every=8", *options]
    assert whet(*arguments, f"run.dir={tmp_path / 'whole'}").code == 0
    folder = tmp_path / "killed"
    process = start(*arguments, f"run.dir={folder}")
    wait_for_lines(folder, 14)
    wait_for_checkpoint(folder, 12)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert len(exact_of(folder)) < len(exact_of(tmp_path / "whole"))
    assert status(folder)["state"] == "running"
    ended = whet(*arguments, f"run.dir={folder}", "--resume")
    assert ended.code == 0, ended.err
    assert re.search(r"continuing after step (12|16|20|24|28)\b", ended.err)  # it may have gone on for a while
    assert exact_of(folder) == exact_of(tmp_path / "whole")
    assert state_of(folder) == state_of(tmp_path / "whole")
    assert status(folder)["state"] == "finished"


def test_sigterm_ends_with_75_after_a_checkpoint_and_the_run_can_be_finished(
    whet: Any,
    start: Any,
    wait_for_lines: Any,
    recipe: str,
    tmp_path: Path,
    tiny_run: Path,
    exact_of: Exact,
    state_of: State,
) -> None:
    arguments = ["train", recipe, *FULL, f"run.dir={tmp_path / 'run'}"]
    process = start(*arguments, "--json")
    wait_for_lines(tmp_path / "run", 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 75, err
    assert json.loads(out)["exit_code"] == 75
    found = status(tmp_path / "run")
    assert (found["state"], found["exit_code"]) == ("stopped", 75)
    done = len(exact_of(tmp_path / "run")) - 1
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{done:06d}\n"
    assert whet(*arguments, "--resume").code == 0
    assert exact_of(tmp_path / "run") == exact_of(tiny_run)
    assert state_of(tmp_path / "run") == state_of(tiny_run)


@pytest.mark.parametrize("keep", ["step-000008", None], ids=["from a checkpoint", "from the start"])
def test_a_run_resumes_from_whatever_is_complete(
    keep: str | None, whet: Any, recipe: str, tmp_path: Path, tiny_run: Path, exact_of: Exact, state_of: State
) -> None:
    folder = unfinished(tiny_run, tmp_path / "run", keep)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # the crash cut a line
    incomplete = folder / "checkpoints" / "step-000010"
    incomplete.mkdir()
    (incomplete / ".metadata").touch()
    ended = whet("train", recipe, *FULL, f"run.dir={folder}", "--resume")
    assert ended.code == 0, ended.err
    assert exact_of(folder) == exact_of(tiny_run)
    assert state_of(folder) == state_of(tiny_run)


def test_without_optimizer_states_a_run_cannot_be_resumed_and_says_so(whet: Any, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", recipe, "train.steps=2", "checkpoint.optimizer=none", f"run.dir={folder}"]
    assert whet(*arguments, "--until", 1).code == 0
    assert [path.name for path in (folder / "checkpoints/step-000001").iterdir() if path.is_dir()] == ["model"]
    ended = whet(*arguments, "--resume")
    assert ended.code == 1
    assert "none of these checkpoints has the optimizer's state (checkpoint.optimizer)" in " ".join(ended.err.split())


def test_samples_are_neither_lost_nor_doubled(whet: Any, recipe: str, tmp_path: Path) -> None:
    def run(folder: Path, *more: str) -> list[Any]:
        ended = whet(
            "train", recipe, f"run.dir={folder}", "train.steps=4", "eval.tasks=[orders]", "eval.examples=3",
            "eval.every=2", "checkpoint.every=2", *more,
        )  # fmt: skip
        assert ended.code == 0, ended.err
        return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]

    whole = run(tmp_path / "whole")
    assert [sample["step"] for sample in whole] == [0] * 3 + [2] * 3 + [4] * 3
    assert run(unfinished(tmp_path / "whole", tmp_path / "one", "step-000002"), "--resume") == whole
    assert run(unfinished(tmp_path / "whole", tmp_path / "none", None), "--resume") == whole


def test_a_task_whose_examples_changed_is_not_scored_under_the_same_name(
    whet: Any, recipe: str, tmp_path: Path
) -> None:
    def train(*more: str) -> Any:
        return whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=4", "checkpoint.every=2", *more)

    def write(*prompts: str) -> None:
        questions.write_text("".join(json.dumps({"prompt": prompt, "answer": "y"}) + "\n" for prompt in prompts))

    questions = tmp_path / "quiz.jsonl"
    write("one", "two")
    same, renamed = f"eval.tasks=[{questions}]", f"eval.tasks=[{{path: {questions}, name: quiz-2}}]"
    assert train(same, "--until", "2").code == 0
    samples = tmp_path / "run/samples.jsonl"
    written = samples.read_bytes()
    write("one", "three")
    ended = train(same, "--resume")
    assert (ended.code, "eval.tasks: quiz: example 2" in ended.err) == (1, True), ended.err
    samples.write_bytes(written.replace(b"two", b"tw0"))  # damage of a record stops nothing
    write("one", "two")
    assert train(same, "--resume", "--until", "3").code == 0
    write("one", "three")
    assert train(renamed, "--resume").code == 0


def test_resume_without_a_run_starts_one(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=1", "--resume", "export.at_end=none")
    assert ended.code == 0, ended.err
    assert status(tmp_path / "run")["state"] == "finished"


def test_resuming_a_finished_run_does_nothing(whet: Any, recipe: str, tiny_run: Path) -> None:
    files = [path for path in tiny_run.rglob("*") if path.is_file() and path.name != "lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    ended = whet("train", recipe, *FULL, f"run.dir={tiny_run}", "--resume")
    assert ended.code == 0
    assert "finished" in ended.err
    assert {path: path.stat().st_mtime_ns for path in files} == before
    changed = whet("train", recipe, *FULL, f"run.dir={tiny_run}", "--resume", "train.optimizer.lr=1")
    assert changed.code == 1
    assert "train.optimizer.lr" in changed.err


def test_what_may_change_in_a_resumed_run_may_change(whet: Any, recipe: str, tmp_path: Path, tiny_run: Path) -> None:
    folder = unfinished(tiny_run, tmp_path / "elsewhere", "step-000008")
    ended = whet(
        "train", recipe, *FULL, f"run.dir={folder}", "--resume", "train.micro_rows=4", "checkpoint.every=3",
        "eval.every=5", "run.tags=[a]", "export.at_end=none",
    )  # fmt: skip
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("train.optimizer.lr=1e-3", "train.optimizer.lr: 0.003 then, 0.001 now"),
        ("run.seed=2", "run.seed: 1 then, 2 now"),
        ("adapter.rank=4", "adapter"),
        ("train.steps=31", "train.steps: 12 then, 31 now"),
    ],
)
def test_a_changed_setting_is_not_resumed_but_named(
    change: str, key: str, whet: Any, recipe: str, tmp_path: Path, tiny_run: Path
) -> None:
    folder = unfinished(tiny_run, tmp_path / "run", "step-000008")
    ended = whet("train", recipe, *FULL, f"run.dir={folder}", "--resume", change)
    assert ended.code == 1
    assert key in ended.err
    assert "run.dir=FOLDER" in ended.err


def test_a_run_whose_data_changed_is_not_resumed(whet: Any, recipe: str, tmp_path: Path) -> None:
    data, answer = tmp_path / "data.jsonl", {"role": "assistant", "content": "Yes."}
    line = json.dumps({"messages": [{"role": "user", "content": "Is it?"}, answer]}) + "\n"
    data.write_text(line * 8)
    arguments = ["train", recipe, f"data.sources=[{{path: {data}}}]", "train.steps=2", "checkpoint.every=1"]
    assert whet(*arguments, f"run.dir={tmp_path / 'whole'}").code == 0
    folder = unfinished(tmp_path / "whole", tmp_path / "run", "step-000001")
    data.write_text(line * 7)
    ended = whet(*arguments, f"run.dir={folder}", "--resume")
    assert ended.code == 1
    assert "the data is not what it was" in ended.err
    data.unlink()
    own = tmp_path / "own.yaml"  # names the file by a path relative to it
    own.write_text(f"extends: {Path(recipe).absolute()}\ndata: {{sources: [{{path: {data.name}}}]}}\n")
    ended = whet("train", own, *arguments[3:], f"run.dir={folder}", "--resume")
    assert ended.code == 1
    assert f"data.sources.0.path: {data}: no such file" in ended.err
    data.write_text(line * 8)
    assert whet(*arguments, f"run.dir={folder}", "--resume").code == 0
