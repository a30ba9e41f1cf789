"""The effect certificate of exports: what moved, what rounding lost, and merges that miss a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tiny_architectures import tiny_config
from whet.exporting.dtypes import EXPORT_DTYPES
from whet.exporting.exporter import write_export
from whet.exporting.spec import ExportFindings, ExportMismatchError, ExportSpec, GenerationSettings
from whet.exporting.trained_model import TrainedModel
from whet.exporting.weight_comparison import SafetensorsWeights, compare_weights
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.lora.peft_adapters import add_adapter
from whet.model.lora.trained_weights import trained_weights
from whet.model.weight_effect import effect_summary

TINY = ModelConfig(path="builtin:tiny")
PROBES = [list(range(3, 40))]
DOWN = "model.layers.1.mlp.down_proj.weight"


def adapted_tiny(std: float = 0.01, **settings: Any) -> Any:
    """builtin:tiny with an adapter that is not zero."""
    return _filled(add_adapter(load_model(TINY, torch.float32), AdapterConfig(rank=4, **settings), seed=0), std)


def adapted_experts(kind: str, experts: int, std: float = 0.05) -> Any:
    config = tiny_config(kind)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hasattr(config, name):
            setattr(config, name, experts)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base = [name for name, weight in model.named_parameters() if weight.ndim == 3]
    targets = AdapterConfig(rank=2)
    if kind == "gpt_oss":  # peft's all-linear does not see them
        from peft import LoraConfig, get_peft_model

        return _filled(get_peft_model(model, LoraConfig(r=2, target_parameters=base)), std)
    return _filled(add_adapter(model, targets, seed=0), std)


def _filled(model: nn.Module, std: float) -> nn.Module:
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=std)
    return model.eval()


def spec_of(model: nn.Module, dtype: str = "f32") -> ExportSpec:
    settings = GenerationSettings(load_tokenizer(TINY), [2, 5], 2, {})
    return ExportSpec(TrainedModel(model), settings, EXPORT_DTYPES[dtype], 7)


def compared(model: nn.Module, folder: Path, dtype: str = "f32") -> ExportFindings:
    trained, findings = TrainedModel(model), ExportFindings()
    exported = SafetensorsWeights(folder, trained)
    compare_weights(trained, exported, EXPORT_DTYPES[dtype], findings)
    return findings


def merged_by_peft(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.merge_and_unload().named_parameters()}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_certificate_lists_what_training_changed(tmp_path: Path, dtype: str) -> None:
    model = adapted_tiny(std=1e-3)
    certificate = write_export(spec_of(model, dtype), "merged", tmp_path / "merged", PROBES)
    effect = certificate.effect
    before = {name: w.detach().clone() for name, w in load_model(TINY, torch.float32).named_parameters()}
    after = merged_by_peft(model)
    adapted = [name for name in before if "proj" in name]
    assert [each["module"] for each in effect["modules"]] == adapted
    assert (effect["weights"], effect["moved"], effect["exported"]) == (len(adapted),) * 3
    to = EXPORT_DTYPES[dtype].torch_dtype
    for each in effect["modules"]:
        old, new = before[each["module"]], after[each["module"]]
        assert each["shape"] == list(old.shape)
        assert each["change"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-3)
        lost = ((new != old) & (new.to(to) == old.to(to))).sum().item()
        assert each["lost"] == pytest.approx(lost, abs=0.01 * old.numel())
    assert (effect["lost_to_rounding"] > 0.03) is (dtype == "bf16")


@pytest.mark.parametrize("settings", [{"method": "dora"}, {"method": "rslora"}, {"also_train": ["norm"]},
                                      {"targets": ["embed_tokens", "q_proj"]}])  # fmt: skip
@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_other_adapters_move_and_are_in_the_export(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    model = adapted_tiny(**settings)
    for name, weight in model.named_parameters():
        if "lora_embedding_A" in name or "modules_to_save" in name:
            nn.init.normal_(weight, std=0.1)
    effect = write_export(spec_of(model), kind, tmp_path / kind, PROBES).effect
    assert effect["moved"] == effect["exported"] == effect["weights"] > 0
    names = " ".join(each["module"] for each in effect["modules"])
    assert ("embed_tokens" in names, "model.norm.weight" in names) == ("targets" in settings, "also_train" in settings)


def test_a_merge_that_misses_one_small_update_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the logits of the probes do not show it."""
    model = adapted_tiny(std=1e-6)
    layer = model.get_base_model().get_submodule(DOWN.removesuffix(".weight"))
    monkeypatch.setattr(layer, "merge", lambda *_, **__: None)
    with pytest.raises(ExportMismatchError, match=f"weights that were trained equal those of the base: {DOWN}"):
        write_export(spec_of(model), "merged", tmp_path / "merged", PROBES)
    assert not (tmp_path / "merged").exists()


def test_a_merge_with_a_wrong_scale_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted_tiny(std=1e-5)
    layer = model.get_base_model().get_submodule(DOWN.removesuffix(".weight"))
    own = type(layer).get_delta_weight
    monkeypatch.setattr(type(layer), "get_delta_weight", lambda self, name: own(self, name) * 0.5)
    with pytest.raises(ExportMismatchError, match=r"weights are not those that were trained: model\.layers\.0\.self"):
        write_export(spec_of(model), "merged", tmp_path / "merged", PROBES)


def test_an_update_that_rounding_removes_is_counted_not_refused(tmp_path: Path) -> None:
    effect = write_export(spec_of(adapted_tiny(std=1e-9), "bf16"), "merged", tmp_path / "merged", PROBES).effect
    assert effect["lost_to_rounding"] > 0.99
    assert effect["moved"] == effect["exported"] == effect["weights"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])  # separate experts in the files, and stacked ones
def test_a_merge_of_no_experts_is_refused(tmp_path: Path, kind: str) -> None:
    model = adapted_experts(kind, 60)
    trained = TrainedModel(model)
    names = [each.name for each in trained_weights(trained.language_model) if each.experts]
    assert len(names) == 4
    base = AutoModelForCausalLM.from_config(trained.language_model.config, dtype=torch.float32)
    base.load_state_dict(_base_weights(trained.language_model), strict=True)
    base.save_pretrained(tmp_path)
    findings = compared(model, tmp_path)
    [reason] = findings.reasons
    assert reason.startswith("weights that were trained equal those of the base: ")
    assert "(60 of 60 experts)" in reason or kind == "qwen3_moe"  # of all weights, the first ones are named
    assert {each.module: each.exported for each in findings.effect if each.experts} == dict.fromkeys(names, False)


def test_experts_without_a_token_are_listed_and_one_that_is_not_merged_is_refused(tmp_path: Path) -> None:
    model = adapted_experts("qwen3_moe", 5)
    name = "model.layers.1.mlp.experts.down_proj"
    for path, weight in model.named_parameters():
        if "layers.1.mlp.experts.lora_B" in path:
            weight.data.view(weight.shape[0], -1, 5)[..., 3] = 0  # this expert got no token
    unmerged = dict(TrainedModel(model).language_model.named_parameters())
    old = next(w.detach().clone() for n, w in unmerged.items() if n.replace(".base_layer", "") == name)
    trained = TrainedModel(model)
    weights = trained_weights(trained.language_model)
    merged = {each.name: each.after(each.before(trained.value), trained.value).clone() for each in weights}
    plain = AutoModelForCausalLM.from_config(trained.language_model.config, dtype=torch.float32)
    plain.load_state_dict(_base_weights(trained.language_model) | merged)
    plain.save_pretrained(tmp_path)
    findings = compared(model, tmp_path)
    assert findings.reasons == []
    [experts] = [each for each in findings.effect if each.module == name]
    assert (experts.experts, experts.untouched_experts, experts.experts_touched) == (5, [3], 0.8)
    assert effect_summary(findings.effect)["untouched_experts"] == 1

    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    saved["model.layers.1.mlp.experts.2.down_proj.weight"] = old[2].clone()
    save_file(saved, file, {"format": "pt"})
    findings = compared(model, tmp_path)
    assert findings.reasons == [f"weights that were trained equal those of the base: {name} (1 of 5 experts)"]


def test_a_weight_that_the_export_does_not_have(tmp_path: Path) -> None:
    model = adapted_tiny()
    write_export(spec_of(model), "merged", tmp_path / "merged", PROBES)
    file = tmp_path / "merged/model.safetensors"
    saved = load_file(file)
    del saved[DOWN]
    save_file(saved, file, {"format": "pt"})
    assert compared(model, tmp_path / "merged").reasons == [f"weights are not those that were trained: {DOWN}"]


def _base_weights(language_model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace(".base_layer", ""): weight.detach().clone()
        for name, weight in language_model.state_dict().items()
        if "lora_" not in name
    }
