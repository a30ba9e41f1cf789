"""Mixtures of experts from check to export: `python tests/run/test_expert_families.py` runs all, `make test-all` too.

Each is a tiny random model with several experts: checked, trained with adapters and whole, stopped and resumed, by one
process and by two, evaluated, exported as one model and as an adapter. `make test` takes two steps of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from several_processes import torchrun
from tiny_architectures import VOCABULARY, save_tiny_model, tiny_model
from whet.core.distributed import Ranks
from whet.data.loader import ReplayLoader, SavedDocument
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.experts.install import install_experts
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.model.packing_check import choose_packing
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer
from whet.training.step import ForwardPasses, train_step

FAMILIES = (
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe", "qwen3_5_moe_text",
)  # fmt: skip
MORE_FAMILIES = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe_lite", "glm_moe_dsa", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "jamba", "kimi_linear", "laguna",
    "lfm2_moe", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "nemotron_h", "phimoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_next", "solar_open", "zaya",
)  # fmt: skip
"""In transformers' experts registry; some are not in transformers 5.17."""
FULL = ["train.optimizer.lr=3e-3"]
LORA = ["adapter={rank: 4}", "train.optimizer.lr=1e-2"]
SHORT = [
    "train.steps=4", "train.precision=fp64", "data.max_length=256", "checkpoint.every=2", "export.at_end=none",
    "data.validation=null", "train.micro_rows=1",
]  # fmt: skip
ALONE = Ranks(0, 1, torch.device("cpu"))
Steps = Callable[[Path], list[dict[str, Any]]]


@pytest.mark.parametrize("kind", FAMILIES)
def test_two_steps_of_a_family(kind: str) -> None:
    """The first loss is the model's own, document by document; then it falls, and every adapter has a gradient."""
    model: Any = tiny_model(kind)
    torch.manual_seed(0)
    documents = [
        SavedDocument(torch.randint(3, VOCABULARY, (length,)).numpy(), np.array([0] + [1] * (length - 1), np.uint8))
        for length in (5, 9, 7, 6)
    ]
    with torch.no_grad(), KeepFloat64():
        own = [model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in map(as_tensor, documents)]
    weights = [len(document.ids) - 1 for document in documents]
    model = unwrap_peft(add_adapter(model, AdapterConfig(rank=2), seed=0).double())
    assert install_experts(model) >= 1
    attention.install_backend(model, "sdpa")
    root = LossModel(model).train()
    choose_packing(root, VOCABULARY, 9)
    layout = [(0, [0, 1]), (1, [2, 3])] if not root.unpacked else [(row, [row]) for row in range(4)]
    loader = ReplayLoader(documents, layout, 9, ())
    optimizer = build_optimizer(root, OptimizerConfig(lr=1e-2), 0)
    results = []
    for _ in range(2):
        forward = ForwardPasses(root, loader, 0, device=ALONE.device, seed=0, autocast=KeepFloat64(), loss_scale=1.0)
        results.append(train_step(forward, optimizer, ranks=ALONE, clip_norm=1.0).wait())
    assert results[0].loss == pytest.approx(np.average(own, weights=weights), rel=1e-9)
    assert results[1].loss < results[0].loss
    trained = {name: weight for name, weight in root.named_parameters() if weight.requires_grad}
    assert any("experts" in name for name in trained)
    assert not any(".mlp.gate.lora" in name or ".router." in name for name in trained)
    assert [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE_FAMILIES)
def test_two_steps_of_another_family(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    test_two_steps_of_a_family(kind)


def as_tensor(document: SavedDocument) -> torch.Tensor:
    return torch.from_numpy(document.ids)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`model.path=FOLDER`."""
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.parametrize("how", [FULL, LORA], ids=["full", "lora"])
def test_a_family_from_check_to_export(
    whet: Any, recipe: str, family: str, how: list[str], tmp_path: Path, steps_of: Steps
) -> None:
    settings = [family, *SHORT, *how]
    checked = whet("check", recipe, *settings, "--json")
    assert checked.code == 0, checked.out + checked.err

    whole, resumed, pair = tmp_path / "whole", tmp_path / "resumed", tmp_path / "pair"
    ended = whet("train", recipe, f"run.dir={whole}", *settings)
    assert ended.code == 0, ended.err
    losses = [line["loss"] for line in steps_of(whole)]
    assert min(losses) < losses[0]

    ended = whet("train", recipe, f"run.dir={resumed}", *settings, "--until", "2")
    assert ended.code == 0, ended.err
    ended = whet("train", recipe, f"run.dir={resumed}", *settings, "--resume")
    assert ended.code == 0, ended.err
    assert [line["loss"] for line in steps_of(resumed)] == losses

    done = torchrun(2, "-m", "whet", "train", recipe, f"run.dir={pair}", *settings)
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in steps_of(pair)] == pytest.approx(losses, rel=1e-9)

    scored = whet("eval", whole, "--tasks", "orders", "eval.examples=2", "--json")
    assert scored.code == 0, scored.err
    for kind in ("merged", "adapter") if how is LORA else ("hf",):
        ended = whet("export", whole, "--to", kind, "--out", tmp_path / kind)
        assert ended.code == 0, ended.err
        certificate = json.loads((tmp_path / kind / "certificate.json").read_text())
        assert certificate


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["parallel.recompute=full", "parallel.recompute=selective", "parallel.offload=activations",
               "train.precision=bf16", "train.optimizer.name=muon", "parallel.shard=1 parallel.offload=weights"],
)  # fmt: skip
@pytest.mark.parametrize("how", [FULL, LORA], ids=["full", "lora"])
def test_a_family_with_other_memory_and_precision(
    whet: Any, recipe: str, family: str, how: list[str], option: str, tmp_path: Path, steps_of: Steps
) -> None:
    settings = [family, *SHORT, *how, "train.steps=2", *option.split()]
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", *settings)
    assert ended.code == 0, ended.err
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in steps_of(tmp_path / "run"))


if __name__ == "__main__":
    os.environ["WHET_TEST_ALL"] = "1"
    raise SystemExit(pytest.main([__file__, "-v", "-p", "no:cacheprovider", *sys.argv[1:]]))
