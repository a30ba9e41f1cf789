"""Prompts from a file: lines of text, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.data.conversation import BadRecordError
from whet.data.formats.messages import parse_turns
from whet.infer.chat import Message


def read_prompts(path: Path) -> list[list[Message]]:
    """What each line asks: the messages up to where the model is to speak.

    In `.jsonl` files a line is a text, {"prompt": text}, or {"messages": […]}, whose last answers are left out, so that
    a file to train on can be asked too. In all others a line is a prompt. Empty lines are passed over.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WhetError(f"--prompts: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise WhetError(f"--prompts: {path}: this is not a text file in UTF-8") from None
    read = _from_json if path.suffix in (".jsonl", ".ndjson") else _from_text
    found = [read(line, f"--prompts: {path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise WhetError(f"--prompts: {path}: there is no prompt in this file. Write one on each line")
    return found


def _from_text(line: str, place: str) -> list[Message]:
    return [{"role": "user", "content": line}]


def _from_json(line: str, place: str) -> list[Message]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise WhetError(f"{place}: no JSON ({error}). A file of plain lines must not be called .jsonl") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        value = value["prompt"]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise WhetError(f'{place}: this is neither a text nor an object with "prompt" (a text) or "messages" (a list)')
    try:
        messages = [turn.as_dict() for turn in parse_turns(messages)]  # as training reads them: parts become text
    except BadRecordError as error:
        raise WhetError(f"{place}: {error}") from None
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise WhetError(f"{place}: nothing is left to ask: all messages are the assistant's")
    return messages
