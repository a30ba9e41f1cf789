"""Reading a checkpoint: every file compared with its hash first, then straight into the model's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.checkpoint.manifest import DamagedError, damage_in, damaged, read_manifest
from whet.checkpoint.metadata import SafeReader
from whet.checkpoint.packed import NotReadError, read_into
from whet.checkpoint.tensors import materialise, optimizer_tensors, weights
from whet.core.errors import WhetError
from whet.core.patience import UnreadableError
from whet.core.ranks import Ranks
from whet.parallel.shard import give_back


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """Put a checkpoint's weights, and the optimizer's state if wanted, in place; gives its manifest.

    A DamagedError or an UnreadableError, the same on every rank, comes before anything was changed; a disk that begins
    to fail after that is an UnreadableError too.
    """
    parts = ["model"] if optimizer is None else ["model", "optimizer"]
    manifest = verify(path, parts, ranks)
    give_back(model)
    tensors = {"model": weights(model)}
    if optimizer is not None:
        materialise(optimizer)
        tensors["optimizer"] = optimizer_tensors(model, optimizer)
    for part in parts:
        SafeReader(path / part).read_metadata()  # here its errors come out as they are
        try:
            read_into(tensors[part], SafeReader(path / part), no_dist=ranks.world == 1)
        except NotReadError as error:
            raise WhetError(
                f"{path}: this checkpoint does not fit the model ({error}). Was the model changed "
                "since? Bring it back, or start a new run: run.dir=FOLDER"
            ) from error
    return manifest


def verify(path: Path, parts: list[str], ranks: Ranks) -> dict[str, Any]:
    """The manifest, if every file of these parts is what was written; each rank looks at some of them, all know."""
    manifest: dict[str, Any] = {}
    unreadable: list[str] = []
    try:
        manifest = read_manifest(path)
        missing = [part for part in parts if part not in manifest["parts"]]
        if missing:
            found = [f"{path}: it has no {missing[0]} any more (checkpoint.optimizer: newest)"]
        else:
            names = sorted(name for name in manifest["files"] if name.split("/")[0] in parts)
            found = damage_in(path, manifest["files"], names[ranks.rank :: ranks.world])
        reasons = [str(damaged(words)) for words in found]
    except UnreadableError as error:
        unreadable, reasons = [str(error)], []
    except WhetError as error:
        reasons = [str(error)]
    unreadable, reasons = ranks.gather(unreadable), ranks.gather(reasons)
    if unreadable:  # whether it is damaged is not known
        raise UnreadableError(unreadable[0])
    if reasons:
        raise DamagedError(reasons[0])
    return manifest
