"""Faults that a newcomer met: each had a run that looked healthy, or an error that led nowhere."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.core.files import atomic_dir, atomic_write

LINE = {"messages": [{"role": "user", "content": "Hi {}"}, {"role": "assistant", "content": "Hello {}"}]}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe on a file of one's own, given by a relative path."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(LINE).replace("{}", str(number)) for number in range(12)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines) + "\n")
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        "model: {path: builtin:tiny}\n"
        "data: {sources: [{path: my.jsonl}], max_length: 64, validation: {fraction: 0.2}}\n"
        "train: {steps: 6, batch: {conversations: 2}}\ncheckpoint: {every: 2, keep_last: 9}\n"
        "export: {at_end: none}\n"
    )
    return recipe


@pytest.fixture
def stopped(own: Path, whet: Any) -> Path:
    """A run on that file that came to step 4 of 6."""
    assert whet("train", own).code == 0
    run = own.parent / "runs" / "my"
    shutil.rmtree(run / "checkpoints/step-000006")
    status = run / "status.json"
    status.write_text(status.read_text().replace("finished", "stopped"))
    return run


def test_a_run_is_resumed_from_its_own_config(stopped: Path, whet: Any) -> None:
    ended = whet("train", stopped / "config.yaml", "--resume", f"run.dir={stopped}")
    assert ended.code == 0, ended.err
    assert "continuing after step 4" in ended.err


def test_an_edited_config_of_a_run_does_not_change_the_run(stopped: Path, whet: Any) -> None:
    config = stopped / "config.yaml"
    written = config.read_text()
    config.write_text(written.replace("clip_norm: 1.0", "clip_norm: 2.0"))
    assert config.read_text() != written
    for command in (["train", config, "--resume"], ["runs", "resume", stopped]):
        ended = whet(*command)
        assert (ended.code, "train.clip_norm: 1.0 then, 2.0 now" in ended.err) == (1, True), ended.err
    config.write_text(written.replace("keep_last: 9", "keep_last: 8"))
    assert config.read_text() != written
    assert whet("train", config, "--resume").code == 0


def test_a_run_without_its_config_is_not_taken_for_files_of_others(stopped: Path, whet: Any, own: Path) -> None:
    (stopped / "config.yaml").unlink()
    for options in ([], ["--resume"]):
        ended = whet("train", own, *options)
        assert (ended.code, "an incomplete run: it has checkpoints but no config.yaml" in ended.err) == (1, True)


def test_other_data_is_noticed_without_the_plan_and_a_missing_ledger_is_no_way_round(
    stopped: Path, whet: Any, own: Path
) -> None:
    shutil.rmtree(stopped / "plan")
    data = own.with_name("my.jsonl")
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:5]))
    ended = whet("train", own, "--resume")
    assert (ended.code, "the data is not what it was" in ended.err) == (1, True)
    (stopped / "ledger.json").unlink()
    ended = whet("train", own, "--resume")
    assert (ended.code, "ledger.json is gone" in ended.err) == (1, True)


def test_a_lost_plan_is_made_again(stopped: Path, whet: Any, own: Path) -> None:
    shutil.rmtree(stopped / "plan")
    assert whet("train", own, "--resume").code == 0


def test_an_earlier_state_is_exported_under_its_own_name(stopped: Path, whet: Any) -> None:
    ended = whet("export", f"{stopped}@2", "--json")
    assert json.loads(ended.out)["export"] == str(stopped / "exports" / "merged-step-000002")
    assert json.loads((stopped / "exports/merged-step-000002/certificate.json").read_text())["step"] == 2


def test_an_evaluation_cannot_redraw_what_is_held_out(stopped: Path, whet: Any) -> None:
    ended = whet("eval", stopped, "run.seed=5")
    assert (ended.code, "run.seed: an evaluation cannot change" in ended.err) == (1, True)


def test_commands_to_copy_are_quoted_for_the_shell(own: Path, whet: Any) -> None:
    folder = own.parent / "my run"
    paused = whet("train", own, f"run.dir={folder}", "--until", "2")
    ended = whet("runs", "resume", folder)
    assert (paused.code, ended.code) == (0, 0), ended.err
    assert f"whet train '{folder}/config.yaml' 'run.dir={folder}' --resume" in ended.err
    assert f"next: whet chat '{folder}', or whet export '{folder}' --to gguf" in ended.err


def test_a_run_folder_may_have_an_at_sign(own: Path, whet: Any) -> None:
    folder = own.parent / "a@b"
    assert whet("train", own, f"run.dir={folder}").code == 0
    assert json.loads(whet("eval", folder, "--json").out)["step"] == 6
    assert json.loads(whet("eval", f"{folder}@4", "--json").out)["step"] == 4


def test_the_training_file_by_another_path_is_no_validation(own: Path, whet: Any) -> None:
    ended = whet("train", own, "data.validation.sources=[{path: ./my.jsonl}]")
    assert (ended.code, "is a training source too" in ended.err) == (1, True)


def test_an_evaluation_that_is_not_finite_fails_the_run_and_says_what_helps(own: Path, whet: Any) -> None:
    ended = whet("train", own, "train.optimizer.lr=1e38", "train.steps=1", "train.schedule.name=constant")
    assert ended.code == 3
    assert "Traceback" not in ended.err
    assert "start a new run" in ended.err


def test_an_unknown_task_is_refused_before_anything_is_done(stopped: Path, whet: Any, own: Path) -> None:
    ended = whet("train", own, "--resume", "eval.tasks=[foo]")
    assert (ended.code, "unknown task 'foo'" in ended.err) == (1, True)


def test_what_a_resumed_run_changes_is_in_its_config(stopped: Path, whet: Any, own: Path) -> None:
    assert whet("train", own, "--resume", "eval.every=5").code == 0
    assert "every: 5" in (stopped / "config.yaml").read_text()


def test_sigterm_during_evaluation_stops_in_good_order(own: Path) -> None:
    code = (
        "import os, signal, sys\nimport whet.run.assemble as t\n"
        "t.evaluate_run = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from whet.cli.app import main\nsys.argv[0] = 'whet'\nmain()\n"
    )
    command = [sys.executable, "-c", code, "train", str(own), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 75
    (status,) = (json.loads(file.read_text()) for file in (own.parent / "runs").glob("*/status.json"))
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 75, 0)


def test_what_a_dead_process_left_is_cleared_away(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom whet.core.files import atomic_dir\n"
        "with atomic_dir(Path(sys.argv[1])) as part:\n"
        "    (part / 'x').write_text('x')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "export")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with atomic_dir(tmp_path / "export"):
        assert len(list(tmp_path.iterdir())) == 1  # this process's own
    atomic_write(tmp_path / "file", "x")
    assert {entry.name for entry in tmp_path.iterdir()} == {"export", "file"}
