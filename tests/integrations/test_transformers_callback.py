"""WhetCallback in the real `Trainer`: what it writes, and that whet's commands read it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from whet.core.errors import WhetError
from whet.core.run_folder import RunFolder, read_status
from whet.dash.curves import MetricsFile
from whet.dash.run_details import describe_run
from whet.dash.runs_folder import RunsFolder
from whet.integrations.transformers import WhetCallback, whet_metrics
from whet.report.run_reports import write_report
from whet.runs.summary import summarize_run_folder


class At(TrainerCallback):  # type: ignore[misc]
    """Does something at the beginning of a step, counted from 1."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.act()


def make_trainer(folder: Path, *callbacks: Any, steps: int = 3, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1,
        )
    )  # fmt: skip
    rows = [{"input_ids": [row, 2, 3, 4], "labels": [row, 2, 3, 4]} for row in range(8)]
    args = TrainingArguments(
        output_dir=str(folder.with_name("hf")), max_steps=steps, per_device_train_batch_size=2,
        **{"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, **options}, save_steps=2,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, hub_token="hf_" + "a" * 34,
    )  # fmt: skip
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:2], callbacks=list(callbacks))


def lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_its_run_folder_is_one_of_whet(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_trainer(folder, WhetCallback(folder, project="p", tags=["hf"])).train()
    steps = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert {"time", "epoch", "grad_norm", "lr", "step_s"} <= steps[0].keys()
    assert [line["step"] for line in lines(folder) if "val_loss" in line] == [2, 3]
    status = read_status(folder)
    assert (status["state"], status["step"], status["steps"], status["exit_code"]) == ("finished", 3, 3, 0)
    shown = summarize_run_folder(folder)
    assert (shown.state.name, shown.facts.project, shown.facts.tags, shown.facts.step) == ("finished", "p", ("hf",), 3)
    assert not shown.facts.problems
    assert "LlamaForCausalLM" in write_report(folder).read_text()
    described = describe_run(RunsFolder(tmp_path), "run", MetricsFile(folder / "metrics.jsonl"))
    assert (described["summary"]["state"], described["damage"]) == ("finished", [])
    assert described["sentence"].startswith("LlamaForCausalLM")
    assert "hf_aaa" not in (folder / "config.yaml").read_text()
    assert not (folder / "stop").exists()


@pytest.mark.parametrize("how", ["stop file", "SIGTERM"])
def test_it_stops_on_request_and_resumes_into_the_same_folder(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    act = (folder / "stop").touch if how == "stop file" else lambda: signal.raise_signal(signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    whet = WhetCallback(folder)
    make_trainer(folder, whet, At(1, act)).train()
    assert whet.stopped
    assert signal.getsignal(signal.SIGTERM) is before
    assert (read_status(folder)["state"], read_status(folder)["step"]) == ("stopped", 1)
    assert (tmp_path / "hf" / "checkpoint-1").is_dir()
    with (folder / "metrics.jsonl").open("a") as file:  # a killed process may have been further than its checkpoint
        file.write(json.dumps({"step": 2, "loss": 99.0}) + "\n")
    whet = WhetCallback(folder)
    make_trainer(folder, whet).train(resume_from_checkpoint=True)
    assert not whet.stopped
    assert read_status(folder)["state"] == "finished"
    assert [line["step"] for line in lines(folder) if "loss" in line] == [1, 2, 3]
    assert 99.0 not in [line.get("loss") for line in lines(folder)]


def test_a_stop_between_two_logs_is_logged(tmp_path: Path) -> None:
    """TRL counts tokens from the start of a process: without the line, those since the last log were lost."""
    folder = tmp_path / "run"
    make_trainer(folder, WhetCallback(folder), At(2, (folder / "stop").touch), steps=5, logging_steps=5).train()
    assert [line["step"] for line in lines(folder) if "loss" in line] == [2]


def test_the_losses_are_those_without_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run")
    trainer.train()
    plain = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    make_trainer(tmp_path / "run", WhetCallback(tmp_path / "run")).train()
    assert [line["loss"] for line in lines(tmp_path / "run") if "loss" in line] == plain


def test_after_training_has_failed_signals_do_what_they_did_before(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:

        def fail() -> None:
            raise RuntimeError("a bad batch")

        with pytest.raises(RuntimeError, match="a bad batch"):
            make_trainer(tmp_path / "run", whet := WhetCallback(tmp_path / "run"), At(2, fail)).train()
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        make_trainer(tmp_path / "run", whet).train()  # another try in the same notebook
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_status(tmp_path / "run")["state"] == "finished"
    assert read_status(tmp_path / "run.1")["state"] == "failed"  # the earlier run was moved aside
    assert [line["step"] for line in lines(tmp_path / "run.1")] == [1]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_transformers_callback import At, WhetCallback, make_trainer

def fail():
    raise RuntimeError("a bad batch")

make_trainer(Path(sys.argv[2]), WhetCallback(sys.argv[2]), At(2, fail)).train()
"""


def test_a_script_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "run"
    command = [sys.executable, str(script), str(Path(__file__).parent), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "a bad batch" in ended.stderr
    status = read_status(folder)
    assert (status["state"], status["step"], status["reason"]) == ("failed", 1, "RuntimeError: a bad batch")


def test_a_deleted_folder_ends_the_record_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("whet.core.run_folder._HEARTBEAT_INTERVAL_S", 0.0)
    folder = tmp_path / "run"
    trainer = make_trainer(folder, WhetCallback(folder), At(2, lambda: shutil.rmtree(folder)))
    trainer.train()
    assert trainer.state.global_step == 3
    assert "Training goes on, but nothing is recorded" in capfd.readouterr().err
    assert not folder.exists()


def test_a_folder_in_use_and_one_with_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    owner = RunFolder(tmp_path / "used")
    with pytest.raises(WhetError, match="in use by"):
        make_trainer(tmp_path / "used", WhetCallback(tmp_path / "used")).train()
    owner.close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(WhetError, match="holds files that do not belong to a run"):
        make_trainer(tmp_path / "mine", WhetCallback(tmp_path / "mine")).train()
    assert [file.name for file in (tmp_path / "mine").iterdir() if file.name != "lock"] == ["thesis.txt"]


def test_names_of_logs_become_keys_of_metrics() -> None:
    logs = {"loss": 1.5, "learning_rate": 0.1, "mean_token_accuracy": 0.5, "num_tokens": 7.0, "reward": 2.0, "x": "y"}
    assert whet_metrics(logs) == {"loss": 1.5, "lr": 0.1, "accuracy": 0.5, "tokens": 7.0, "reward": 2.0}
    logs = {"eval_loss": 1.0, "eval_my_set_loss": 2.0, "eval_runtime": 3.0, "eval_rouge": 4.0, "num_tokens": 7.0}
    assert whet_metrics(logs) == {"val_loss": 1.0, "val_loss/my_set": 2.0, "val_rouge": 4.0}


def test_a_loss_that_is_not_finite_is_an_event(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer = make_trainer(folder, whet := WhetCallback(folder), steps=2, logging_nan_inf_filter=False)
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(float("nan"))
    trainer.train()
    assert not whet.stopped
    assert [line["loss"] for line in lines(folder) if "loss" in line] == [None, None]
    assert [(event["step"], event["kind"]) for event in lines(folder, "events")] == [(1, "nonfinite"), (2, "nonfinite")]
    assert "not finite" in write_report(folder).read_text()


@pytest.mark.parametrize(
    ("counted", "expected"),
    [({3: 5, 4: 9}, [45, 49]), ({3: 45, 4: 49}, [45, 49]), ({4: 41, 6: 82}, [81, 122])],
    ids=["trl", "trainer", "trl, longer than before"],
)
def test_tokens_of_a_continued_run_are_those_of_the_whole(
    tmp_path: Path, counted: dict[int, int], expected: list[int]
) -> None:
    """TRL counts from the start of the process, Trainer from that of the run."""
    folder = tmp_path / "run"
    trainer = make_trainer(folder, whet := WhetCallback(folder), steps=4)
    state = TrainerState(max_steps=4, is_world_process_zero=True)

    def log(step: int, tokens: int) -> None:
        state.global_step = step
        whet.on_log(trainer.args, state, TrainerControl(), {"loss": 1.0, "num_tokens": tokens})

    whet.on_train_begin(trainer.args, state, TrainerControl())
    log(1, 20)
    log(2, 40)
    whet.on_train_begin(trainer.args, state, TrainerControl())
    for step, tokens in counted.items():
        log(step, tokens)
    assert [line["tokens"] for line in lines(folder)] == [20, 40, *expected]


TWO_RANKS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_transformers_callback import At, WhetCallback, make_trainer

def stop():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)

whet = WhetCallback(sys.argv[2])
trainer = make_trainer(Path(sys.argv[2]), whet, At(2, stop), steps=6, ddp_backend="gloo")
trainer.train()
print(f"rank {os.environ['RANK']}: {whet.stopped} after {trainer.state.global_step}", flush=True)
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_ends_both_after_the_same_step(tmp_path: Path, real_python: str) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(TWO_RANKS)
    command = [real_python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ended = subprocess.run(
        [*command, str(script), str(Path(__file__).parent), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 0: True after 2" in ended.stdout
    assert "rank 1: True after 2" in ended.stdout
    assert (read_status(folder)["state"], read_status(folder)["step"]) == ("stopped", 2)


@pytest.mark.slow
def test_trl_writes_a_run_that_runs_report_and_dash_show(tmp_path: Path, whet: Any) -> None:
    pytest.importorskip("trl", reason="needs trl, of the dev extra")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "one": 2, "two": 3, "three": 4}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    folder = tmp_path / "runs" / "sft"
    args = SFTConfig(
        output_dir=str(tmp_path / "hf"), max_steps=3, per_device_train_batch_size=2, logging_steps=1, use_cpu=True,
        report_to="none", eval_strategy="steps", eval_steps=3, disable_tqdm=True, bf16=False, max_length=16,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": ["one two three", "three two one", "two two", "one three"] * 2})
    SFTTrainer(
        make_trainer(folder).model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        callbacks=[WhetCallback(folder)],
    ).train()  # fmt: skip
    steps = [line for line in lines(folder) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert {"accuracy", "tokens", "tokens_per_s"} <= steps[-1].keys()
    assert isinstance(steps[-1]["tokens"], int)
    assert {"val_loss", "val_accuracy"} <= lines(folder)[-1].keys()
    [listed] = json.loads(whet("runs", "list", str(tmp_path / "runs"), "--json").out)["runs"]
    assert (listed["state"], listed["step"], listed["loss"]) == ("finished", 3, steps[-1]["loss"])
    assert whet("report", str(folder)).code == 0
    described = describe_run(RunsFolder(tmp_path / "runs"), "sft", MetricsFile(folder / "metrics.jsonl"))
    assert (described["summary"]["state"], described["damage"]) == ("finished", [])
