"""safetensors files of a bounded size, written as the weights come."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from whet.core.files import write_json


class Shards:
    """Holds one file's weights at a time in memory. `close` gives the files the names that transformers looks for."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._now: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._places: dict[str, int] = {}
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """`tensor` is on the host."""
        if self._now and self._bytes + tensor.nbytes > self._size:
            self._write()
        shares = tensor.untyped_storage().nbytes() != tensor.nbytes  # safetensors refuses views of one memory
        self._now[name] = tensor.clone() if shares else tensor.contiguous()
        self._places[name] = self._count
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> None:
        self._write()
        names = [
            "model.safetensors" if self._count == 1 else f"model-{number:05d}-of-{self._count:05d}.safetensors"
            for number in range(1, self._count + 1)
        ]
        for number, name in enumerate(names):
            self._file(number).rename(self._folder / name)
        if self._count > 1:
            places = {weight: names[number] for weight, number in self._places.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            write_json(self._folder / "model.safetensors.index.json", index)

    def _write(self) -> None:
        if self._now:
            save_file(self._now, self._file(self._count), metadata={"format": "pt"})
            self._now, self._bytes = {}, 0
            self._count += 1

    def _file(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
