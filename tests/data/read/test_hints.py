"""What a stranger's export looks like: read right where that cannot go wrong, else an error that says what to do."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation
from whet.data.read.sources import SourceReader

GOOD = '{"messages": [{"role": "user", "content": "Hi é"}, {"role": "assistant", "content": "Hello"}]}'
TABLE = 'prompt,completion\n"Hi, é",Hello\n"two\nlines",c\n'


def read(path: Path, content: bytes) -> tuple[str, list[list[str] | str]]:
    """The line about the format, and for each record its texts or why it is bad."""
    path.write_bytes(content)
    reader = SourceReader(Source(path=str(path)))
    found: list[list[str] | str] = []
    for item in map(reader.parse, reader.records()):
        if isinstance(item, BadRecord):
            found.append(item.explanation)
        else:
            assert isinstance(item, Conversation)
            found.append([message.content for message in item.messages])
    return str(reader.description), found


def workbook() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("[Content_Types].xml"), "")  # of 1980: every worker must collect the same
    return file.getvalue()


TAR = b"a.jsonl".ljust(257, b"\0") + b"ustar".ljust(255, b"\0")
GERMAN = "prompt;completion\nWie heißt du?;Ich heiße Jörg.\n"
RUSSIAN = "prompt;completion\nКак дела?;Хорошо, спасибо.\n"
ASKED = [["Wie heißt du?", "Ich heiße Jörg."]]
SUCH_AS = 'semicolon-separated, read as {}, such as "{}" (if that is wrong, set encoding)'
ROWS = [["Hi, é", "Hello"], ["two\nlines", "c"]]
BOTH = [["Hi é", "Hello"]] * 2
MARKS = "prompt,completion\nCan I?,You can’t – it’s “closed”.\nThe price?,It is 5 € for the dogs’ food…\n"


@pytest.mark.parametrize(
    ("name", "content", "note", "expected"),
    [
        ("a.csv", TABLE.replace(",", ";").replace("Hi;", "Hi,").encode(), "semicolon-separated", ROWS),
        ("a.csv", TABLE.replace(",", "\t").replace("Hi\t", "Hi,").encode(), "tab-separated", ROWS),
        ("a.tsv", TABLE.encode(), "comma-separated", ROWS),
        ("a.csv", b"sep=;\nprompt;completion\na;b\n", "semicolon-separated", [["a", "b"]]),
        ("a.csv", TABLE.encode("utf-16"), "read as UTF-16", ROWS),
        ("a.csv", b"\xfe\xff" + TABLE.encode("utf-16-be"), "read as UTF-16", ROWS),
        ("a.csv", TABLE.replace(",", "\t").replace("Hi\t", "Hi,").encode("utf-16"), "tab-separated, read as UTF-16",
         ROWS),
        ("a.csv", GERMAN.encode("utf-8-sig"), "semicolon-separated, UTF-8 with BOM", ASKED),
        ("a.csv", GERMAN.encode("cp1252"), SUCH_AS.format("Windows-1252", "heißt"), ASKED),
        ("a.csv", RUSSIAN.encode("cp1251"), SUCH_AS.format("Windows-1251", "Как"), [["Как дела?", "Хорошо, спасибо."]]),
        ("a.csv", b'prompt, completion\n"Hi, you", "Hello"\nWho?, " Me"\n', "without the spaces before cells",
         [["Hi, you", "Hello"], ["Who?", " Me"]]),
        ("a.csv", b"prompt,completion\nWho?, Me\n", "prompt-completion (prompt, completion)", [["Who?", " Me"]]),
        ("a.csv", MARKS.encode("cp1252"), "read as Windows-1252 (if that is wrong, set encoding)",
         [["Can I?", "You can’t – it’s “closed”."], ["The price?", "It is 5 € for the dogs’ food…"]]),
        ("a.csv", b",prompt,completion\n0,a,b\n", "not used: columns without a name (1)", [["a", "b"]]),
        ("a.csv", b" prompt ,completion ,\na,b,\n", "columns without a name (3)", [["a", "b"]]),
        ("a.jsonl", f"{GOOD}\n{GOOD}".encode("utf-16"), "read as UTF-16", BOTH),
        ("a.jsonl.gz", gzip.compress(f"{GOOD}\n{GOOD}".encode("utf-32"), mtime=0), "read as UTF-32", BOTH),
        ("a.json", f"[{GOOD},{GOOD}]".encode("utf-16"), "read as UTF-16", BOTH),
        ("a.json", f'{{"data": [{GOOD},{GOOD}]}}'.encode("utf-16"), "under 'data', read as UTF-16", BOTH),
        ("a.jsonl", f"[{GOOD},{GOOD}]".encode(), "one JSON array", BOTH),
        ("a.jsonl", f"[{GOOD},\n{GOOD}]".encode(), "one JSON array", BOTH),
        ("a.jsonl", json.dumps([json.loads(GOOD)] * 2, indent=2).encode(), "one JSON array", BOTH),
        ("a.jsonl", json.dumps(json.loads(GOOD)["messages"]).encode(), "messages (role, content)", BOTH[:1]),
    ],
)  # fmt: skip
def test_it_is_read_and_the_assumption_is_named(
    tmp_path: Path, name: str, content: bytes, note: str, expected: list[list[str]]
) -> None:
    description, found = read(tmp_path / name, content)
    assert found == expected
    assert description.endswith(note)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"promt,completion\na,b\n", "Did you mean prompt for 'promt'? `whet init "),
        ("a.csv", b"Prompt,Completion\na,b\n", "fields: {prompt: Prompt, completion: Completion}}]"),
        ("a.jsonl", GOOD.replace("messages", "Mesages").encode(), "Did you mean messages for 'Mesages'?"),
        ("a.csv", b"What is 2+2?,4\nAnd 3+3?,6\n", "first row must name the columns, such as question and answer: add"),
        ("a.csv", b"prompt,prompt\na,b\n", "a.csv:1: the first row must name the columns, but it has 'prompt' twice"),
        ("a.csv", b"Frage;Antwort\na;b\n", "format: prompt-completion, fields: {prompt: Frage, completion: Antwor"),
        ("a.csv", b"PREGUNTA,Respuesta \na,b\n", "prompt for 'PREGUNTA' and completion for 'Respuesta'?"),
        ("a.csv", b"Question,Reponse\na,b\n", "prompt for 'Question' and completion for 'Reponse'?"),
        ("a.csv", "质问,答\na,b\n".encode(), "If '质问' is the question and '答' the answer, write under data: sou"),
        ("a.csv", b"prompt,\xff\n" + "äöü,ß\n".encode(), "the name of a column is not valid UTF-8"),
        ("a.jsonl", TABLE.encode("utf-16-le"), "UTF-16 without a byte order mark; save it as UTF-8"),
        ("a.csv", workbook(), "the workbook cannot be read ("),
        ("a.xlsx", b"PK\x03\x04xl/", "the workbook cannot be read (BadZipFile: "),
        ("a.ods", b"PK\x03\x04mimetypeapplication/vnd.oasis.opendocument", "a spreadsheet. Save it as .xlsx or as CSV"),
        ("a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Save it as .xlsx without a password, or as CSV UTF-8"),
        ("a.txt", b"{\\rtf1\\ansi Hello}", "a document in Rich Text Format. Save its text as plain text (.txt)"),
        ("a.pkl", b"\x80\x04\x95\x0b\0\0", "a pickle of Python"),
        ("b.pkl", b"\x80\x05\x95\x0b\0\0", "a pickle of Python"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "an HDF5 file. Write its records as JSON Lines"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c", "a 7z archive. Unpack it"),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18a", "compressed by lz4. Decompress it"),
        ("a.tar", TAR, "a tar archive. Unpack it"),
        ("a.tgz", gzip.compress(TAR, mtime=0), "a tar archive. Unpack it"),
        ("a.csv", GOOD.encode(), "the file is JSON, not a table. Rename it to .jsonl"),
        ("a.jsonl", TABLE.encode(), "the file is a table, not JSON. Rename it to .csv"),
        ("a.csv", b"| prompt | completion |\n|---|:-:|\n| a | b |\n", "a.csv:2: the file is a Markdown table"),
        ("a.jsonl.xz", b"\xfd7zXZ\0\0", "compressed by xz. Decompress it"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.jsonl", b"<!DOCTYPE html>\n", "a web page"),
        ("a.json", f'{{"data": [{GOOD},]}}'.encode(), "a.json:1: not valid JSON: "),
        ("a.json", f'{{"data": [{GOOD},]}}'.encode(), "Remove the comma before ]"),
        ("a.json", f'{{"a": 1, "data": [{GOOD}], "a": 2}}'.encode(), "an object has the key 'a' twice"),
        ("a.json", (GOOD + GOOD).encode(), "Another record follows: write one record a line (.jsonl)"),
    ],
)  # fmt: skip
def test_it_is_refused_with_a_remedy(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(WhetError) as caught:
        read(tmp_path / name, content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (GOOD[:-1] + ",}", "Remove the comma before }"),
        (GOOD[:-2] + ",]}", "Remove the comma before ]"),
        (GOOD + ",", "Remove the comma after the record"),
        (GOOD + GOOD, "Another record follows"),
        (repr(json.loads(GOOD)), "This is Python, not JSON"),
        ('{"prompt": "a", "completion": None}', "This is Python, not JSON"),
        ("{“prompt”: “a”}", "Use straight double quotes"),
        ('{"prompt": "a\tb"}', "must be written \\\\n or \\\\t"),
        ("{", "name it .json"),
        ('{"prompt": "a", "completion": "b", "completion": "c"}', "has the key 'completion' twice; remove one"),
        (GOOD.replace('"role": "user"', '"role": "user", "role": "system"'), "has the key 'role' twice"),
        ("// a comment", "JSON has no comments"),
        (GOOD[:40], "The record ends too early"),
        ('{"prompt": "cut off in a str', "The record ends too early"),
        ("<<<<<<< HEAD", "a marker of a merge conflict"),
        (GOOD.replace("messages", "mesages"), "did you mean 'messages' for 'mesages'?"),
        (GOOD.replace('"content"', '"contnet"'), "did you mean 'content' for 'contnet'?"),
        (GOOD.replace("user", "User"), "message 1 has the role 'User'"),
        (GOOD.replace("user", "User"), "Write 'user'"),
        (GOOD.replace("assistant", "bot"), "Write 'assistant'"),
        (GOOD.replace("assistant", "assitant"), "Write 'assistant'"),
    ],
)  # fmt: skip
def test_a_bad_line_says_what_to_do(tmp_path: Path, record: str, message: str) -> None:
    _, found = read(tmp_path / "a.jsonl", f"{GOOD}\n{record}\n{GOOD}\n".encode())
    assert found[::2] == BOTH
    assert message.replace("\\\\", "\\") in str(found[1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"a,NaN", "'completion' is null (in a table: NaN, NULL or #N/A)"),
        (b"a,NULL", "'completion' is null"),
        (b"a,\\N", "'completion' is null"),
        (b"a,#SPILL!", "'completion' is null"),
        (b"prompt,completion", "this row repeats the names of the columns, as where files were joined. Remove it"),
        (b"#REF!,b", "'prompt' is null"),
        (b"a,b,c", "Write a cell that contains a comma between double quotes"),
        (b'"a "b" c",d', "Double a quote inside a quoted cell"),
        (b'"a,b', "A quote is opened here and never closed"),
        ("éé,".encode() + b"\xe9", "iconv -f WINDOWS-1252 -t UTF-8"),
    ],
)
def test_a_bad_row_says_what_to_do(tmp_path: Path, row: bytes, message: str) -> None:
    _, found = read(tmp_path / "a.csv", b"prompt,completion\na,b\n" + row + b"\n")
    assert found[0] == ["a", "b"]
    assert message in str(found[1])


CELLS = st.text(st.sampled_from('ab,;\t|" \n'), min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4),
    delimiter=st.sampled_from(",;\t|"),
    suffix=st.sampled_from([".csv", ".tsv"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]),
)
def test_a_table_is_read_as_it_was_written_whatever_its_delimiter_and_encoding(
    tmp_path: Path, rows: list[tuple[str, str]], delimiter: str, suffix: str, quoting: int, encoding: str
) -> None:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, quoting=quoting).writerows([("prompt", "completion"), *rows])
    _, found = read(tmp_path / f"a{suffix}", text.getvalue().encode(encoding))
    assert found == [list(row) for row in rows]
