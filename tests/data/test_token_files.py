"""Files that others wrote, made here byte by byte from the description of the layout."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from whet.core.errors import WhetError
from whet.data.config import MaskRules
from whet.data.indexed_dataset import IndexedReader
from whet.data.read.token_files import count_documents, read_token_file

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "f", 7: "d", 8: "H"}


def foreign(
    prefix: Path, flat: list[int], sizes: list[int], starts: list[int], doc_idx: list[int], code: int = 8
) -> Path:
    """Sequences of `sizes` tokens that start at `starts` in `flat`."""
    letter = LETTERS[code]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(flat)}{letter}", *flat))
    pointers = [start * struct.calcsize(letter) for start in starts]
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(doc_idx))
        + struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(doc_idx)}q", *sizes, *pointers, *doc_idx)
    )  # fmt: skip
    return prefix


def ids(path: Path, mask: MaskRules | None = None) -> list[list[int]]:
    return [document.ids.tolist() for document in read_token_file(path, mask)]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_every_kind_of_whole_number_is_read(tmp_path: Path, code: int) -> None:
    path = foreign(tmp_path / "text_document", [7, 50, 7, 8, 60, 8, 3, 9], [7, 1], [0, 7], [0, 1, 2], code)
    documents = list(read_token_file(path, MaskRules(pairs=[(7, 7)], alternating=[8])))
    assert [document.ids.tolist() for document in documents] == [[7, 50, 7, 8, 60, 8, 3], [9]]
    assert [document.loss.tolist() for document in documents] == [[0, 0, 0, 0, 1, 1, 1], [0]]
    assert documents[0].ids.dtype == np.int32
    assert [str(document.origin) for document in documents] == [f"{path}:1", f"{path}:2"]
    assert count_documents(path) == 2


def test_a_path_may_name_either_file_or_none_and_hold_dots(tmp_path: Path) -> None:
    path = foreign(tmp_path / "data.v1_text", [5, 6], [2], [0], [0, 1])
    for name in ("data.v1_text", "data.v1_text.bin", "data.v1_text.idx"):
        assert ids(tmp_path / name) == [[5, 6]]
    assert [document.loss.tolist() for document in read_token_file(path, None)] == [[0, 1]]


def test_a_document_is_all_its_sequences(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a", [1, 2, 3, 4, 5], [2, 1, 2, 0], [0, 2, 3, 5], [0, 2, 2, 3, 4])
    assert ids(path) == [[1, 2, 3], [], [4, 5], []]
    assert count_documents(path) == 4
    masks = [document.loss.tolist() for document in read_token_file(path, MaskRules(pairs=[(2, 3)]))]
    assert masks == [[0, 0, 0], [], [0, 1], []]  # rules see the document, not its parts


def test_sequences_may_be_shared_and_in_any_order(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a", [1, 2, 3, 4, 5], [2, 3, 2], [3, 0, 3], [0, 1, 2, 3])
    assert ids(path) == [[4, 5], [1, 2, 3], [4, 5]]
    with pytest.raises(WhetError, match="damaged at sequence"):
        list(map(IndexedReader(path).__getitem__, range(3)))  # whet's own files are back to back


@pytest.mark.parametrize(("code", "kind"), [(6, "float32"), (7, "float64")])
def test_numbers_with_a_point_are_no_tokens(tmp_path: Path, code: int, kind: str) -> None:
    path = foreign(tmp_path / "a", [1], [1], [0], [0, 1], code)
    with pytest.raises(WhetError, match=rf"a\.idx: .*{kind}.*no token ids"):
        list(read_token_file(path, None))


@pytest.mark.parametrize(("code", "token"), [(4, -1), (5, 2**31), (2, -5)])
def test_what_is_no_id_is_refused_with_its_document(tmp_path: Path, code: int, token: int) -> None:
    path = foreign(tmp_path / "a", [1, token], [1, 1], [0, 1], [0, 1, 2], code)
    with pytest.raises(WhetError, match=rf"a:2: the document holds {token}, which is no token id"):
        list(read_token_file(path, None))


@pytest.mark.parametrize("doc_idx", [[], [0], [0, 1], [1, 2], [0, 3]])
def test_a_doc_idx_that_leaves_sequences_out_is_refused(tmp_path: Path, doc_idx: list[int]) -> None:
    path = foreign(tmp_path / "a", [1, 2], [1, 1], [0, 1], doc_idx)
    with pytest.raises(WhetError, match=r"a\.idx: its doc_idx does not run from 0 to 2"):
        count_documents(path)


def test_a_doc_idx_that_runs_back_is_refused(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a", [1, 2], [1, 1], [0, 1], [0, 2, 1, 2])
    with pytest.raises(WhetError, match=r"a\.idx: damaged: document 2 is said to be sequences 2 to 1"):
        ids(path)


@pytest.mark.parametrize(
    ("sizes", "starts"), [([9, 1], [0, 1]), ([1, 1], [-1, 1]), ([1, 1], [7, 1]), ([-1, 1], [0, 1])]
)
def test_a_sequence_outside_of_the_file_is_refused(tmp_path: Path, sizes: list[int], starts: list[int]) -> None:
    path = foreign(tmp_path / "a", [1, 2], sizes, starts, [0, 1, 2])
    with pytest.raises(WhetError, match=r"a\.idx: damaged at sequence 0"):
        ids(path)


def test_a_sequence_that_starts_inside_a_token_is_refused(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a", [1, 2], [1], [0], [0, 1])
    raw = bytearray(Path(f"{path}.idx").read_bytes())
    raw[34 + 4] = 1  # of the byte offset
    Path(f"{path}.idx").write_bytes(raw)
    with pytest.raises(WhetError, match=r"a\.idx: damaged at sequence 0"):
        ids(path)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    path = foreign(tmp_path / "a", [1, 2, 3], [2, 1], [0, 2], [0, 1, 2])
    Path(f"{path}.bin").write_bytes(Path(f"{path}.bin").read_bytes()[:-cut])
    with pytest.raises(WhetError, match=rf"a\.bin: {6 - cut} bytes where the index says 6"):
        ids(path)


def test_a_file_without_documents_has_none(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a", [], [], [], [0])
    assert (ids(path), count_documents(path)) == ([], 0)


def test_opening_a_great_file_reads_nothing_of_it(tmp_path: Path) -> None:
    """Twenty million sequences, 400 MB of index: a sparse file, so that only what is touched costs."""
    number, header = 20_000_000, b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 20_000_000, 20_000_001)
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(header)
        file.truncate(34 + 12 * number + 8 * (number + 1))
        file.seek(-8, 2)
        file.write(struct.pack("<q", number))
    (tmp_path / "a.bin").touch()
    start = time.perf_counter()
    assert count_documents(tmp_path / "a") == number
    assert time.perf_counter() - start < 0.1
