"""Export of the adapter alone, in PEFT's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.peft_private import renamed_targets
from whet.core.errors import WhetError, first_line
from whet.core.files import read_json, write_json
from whet.exporting.hf_folder import (
    add_quantization_note,
    copy_processor_files,
    to_gpu_if_it_fits,
    verify_tokenizer_and_stops,
    write_generation_config,
)
from whet.exporting.spec import ExportFindings, ExportSpec
from whet.exporting.trained_model import TrainedModel, compute_logits
from whet.exporting.weight_comparison import LoadedWeights, compare_weights
from whet.model.config import ModelConfig
from whet.model.experts.install import install_experts
from whet.model.load.pretrained import (
    dequantization_options,
    load_with_transformers,
    prepare_float64_,
    widen_weights_,
)
from whet.model.load.weight_files import weights_hash
from whet.model.lora.adapter_folder import BASE_HASH, load_adapter
from whet.model.lora.peft_adapters import embedding_rows, unwrap_peft
from whet.model.modules import is_multimodal
from whet.model.quantize import quantize_


class PeftAdapterFormat:
    """A folder for `PeftModel.from_pretrained`."""

    loaded_by = "peft"

    def require_supported(self, spec: ExportSpec) -> None:
        if not spec.model.has_adapter:
            raise WhetError("--to adapter: this run has no adapter, it trained the whole model. Use --to merged")

    def estimate_bytes(self, spec: ExportSpec) -> int:
        return 2**26 + sum(weight.nbytes for weight in spec.model.model.parameters() if weight.requires_grad)

    def write(self, spec: ExportSpec, folder: Path) -> None:
        # By default peft adds the whole embedding if it was resized. The new rows are trained, so the adapter has them.
        spec.model.model.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        _name_dense_layers_as_parameters(folder, spec.model.language_model.config)
        spec.generation.tokenizer.save_pretrained(folder)
        write_generation_config(spec.generation, folder)
        copy_processor_files(spec, folder)
        if spec.model.is_quantized:
            add_quantization_note(folder, "adapter", str(spec.model.weight_dtype).removeprefix("torch."))

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """Loads the whole base into memory, in the dtype of training: the adapter folder does not record it."""
        try:
            model = to_gpu_if_it_fits(_load_back(folder, spec.model, spec.trust_remote_code))
        except Exception as error:  # a damaged or forged file can raise almost anything
            findings.reasons.append(f"peft cannot load it over {_base_model_name(folder)}: {first_line(error)}")
            return None
        findings.details[BASE_HASH] = weights_hash(ModelConfig(path=_base_model_name(folder)))
        verify_tokenizer_and_stops(spec.generation, folder, None, probes, findings)
        compare_weights(spec.model, LoadedWeights(model), spec.dtype, findings)
        return compute_logits(model, probes, spec.compares_in_fp32)


def _name_dense_layers_as_parameters(folder: Path, model_config: Any) -> None:
    """For some models with experts peft takes names such as gate_proj for the stacked weights of experts, and would
    leave dense layers of that name without their adapters. It takes the names of parameters as they are."""
    renamed = renamed_targets(model_config.model_type)
    file = folder / "adapter_config.json"
    config = dict(read_json(file))
    modules = config.get("target_modules") or []
    moved = sorted(name for name in modules if name.rpartition(".")[2] in renamed) if isinstance(modules, list) else []
    if not moved:
        return
    config["target_modules"] = sorted(set(modules) - set(moved))
    config["target_parameters"] = [*(config.get("target_parameters") or []), *(f"{name}.weight" for name in moved)]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        config[key] = patterns | {rf"({pattern})\.weight": value for pattern, value in patterns.items()}
    write_json(file, config)


def _base_model_name(folder: Path) -> str:
    from peft import PeftConfig

    try:
        return str(PeftConfig.from_pretrained(folder).base_model_name_or_path)
    except (OSError, ValueError, KeyError, TypeError):
        return "an unnamed base model"


def _load_back(folder: Path, trained: TrainedModel, trust_remote_code: bool) -> nn.Module:
    from peft import PeftConfig
    from transformers import AutoConfig, AutoTokenizer

    own: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options = {"dtype": trained.weight_dtype, **own}
    place = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not trained.is_quantized and not is_multimodal(trained.language_model):  # peft has no auto class for those
        from peft import AutoPeftModelForCausalLM

        options |= dequantization_options(AutoConfig.from_pretrained(place, **own))
        model = unwrap_peft(AutoPeftModelForCausalLM.from_pretrained(folder, **options))
        return prepare_float64_(widen_weights_(model, trained.weight_dtype), trained.weight_dtype)
    base = load_with_transformers(place, dequantize=True, **options)
    vocabulary = len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    if vocabulary > embedding_rows(base):  # for added tokens; the adapter has their rows
        base.resize_token_embeddings(vocabulary)
    if trained.is_quantized:
        quantize_(base.requires_grad_(False), torch.device("cpu"))
    model = unwrap_peft(load_adapter(base, folder))
    if trained.is_quantized:
        install_experts(model)  # peft cannot add its product to 4-bit experts
    return prepare_float64_(model, trained.weight_dtype)
