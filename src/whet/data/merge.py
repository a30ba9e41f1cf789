"""Chunks → store: in order, copies found, the accounts of all added up."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.data.chunk import SavedChunk
from whet.data.config import DataConfig, Source
from whet.data.conversation import Origin
from whet.data.ledger import Account
from whet.data.store import StoreWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from whet.data.prepare import Language


def merge(
    paths: Sequence[Path], folder: Path, key: str, sources: Sequence[Source], use: str, config: DataConfig,
    language: Language,
) -> None:  # fmt: skip
    """Write the chunks in `paths` as a store into `folder`."""
    accounts = [Account() for _ in sources]
    files = _Files()
    copies = _copies(paths)
    with contextlib.closing(StoreWriter(folder, language.vocabulary())) as writer:
        at = 0
        for path in paths:
            with contextlib.closing(SavedChunk(path)) as chunk:
                count = len(chunk["sizes"])
                _add(chunk, copies[at : at + count], accounts[chunk.source], files, writer, config.deduplicate)
                at += count
        _require_something(accounts, sources)
        writer.finish(
            {
                "key": key,
                "files": {"name": files.names, "source": files.sources},
                "accounts": [account.as_dict(s.path, use) for account, s in zip(accounts, sources, strict=True)],
                **language.identity,
            }
        )


class _Files:
    """The files that documents came from, in the order in which they were met."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sources: list[int] = []
        self._known: dict[tuple[int, str], int] = {}

    def numbers(self, chunk: SavedChunk) -> NDArray[np.int64]:
        """The numbers here of a chunk's files."""
        for name in chunk.files:
            if (chunk.source, name) not in self._known:
                self._known[chunk.source, name] = len(self.names)
                self.names.append(name)
                self.sources.append(chunk.source)
        return np.array([self._known[chunk.source, name] for name in chunk.files], dtype=np.int64)


def _copies(paths: Sequence[Path]) -> NDArray[np.bool_]:
    """Which documents belong to a conversation that is an exact copy of an earlier one."""
    hashes, starts = [np.empty(0, np.uint64)], [np.empty(0, bool)]
    for path in paths:
        with contextlib.closing(SavedChunk(path)) as chunk:
            hashes.append(chunk["hashes"])
            starts.append(_starts(chunk["files"], chunk["lines"]))
    hash_, start = np.concatenate(hashes), np.concatenate(starts)
    conversation = np.cumsum(start) - 1
    first = np.zeros(int(start.sum()), dtype=bool)
    first[np.unique(hash_[start], return_index=True)[1]] = True
    return ~first[conversation]


def _starts(file: NDArray[np.integer], line: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Where a new conversation begins: pieces of one that was split have the same origin."""
    changes = np.ones(len(line), dtype=bool)
    changes[1:] = (np.diff(file) != 0) | (np.diff(line) != 0)
    return changes


def _add(
    chunk: SavedChunk, copies: NDArray[np.bool_], account: Account, files: _Files, writer: StoreWriter, drop: bool
) -> None:
    numbers = files.numbers(chunk)
    sizes, targets, file, line = (chunk[name] for name in ("sizes", "targets", "files", "lines"))
    part = chunk.account
    starts = _starts(file, line)
    for i in np.flatnonzero(copies & starts):
        origin = Origin(chunk.files[int(file[i])], int(line[i]))
        part.duplicates += 1
        if drop:
            part.kept -= 1
            part.drop("duplicate", origin)
        else:
            part.remember("duplicate", origin)
    if drop:
        part.documents -= int(copies.sum())
        part.ended -= int(chunk["ended"][copies].sum())
        part.tokens -= int(sizes[copies].sum())
        part.supervised -= int(targets[copies].sum())
    account.add(part)
    tokens, loss = chunk["tokens"], chunk["loss"]
    keep = ~copies if drop else np.ones(len(sizes), dtype=bool)
    if not keep.all():
        kept = np.repeat(keep, sizes)
        tokens, loss = tokens[kept], loss[kept]
    origins = np.stack([numbers[file], line.astype(np.int64)], axis=1) if len(line) else np.empty((0, 2), np.int64)
    writer.add(tokens, loss, sizes[keep], targets[keep], origins[keep], chunk["hashes"][keep])


def _require_something(accounts: Sequence[Account], sources: Sequence[Source]) -> None:
    if any(account.kept for account in accounts):
        return
    reasons = "; ".join(
        f"{source.path}: "
        + (", ".join(f"{n} {reason}" for reason, n in account.reasons.items()) or "no conversation in it")
        for account, source in zip(accounts, sources, strict=True)
    )
    remedy = "Mend the data, or see what data.sources selects"
    if any("too long" in account.reasons for account in accounts):
        remedy = "Raise data.max_length, or choose data.too_long=split or truncate"
    raise WhetError(f"no conversation is left to train on ({reasons}). {remedy}")
