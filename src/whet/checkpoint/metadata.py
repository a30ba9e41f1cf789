"""Reading torch's distributed checkpoints without trusting them.

Their `.metadata` is a pickle, and unpickling runs whatever code the file names. This reader allows the handful of
types that a checkpoint consists of and nothing else.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from whet.core.errors import WhetError

_THREADS = 4

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
    """torch's reader, with the restricted unpickler, several files at a time, and tensors taken from the files as the
    system maps them: torch's own reads each into memory twice."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(self._read, planner), files, files.values()))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, planner: LoadPlanner, path: str, items: list[ReadItem]) -> None:
        with (Path(self.path) / path).open("rb") as file:
            # private: torch wants memory that it could write to
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for item in items:
            about = self.storage_data[item.storage_index]
            if about.transform_descriptors:
                raise WhetError(f"{path}: is packed by {about.transform_descriptors}, which whet does not read")
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(mapped[about.offset : about.offset + about.length]))
                continue
            found = narrow_tensor_by_index(_tensor_in(mapped, about), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.shape != found.shape:
                raise ValueError(f"{item.storage_index.fqn}: {tuple(found.shape)} instead of {tuple(target.shape)}")
            target.copy_(found)
            planner.commit_tensor(item, target)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle makes Python say almost anything
            raise WhetError(
                f"{path}: not the metadata of a checkpoint ({error}). Delete the checkpoint and use an older one"
            ) from None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Part(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, mapped: mmap.mmap, start: int, length: int) -> None:
        self._mapped, self._start, self._length, self._at = mapped, start, length, 0

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
        count = max(0, min(len(buffer), self._length - self._at))
        first = self._start + self._at
        buffer[:count] = self._mapped[first : first + count]
        self._at += count
        return count


def _tensor_in(mapped: mmap.mmap, about: Any) -> Tensor:
    """A tensor that torch saved at this place, where it lies: torch reads what it is like and where its numbers are."""
    with FakeTensorMode():
        like = torch.load(_Part(mapped, about.offset, about.length), weights_only=True)  # type: ignore[arg-type]
    storage = like.untyped_storage()
    if not storage.nbytes():
        return torch.empty(like.shape, dtype=like.dtype)
    start = about.offset + storage._checkpoint_offset
    if start + storage.nbytes() > about.offset + about.length:
        raise ValueError("a tensor that is longer than its place")
    numbers = torch.frombuffer(mapped, dtype=torch.uint8, count=storage.nbytes(), offset=start)
    if numbers.data_ptr() % like.dtype.itemsize:
        numbers = numbers.clone()  # of another tensor's end
    return numbers.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
