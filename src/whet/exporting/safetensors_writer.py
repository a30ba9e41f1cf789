"""Sharded safetensors files, written one tensor at a time: the library's own writer needs a whole file in memory.

A file is the length of its header (8 bytes), the header (JSON, padded with blanks), and the tensors one after another.
The space for the header is reserved at the beginning and filled in at the end. A shard ends when its data or its header
is full.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from whet.core.files import write_json

FLOAT_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPE_NAMES = {
    **FLOAT_DTYPE_NAMES, torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_MIN_HEADER_BYTES, _DATA_BYTES_PER_HEADER_BYTE = 2**14, 5000


class StreamingSafetensorsWriter:
    """Writes each tensor to disk as it is added. `close` renames the shards to the names that transformers expects."""

    def __init__(self, folder: Path, shard_size: int = 5 * 10**9) -> None:
        self._folder, self._shard_size = folder, shard_size
        self._header_size = (_MIN_HEADER_BYTES + shard_size // _DATA_BYTES_PER_HEADER_BYTE) // 8 * 8
        self._file: IO[bytes] | None = None
        self._header: dict[str, Any] = {}
        self._header_bytes = self._bytes = self._total_bytes = 0
        self._shard_of: dict[str, int] = {}
        self._shards = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor that is in host memory."""
        begin = 0 if self._file is None else self._bytes
        entry = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        entry_bytes = len(json.dumps({name: entry})) + 2
        full = self._bytes + tensor.nbytes > self._shard_size or self._header_bytes + entry_bytes > self._header_size
        if self._file is not None and full:
            self._finish_shard()
            entry["data_offsets"] = [0, tensor.nbytes]
        if self._file is None:
            self._begin_shard()
        assert self._file is not None
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._header[name] = entry
        self._header_bytes += entry_bytes
        self._bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self._shard_of[name] = self._shards

    def close(self) -> None:
        if self._file is not None:
            self._finish_shard()
        names = [
            "model.safetensors" if self._shards == 1 else f"model-{number:05d}-of-{self._shards:05d}.safetensors"
            for number in range(1, self._shards + 1)
        ]
        for number, name in enumerate(names):
            self._temporary(number).rename(self._folder / name)
        if self._shards > 1:
            weight_map = {weight: names[number] for weight, number in self._shard_of.items()}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            write_json(self._folder / "model.safetensors.index.json", index)

    def _begin_shard(self) -> None:
        self._file = self._temporary(self._shards).open("wb")
        self._file.seek(8 + self._header_size)
        self._header, self._bytes = {"__metadata__": {"format": "pt"}}, 0
        self._header_bytes = len(json.dumps(self._header))

    def _finish_shard(self) -> None:
        assert self._file is not None
        header = json.dumps(self._header).encode().ljust(self._header_size)
        assert len(header) == self._header_size
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()
        self._file = None
        self._shards += 1

    def _temporary(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
