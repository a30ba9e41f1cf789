"""Reading torch's distributed checkpoints without trusting them.

Their `.metadata` is a pickle, and unpickling runs whatever code the file names. This reader allows the handful of
types that a checkpoint consists of and nothing else.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from whet.core.errors import WhetError
from whet.core.patience import UnreadableError, read_patiently

_THREADS = 4
_ONE_AT_A_TIME = threading.Lock()
"""A mode of torch notes for the whole process that there is one, and on leaving what was noted before: of two that
overlap, the second would leave the note of the first behind for good."""

_NAMES = {
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and (is_dtype or (module, name) in _NAMES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


class SafeReader(FileSystemReader):
    """torch's reader, with the restricted unpickler, several files at a time, and each tensor read once: torch's own
    reads it into memory twice."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)

        def read(name: str) -> None:  # a second time, it puts the same numbers in the same places
            file = Path(self.path) / name
            read_patiently(lambda: self._read(planner, file, files[name]), file)

        with ThreadPoolExecutor(_THREADS) as pool:
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
                part = _Part(file, about.offset, about.length)
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(part.read()))
                    continue
                with _ONE_AT_A_TIME, FakeTensorMode():  # torch tells what the tensor is like and where its numbers are
                    like = torch.load(part, weights_only=True)  # type: ignore[arg-type]
                if len(room) < like.untyped_storage().nbytes():
                    room = torch.empty(like.untyped_storage().nbytes(), dtype=torch.uint8)
                found = narrow_tensor_by_index(_filled(like, part, room), item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                if target.shape != found.shape:
                    raise ValueError(f"{item.storage_index.fqn}: {tuple(found.shape)}, not {tuple(target.shape)}")
                target.copy_(found)
                planner.commit_tensor(item, target)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            content = read_patiently(path.read_bytes, path)
            metadata = _Unpickler(io.BytesIO(content)).load()
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


class _Part(io.RawIOBase):
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


def _filled(like: Tensor, part: _Part, room: Tensor) -> Tensor:
    """A tensor with the numbers that the file has for it, in the memory of `room`."""
    storage = like.untyped_storage()
    numbers = room[: storage.nbytes()]
    if len(numbers):
        part.seek(int(storage._checkpoint_offset or 0))
        wanted = memoryview(numbers.numpy())  # type: ignore[arg-type]
        while wanted:
            count = part.readinto(wanted)
            if not count:
                raise ValueError("a tensor that is longer than its place")
            wanted = wanted[count:]
    return numbers.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
