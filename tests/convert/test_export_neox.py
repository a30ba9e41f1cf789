"""Exports for GPT-NeoX: the tensors are those of an independent writer, and the importer computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from neox_writer import llama_layers, neox_layers
from transformers import AutoConfig, AutoModelForCausalLM

from whet.convert import neox_export
from whet.core.errors import WhetError
from whet.exporting.dtypes import EXPORT_DTYPES
from whet.exporting.exporter import write_export
from whet.exporting.spec import ExportMismatchError, ExportSpec, GenerationSettings
from whet.exporting.trained_model import TrainedModel
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.run import export_run  # noqa: F401  (adds the format)

PROBES = [list(range(3, 60)), list(range(100, 120))]
TINY = ModelConfig(path="builtin:tiny")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama, fewer keys, biases": ("llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "neox, parallel residual": ("gpt_neox", {"use_parallel_residual": True}),
    "neox, sequential": ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_pytorch_tanh"}),
}


def make(kind: str, **settings: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 5e4} | ({"partial_rotary_factor": 0.5} if kind == "gpt_neox" else {})
    rows = len(load_tokenizer(TINY)) + 3
    config = AutoConfig.for_model(kind, **{**SIZES, "vocab_size": rows, "rope_parameters": rope, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():  # norms and biases that have an effect
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def spec_of(model: Any, ranks: int = 1, dtype: str = "f32") -> ExportSpec:
    generation = GenerationSettings(load_tokenizer(TINY), [2, 5], 2, {})
    return ExportSpec(TrainedModel(model), generation, EXPORT_DTYPES[dtype], 423858, tensor_parallel=ranks)


@pytest.mark.parametrize(("name", "ranks"), [("llama", 1), *((name, 2) for name in KINDS)])
def test_files_are_neox_s_and_read_back(name: str, ranks: int, tmp_path: Path) -> None:
    kind, settings = KINDS[name]
    model = make(kind, **settings)
    certificate = write_export(spec_of(model, ranks), "neox", tmp_path / "out", PROBES)
    assert certificate.verified
    assert certificate.max_logit_difference is not None
    assert certificate.max_logit_difference < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the import that checked it is gone"
    step = tmp_path / "out" / "global_step423858"
    assert (tmp_path / "out" / "latest").read_text() == step.name
    expected_of = llama_layers if kind == "llama" else neox_layers
    padded = -(-model.config.vocab_size // (128 * ranks)) * 128
    for rank in range(ranks):
        for number, tensors in expected_of(model, rank, ranks, old=False).items():
            ours = torch.load(step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt", weights_only=True)
            tensors.pop("attention.rotary_emb.inv_freq", None)
            assert ours.keys() == tensors.keys()
            for key, tensor in tensors.items():
                if key in ("word_embeddings.weight", "final_linear.weight"):
                    assert len(ours[key]) == padded
                else:
                    assert torch.equal(ours[key], tensor), key
    written = yaml.safe_load((step / "configs" / "model.yml").read_text())
    assert (written["num_layers"], written["model_parallel_size"]) == (2, ranks)
    if kind == "llama":
        assert int(written["intermediate_size"] * 2 / 3) // 2 == 96, "as NeoX computes it"
    assert (tmp_path / "out" / "huggingface" / "tokenizer.json").exists()


def test_a_run_goes_to_neox_and_back(whet: Any, tiny_run: Path, tmp_path: Path) -> None:
    ended = whet("export", tiny_run, "--to", "neox", "--out", tmp_path / "neox", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["certificate"]["verified"]
    again = whet("import", "checkpoint", "neox", tmp_path / "neox", "--out", tmp_path / "hf", "--json")
    assert again.code == 0, again.err


def test_a_swapped_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = neox_export._rows
    monkeypatch.setattr(neox_export, "_rows", lambda tensor, rank, ranks: rows(tensor, 1 - rank, ranks))
    with pytest.raises(ExportMismatchError, match="differ"):
        write_export(spec_of(make("llama", num_key_value_heads=2), 2), "neox", tmp_path / "out", PROBES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "settings", "ranks", "says"),
    [
        ("qwen2", {"num_key_value_heads": 4}, 1, "only Llama and GPT-NeoX models"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 1, "does not scale"),
        ("llama", {"num_key_value_heads": 4, "head_dim": 32}, 1, "its heads have 32 dimensions"),
        ("llama", {"num_key_value_heads": 2}, 4, "4 ranks cannot evenly share this model's 2 key-value heads"),
    ],
)
def test_what_neox_cannot_load_is_refused(
    kind: str, settings: dict[str, Any], ranks: int, says: str, tmp_path: Path
) -> None:
    with pytest.raises(WhetError, match=says):
        write_export(spec_of(make(kind, **settings), ranks), "neox", tmp_path / "out", PROBES)
