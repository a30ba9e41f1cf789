"""Save checkpoints asynchronously: copy to host memory, write in a background thread, hash, commit by rename."""

from __future__ import annotations

import contextlib
import datetime
import mmap
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from whet.checkpoint import directory
from whet.checkpoint.dcp_storage import ParallelStorageWriter, ignore_single_process_warning, unwrap_errors
from whet.checkpoint.directory import Retention, rank_by_score, write_manifest
from whet.checkpoint.load import model_tensors, optimizer_tensors
from whet.compat.torch_private import dtensor_like
from whet.core import launch_env
from whet.core.checksums import FileRecords, hash_files
from whet.core.console import warn
from whet.core.distributed import Ranks
from whet.core.errors import RunFailedError, WhetError, describe_error, os_error
from whet.core.files import fsync_file, replace_folder, require_disk_space
from whet.core.resources import available_memory
from whet.core.signals import abandon_thread
from whet.parallel.dtensor import local_tensor, shard_count
from whet.parallel.fsdp import reshard

_ABORT_TIMEOUT_S = 30.0
_KEPT_OPTIMIZER_STATES = 2

T = TypeVar("T")
StateDicts = dict[str, dict[str, Tensor]]


class CheckpointSaver:
    """Saves the checkpoints of one run. Every rank has one and calls the same methods in the same order.

    `save` returns once weights and optimizer state are copied to host memory. A thread then writes the files into a
    hidden folder, syncs and hashes them, writes the manifest, renames the folder, moves `latest` and applies retention.
    An error in the thread is raised by the next `save` or `wait`, on every rank. Leaving the `with` block waits for the
    thread; after an exception, for at most 30 seconds.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks,
        retention: Retention | None = None, optimizers: Literal["all", "newest", "none"] = "all",
        metadata: Callable[[], Mapping[str, Any]] = dict, lower_is_better: bool = True, timeout_s: float = 1800.0,
        synced: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """`optimizers="newest"` deletes the optimizer state of all but the newest two checkpoints, "none" saves none.
        `metadata` is called once, in a thread, for further keys of the manifest. `timeout_s` limits how long ranks
        wait for each other. `synced`: files whose size `state` has; they are on the disk before the checkpoint is."""
        self._folder, self._model, self._optimizer, self._ranks = folder, model, optimizer, ranks
        self._retention, self._optimizers = retention or Retention(), optimizers
        self._metadata, self._cached_metadata = metadata, dict[str, Any]()
        self._lower_is_better, self._synced = lower_is_better, synced
        self._staging = HostStaging()
        self._thread: threading.Thread | None = None
        self._metadata_thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._scores: dict[int, float] = {}
        self._retention_lock = threading.Lock()
        self.last_saved = time.monotonic()
        """When the last save began, or this object was made."""
        self.blocked_s, self.write_s = 0.0, 0.0
        """How long the last save blocked training, waiting for the previous one included, and how long writing took."""
        # A process group of its own: collectives of the thread run at the same time as those of training.
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if ranks.world_size > 1 else None
        ignore_single_process_warning()
        if ranks.is_main:
            directory.repair(folder)

    def prepare_first_save(self) -> None:
        """On CUDA, allocate host memory for the first save and compute its metadata in the background. Call it after
        the first optimizer step."""
        if self._ranks.device.type == "cuda":
            if self._ranks.is_main:  # an adapter's base is hashed: about 14 s for 16 GB
                self._metadata_thread = threading.Thread(target=self._try_metadata, name="metadata", daemon=True)
                self._metadata_thread.start()
            reshard(self._model)
            tensors = {name: tensor for part in self._state_dicts().values() for name, tensor in part.items()}
            # All ranks measure free memory before any allocates: they share the host.
            if all(self._ranks.all_gather([self._staging.has_room_for(tensors)])):
                self._staging.allocate_async(tensors)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save a checkpoint after `step` steps. `state` goes into the manifest."""
        began = self.last_saved = time.monotonic()
        self.wait()
        reshard(self._model)
        parts = self._state_dicts()
        if self._staging.has_room_for({name: tensor for part in parts.values() for name, tensor in part.items()}):
            staged = {part: self._staging.copy(tensors) for part, tensors in parts.items()}
            self.blocked_s = time.monotonic() - began
            self._thread = threading.Thread(
                target=self._write_or_record_error,
                args=(step, staged, dict(state)),
                name="checkpoint writer",
                daemon=True,
            )
            self._thread.start()
        else:
            warn("not enough host memory for a copy of weights and optimizer state: training waits for the disk")
            self._write_or_record_error(step, parts, dict(state))
            self.blocked_s = time.monotonic() - began

    def _state_dicts(self) -> StateDicts:
        parts = {"model": model_tensors(self._model)}
        if self._optimizers != "none":
            parts["optimizer"] = optimizer_tensors(self._model, self._optimizer)
        return parts

    def wait(self) -> None:
        """Block until the last save is on disk; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def has_failed(self) -> bool:
        """Whether the next `wait` raises. Other ranks may not know it yet."""
        return self._error is not None

    def add_scores(self, scores: Mapping[int, float]) -> None:
        """Record eval.best by step, for `best` and keep_best. Rank 0 decides."""
        with self._retention_lock:
            self._scores.update(scores)
        if self._ranks.is_main:
            self._apply_retention()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.wait()
            if self._ranks.is_main:
                self._apply_retention()
        elif self._thread is not None:
            abandon_thread(self._thread, _ABORT_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            self._staging.close()

    def _write_or_record_error(self, step: int, parts: StateDicts, state: dict[str, Any]) -> None:
        began = time.monotonic()
        temporary = self._folder / f".{directory.checkpoint_name(step)}.writing"
        try:
            self._write(step, parts, state, temporary)
            self.write_s = time.monotonic() - began
        except BaseException as error:  # torch's CheckpointException is no Exception
            for cause in unwrap_errors(error):
                if isinstance(cause, KeyboardInterrupt):  # only without staging, in the main thread
                    raise cause from None
            if self._ranks.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            self._error = self._as_whet_error(next(iter(unwrap_errors(error)), error), step)

    def _write(self, step: int, parts: StateDicts, state: dict[str, Any], temporary: Path) -> None:
        size = sum(
            local_tensor(each).nbytes * shard_count(each) for tensors in parts.values() for each in tensors.values()
        )
        self._on_rank_0(lambda: self._prepare_folder(temporary, list(parts), size))
        for part, tensors in parts.items():
            writer = ParallelStorageWriter(temporary / part)
            dcp_save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        files: FileRecords = {}
        for records in self._on_all_ranks(lambda: hash_files(temporary, self._own_files(temporary))):
            files |= records
        self._on_rank_0(lambda: self._commit(step, list(parts), files, state, temporary))

    def _prepare_folder(self, temporary: Path, parts: list[str], size: int) -> None:
        require_disk_space(self._folder, size + 2**20, "a checkpoint")
        shutil.rmtree(temporary, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)  # without its parents: a run folder that was deleted is not made again
        for folder in (temporary, *(temporary / part for part in parts)):
            folder.mkdir()

    def _own_files(self, temporary: Path) -> list[Path]:
        """The files that this rank wrote: torch has the rank in their names. Rank 0 also writes the metadata."""
        files = list(temporary.glob(f"*/__{self._ranks.rank}_*"))
        return files + (list(temporary.glob("*/.metadata")) if self._ranks.is_main else [])

    def _commit(self, step: int, parts: list[str], files: FileRecords, state: dict[str, Any], temporary: Path) -> None:
        if self._metadata_thread is not None:
            self._metadata_thread.join()
        if not self._cached_metadata:
            self._compute_metadata()
        content = {"step": step, "parts": parts, "world": self._ranks.world_size, **self._cached_metadata}
        content |= {"blocked_s": round(self.blocked_s, 3), "save_s": round(time.monotonic() - self.last_saved, 3)}
        for file in self._synced:
            fsync_file(file)
        write_manifest(temporary, {**content, "state": state, "files": files})
        replace_folder(temporary, self._folder / directory.checkpoint_name(step))
        directory.mark_latest(self._folder)
        self._apply_retention()

    def _compute_metadata(self) -> None:
        self._cached_metadata = dict(self._metadata())

    def _try_metadata(self) -> None:
        with contextlib.suppress(Exception):  # the save tries again and reports the error
            self._compute_metadata()

    def _apply_retention(self) -> None:
        """Mark the best checkpoint and delete those that no rule keeps."""
        with self._retention_lock:
            steps = directory.list_steps(self._folder)
            kept = self._retention.steps_to_keep(steps, self._scores, self._lower_is_better)
            best = rank_by_score(kept, self._scores, self._lower_is_better)
            if best:
                directory.mark_best(self._folder, best[0])
            directory.delete_checkpoints(self._folder, [step for step in steps if step not in kept])
            if self._optimizers == "newest":
                directory.drop_optimizer_state(self._folder, sorted(kept)[:-_KEPT_OPTIMIZER_STATES])

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        self._on_all_ranks(work if self._ranks.is_main else lambda: None)

    def _on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """The results of all ranks. If one fails, all raise, so that none waits for another."""
        failure: Exception | None = None
        own: tuple[T | None, str | None]
        try:
            own = (work(), None)
        except Exception as error:
            failure, own = error, (None, str(self._as_whet_error(error, None)))
        outcomes: list[Any] = [own]
        if self._group is not None:
            outcomes = [None] * self._ranks.world_size
            dist.all_gather_object(outcomes, own, group=self._group)
        if failure is not None:
            raise failure
        for _, message in outcomes:
            if message is not None:
                raise RunFailedError(message)
        return [result for result, _ in outcomes]

    def _as_whet_error(self, error: BaseException, step: int | None) -> BaseException:
        if isinstance(error, WhetError):
            return error
        known = os_error(error, "saving a checkpoint", self._folder)
        if known is not None:
            return known
        failed = RunFailedError(
            f"{self._folder}: saving a checkpoint failed{'' if step is None else f' after step {step}'}: "
            f"{describe_error(error)}. Earlier checkpoints are intact; --resume continues from the "
            "newest"
        )
        failed.__cause__ = error
        return failed


# Host copies of weights and optimizer state, from which a checkpoint is written while training continues.

_MIN_PINNED_BYTES = 2**20  # smaller copies are as fast from pageable memory
_MAX_FREE_FRACTION = 0.9  # of the free host memory


class PinnedMemory:
    """Page-locked host tensors of exact size.

    torch's pinned allocator rounds up to a power of two and holds the GIL while it allocates, at about 2 GB/s. This one
    takes what is needed, and other threads keep running.
    """

    def __init__(self) -> None:
        self._registered: list[Tensor] = []

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised host tensor of the same shape and dtype; pinned if `tensor` is on a GPU."""
        if not tensor.is_cuda or tensor.nbytes < _MIN_PINNED_BYTES:
            return torch.empty_like(tensor, device="cpu", requires_grad=False, memory_format=torch.contiguous_format)
        memory = mmap.mmap(-1, tensor.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        content = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # faulting in the pages takes most of the time
        if int(torch.cuda.cudart().cudaHostRegister(content.data_ptr(), content.nbytes, 0)) == 0:
            self._registered.append(content)
        return content.view(tensor.dtype).view(tensor.shape)  # copies also work unregistered, only slower

    def close(self) -> None:
        """Unregister all memory. No copy may be in flight."""
        for content in self._registered:
            torch.cuda.cudart().cudaHostUnregister(content.data_ptr())
        self._registered.clear()


class HostStaging:
    """A host buffer for each tensor, allocated once and reused by every save."""

    def __init__(self) -> None:
        self._host_buffers: dict[str, Tensor] = {}
        self._pinned = PinnedMemory()
        self._allocation_thread: threading.Thread | None = None

    def allocate_async(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate pinned buffers in a thread, so that the first save does not wait for them. The caller has checked
        `has_room_for`."""
        device = next(
            (local_tensor(tensor).device for tensor in tensors.values() if local_tensor(tensor).is_cuda), None
        )
        if device is None:
            return
        self._join_allocation()
        missing = {name: local_tensor(tensor) for name, tensor in tensors.items() if name not in self._host_buffers}

        def allocate() -> None:
            with torch.cuda.device(device):  # a new thread starts on GPU 0, where every rank would create a context
                for name, tensor in missing.items():
                    self._host_buffers[name] = self._pinned.empty_like(tensor)

        self._allocation_thread = threading.Thread(target=allocate, name="checkpoint staging", daemon=True)
        self._allocation_thread.start()

    def close(self) -> None:
        """Free the buffers; copies become invalid."""
        self._join_allocation()
        self._host_buffers.clear()
        self._pinned.close()

    def _join_allocation(self) -> None:
        if self._allocation_thread is not None:
            self._allocation_thread.join()
            self._allocation_thread = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory; of a sharded tensor this rank's shard, still as a DTensor."""
        self._join_allocation()
        copies = {name: _shard_like(tensor, self._copy(name, local_tensor(tensor))) for name, tensor in tensors.items()}
        if any(local_tensor(tensor).device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies

    def has_room_for(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether host memory holds copies of these on every rank of this host."""
        self._join_allocation()
        missing = sum(local_tensor(tensor).nbytes for name, tensor in tensors.items() if name not in self._host_buffers)
        local_ranks = launch_env.local_world_size()
        free = available_memory()
        return free is None or missing * local_ranks <= _MAX_FREE_FRACTION * free

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        host = self._host_buffers.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = self._host_buffers[name] = self._pinned.empty_like(tensor)
        return host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _shard_like(tensor: Tensor, host: Tensor) -> Tensor:
    """`host` as a shard of the same DTensor. DTensor.from_local would copy it to the mesh's device."""
    return dtensor_like(tensor, host) if isinstance(tensor, DTensor) else host
