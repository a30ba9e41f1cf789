"""torch.distributed.checkpoint storage: a reader with a restricted unpickler, and a parallel writer that reports I/O errors."""

from __future__ import annotations

import dataclasses
import io
import pickle
import threading
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from whet.compat.torch_private import checkpoint_offset, load_as_fake
from whet.core.distributed import is_peer_failure
from whet.core.errors import WhetError
from whet.core.retry import UnreadableError, read_with_retries

# Warnings of torch about what is meant.


def ignore_single_process_warning() -> None:
    """A single process saves alone. Said for good: filters that are put back cannot be used from two threads."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")


# Reading torch's distributed checkpoints without trusting them.
#
# Their `.metadata` is a pickle, and unpickling runs whatever code the file names. This reader allows the handful of
# types that a checkpoint consists of and nothing else.

_READ_THREADS = 4
_FAKE_MODE_LOCK = threading.Lock()
"""A mode of torch notes for the whole process that there is one, and on leaving what was noted before: of two that
overlap, the second would leave the note of the first behind for good."""

_ALLOWED_GLOBALS = {
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and (is_dtype or (module, name) in _ALLOWED_GLOBALS):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


class SafeStorageReader(FileSystemReader):
    """torch's reader, with the restricted unpickler, several files at a time, and each tensor read once: torch's own
    reads it into memory twice."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)

        def read(name: str) -> None:  # a second time, it puts the same numbers in the same places
            file = Path(self.path) / name
            read_with_retries(lambda: self._read(planner, file, files[name]), file)

        with ThreadPoolExecutor(_READ_THREADS) as pool:
            list(pool.map(read, files))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, planner: LoadPlanner, path: Path, items: list[ReadItem]) -> None:
        room = torch.empty(0, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            for item in items:
                about = self.storage_data[item.storage_index]
                if about.transform_descriptors:
                    raise WhetError(f"{path}: is packed by {about.transform_descriptors}, which whet does not read")
                part = _FileSlice(file, about.offset, about.length)
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(part.read()))
                    continue
                with _FAKE_MODE_LOCK:
                    like = load_as_fake(part)  # shape, dtype, strides and where in the file its data is
                if len(room) < like.untyped_storage().nbytes():
                    room = torch.empty(like.untyped_storage().nbytes(), dtype=torch.uint8)
                window = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                found = _read_storage(like, part, room)[window]
                target = planner.resolve_tensor(item).detach()
                if target.shape != found.shape:
                    raise ValueError(f"{item.storage_index.fqn}: {tuple(found.shape)}, not {tuple(target.shape)}")
                target.copy_(found)
                planner.commit_tensor(item, target)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            content = read_with_retries(path.read_bytes, path)
            metadata = _RestrictedUnpickler(io.BytesIO(content)).load()
        except UnreadableError:
            raise
        except Exception as error:  # a damaged pickle makes Python say almost anything
            raise WhetError(
                f"{path}: not the metadata of a checkpoint ({error}). Delete the checkpoint and use an older one"
            ) from None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _FileSlice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return int(count)


def _read_storage(like: Tensor, part: _FileSlice, room: Tensor) -> Tensor:
    """A tensor with the numbers that the file has for it, in the memory of `room`."""
    storage = like.untyped_storage()
    numbers = room[: storage.nbytes()]
    if len(numbers):
        part.seek(checkpoint_offset(storage))
        wanted = memoryview(numbers.numpy())  # type: ignore[arg-type]
        while wanted:
            count = part.readinto(wanted)
            if not count:
                raise ValueError("a tensor that is longer than its place")
            wanted = wanted[count:]
    return numbers.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())


# What torch's checkpoint calls raise: it packs what went wrong on each rank into an error of its own, whatever it was,
# being asked to stop too.

_PASSED_THROUGH = (UnreadableError, KeyboardInterrupt, torch.OutOfMemoryError)


class CheckpointReadError(Exception):
    """A checkpoint's files do not give what was asked of them; as text the kind of what went wrong."""


def load_tensors(tensors: dict[str, Any], reader: SafeStorageReader, no_dist: bool = True) -> None:
    """Read into tensors that are there. A NotReadError is the checkpoint's fault; a disk that fails, a process that is
    gone and being asked to stop come out as what they are."""
    ignore_single_process_warning()
    try:
        dcp_load(tensors, storage_reader=reader, no_dist=no_dist)
    except (Exception, CheckpointException) as error:
        found = unwrap_errors(error)
        other = next((each for each in found if isinstance(each, _PASSED_THROUGH) or is_peer_failure(each)), None)
        if other is not None:
            raise other from None
        raise CheckpointReadError(type(next(iter(found), error)).__name__) from error


def unwrap_errors(error: BaseException) -> list[BaseException]:
    return [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


# torch's writer of checkpoints, with several files at a time.
#
# torch's own threads lose what goes wrong in them (seen in 2.13: a full disk gave a checkpoint without some tensors and
# no error), so each file is written by a call of its own, whose error counts.

_FILES_PER_RANK = 4  # on each rank, so that they can be written, hashed and read beside each other


class ParallelStorageWriter(FileSystemWriter):
    """Writes into a folder that exists and is empty."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=1, sync_files=True, per_thread_copy_ahead=0)  # all is on the host

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part: Any = dataclasses.replace(plan, items=items, storage_data=prefix)
            return super(ParallelStorageWriter, self).write_data(part, planner).wait()

        shares = _split_by_size(plan.items)
        with ThreadPoolExecutor(_FILES_PER_RANK) as pool:
            results = list(pool.map(write, range(len(shares)), shares))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for each in results for result in each])
        return done


def _split_by_size(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Of about the same size, the largest tensor first to the smallest share."""
    shares: list[list[WriteItem]] = [[] for _ in range(_FILES_PER_RANK)]
    sizes = [0] * _FILES_PER_RANK
    for item in sorted(items, key=_item_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += max(1, _item_bytes(item))
    return [share for share in shares if share]


def _item_bytes(item: WriteItem) -> int:
    about = item.tensor_data
    return 0 if about is None else about.chunk.sizes.numel() * about.properties.dtype.itemsize
