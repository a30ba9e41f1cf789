"""Model folders and adapters: verified against the trained model, or refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tiny_architectures import save_tiny_model
from whet.core.checksums import read_hashed_json
from whet.core.errors import WhetError
from whet.core.files import hash_file, read_json, write_json
from whet.exporting import trained_model
from whet.exporting.dtypes import EXPORT_DTYPES
from whet.exporting.exporter import write_export
from whet.exporting.hf_folder import HFFolderFormat
from whet.exporting.safetensors_writer import StreamingSafetensorsWriter
from whet.exporting.spec import ExportMismatchError, ExportSpec, GenerationSettings
from whet.exporting.trained_model import TrainedModel
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.lora.peft_adapters import add_adapter
from whet.model.quantize import dequantize_linear, quantize_, quantized_layers

TINY = ModelConfig(path="builtin:tiny")
STOPS = [2, 5]
PROBES = [list(range(3, 60)), list(range(100, 120))]


def spec_of(model: nn.Module, dtype: str = "f32", **more: Any) -> ExportSpec:
    settings = GenerationSettings(load_tokenizer(TINY), STOPS, 2, {"temperature": 0.6, "do_sample": True})
    return ExportSpec(TrainedModel(model), settings, EXPORT_DTYPES[dtype], 7, **more)


@pytest.fixture
def adapted() -> nn.Module:
    """builtin:tiny with nonzero adapters and whet's attention, as training leaves it."""
    model = load_model(TINY, torch.float32)
    attention.install_backend(model, "sdpa")
    model = add_adapter(model, AdapterConfig(rank=4), seed=0)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROBES[0]])).logits


def test_a_model_without_adapters_does_not_import_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes two seconds."""
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert write_export(spec_of(load_model(TINY, torch.float32)), "merged", tmp_path / "merged", PROBES).verified


def test_a_merged_export_loads_in_transformers_and_has_a_certificate(adapted: nn.Module, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "exports" / "merged"
    base = logits(load_model(TINY, torch.float32))
    certificate = write_export(spec_of(adapted), "merged", folder, PROBES)
    written = read_hashed_json(folder / "certificate.json", "")
    assert written == certificate.as_dict()
    assert written["verified"] is True
    assert (written["kind"], written["conversations"], written["tokens"]) == ("merged", 2, 57 + 20)
    assert (written["same_next_token"], written["same_ids"], written["stops"], written["dtype"]) == (
        1,
        True,
        True,
        "f32",
    )
    assert written["kl"] < 1e-9
    assert written["files"]["model.safetensors"] == hash_file(folder / "model.safetensors")
    assert set(written["files"]) == {file.name for file in folder.iterdir()} - {"certificate.json", "README.md"}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generation_config.eos_token_id == STOPS
    assert loaded.generation_config.temperature == 0.6
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert (logits(loaded) - base).abs().max() > 0.1  # the adapters are merged
    assert AutoTokenizer.from_pretrained(folder).chat_template == load_tokenizer(TINY).chat_template


def test_exporting_does_not_change_the_model(adapted: nn.Module, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in adapted.state_dict().items()}
    write_export(spec_of(adapted), "merged", tmp_path / "merged", PROBES)
    torch.testing.assert_close(dict(adapted.state_dict()), before, rtol=0, atol=0)
    assert adapted.config._attn_implementation == attention.registered_name("sdpa")
    assert not any(getattr(module, "merged", False) for module in adapted.modules())


def test_merged_weights_are_those_of_peft(adapted: nn.Module, tmp_path: Path) -> None:
    write_export(spec_of(adapted), "merged", tmp_path / "merged", PROBES)
    merged = {name: weight.detach() for name, weight in adapted.merge_and_unload().named_parameters()}
    torch.testing.assert_close(load_file(tmp_path / "merged/model.safetensors"), merged, rtol=0, atol=0)


def test_an_adapter_export_loads_in_peft(adapted: nn.Module, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = tmp_path / "adapter"
    adapted.eval()
    adapted.set_attn_implementation("sdpa")
    wanted = logits(adapted)
    certificate = write_export(spec_of(adapted), "adapter", folder, PROBES)
    assert certificate.verified
    assert [name for name in certificate.files if name.endswith(".safetensors")] == ["adapter_model.safetensors"]
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), wanted)


def test_a_whole_model_has_no_adapter_to_export(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="--to merged"):
        write_export(spec_of(load_model(TINY, torch.float32)), "adapter", tmp_path / "adapter", PROBES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bit_exports_are_written_and_recorded(adapted: nn.Module, tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    certificate = write_export(spec_of(adapted, dtype), "merged", tmp_path / "merged", PROBES)
    assert certificate.dtype == dtype
    assert 0 < certificate.max_logit_difference < 0.1
    kept = {weight.dtype for weight in load_file(tmp_path / "merged/model.safetensors").values()}
    assert (
        kept == {EXPORT_DTYPES[dtype].torch_dtype} == {AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype}
    )


def test_sharded_exports_hold_the_same_weights(adapted: nn.Module, tmp_path: Path) -> None:
    """With shards of 100 kB most of the model stays on disk during the comparison."""
    write_export(spec_of(adapted), "merged", tmp_path / "one", PROBES)
    certificate = write_export(spec_of(adapted, shard_size=100_000), "merged", tmp_path / "many", PROBES)
    shards = [name for name in certificate.files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert all((tmp_path / "many" / name).stat().st_size < 140_000 for name in shards)
    index = read_json(tmp_path / "many/model.safetensors.index.json")
    many = {key: value for name in shards for key, value in load_file(tmp_path / "many" / name).items()}
    assert set(index["weight_map"]) == set(many)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in many.values())
    torch.testing.assert_close(many, load_file(tmp_path / "one/model.safetensors"), rtol=0, atol=0)


def test_shards_are_valid_safetensors_files(tmp_path: Path) -> None:
    shapes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "d": ()}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    writer = StreamingSafetensorsWriter(tmp_path, shard_size=30)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert index["metadata"]["total_size"] == 2 * (12 + 5 + 8 + 1)


def _rewrite(folder: Path, name: str, **values: Any) -> None:
    write_json(folder / name, {**read_json(folder / name), **values})


def _other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|im_start|>", "<|im_start|> "))


def _other_pre_tokenizer(folder: Path) -> None:
    """Splits around every l."""
    content = read_json(folder / "tokenizer.json")
    around = {"type": "Split", "pattern": {"Regex": "l"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [around, content["pre_tokenizer"]]}
    write_json(folder / "tokenizer.json", content)


def _weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = next(folder.glob("*.safetensors"))
    weights = {name: weight.clone() for name, weight in load_file(file).items()}
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _halved(weights: dict[str, Any]) -> None:
    weights["model.layers.0.mlp.down_proj.weight"] *= 0.5


def _rounded(weights: dict[str, Any]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].half()


def _left_out(weights: dict[str, Any]) -> None:
    del weights["model.norm.weight"]


def _zero_adapter(weights: dict[str, Any]) -> None:
    for name in weights:
        if "lora_B" in name:
            weights[name].zero_()


def _stops(folder: Path) -> None:
    _rewrite(folder, "generation_config.json", eos_token_id=5)


def _eos(folder: Path) -> None:
    _rewrite(folder, "tokenizer_config.json", eos_token="<|endoftext|>")


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, "config.json", **values)


def _adapter(**values: Any) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, "adapter_config.json", **values)


def _changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: _weights(folder, change)


def _no_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 100)


CORRUPTIONS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "template": ("merged", _other_template, "its chat template is not the one"),
    "tokenizer": ("merged", _other_pre_tokenizer, "its tokenizer splits"),
    "stops": ("merged", _stops, r"does not stop at '<\|im_end\|>'"),
    "eos": ("merged", _eos, "the eos token of its tokenizer is"),
    "dtype of config.json": ("merged", _config(dtype="float16"), "load it in torch.float16"),
    "dtype of a weight": ("merged", _changed(_rounded), "weights in F16 instead of F32"),
    "a weight": ("merged", _changed(_halved), "its logits differ by"),
    "a weight less": ("merged", _changed(_left_out), "missing weights: .*norm"),
    "configuration": ("merged", _config(rms_norm_eps=0.1), "its logits differ by"),
    "a file": ("merged", _no_file, "is damaged"),
    "adapter": ("adapter", _changed(_zero_adapter), "its logits differ by"),
    "scale": ("adapter", _adapter(lora_alpha=1), "its logits differ by"),
    "base": ("adapter", _adapter(base_model_name_or_path="/nowhere"), "peft cannot load it over /nowhere"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupted_export_is_refused_and_the_older_one_stays(
    adapted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from whet.exporting.exporter import EXPORT_FORMATS

    kind, corrupt, reason = CORRUPTIONS[what]
    export_format = type(EXPORT_FORMATS[kind])
    write = export_format.write

    def write_corrupted(self: Any, spec: ExportSpec, folder: Path) -> None:
        write(self, spec, folder)
        corrupt(folder)

    folder = tmp_path / kind
    folder.mkdir()
    (folder / "older").touch()
    monkeypatch.setattr(export_format, "write", write_corrupted)
    with pytest.raises(ExportMismatchError, match=reason):
        write_export(spec_of(adapted), kind, folder, PROBES)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [kind, f"{kind}/older"]


def test_a_new_export_replaces_the_old(tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "older").touch()
    write_export(spec_of(load_model(TINY, torch.float32)), "merged", folder, PROBES)
    assert not (folder / "older").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


@pytest.mark.parametrize("kind", ["merged", "adapter", "gguf", "megatron"])
def test_a_full_disk_is_reported_and_nothing_is_left(
    adapted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from whet.exporting.exporter import EXPORT_FORMATS

    if kind == "gguf":
        pytest.importorskip("gguf")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(EXPORT_FORMATS[kind]), "write", full)
    with pytest.raises(WhetError, match="the disk is full while exporting"):
        write_export(spec_of(adapted), kind, tmp_path / kind, PROBES)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_space_is_refused_before_writing(
    adapted: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFFolderFormat, "estimate_bytes", lambda self, spec: 2**60)
    with pytest.raises(WhetError, match="the disk is too full for the export"):
        write_export(spec_of(adapted), "merged", tmp_path / "merged", PROBES)
    assert list(tmp_path.iterdir()) == []


def test_fused_experts_are_saved_separately(tmp_path: Path) -> None:
    """transformers fuses the experts of a layer in memory, and has one tensor for each in files."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = Qwen3MoeConfig(
        vocab_size=load_model(TINY, torch.float32).config.vocab_size, hidden_size=32, intermediate_size=64,
        moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(settings).eval()
    write_export(spec_of(model, shard_size=30_000), "merged", tmp_path / "merged", PROBES)
    names = read_json(tmp_path / "merged/model.safetensors.index.json")["weight_map"]
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_weights_that_files_hold_as_one_tensor_are_joined(has_adapter: bool, tmp_path: Path) -> None:
    """HRM-Text's gate, q, k and v, and its gate and up."""
    save_tiny_model("hrm_text", tmp_path / "base")
    model: Any = load_model(ModelConfig(path=str(tmp_path / "base")), torch.float32)
    if has_adapter:
        model = add_adapter(model, AdapterConfig(rank=2), seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.01)
    write_export(spec_of(model), "merged", tmp_path / "merged", PROBES)  # compares every weight, too
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged")]
    assert {name: tensor.shape for name, tensor in files[0].items()} == {n: t.shape for n, t in files[1].items()}


def test_4_bit_layers_are_dequantized_with_and_without_an_adapter(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    from whet.model.lora.peft_adapters import unwrap_peft
    from whet.model.quantize import quantize_

    model = load_model(TINY, torch.float32).requires_grad_(False)
    quantize_(model, torch.device("cpu"))
    model = add_adapter(model, AdapterConfig(rank=4, targets=["q_proj"]), seed=0).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    certificate = write_export(spec_of(model), "merged", tmp_path / "merged", PROBES)
    assert certificate.quantize == "nf4"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded), logits(unwrap_peft(model)), rtol=1e-4, atol=1e-4)


def test_what_fails_in_16_bits_is_compared_in_fp32_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in bf16 exported in f32: weights are the same, but activations of the trained one round."""
    strict = dataclasses.replace(EXPORT_DTYPES["f32"], name="bf16")
    monkeypatch.setitem(EXPORT_DTYPES, "bf16", strict)  # as for a model whose activations round more than usual
    model = load_model(TINY, torch.bfloat16)
    before = dict(model.named_parameters())
    certificate = write_export(spec_of(model), "merged", tmp_path / "out", PROBES)
    assert certificate.max_logit_difference is not None
    assert certificate.max_logit_difference < 1e-5
    assert all(weight is before[name] for name, weight in model.named_parameters())

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trained_model, "_weights_in_fp32", out_of_memory)
    with pytest.raises(ExportMismatchError, match="logits differ"):
        write_export(spec_of(model), "merged", tmp_path / "other", PROBES)


def test_4_bit_layers_compute_in_fp32_for_the_comparison(random_model: Callable[..., Any]) -> None:
    pytest.importorskip("bitsandbytes")
    model = random_model("llama").to(torch.bfloat16).requires_grad_(False)
    names = quantized_layers(model)
    quantize_(model, torch.device("cpu"))
    exact = TrainedModel(model).logits(PROBES, in_fp32=True)
    rounded = TrainedModel(model).logits(PROBES)
    for name in names:
        model.set_submodule(name, dequantize_linear(model.get_submodule(name)))
    expected = TrainedModel(model.float()).logits(PROBES)
    assert (exact - expected).norm() < 0.5 * (
        rounded - expected
    ).norm()  # 4-bit weights become fp32 without bf16 between
