"""Tables as people have them: any language, encoding and delimiter, with titles, blank rows and missing cells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from whet.core.errors import WhetError
from whet.data.config import Source
from whet.data.conversation import BadRecord, Conversation
from whet.data.read.sources import SourceReader, expected_records, propose_source, read_source

PEOPLE = {
    "cp1252": ("Frage", "Antwort", "Wie heißt die Straße {n}?", "Sie heißt »Größe {n}«, schön."),
    "mac_roman": ("Frage", "Antwort", "Wie heißt die Straße {n}?", "Sie heißt »Größe {n}«, schön."),
    "cp850": ("Frage", "Antwort", "Wie heißt die Straße {n}?", "Sie heißt Größe {n}, schön."),
    "cp1252 fr": ("Question", "Réponse", "Où est l'élève n° {n} ?", "Il est à l'école, près du café {n}."),
    "cp1252 es": ("Pregunta", "Respuesta", "¿Cuántos años tiene Muñoz {n}?", "Tiene {n} años, ¡qué ilusión!"),
    "cp1252 it": ("Domanda", "Risposta", "Perché è così {n}?", "Perché la città è là {n}."),
    "cp1252 pt": ("Pergunta", "Resposta", "Qual é a solução {n}?", "A solução não é difícil: {n}."),
    "cp1252 nl": ("Vraag", "Antwoord", "Wat is één idee {n}?", "Dat is coördinatie {n}."),
    "cp1252 sv": ("Fråga", "Svar", "Var ligger Malmö {n}?", "Malmö ligger på västkusten, nära {n}."),
    "cp1252 fr+de": ("Frage", "Antwort", "Où est l'élève {n}, là ?", "Über das Mädchen, größer {n}."),
    "cp1250": ("Pytanie", "Odpowiedź", "Gdzie leży Łódź {n}?", "Leży w środku Polski, źródło {n}."),
    "iso8859_2": ("Pytanie", "Odpowiedź", "Gdzie leży Łódź {n}?", "Leży w środku Polski, źródło {n}."),
    "cp1250 hu": ("Kérdés", "Válasz", "Hol van Győr {n}?", "Győr az ország nyugati részén, őszintén {n}."),
    "cp1254": ("Soru", "Cevap", "Türkiye'nin başkenti neresidir {n}?", "Başkent Ankara'dır, değil mi {n}."),
    "cp1251": ("Вопрос", "Ответ", "Где находится Москва, номер {n}?", "Москва находится в России, дом {n}."),
    "koi8_r": ("Вопрос", "Ответ", "Где находится Москва, номер {n}?", "Москва находится в России, дом {n}."),
    "cp866": ("Вопрос", "Ответ", "Где находится Москва, номер {n}?", "Москва находится в России, дом {n}."),
    "cp1253": ("Ερώτηση", "Απάντηση", "Πού είναι η Αθήνα {n}?", "Η Αθήνα είναι στην Ελλάδα {n}."),
    "cp1256": ("سؤال", "جواب", "أين تقع القاهرة {n}؟", "تقع القاهرة في مصر {n}."),
    "gb18030": ("问题", "答案", "中国的首都在哪里？第{n}题", "北京是中国的首都，答案{n}。"),
    "cp932": ("質問", "回答", "日本の首都はどこですか？{n}", "東京が日本の首都です。{n}番"),
    "euc_jp": ("質問", "回答", "日本の首都はどこですか？{n}", "東京が日本の首都です。{n}番"),
    "cp949": ("질문", "답변", "한국의 수도는 어디입니까? {n}", "서울이 한국의 수도입니다 {n}."),
    "utf-16": ("Frage", "Antwort", "Wie heißt die Straße {n}?", "Sie heißt Größe {n}."),
    "utf-16-le": ("Frage", "Antwort", "Wie heißt die Straße {n}?", "Sie heißt Größe {n}."),
    "utf-8-sig": ("Frage", "Antwort", "Wie heißt die Straße {n}?", "Sie heißt Größe {n}."),
}
ROWS = 20


def read(file: Path) -> tuple[list[tuple[str, ...]], str]:
    """The texts of every conversation, and what whet says of the file; every row is read and counted."""
    source, _ = propose_source(str(file))
    reader = SourceReader(source)
    items = [reader.parse(raw) for raw in reader.records()]
    assert all(isinstance(item, Conversation) for item in items), items
    assert expected_records(source) == len(items)
    texts = [tuple(turn.content for turn in item.messages) for item in items if isinstance(item, Conversation)]
    return texts, reader.description or ""


@pytest.mark.parametrize("who", PEOPLE)
def test_every_letter_arrives(tmp_path: Path, who: str) -> None:
    delimiter = ";\t|"[len(who) % 3]
    *columns, question, answer = PEOPLE[who]
    rows = [(question.format(n=n), answer.format(n=n)) for n in range(ROWS)]
    file = tmp_path / "a.csv"
    file.write_bytes("\r\n".join(map(delimiter.join, [columns, *rows])).encode(who.split()[0]))
    texts, description = read(file)
    assert texts == rows
    assert "-separated" in description


SHAPES = {
    "capitals.csv": "FRAGE;ANTWORT\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "more columns.csv": "Nr;Frage;Antwort;Art\n1;A 1?;B, 1.;x\n2;A 2?;B, 2.;x\n",
    "compound names.csv": "Kundenfrage;Unsere Antwort\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "blank rows.csv": "\n\nFrage;Antwort\n\nA 1?;B, 1.\n;\n\nA 2?;B, 2.\n\n",
    "trailing delimiters.csv": "Frage;Antwort;;\nA 1?;B, 1.;;\nA 2?;B, 2.;;\n",
    "sep.csv": "sep=;\nFrage;Antwort\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "old Mac.csv": "Frage;Antwort\rA 1?;B, 1.\rA 2?;B, 2.\r",
    "DOS.csv": "Frage;Antwort\r\nA 1?;B, 1.\r\nA 2?;B, 2.\r\n\x1a",
    "title.csv": "Unsere FAQ;\nStand: 2024;\n\nFrage;Antwort\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "groups.csv": "Input;Output\nFrage;Antwort\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "missing last cells.csv": "Frage;Antwort;Notiz\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "Unicode text.txt": "Frage\tAntwort\nA 1?\tB, 1.\nA 2?\tB, 2.\n",
    "semicolons.tab": "Frage;Antwort\nA 1?;B, 1.\nA 2?;B, 2.\n",
    "tilde.csv": "Frage~Antwort\nA 1?~B, 1.\nA 2?~B, 2.\n",
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(SHAPES[name].encode())
    assert read(tmp_path / name)[0] == [("A 1?", "B, 1."), ("A 2?", "B, 2.")]


def test_cells_of_several_lines_are_counted_as_one(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('Frage;Antwort\n"A\n1;?";"B ""1"",\nja."\n')
    assert read(file)[0] == [("A\n1;?", 'B "1",\nja.')]


def test_a_system_column_is_the_system_message_in_any_case(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("System;Frage;Antwort\nSei nett.;A?;B.\n")
    assert read(file)[0] == [("Sei nett.", "A?", "B.")]


def test_a_text_with_a_tab_stays_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Dear reader\tof books\nhere is\ta text.\n")
    source, _ = propose_source(str(file))
    assert len(list(SourceReader(source).records())) == 1


def _fill(*cells: tuple[str, str]) -> Callable[[Any], None]:
    def fill(sheet: Any) -> None:
        for place, text in cells:
            sheet[place] = text

    return fill


def _titled(sheet: Any) -> None:
    sheet["A1"] = "FAQ 2024"
    sheet.merge_cells("A1:B1")
    _fill(("A3", "Frage"), ("B3", "Antwort"), ("A4", "A?"), ("B4", "B."))(sheet)


def _merged_header(sheet: Any) -> None:
    _fill(("A1", "Frage"), ("C1", "Antwort"), ("A2", "A?"), ("C2", "B."))(sheet)
    sheet.merge_cells("A1:B1")
    sheet.merge_cells("C1:D1")


WORKBOOKS: dict[str, Callable[[Any], None]] = {
    "title": _titled,
    "merged header": _merged_header,
    "groups above": _fill(
        ("A1", "Kunde"), ("B1", "Wir"), ("A2", "Frage"), ("B2", "Antwort"), ("A3", "A?"), ("B3", "B.")
    ),
    "named groups above": _fill(
        ("A1", "Input"), ("B1", "Output"), ("A2", "Frage"), ("B2", "Antwort"), ("A3", "A?"), ("B3", "B.")
    ),
    "not at A1": _fill(("C3", "Frage"), ("D3", "Antwort"), ("C4", "A?"), ("D4", "B.")),
}


@pytest.mark.parametrize("name", WORKBOOKS)
def test_every_workbook_is_read(tmp_path: Path, name: str) -> None:
    book = openpyxl.Workbook()
    WORKBOOKS[name](book.active)
    book.save(tmp_path / "a.xlsx")
    assert read(tmp_path / "a.xlsx")[0] == [("A?", "B.")]


def test_an_empty_first_sheet_is_passed_over_and_an_empty_workbook_refused(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    book.save(tmp_path / "empty.xlsx")
    with pytest.raises(WhetError, match="has fewer than two rows"):
        propose_source(str(tmp_path / "empty.xlsx"))
    sheet = book.create_sheet("Daten")
    _fill(("A1", "Frage"), ("B1", "Antwort"), ("A2", "A?"), ("B2", "B."))(sheet)
    book.save(tmp_path / "second.xlsx")
    texts, description = read(tmp_path / "second.xlsx")
    assert texts == [("A?", "B.")]
    assert "sheet 'Daten' (not read: 'Sheet'" in description


@pytest.mark.parametrize("write", [json.dumps, str])
def test_lists_in_cells_are_read(tmp_path: Path, write: Callable[[Any], str]) -> None:
    """pandas writes them as Python, with single quotes. The role may come after a long text."""
    turns = [("user", 'Is it "here"? ' * 99), ("assistant", "It's\nthere.")]
    cell = write([{"content": text, "role": role} for role, text in turns]).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'id,messages\n1,"{cell}"\n')
    assert read(tmp_path / "a.csv")[0] == [tuple(text for _, text in turns)]


@pytest.mark.parametrize("cell", ["[{'role': 'user', 'content': open('a')}]", "[{'role': 'user'}\n {'role': 'user'}]"])
def test_what_python_prints_but_does_not_read_is_refused(tmp_path: Path, cell: str) -> None:
    (tmp_path / "a.csv").write_text(f'messages\n"{cell}"\n')
    [bad] = read_source(Source(path=str(tmp_path / "a.csv")))
    assert isinstance(bad, BadRecord)
    assert "It is printed by Python; write JSON Lines: to_json(FILE" in bad.explanation


def test_an_object_of_columns_that_pandas_wrote_is_read(tmp_path: Path) -> None:
    columns = {"Frage": {"0": "Q?", "2": "R?"}, "Antwort": {"0": "A.", "2": "B."}}
    (tmp_path / "a.json").write_text(json.dumps(columns))
    assert read(tmp_path / "a.json")[0] == [("Q?", "A."), ("R?", "B.")]
    turns = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "A."}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": {"0": turns, "1": turns}}))
    assert read(tmp_path / "a.json")[0] == [("Q?", "A.")] * 2


def test_line_breaks_of_windows_in_cells_are_no_text(tmp_path: Path) -> None:
    """The model would learn to answer with carriage returns; a workbook's are left out, too."""
    (tmp_path / "a.csv").write_bytes(b'question,answer\r\n"Q\r\nR?","A\r\nB."\r\n')
    assert read(tmp_path / "a.csv")[0] == [("Q\nR?", "A\nB.")]
