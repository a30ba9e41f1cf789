"""Whole runs in 8 bits on CUDA, of a model with matrices large enough for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from whet.config import read_config
from whet.execution import cuda_graphs
from whet.model import frozen_weight
from whet.model.fp8.conversion import fp8_unsupported_reason
from whet.model.fp8.linear import scaled_matmul
from whet.model.load.builtin_models import builtin_folder
from whet.run.lifecycle import run_training

pytestmark = pytest.mark.gpu

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
OPTIONS = (
    "train.steps=20", "train.optimizer.lr=5e-5", "data.max_length=1000", "train.batch.conversations=32",
    "checkpoint.every=20", "eval.every=20",
)  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer with two layers of width 2048."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    reason = fp8_unsupported_reason(torch.device("cuda", 0))
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=2048, intermediate_size=8192, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _run(folder: Path, model: Path, *overrides: str) -> list[float]:
    config = read_config(TINY, [f"run.dir={folder}", f"model.path={model}", *OPTIONS, *overrides])
    run_training(config, resume=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    "options",
    [
        ("model.dtype=bf16", "train.optimizer.name=adamw16bit"),
        ("model.dtype=bf16", "train.optimizer.name=adamw16bit", "parallel.recompute=full"),
        ("model.dtype=fp32",),
        ("adapter.rank=16", "train.optimizer.lr=2e-3"),
    ],
    ids=" ".join,
)
def test_it_learns_what_bf16_learns(tmp_path: Path, wide: Path, options: tuple[str, ...]) -> None:
    wanted = _run(tmp_path / "bf16", wide, "train.precision=bf16", *options)
    found = _run(tmp_path / "fp8", wide, "train.precision=fp8", *options)
    plan = json.loads((tmp_path / "fp8" / "plan.json").read_text())
    assert plan["eight_bit_layers"] == 2 * 5  # k and v are small
    assert found == pytest.approx(wanted, rel=0.05)
    assert found != wanted
    assert found[-1] < 0.9 * found[0]


def test_adapters_are_computed_together_with_layers_in_8_bits(
    tmp_path: Path, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []

    def spy(*given: Any, **settings: Any) -> Tensor:
        products.append(len(given[0]))
        return scaled_matmul(*given, **settings)

    monkeypatch.setattr(frozen_weight, "scaled_matmul", spy)
    monkeypatch.setattr(cuda_graphs, "_LAUNCH_BOUND_S", 0.0)  # no CUDA graphs, in which the spy would be called once
    _run(tmp_path / "fp8", wide, "train.precision=fp8", "adapter.rank=16", "train.steps=2")
    assert len(products) >= 2 * 2 * (5 + 4)  # steps, layers, forward and back; where nothing is trained, not back
