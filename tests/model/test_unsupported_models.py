"""Models that cannot be packed are trained unpacked; models that whet would train wrongly and damaged folders are
WhetErrors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_architectures import VOCABULARY, tiny_model
from whet.core.errors import WhetError
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.model.packing_check import choose_packing

UNPACKED = {
    "bloom": "recurrent layers or custom attention",  # not through transformers' interface
    "mpt": "recurrent layers or custom attention",
    "stablelm": "its code fails on packed conversations",  # keyword arguments do not reach its attention
    "jetmoe": "its code fails on packed conversations",
    "llama4_text": "chunks of 8192 tokens",
    "bart": "other logits than each alone",  # takes no positions
}
"""`model_type` of models that cannot be trained on packed documents, and why."""


@pytest.mark.parametrize("kind", UNPACKED)
def test_a_model_that_cannot_be_packed_is_trained_unpacked_as_a_plain_loop_would(
    kind: str, make_documents: Any, pack: Any
) -> None:
    model, documents = tiny_model(kind), make_documents(11, 3, 17)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    with KeepFloat64():
        choose_packing(root, VOCABULARY, 17)
        assert UNPACKED[kind] in root.unpacked
        assert root.pads
        alone = loss_and_gradients(root, [root(pack([document])).objective for document in documents])
        padded = loss_and_gradients(root, [root(pack(documents)).objective])
        plain = loss_and_gradients(root, [own_loss(model, document) for document in documents])
    for ours in (alone, padded):
        assert ours[0] == pytest.approx(plain[0], rel=1e-12)
        assert (ours[1] - plain[1]).abs().max() <= 1e-11 * plain[1].abs().max()


def own_loss(model: Any, document: Tensor) -> Tensor:
    logits = model(input_ids=document[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], document[1:], reduction="sum")


def loss_and_gradients(root: LossModel, losses: list[Tensor]) -> tuple[float, Tensor]:
    root.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in root.parameters() if p.grad is not None])


def test_a_model_that_sees_the_future_is_an_error() -> None:
    model = tiny_model("xlm")
    attention.install_backend(model, "sdpa")
    with pytest.raises(WhetError, match=r"model\.path: XLMWithLMHeadModel is not a causal model.*Use another model"):
        choose_packing(LossModel(model), VOCABULARY, 16)


def test_a_model_whose_head_is_more_than_a_linear_layer_is_an_error() -> None:
    model = tiny_model("bert")
    attention.install_backend(model, "sdpa")
    with pytest.raises(WhetError, match=r"model\.path.*BertLMHeadModel.*transforms its logits.*Use another model"):
        choose_packing(LossModel(model), VOCABULARY, 16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model"))


@pytest.mark.parametrize("size", [0, 5000])
def test_a_truncated_weights_file_is_an_error(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WhetError, match=r"model\.path: .*cannot be loaded"):
        load_model(ModelConfig(path=str(folder)), "auto")


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 3}], ids=["other shapes", "missing"])
def test_weights_that_do_not_fit_the_config_are_an_error(folder: Path, change: dict[str, int]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(WhetError, match=r"model\.path"):
        load_model(ModelConfig(path=str(folder)), "auto")
