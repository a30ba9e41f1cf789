"""`whet eval` on runs and models: scores compared with the base and with each other, and evaluation during training."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

Json = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data that teaches the model within seconds to answer A, and tasks in which that is right or wrong."""
    folder = tmp_path_factory.mktemp("material")

    def write(name: str, records: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    questions = [f"Question {i}, please?" for i in range(40)]
    write("train.jsonl", [{"prompt": text, "completion": "A"} for text in questions[:30]])
    write("own.jsonl", [{"prompt": text, "answer": "A"} for text in questions[30:]])
    write(
        "choice.jsonl",
        [{"question": text, "choices": ["x", "y", "z", "u"], "answer": i % 2} for i, text in enumerate(questions[:20])],
    )
    return folder


@pytest.fixture(scope="module")
def run(whet: Any, material: Path) -> Path:
    folder = material / "run"
    ended = whet(
        "train", "recipes/tiny.yaml", f"run.dir={folder}", f"data.sources=[{{path: {material}/train.jsonl}}]",
        f"data.validation={{sources: [{{path: {material}/own.jsonl}}]}}", "train.steps=40",
        "train.optimizer.lr=0.01", f"eval.tasks=[{material}/own.jsonl, {material}/choice.jsonl]", "eval.every=20",
        "eval.best=task/own", "checkpoint.keep_best=1", "checkpoint.every=20",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def evaluated(whet: Any) -> Json:
    def run(*arguments: Any) -> dict[str, Any]:
        ended = whet("eval", *arguments, "--json")
        assert ended.code == 0, ended.err
        assert ended.out.count("\n") == 1
        return dict(json.loads(ended.out))

    return run


@pytest.fixture
def refused(whet: Any) -> Callable[..., str]:
    def run(*arguments: Any) -> str:
        ended = whet("eval", *arguments)
        assert ended.code == 1
        assert "Traceback" not in ended.err
        return str(ended.err)

    return run


def test_scores_of_run_and_base_with_intervals(evaluated: Json, run: Path) -> None:
    result = evaluated(run)
    own, choice = result["tasks"]["own"], result["tasks"]["choice"]
    assert result["task/own"] == own["score"] == 1
    assert (own["baseline"], own["base"]["score"]) == (0, 0)
    surely = 0.025 ** (1 / 10)
    assert (own["interval"], own["base"]["interval"]) == ([surely, 1], [0, 1 - surely])
    assert (own["examples"], own["scorer"]) == (10, "exact")
    difference = own["difference"]
    assert (difference["mean"], difference["test"], difference["significant"]) == (1, "mcnemar", True)
    assert difference["p"] == pytest.approx(2 / 2**10)
    assert (choice["score"], choice["baseline"], choice["scorer"]) == (0.5, 0.25, "letters")
    assert choice["interval"][0] < 0.5 < choice["interval"][1]
    assert result["mean_above_baseline"]["score"] == pytest.approx((1 + 1 / 3) / 2)
    assert result["val_perplexity"] == pytest.approx(math.exp(result["val_loss"]))


def test_eval_reproduces_the_metrics_of_training(evaluated: Json, run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if "task/own" in line}
    assert list(measured) == [0, 20, 40]
    again = evaluated(run)
    for name in ("val_loss", "task/own", "task/choice"):
        assert again[name] == pytest.approx(measured[40][name])
    assert again["tasks"]["choice"]["base"]["score"] == measured[0]["task/choice"]
    best = (run / "checkpoints" / "best").read_text().split()[0]
    highest = max(measured[20]["task/own"], measured[40]["task/own"])
    assert measured[int(best.removeprefix("step-"))]["task/own"] == highest


def test_without_the_base(evaluated: Json, run: Path) -> None:
    assert "base" not in evaluated(run, "--no-base")["tasks"]["own"]


def test_against_a_run_and_against_a_result_file(
    whet: Any, evaluated: Json, run: Path, material: Path, tmp_path: Path
) -> None:
    tasks = f"{material}/own.jsonl,{material}/choice.jsonl"
    models = evaluated("builtin:tiny", "--tasks", tasks, "--against", run)
    own = models["tasks"]["own"]
    assert (models["model"], models["against"]) == ("builtin:tiny", str(run))
    assert (own["score"], own["against"]["score"], own["difference"]["mean"]) == (0, 1, -1)
    assert own["difference"]["significant"] is True
    same = evaluated(f"{run}@40", "--against", run)
    assert same["tasks"]["own"]["difference"]["mean"] == 0
    assert same["tasks"]["own"]["difference"]["significant"] is False
    result_file = Path(evaluated(run)["file"])
    assert result_file == run / "evals" / "step-000040.json"
    from_file = evaluated(
        "builtin:tiny", "--tasks", tasks, "--against", result_file, "--out", tmp_path / "x" / "tiny.json"
    )
    assert from_file["tasks"] == models["tasks"]
    ended = whet("eval", "builtin:tiny", "--tasks", "orders", "--against", result_file)
    assert ended.code == 1
    assert "it has no result of orders, only of choice, own" in " ".join(ended.err.split())
    written = json.loads((tmp_path / "x" / "tiny.json").read_text())
    assert written["tasks"] == from_file["tasks"]
    assert len(written["scored"][0]["samples"]) == 10


def test_the_export_has_the_loss_of_the_run(evaluated: Json, run: Path, material: Path) -> None:
    tuned = evaluated(run, "--no-base")
    plain = evaluated(run / "exports" / "merged", "--data", material / "own.jsonl")
    for name in ("val_loss", "val_accuracy", "val_bpb", "val_perplexity"):
        assert plain[name] == pytest.approx(tuned[name], rel=1e-5)
    other = evaluated(run, "--data", material / "choice.jsonl", "--no-base")
    assert other["val_loss"] != tuned["val_loss"]


def test_data_is_read_as_the_run_read_its_own(whet: Any, recipe: str, tmp_path: Path) -> None:
    """Names of fields too; and eval.tokens limits what is measured, in whole rows."""
    lines = [json.dumps({"q": f"What follows {n}?", "a": f"{n + 1}, of course."}) + "\n" for n in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(lines))
    (tmp_path / "other.jsonl").write_text("".join(lines[:9]))
    source = "{path: %s, format: prompt-completion, fields: {prompt: q, completion: a}}"
    run = whet(
        "train", recipe, "train.steps=1", f"data.sources=[{source % (tmp_path / 'own.jsonl')}]", "data.validation=null",
        f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert run.code == 0, run.err
    ended = whet("eval", tmp_path / "run", "--data", tmp_path / "other.jsonl", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["val_loss"] > 0
    assert "val_part" not in found
    some = whet("eval", tmp_path / "run", "--data", tmp_path / "other.jsonl", "--json", "eval.tokens=300")
    assert 0 < json.loads(some.out)["val_part"] < 1
    both = whet("eval", tmp_path / "run", "--data", tmp_path / "other.jsonl", "eval.tokens=300", "eval.rows=1")
    assert both.code == 1
    assert "rows and tokens are alternatives" in both.err


def test_texts_are_marked_for_a_run_of_token_files(whet: Any, recipe: str, tmp_path: Path) -> None:
    """With the same conversations as marked text, the loss is that of the token file; messages are read as such."""
    chats = [(f"What follows {n}?", f"{n + 1}, of course.") for n in range(40)]
    text = "<|endoftext|>{}<|endoftext|><|im_start|>{}<|im_start|>"
    marked, messages = tmp_path / "marked.jsonl", tmp_path / "messages.jsonl"
    marked.write_text("".join(json.dumps({"text": text.format(*chat)}) + "\n" for chat in chats))
    turns = [[{"role": role, "content": each} for role, each in zip(("user", "assistant"), chat, strict=True)]
             for chat in chats]  # fmt: skip
    messages.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    markers = "data.markers={user: {text: '<|endoftext|>'}, assistant: {text: '<|im_start|>'}, append_eod: false}"
    source = f"data.sources=[{{path: {marked}, format: marked}}]"
    prepared = whet("prepare", recipe, source, markers, "data.validation=null", f"data.store={tmp_path / 'store'}")
    assert prepared.code == 0, prepared.err
    for name in ("own.bin", "own.idx", "same.bin", "same.idx"):
        shutil.copy(tmp_path / f"store/train/tokens{Path(name).suffix}", tmp_path / name)
    ids = load_tokenizer(ModelConfig(path="builtin:tiny")).convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>"])
    source = (
        f"data.sources=[{{path: {tmp_path}/own, mask: {{pairs: [[{ids[0]}, {ids[0]}]], alternating: [{ids[1]}]}}}}]"
    )
    run = whet("train", recipe, "train.steps=1", source, markers, "data.validation=null", f"run.dir={tmp_path / 'run'}")
    assert run.code == 0, run.err
    losses = []
    for file in (marked, messages, tmp_path / "same.bin"):
        ended = whet("eval", tmp_path / "run", "--data", file, "--json", "--no-base")
        assert ended.code == 0, ended.err
        losses.append(json.loads(ended.out)["val_loss"])
    assert losses == [pytest.approx(losses[0])] * 3


def test_a_recipe_says_how_a_model_s_data_is_read(whet: Any, evaluated: Json, recipe: str, tmp_path: Path) -> None:
    """The base then has the loss that a run of the recipe measures before its first step, also in marked text."""
    text = "<|endoftext|>What follows {0}?<|endoftext|><|im_start|>{1}, of course.<|im_start|>"
    lines = [json.dumps({"text": text.format(n, n + 1)}) + "\n" for n in range(40)]
    (tmp_path / "marked.jsonl").write_text("".join(lines))
    (tmp_path / "mine.yaml").write_text(
        f"extends: {Path(recipe).absolute()}\ndata:\n  sources: [{{path: {tmp_path}/marked.jsonl, format: marked}}]\n"
        "  markers: {user: {text: '<|endoftext|>'}, assistant: {text: '<|im_start|>'}, append_eod: false}\n"
        f"run: {{dir: {tmp_path}/run, seed: 3}}\n"
    )
    ended = whet("train", tmp_path / "mine.yaml", "train.steps=1", "data.validation={fraction: 0.2}")
    assert ended.code == 0, ended.err
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    base = evaluated("builtin:tiny", "--data", tmp_path / "mine.yaml", "data.validation={fraction: 0.2}")
    assert base["val_loss"] == pytest.approx(first["val_loss"], rel=1e-5)
    everything = evaluated("builtin:tiny", "--data", tmp_path / "mine.yaml", "data.validation=null")
    assert everything["val_loss"] != base["val_loss"]
    refused = whet("eval", tmp_path / "run", "--data", tmp_path / "mine.yaml")
    assert refused.code == 1
    assert "is a recipe" in refused.err
    assert "--data FILE" in refused.err


def test_a_yaml_list_of_tasks_and_options(evaluated: Json, run: Path, material: Path) -> None:
    own = f"{material}/own.jsonl"
    tasks = f"[{{path: {own}, name: mine, scorer: contains, examples: 3, max_new_tokens: 1}}, {own}:exact]"
    result = evaluated(run, "--tasks", tasks, "--no-base", "eval.examples=5")
    assert {name: (task["examples"], task["scorer"]) for name, task in result["tasks"].items()} == {
        "mine": (3, "contains"),
        "own": (5, "exact"),
    }


def test_a_time_limit_ends_an_evaluation(evaluated: Json, run: Path) -> None:
    result = evaluated(run, "--tasks", "orders", "--no-base", "eval.minutes=0.000001", "eval.examples=50")
    assert (result["tasks"]["orders"]["examples"], result["tasks"]["orders"]["asked_for"]) == (32, 50)


def test_a_time_limit_ends_an_evaluation_during_training(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet(
        "train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=1", "eval.tasks=[orders]", "eval.examples=40",
        "eval.minutes=0.000001",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["scored/orders"] for line in lines if "task/orders" in line] == [32, 32]


def test_text_output(whet: Any, run: Path) -> None:
    ended = whet("eval", run)
    assert ended.code == 0
    assert "own: 100.0 % [69.2, 100.0] · baseline 0.0 % · 10 examples, exact" in ended.out
    assert "base 0.0 % [0.0, 30.8]" in ended.out
    assert "difference +100.0 [+38.3, +100.0], p = 0.002: significant" in ended.out
    assert "mean above baseline: 0.667" in ended.out


def test_a_moved_run_can_be_evaluated(
    evaluated: Json, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths of tasks are absolute, so that the working directory does not matter."""
    moved = shutil.copytree(run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert evaluated("moved", "--no-base")["task/own"] == 1
    assert (moved / "evals" / "step-000040.json").exists()


def test_bad_input(refused: Callable[..., str], run: Path, material: Path, tmp_path: Path) -> None:
    assert "unknown task 'ordrs'; built in are: orders" in refused(run, "--tasks", "ordrs")
    assert "two tasks have the name own" in refused(run, "--tasks", f"{material}/own.jsonl,{material}/own.jsonl:number")
    assert "no such file" in refused(run, "--tasks", "no/such.jsonl")
    unknown = refused(run, "--tasks", f"{material}/own.jsonl:nubmer")
    assert "own.jsonl:nubmer': there is no scorer 'nubmer'; did you mean number? whet has exact, number," in unknown
    assert "eval.tasks.0.scorer" in unknown
    assert "--against compares task scores" in refused("builtin:tiny", "--against", run)
    assert "nothing to evaluate" in refused("builtin:tiny")
    (tmp_path / "x.json").write_text("{}")
    assert "x.json: not a result file" in refused(run, "--against", tmp_path / "x.json")
    assert f"--out {tmp_path}: it is a folder" in refused(run, "--out", tmp_path)
    assert "cannot be written: " in refused(run, "--out", tmp_path / "x.json" / "y.json")
    assert "only scorer: regex has a pattern" in refused(
        run, "--tasks", f"[{{path: {material}/own.jsonl, pattern: x}}]"
    )
    assert "unknown key eval.tasks.0.scoer" in refused(run, "--tasks", f"[{{path: {material}/own.jsonl, scoer: x}}]")
    assert "an evaluation cannot change how the run was trained" in refused(run, "train.steps=3")


def test_a_missing_lm_eval_is_an_error(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'whet[lm-eval]'" in refused("builtin:tiny", "--lm-eval", "arc_easy")


@pytest.mark.slow
def test_lm_eval_on_a_custom_task(evaluated: Json, refused: Callable[..., str], run: Path, material: Path) -> None:
    pytest.importorskip("lm_eval")
    (material / "habit.yaml").write_text(f"""
task: habit
dataset_path: json
dataset_kwargs: {{data_files: {{test: {material}/own.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_target: 0
doc_to_choice: ["A", "B", "C", "D"]
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    result = evaluated(run, "--lm-eval", material / "habit.yaml")
    assert result["lm_eval"]["habit"]["acc"] == 1
    assert result["folder"] == str(run / "exports" / "merged")
    assert "has no task 'no-such'" in refused(run, "--lm-eval", "no-such")
    assert "/no/such/model" in refused("/no/such/model", "--lm-eval", material / "habit.yaml")


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(evaluated: Json, run: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "whet",
        "eval",
        str(run),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "MASTER_PORT": "0"})
    assert json.loads(done.stdout) == evaluated(run)
