"""The processes of a run. One process is a case of the same code: its sums are its own."""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whet.core.console import say
from whet.core.cores import my_cores
from whet.core.errors import WhetError
from whet.core.meeting import launcher_has_store, wait_for_all
from whet.core.whereabouts import HERE

_AT_THE_END_S = 5.0
"""For a launcher that does not answer any more: all work is done."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of them."""

    rank: int
    world: int
    device: torch.device
    slices: int = 1
    """How many neighbours compute each row together, every one a slice of its tokens."""
    tensor: int = 1
    """How many neighbours compute the same tokens together, every one with its part of each layer."""

    @property
    def is_first(self) -> bool:
        """The one that writes files and speaks."""
        return self.rank == 0

    @property
    def slice(self) -> int:
        """The number of this one's slice of its rows."""
        return self.rank // self.tensor % self.slices

    @property
    def team(self) -> int:
        """The number of those that compute the same rows as this one."""
        return self.rank // (self.slices * self.tensor)

    @property
    def teams(self) -> int:
        """Among how many a step's rows are dealt."""
        return self.world // (self.slices * self.tensor)

    @property
    def counts(self) -> bool:
        """Whether what this one found of its tokens is added up: of those that find the same, the first one's is."""
        return self.rank % self.tensor == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all ranks."""
        if self.world > 1:
            HERE.meets()
            dist.all_reduce(tensor)
            HERE.met()
        return tensor

    def copy_from_first_(self, tensor: Tensor) -> None:
        """Replace `tensor` by rank 0's."""
        if self.world > 1:
            HERE.meets()
            dist.broadcast(tensor, src=0)
            HERE.met()

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, in the order of the ranks."""
        if self.world == 1:
            return items
        parts: list[Any] = [None] * self.world
        HERE.meets()
        dist.all_gather_object(parts, items)
        HERE.met()
        return [item for part in parts for item in part]

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            HERE.meets()
            dist.barrier()
            HERE.met()

    def leave_together(self) -> None:
        """End the group when every rank has come to its end: Gloo aborts who still listens to one that has gone."""
        if self.world > 1 and dist.is_initialized() and launcher_has_store():
            with contextlib.suppress(dist.DistError):  # torchrun was killed, and its store with it
                wait_for_all("leaving", self.rank, self.world, patience_s=_AT_THE_END_S)
        self.leave()

    def leave(self) -> None:
        """End the group; called once, at the end."""
        if dist.is_initialized():
            dist.destroy_process_group()


def lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another process is gone or does not answer. Gloo's have no type."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer"))
    )


def who_am_i() -> tuple[int, int]:
    """(rank, world) as torchrun or Slurm's launcher set them, without starting anything."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def my_device() -> torch.device:
    """The one of this machine's devices that this process will use."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if local >= torch.accelerator.device_count():
        raise WhetError(
            f"this machine has {torch.accelerator.device_count()} {accelerator.type} devices, and process {local + 1} "
            "wants one of its own. Start fewer: torchrun --nproc-per-node"
        )
    return torch.device(accelerator.type, local)


def start_ranks(timeout_s: float = 1800.0) -> Ranks:
    """Join the other processes, if there are any, and take this one's device.

    They may come hours apart, if each prepares data on its own machine; after that, none waits longer than `timeout_s`.
    """
    rank, world = who_am_i()
    device = my_device()
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    if world > 1:
        if device.type == "cpu":
            # More threads than cores make processes wait for each other: ten times slower, seen on two cores.
            torch.set_num_threads(my_cores(world))
        if not dist.is_initialized():
            if launcher_has_store():
                wait_for_all("joining", rank, world, _tell)
            dist.init_process_group(_backend(device), timeout=datetime.timedelta(seconds=timeout_s))
    return Ranks(rank, world, device)


def _tell(missing: int) -> None:
    say(f"waiting for {missing} other process{'es' if missing > 1 else ''}")


def _backend(device: torch.device) -> str:
    """Gloo for the CPU; an accelerator's own, with Gloo beside it for tensors that stay on the host."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
