"""A faulty step, planted for real: named, left behind as a file, replayed, skipped, rolled back, resumed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet.data.batch import BatchShape
from whet.data.plan.planner import Plan
from whet.model.load.builtin_models import builtin_folder
from whet.training import trainer
from whet.training.run_state import Run

Steps = Callable[[Path], list[dict[str, Any]]]
Exact = Callable[[Path], list[dict[str, Any]]]
BAD = 18
"""The line of the conversation with the character §."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A recipe whose model breaks on §: "forward" (its embedding is NaN), "backward" (so small that, in a
    norm with hardly any eps, the gradient overflows), or "sound"."""
    folder = tmp_path_factory.mktemp("planted")
    talks = [
        [("user", f"Say {number} please"), ("assistant", f"Here: {number} and {number * number}")]
        for number in range(48)
    ]
    talks[BAD - 1][0] = ("user", "Where is the § mark?")
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) + "\n" for talk in talks]
    (folder / "d.jsonl").write_text("".join(lines))
    (folder / "held.jsonl").write_text("".join(lines[:8]).replace("please", "again"))

    def make(kind: str) -> Path:
        recipe = folder / f"{kind}.yaml"
        if recipe.exists():
            return recipe
        tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
        model = AutoModelForCausalLM.from_pretrained(builtin_folder("builtin:tiny"))
        embedding = model.get_input_embeddings().weight
        state = {**model.state_dict(), "lm_head.weight": embedding.detach().clone()}
        row = state["model.embed_tokens.weight"][tokenizer("§", add_special_tokens=False).input_ids[-1]]
        if kind == "forward":
            row.fill_(math.nan)
        if kind == "backward":
            row.mul_(1e-17)
            model.config.rms_norm_eps = 1e-36  # its root is a number, the third power of that is none
        model.config.tie_word_embeddings = False
        untied = AutoModelForCausalLM.from_config(model.config)
        untied.load_state_dict(state)
        untied.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
        recipe.write_text(
            f"run: {{seed: 1}}\nmodel: {{path: {folder / kind}}}\n"
            f"data: {{sources: [{{path: {folder / 'd.jsonl'}}}], max_length: 64}}\n"
            "train: {epochs: 1, batch: {conversations: 4}, optimizer: {lr: 1e-3}}\n"
            "checkpoint: {every: 3, keep_last: 9}\nexport: {at_end: none}\n"
        )
        return recipe

    return make


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in (run / "events.jsonl").read_text().splitlines()]


def replayed(whet: Any, event: dict[str, Any]) -> dict[str, Any]:
    ended = whet("train", "--replay", event["file"], "--json")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out, parse_constant=pytest.fail))


def assert_names_it(event: dict[str, Any], kind: str) -> None:
    (named,) = event["conversations"]
    assert (named["line"], Path(named["source"]).name, named["number"]) == (BAD, "d.jsonl", BAD - 1)
    assert "Where is the § mark?" in named["text"]
    expected = {"forward": "model.embed_tokens", "backward": "model.layers.0.input_layernorm (backward)"}
    assert event["layer"] == expected[kind]
    assert event["weights"] == (["model.embed_tokens.weight"] if kind == "forward" else [])
    assert (event["kind"], event["together"]) == ("nonfinite", False)
    assert (event["loss"] is None, event["grad_norm"]) == (kind == "forward", None)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_planted_fault_stops_names_the_conversation_and_replays(
    kind: str, whet: Any, planted: Any, tmp_path: Path, steps_of: Steps
) -> None:
    run = tmp_path / "run"
    ended = whet("train", planted(kind), f"run.dir={run}")
    assert ended.code == 3
    (event,) = events(run)
    assert_names_it(event, kind)
    step = event["step"]
    assert step == 9, "the data's order has changed: the tests below need a step between two checkpoints"
    for words in (f"step {step}:", f"d.jsonl:{BAD}", "Where is the § mark?", event["layer"], event["file"]):
        assert words in ended.err, words
    assert "nan" not in ended.err.lower()
    assert [line["step"] for line in steps_of(run)] == list(range(1, step))
    exact = (run / "checkpoints" / f"step-{step - 1:06d}").exists()
    assert exact == (kind == "backward")  # weights that are not finite are not worth a checkpoint
    again = replayed(whet, event)
    assert (again["reproduced"], again["step"]) == (True, step)
    assert again["checkpoint"] == (f"step-{step - 1:06d}" if exact else "step-000006")
    assert again["loss"] == event["loss"]  # to the last bit
    bad = [each for each in again["conversations"] if each["layer"]]
    assert [(each["line"], each["layer"]) for each in bad] == [(BAD, event["layer"])]
    assert len(again["conversations"]) == 4


def test_a_stopped_run_resumed_with_skip_equals_one_that_skipped_at_once(
    whet: Any, planted: Any, tmp_path: Path, steps_of: Steps, exact_of: Exact
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    recipe = planted("backward")
    measured = ["eval.every=2", f"data.validation={{sources: [{{path: {recipe.parent / 'held.jsonl'}}}]}}"]
    assert whet("train", recipe, f"run.dir={one}", *measured).code == 3
    ended = whet("train", recipe, f"run.dir={one}", *measured, "train.on_nonfinite=skip", "--resume")
    assert ended.code == 0, ended.err
    assert "The step is skipped" in ended.err
    assert whet("train", recipe, f"run.dir={two}", *measured, "train.on_nonfinite=skip").code == 0
    assert exact_of(one) == exact_of(two)  # step 8 was measured before step 9 failed, and is not measured twice
    lines = steps_of(two)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if line.get("skipped")] == [9]
    assert lines[8]["grad_norm"] is None
    assert lines[8]["conversations"] == 36
    assert [event["action"] for event in events(one)] == ["stop", "skip"]
    assert "loss" in (two / "report.html").read_text()  # a report can be made of it


def test_a_checkpoint_before_the_first_step_that_was_taken_can_be_resumed(
    whet: Any, planted: Any, tmp_path: Path, exact_of: Exact
) -> None:
    """All steps so far were skipped: the optimizer has no state yet."""
    recipe = planted("backward")
    options = ["train.on_nonfinite=skip", "train.batch.conversations=48", "train.epochs=2", "checkpoint.every=1"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert whet("train", recipe, f"run.dir={whole}", *options).code == 0
    shutil.copytree(whole, run, symlinks=True)
    (run / "checkpoints/step-000002/manifest.json").unlink()
    (run / "status.json").unlink()
    ended = whet("train", recipe, f"run.dir={run}", *options, "--resume")
    assert ended.code == 0, ended.err
    assert "continuing after step 1" in ended.err
    assert exact_of(run) == exact_of(whole)


def test_a_rollback_passes_over_the_steps_since_the_checkpoint(
    whet: Any, planted: Any, tmp_path: Path, steps_of: Steps, exact_of: Exact
) -> None:
    run, other = tmp_path / "run", tmp_path / "sound"
    ended = whet("train", planted("backward"), f"run.dir={run}", "train.on_nonfinite=rollback")
    assert ended.code == 0, ended.err
    (event,) = events(run)
    assert_names_it(event, "backward")
    lines = steps_of(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if line.get("skipped")] == [7, 8, 9]
    assert [line["loss"] for line in lines[6:9]] == [None] * 3
    assert [line["conversations"] for line in lines] == list(range(4, 52, 4))
    assert json.loads((run / "faults/passed_over.json").read_text())["steps"] == [[7, 9]]
    # Step 10 is the first after step 6: its loss is that of a run that stopped there.
    assert whet("train", planted("backward"), f"run.dir={other}", "train.on_nonfinite=stop").code == 3
    assert exact_of(other)[:6] == exact_of(run)[:6]
    # A run that dies later passes over the same steps when it is resumed from before them.
    before = exact_of(run)
    for step in (9, 12):
        (run / f"checkpoints/step-{step:06d}/manifest.json").unlink()
    (run / "status.json").unlink()
    ended = whet("train", planted("backward"), f"run.dir={run}", "train.on_nonfinite=rollback", "--resume")
    assert ended.code == 0, ended.err
    assert "continuing after step 6" in ended.err
    assert exact_of(run) == before
    assert len(events(run)) == 1


def test_after_a_rollback_the_guard_knows_what_a_resumed_run_would(
    whet: Any, planted: Any, tmp_path: Path, steps_of: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the losses that were undone would count when it looks for spikes."""
    guards: list[Any] = []
    roll_back = trainer.roll_back

    def watched(run: Run) -> None:
        guards.append(run.guard)
        roll_back(run)

    monkeypatch.setattr(trainer, "roll_back", watched)
    run = tmp_path / "run"
    assert whet("train", planted("backward"), f"run.dir={run}", "train.on_nonfinite=rollback").code == 0
    (guard,) = guards
    assert list(guard._losses) == [line["loss"] for line in steps_of(run) if not line.get("skipped")]


def test_a_rollback_without_a_checkpoint_stops(whet: Any, planted: Any, tmp_path: Path) -> None:
    ended = whet(
        "train", planted("backward"), f"run.dir={tmp_path / 'run'}", "train.on_nonfinite=rollback",
        "checkpoint.every=100",
    )  # fmt: skip
    assert ended.code == 3
    assert "no checkpoint to go back to" in ended.err


def test_a_fault_in_the_first_step_leaves_the_run_and_replays_from_the_model_itself(
    whet: Any, planted: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = whet("train", planted("backward"), f"run.dir={run}", "train.batch.conversations=48")
    assert ended.code == 3
    (event,) = events(run)
    assert_names_it(event, "backward")
    assert event["step"] == 1
    again = replayed(whet, event)
    assert (again["reproduced"], again["checkpoint"], again["loss"]) == (True, None, event["loss"])


@pytest.mark.parametrize(
    ("arranged", "dealt"),
    [
        ("parallel.tensor=1", {0, 1}),
        pytest.param("parallel.tensor=2", {0}, marks=pytest.mark.slow),
        pytest.param("parallel.context=2", {0}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_stop_together_and_name_the_conversation(
    planted: Any, tmp_path: Path, whet: Any, arranged: str, dealt: set[int]
) -> None:
    """Also where both compute the same rows: then each is told of, and run again, once."""
    run = tmp_path / "run"
    arguments = [str(planted("forward")), f"run.dir={run}", "data.packing=none", arranged]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "whet"]
    done = subprocess.run(
        [*command, "train", *arguments], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 1
    assert json.loads((run / "status.json").read_text())["exit_code"] == 3
    told = [line for line in done.stderr.splitlines() if "error: step" in line and f"d.jsonl:{BAD} (" in line]
    assert len(told) == 2, done.stderr  # both ranks know, whoever had the row
    (event,) = events(run)
    assert_names_it(event, "forward")
    content = json.loads(Path(event["file"]).read_text())
    assert {part["rank"] for part in content["micro_batches"]} == dealt
    assert len(content["conversations"]) == 4
    assert replayed(whet, event)["reproduced"]


@pytest.mark.parametrize(
    ("policy", "arranged"),
    [
        ("rollback", "parallel.shard=2"),
        pytest.param("skip", "parallel.shard=2", marks=pytest.mark.slow),
        pytest.param("rollback", "parallel.tensor=2", marks=pytest.mark.slow),
    ],
)
def test_sharded_weights_roll_back_and_skip_as_whole_ones_do(
    planted: Any, tmp_path: Path, whet: Any, policy: str, arranged: str
) -> None:
    """Looking for who is to blame gathers weights: what is saved, loaded and measured after it must be the parts."""
    options = ["data.packing=none", f"train.on_nonfinite={policy}", "train.precision=fp64", "checkpoint.every=2"]
    assert whet("train", planted("forward"), f"run.dir={tmp_path / 'one'}", *options).code == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "whet"]
    arguments = ["train", str(planted("forward")), f"run.dir={tmp_path / 'two'}", *options, arranged]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [line.get("skipped") for line in two] == [line.get("skipped") for line in one]
    for key in ("loss", "grad_norm"):
        ours, theirs = ([line[key] for line in lines if line.get(key)] for lines in (two, one))
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_where_gradients_of_one_conversation_cannot_be_had_the_message_says_so_and_the_replay_finds_it(
    planted: Any, tmp_path: Path, whet: Any
) -> None:
    ended = whet(
        "train", planted("backward"), f"run.dir={tmp_path / 'run'}", "parallel.shard=1", "parallel.offload=weights"
    )
    assert ended.code == 3, ended.err
    assert "gradients were not checked, because several processes share them" in ended.err
    assert "which checks gradients too" in ended.err
    assert "At fault" not in ended.err
    (event,) = events(tmp_path / "run")
    assert (event["losses_only"], event["conversations"]) == (True, [])
    found = replayed(whet, event)
    assert found["reproduced"]
    (bad,) = [each for each in found["conversations"] if each["layer"]]
    assert bad["line"] == BAD


def test_a_step_in_which_nothing_is_supervised_has_its_own_words(whet: Any, planted: Any, tmp_path: Path) -> None:
    """No conversation without a target gets into a store, so one is made in a store: its mask is wiped, and with it
    the checksums, as in a store of an earlier version."""
    run, options = tmp_path / "run", [f"data.store={tmp_path / 'store'}", "train.batch.conversations=1"]
    recipe = planted("sound")
    assert whet("train", recipe, f"run.dir={tmp_path / 'whole'}", *options).code == 0
    document = int(Plan.load(tmp_path / "whole/plan").documents_of(7)[0])
    (folder,) = [path.parent for path in (tmp_path / "store").rglob("loss.bin")]
    targets = np.load(folder / "targets.npy")
    targets[document] = 0
    np.save(folder / "targets.npy", targets)
    from whet.data.prepare.store import Store

    lengths = Store(folder).lengths
    loss = np.fromfile(folder / "loss.bin", dtype=np.uint8)
    first = int(lengths[:document].sum())
    loss[first : first + int(lengths[document])] = 0
    loss.tofile(folder / "loss.bin")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksums"], manifest["hash"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    ended = whet("train", recipe, f"run.dir={run}", *options)
    assert ended.code == 3
    assert "step 8: no token of this step is supervised" in ended.err
    (event,) = events(run)
    assert (event["kind"], event["loss"], event["grad_norm"], event["layer"]) == ("empty", None, None, None)
    assert [each["number"] for each in event["conversations"]] == [document]
    again = replayed(whet, event)
    assert (again["reproduced"], again["kind"]) == (True, "empty")


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One conversation 40 times, and in between one that nothing prepared the model for."""
    folder = tmp_path_factory.mktemp("spiky")
    draw = np.random.default_rng(0)
    usual = [("user", "Say it"), ("assistant", "the quick brown fox jumps over the lazy dog")]
    odd = [("user", "Say it"), ("assistant", "".join(map(chr, draw.integers(0x4E00, 0x9000, 60))))]
    talks = [usual] * 20 + [odd] + [usual] * 20
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) + "\n" for talk in talks]
    (folder / "d.jsonl").write_text("".join(lines))
    recipe = folder / "spiky.yaml"
    recipe.write_text(
        f"run: {{seed: 1}}\nmodel: {{path: builtin:tiny}}\n"
        f"data: {{sources: [{{path: {folder / 'd.jsonl'}}}], max_length: 512}}\n"
        "train: {epochs: 1, batch: {conversations: 1}, optimizer: {lr: 1e-2}, schedule: {name: constant, warmup: 0}}\n"
        "checkpoint: {every: 5}\nexport: {at_end: none}\n"
    )
    return recipe


@pytest.mark.parametrize(("policy", "code"), [("warn", 0), ("stop", 3), ("skip", 0), ("rollback", 0)])
def test_a_spike_meets_its_policy(
    policy: str, code: int, whet: Any, spiky: Path, tmp_path: Path, steps_of: Steps
) -> None:
    run = tmp_path / "run"
    ended = whet("train", spiky, f"run.dir={run}", f"train.on_spike={policy}")
    assert ended.code == code, ended.err
    (event,) = events(run)
    step = event["step"]
    assert (event["kind"], event["action"]) == ("spike", {"warn": "take"}.get(policy, policy))
    assert [each["line"] for each in event["conversations"]] == [21]
    assert event["conversations"][0]["loss"] == pytest.approx(event["loss"], rel=1e-5)
    skipped = [line["step"] for line in steps_of(run) if line.get("skipped")]
    since = step - (step - 1) // 5 * 5
    assert skipped == {"skip": [step], "rollback": list(range(step - since + 1, step + 1))}.get(policy, [])
    if policy == "skip":
        assert steps_of(run)[step - 1]["loss"] == event["loss"]  # it was measured, so it is said
    again = replayed(whet, event)
    if policy == "stop":
        assert (again["reproduced"], again["loss"]) == (True, event["loss"])
    else:  # the state before the step is gone, and an untrained model would find every loss high
        assert again["reproduced"] is None


def test_replay_refuses_what_it_cannot_run(whet: Any, planted: Any, tmp_path: Path) -> None:
    assert whet("train").code == 2
    assert whet("train", planted("sound"), "--replay", tmp_path / "x.json").code == 2
    missing = whet("train", "--replay", tmp_path / "x.json")
    assert (missing.code, "no such file" in missing.err) == (1, True)
    for content in ("[]", "{}", '{"format": 1}', '{"format": 1, "conversations": 3}'):
        (tmp_path / "x.json").write_text(content)
        ended = whet("train", "--replay", tmp_path / "x.json")
        assert (ended.code, "faults/step-NNNNNN.json" in ended.err) == (1, True), content
    folder = whet("train", "--replay", tmp_path)
    assert (folder.code, "this is a folder" in folder.err) == (1, True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run", 3), ("step", -4), ("precision", "fp7"), ("loss_scale", "x"), ("conversations", []), ("shapes", None),
        ("micro_batches", [{"rank": 0, "row": 0, "documents": [987]}]), ("reason", None), ("longest", 0),
        ("conversations", [{"number": 0, "source": "d", "line": 1, "ids": [999999], "supervised": [[0, 1]]}]),
    ],
)  # fmt: skip
def test_an_edited_file_is_an_error_that_says_where(
    whet: Any, planted: Any, tmp_path: Path, faulty: Path, key: str, value: Any
) -> None:
    content = json.loads(faulty.read_text()) | {key: value}
    if isinstance(value, list) and key == "conversations" and value:
        content["micro_batches"] = [{"rank": 0, "row": 0, "documents": [0]}]
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(content))
    ended = whet("train", "--replay", edited)
    assert ended.code == 1, ended.err
    assert str(edited) in ended.err


def test_a_step_of_padded_batches_is_run_again_too(whet: Any, tmp_path: Path, faulty: Path) -> None:
    """As a GPU leaves them: their sizes are constant and saved with the step; `supervised` is of an earlier version."""
    content = json.loads(faulty.read_text())
    assert content["shapes"] == []
    padded = tmp_path / "padded.json"
    padded.write_text(json.dumps(content | {"shapes": [asdict(BatchShape(4096, 64)) | {"supervised": 2048}]}))
    ended = whet("train", "--replay", padded, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["reproduced"] is True


@pytest.fixture(scope="module")
def faulty(whet: Any, planted: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a faulty step left."""
    run = tmp_path_factory.mktemp("faulty") / "run"
    assert whet("train", planted("backward"), f"run.dir={run}").code == 3
    return Path(events(run)[0]["file"])


def test_where_every_conversation_fails_the_weights_are_blamed(whet: Any, planted: Any, tmp_path: Path) -> None:
    ended = whet("train", planted("sound"), f"run.dir={tmp_path / 'run'}", "train.optimizer.lr=1e30")
    assert ended.code == 3
    (event,) = events(tmp_path / "run")
    assert event["all"] is True
    assert "the cause is the weights, not the data" in ended.err
    assert "A lower train.optimizer.lr" in ended.err
    assert "on_nonfinite=skip" not in ended.err
    measured = whet("eval", tmp_path / "run", "eval.tasks=[orders]")
    assert measured.code == 1
    assert "its weights are broken" in measured.err


def test_the_planted_model_is_sound_without_the_plant(whet: Any, planted: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert whet("train", planted("sound"), f"run.dir={run}").code == 0
    assert events(run) == []
    assert all(torch.isfinite(torch.tensor(json.loads(line)["loss"])) for line in (run / "metrics.jsonl").open())
