"""`whet bench` end to end: processes, files, table, and failing contenders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_contenders import package

from whet.model.load.builtin_models import builtin_folder

SIZE = ("--length", 128, "--rows", 2, "--steps", 4, "--warm", 2)
Bench = Callable[..., tuple[Any, dict[str, Any]]]


@pytest.fixture(scope="session")
def bench(whet: Callable[..., Any]) -> Bench:
    """Run it on the shape of builtin:tiny with its tokenizer; returns the finished process and bench.json."""

    def run(out: Path, *arguments: Any) -> tuple[Any, dict[str, Any]]:
        ended = whet("bench", "--model", builtin_folder("builtin:tiny"), *SIZE, "--out", out, *arguments)
        return ended, json.loads((out / "bench.json").read_text())

    return run


@pytest.fixture(scope="module")
def with_trl(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench") / "lora"
    ended, result = bench(out, "--mode", "lora", "--peers", "trl,unsloth", "train.optimizer.eps=1e-7")
    assert ended.code == 0, ended.err
    return out, ended, result


def test_installed_contenders_are_measured(with_trl: tuple[Path, Any, dict[str, Any]]) -> None:
    _, ended, result = with_trl
    whet, trl, unsloth = result["contenders"]
    assert [whet["state"], trl["state"], unsloth["state"]] == ["measured", "measured", "not installed"]
    assert trl["ratio"] == pytest.approx(whet["speed"]["tokens_per_s"] / trl["speed"]["tokens_per_s"])
    for contender in (whet, trl):
        assert len(contender["steps"]["ended"]) == 4
        assert all(0 < tokens <= 256 for tokens in contender["steps"]["tokens"])
        assert contender["peak_gib"] > 0.1
        assert 0 < contender["speed"]["first_step_s"] < 300
        assert contender["speed"]["tflops"] * 1e12 == pytest.approx(
            contender["speed"]["tokens_per_s"] * result["model"]["flops_per_token"]
        )
    assert "Unsloth is not installed" in ended.err
    assert "Unsloth is not installed" in ended.out


def test_peers_train_on_every_token_and_whet_on_answers(with_trl: tuple[Path, Any, dict[str, Any]]) -> None:
    out, _, result = with_trl
    whet, trl, _ = result["contenders"]
    lengths = [len(json.loads(line)["input_ids"]) for line in (out / "conversations.jsonl").open()]
    for tokens, supervised in zip(trl["steps"]["tokens"], trl["steps"]["supervised"], strict=True):
        assert 0 < tokens - supervised <= 256 // min(lengths)  # the first token of a conversation has no label
    assert sum(whet["steps"]["supervised"]) < 0.8 * sum(whet["steps"]["tokens"])


def test_the_table_is_printed_and_saved(with_trl: tuple[Path, Any, dict[str, Any]]) -> None:
    out, ended, result = with_trl
    text = (out / "bench.md").read_text()
    assert ended.out == text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" ")[1] for row in rows] == ["tool", "whet", "TRL"]
    assert f"| {result['contenders'][1]['ratio']:.2f} |" in rows[2]


def test_the_folder_has_the_configurations_and_no_weights(
    with_trl: tuple[Path, Any, dict[str, Any]], whet: Any
) -> None:
    out, _, _ = with_trl
    recipe = yaml.safe_load((out / "whet.yaml").read_text())
    assert recipe["adapter"] == {"rank": 16, "alpha": 32}
    assert "train.optimizer.eps=1e-7" in (out / "whet.yaml").read_text().splitlines()[0]
    assert yaml.safe_load((out / "whet-dry" / "config.yaml").read_text())["train"]["optimizer"]["eps"] == 1e-7
    assert yaml.safe_load((out / "trl.yaml").read_text()) == json.loads((out / "trl.json").read_text())["config"]
    assert not list(out.rglob("*.safetensors"))
    assert not list((out / "whet-dry" / "checkpoints").iterdir())


def test_failure_of_whet_is_exit_code_3_and_the_folder_can_be_reused(bench: Bench, tmp_path: Path) -> None:
    ended, result = bench(tmp_path / "out", "model.attention=varlen", "--json")
    assert ended.code == 3
    assert json.loads(ended.out)["contenders"][0]["state"] == "failed"
    assert "varlen" in result["contenders"][0]["error"]
    assert "failed: " in (tmp_path / "out" / "bench.md").read_text()
    ended, result = bench(tmp_path / "out")
    assert (ended.code, result["contenders"][0]["state"]) == (0, "measured")


@pytest.mark.slow
def test_a_failing_peer_does_not_stop_the_others(bench: Bench, tmp_path: Path) -> None:
    broken = package(tmp_path / "site", "trl", "0.1", "raise RuntimeError('out of | luck')")
    ended, result = bench(tmp_path / "out", "--peers", f"trl={broken}")
    assert ended.code == 0
    whet, trl = result["contenders"]
    assert (whet["state"], trl["state"], trl["ratio"]) == ("measured", "failed", None)
    assert trl["error"] == "RuntimeError: out of | luck"
    assert "| TRL 0.1 | failed: RuntimeError: out of / luck |" in ended.out
    assert "out of | luck" in (tmp_path / "out" / "trl.log").read_text()


_STAND_IN = '''
class FastLanguageModel:
    """Unsloth needs a GPU; this stand-in has its two calls."""

    @staticmethod
    def from_pretrained(model_name, max_seq_length, load_in_4bit, full_finetuning, use_gradient_checkpointing,
                        local_files_only):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        assert full_finetuning and not load_in_4bit and not use_gradient_checkpointing
        return AutoModelForCausalLM.from_pretrained(model_name), AutoTokenizer.from_pretrained(model_name)
'''


@pytest.mark.slow
def test_weight_files_for_a_peer_are_written_and_deleted(bench: Bench, tmp_path: Path) -> None:
    """Unsloth's script with a stand-in for its package."""
    site = package(tmp_path / "site", "unsloth", "2026.1", _STAND_IN)
    ended, result = bench(tmp_path / "out", "--peers", f"unsloth={site}")
    assert ended.code == 0, ended.err
    unsloth = result["contenders"][1]
    assert (unsloth["state"], unsloth["version"], unsloth["accumulation"]) == ("measured", "2026.1", 1)
    assert "GiB of random weights" in ended.err
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_real_shape_on_a_cpu(whet: Any, tmp_path: Path) -> None:
    ended = whet(
        "bench", "--model", "smollm-135m", "--length", 256, "--rows", 2, "--steps", 4, "--out", tmp_path / "out",
        "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["model"]["weights"] == 134_515_008
    assert result["contenders"][0]["speed"]["tokens_per_s"] > 0


def test_a_folder_with_other_files_is_an_error(whet: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    ended = whet("bench", "--model", "smollm-135m", "--out", tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert f"--out {tmp_path}" in ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "lama-8b"), "random:lama-8b: there is no such shape"),
        (("--steps", 3, "--warm", 3), "--steps 3"),
        (("--peers", "nobody"), "unknown tool nobody"),
        (("train.optimiser.lr=1",), "Did you mean train.optimizer?"),
        (("--data", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
    ],
)
def test_invalid_arguments(whet: Any, tmp_path: Path, arguments: Any, reason: str) -> None:
    ended = whet("bench", *arguments, "--out", tmp_path / "out")
    assert ended.code == 1
    assert reason in ended.err
    assert "Traceback" not in ended.err


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(whet: Any, tmp_path: Path) -> None:
    small = json.loads((builtin_folder("builtin:tiny") / "config.json").read_text())
    (tmp_path / "shape.json").write_text(json.dumps(small))
    ended = whet("bench", "--model", tmp_path / "shape.json", "--out", tmp_path / "out")
    assert ended.code == 1
    assert "--tokenizer FOLDER" in ended.err
