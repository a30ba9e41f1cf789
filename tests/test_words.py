"""Names are the field's: no module, class or function carries a private word that whet once had for a thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import whet

SOURCE = Path(whet.__file__).parent

PRIVATE = {
    "ask": "request, launch", "asked": "requested", "recorded": "captured (CUDA graph)", "recording": "capture",
    "dye": "sentinel", "dyed": "sentinel", "questions": "what the template branches on", "skeleton": "cached layout",
    "quick": "fast path", "opening": "shared prefix", "settle": "tokenize, apply", "settled": "resolved",
    "lockstep": "batched packing", "arrange": "balance", "hollow": "placeholder", "narrow": "cast", "narrowed": "cast",
    "chosen": "supervised positions", "choosing": "select", "look": "inspect", "agree": "synchronize",
    "divided": "sharded", "divides": "shards", "middle": "intermediate", "thin": "low-rank", "pieces": "SentencePiece",
    "meeting": "barrier", "meets": "barrier", "whereabouts": "heartbeat, phase", "here": "phase",
    "words": "message", "patience": "retry, timeout", "survive": "failure report", "together": "across ranks",
    "arithmetic": "precision", "numbers": "dtype", "learn": "train", "go": "restore", "wish": "export request",
    "speech": "generation settings", "ship": "export", "ready": "loaded", "talk": "chat",
    "fleet": "launch", "watch": "report, monitor", "squares": "norm", "told": "reported", "say": "print, log",
    "says": "prints", "away": "offloaded", "alone": "unpacked", "beside": "next to, compared with",
}  # fmt: skip
"""Word → what to say instead."""

MAY_STAY = {
    "generate_arithmetic": "exercises in arithmetic",
    "look_alike_pattern": "text that looks like a marker",
    "_with_recorded_precision": "what a checkpoint's manifest records",
    "collect_usage_pieces": "click's own name",
    "_recorded_model": "what a run's config records",
    "recorded_data": "what a run's ledger records",
    "NonfiniteWatch": "watches modules for non-finite values",
    "watch_nonfinite": "watches modules for non-finite values",
}
"""Name → why this one means what it says."""


def names(source: str) -> Iterator[str]:
    """Every class and function that a source defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def words_of(name: str) -> list[str]:
    """The words of a snake_case or CamelCase name."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def private_names(module: str, source: str) -> list[str]:
    found = [name for name in (module, *names(source)) if set(words_of(name)) & PRIVATE.keys()]
    return [name for name in found if name not in MAY_STAY]


def test_names_are_the_fields() -> None:
    found = {
        str(path.relative_to(SOURCE)): wrong
        for path in sorted(SOURCE.rglob("*.py"))
        if (wrong := private_names(path.stem, path.read_text()))
    }
    assert found == {}, "say what the field says (PRIVATE in this test)"


def test_every_exception_is_used() -> None:
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py")) + "\n".join(
        p.stem for p in SOURCE.rglob("*.py")
    )
    assert [name for name in MAY_STAY if not re.search(rf"\b{name}\b", text)] == []


def test_a_private_word_is_found() -> None:
    assert private_names("hollow", "class DyedText: ...\ndef look_up(): ...\ndef load(): ...") == [
        "hollow", "DyedText", "look_up",
    ]  # fmt: skip
