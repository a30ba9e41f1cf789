"""Hybrids and state-space models from check to export: `WHET_TEST_ALL=1 pytest tests/run/test_hybrid_families.py` runs
all.

Each is a tiny random model with recurrent layers: checked, trained with adapters and whole, stopped and resumed, by
one, two and four processes, evaluated, exported. `make test` takes two steps of each, packed, padded and one
conversation at a time, and compares them with a plain loop.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from several_processes import torchrun
from tiny_architectures import VOCABULARY, save_tiny_model, tiny_model
from whet.data.batch import PackedBatch
from whet.data.loader import ReplayLoader, SavedDocument
from whet.model import attention
from whet.model.attention.recurrent import recurrent_layers
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.model.packing_check import choose_packing

FAMILIES = (
    "qwen3_next", "qwen3_5_text", "falcon_h1", "bamba", "granitemoehybrid", "lfm2", "nemotron_h", "jamba", "mamba",
    "mamba2", "zamba2",
)  # fmt: skip
MORE_FAMILIES = (
    "qwen3_5_moe_text", "lfm2_moe", "falcon_mamba", "recurrent_gemma", "olmo_hybrid", "minimax", "rwkv", "xlstm",
    "kimi_linear",
)  # fmt: skip
LENGTHS = (13, 2, 9, 1, 6)
Steps = Callable[[Path], list[dict[str, Any]]]


def packed(documents: list[Tensor]) -> PackedBatch:
    saved = [
        SavedDocument(ids.numpy(), torch.tensor([0] + [1] * (len(ids) - 1), dtype=torch.uint8).numpy())
        for ids in documents
    ]
    loader = ReplayLoader(saved, [(0, range(len(saved)))], max(map(len, documents)), ())
    return next(batch for _, batch in loader.micro_batches(0))


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_FAMILIES)])
def test_two_packed_steps_are_a_plain_loop(kind: str) -> None:
    start: Any = tiny_model(kind)
    model, documents = copy.deepcopy(start), random_documents()
    with KeepFloat64():
        attention.install_backend(model, "sdpa")
        root = LossModel(model)
        choose_packing(root, VOCABULARY, max(LENGTHS))
        assert root.unpacked == ""
        assert recurrent_layers(model)
        batch = packed(documents)
        ours = two_steps(model, lambda _: root(batch).objective)
        assert ours == pytest.approx(two_steps(start, lambda model: plain_loss(model, documents)), rel=1e-9)


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize(
    "kind", ["lfm2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*FAMILIES[:5], *FAMILIES[6:]))]
)
def test_two_unpacked_steps_are_a_plain_loop(kind: str, pads: bool) -> None:
    start: Any = tiny_model(kind)
    root, documents = LossModel(copy.deepcopy(start)), random_documents()
    root.unpacked, root.pads = "for the comparison", pads
    with KeepFloat64():
        ours = two_steps(root.language_model, lambda _: root(packed(documents)).objective)
        assert ours == pytest.approx(two_steps(start, lambda model: plain_loss(model, documents)), rel=1e-9)


def random_documents() -> list[Tensor]:
    return [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]


def two_steps(model: Any, loss: Callable[[Any], Tensor]) -> list[float]:
    """Loss and norm of all gradients in two steps of gradient descent; weights that are no part of the loss have
    none."""
    found = []
    for _ in range(2):
        model.zero_grad()
        total = loss(model)
        total.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found += [total.item(), torch.stack([gradient.norm() for gradient in gradients]).norm().item()]
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight -= 1e-3 * weight.grad
    return found


def plain_loss(model: Any, documents: list[Tensor]) -> Tensor:
    losses = [
        F.cross_entropy(model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="sum")
        for ids in documents
        if len(ids) > 1
    ]
    return torch.stack(losses).sum()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`model.path=FOLDER`."""
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


SHORT = [
    "train.steps=4", "train.precision=fp64", "data.max_length=256", "checkpoint.every=2", "export.at_end=none",
    "train.batch.conversations=8",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["adapter={rank: 4}"]], ids=["full", "lora"])
def test_a_family_from_check_to_export(
    whet: Any, recipe: str, family: str, how: list[str], tmp_path: Path, steps_of: Steps
) -> None:
    settings = [family, *SHORT, *how]
    checked = whet("check", recipe, *settings, "--json")
    assert checked.code == 0, checked.out + checked.err
    assert "starts anew with each" in checked.out

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ended = whet("train", recipe, f"run.dir={whole}", *settings, "train.micro_rows=2")
    assert ended.code == 0, ended.err
    losses = [line["loss"] for line in steps_of(whole)]
    assert json.loads((whole / "plan.json").read_text())["packing"] == "best-fit"

    ended = whet("train", recipe, f"run.dir={resumed}", *settings, "train.micro_rows=2", "--until", "2")
    assert ended.code == 0, ended.err
    ended = whet("train", recipe, f"run.dir={resumed}", *settings, "train.micro_rows=2", "--resume")
    assert ended.code == 0, ended.err
    assert [line["loss"] for line in steps_of(resumed)] == losses

    for processes, others in ((2, []), (4, ["parallel.shard=2"])):
        folder = tmp_path / str(processes)
        done = torchrun(
            processes, "-m", "whet", "train", recipe, f"run.dir={folder}", *settings, "train.micro_rows=1", *others
        )
        assert done.returncode == 0, done.stderr
        assert [line["loss"] for line in steps_of(folder)] == pytest.approx(losses, rel=1e-9)

    for option in ("data.packing=none", "parallel.recompute=full", "parallel.recompute=selective"):
        folder = tmp_path / option
        ended = whet("train", recipe, f"run.dir={folder}", *settings, option)
        assert ended.code == 0, ended.err
        assert [line["loss"] for line in steps_of(folder)] == pytest.approx(losses, rel=1e-9)

    scored = whet("eval", whole, "--json")
    assert scored.code == 0, scored.err
    for kind in ("merged", "adapter") if how else ("merged",):
        ended = whet("export", whole, "--to", kind, "--out", tmp_path / kind)
        assert ended.code == 0, ended.err
        assert json.loads((tmp_path / kind / "certificate.json").read_text())["verified"]
