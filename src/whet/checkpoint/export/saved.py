"""One weight at a time out of a checkpoint, whatever number of processes wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from whet.checkpoint.metadata import SafeReader
from whet.checkpoint.packed import NotReadError, read_into
from whet.core.errors import WhetError

_PREFIX = "model.language_model."


class Saved:
    """The trained weights in a checkpoint's `model` folder, by the names that the language model has for them."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        found = SafeReader(checkpoint / "model").read_metadata().state_dict_metadata
        self._shapes = {
            key.removeprefix(_PREFIX): kept.size
            for key, kept in found.items()
            if isinstance(kept, TensorStorageMetadata)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def require(self, wanted: dict[str, Tensor]) -> None:
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
        self.fill({name: tensor})
        return tensor

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read into tensors that are there."""
        try:
            inside = {_PREFIX + name: tensor for name, tensor in tensors.items()}
            read_into(inside, SafeReader(self._checkpoint / "model"))
        except NotReadError as error:
            raise WhetError(
                f"{self._checkpoint}: {next(iter(tensors))} cannot be read from it ({error}). Export "
                "another checkpoint: RUN@STEP"
            ) from error
