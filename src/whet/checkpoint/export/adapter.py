"""The adapter alone, as peft writes and reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from whet.checkpoint.card import note_quantized
from whet.checkpoint.export.certificate import Findings
from whet.checkpoint.export.merged import look_at_speech, placed, write_generation
from whet.checkpoint.export.order import Order
from whet.checkpoint.export.trained import Trained, logits_of
from whet.core.errors import WhetError
from whet.model.load import with_experts_in
from whet.model.lora import language_model, vocabulary_of
from whet.model.quantize import quantize_


class Adapter:
    """What `PeftModel.from_pretrained` loads over its base."""

    loaded_by = "peft"

    def size(self, order: Order) -> int:
        if not order.trained.has_adapter:
            raise WhetError("export: this run trained the whole model, so there is no adapter; use --to merged")
        return 2**26 + sum(weight.nbytes for weight in order.trained.model.parameters() if weight.requires_grad)

    def write(self, order: Order, folder: Path) -> None:
        # peft would add the whole embedding where tokens were added; the rows that are new are trained, and there
        order.trained.model.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        order.speech.tokenizer.save_pretrained(folder)
        write_generation(order.speech, folder)
        if order.trained.is_packed:
            note_quantized(folder, "adapter", str(order.trained.kept_in).removeprefix("torch."))

    def look(self, order: Order, folder: Path, probes: Sequence[Sequence[int]], findings: Findings) -> Tensor | None:
        """The whole base is in memory for it. It is loaded in the type that was trained in: an adapter does not carry
        that."""
        try:
            model = _load(folder, order.trained, order.trust_remote_code)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            first = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
            findings.blame(f"peft cannot load it over {_base_of(folder)}: {first}")
            return None
        look_at_speech(order.speech, folder, None, probes, findings)
        return logits_of(placed(model), probes)


def _base_of(folder: Path) -> str:
    from peft import PeftConfig

    try:
        return str(PeftConfig.from_pretrained(folder).base_model_name_or_path)
    except (OSError, ValueError, KeyError, TypeError):
        return "a base that it does not name"


def _load(folder: Path, trained: Trained, trust_remote_code: bool) -> nn.Module:
    how: dict[str, Any] = {"dtype": trained.kept_in, "trust_remote_code": trust_remote_code}
    if trained.is_packed:
        return _adapted_in_4_bits(folder, how)
    from peft import AutoPeftModelForCausalLM

    return with_experts_in(language_model(AutoPeftModelForCausalLM.from_pretrained(folder, **how)), trained.kept_in)


def _adapted_in_4_bits(folder: Path, how: dict[str, Any]) -> nn.Module:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path, **how)
    known = len(AutoTokenizer.from_pretrained(folder))
    if known > vocabulary_of(base):  # tokens were added; the adapter has their rows
        base.resize_token_embeddings(known)
    quantize_(base.requires_grad_(False), torch.device("cpu"))
    return language_model(PeftModel.from_pretrained(base, folder))
