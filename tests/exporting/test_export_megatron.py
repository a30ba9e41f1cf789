"""Megatron-Core's layout: written and joined again to the same weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.core.errors import WhetError
from whet.exporting import megatron
from whet.exporting.exporter import write_export
from whet.exporting.megatron import read_megatron
from whet.exporting.spec import ExportMismatchError

PROBES = [list(range(3, 60)), list(range(100, 120))]
FAMILIES = {"llama": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 32}}


def parts_of(folder: Path) -> list[Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        files = sorted(folder.glob("release/*/model_optim_rng.pt"))
        return [torch.load(file, weights_only=True) for file in files]


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_read_back(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, family: str, parallel: int
) -> None:
    model = random_model(family, **FAMILIES[family])
    certificate = write_export(export_spec_of(model, tensor_parallel=parallel), "megatron", tmp_path / "out", PROBES)
    assert certificate.max_logit_difference == 0
    assert sum(name.endswith(".pt") for name in certificate.files) == parallel
    torch.testing.assert_close(read_megatron(tmp_path / "out"), dict(model.named_parameters()), rtol=0, atol=0)
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "out/huggingface/tokenizer.json").exists()


def test_the_layout_is_megatrons(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path
) -> None:
    """Four heads in two query groups; the second of two ranks has the second group."""
    model = random_model("llama")
    write_export(export_spec_of(model, tensor_parallel=2), "megatron", tmp_path / "out", PROBES)
    first, second = parts_of(tmp_path / "out")
    layer, own = model.model.layers[1], second["model"]
    q, k, v = (getattr(layer.self_attn, f"{which}_proj").weight for which in "qkv")
    assert torch.equal(
        own["decoder.layers.1.self_attention.linear_qkv.weight"], torch.cat([q[32:48], q[48:64], k[16:32], v[16:32]])
    )
    gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
    assert torch.equal(own["decoder.layers.1.mlp.linear_fc1.weight"], torch.cat([gate[48:], up[48:]]))
    assert torch.equal(own["decoder.layers.1.mlp.linear_fc2.weight"], layer.mlp.down_proj.weight[:, 48:])
    assert torch.equal(own["decoder.layers.1.self_attention.linear_proj.weight"], layer.self_attn.o_proj.weight[:, 32:])
    norm = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert torch.equal(own[norm], layer.post_attention_layernorm.weight)
    assert torch.equal(first["model"][norm], own[norm])
    rows = [part["model"]["embedding.word_embeddings.weight"] for part in (first, second)]
    assert len(rows[0]) == len(rows[1]) == first["args"].padded_vocab_size / 2
    assert first["args"].padded_vocab_size % 256 == 0
    vocabulary = model.config.vocab_size
    assert torch.equal(torch.cat(rows)[:vocabulary], model.model.embed_tokens.weight)
    assert not torch.cat(rows)[vocabulary:].any()


@pytest.mark.parametrize(
    ("kind", "settings", "parallel", "words"),
    [
        ("gemma", {}, 1, "only that of llama, mistral, qwen2, qwen3"),
        ("llama", {"attention_bias": True}, 1, "without attention_bias"),
        ("llama", {}, 4, "4 ranks cannot evenly share this model's 2 key-value heads"),
    ],
)
def test_unsupported_models_are_refused(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, kind: str,
    settings: dict[str, Any], parallel: int, words: str,
) -> None:  # fmt: skip
    spec = export_spec_of(random_model(kind, **settings), tensor_parallel=parallel)
    with pytest.raises(WhetError, match=words):
        write_export(spec, "megatron", tmp_path / "out", PROBES)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_of_another_rank_is_refused(
    random_model: Callable[..., Any],
    export_spec_of: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = megatron.shard_weights

    def swapped(weight: Any, tensors: Any, shape: Any, rank: int) -> Any:
        return shard(weight, tensors, shape, 1 - rank if weight.sharding == "qkv" else rank)

    monkeypatch.setattr(megatron, "shard_weights", swapped)
    with pytest.raises(ExportMismatchError, match="its logits differ"):
        write_export(export_spec_of(random_model("llama"), tensor_parallel=2), "megatron", tmp_path / "out", PROBES)
