"""`whet search` over scripts: WhetCallback stops at rungs, trials continue from Trainer's checkpoints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_transformers_callback import lines, make_trainer
from transformers import TrainerCallback

pytest.importorskip("optuna")

from whet.core.checksums import write_hashed_json
from whet.core.errors import ExitCode, WhetError
from whet.core.launch_env import SearchTrial
from whet.core.run_folder import read_status
from whet.integrations.transformers import WhetCallback
from whet.search.local_trials import LocalPlace, _Running
from whet.search.results import collect_results, write_results
from whet.search.script import ScriptConfig, ScriptSettings
from whet.search.search import open_search_folder, plan_search, preview, run_search
from whet.search.trials import TrialEnd, TrialRun

RECIPE = """
run: {{name: hf, dir: {folder}}}
script:
  command: {command}
  steps: 12
  arguments:
    learning_rate: {{search: log, low: 1e-3, high: 1e-1}}
search: {{max_trials: 4, divisor: 2, mode: aggressive}}
"""
"""Rungs at steps 3, 6 and 12; make_trainer evaluates and saves after even steps."""


def write_recipe(folder: Path, command: str = "env", *more: str) -> Path:
    file = folder / "search.yaml"
    file.write_text(RECIPE.format(folder=folder / "search", command=command) + "\n".join(more))
    return file


class FirstSteps(TrainerCallback):  # type: ignore[misc]
    """The steps at which trainings began."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(state.global_step)


class TrainerPlace:
    """Runs trials in this process, with the real Trainer."""

    slots = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._ended = monkeypatch, list[TrialEnd]()
        self.first_steps = FirstSteps()

    def start(self, trial: TrialRun) -> None:
        assert isinstance(trial.config, ScriptConfig)
        told = SearchTrial(str(trial.folder), trial.config.script.steps, trial.until)
        for name, value in told.as_env().items():
            self._monkeypatch.setenv(name, value)
        whet = WhetCallback("elsewhere")
        rate = trial.config.script.arguments["learning_rate"]
        trainer = make_trainer(trial.folder, whet, self.first_steps, steps=3, learning_rate=rate)
        trainer.train(resume_from_checkpoint=whet.checkpoint)
        assert whet.stopped == (trial.until < 12)
        assert trainer.state.global_step == trial.until
        self._ended.append(TrialEnd(trial.number, ExitCode.DONE))

    def poll(self, seconds: float) -> list[TrialEnd]:
        return [self._ended.pop()] if self._ended else []

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


def test_the_callback_stops_at_rungs_and_trials_continue_as_if_they_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_search(write_recipe(tmp_path), [])
    assert [bracket.rungs for bracket in plan.brackets] == [(3, 6, 12)]
    assert preview(plan)["tokens"] is None
    with open_search_folder(plan, resume=False):
        place = TrainerPlace(monkeypatch)
        result = collect_results(run_search(plan, place, resume=False), plan)
    assert sorted(set(place.first_steps.found)) == [0, 3, 6]  # none begins again
    assert place.first_steps.found.count(0) == 4
    best, stopped = result.trials[0], next(trial for trial in result.trials if len(trial.rungs) == 1)
    assert (best.state, best.step, stopped.step) == ("complete", 12, 3)
    assert read_status(Path(best.folder))["state"] == "finished"
    status = read_status(Path(stopped.folder))
    assert (status["state"], status["exit_code"], status["step"], status["steps"]) == ("stopped", 0, 3, 12)

    # the same training without a search
    monkeypatch.delenv("WHET_TRIAL")
    rate = best.values["script.arguments.learning_rate"]
    alone = make_trainer(tmp_path / "alone", steps=12, learning_rate=rate)
    alone.train()
    expected = [
        (line["step"], line["loss"], line["learning_rate"]) for line in alone.state.log_history if "loss" in line
    ]
    assert [(line["step"], line["loss"], line["lr"]) for line in lines(Path(best.folder)) if "loss" in line] == expected

    command = write_results(result, plan)["best"]["command"]
    assert command == f"env --learning_rate={rate}"
    assert command in (plan.folder / "best.yaml").read_text()


def test_a_trial_that_does_not_resume_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trial"
    for until in (1, 2):
        for name, value in SearchTrial(str(folder), 3, until).as_env().items():
            monkeypatch.setenv(name, value)
        make_trainer(folder, WhetCallback()).train()
    assert "resume_from_checkpoint=callback.checkpoint" in capfd.readouterr().err
    assert [line["step"] for line in lines(folder) if "loss" in line] == [1, 2]
    assert [line["step"] for line in lines(folder) if "val_loss" in line] == [2]


def test_a_trial_without_an_eval_dataset_is_refused_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path / "alone", WhetCallback(tmp_path / "alone"), eval_strategy="no", eval_steps=None)
    trainer.eval_dataset = None
    trainer.train()  # outside a search, nothing is compared
    for name, value in SearchTrial(str(tmp_path / "trial"), 3, 1).as_env().items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(tmp_path / "trial", WhetCallback(), eval_strategy="no", eval_steps=None)
    trainer.eval_dataset = None
    with pytest.raises(WhetError, match=r"Trainer: eval_dataset is missing.*Pass one to the trainer"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "trial").exists()


def test_an_error_of_the_callback_ends_the_search_with_its_first_trial(tmp_path: Path) -> None:
    (log := tmp_path / "trial.log").write_text("Traceback\nwhet.core.errors.WhetError: Trainer: it lacks it\n")
    trial: Any = SimpleNamespace(folder=tmp_path / "trial", number=0, until=12)
    place = LocalPlace.__new__(LocalPlace)
    place._stops = False
    end = place._script_end(_Running(trial, 0, log, None, frozenset(), {}), 1)
    assert (end.exit_code, end.reason) == (ExitCode.USAGE, "Trainer: it lacks it")


def test_arguments_are_words_of_the_command() -> None:
    settings = ScriptSettings(
        command=f"{sys.executable} -c 'x y'",
        steps=1,
        arguments={"lr": 1e-05, "fp16": False, "name": "a b", "targets": ["q", "v"], "none": None, "low": -1},
    )
    assert settings.argv() == [
        sys.executable, "-c", "x y", "--lr=1e-05", "--fp16=false", "--name=a b", "--targets", "q", "v", "--low=-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["script.command=python nothing.py"], "script.command: nothing.py: no such file"),
        (["script.command=no-such-program x"], "script.command: no-such-program: no such program"),
        (['script.command="it\'s"'], "No closing quotation"),
        (["script.command=[]"], "the command is empty"),
        (["script.steps={search: int, low: 2, high: 4}"], "only script.arguments can be searched"),
        (["script.arguments.learning_rate=1e-3"], "script.arguments.learning_rate: {search: log"),
        (["search.metric=val_f1"], "Set script.greater_is_better"),
        (["script.step=4"], "unknown key script.step"),
        (["train.steps=4"], "unknown key train"),
    ],
    ids=str,
)
def test_a_wrong_recipe_is_refused(tmp_path: Path, changes: list[str], reason: str) -> None:
    with pytest.raises(WhetError) as refused:
        plan_search(write_recipe(tmp_path), changes)
    assert reason in str(refused.value)


def test_metrics_of_a_script_may_be_any_of_its_evaluation(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert not plan_search(recipe, ["search.metric=val_f1", "script.greater_is_better=true"]).minimizes
    assert plan_search(recipe, ["search.metric=val_loss/held_out"]).minimizes


PLAIN = """
import json, math, os, sys, time
from pathlib import Path
trial = json.loads(os.environ["WHET_TRIAL"])
folder, rate = Path(trial["folder"]), float(sys.argv[1].removeprefix("--learning_rate="))
name = Path(sys.argv[0]).stem
if name == "fail":
    raise RuntimeError("a bad batch")
if name == "misspelt":
    print("misspelt.py: error: unrecognized arguments: --learning_rate", file=sys.stderr)
    sys.exit(2)
print(os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"])
folder.mkdir(parents=True, exist_ok=True)
if name != "nothing":
    with open(folder / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": trial["until"], "loss": 1.0}), file=file)
        print(json.dumps({"step": trial["until"], "val_loss": abs(math.log10(rate) + 2)}), file=file)
"""
"""Writes what WhetCallback writes, without torch."""


def search_plain(tmp_path: Path, whet: Any, name: str) -> Any:
    script = tmp_path / f"{name}.py"
    script.write_text(PLAIN)
    return whet("search", write_recipe(tmp_path, f"env python3 {script}"), "--json")


def test_the_command_starts_a_process_for_each_trial_and_rung(tmp_path: Path, whet: Any) -> None:
    ended = search_plain(tmp_path, whet, "plain")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert len(found["trials"]) == 4
    rates = {trial["number"]: trial["values"]["script.arguments.learning_rate"] for trial in found["trials"]}
    assert found["best"]["trial"] in rates
    assert found["trials"][0]["rungs"].keys() == {"3", "6", "12"}


@pytest.mark.parametrize(("name", "reason"), [("fail", "a bad batch"), ("nothing", "callbacks=[WhetCallback()]")])
def test_a_script_that_fails_or_has_no_callback_ends_the_search_with_the_reason(
    tmp_path: Path, whet: Any, name: str, reason: str
) -> None:
    ended = search_plain(tmp_path, whet, name)
    assert ended.code in (1, 3)
    assert reason in ended.err
    assert "Traceback" not in ended.err


def test_an_argument_that_the_script_does_not_take_ends_the_search_with_its_first_trial(
    tmp_path: Path, whet: Any
) -> None:
    ended = search_plain(tmp_path, whet, "misspelt")
    assert ended.code == 1
    assert "script: trial 0 failed before its first step" in ended.err
    assert "unrecognized arguments: --learning_rate. Correct the script, script.command" in ended.err
    assert "trial 1" not in ended.err
    corrected = search_plain(tmp_path, whet, "plain")  # in the same folder
    assert corrected.code == 0, corrected.err


def test_a_script_that_fails_twice_before_its_first_step_ends_the_search(tmp_path: Path, whet: Any) -> None:
    ended = search_plain(tmp_path, whet, "fail")
    assert ended.code == 1
    assert "trial 0 failed after step 0" in ended.err  # it might have been its values
    assert "script: trial 1 failed before its first step, and so would the others: exit code 1" in ended.err
    assert "trial 2" not in ended.err


@pytest.mark.parametrize("is_old", [True, False])
def test_the_reason_is_that_of_the_last_start(tmp_path: Path, is_old: bool) -> None:
    """A trial was stopped, and its script fails when it is resumed, before it writes anything."""
    (log := tmp_path / "trial.log").write_text("Traceback\nValueError: size mismatch\n")
    stopped = {"state": "stopped", "exit_code": ExitCode.STOPPED, "step": 4, "reason": "stopped on request"}
    write_hashed_json(tmp_path / "status.json", stopped)
    trial: Any = SimpleNamespace(folder=tmp_path, number=0, until=12)
    place = LocalPlace.__new__(LocalPlace)
    place._stops = False
    end = place._script_end(_Running(trial, 0, log, None, frozenset(), read_status(tmp_path) if is_old else {}), 1)
    expected = (ExitCode.FAILED, "exit code 1: ValueError: size mismatch")
    assert (end.exit_code, end.reason) == (expected if is_old else (ExitCode.STOPPED, "stopped on request"))


def test_all_starts_of_a_trial_are_one_run_in_wandb(tmp_path: Path, whet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    assert search_plain(tmp_path, whet, "plain").code == 0
    logs = [file.read_text().splitlines() for file in sorted((tmp_path / "search" / "logs").glob("trial-*.log"))]
    assert len(logs) == 4
    assert all(len(set(starts)) == 1 for starts in logs)
    assert len(logs[0]) > 1  # it continued at a rung
    assert len({starts[0] for starts in logs}) == 4
    assert logs[0][0].endswith("-000 allow")


def test_slurm_is_for_recipes(tmp_path: Path, whet: Any) -> None:
    ended = whet("search", write_recipe(tmp_path), "--on", "slurm")
    assert (ended.code, "whet launch --on slurm -- search" in ended.err) == (1, True)


SCRIPT = """
import argparse, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_transformers_callback import At, WhetCallback, make_trainer

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float)
rate = parser.parse_args().learning_rate
whet = WhetCallback()
slow = At(8, lambda: __import__("time").sleep({seconds}))
make_trainer(Path({folder!r}), whet, slow, learning_rate=rate).train(resume_from_checkpoint=whet.checkpoint)
"""


@pytest.mark.slow
def test_a_search_over_a_trainer_is_stopped_and_resumed(tmp_path: Path, real_python: str) -> None:
    """With processes of their own; in one process it is
    `test_the_callback_stops_at_rungs_and_trials_continue_as_if_they_had_not_stopped`."""
    script, search = tmp_path / "sft.py", tmp_path / "search"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "x"), seconds=5))
    recipe = write_recipe(tmp_path, str(script))
    command = [real_python, "-m", "whet", "search", str(recipe), "--json", "search.max_trials=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trial = search / "trial-000"
    until = time.monotonic() + 300
    while not (trial / "trainer" / "checkpoint-6").is_dir() or read_status(trial).get("state") != "running":
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 75, process.communicate()
    assert read_status(trial)["state"] == "stopped"
    ended = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["trials"][0]["state"] == "complete"
    steps = [line["step"] for line in lines(Path(found["best"]["run"])) if "loss" in line]
    assert steps == list(range(1, 13))


def test_a_trial_s_runs_in_wandb_have_its_name_and_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    told = SearchTrial("/somewhere/sft-rate/trial-003", 3, 1)
    assert told.as_env().items() >= {"WANDB_NAME": "trial-003", "WANDB_RUN_GROUP": "sft-rate"}.items()
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    assert told.as_env()["WANDB_RUN_GROUP"] == "mine"
