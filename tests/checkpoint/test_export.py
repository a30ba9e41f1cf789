"""What ships is what was trained: loaded back and compared, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from whet.checkpoint import export as exports
from whet.checkpoint.export import export
from whet.core.errors import RunFailedError, WhetError
from whet.core.files import hash_file
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load import load_model
from whet.model.lora import add_adapter
from whet.model.tokenizer import load_tokenizer

TINY = ModelConfig(path="builtin:tiny")
STOPS = [2, 5]
PROBES = [list(range(3, 60)), list(range(100, 120))]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture
def adapted() -> nn.Module:
    """Tiny with adapters that have learned something, attending by documents, as training leaves it."""
    model = load_model(TINY, torch.float32)
    attention.install(model, "sdpa")
    model = add_adapter(model, AdapterConfig(rank=4), seed=0)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROBES[0]])).logits


def test_a_merged_export_loads_in_transformers_and_carries_its_certificate(
    adapted: nn.Module, tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "exports" / "merged"
    base = logits(load_model(TINY, torch.float32))
    certificate = export(adapted, tokenizer, STOPS, PROBES, "merged", folder, 7)
    written = json.loads((folder / "certificate.json").read_text())
    assert written == certificate.as_dict()
    assert written["verified"] is True
    assert (written["kind"], written["conversations"], written["tokens"]) == ("merged", 2, 57 + 20)
    assert written["same_next_token"] == 1
    assert written["files"] == {"model.safetensors": hash_file(folder / "model.safetensors")}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generation_config.eos_token_id == STOPS
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert (logits(loaded) - base).abs().max() > 0.1  # the adapters are in it
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_an_adapter_export_loads_in_peft(adapted: nn.Module, tokenizer: Any, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = tmp_path / "adapter"
    adapted.eval()
    adapted.set_attn_implementation("sdpa")
    wanted = logits(adapted)
    certificate = export(adapted, tokenizer, STOPS, PROBES, "adapter", folder, 7)
    assert certificate.verified
    assert list(certificate.files) == ["adapter_model.safetensors"]
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), wanted)


def test_a_whole_model_has_no_adapter_to_export(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="--to merged"):
        export(load_model(TINY, torch.float32), tokenizer, STOPS, PROBES, "adapter", tmp_path / "adapter", 7)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", [0.0, 1.5])
def test_a_merge_that_went_wrong_is_refused_and_leaves_what_was_there(
    adapted: nn.Module, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    def tampered(model: Any) -> nn.Module:
        merged = model.merge_and_unload()
        merged.model.layers[0].mlp.down_proj.weight.data.mul_(by)
        return merged

    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "older").touch()
    monkeypatch.setattr(exports, "merge", tampered)
    with pytest.raises(RunFailedError, match="is not the trained one"):
        export(adapted, tokenizer, STOPS, PROBES, "merged", folder, 7)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["merged", "merged/older"]


def test_a_new_export_takes_the_place_of_the_old(tokenizer: Any, tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "older").touch()
    export(load_model(TINY, torch.float32), tokenizer, STOPS, PROBES, "merged", folder, 7)
    assert not (folder / "older").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_the_model_attends_as_before_after_being_compared(tokenizer: Any, tmp_path: Path) -> None:
    model = load_model(TINY, torch.float32)
    attention.install(model, "sdpa")
    export(model, tokenizer, STOPS, PROBES, "merged", tmp_path / "merged", 7)
    assert model.config._attn_implementation == attention.name_of("sdpa")


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_a_full_disk_is_said_and_leaves_nothing(
    adapted: nn.Module, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
) -> None:  # fmt: skip
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full, raising=False)
    with pytest.raises(WhetError, match="the disk is full while exporting"):
        export(adapted, tokenizer, STOPS, PROBES, kind, tmp_path / kind, 7)
    assert list(tmp_path.iterdir()) == []
