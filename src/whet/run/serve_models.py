"""Load what `whet serve` is given: one model, or several adapters of one base."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.compat.peft_private import mix_adapters
from whet.core.errors import WhetError
from whet.inference.inference_model import InferenceModel
from whet.inference.online_engine import NO_ADAPTERS, Adapters
from whet.model.lora.adapter_folder import base_model_of, is_adapter_folder
from whet.registry.references import local_path, pin_version
from whet.run.load_models import (
    NO_ADAPTER,
    LoadMode,
    find_run,
    is_same_model,
    load_adapter_models,
    load_inference_model,
)
from whet.run.model_reference import exported_adapter
from whet.run.resume import read_run_config


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Models by the name that requests use, the adapter of each, and how the engine chooses adapters."""

    models: dict[str, tuple[InferenceModel, str | None]]
    adapters: Adapters


def load_models_to_serve(references: Sequence[str], load: LoadMode = "auto") -> LoadedModels:
    """One model of any kind; or adapters (folders, or runs that trained one) of one base, which is loaded once. The
    base itself is served if it is the first of them."""
    names = model_names(references)
    references = [pin_version(reference) for reference in references]
    if len(references) == 1:
        model = load_inference_model(references[0], load)
        is_plain = model.context is contextlib.nullcontext
        adapters = NO_ADAPTERS if is_plain else Adapters(lambda _: model.context(), mixed=False)
        return LoadedModels({names[0]: (model, None)}, adapters)
    folders = [_adapter_folder(reference) for reference in references]
    is_base_served = folders[0] is None
    base = references[0] if folders[0] is None else base_model_of(folders[0])
    for reference, folder in zip(references[is_base_served:], folders[is_base_served:], strict=True):
        if folder is None:
            raise WhetError(
                f"{reference}: not an adapter. Several models share a server only as adapters of one base; start "
                f"another one for this: whet serve {reference} --port PORT"
            )
        if not is_same_model(base_model_of(folder), base):
            raise WhetError(
                f"{reference}: an adapter of {base_model_of(folder)}, not of {base}. Start another server for it: whet "
                f"serve {reference} --port PORT"
            )
    numbered = {f"adapter{number}": folder for number, folder in enumerate(folders) if folder is not None}
    loaded = load_adapter_models(base, numbered, load)
    keys = ([NO_ADAPTER] if is_base_served else []) + list(numbered)
    models = {name: (loaded[key], None if key == NO_ADAPTER else key) for name, key in zip(names, keys, strict=True)}
    mix = mix_adapters(loaded[NO_ADAPTER].model)
    if mix is not None:
        return LoadedModels(models, Adapters(mix, mixed=True))

    def use(chosen: Sequence[str | None]) -> AbstractContextManager[Any]:
        return loaded[chosen[0] or NO_ADAPTER].context()

    return LoadedModels(models, Adapters(use, mixed=False))


def model_names(references: Sequence[str]) -> list[str]:
    """The names for requests: of a path its last part, where that is unique; else the reference itself."""
    short = [_last_part(reference) for reference in references]
    names = [part if short.count(part) == 1 else reference for part, reference in zip(short, references, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise WhetError(f"{twice}: given twice; give each model once")
    return names


def _last_part(reference: str) -> str:
    path = Path(reference)
    is_path = find_run(reference) is not None or local_path(reference).exists()
    return path.name or path.resolve().name if is_path and ":" not in reference else reference


def _adapter_folder(reference: str) -> Path | None:
    """The folder of an adapter, exported from its run if need be; None for a model that is none."""
    if run := find_run(reference):
        if read_run_config(run[0]).adapter is None:
            return None
        return exported_adapter(*run)
    folder = local_path(reference)
    return folder if is_adapter_folder(folder) else None
