"""Reader and writer of Megatron's `MMapIndexedDataset`, version 1: numbers in a `.bin`, sequence lengths in an `.idx`.

GPT-NeoX, Megatron-LM and NeMo read these files. Layout of the `.idx`, little-endian:

    magic "MMIDIDX\\0\\0" · u64 version = 1 · u8 dtype code · u64 sequences · u64 length of doc_idx
    int32 sizes[sequences] · int64 byte offsets[sequences] · int64 doc_idx[…], which starts at 0

The `.bin` holds the numbers, back to back. Both files are memory-mapped, so opening is O(1) in their size.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float32, 7: np.float64, 8: np.uint16}


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.int32]:
    """2 bytes per token where the vocabulary fits; the limit is Megatron's."""
    return np.uint16 if vocabulary < 65_500 else np.int32


class IndexedWriter:
    """Writes sequences in order. The pair is readable only after `finish`, which writes the index."""

    def __init__(self, prefix: Path, dtype: type[np.generic]) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._bin = prefix.with_suffix(".bin").open("wb")
        self._sizes: list[NDArray[np.int32]] = []

    def add(self, numbers: NDArray[np.generic], sizes: NDArray[np.int32]) -> None:
        """Append sequences stored back to back in `numbers`."""
        self._bin.write(numbers.astype(self._dtype, copy=False).tobytes())
        self._sizes.append(np.asarray(sizes, dtype=np.int32))

    def close(self) -> None:
        """Close the file without an index: the sequences stay unreadable."""
        self._bin.close()

    def finish(self) -> None:
        """Write the index."""
        self._bin.close()
        sizes = np.concatenate([np.empty(0, np.int32), *self._sizes])
        offsets = np.zeros(len(sizes), dtype=np.int64)
        np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
        code = next(code for code, dtype in _DTYPES.items() if np.dtype(dtype) == self._dtype)
        with self._prefix.with_suffix(".idx").open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
            for array in (sizes, offsets * self._dtype.itemsize, np.arange(len(sizes) + 1, dtype=np.int64)):
                file.write(array.tobytes())


class IndexedReader:
    """Random access to the sequences of a `.bin/.idx` pair."""

    def __init__(self, prefix: Path, contiguous: bool = True) -> None:
        """`contiguous`: require sequences back to back, as whet writes them. Other writers may share or reorder
        sequences; with `contiguous=False` each one is bounds-checked when it is read."""
        self.index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        self._contiguous = contiguous
        count, documents, self.dtype = _read_header(self.index, data)
        raw = np.memmap(self.index, mode="r", offset=_HEADER.size) if count + documents else np.empty(0, np.uint8)
        self.sizes: NDArray[np.int32] = raw[: 4 * count].view(np.int32)
        self._offsets: NDArray[np.int64] = raw[4 * count : 12 * count].view(np.int64)
        self._doc_idx: NDArray[np.int64] = raw[12 * count :].view(np.int64)
        found = data.stat().st_size
        end = int(self._offsets[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if count else 0
        if found < end or found % self.dtype.itemsize or (contiguous and found != end):
            raise WhetError(
                f"{data}: {found} bytes, but the index describes {end}: truncated, or the file of another index"
            )
        mapped = np.memmap(data, mode="r", dtype=self.dtype) if found else np.empty(0, self.dtype)
        self._data: NDArray[np.generic] = mapped.view(np.ndarray)  # slicing a memmap takes 2 µs, an ndarray 0.1 µs

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> NDArray[np.generic]:
        offset, length = int(self._offsets[number]), int(self.sizes[number])
        start, rest = divmod(offset, self._data.itemsize)
        end = start + length
        follows = len(self._data) if number + 1 == len(self) else int(self._offsets[number + 1]) // self._data.itemsize
        if rest or start < 0 or length < 0 or end > len(self._data) or (self._contiguous and end != follows):
            raise WhetError(f"{self.index}: corrupt at sequence {number}")
        return self._data[start:end]

    def gather(self, numbers: NDArray[np.integer], out: NDArray[np.generic]) -> None:
        """Copy these sequences back to back into `out`, which has their total length, converting to its dtype."""
        if len(numbers) == 0:
            return
        size, last = self._data.itemsize, len(self) - 1
        starts = self._offsets[numbers] // size
        ends = np.where(numbers < last, self._offsets[np.minimum(numbers + 1, last)] // size, len(self._data))
        wrong = ends - starts != self.sizes[numbers]
        if wrong.any():
            raise WhetError(f"{self.index}: corrupt at sequence {numbers[wrong.argmax()]}")
        parts = [self._data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        np.concatenate(parts, out=out, casting="safe")

    @property
    def documents(self) -> NDArray[np.int64]:
        """Document i consists of the sequences `documents[i]` to `documents[i + 1] - 1`."""
        bounds = self._doc_idx
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(self):
            raise WhetError(
                f"{self.index}: doc_idx must run from 0 to {len(self)}, the number of sequences, or some sequences "
                "belong to no document. Write the file again and end every document (Megatron: end_document)"
            )
        return bounds


def _read_header(index: Path, data: Path) -> tuple[int, int, np.dtype[np.generic]]:
    """(number of sequences, length of doc_idx, dtype of the numbers)."""
    for file in (index, data):
        if not file.exists():
            raise WhetError(f"{file}: no such file")
    with index.open("rb") as opened:
        header = opened.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise WhetError(f"{index}: not a Megatron index: starts with {header[:9]!r}, expected {_MAGIC!r}")
    _, version, code, count, documents = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise WhetError(
            f"{index}: unsupported version {version} with dtype code {code}; whet reads version 1, dtypes 1 to 8"
        )
    if index.stat().st_size != _HEADER.size + 12 * count + 8 * documents:
        raise WhetError(f"{index}: the file is truncated or corrupt")
    return count, documents, np.dtype(_DTYPES[code])
