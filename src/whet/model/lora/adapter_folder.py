"""Adapter folders, as peft and `whet export --to adapter` write them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from whet.compat.peft_private import without_renamed_targets
from whet.core.checksums import read_hashed_json
from whet.core.console import warn
from whet.core.errors import WhetError, first_line, refused_pickle
from whet.core.files import user_path
from whet.model.config import ModelConfig
from whet.model.experts.install import install_experts
from whet.model.load.weight_files import require_certified_files, weights_hash
from whet.registry.references import local_path

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_HASH = "base"
"""The key of a certificate with the hash of the weights that the adapter was trained on."""


def is_adapter_folder(folder: Path) -> bool:
    return (folder / _CONFIG_FILE).exists() and not (folder / "config.json").exists()


def base_model_of(folder: Path) -> str:
    """The base model that an adapter's configuration names."""
    base = _read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise WhetError(f"{folder / _CONFIG_FILE}: base_model_name_or_path is missing. {_remedy(folder)}")
    is_path = base.startswith(("/", "~", ".")) or base.count("/") != 1
    if is_path and not user_path(base).is_dir() and ":" not in base:
        raise WhetError(f"{folder}: its base model {base} ({_CONFIG_FILE}) does not exist here. {_remedy(folder)}")
    return base


def attach_adapters(model: nn.Module, base: str, adapters: dict[str, Path]) -> Any:
    """A PeftModel with the adapters loaded, by name."""
    adapted: Any = None
    for number, (name, folder) in enumerate(adapters.items()):
        if not (folder / _CONFIG_FILE).exists():
            raise WhetError(f"--adapter: {name}={folder}: not an adapter folder: it has no {_CONFIG_FILE}")
        require_certified_files(folder)
        named = _read_adapter_config(folder).get("base_model_name_or_path")
        if named and Path(str(named)).name != Path(base).name and ":" not in base:
            warn(f"{folder}: trained on {named}, not {base}; on another model its output is unpredictable")
        elif is_trained_on(folder, base) is False:
            warn(
                f"{folder}: the weights of {base} are not those that it was trained on (the files were changed since), "
                "so its output is unpredictable. Bring the old files back"
            )
        try:
            if number == 0:
                adapted = load_adapter(model, folder, name)
            else:
                adapted.load_adapter(str(folder), adapter_name=name)
        except Exception as error:  # a damaged or forged file can raise almost anything
            if refused := refused_pickle(error):
                raise WhetError(f"{folder}: adapter_model.bin {refused}. Use an adapter with {_WEIGHTS_FILE}") from None
            first = first_line(error)
            raise WhetError(
                f"{folder}: this adapter does not fit {base} ({first[:200]}). Its base is {named}: give that as MODEL"
            ) from None
    install_experts(adapted.get_base_model())
    return adapted.eval()


def load_adapter(model: nn.Module, folder: Path, name: str = "default") -> Any:
    """`PeftModel.from_pretrained`, with adapters of linear layers that the folder names by their weights (see
    `exporting/peft_adapter.py`) on the layers themselves: peft cannot adapt a 4-bit weight as a parameter."""
    from peft import PeftConfig, PeftModel

    config: Any = PeftConfig.from_pretrained(str(folder))
    linear = [module for module, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    dense = {
        parameter
        for parameter in getattr(config, "target_parameters", None) or []
        if any(f".{module}.weight".endswith(f".{parameter}") for module in linear)
    }
    if not dense:
        return PeftModel.from_pretrained(model, str(folder), adapter_name=name)
    config.target_modules = {*config.target_modules, *(parameter.removesuffix(".weight") for parameter in dense)}
    config.target_parameters = [each for each in config.target_parameters if each not in dense]
    with without_renamed_targets():
        return PeftModel.from_pretrained(model, str(folder), adapter_name=name, config=config)


def has_embedding_rows(folder: Path, tokens: int) -> bool:
    """Whether an adapter contains the embedding of the last of `tokens` tokens, as a row or as a full matrix."""
    settings = _read_adapter_config(folder) if (folder / _CONFIG_FILE).exists() else {}
    token_ids = settings.get("trainable_token_indices") or []
    if any(tokens - 1 in ids for ids in (token_ids.values() if isinstance(token_ids, dict) else [token_ids])):
        return True
    suffixes = tuple(f".{name}.weight" for name in settings.get("modules_to_save") or ())
    if not suffixes or not (folder / _WEIGHTS_FILE).is_file():
        return False
    try:
        with safe_open(folder / _WEIGHTS_FILE, framework="pt") as file:
            return any(file.get_slice(key).get_shape()[0] == tokens for key in file.keys() if key.endswith(suffixes))  # noqa: SIM118
    except SafetensorError:
        return False  # peft reports the error when it loads the file


def has_4bit_base(folder: Path) -> bool:
    """Whether the adapter was trained on a base quantized to 4 bits, according to its export certificate."""
    certificate = folder / "certificate.json"
    return certificate.is_file() and bool(read_hashed_json(certificate).get("quantize"))


def is_trained_on(folder: Path, base: str) -> bool | None:
    """Whether an adapter was trained on these weights, according to its export certificate; None if it does not say, or
    the weights are not on this machine."""
    certificate = folder / "certificate.json"
    then = read_hashed_json(certificate).get(BASE_HASH) if certificate.is_file() else None
    now = None
    if then is not None:
        with contextlib.suppress(WhetError, OSError, ValueError):  # the hub cannot be reached
            now = weights_hash(ModelConfig(path=base))
    return None if then is None or now is None else now == then


def parse_adapter_options(texts: list[str]) -> dict[str, Path]:
    """--adapter NAME=DIR options as {name: folder}."""
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not name or not folder:
            raise WhetError(f"--adapter: {text}: expected NAME=DIR")
        if name in found or name in ("none", "base") or "." in name:
            raise WhetError(
                f"--adapter: {name}: invalid name. Names must be unique, without a dot, and not 'none' or 'base'"
            )
        found[name] = local_path(folder)
    return found


def _read_adapter_config(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / _CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise WhetError(f"{folder / _CONFIG_FILE}: cannot be read ({error})") from None
    return settings if isinstance(settings, dict) else {}


def _remedy(folder: Path) -> str:
    return f"Give the model that it was trained on: whet chat MODEL --adapter mine={folder}"
