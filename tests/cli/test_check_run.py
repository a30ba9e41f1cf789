"""`whet check RUN`: a step computed again from a checkpoint and in other layouts; what the page makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runs.made_runs import leaky_pack_batch
from whet.checkpoint.directory import list_steps
from whet.core.checksums import read_hashed_json
from whet.dash.run_details import check_promises
from whet.data import loader
from whet.report.run_view import RunView
from whet.training.step import ForwardPasses

LAYOUT, SURVIVES = "The layout does not matter", "A run survives"


@pytest.fixture
def copied(tiny_run: Path, tmp_path: Path) -> Path:
    """fixtures/tiny.yaml in fp64, to be changed."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


def findings(whet: Callable[..., Any], run: Path, *overrides: str, code: int = 0) -> dict[str, dict[str, str]]:
    ended = whet("check", run, *overrides, "--json")
    assert ended.code == code, ended.err
    result = json.loads(ended.out)
    assert read_hashed_json(run / "check.json")["checks"] == result["checks"]
    return {each["check"]: each for each in result["checks"]}


def badges(run: Path) -> dict[str, tuple[str, str]]:
    promises = check_promises(RunView.read(run), list_steps(run / "checkpoints"), None)
    return {each["title"]: (each["state"], each["evidence"]) for each in promises}


def test_a_run_is_as_promised(whet: Any, copied: Path) -> None:
    assert badges(copied)[LAYOUT][0] == "open"
    found = findings(whet, copied)
    assert [each["level"] for each in found.values()] == ["ok", "ok"]
    assert found["resume"]["text"].startswith("from the checkpoint of step 8, step 9 trained again: step 10 has loss")
    assert found["resume"]["text"].endswith("as recorded, bit for bit")
    for layout in (
        "2 rows a micro-batch",
        "1 row a micro-batch",
        "the shares of two processes",
        "each conversation alone",
    ):
        assert layout in found["layout"]["text"]
    assert badges(copied)[LAYOUT] == ("proven", found["layout"]["text"])
    assert found["resume"]["text"] in badges(copied)[SURVIVES][1]


def test_a_result_that_cannot_be_written_is_a_warning(whet: Any, copied: Path) -> None:
    (copied / "check.json").mkdir()
    ended = whet("check", copied)
    assert (ended.code, "check.json: the result cannot be written" in ended.err) == (0, True), ended.err


def test_dropout_is_that_of_the_run_and_then_off(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    found = findings(whet, run)
    assert [each["level"] for each in found.values()] == ["ok", "ok"]
    assert "as recorded" in found["resume"]["text"]


@pytest.mark.parametrize(
    "settings", [["data.packing=none"], ["train.precision=bf16", "train.steps=6"], ["train.steps=1"]], ids=str
)
def test_other_runs_are_as_promised(whet: Any, recipe: str, tmp_path: Path, settings: list[str]) -> None:
    assert whet("train", recipe, f"run.dir={tmp_path / 'run'}", *settings).code == 0
    assert [each["level"] for each in findings(whet, tmp_path / "run").values()] == ["ok", "ok"]


def test_in_fp64_rounding_hides_nothing(whet: Any, recipe: str, tmp_path: Path) -> None:
    assert whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=3").code == 0
    found = findings(whet, tmp_path / "run", "train.precision=fp64")
    assert "rounding: up to 1.0e-09" in found["layout"]["text"]


# Planted faults


def test_a_leak_breaks_the_promise(whet: Any, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in which conversations see those before them."""
    monkeypatch.setattr(loader, "pack_batch", leaky_pack_batch)
    found = findings(whet, copied, code=1)
    assert found["layout"]["level"] == "fault"
    assert "each conversation alone: losses of conversations differ by" in found["layout"]["text"]
    assert badges(copied)[LAYOUT] == ("broken", found["layout"]["text"])
    monkeypatch.undo()
    findings(whet, copied)
    assert badges(copied)[LAYOUT][0] == "proven"


def test_a_mean_of_means_breaks_the_promise(whet: Any, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch divided by its own supervised tokens: losses stay, gradients do not."""
    advance = ForwardPasses.__next__

    def divide_by_own(self: ForwardPasses) -> Any:
        self.supervised, whole = 77, self.supervised
        try:
            return advance(self)
        finally:
            self.supervised = whole

    def planted(self: ForwardPasses) -> Any:
        return divide_by_own(self) if self._count > 1 else advance(self)

    monkeypatch.setattr(ForwardPasses, "__next__", planted)
    text = findings(whet, copied, code=1)["layout"]["text"]
    assert "losses of conversations are equal, gradients differ by" in text
    assert badges(copied)[LAYOUT] == ("broken", text)


def test_a_checkpoint_that_brings_something_else_back_breaks_a_promise(whet: Any, copied: Path) -> None:
    metrics = copied / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["step"] == 10 and "loss" in line:
            line["loss"] *= 1.001
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = findings(whet, copied, code=1)
    assert found["resume"]["level"] == "fault"
    assert found["layout"]["level"] == "ok"
    assert badges(copied)[SURVIVES] == ("broken", found["resume"]["text"])


def test_a_damaged_checkpoint_is_told_and_another_one_serves(whet: Any, copied: Path) -> None:
    shard = next((copied / "checkpoints" / "step-000008").glob("**/*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    ended = whet("check", copied, "--json")
    checks = json.loads(ended.out)["checks"]
    assert ended.code == 1
    assert [(each["check"], each["level"]) for each in checks] == [
        ("resume", "fault"), ("resume", "ok"), ("layout", "ok"),
    ]  # fmt: skip
    assert badges(copied)[SURVIVES] == ("broken", "the checkpoint of step 8 is damaged")


def test_what_cannot_be_checked_is_refused(whet: Any, copied: Path, tmp_path: Path) -> None:
    ended = whet("check", copied, "train.steps=9")
    assert (ended.code, "train.steps=9: a run is checked with its own settings" in ended.err) == (1, True)
    (copied / "metrics.jsonl").unlink()
    ended = whet("check", copied)
    assert (ended.code, "the run has not done a step yet" in ended.err) == (1, True)
    assert not (copied / "check.json").exists()


def test_a_damaged_result_is_no_proof(whet: Any, copied: Path) -> None:
    findings(whet, copied)
    file = copied / "check.json"
    file.write_text(file.read_text().replace("step 10", "step 11"))
    assert badges(copied)[LAYOUT][0] == "open"
    assert "check.json: damaged" in RunView.read(copied).damage
