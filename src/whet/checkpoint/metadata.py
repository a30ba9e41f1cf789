"""Reading torch's distributed checkpoints without trusting them.

Their `.metadata` is a pickle, and unpickling runs whatever code the file names. This reader allows the handful of
types that a checkpoint consists of and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from whet.core.errors import WhetError
from whet.core.patience import UnreadableError, read_patiently

_THREADS = 4  # each holds a tensor twice while it reads it

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
    """torch's reader, with the restricted unpickler, and several files read at a time."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)

        def read(name: str) -> None:  # a second time, it puts the same numbers in the same places
            part = LoadPlan(files[name])
            read_patiently(lambda: super(SafeReader, self).read_data(part, planner), Path(self.path) / name)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read, files))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Read at once: torch's view of the file is read through Python, piece by piece."""
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))

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
