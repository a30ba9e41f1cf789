"""Ranks and process groups: initialisation, collectives, a barrier without a deadline, seeds that all ranks share.

One process runs the same code: its collectives return its own values.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.core import launch_env
from whet.core.console import info, warn
from whet.core.errors import RunFailedError, WhetError
from whet.core.heartbeat import PHASE
from whet.core.rendezvous import StartBarrier, join_rendezvous
from whet.core.resources import cores_per_process

_SHUTDOWN_TIMEOUT_S = 5.0  # for a launcher that no longer answers: all work is done


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all processes of the run."""

    rank: int
    world_size: int
    device: torch.device
    context_size: int = 1
    """How many neighbouring ranks share each row, each with a slice of its tokens (context parallelism)."""
    tensor_size: int = 1
    """How many neighbouring ranks share each layer and see the same tokens (tensor parallelism)."""

    @property
    def is_main(self) -> bool:
        """Rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def context_rank(self) -> int:
        """Which slice of its rows' tokens this rank computes."""
        return self.rank // self.tensor_size % self.context_size

    @property
    def data_rank(self) -> int:
        """Which share of a step's rows this rank computes; context and tensor neighbours have the same."""
        return self.rank // (self.context_size * self.tensor_size)

    @property
    def data_size(self) -> int:
        """Into how many shares a step's rows are split."""
        return self.world_size // (self.context_size * self.tensor_size)

    @property
    def is_tensor_main(self) -> bool:
        """Whether this rank's sums enter a total: tensor neighbours compute the same ones, so the first counts."""
        return self.rank % self.tensor_size == 0

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over all ranks."""
        if self.world_size > 1:
            PHASE.begin_wait()
            dist.all_reduce(tensor)
            PHASE.end_wait()
        return tensor

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace `tensor` by rank 0's."""
        if self.world_size > 1:
            PHASE.begin_wait()
            dist.broadcast(tensor, src=0)
            PHASE.end_wait()

    def all_gather(self, items: list[Any]) -> list[Any]:
        """The items of all ranks in one list, in rank order."""
        if self.world_size == 1:
            return items
        parts: list[Any] = [None] * self.world_size
        PHASE.begin_wait()
        dist.all_gather_object(parts, items)
        PHASE.end_wait()
        return [item for part in parts for item in part]

    def barrier(self) -> None:
        """Block until every rank is here."""
        if self.world_size > 1:
            PHASE.begin_wait()
            dist.barrier()
            PHASE.end_wait()

    def shutdown(self) -> None:
        """Destroy the process group once every rank has reached its end: Gloo aborts a rank whose peer has left."""
        if self.world_size > 1 and dist.is_initialized() and launch_env.has_agent_store():
            with contextlib.suppress(dist.DistError):  # torchrun was killed, and its store with it
                store_barrier("leaving", self.rank, self.world_size, timeout_s=_SHUTDOWN_TIMEOUT_S)
        self.destroy()

    def destroy(self) -> None:
        """Destroy the process group without waiting for the others."""
        if dist.is_initialized():
            dist.destroy_process_group()


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error means only that another process is gone or does not answer. Gloo raises plain RuntimeErrors."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("gloo/transport", "Connection closed by peer", "Connection reset by peer"))
    )


# Initialisation


def get_local_device(share_gpu: bool = False, kind: str = "auto") -> torch.device:
    """The device of this machine that this process uses. `share_gpu`: processes without one of their own share them;
    `kind`: run.device."""
    local = launch_env.local_rank()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if accelerator is None else accelerator.type
    if kind not in ("auto", "cpu", found):
        raise WhetError(
            f"run.device: {kind}: torch {torch.__version__} finds no such device here, only {found}. `whet doctor` "
            "shows why; to use what is here: run.device=auto"
        )
    if accelerator is None or kind == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if share_gpu and accelerator.type == "cuda":  # Gloo carries no tensors of other accelerators
        return torch.device("cuda", local % count)
    if launch_env.gpus_bound_by_slurm(count):
        return torch.device(accelerator.type, local % count)
    if local >= count:
        shared = ", or let processes share one, for tests: launch.share_gpu=true" if accelerator.type == "cuda" else ""
        raise WhetError(
            f"this machine has {count} {accelerator.type} device{'s' if count > 1 else ''}, and process {local + 1} "
            f"needs one of its own. Start fewer processes (launch.gpus={count}; torchrun: --nproc-per-node {count})"
            f"{shared}"
        )
    return torch.device(accelerator.type, local)


def init_distributed(timeout_s: float = 1800.0, share_gpu: bool = False, kind: str = "auto") -> Ranks:
    """Select this process's device and join the process group, if the launcher started several processes.

    They may arrive hours apart, when each machine prepares its own data; later no collective takes longer than
    `timeout_s`. `share_gpu`: several processes may use one GPU, and communicate over Gloo (launch.share_gpu).
    `kind`: run.device.
    """
    launch_env.require_possible_rank()
    rank, world_size = launch_env.rank(), launch_env.world_size()
    device = get_local_device(share_gpu, kind)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    if world_size > 1:
        if device.type == "cpu":
            # More threads than cores make processes wait for each other: ten times slower, seen on two cores.
            torch.set_num_threads(cores_per_process(world_size))
        if not dist.is_initialized():
            if launch_env.has_agent_store():
                store_barrier("joining", rank, world_size, _log_missing)
            else:
                host, port = launch_env.store_address()
                job = str(launch_env.slurm_job() or "")
                barrier = StartBarrier(host, port, job, world_size, "processes", timeout_s)
                _store, _ = join_rendezvous(barrier, may_host=rank == 0)  # in use until the process group shares it
            dist.init_process_group(_backend_for(device, share_gpu), timeout=datetime.timedelta(seconds=timeout_s))
    return Ranks(rank, world_size, device)


def _log_missing(missing: int) -> None:
    info(f"waiting for {missing} other process{'es' if missing > 1 else ''}")


def _backend_for(device: torch.device, share_gpu: bool) -> str:
    """Gloo for the CPU; an accelerator's own backend, with Gloo beside it for tensors on the host.

    NCCL refuses two processes on one GPU. Gloo carries CUDA tensors through the host, in every collective that whet
    uses: all_reduce, all_gather, reduce_scatter and all_to_all of single tensors, broadcast, with sums only. It has
    neither ReduceOp.AVG nor coalesced CUDA tensors.
    """
    if device.type == "cpu":
        return "gloo"
    if share_gpu and device.type == "cuda":
        if launch_env.rank() == 0:
            warn("launch.share_gpu: processes share GPUs and communicate over Gloo, through the host: for tests, slow")
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


# A barrier in the TCPStore. A collective has a deadline and needs a process group; this needs neither. It serves where
# one process may work for hours while the others wait, as when it prepares data or exports; the watchdog ends the run
# if the one they wait for has died.

_POLL_S = 0.1
_MAX_POLL_S = 1.0
_LOG_AFTER_S = 10.0


def connect_store(timeout_s: float = 60.0) -> TCPStore:
    """A new connection to the launcher's store. One per thread: a blocking call holds up its connection only."""
    host, port = launch_env.store_address()
    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def store_barrier(
    name: str,
    rank: int,
    world_size: int,
    on_wait: Callable[[int], None] = lambda missing: None,
    timeout_s: float = 60.0,
) -> None:
    """Block until every rank has entered the barrier `name`, without a deadline.

    `on_wait` is called once, with the number of missing ranks, after ten seconds. `timeout_s` limits how long a store
    that does not answer is waited for.
    """
    store, began, pause, logged = connect_store(timeout_s), time.monotonic(), _POLL_S, False
    missing = [f"whet/{name}/{other}" for other in range(world_size)]
    PHASE.begin_wait()
    try:
        store.set(missing[rank], "here")
        while missing := [key for key in missing if not store.check([key])]:
            if not logged and time.monotonic() - began > _LOG_AFTER_S:
                logged = True
                on_wait(len(missing))
            time.sleep(pause)
            pause = min(_MAX_POLL_S, 1.5 * pause)
    except dist.DistNetworkError:
        raise RunFailedError(
            "the launcher that connects the processes has ended: see its output, or that of rank 0"
        ) from None
    PHASE.end_wait()


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from, for example, (seed, step, row): the same after a restart and on every rank."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`.

    torch.manual_seed seeds those of every kind of device. For a kind that is not in use it keeps the call for later,
    with a formatted stack: 4.5 ms a call, and memory that is never freed.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
