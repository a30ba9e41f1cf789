"""torch.distributed.checkpoint storage: a reader with a restricted unpickler, a parallel writer that loses no error."""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
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
from whet.core.files import UnreadableError, read_with_retries


def ignore_single_process_warning() -> None:
    """Silence torch's warning about saving without a process group. For good: warnings.catch_warnings is not
    thread-safe."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")


# Reader. A checkpoint's `.metadata` is a pickle, and unpickling runs any code that the file names. The restricted
# unpickler allows the few types that a checkpoint consists of. An entry is a tensor, or bytes that torch would unpickle
# without any restriction: whet reads tensors alone.

_READ_THREADS = 4
_FAKE_MODE_LOCK = threading.Lock()
"""Entering a torch dispatch mode saves a process-wide flag and leaving restores it, so overlapping modes of two threads
would leave the flag set for good."""

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
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


class SafeStorageReader(FileSystemReader):
    """FileSystemReader with a restricted unpickler. It reads several files in parallel, and each tensor straight into
    one reused buffer; torch's own holds two copies of every tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._layouts: dict[MetadataIndex, Tensor] = {}
        """Fake tensors: an export reads every tensor three times."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)

        def read(name: str) -> None:  # a retry writes the same values to the same tensors
            file = Path(self.path) / name
            read_with_retries(lambda: self._read(planner, file, files[name]), file)

        if len(files) == 1:  # as for the export, which reads one tensor at a time
            read(*files)
        else:
            with ThreadPoolExecutor(_READ_THREADS) as pool:
                list(pool.map(read, files))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, planner: LoadPlanner, path: Path, items: list[ReadItem]) -> None:
        buffer = torch.empty(0, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            for item in items:
                if item.type == LoadItemType.BYTE_IO:
                    raise _pickled_entry_error(Path(self.path), item.storage_index.fqn)
                stored, buffer = self._read_stored(path, file, item.storage_index, buffer)
                target = planner.resolve_tensor(item).detach()
                _copy(stored[_window(item.storage_offsets, item.lengths)], target, item.storage_index.fqn)
                planner.commit_tensor(item, target)

    def read_tensor(self, name: str, target: Tensor) -> None:
        """Read one tensor. torch's loader plans the whole checkpoint for it, which takes longer than reading."""
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise _pickled_entry_error(Path(self.path), name)
        if target.shape != entry.size:
            raise ValueError(f"{name}: {tuple(entry.size)}, not {tuple(target.shape)}")
        for chunk in entry.chunks:
            self._read_chunk(MetadataIndex(name, chunk.offsets), target[_window(chunk.offsets, chunk.sizes)])

    def _read_chunk(self, index: MetadataIndex, target: Tensor) -> None:
        path = Path(self.path) / self._metadata.storage_data[index].relative_path

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                stored, _ = self._read_stored(path, file, index, torch.empty(0, dtype=torch.uint8))
                _copy(stored, target, index.fqn)

        read_with_retries(read, path)

    def _read_stored(self, path: Path, file: IO[bytes], index: MetadataIndex, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor of a file, in the memory of the buffer, and the buffer: another one if it was too small."""
        place = self._metadata.storage_data[index]
        if place.transform_descriptors:
            raise WhetError(f"{path}: compressed or encrypted by {place.transform_descriptors}, which whet cannot read")
        part = _FileSlice(file, place.offset, place.length)
        with _FAKE_MODE_LOCK:
            if index not in self._layouts:  # shape, dtype, strides and file offset, without the data
                self._layouts[index] = load_as_fake(part)
        layout = self._layouts[index]
        size = layout.untyped_storage().nbytes()
        if size > place.length:
            raise ValueError(f"{index.fqn}: larger than its place in the file")
        buffer = buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8)
        return _read_storage(layout, part, buffer), buffer

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @functools.cached_property
    def _metadata(self) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            content = read_with_retries(path.read_bytes, path)
            metadata = _RestrictedUnpickler(io.BytesIO(content)).load()
            _require_wellformed(metadata, path.parent)
        except UnreadableError:
            raise
        except Exception as error:  # unpickling a damaged file can raise almost anything
            raise WhetError(
                f"{path}: not the metadata of a checkpoint ({error}). Delete the checkpoint and use an older one"
            ) from None
        return metadata

    def require_tensors(self, names: Iterable[str]) -> None:
        """Raise a WhetError if one of these entries is not a tensor. Names that are missing are not its concern."""
        entries = self.read_metadata().state_dict_metadata
        for name in names:
            if name in entries and not isinstance(entries[name], TensorStorageMetadata):
                raise _pickled_entry_error(Path(self.path), name)


def _require_wellformed(metadata: Any, folder: Path) -> None:
    """Raise a ValueError unless an unpickled object is metadata whose files are in `folder`."""
    if type(metadata) is not Metadata or not isinstance(metadata.storage_meta, StorageMeta | None):
        raise ValueError("it holds something else")
    entries, stored = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise ValueError("its tables are not of the right type")
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise ValueError(f"the entry {name!r} is neither a tensor nor bytes")
        if isinstance(entry, TensorStorageMetadata) and not (
            isinstance(entry.size, torch.Size) and isinstance(entry.properties.dtype, torch.dtype)
        ):
            raise ValueError(f"the tensor {name!r} has no shape or no dtype")
    if not all(isinstance(index, MetadataIndex) for index in stored):
        raise ValueError("its tables are not of the right type")
    inside = folder.resolve()
    for file in {info.relative_path for info in stored.values()}:
        if not isinstance(file, str) or inside not in (folder / file).resolve().parents:
            raise ValueError(f"it names the file {file!r}, which is outside of the checkpoint")
    if any(not isinstance(n, int) or n < 0 for info in stored.values() for n in (info.offset, info.length)):
        raise ValueError("an offset or a length is not a number")


def _pickled_entry_error(folder: Path, name: str) -> WhetError:
    return WhetError(
        f"{folder / '.metadata'}: {name} is stored as a pickled object instead of a tensor, and unpickling it could "
        "run code. whet does not write such checkpoints: do not trust this one, and use another"
    )


class _FileSlice(io.RawIOBase):
    """A byte range of a file, as a file."""

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


def _window(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _copy(stored: Tensor, target: Tensor, name: str) -> None:
    if target.shape != stored.shape:
        raise ValueError(f"{name}: {tuple(stored.shape)}, not {tuple(target.shape)}")
    target.copy_(stored)


def _read_storage(fake: Tensor, part: _FileSlice, buffer: Tensor) -> Tensor:
    """The tensor that `fake` describes, read into the memory of `buffer`."""
    storage = fake.untyped_storage()
    content = buffer[: storage.nbytes()]
    if len(content):
        part.seek(checkpoint_offset(storage))
        unread = memoryview(content.numpy())  # type: ignore[arg-type]
        while unread:
            count = part.readinto(unread)
            if not count:
                raise ValueError("the file ends in the middle of a tensor")
            unread = unread[count:]
    return content.view(fake.dtype).as_strided(fake.shape, fake.stride(), fake.storage_offset())


# Errors. torch wraps the errors of all ranks, KeyboardInterrupt included, into one CheckpointException.

_NOT_THE_CHECKPOINTS_FAULT = (UnreadableError, KeyboardInterrupt, torch.OutOfMemoryError)


class CheckpointReadError(Exception):
    """The files of a checkpoint do not hold the requested tensors. The text is the type of torch's error."""


def load_tensors(tensors: dict[str, Any], reader: SafeStorageReader, no_dist: bool = True) -> None:
    """Read into existing tensors. Raises CheckpointReadError if the checkpoint does not hold them; forged metadata, a
    failing disk, a lost rank and a stop request keep their own error types."""
    ignore_single_process_warning()
    reader.require_tensors(tensors)
    try:
        dcp_load(tensors, storage_reader=reader, no_dist=no_dist)
    except (Exception, CheckpointException) as error:
        causes = unwrap_errors(error)
        for cause in causes:
            if isinstance(cause, _NOT_THE_CHECKPOINTS_FAULT) or is_peer_failure(cause):
                raise cause from None
        raise CheckpointReadError(type(next(iter(causes), error)).__name__) from error


def unwrap_errors(error: BaseException) -> list[BaseException]:
    """The errors of the ranks inside a CheckpointException; any other error alone."""
    return [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


# Writer. Errors in the threads of FileSystemWriter(thread_count=4) get lost: with torch 2.13 a full disk gave a
# checkpoint without some of its tensors and no error. So each file is written by a call of its own.

_FILES_PER_RANK = 4  # written, hashed and read in parallel


class ParallelStorageWriter(FileSystemWriter):
    """FileSystemWriter that writes several files per rank in parallel, into an existing empty folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, thread_count=1, sync_files=True, per_thread_copy_ahead=0)  # tensors are on the host

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        Path(self.path).mkdir(exist_ok=True)  # without its parents: a run folder that was deleted is not made again
        return plan

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
    """Shares of about equal size: the largest tensor first, each to the smallest share so far."""
    shares: list[list[WriteItem]] = [[] for _ in range(_FILES_PER_RANK)]
    sizes = [0] * _FILES_PER_RANK
    for item in sorted(items, key=_item_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += max(1, _item_bytes(item))
    return [share for share in shares if share]


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
