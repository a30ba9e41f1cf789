"""Megatron's indexed datasets, checked against a reader written here from the description of the layout."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.indexed_dataset import IndexedReader, IndexedWriter, token_dtype

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "f", 7: "d", 8: "H"}  # dtype code → struct letter


def read_by_hand(prefix: Path) -> tuple[int, list[list[int]]]:
    """(dtype code, sequences), parsed byte by byte."""
    raw = prefix.with_suffix(".idx").read_bytes()
    data = prefix.with_suffix(".bin").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    assert int.from_bytes(raw[9:17], "little") == 1
    code = raw[17]
    count, documents = (int.from_bytes(raw[at : at + 8], "little") for at in (18, 26))
    sizes = struct.unpack_from(f"<{count}i", raw, 34)
    pointers = struct.unpack_from(f"<{count}q", raw, 34 + 4 * count)
    doc_idx = struct.unpack_from(f"<{documents}q", raw, 34 + 12 * count)
    assert len(raw) == 34 + 12 * count + 8 * documents
    assert list(doc_idx) == list(range(count + 1))
    sequences = [
        list(struct.unpack_from(f"<{n}{FORMATS[code]}", data, at)) for n, at in zip(sizes, pointers, strict=True)
    ]
    assert len(data) == sum(sizes) * struct.calcsize(FORMATS[code])
    return code, sequences


def write(prefix: Path, sequences: list[list[int]], dtype: type[np.generic] = np.uint16) -> Path:
    writer = IndexedWriter(prefix, dtype)
    for sequence in sequences:
        writer.add(np.array(sequence, dtype=np.int32), np.array([len(sequence)], dtype=np.int32))
    writer.finish()
    return prefix


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype_code=st.sampled_from([(np.uint8, 1), (np.uint16, 8), (np.int32, 4)]),
    sequences=st.lists(st.lists(st.integers(0, 255), max_size=8), max_size=8),
    big=st.booleans(),
)
def test_what_is_written_is_read_back_by_both_readers(
    tmp_path_factory: pytest.TempPathFactory,
    dtype_code: tuple[type[np.generic], int],
    sequences: list[list[int]],
    big: bool,
) -> None:
    dtype, code = dtype_code
    if big and dtype is not np.uint8:
        top = int(np.iinfo(dtype).max)
        sequences = [[top - value for value in sequence] for sequence in sequences]
    prefix = write(tmp_path_factory.mktemp("index") / "tokens", sequences, dtype)
    assert read_by_hand(prefix) == (code, sequences)
    reader = IndexedReader(prefix)
    assert len(reader) == len(sequences)
    assert reader.sizes.tolist() == [len(sequence) for sequence in sequences]
    assert [reader[number].tolist() for number in range(len(reader))] == sequences
    assert all(reader[number].dtype == dtype for number in range(len(reader)))


@pytest.mark.parametrize("code", FORMATS)
def test_every_dtype_code_is_read(tmp_path: Path, code: int) -> None:
    sequences = [[1, 2, 3], [], [100]]
    prefix = tmp_path / "foreign"
    flat = [value for sequence in sequences for value in sequence]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(flat)}{FORMATS[code]}", *flat))
    item = struct.calcsize(FORMATS[code])
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ3i3q4q", 1, code, 3, 4, 3, 0, 1, 0, 3 * item, 3 * item, 0, 1, 2, 3)
    )
    reader = IndexedReader(prefix)
    assert [reader[number].tolist() for number in range(3)] == sequences


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(1, np.uint16), (65_499, np.uint16), (65_500, np.int32), (200_000, np.int32)]
)
def test_two_bytes_per_token_where_the_vocabulary_fits(vocabulary: int, dtype: type[np.generic]) -> None:
    assert token_dtype(vocabulary) is dtype


def test_nothing_is_readable_before_finish(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "tokens", np.uint8)
    writer.add(np.array([1]), np.array([1], dtype=np.int32))
    assert not (tmp_path / "tokens.idx").exists()
    writer.finish()
    assert (tmp_path / "tokens.idx").exists()


@pytest.mark.parametrize("keep", [0, 5, 9, 33, 34, 50, -1])
def test_a_truncated_index_is_an_error_that_names_the_file(tmp_path: Path, keep: int) -> None:
    prefix = write(tmp_path / "tokens", [[1, 2], [3]])
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:keep])
    with pytest.raises(WhetError, match=r"tokens\.idx: "):
        IndexedReader(prefix)


def test_an_index_with_extra_bytes_is_an_error(tmp_path: Path) -> None:
    prefix = write(tmp_path / "tokens", [[1, 2], [3]])
    with prefix.with_suffix(".idx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(WhetError, match=r"tokens\.idx: the file is truncated or corrupt"):
        IndexedReader(prefix)


@pytest.mark.parametrize(
    ("place", "byte", "message"), [(0, 0, "not a Megatron index"), (9, 2, "version 2"), (17, 9, "dtype code 9")]
)
def test_an_unsupported_index_is_an_error(tmp_path: Path, place: int, byte: int, message: str) -> None:
    prefix = write(tmp_path / "tokens", [[1, 2], [3]])
    index = prefix.with_suffix(".idx")
    raw = bytearray(index.read_bytes())
    raw[place] = byte
    index.write_bytes(raw)
    with pytest.raises(WhetError, match=rf"tokens\.idx: .*{message}"):
        IndexedReader(prefix)


@pytest.mark.parametrize("change", [-1, 1])
def test_data_of_another_length_than_the_index_is_an_error(tmp_path: Path, change: int) -> None:
    prefix = write(tmp_path / "tokens", [[1, 2], [3]])
    data = prefix.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:change] if change < 0 else data.read_bytes() + b"\0")
    with pytest.raises(WhetError, match=rf"tokens\.bin: {6 + change} bytes, but the index describes 6"):
        IndexedReader(prefix)


def test_offsets_do_not_wrap_at_two_gigabytes(tmp_path: Path) -> None:
    """Sizes are 32-bit; their cumulative sum is not."""
    writer = IndexedWriter(tmp_path / "tokens", np.uint16)
    writer._sizes = [np.array([2**31 - 1, 2**31 - 1, 5], np.int32)]  # as if so much had been added
    writer.finish()
    raw = (tmp_path / "tokens.idx").read_bytes()
    assert struct.unpack_from("<3q", raw, 34 + 12) == (0, 2 * (2**31 - 1), 4 * (2**31 - 1))
