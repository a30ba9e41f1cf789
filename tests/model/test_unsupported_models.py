"""Models that whet would train wrongly, and damaged model folders, are WhetErrors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from whet.core.errors import WhetError
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import PackingError, check_packing, check_unpacked

LEAKING: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {
        "head_dim": 16, "num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "Falcon": {},
    "Bloom": {},
}  # fmt: skip
"""State that runs through the row, or attention that does not go through transformers' interface."""

UNUSABLE: dict[str, dict[str, Any]] = {
    "Nemotron": {"head_dim": 8},  # does not hand keyword arguments down to its attention
    "StableLm": {},
    "Llama4Text": {
        "head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48,
        "moe_layers": [], "no_rope_layers": [1, 1],
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", [*LEAKING, *UNUSABLE])
def test_an_architecture_that_leaks_between_documents_is_an_error(
    architecture: str, make_model: Callable[..., Any]
) -> None:
    model = make_model(architecture, dtype=torch.float32, **(LEAKING | UNUSABLE)[architecture])
    with pytest.raises(PackingError, match=r"model\.path.*data\.packing=none"):
        prepared(model)


@pytest.mark.parametrize("architecture", [*LEAKING, "Nemotron", "StableLm"])
def test_unpacked_it_can_be_trained(
    architecture: str, make_model: Callable[..., Any], make_documents: Any, pack: Any
) -> None:
    model = make_model(architecture, dtype=torch.float32, **(LEAKING | UNUSABLE)[architecture])
    attention.install_backend(model, "sdpa")
    attention.use_native_attention(model)
    root = LossModel(model)
    root.unpacked = True
    check_unpacked(root, 64, 16)
    (document,) = make_documents(11)
    logits = model(input_ids=document[None], use_cache=False).logits[0]
    own = F.cross_entropy(logits[:-1], document[1:], reduction="sum")
    assert root(pack([document])).loss.item() == pytest.approx(own.item(), rel=1e-5)


def test_an_architecture_that_fails_unpacked_is_an_error(make_model: Callable[..., Any]) -> None:
    """Llama 4 does not say where its body is."""
    model = make_model("Llama4Text", dtype=torch.float32, **UNUSABLE["Llama4Text"])
    with pytest.raises(WhetError, match="cannot be trained"):
        check_unpacked(LossModel(model), 64, 16)


def prepared(model: Any) -> None:
    attention.install_backend(model, "sdpa")
    check_packing(LossModel(model), 64, 16)


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
