"""Export of the adapter alone, in PEFT's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from whet.core.errors import WhetError, first_line
from whet.exporting.hf_folder import (
    add_quantization_note,
    to_gpu_if_it_fits,
    verify_tokenizer_and_stops,
    write_generation_config,
)
from whet.exporting.spec import ExportFindings, ExportSpec
from whet.exporting.trained_model import TrainedModel, compute_logits
from whet.model.load.pretrained import set_experts_for_dtype
from whet.model.lora.peft_adapters import embedding_rows, unwrap_peft
from whet.model.quantize import quantize_


class PeftAdapterFormat:
    """What `PeftModel.from_pretrained` loads over its base."""

    loaded_by = "peft"

    def size(self, order: ExportSpec) -> int:
        if not order.trained.has_adapter:
            raise WhetError("export: this run trained the whole model, so there is no adapter; use --to merged")
        return 2**26 + sum(weight.nbytes for weight in order.trained.model.parameters() if weight.requires_grad)

    def write(self, order: ExportSpec, folder: Path) -> None:
        # peft would add the whole embedding where tokens were added; the rows that are new are trained, and there
        order.trained.model.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        order.speech.tokenizer.save_pretrained(folder)
        write_generation_config(order.speech, folder)
        if order.trained.is_packed:
            add_quantization_note(folder, "adapter", str(order.trained.kept_in).removeprefix("torch."))

    def look(
        self, order: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """The whole base is in memory for it. It is loaded in the type that was trained in: an adapter does not carry
        that."""
        try:
            model = _load_back(folder, order.trained, order.trust_remote_code)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            first = first_line(error)
            findings.blame(f"peft cannot load it over {_base_model_name(folder)}: {first}")
            return None
        verify_tokenizer_and_stops(order.speech, folder, None, probes, findings)
        return compute_logits(to_gpu_if_it_fits(model), probes)


def _base_model_name(folder: Path) -> str:
    from peft import PeftConfig

    try:
        return str(PeftConfig.from_pretrained(folder).base_model_name_or_path)
    except (OSError, ValueError, KeyError, TypeError):
        return "a base that it does not name"


def _load_back(folder: Path, trained: TrainedModel, trust_remote_code: bool) -> nn.Module:
    how: dict[str, Any] = {"dtype": trained.kept_in, "trust_remote_code": trust_remote_code}
    if trained.is_packed:
        return _load_over_nf4_base(folder, how)
    from peft import AutoPeftModelForCausalLM

    return set_experts_for_dtype(unwrap_peft(AutoPeftModelForCausalLM.from_pretrained(folder, **how)), trained.kept_in)


def _load_over_nf4_base(folder: Path, how: dict[str, Any]) -> nn.Module:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path, **how)
    known = len(AutoTokenizer.from_pretrained(folder))
    if known > embedding_rows(base):  # tokens were added; the adapter has their rows
        base.resize_token_embeddings(known)
    quantize_(base.requires_grad_(False), torch.device("cpu"))
    return unwrap_peft(PeftModel.from_pretrained(base, folder))
