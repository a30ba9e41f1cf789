"""Files of JSON lines keep every whole line; damaged ones are left out and counted."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from whet.core.files import hash_bytes, hash_file, hash_prefix
from whet.core.json_lines import JsonLinesWriter, append_json_line, read_json_lines


def test_lines_are_appended_and_readable_at_once(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    lines = JsonLinesWriter(file)
    lines.write({"step": 1, "text": "é\n"})
    assert read_json_lines(file) == ([{"step": 1, "text": "é\n"}], [])
    lines.write({"step": 2})
    lines.close()
    more = JsonLinesWriter(file)
    more.write({"step": 3})
    more.close()
    assert [record["step"] for record in read_json_lines(file)[0]] == [1, 2, 3]
    assert file.read_bytes().count(b"\n") == 3
    assert "é" in file.read_text(), "people read these files"


def test_a_writer_knows_the_size_and_the_hash_of_its_file_also_of_one_that_it_continues(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    for step in range(3):
        lines = JsonLinesWriter(file)
        lines.write({"step": step, "text": "é" * step})
        assert (lines.size, lines.hash()) == (file.stat().st_size, hash_file(file))
        lines.close()
    with file.open("rb") as opened:
        assert hash_prefix(opened).hexdigest() == hash_bytes(file.read_bytes()) == hash_file(file)
        opened.seek(0)
        assert hash_prefix(opened, 7).hexdigest() == hash_bytes(file.read_bytes()[:7])


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_lines_of_a_file_that_is_deleted_or_replaced_are_not_lost(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.jsonl"
    lines = JsonLinesWriter(file)
    lines.write({"step": 1})
    lines.write({"step": 2})
    if how == "replaced":  # as editors save
        (tmp_path / "edited").write_text('{"step": 1}\n')
        (tmp_path / "edited").replace(file)
    else:
        file.unlink()
    for step in (3, 4):
        lines.write({"step": step})
    assert (lines.size, lines.hash()) == (file.stat().st_size, hash_file(file))
    lines.close()
    assert [record["step"] for record in read_json_lines(file)[0]] == [1, 2, 3, 4]
    said = capfd.readouterr().err
    assert said.count(f"{file}: {how}") == 1
    if how == "replaced":
        assert (tmp_path / "m.1.jsonl").read_text() == '{"step": 1}\n'
        assert "m.1.jsonl" in said


def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_json_lines(file) == ([{"step": 1}, {"step": 2}], [])


@pytest.mark.parametrize(
    "damaged",
    [b'{"ste', b"\0" * 20, b"\xff\xfe", b"[1]", b"7", b"", b'{"a": NaN}', b"[" * 100_000, b'{"a": 1' + b"0" * 5000],
)
def test_a_damaged_line_is_left_out_and_its_number_given(tmp_path: Path, damaged: bytes) -> None:
    file = tmp_path / "m.jsonl"
    file.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    assert read_json_lines(file) == ([{"step": 1}, {"step": 3}], [2])


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "nope.jsonl") == ([], [])


def test_a_record_that_is_not_json_is_not_written_in_part(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    lines = JsonLinesWriter(file)
    with pytest.raises(ValueError, match="Out of range"):
        lines.write({"loss": float("nan")})
    lines.close()
    assert file.read_bytes() == b""


def test_lines_that_several_processes_append_are_not_mixed_up(tmp_path: Path) -> None:
    file = tmp_path / "launch.jsonl"
    long = "x" * 20_000  # more than a buffer of Python's holds

    def write(who: str) -> None:
        for number in range(200):
            append_json_line(file, {"who": who, "number": number, "words": long})

    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write, args=(who,)) for who in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines, _ = read_json_lines(file)
    assert [line["words"] for line in lines] == [long] * 400
    for who in "ab":
        assert [line["number"] for line in lines if line["who"] == who] == list(range(200))
