"""Load a checkpoint: verify every hash, then read into the model's tensors, all at once or one weight at a
time. Also which tensors a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from whet.checkpoint.dcp_storage import CheckpointReadError, SafeStorageReader, load_tensors
from whet.checkpoint.directory import DamagedCheckpointError, damaged_error, read_manifest
from whet.core.checksums import find_damage
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.core.files import UnreadableError
from whet.model.weight_effect import listed
from whet.parallel.fsdp import reshard

_MODEL_PREFIX = "model.language_model."


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
) -> dict[str, Any]:
    """Load weights, and the optimizer state if `optimizer` is given; returns the manifest.

    DamagedCheckpointError and UnreadableError are raised on every rank alike, before anything is changed. A disk that
    fails after the verification also raises UnreadableError.
    """
    parts = ["model"] if optimizer is None else ["model", "optimizer"]
    manifest = verify_checkpoint(path, parts, ranks)
    reshard(model)
    tensors = {"model": model_tensors(model)}
    if optimizer is not None:
        init_optimizer_state(optimizer)
        tensors["optimizer"] = optimizer_tensors(model, optimizer)
    for part in parts:
        reader = SafeStorageReader(path / part)
        if part == "model":
            _require_same_adapters(path, reader.read_metadata().state_dict_metadata, tensors[part])
        try:
            load_tensors(tensors[part], reader, no_dist=ranks.world_size == 1)
        except CheckpointReadError as error:
            raise _mismatch_error(path, f" ({error})") from error
    return manifest


def verify_checkpoint(path: Path, parts: list[str], ranks: Ranks) -> dict[str, Any]:
    """The manifest, if every file of these parts is intact. Ranks share the files, and all raise the same error."""
    manifest: dict[str, Any] = {}
    unreadable: list[str] = []
    try:
        manifest = read_manifest(path)
        missing = [part for part in parts if part not in manifest["parts"]]
        if missing:
            found = [f"{path}: the {missing[0]} state was deleted (checkpoint.optimizer: newest)"]
        else:
            names = sorted(name for name in manifest["files"] if name.split("/")[0] in parts)
            found = find_damage(path, manifest["files"], names[ranks.rank :: ranks.world_size])
        damaged = [str(damaged_error(message)) for message in found]
    except UnreadableError as error:
        unreadable, damaged = [str(error)], []
    except WhetError as error:
        damaged = [str(error)]
    unreadable, damaged = ranks.all_gather(unreadable), ranks.all_gather(damaged)
    if unreadable:  # whether it is damaged is unknown
        raise UnreadableError(unreadable[0])
    if damaged:
        raise DamagedCheckpointError(damaged[0])
    return manifest


class CheckpointWeights:
    """The weights in a checkpoint, read one at a time, by their names in the language model. Any number of ranks may
    have written it."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._reader = SafeStorageReader(checkpoint / "model")
        entries = self._reader.read_metadata().state_dict_metadata
        self._names = set(entries)
        self._shapes = {
            key.removeprefix(_MODEL_PREFIX): entry.size
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def require_fit(self, weights: dict[str, Tensor]) -> None:
        """Raise if the checkpoint belongs to another model, before anything is written."""
        _require_same_adapters(self._checkpoint, self._names, {_MODEL_PREFIX + name for name in weights})
        for name, weight in weights.items():
            if name not in self._shapes:
                raise _mismatch_error(self._checkpoint, f": {name} is not in it")
            if self._shapes[name] != weight.shape:
                raise _mismatch_error(self._checkpoint, f": {name} has the shape {[*self._shapes[name]]} there")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(self._shapes[name], dtype=dtype)
        self.load_into({name: tensor})
        return tensor

    def load_into(self, tensors: dict[str, Tensor]) -> None:
        """Read into existing tensors."""
        for name, tensor in tensors.items():
            try:
                self._reader.read_tensor(_MODEL_PREFIX + name, tensor)
            except (WhetError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a damaged file can raise almost anything
                raise WhetError(
                    f"{self._checkpoint}: cannot read {name} ({type(error).__name__}). Export another checkpoint: "
                    "RUN@STEP"
                ) from error


def _require_same_adapters(path: Path, then: Collection[str], now: Collection[str]) -> None:
    """Raise if the checkpoint has adapters of layers that have none now, which would get lost unnoticed, or the other
    way round. Earlier versions of whet adapted other layers of mixtures of experts: routers, and not all others."""
    there, here = (
        {name.partition(".lora_")[0].removeprefix(_MODEL_PREFIX) for name in names if ".lora_" in name}
        for names in (then, now)
    )
    if there == here or not there or not here:
        return
    parts = [
        f"{len(names):,} {where} ({listed(sorted(names))})"
        for names, where in ((there - here, "are only in the checkpoint"), (here - there, "only in the model"))
        if names
    ]
    raise WhetError(
        f"{path}: its adapters are on other layers than adapter.targets reaches now: {' and '.join(parts)}. An earlier "
        "version of whet wrote it, which adapted other layers of this model. Continue or export it with that version, "
        "or start a new run: run.dir=FOLDER"
    )


def _mismatch_error(path: Path, reason: str) -> WhetError:
    return WhetError(
        f"{path}: this checkpoint does not fit the model{reason}. If the model was changed, restore it, or start a new "
        "run: run.dir=FOLDER"
    )


# The tensors of a checkpoint: trainable parameters and optimizer state, by fully qualified name.


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in trainable_parameters(model)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    init_optimizer_state(optimizer)
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in trainable_parameters(model)
        for key, value in optimizer.state[parameter].items()
    }


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create the state tensors of weights that it never updated, before the first step those of all,
    by a step with lr 0 and zero gradients that changes nothing."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    fresh = [weight for weight in weights if not optimizer.state.get(weight)]
    if not fresh:
        return
    gradients, rates = [weight.grad for weight in weights], [group["lr"] for group in optimizer.param_groups]
    for weight in weights:
        weight.grad = None
    for weight in fresh:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for weight in fresh:
        if "step" in optimizer.state[weight]:
            optimizer.state[weight]["step"].zero_()  # this step does not count
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
