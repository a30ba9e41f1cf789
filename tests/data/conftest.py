"""Shared by the tests of the data side: a small tokenizer, a cache of one's own, files of conversations."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from whet.core.files import hash_json
from whet.data.prepare.store import Store, StoreWriter
from whet.data.render.chat_tokenizer import ChatTokenizer

from .template_families import CHATML, tokenizer_of

MakeStore = Callable[[Iterable[tuple[list[int], list[int]]]], Store]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that nobody else uses."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def chatml() -> PreTrainedTokenizerFast:
    """One of the test's own: some add tokens to it."""
    return copy.deepcopy(tokenizer_of(CHATML))


def line(*turns: tuple[str, str]) -> str:
    """A record of the messages format."""
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def in_memory_chat_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
    train_on: str = "assistant",
    stops: tuple[int, ...] = (),
    today: str | None = None,
) -> ChatTokenizer:
    """A tokenizer at hand as the language of a preparation; its content is its identity."""
    content = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.eos_token, stops]
    identity = {"tokenizer": hash_json(content), "template": "auto", "today": today}
    return ChatTokenizer(identity, lambda: tokenizer, lambda: stops, train_on)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines to a file: jsonl(text, …, name="train.jsonl")."""

    def write(*lines: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in lines))
        return path

    return write


@pytest.fixture
def make_store(tmp_path: Path) -> MakeStore:
    """A store of given (ids, loss) documents."""

    def make(documents: Iterable[tuple[list[int], list[int]]]) -> Store:
        return write_store(tmp_path / "store", documents)

    return make


def write_store(folder: Path, documents: Iterable[tuple[list[int], list[int]]], vocabulary: int = 1000) -> Store:
    """A store of given (ids, loss); document n comes from line 10 + n of one of two files in turns."""
    folder.mkdir(parents=True)
    writer = StoreWriter(folder, vocabulary)
    for number, (ids, loss) in enumerate(documents):
        writer.add(
            np.array(ids, np.int32),
            np.array(loss, np.uint8),
            np.array([len(ids)], np.int32),
            np.array([sum(loss[1:])], np.int32),
            np.array([[number % 2, 10 + number]], np.int64),
            np.array([abs(hash((*ids, -1, *loss)))], np.uint64),
        )
    writer.finish({"files": {"name": ["a.jsonl", "b.jsonl"], "source": [0, 1]}})
    return Store(folder)
