"""Token files written here byte by byte from the description of the layout, and GPT-NeoX's mask rules on them."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.config import MaskRules, Source
from whet.data.conversation import TokenizedDocument
from whet.data.indexed_dataset import IndexedReader, IndexedWriter
from whet.data.read.containers.token_files import TokenFile, describe_mask_rules, loss_mask_from_rules
from whet.data.read.sources import SourceReader, expected_records, read_source, source_fingerprint

from .test_containers import GOOD, read

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "f", 7: "d", 8: "H"}


def write_file(
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


def documents(path: Path, mask: MaskRules | None = None) -> list[TokenizedDocument]:
    file = TokenFile(str(path), path, mask)
    return [file.document(number) for number in range(len(file))]


def ids(path: Path) -> list[list[int]]:
    return [document.ids.tolist() for document in documents(path)]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_every_integer_dtype_is_read(tmp_path: Path, code: int) -> None:
    path = write_file(tmp_path / "text_document", [7, 50, 7, 8, 60, 8, 3, 9], [7, 1], [0, 7], [0, 1, 2], code)
    found = documents(path, MaskRules(pairs=[(7, 7)], alternating=[8]))
    assert [document.ids.tolist() for document in found] == [[7, 50, 7, 8, 60, 8, 3], [9]]
    assert [document.loss.tolist() for document in found] == [[0, 0, 0, 0, 1, 1, 1], [0]]
    assert found[0].ids.dtype == np.int32
    assert [str(document.origin) for document in found] == [f"{path}:1", f"{path}:2"]
    file = TokenFile(str(path), path, MaskRules(pairs=[(7, 7)], alternating=[8]))
    assert len(file) == file.count() == 2
    assert file.loss(0).tolist() == found[0].loss.tolist()


def test_a_source_may_be_named_without_the_suffix(tmp_path: Path) -> None:
    """As in GPT-NeoX's train_data_paths; errors and the ledger name the file itself."""
    path = write_file(tmp_path / "data.v1_text_document", [7, 5, 7, 8, 6, 8], [6], [0], [0, 1])
    (document,) = [each for _, each in enumerate(read_source(Source(path=str(path))))]
    assert document.ids.tolist() == [7, 5, 7, 8, 6, 8]
    assert str(document.origin) == f"{path}.bin:1"
    Path(f"{path}.idx").unlink()
    with pytest.raises(WhetError, match=r"data\.v1_text_document\.idx"):
        list(read_source(Source(path=str(path))))


def test_the_path_may_have_either_suffix_or_none_and_dots(tmp_path: Path) -> None:
    path = write_file(tmp_path / "data.v1_text", [5, 6], [2], [0], [0, 1])
    for name in ("data.v1_text", "data.v1_text.bin", "data.v1_text.idx"):
        assert ids(tmp_path / name) == [[5, 6]]
    assert [document.loss.tolist() for document in documents(path)] == [[0, 1]]


def test_a_document_is_all_its_sequences(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", [1, 2, 3, 4, 5], [2, 1, 2, 0], [0, 2, 3, 5], [0, 2, 2, 3, 4])
    assert ids(path) == [[1, 2, 3], [], [4, 5], []]
    assert len(TokenFile(str(path), path)) == 4
    masks = [document.loss.tolist() for document in documents(path, MaskRules(pairs=[(2, 3)]))]
    assert masks == [[0, 0, 0], [], [0, 1], []]  # rules apply to the document, not to its sequences


def test_sequences_may_be_shared_and_in_any_order(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", [1, 2, 3, 4, 5], [2, 3, 2], [3, 0, 3], [0, 1, 2, 3])
    assert ids(path) == [[4, 5], [1, 2, 3], [4, 5]]
    with pytest.raises(WhetError, match="corrupt at sequence"):
        list(map(IndexedReader(path).__getitem__, range(3)))  # whet's own files are back to back


@pytest.mark.parametrize(("code", "kind"), [(6, "float32"), (7, "float64")])
def test_floats_are_rejected(tmp_path: Path, code: int, kind: str) -> None:
    path = write_file(tmp_path / "a", [1], [1], [0], [0, 1], code)
    with pytest.raises(WhetError, match=rf"a\.idx: .*{kind}.*not token ids"):
        documents(path)


@pytest.mark.parametrize(("code", "token"), [(4, -1), (5, 2**31), (2, -5)])
def test_an_invalid_token_id_is_rejected_with_its_document(tmp_path: Path, code: int, token: int) -> None:
    path = write_file(tmp_path / "a", [1, token], [1, 1], [0, 1], [0, 1, 2], code)
    with pytest.raises(WhetError, match=rf"a:2: {token} is not a token id"):
        documents(path)


@pytest.mark.parametrize("doc_idx", [[], [0], [0, 1], [1, 2], [0, 3]])
def test_a_doc_idx_that_omits_sequences_is_rejected(tmp_path: Path, doc_idx: list[int]) -> None:
    path = write_file(tmp_path / "a", [1, 2], [1, 1], [0, 1], doc_idx)
    with pytest.raises(WhetError, match=r"a\.idx: doc_idx must run from 0 to 2"):
        TokenFile(str(path), path)


def test_a_decreasing_doc_idx_is_rejected(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", [1, 2], [1, 1], [0, 1], [0, 2, 1, 2])
    with pytest.raises(WhetError, match=r"a\.idx: corrupt: document 2 has sequences 2 to 1"):
        ids(path)


@pytest.mark.parametrize(
    ("sizes", "starts"), [([9, 1], [0, 1]), ([1, 1], [-1, 1]), ([1, 1], [7, 1]), ([-1, 1], [0, 1])]
)
def test_a_sequence_outside_the_file_is_rejected(tmp_path: Path, sizes: list[int], starts: list[int]) -> None:
    path = write_file(tmp_path / "a", [1, 2], sizes, starts, [0, 1, 2])
    with pytest.raises(WhetError, match=r"a\.idx: corrupt at sequence 0"):
        ids(path)


def test_a_misaligned_sequence_is_rejected(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", [1, 2], [1], [0], [0, 1])
    raw = bytearray(Path(f"{path}.idx").read_bytes())
    raw[34 + 4] = 1  # of the byte offset
    Path(f"{path}.idx").write_bytes(raw)
    with pytest.raises(WhetError, match=r"a\.idx: corrupt at sequence 0"):
        ids(path)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_truncated_file_is_rejected(tmp_path: Path, cut: int) -> None:
    path = write_file(tmp_path / "a", [1, 2, 3], [2, 1], [0, 2], [0, 1, 2])
    Path(f"{path}.bin").write_bytes(Path(f"{path}.bin").read_bytes()[:-cut])
    with pytest.raises(WhetError, match=rf"a\.bin: {6 - cut} bytes, but the index describes 6"):
        ids(path)


def test_a_file_without_documents_has_none(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", [], [], [], [0])
    assert ids(path) == []


def test_opening_a_large_file_does_not_read_it(tmp_path: Path) -> None:
    """20 million sequences, a 400 MB index: a sparse file, so only the pages that are read cost time."""
    number, header = 20_000_000, b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 20_000_000, 20_000_001)
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(header)
        file.truncate(34 + 12 * number + 8 * (number + 1))
        file.seek(-8, 2)
        file.write(struct.pack("<q", number))
    (tmp_path / "a.bin").touch()
    start = time.process_time()
    assert len(TokenFile("a", tmp_path / "a")) == number
    assert time.process_time() - start < 0.1


# Pretokenized sources


def write_tokens(prefix: Path, *documents: list[int]) -> None:
    writer = IndexedWriter(prefix, np.uint16)
    for document in documents:
        writer.add(np.array(document), np.array([len(document)], np.int32))
    writer.finish()


def test_documents_of_a_source_have_their_loss_mask(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [1, 2, 3, 4], [5, 3], [6])
    source = Source(path=str(tmp_path / "a.bin"), mask=MaskRules(individual=[3]))
    items = list(read_source(source))
    assert all(isinstance(item, TokenizedDocument) for item in items)
    assert [(item.ids.tolist(), item.loss.tolist(), str(item.origin)) for item in items] == [
        ([1, 2, 3, 4], [0, 1, 0, 1], f"{tmp_path}/a.bin:1"),
        ([5, 3], [0, 0], f"{tmp_path}/a.bin:2"),
        ([6], [0], f"{tmp_path}/a.bin:3"),
    ]
    assert "individual" in (SourceReader(source).description or "")
    assert "every token is supervised" in (SourceReader(Source(path=source.path)).description or "")
    assert expected_records(source) == 3
    before = source_fingerprint(source)
    assert before != source_fingerprint(Source(path=source.path))
    write_tokens(tmp_path / "a", [1, 2, 3, 4, 5, 3], [6])
    assert before != source_fingerprint(source)
    for options in ({"format": "text"}, {"where": "turns > 1"}, {"fields": {"text": "a"}}):
        with pytest.raises(WhetError, match=r"a\.bin"):
            read(tmp_path / "a.bin", **options)
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(WhetError, match=r"\.bin files have format: tokens, and no other files"):
        read(tmp_path / "a.jsonl", format="tokens")
    (tmp_path / "a.jsonl").unlink()
    assert len(read(tmp_path, format="tokens")) == 2


# Mask rules


def loss(ids: list[int], **rules: Any) -> list[int]:
    found = loss_mask_from_rules(np.array(ids, dtype=np.int32), MaskRules(**rules))
    assert found.dtype == np.uint8
    return found.tolist()


def test_the_examples_of_the_gpt_neox_documentation() -> None:
    """GPT-NeoX masks outputs, data[1:], with 1 for masked."""
    data = [9, 5, 2, 4, 1, 3, 1, 2, 3]
    assert [1 - bit for bit in loss(data, pairs=[(2, 3)])[1:]] == [0, 1, 1, 1, 1, 0, 1, 1]
    assert [1 - bit for bit in loss(data, individual=[2, 3, 5])[1:]] == [1, 1, 0, 0, 1, 0, 1, 1]
    data = [1, 2, 3, 1, 4, 5, 6, 1, 1, 1, 1]
    assert [1 - bit for bit in loss(data, alternating=[1])[1:]] == [0, 0, 0, 0, 0, 0, 1, 0, 1, 0]


def test_turns_between_markers() -> None:
    ids = [7, 50, 51, 7, 8, 60, 61, 8, 7, 52, 7, 8, 62, 8, 3]
    assert loss(ids, pairs=[(7, 7)]) == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    # the opening 8 is context; the closing one and the end of document are supervised
    assert loss(ids, pairs=[(7, 7)], alternating=[8]) == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("ids", "rules", "expected"),
    [
        ([5, 3, 6], {"eod": 3}, [0, 1, 0]),  # the token after it, not the id itself
        ([5, 2, 4, 2, 4, 3, 4, 3, 4], {"pairs": [(2, 3)]}, [0, 0, 0, 0, 0, 0, 0, 0, 1]),  # nested
        ([5, 7, 4, 4], {"pairs": [(7, 7)]}, [0, 0, 0, 0]),  # never closed: to the end of the document
        ([5, 3, 2, 4], {"pairs": [(2, 3)]}, [0, 1, 1, 1]),  # a surplus closing cancels the next opening
        ([5, 7, 7, 4], {"pairs": [(7, 7)]}, [0, 0, 0, 1]),
        ([5, 6], {}, [0, 1]),
        ([], {"pairs": [(7, 7)], "eod": 3, "individual": [1], "alternating": [2]}, []),
    ],
)
def test_edge_cases(ids: list[int], rules: dict[str, Any], expected: list[int]) -> None:
    assert loss(ids, **rules) == expected


def reference_mask(ids: list[int], rules: MaskRules) -> list[int]:
    """A reference implementation, token by token."""
    supervised = []
    depth = [0] * len(rules.pairs or [])
    seen: dict[int, int] = {}
    for place, token in enumerate(ids):
        ok = place > 0 and token not in (rules.individual or [])
        for number, (opening, closing) in enumerate(rules.pairs or []):
            was = depth[number] > 0
            if opening == closing:
                depth[number] = (not was) if token == opening else was
            else:
                depth[number] += (token == opening) - (token == closing)
            ok = ok and not was and depth[number] <= 0
        seen[token] = seen.get(token, 0) + 1
        if token in (rules.alternating or []) and seen[token] % 2:
            ok = False
        if place and ids[place - 1] == rules.eod:
            ok = False
        supervised.append(int(ok))
    return supervised


TOKEN = st.integers(1, 5)


@settings(max_examples=examples(400), deadline=None)
@given(
    ids=st.lists(TOKEN, max_size=20), pairs=st.none() | st.lists(st.tuples(TOKEN, TOKEN), max_size=2),
    individual=st.none() | st.lists(TOKEN, max_size=2), alternating=st.none() | st.lists(TOKEN, max_size=2),
    eod=st.none() | TOKEN,
)  # fmt: skip
def test_masks_equal_the_reference(
    ids: list[int], pairs: Any, individual: list[int] | None, alternating: list[int] | None, eod: int | None
) -> None:
    rules = MaskRules(pairs=pairs, individual=individual, alternating=alternating, eod=eod)
    assert loss_mask_from_rules(np.array(ids, dtype=np.int32), rules).tolist() == reference_mask(ids, rules)


def test_mask_rules_are_described() -> None:
    assert "every token is supervised" in describe_mask_rules(None)
    assert describe_mask_rules(MaskRules()) == describe_mask_rules(None)
    assert describe_mask_rules(MaskRules(pairs=[(7, 7)], eod=3)) == "tokens; the loss mask follows the rules pairs, eod"
