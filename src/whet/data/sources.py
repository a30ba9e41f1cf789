"""Reading sources: each line becomes a conversation, or a reason why it cannot."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import hash_file
from whet.data.config import Source
from whet.data.conversation import BadLine, BadRecordError, Conversation, Message, Origin
from whet.data.formats.messages import parse_record
from whet.data.orders import orders

BUILTIN: dict[str, Callable[[str], Iterator[tuple[str, str]]]] = {"builtin:orders": orders}
"""Generators of (prompt, answer) by name; each takes the split. They are endless: max_samples bounds them."""

BUILTIN_SAMPLES = 1000
"""How many conversations a generator gives when max_samples is not set."""


def read_source(source: Source) -> Iterator[Conversation | BadLine]:
    """The conversations of a source, in order; nothing is skipped silently."""
    if source.path.startswith("builtin:"):
        items: Iterator[Conversation | BadLine] = _generate(source)
    else:
        items = _read_jsonl(_existing(source.path))
    return itertools.islice(items, source.max_samples)


def fingerprint(source: Source) -> dict[str, object]:
    """What identifies a source's content: a file by its bytes, a generator by its first answers."""
    identity: dict[str, object] = {"max_samples": source.max_samples}
    if source.path.startswith("builtin:"):
        return {
            **identity,
            "path": source.path,
            "split": (source.split or "train"),
            "start": [*itertools.islice(_pairs(source), 9)],
        }
    return {**identity, "content": hash_file(_existing(source.path))}


def size_of(source: Source) -> int:
    """Bytes of a file; for a generator an estimate from its first conversations."""
    if source.path.startswith("builtin:"):
        first = [*itertools.islice(_pairs(source), 9)]
        return (source.max_samples or BUILTIN_SAMPLES) * max(len(prompt + answer) for prompt, answer in first)
    return _existing(source.path).stat().st_size


def expected(source: Source) -> int:
    """How many lines there will be, for the progress bar."""
    if source.path.startswith("builtin:"):
        return source.max_samples or BUILTIN_SAMPLES
    with _existing(source.path).open("rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b"")) + 1
    return min(lines, source.max_samples or lines)


def _pairs(source: Source) -> Iterator[tuple[str, str]]:
    if source.path not in BUILTIN:
        raise WhetError(f"data.sources: there is no {source.path}; built in are: {', '.join(BUILTIN)}")
    return BUILTIN[source.path](source.split or "train")


def _generate(source: Source) -> Iterator[Conversation]:
    name = f"{source.path}/{(source.split or 'train')}"
    pairs = itertools.islice(_pairs(source), source.max_samples or BUILTIN_SAMPLES)
    for line, (prompt, answer) in enumerate(pairs, 1):
        yield Conversation((Message("user", prompt), Message("assistant", answer)), Origin(name, line))


def _existing(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise WhetError(
            f"data.sources: {name}: no such file (looked in {Path.cwd()}). "
            "Give the path of a JSONL file, or a built-in generator such as builtin:orders"
        )
    if not path.is_file():
        raise WhetError(f"data.sources: {name}: this is a folder; give a JSONL file in it")
    if path.stat().st_size == 0:
        raise WhetError(
            f"data.sources: {name}: the file is empty. It needs one JSON object on each line, such as "
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
        )
    if not os.access(path, os.R_OK):
        raise WhetError(f"data.sources: {name}: permission denied; make the file readable for you")
    return path


def _read_jsonl(path: Path) -> Iterator[Conversation | BadLine]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            origin = Origin(str(path), number)
            try:
                yield parse_record(_parse_json(raw), origin)
            except BadRecordError as error:
                yield BadLine(origin, error.reason, str(error))


def _parse_json(raw: bytes) -> object:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecordError("not UTF-8", f"byte {error.start} is not valid UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadRecordError("broken JSON", f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise BadRecordError("broken JSON", f"JSON that cannot be read: {error}") from None
