"""The records of a run (metrics, samples, events) after any damage: found, reported, kept beside, and no traceback."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.json_lines import JsonLinesWriter
from whet.training import records
from whet.training.records import RECORDS, Prefix, initial_evaluation, record_file, restore_records

SAVED = 4
"""The step of the checkpoint."""


def write_records(folder: Path) -> dict[str, Prefix]:
    """Six steps, evaluated at 0 and 4, with a fault at 2 and 5; returns what the checkpoint of step 4 has."""
    writers = {name: JsonLinesWriter(record_file(folder, name)) for name in RECORDS}
    prefixes = {}
    for step in range(7):
        if step:
            writers["metrics"].write({"step": step, "loss": 3.0 / step, "text": "é"})
        if step in (2, 5):
            writers["events"].write({"step": step, "reason": "spike"})
        if step == SAVED:
            prefixes = {name: Prefix(writer.size, writer.hash()) for name, writer in writers.items()}
        if step in (0, 4):
            for n in range(3):
                writers["samples"].write({"step": step, "prompt": f"p{n}", "answer": "a"})
            writers["metrics"].write({"step": step, "val_loss": 2.0, "task/orders": 0.5})
    for writer in writers.values():
        writer.close()
    return prefixes


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(records, "warn", found.append)
    return found


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def test_intact_records_are_truncated_to_the_checkpoint_and_events_stay(tmp_path: Path, warnings: list[str]) -> None:
    prefixes = write_records(tmp_path)
    restore_records(tmp_path, SAVED, prefixes)
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines_of(tmp_path / "samples.jsonl")] == [0, 0, 0]
    assert [line["step"] for line in lines_of(tmp_path / "events.jsonl")] == [2, 5]
    assert warnings == []
    assert len(list(tmp_path.iterdir())) == 3


def test_what_comes_after_the_checkpoint_may_be_damaged_without_a_word(tmp_path: Path, warnings: list[str]) -> None:
    prefixes = write_records(tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[: prefixes["metrics"].size] + b"\0" * 300)
    restore_records(tmp_path, SAVED, prefixes)
    assert [line["step"] for line in lines_of(file)] == [0, 1, 2, 3, 4]
    assert warnings == []


def flip_digit(content: bytes) -> bytes:
    return content.replace(b"3.0", b"7.0", 1).replace(b"p1", b"p9", 1).replace(b"spike", b"spikf", 1)


def flip_brace(content: bytes) -> bytes:
    return content.replace(b"}", b"]", 1)


def no_text(content: bytes) -> bytes:
    return content[:3] + b"\xff" + content[4:]


def other_type(content: bytes) -> bytes:
    return b"[1, 2]\n" + content


def cut(content: bytes) -> bytes:
    return content[: len(content) // 3 - 2]


def zeros(content: bytes) -> bytes:
    return content[: len(content) // 3] + bytes(len(content) - len(content) // 3)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    ("damage", "says", "keeps"),
    [
        (flip_digit, "its lines are not those that were written (hash mismatch)", False),
        (flip_brace, "line 1 cannot be read. The whole file is kept as damaged-", True),
        (no_text, "line 1 cannot be read", True),
        (other_type, "line 1 cannot be read", True),
        (cut, "bytes are missing", True),
        (zeros, "cannot be read", True),
        (lambda content: b"", "bytes are missing", False),
    ],
)
def test_damage_before_the_checkpoint_is_reported_and_kept_beside(
    tmp_path: Path, warnings: list[str], name: str, damage: Callable[[bytes], bytes], says: str, keeps: bool
) -> None:
    prefixes = write_records(tmp_path)
    file = record_file(tmp_path, name)
    intact = file.read_bytes().splitlines()
    file.write_bytes(damage(file.read_bytes()))
    found = file.read_bytes()
    restore_records(tmp_path, SAVED, prefixes)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{file}: changed since the checkpoint of step 4: ")
    assert says in warnings[0]
    if keeps:
        assert (tmp_path / f"damaged-{name}.jsonl").read_bytes() == found
    else:
        assert not (tmp_path / f"damaged-{name}.jsonl").exists()
    lines_of(file)
    if damage is not flip_digit:
        assert set(file.read_bytes().splitlines()) <= set(intact)


@pytest.mark.parametrize("name", RECORDS)
def test_a_deleted_record_is_reported(tmp_path: Path, warnings: list[str], name: str) -> None:
    prefixes = write_records(tmp_path)
    record_file(tmp_path, name).unlink()
    restore_records(tmp_path, SAVED, prefixes)
    size = prefixes[name].size
    assert warnings == [
        f"{record_file(tmp_path, name)}: deleted since the checkpoint of step 4; {size} bytes are lost. The run "
        "continues with a new file"
    ]


@pytest.mark.parametrize("what", ["folder", "loop", "dangling"])
def test_something_that_is_no_file_is_moved_aside(tmp_path: Path, warnings: list[str], what: str) -> None:
    prefixes = write_records(tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.unlink()
    file.mkdir() if what == "folder" else file.symlink_to(file if what == "loop" else tmp_path / "nowhere")
    restore_records(tmp_path, SAVED, prefixes)
    assert "this is not a file. It is kept as damaged-metrics.jsonl" in warnings[0]
    JsonLinesWriter(file).close()


def test_what_was_kept_before_is_not_overwritten(tmp_path: Path, warnings: list[str]) -> None:
    prefixes = write_records(tmp_path)
    file = tmp_path / "events.jsonl"
    for number in range(3):
        file.write_bytes(b"%d\n" % number)
        restore_records(tmp_path, SAVED, prefixes)
    kept = [(tmp_path / f"damaged-events{n}.jsonl").read_bytes() for n in ("", "-2", "-3")]
    assert kept == [b"0\n", b"1\n", b"2\n"]


def test_a_damaged_record_is_set_aside_once(tmp_path: Path, warnings: list[str]) -> None:
    """A run that is killed before its next checkpoint finds the same hash there, but the lines can all be read."""
    prefixes = write_records(tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(flip_brace(file.read_bytes()))
    restore_records(tmp_path, SAVED, prefixes)
    after = file.read_bytes()
    restore_records(tmp_path, SAVED, prefixes)
    assert file.read_bytes() == after
    assert sorted(path.name for path in tmp_path.glob("damaged-*")) == ["damaged-metrics.jsonl"]


def test_an_event_that_a_crash_cut_does_not_spoil_the_next(tmp_path: Path, warnings: list[str]) -> None:
    prefixes = write_records(tmp_path)
    file = tmp_path / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-4])
    restore_records(tmp_path, SAVED, prefixes)
    assert "line 2 cannot be read" in warnings[0]
    writer = JsonLinesWriter(file)
    writer.write({"step": 5})
    writer.close()
    assert [line["step"] for line in lines_of(file)] == [2, 5]


def test_records_of_an_earlier_whet_without_hashes_are_truncated_by_size(tmp_path: Path, warnings: list[str]) -> None:
    known = write_records(tmp_path)
    expected = {name: record_file(tmp_path, name).read_bytes()[: known[name].size] for name in ("metrics", "samples")}
    restore_records(tmp_path, SAVED, {name: Prefix(known[name].size) for name in ("metrics", "samples")})
    assert {name: record_file(tmp_path, name).read_bytes() for name in expected} == expected
    assert warnings == []


# Without a checkpoint


def test_the_initial_evaluation_is_kept_if_all_of_it_can_be_read(tmp_path: Path, warnings: list[str]) -> None:
    write_records(tmp_path)
    found = initial_evaluation(tmp_path, 0)
    restore_records(tmp_path, 0, found)
    assert [line["step"] for name in found for line in lines_of(record_file(tmp_path, name))] == [0, 0, 0, 0]
    assert warnings == []


@pytest.mark.parametrize("name", ["metrics", "samples"])
@pytest.mark.parametrize("damage", [flip_brace, no_text, other_type, lambda content: b"", lambda content: b"\0" * 50])
def test_a_damaged_initial_evaluation_is_repeated(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], warnings: list[str]
) -> None:
    write_records(tmp_path)
    file = record_file(tmp_path, name)
    file.write_bytes(damage(file.read_bytes()))
    assert initial_evaluation(tmp_path, 0) == {}
    restore_records(tmp_path, 0, {})
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "samples.jsonl").read_bytes() == b""


# Any bytes


@pytest.fixture(scope="module")
def template() -> Iterator[tuple[Path, dict[str, Prefix]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), write_records(Path(folder))


def damaged(content: bytes, draw: Callable[..., Any]) -> bytes:
    """Any damage: flipped bits, cut, filled with zeros, random bytes or odd JSON inserted."""
    at = draw(st.integers(0, len(content)))
    match draw(st.sampled_from(["flip", "cut", "zero", "insert", "replace"])):
        case "flip" if content:
            at = min(at, len(content) - 1)
            return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        case "cut":
            return content[:at]
        case "zero":
            return content[:at] + bytes(len(content) - at)
        case "insert":
            odd = st.sampled_from(
                [b"[]", b'{"step": 1e999}', b'{"step": true}', b'{"step": ' + b"9" * 5000, b"[" * 9999]
            )
            return content[:at] + b"\n" + draw(odd | st.binary(max_size=20)) + b"\n" + content[at:]
    return draw(st.binary(max_size=100))


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_damage_leaves_lines_that_can_be_read_and_continued(
    template: tuple[Path, dict[str, Prefix]], data: st.DataObject
) -> None:
    source, prefixes = template
    name = data.draw(st.sampled_from(RECORDS))
    intact = record_file(source, name).read_bytes()
    with tempfile.TemporaryDirectory() as target, pytest.MonkeyPatch.context() as patch:
        folder, warnings = Path(target), list[str]()
        patch.setattr(records, "warn", warnings.append)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        file = record_file(folder, name)
        file.write_bytes(damaged(intact, data.draw))
        before = file.read_bytes()
        initial_evaluation(folder, 0)
        restore_records(folder, SAVED, prefixes)
        after = file.read_bytes()
        lines_of(file)
        assert after == b"" or after.endswith(b"\n")
        if before[: prefixes[name].size] != intact[: prefixes[name].size]:
            assert warnings
        lost = set(before[: prefixes[name].size].split(b"\n")) - set(after.split(b"\n"))
        if lost - {before[: prefixes[name].size].split(b"\n")[-1]}:
            assert (folder / f"damaged-{name}.jsonl").read_bytes() == before
