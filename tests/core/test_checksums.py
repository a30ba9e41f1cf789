"""JSON files with a hash of their own content."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.errors import WhetError
from whet.core.files import write_json


def test_a_hashed_file_gives_what_was_written_or_an_error_for_a_flipped_bit(tmp_path: Path) -> None:
    file, content = tmp_path / "hashed.json", {"step": 30, "loss": 0.1 + 0.2, "by": {3: ["é", None, True]}, "kind": "a"}
    write_hashed_json(file, content)
    plain = json.loads(json.dumps(content))
    assert read_hashed_json(file, step=int, kind=str) == plain
    assert json.loads(file.read_text()).keys() == {*content, "hash"}
    written = file.read_bytes()
    for bit in range(0, 8 * len(written), 7):
        file.write_bytes(written[: bit // 8] + bytes([written[bit // 8] ^ 1 << bit % 8]) + written[bit // 8 + 1 :])
        with contextlib.suppress(WhetError):
            assert plain.items() <= read_hashed_json(file).items()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1]", "altered after it was written"),
        (b'{"step": "x"}', "`step` is missing or of a wrong type"),
        (b"{}", "`step` is missing or of a wrong type"),
        (b'{"step": 1, "hash": "0"}', "altered after it was written"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"step": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_damaged_hashed_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "hashed.json").write_bytes(content)
    with pytest.raises(WhetError, match=re.escape(says)) as caught:
        read_hashed_json(tmp_path / "hashed.json", step=int)
    assert str(caught.value).startswith(str(tmp_path / "hashed.json"))


def test_a_file_of_an_earlier_version_without_a_hash_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "old.json", {"step": 1})
    assert read_hashed_json(tmp_path / "old.json", step=int) == {"step": 1}
