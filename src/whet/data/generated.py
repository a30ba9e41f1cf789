"""Sources that need no file: endless and reproducible, with two splits that never share a question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.core.errors import WhetError
from whet.data.arithmetic import arithmetic
from whet.data.config import Source
from whet.data.containers.base import Container, Raw, Ready
from whet.data.conversation import Conversation, Message, Origin
from whet.data.orders import orders
from whet.data.sample import SPLITS, Sample
from whet.data.spelling import spelling, spelling_bee

BUILTIN_SAMPLES = 1000
"""How many conversations a generator gives when neither max_samples nor stop is set."""


def _orders(split: str, _calculator: str) -> Iterator[Sample]:
    for prompt, answer in orders(split):
        yield Sample((Message("user", prompt), Message("assistant", answer)))


BUILTIN: dict[str, Callable[[str, str], Iterator[Sample]]] = {
    "builtin:orders": _orders,
    "builtin:spelling": spelling,
    "builtin:spelling-bee": spelling_bee,
    "builtin:arithmetic": arithmetic,
}
"""By name; each takes the split and what becomes of sums (Source.calculator)."""


class Generated(Container):
    """A generator, read like a file without an end."""

    kind = "generated"

    def __init__(self, source: Source) -> None:
        split = source.split or "train"
        if source.path not in BUILTIN:
            raise WhetError(f"data.sources: there is no {source.path}; built in are: {', '.join(BUILTIN)}")
        if split not in SPLITS:
            raise WhetError(f"data.sources: {source.path}: there is no split {split!r}; it has {' and '.join(SPLITS)}")
        for key in ("fields", "subset", "mask"):
            if getattr(source, key) is not None:
                raise WhetError(f"data.sources: {source.path}: {key} means nothing for a generator; remove it")
        if source.format != "auto":
            raise WhetError(f"data.sources: {source.path}: a generator has no format; remove it")
        super().__init__(f"{source.path}/{split}", Path(source.path))
        self._make, self._split, self._calculator = BUILTIN[source.path], split, source.calculator

    def records(self) -> Iterator[Raw]:
        for number, sample in enumerate(self._make(self._split, self._calculator), 1):
            yield Raw(number, Ready(sample), self.name)

    def count(self) -> int:
        raise AssertionError("a generator has no end")

    def size(self) -> int:
        raise AssertionError("a generator has no end")


def parse(sample: Any, _names: Mapping[str, str], origin: Origin) -> Conversation:
    """A sample is a conversation already."""
    return Conversation(sample.messages, origin, sample.tools)
