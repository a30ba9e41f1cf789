"""Columns and keys as strangers name them: what belongs to a question stays in it, and no words change their role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.data.conversation import Conversation
from whet.data.read.sources import SourceReader, propose_source


def read(path: Path, *records: Any) -> tuple[list[tuple[str, str]], bool]:
    """The turns of the first record as `whet init` proposes to read the file, and whether it guesses."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records or [{}]))
    source, is_guessed = propose_source(str(path))
    reader = SourceReader(source)
    first = reader.parse(next(iter(reader.records())))
    assert isinstance(first, Conversation), first
    return [(turn.role, turn.content) for turn in first.messages], is_guessed


ANSWERED = [("user", "Q?"), ("assistant", "A.")]


@pytest.mark.parametrize(
    "record",
    [{"User": "bob", "Question": "Q?", "Answer": "A."}, {"Question": "Q?", "Answer": "A.", "Bot": "v2"},
     {"GPT": "gpt-4", "PROMPT": "Q?", "Response": "A."}, {"Human": "bob", "Frage": "Q?", "Antwort": "A."}],
)  # fmt: skip
def test_a_plain_name_in_any_case_comes_before_a_word_that_may_mean_it(tmp_path: Path, record: Any) -> None:
    """`User` was the question, and its `bob` was answered."""
    assert read(tmp_path / "a.jsonl", record) == (ANSWERED, True)
