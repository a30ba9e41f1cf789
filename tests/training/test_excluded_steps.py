"""faults/passed_over.json decides which steps are trained on: a damaged one never changes them without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.training import checkpoints
from whet.training.checkpoints import read_excluded_steps, write_excluded_steps


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_excluded_steps(tmp_path) == []
    assert read_excluded_steps(tmp_path, [[3, 4]]) == [(3, 4)], "the checkpoint knows them if the file is gone"
    write_excluded_steps(tmp_path, [(3, 4), (7, 9)])
    assert read_excluded_steps(tmp_path, [[3, 4]]) == [(3, 4), (7, 9)]


def test_a_damaged_file_is_reported_and_the_checkpoint_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(checkpoints, "warn", warnings.append)
    write_excluded_steps(tmp_path, [(3, 4), (7, 9)])
    file = tmp_path / "faults/passed_over.json"
    written = file.read_bytes()
    for damaged in (written.replace(b"9", b"8", 1), written[:20], b"\0" * 50, b"\xff", b"[]", b'{"steps": [[1, "2"]]}'):
        file.write_bytes(damaged)
        assert read_excluded_steps(tmp_path, [[3, 4]]) == [(3, 4)]
        assert str(file) in warnings[-1]
        assert warnings[-1].endswith("The run continues with the steps that its checkpoint excludes")
    assert len(warnings) == 6
