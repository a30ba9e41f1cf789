"""Checkpoints: the trainable weights and the optimizer, in torch's distributed format.

checkpoints/step-000100/   *.distcp, .metadata, state.json (written last: present means complete)
checkpoints/latest         a text file with the name of the newest
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from whet.checkpoint.metadata import SafeReader
from whet.core.errors import WhetError, disk_error
from whet.core.files import atomic_write, need_space, put_in_place, read_json, write_json
from whet.core.ranks import Ranks

_STATE = "state.json"


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], ranks: Ranks
) -> Path:
    """Write the state after `step` steps into `folder`, whole or not at all; every rank calls it."""
    final = folder / f"step-{step:06d}"
    temporary = folder / f".{final.name}.writing"
    if not optimizer.state:  # no step was taken yet: all of them were left out
        _materialise(optimizer)
    tensors = {**_weights(model), **_optimizer_tensors(model, optimizer)}
    try:
        if ranks.is_first:
            need_space(folder, sum(tensor.nbytes for tensor in tensors.values()) + 2**20, "a checkpoint")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        ranks.wait()
        with _quiet():
            dcp_save(tensors, checkpoint_id=temporary, no_dist=ranks.world == 1)
        ranks.wait()
        if ranks.is_first:
            write_json(temporary / _STATE, {**state, "step": step})
            put_in_place(temporary, final)
            atomic_write(folder / "latest", final.name + "\n")
    except (Exception, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise disk_error(error, "saving a checkpoint", folder) or error from None
    ranks.wait()
    return final


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """Put a checkpoint's weights, and the optimizer's state if wanted, in place; gives what `save` was told."""
    tensors = _weights(model)
    if optimizer is not None:
        _materialise(optimizer)
        tensors |= _optimizer_tensors(model, optimizer)
    SafeReader(path).read_metadata()  # here its errors come out as they are
    try:
        with _quiet():
            dcp_load(tensors, storage_reader=SafeReader(path), no_dist=ranks.world == 1)
    except (Exception, CheckpointException) as error:
        raise WhetError(
            f"{path}: this checkpoint does not fit the model, or is damaged ({type(error).__name__}). Was the model "
            "changed since? Delete the folder and --resume continues from the checkpoint before it, if there is one"
        ) from None
    return dict(read_json(path / _STATE))


def need_room(folder: Path, model: nn.Module, optimizer: int, kept: int, export: int) -> None:
    """Refuse before the first step when the disk cannot hold a run's checkpoints and its export.

    `optimizer`: the bytes of its state; while a new checkpoint is written, the oldest is still there.
    """
    weights = sum(parameter.nbytes for _, parameter in _trainable(model))
    need_space(folder, (weights + optimizer) * (kept + 1) + export + 2**20, "this run's checkpoints and export")


def steps_in(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    names = (state.parent.name.removeprefix("step-") for state in folder.glob(f"step-*/{_STATE}"))
    return sorted(int(name) for name in names if name.isdecimal())


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    steps = steps_in(folder)
    return folder / f"step-{steps[-1]:06d}" if steps else None


def to_delete(steps: list[int], keep_last: int) -> list[int]:
    """Which checkpoints retention gives up: all but the newest `keep_last`."""
    return sorted(steps)[:-keep_last]


def prune(folder: Path, keep_last: int) -> None:
    for step in to_delete(steps_in(folder), keep_last):
        doomed = folder / f"step-{step:06d}"
        (doomed / _STATE).unlink()  # first it stops being complete, then it goes
        shutil.rmtree(doomed, ignore_errors=True)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in _trainable(model)}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _trainable(model)
        for key, value in optimizer.state[parameter].items()
    }


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer make its state tensors, by a step that changes nothing (rate 0, no gradient)."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()  # that one did not count
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that a single process saves alone, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        yield
