"""Export: a folder that others can load, loaded back and compared before it is called done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whet.checkpoint.card import note_quantized
from whet.core.errors import RunFailedError, WhetError, disk_error
from whet.core.files import atomic_dir, hash_file, need_space, write_json
from whet.model.attention import plain
from whet.model.load import with_experts_in
from whet.model.lora import in_one_type_, language_model, merge, vocabulary_of
from whet.model.quantize import is_quantized, plain_bytes, quantize_

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of a logit, relative to the largest logit, that rounding in a merge explains."""
_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was compared between the trained model and the exported folder."""

    kind: str
    step: int
    verified: bool
    conversations: int
    tokens: int
    max_logit_difference: float
    same_next_token: float
    files: dict[str, str]
    quantize: str | None = None
    """What the base was kept in while training: its numbers are those that were compared, not the original's."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    stops: Sequence[int],
    probes: Sequence[Sequence[int]],
    kind: str,
    folder: Path,
    step: int,
    trust_remote_code: bool = False,
    spend: bool = False,
) -> Certificate:
    """Write `model` as `kind` (merged or adapter) to `folder`. Merging changes `model`: it is the last thing done.

    `probes` are conversations as ids; the exported model must give the logits of the trained one on them. `stops` end
    an answer; they go into the generation settings, so that whoever loads the folder gets a model that stops. `spend`
    frees the weights before the folder is loaded back, so that only one model is ever in memory.
    """
    if kind == "adapter" and not hasattr(model, "peft_config"):
        raise WhetError("export: this run trained the whole model, so there is no adapter; use --to merged")
    model.eval()
    in_one_type_(model)
    language_model(model).generation_config.eos_token_id = list(stops)  # type: ignore[union-attr]
    wanted = _logits(language_model(model), probes)
    dtype = language_model(model).get_input_embeddings().weight.dtype  # type: ignore[operator]
    size = plain_bytes(model)
    packed = any(map(is_quantized, model.modules()))
    try:
        need_space(folder, size if kind == "merged" else 2**26, "the export")
        with atomic_dir(folder) as temporary:
            if kind == "merged":
                merge(model).save_pretrained(temporary)  # type: ignore[operator]
            else:  # peft would add the whole embedding where tokens were; the rows that are new are trained, and there
                model.save_pretrained(temporary, save_embedding_layers=False)  # type: ignore[operator]
            tokenizer.save_pretrained(temporary)
            if packed:
                note_quantized(temporary, kind, str(dtype).removeprefix("torch."))
            if spend:
                _free(model)
            loaded = _load_back(temporary, kind, dtype, trust_remote_code, packed)
            certificate = _certify(temporary, _placed(loaded, wanted.device), wanted, probes, kind, step, packed)
            write_json(temporary / "certificate.json", certificate.as_dict())
            if not certificate.verified:
                raise RunFailedError(
                    f"{folder}: the exported model is not the trained one: logits differ by "
                    f"{certificate.max_logit_difference:.3g}, the next token agrees in "
                    f"{certificate.same_next_token:.1%}. Nothing was exported; the checkpoints are untouched"
                )
    except Exception as error:
        raise disk_error(error, "exporting", folder) or error from None
    return certificate


def _free(model: nn.Module) -> None:
    """Whoever holds the model holds no memory by it any more."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _certify(
    folder: Path, loaded: nn.Module, wanted: Tensor, probes: Sequence[Sequence[int]], kind: str, step: int, packed: bool
) -> Certificate:
    found = _logits(loaded, probes).to(wanted.device)
    difference = (found - wanted).abs().max().item()
    agree = (found.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean().item()
    dtype = next(loaded.parameters()).dtype
    allowed = _TOLERANCE.get(dtype, 0.1) * max(1.0, wanted.abs().max().item())
    files = {file.name: hash_file(file) for file in sorted(folder.glob("*.safetensors"))}
    return Certificate(
        kind, step, difference <= allowed and agree > 0.95, len(probes), len(wanted), difference, agree, files,
        "nf4" if packed else None,
    )  # fmt: skip


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """On the device if there is room for it; a model that was trained in 4 bits may have none there in 16."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the merge gave back
        free, _ = torch.cuda.mem_get_info(device)
        if sum(parameter.nbytes for parameter in model.parameters()) > 0.8 * free:
            return model
    return model.to(device)


def _load_back(folder: Path, kind: str, dtype: torch.dtype, trust_remote_code: bool, packed: bool) -> nn.Module:
    """As any user of the folder would load it, in the type that was trained in: an adapter does not carry that."""
    how: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if kind == "adapter" and packed:
        return _adapted_in_4_bits(folder, how)
    if kind == "adapter":
        from peft import AutoPeftModelForCausalLM

        return with_experts_in(language_model(AutoPeftModelForCausalLM.from_pretrained(folder, **how)), dtype)
    from transformers import AutoModelForCausalLM

    return with_experts_in(AutoModelForCausalLM.from_pretrained(folder, **how), dtype)


def _adapted_in_4_bits(folder: Path, how: dict[str, Any]) -> nn.Module:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path, **how)
    known = len(AutoTokenizer.from_pretrained(folder))
    if known > vocabulary_of(base):  # tokens were added; the adapter has their rows
        base.resize_token_embeddings(known)
    quantize_(base.requires_grad_(False), torch.device("cpu"))
    return language_model(PeftModel.from_pretrained(base, folder))


@torch.inference_mode()
def _logits(model: nn.Module, probes: Sequence[Sequence[int]]) -> Tensor:
    """Logits at the last positions of each probe, one conversation at a time, with transformers' own attention."""
    model.eval()
    device = next(model.parameters()).device
    each = max(1, _POSITIONS // max(1, len(probes)))
    with plain(model):
        rows = [model(input_ids=torch.tensor([list(ids)], device=device)).logits[0, -each:].float() for ids in probes]
    return torch.cat(rows)
