"""Ranks and process groups: initialisation, collectives, and a barrier without a deadline. One process runs the same code."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.core.console import info
from whet.core.errors import WhetError
from whet.core.heartbeat import PHASE
from whet.core.resources import cores_per_process

# Meeting the other processes without a collective: for as long as it takes, and before there is a process group.
#
# A collective has a deadline, and whoever waits in one cannot be told why. So where one process may work for hours while
# the others wait (preparing data on its machine, exporting the model), they wait here instead, and the watchdog sees to
# it that nobody waits for the dead.

_POLL_S = 0.1
_MAX_POLL_S = 1.0
_LOG_AFTER_S = 10.0


def has_agent_store() -> bool:
    """Whether torchrun keeps a store that is there before any process group and outlives every process of the run."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(timeout_s: float = 60.0) -> TCPStore:
    """A connection of one's own to the store that the processes meet at: a thread that waits holds up no other."""
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )  # fmt: skip


def store_barrier(
    name: str, rank: int, world: int, tell: Callable[[int], None] = lambda missing: None, patience_s: float = 60.0
) -> None:
    """Until every rank has come to the meeting of this name, however long it takes. `tell` is called once, with how
    many are missing, when it takes longer than a moment. `patience_s`: with a store that does not answer."""
    store, began, pause, told = connect_store(patience_s), time.monotonic(), _POLL_S, False
    missing = [f"whet/{name}/{other}" for other in range(world)]
    PHASE.meets()
    store.set(missing[rank], "here")
    while missing := [key for key in missing if not store.check([key])]:
        if not told and time.monotonic() - began > _LOG_AFTER_S:
            told = True
            tell(len(missing))
        time.sleep(pause)
        pause = min(_MAX_POLL_S, 1.5 * pause)
    PHASE.met()


# The processes of a run. One process is a case of the same code: its sums are its own.

_SHUTDOWN_TIMEOUT_S = 5.0
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
            PHASE.meets()
            dist.all_reduce(tensor)
            PHASE.met()
        return tensor

    def copy_from_first_(self, tensor: Tensor) -> None:
        """Replace `tensor` by rank 0's."""
        if self.world > 1:
            PHASE.meets()
            dist.broadcast(tensor, src=0)
            PHASE.met()

    def gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks, in the order of the ranks."""
        if self.world == 1:
            return items
        parts: list[Any] = [None] * self.world
        PHASE.meets()
        dist.all_gather_object(parts, items)
        PHASE.met()
        return [item for part in parts for item in part]

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            PHASE.meets()
            dist.barrier()
            PHASE.met()

    def leave_together(self) -> None:
        """End the group when every rank has come to its end: Gloo aborts who still listens to one that has gone."""
        if self.world > 1 and dist.is_initialized() and has_agent_store():
            with contextlib.suppress(dist.DistError):  # torchrun was killed, and its store with it
                store_barrier("leaving", self.rank, self.world, patience_s=_SHUTDOWN_TIMEOUT_S)
        self.leave()

    def leave(self) -> None:
        """End the group; called once, at the end."""
        if dist.is_initialized():
            dist.destroy_process_group()


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error says no more than that another process is gone or does not answer. Gloo's have no type."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer"))
    )


def get_rank_and_world_size() -> tuple[int, int]:
    """(rank, world) as torchrun or Slurm's launcher set them, without starting anything."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def get_local_device() -> torch.device:
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


def init_distributed(timeout_s: float = 1800.0) -> Ranks:
    """Join the other processes, if there are any, and take this one's device.

    They may come hours apart, if each prepares data on its own machine; after that, none waits longer than `timeout_s`.
    """
    rank, world = get_rank_and_world_size()
    device = get_local_device()
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    if world > 1:
        if device.type == "cpu":
            # More threads than cores make processes wait for each other: ten times slower, seen on two cores.
            torch.set_num_threads(cores_per_process(world))
        if not dist.is_initialized():
            if has_agent_store():
                store_barrier("joining", rank, world, _log_missing)
            dist.init_process_group(_backend_for(device), timeout=datetime.timedelta(seconds=timeout_s))
    return Ranks(rank, world, device)


def _log_missing(missing: int) -> None:
    info(f"waiting for {missing} other process{'es' if missing > 1 else ''}")


def _backend_for(device: torch.device) -> str:
    """Gloo for the CPU; an accelerator's own, with Gloo beside it for tensors that stay on the host."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
