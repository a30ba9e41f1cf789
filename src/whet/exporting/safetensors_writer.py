"""Sharded safetensors files, written one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from whet.core.files import write_json

# safetensors files of a bounded size, written weight by weight: the library's own writer wants a whole file in memory.
#
# A file is the length of its header in 8 bytes, the header in JSON, padded with blanks, and the numbers of each weight in
# a row. Room for the header is left at the beginning and filled in at the end; where it is used up, a new file begins.

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_MIN_HEADER_BYTES, _DATA_BYTES_PER_HEADER_BYTE = 2**14, 5000


class StreamingSafetensorsWriter:
    """Weights go to the disk as they come. `close` gives the files the names that transformers looks for."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._header_room = (_MIN_HEADER_BYTES + size // _DATA_BYTES_PER_HEADER_BYTE) // 8 * 8
        self._file: IO[bytes] | None = None
        self._header: dict[str, Any] = {}
        self._header_bytes = self._bytes = self._total = 0
        self._places: dict[str, int] = {}
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """`tensor` is on the host."""
        begin = 0 if self._file is None else self._bytes
        entry = {
            "dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]
        }  # fmt: skip
        described = len(json.dumps({name: entry})) + 2
        full = self._bytes + tensor.nbytes > self._size or self._header_bytes + described > self._header_room
        if self._file is not None and full:
            self._finish()
            entry["data_offsets"] = [0, tensor.nbytes]
        if self._file is None:
            self._begin()
        assert self._file is not None
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._header[name] = entry
        self._header_bytes += described
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes
        self._places[name] = self._count

    def close(self) -> None:
        if self._file is not None:
            self._finish()
        names = [
            "model.safetensors" if self._count == 1 else f"model-{number:05d}-of-{self._count:05d}.safetensors"
            for number in range(1, self._count + 1)
        ]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        if self._count > 1:
            places = {weight: names[number] for weight, number in self._places.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            write_json(self._folder / "model.safetensors.index.json", index)

    def _begin(self) -> None:
        self._file = self._part(self._count).open("wb")
        self._file.seek(8 + self._header_room)
        self._header, self._bytes = {"__metadata__": {"format": "pt"}}, 0
        self._header_bytes = len(json.dumps(self._header))

    def _finish(self) -> None:
        assert self._file is not None
        header = json.dumps(self._header).encode().ljust(self._header_room)
        assert len(header) == self._header_room
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.close()
        self._file = None
        self._count += 1

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


# safetensors files written tensor by tensor: only one is ever in memory.
#
# Eight bytes, the length of the header; the header, JSON with the type, shape and place of each tensor; then the tensors.

_FLOAT_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_MAX_SHARD_BYTES = 5 * 10**9


class PreallocatedSafetensorsWriter:
    """Weights of known shapes and one type, in files of at most `largest` bytes. Each is written once, in any order
    within the order of files."""

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, largest: int = _MAX_SHARD_BYTES
    ) -> None:
        self._folder, self._dtype, self._shapes = folder, dtype, dict(shapes)
        groups: list[list[str]] = [[]]
        taken = 0
        for name, shape in shapes.items():
            size = math.prod(shape) * dtype.itemsize
            if groups[-1] and taken + size > largest:
                groups.append([])
                taken = 0
            groups[-1].append(name)
            taken += size
        self._file_of, self._at = dict[str, Path](), dict[str, int]()
        for number, names in enumerate(groups, 1):
            file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._begin(folder / file, names)
        self.total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        if len(groups) > 1:
            written = {
                "metadata": {"total_size": self.total},
                "weight_map": {n: p.name for n, p in self._file_of.items()},
            }
            write_json(folder / "model.safetensors.index.json", written)

    def _begin(self, path: Path, names: list[str]) -> None:
        """The header, and room for the rest."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name in names:
            end = place + math.prod(self._shapes[name]) * self._dtype.itemsize
            header[name] = {
                "dtype": _FLOAT_DTYPE_NAMES[self._dtype], "shape": list(self._shapes[name]), "data_offsets": [place, end],
            }  # fmt: skip
            place = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + place)
        for name in names:
            self._file_of[name], self._at[name] = path, 8 + len(text) + header[name]["data_offsets"][0]

    def write(self, name: str, tensor: Tensor) -> None:
        assert tuple(tensor.shape) == self._shapes[name], name
        ready = tensor.detach().to("cpu", self._dtype).contiguous()
        file: IO[bytes]
        with self._file_of[name].open("r+b") as file:
            file.seek(self._at[name])
            file.write(ready.reshape(-1).view(torch.uint8).numpy().data)
