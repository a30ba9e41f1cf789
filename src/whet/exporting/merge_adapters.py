"""Merge a base model and weighted LoRA adapters into one plain model (peft's `cat` and `linear`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from whet.core.errors import RunFailedError, WhetError, disk_error
from whet.core.files import atomic_dir, hash_file, read_json, require_disk_space, write_json
from whet.exporting.verification import compare_to_reference, compute_all_logits, hash_safetensors
from whet.model.lora.peft_adapters import cast_trained_modules_, embedding_rows, unwrap_peft

# One plain model of a base and adapters, each with a weight.
#
# `cat` adds Σ weight · scale · B·A, whatever the ranks are. `linear` averages the small matrices themselves, as peft does
# it: their products then mix, B of one with A of another, which is not the sum of what the adapters do.

CombinationType = Literal["cat", "linear"]
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_GENERATION_CONFIG = "generation_config.json"
_MAX_RELATIVE_ERROR = 1e-4
"""Part of an adapter's change that rounding may take while matrices are put together."""


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter and how much of it is wanted."""

    folder: Path
    weight: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        return dict(read_json(self.folder / _CONFIG))


def require_mergeable(parts: Sequence[WeightedAdapter]) -> None:
    """Refuse what is no adapter, and what cannot be weighed or added, before anything is loaded."""
    for part in parts:
        missing = [name for name in (_CONFIG, _WEIGHTS) if not (part.folder / name).is_file()]
        if missing:
            raise WhetError(
                f"--adapter {part.folder}: no {missing[0]} there, so it is not an adapter. Give a folder that peft "
                "wrote; of a run: whet export RUN --to adapter, then RUN/exports/adapter"
            )
        settings = part.settings
        if settings.get("peft_type") != "LORA":
            raise WhetError(
                f"--adapter {part.folder}: of the kind {settings.get('peft_type')}; only LoRA's can be merged"
            )
        whole = "DoRA" if settings.get("use_dora") else None
        whole = whole or ("trained modules" if settings.get("modules_to_save") else None)
        whole = whole or ("trained tokens" if settings.get("trainable_token_indices") else None)
        if whole and (len(parts) > 1 or part.weight != 1):
            raise WhetError(
                f"--adapter {part.folder}: it has {whole}, which can neither be added to another adapter nor be given "
                "a weight. Merge it alone, and train the other one over the result"
            )


def merge_adapters(
    base: nn.Module,
    parts: Sequence[WeightedAdapter],
    probes: Sequence[Sequence[int]],
    tokenizer: Any,
    how: CombinationType,
    folder: Path,
) -> dict[str, Any]:
    """Write the merged model to `folder`, loaded back and compared with the adapters at work on `probes`."""
    room = embedding_rows(base)
    if len(tokenizer) > room:
        base.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    model = _attach_adapters(base, parts)
    lost = _combine_adapters(model, parts, how)
    cast_trained_modules_(model)
    try:
        require_disk_space(folder, sum(weight.nbytes for weight in base.parameters()), "the merged model")
        with atomic_dir(folder) as temporary:
            wanted = compute_all_logits(unwrap_peft(model), probes)
            dtype = next(base.parameters()).dtype
            model.merge_and_unload().save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            _write_stop_tokens(temporary, parts)
            found = compare_to_reference(wanted, compute_all_logits(_load_back(temporary, dtype), probes), dtype)
            certificate = {
                "kind": "merged-adapters",
                "how": how,
                "adapters": [
                    {"folder": str(part.folder), "weight": part.weight, "hash": hash_file(part.folder / _WEIGHTS)}
                    for part in parts
                ],
                "part_lost": lost,
                **found,
                "files": hash_safetensors(temporary),
            }
            if not found["verified"]:
                raise RunFailedError(
                    f"{folder}: the merged model is not the base with its adapters: logits differ by "
                    f"{found['max_logit_difference']:.3g}. Nothing was written"
                )
            write_json(temporary / "certificate.json", certificate)
    except Exception as error:
        raise disk_error(error, "merging", folder) or error from None
    return certificate


def _write_stop_tokens(folder: Path, parts: Sequence[WeightedAdapter]) -> None:
    """What ends an answer: of the base, and what the adapters learned to end one with."""
    file = folder / _GENERATION_CONFIG
    settings = dict(read_json(file)) if file.exists() else {}
    brought = [
        read_json(part.folder / _GENERATION_CONFIG) for part in parts if (part.folder / _GENERATION_CONFIG).exists()
    ]
    ends = [each.get("eos_token_id") for each in (settings, *brought)]
    stops = {stop for end in ends if end is not None for stop in (end if isinstance(end, list) else [end])}
    if brought and stops:
        write_json(file, {**settings, "eos_token_id": sorted(stops)})


def _load_back(folder: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return loaded


def _attach_adapters(base: nn.Module, parts: Sequence[WeightedAdapter]) -> Any:
    """The base with every adapter in place, by the numbers 0, 1, …"""
    from peft import PeftModel

    model: Any = None
    for number, part in enumerate(parts):
        try:
            if model is None:
                model = PeftModel.from_pretrained(base, part.folder, adapter_name="0")
            else:
                model.load_adapter(part.folder, adapter_name=str(number))
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            first = next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), str(error))
            raise WhetError(
                f"--adapter {part.folder}: it does not fit the base ({first}). It was trained on "
                f"{part.settings.get('base_model_name_or_path')}"
            ) from None
    return model.eval()


def _combine_adapters(model: Any, parts: Sequence[WeightedAdapter], how: CombinationType) -> float:
    """Make one adapter of all. Gives the largest part of a layer's change that was lost: none by mathematics, with
    cat."""
    if len(parts) == 1 and parts[0].weight == 1:
        return 0.0
    names = [str(number) for number in range(len(parts))]
    try:
        model.add_weighted_adapter(names, [part.weight for part in parts], "all", combination_type=how)
    except ValueError as error:
        raise WhetError(f"--how {how}: peft cannot put these adapters together: {error}. Use --how cat") from None
    model.set_adapter("all")
    if how == "linear" and len(parts) > 1:
        return 0.0
    lost = 0.0
    layers: list[Any] = list(unwrap_peft(model).modules())
    for layer in layers:
        if hasattr(layer, "get_delta_weight") and "all" in getattr(layer, "lora_A", {}):
            known = [number for number, name in enumerate(names) if name in layer.lora_A]
            wanted = torch.stack([parts[i].weight * layer.get_delta_weight(names[i]).float() for i in known]).sum(dim=0)
            found = layer.get_delta_weight("all").float()
            lost = max(lost, ((found - wanted).norm() / wanted.norm().clamp_min(torch.finfo().tiny)).item())
    if lost > _MAX_RELATIVE_ERROR:
        raise RunFailedError(f"--how {how}: peft's sum of these adapters is off by {lost:.2%}. Please report it")
    return lost
