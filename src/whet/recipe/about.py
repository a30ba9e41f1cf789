"""What a checkpoint says of the run that it belongs to."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from whet.config import Config
from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.model.identity import weights_hash

_PACKAGES = ("whet", "torch", "transformers", "peft", "safetensors", "numpy")


def about(config: Config) -> dict[str, Any]:
    """The configuration, the versions at work and, of an adapter, the hash of the weights that it was trained on."""
    base = weights_hash(config.model) if config.adapter is not None else None
    return {"config": config.settled(), "versions": _versions(), "base": base}


def require_base(config: Config, manifest: dict[str, Any], ranks: Ranks) -> None:
    """Refuse an adapter whose base has changed since: it would load and be wrong. Rank 0 looks, all know."""
    then = manifest.get("base")
    now = weights_hash(config.model) if then is not None and ranks.is_first else None
    if any(ranks.gather([now is not None and now != then])):
        raise WhetError(
            f"model.path: {config.model.path}: its weights are not those that this run's adapter was trained on (the "
            "files were changed since). Bring the old files back, or start a new run: run.dir=FOLDER"
        )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
