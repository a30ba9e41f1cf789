"""safetensors files written tensor by tensor: only one is ever in memory.

Eight bytes, the length of the header; the header, JSON with the type, shape and place of each tensor; then the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from whet.core.files import write_json

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_LARGEST = 5 * 10**9


class Shards:
    """Weights of known shapes and one type, in files of at most `largest` bytes. Each is written once, in any order
    within the order of files."""

    def __init__(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, largest: int = _LARGEST
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
                "dtype": _NAMES[self._dtype], "shape": list(self._shapes[name]), "data_offsets": [place, end],
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
