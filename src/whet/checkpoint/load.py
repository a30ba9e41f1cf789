"""Load a checkpoint: verify every hash, then read into the model's tensors, all at once or one weight at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from whet.checkpoint.dcp_storage import CheckpointReadError, SafeStorageReader, load_tensors
from whet.checkpoint.manifest import DamagedCheckpointError, damaged_error, find_damage, read_manifest
from whet.checkpoint.state_dict import init_optimizer_state, model_tensors, optimizer_tensors
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.core.retry import UnreadableError
from whet.parallel.fsdp import reshard

# Reading a checkpoint: every file compared with its hash first, then straight into the model's tensors.


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
) -> dict[str, Any]:
    """Put a checkpoint's weights, and the optimizer's state if wanted, in place; gives its manifest.

    A DamagedError or an UnreadableError, the same on every rank, comes before anything was changed; a disk that begins
    to fail after that is an UnreadableError too.
    """
    parts = ["model"] if optimizer is None else ["model", "optimizer"]
    manifest = verify_checkpoint(path, parts, ranks)
    reshard(model)
    tensors = {"model": model_tensors(model)}
    if optimizer is not None:
        init_optimizer_state(optimizer)
        tensors["optimizer"] = optimizer_tensors(model, optimizer)
    for part in parts:
        SafeStorageReader(path / part).read_metadata()  # here its errors come out as they are
        try:
            load_tensors(tensors[part], SafeStorageReader(path / part), no_dist=ranks.world_size == 1)
        except CheckpointReadError as error:
            raise WhetError(
                f"{path}: this checkpoint does not fit the model ({error}). Was the model changed "
                "since? Bring it back, or start a new run: run.dir=FOLDER"
            ) from error
    return manifest


def verify_checkpoint(path: Path, parts: list[str], ranks: Ranks) -> dict[str, Any]:
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
            found = find_damage(path, manifest["files"], names[ranks.rank :: ranks.world_size])
        reasons = [str(damaged_error(words)) for words in found]
    except UnreadableError as error:
        unreadable, reasons = [str(error)], []
    except WhetError as error:
        reasons = [str(error)]
    unreadable, reasons = ranks.all_gather(unreadable), ranks.all_gather(reasons)
    if unreadable:  # whether it is damaged is not known
        raise UnreadableError(unreadable[0])
    if reasons:
        raise DamagedCheckpointError(reasons[0])
    return manifest


# One weight at a time out of a checkpoint, whatever number of processes wrote it.

_MODEL_PREFIX = "model.language_model."


class CheckpointWeights:
    """The trained weights in a checkpoint's `model` folder, by the names that the language model has for them."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        found = SafeStorageReader(checkpoint / "model").read_metadata().state_dict_metadata
        self._shapes = {
            key.removeprefix(_MODEL_PREFIX): kept.size
            for key, kept in found.items()
            if isinstance(kept, TensorStorageMetadata)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def require_fit(self, wanted: dict[str, Tensor]) -> None:
        """Refuse a checkpoint of another model before anything is written."""
        for name, weight in wanted.items():
            if name not in self._shapes or self._shapes[name] != weight.shape:
                there = "is not in it" if name not in self._shapes else f"has the shape {[*self._shapes[name]]} there"
                raise WhetError(
                    f"{self._checkpoint}: this checkpoint does not fit the model: {name} {there}. Was the model "
                    "changed since? Bring it back, or start a new run: run.dir=FOLDER"
                )

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(self._shapes[name], dtype=dtype)
        self.load_into({name: tensor})
        return tensor

    def load_into(self, tensors: dict[str, Tensor]) -> None:
        """Read into tensors that are there."""
        try:
            inside = {_MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
            load_tensors(inside, SafeStorageReader(self._checkpoint / "model"))
        except CheckpointReadError as error:
            raise WhetError(
                f"{self._checkpoint}: {next(iter(tensors))} cannot be read from it ({error}). Export "
                "another checkpoint: RUN@STEP"
            ) from error
