"""safetensors files of a bounded size, written weight by weight: the library's own writer wants a whole file in memory.

A file is the length of its header in 8 bytes, the header in JSON, padded with blanks, and the numbers of each weight in
a row. Room for the header is left at the beginning and filled in at the end; where it is used up, a new file begins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from whet.core.files import write_json

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_SMALLEST_HEADER, _DATA_TO_HEADER = 2**14, 5000


class Shards:
    """Weights go to the disk as they come. `close` gives the files the names that transformers looks for."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._header_room = (_SMALLEST_HEADER + size // _DATA_TO_HEADER) // 8 * 8
        self._file: IO[bytes] | None = None
        self._header: dict[str, Any] = {}
        self._header_bytes = self._bytes = self._total = 0
        self._places: dict[str, int] = {}
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """`tensor` is on the host."""
        begin = 0 if self._file is None else self._bytes
        entry = {
            "dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.nbytes]
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
