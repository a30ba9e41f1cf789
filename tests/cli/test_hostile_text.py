"""Terminal escapes, bidirectional overrides and markup in data, prompts and file names are shown, not obeyed."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202edlrow\u2066 [bold]x[/bold] [/] :smile: </pre><script>"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202edlrow\u2066 [bold]x[/bold] [/] :smile: </pre><script>"


def is_safe(text: str) -> bool:
    return all(char in "\n\t" or unicodedata.category(char) != "Cc" for char in text) and "\u202e" not in text


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "a\x1b[31m[red]\u202e.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": HOSTILE}]
    path.write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    return path


@pytest.fixture
def recipe(data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(json.dumps({"model": {"path": "builtin:tiny"}, "data": {"sources": [{"path": str(data)}]}}))
    return path


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--pieces"], ["prepare"]])
def test_commands_that_show_data(command: list[str], whet: Any, recipe: Path) -> None:
    ended = whet(command[0], recipe, *command[1:])
    assert ended.code == 0, ended.err
    assert is_safe(ended.out + ended.err)
    if command == ["inspect"]:
        assert SHOWN in ended.out
        assert r"a\x1b[31m[red]\u202e.jsonl:1" in ended.out
    result = whet(command[0], recipe, *command[1:], "--json")
    assert is_safe(result.out)
    if command == ["inspect"]:
        assert HOSTILE in json.loads(result.out)["documents"][0]["text"]


def test_check_and_errors_name_hostile_files(whet: Any, recipe: Path, data: Path) -> None:
    data.write_text("{\x9b\n")
    for words in (["check", recipe, "--json"], ["train", recipe]):
        ended = whet(*words)
        assert ended.code == 1
        assert is_safe(ended.out + ended.err)
        assert r"a\x1b[31m[red]\u202e.jsonl:1" in ended.err


def test_prompts_and_answers(whet: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": HOSTILE}) + "\n")
    words = ["chat", "builtin:tiny", "--prompts", prompts, "--max-new-tokens", "8", "--temperature", "2"]
    ended = whet(*words)
    assert ended.code == 0, ended.err
    assert f"you › {SHOWN}\n" in ended.out
    assert is_safe(ended.out + ended.err)
    answer = json.loads(whet(*words, "--json").out)["answers"][0]
    assert answer["prompt"] == HOSTILE
