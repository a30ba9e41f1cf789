"""Chunk files: the documents of some consecutive records, written by workers and merged into the store.

Chunks are the unit of parallel work and of resuming an interrupted preparation.
"""

from __future__ import annotations

import contextlib
import io
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import WhetError, first_line, os_error
from whet.core.files import atomic_write
from whet.core.json_lines import parse_json_line
from whet.data.config import DataConfig, Source
from whet.data.conversation import Origin
from whet.data.indexed_dataset import token_dtype
from whet.data.prepare.ledger import LEDGER_LINES, Account, Outcome, ledger_line
from whet.data.prepare.store import StoreWriter, content_hash
from whet.data.render.chat_tokenizer import ConversationTokenizer
from whet.data.render.renderer import Rendered

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Chunk:
    """The documents of a chunk as flat arrays, and their part of the ledger."""

    def __init__(self, source: int, vocabulary_size: int) -> None:
        self.source, self.vocabulary_size = source, vocabulary_size
        self.account = Account()
        self._dtype = token_dtype(vocabulary_size)
        self._tokens: list[NDArray[np.int32]] = []
        self._loss: list[NDArray[np.uint8]] = []
        self._sizes, self._targets, self._ended = array("i"), array("i"), array("B")
        self._files: dict[str, int] = {}
        self._file, self._line, self._hash = array("i"), array("q"), array("Q")
        self._ledger_lines: list[bytes] = []
        self._ledger_file, self._ledger_line = array("i"), array("q")

    def drop(self, reason: str, origin: Origin, detail: str) -> None:
        """Account for a conversation that is left out."""
        self.account.drop(reason, origin)
        self._list("dropped", reason, origin, detail)

    def truncate(self, origin: Origin, detail: str) -> None:
        """Account for a truncated conversation; it may still be dropped."""
        self.account.truncate(origin)
        self._list("truncated", "too long", origin, detail)

    def split(self, origin: Origin, detail: str) -> None:
        """Account for a conversation that is kept in pieces."""
        self.account.split += 1
        self._list("split", "too long", origin, detail)

    def note(self, what: str, origin: Origin) -> None:
        """Account for a remark on a conversation that is kept."""
        self.account.note(what, origin)
        self._list("kept", what, origin, "")

    def _list(self, outcome: Outcome, reason: str, origin: Origin, detail: str) -> None:
        self._ledger_lines.append(ledger_line(self.source, origin, outcome, reason, detail))
        self._ledger_file.append(self._files.setdefault(origin.source, len(self._files)))
        self._ledger_line.append(origin.line)

    def add(self, documents: Sequence[tuple[Rendered, int]], origin: Origin) -> None:
        """Append the documents of one conversation, each with its number of targets. Their common hash identifies
        duplicates."""
        content = content_hash((document.ids, document.loss) for document, _ in documents)
        for document, targets in documents:
            self._tokens.append(document.ids)
            self._loss.append(document.loss)
            self._sizes.append(len(document.ids))
            self._targets.append(targets)
            self._ended.append(document.supervises_end)
            self._file.append(self._files.setdefault(origin.source, len(self._files)))
            self._line.append(origin.line)
            self._hash.append(content)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        about = {"source": self.source, "files": list(self._files), "account": self.account.state()}
        file = io.BytesIO()
        np.savez(
            file,
            tokens=np.concatenate([np.empty(0, np.int32), *self._tokens]).astype(self._dtype),
            loss=np.concatenate([np.empty(0, np.uint8), *self._loss]),
            sizes=np.array(self._sizes, dtype=np.int32),
            targets=np.array(self._targets, dtype=np.int32),
            ended=np.array(self._ended, dtype=np.uint8),
            files=np.array(self._file, dtype=np.int32),
            lines=np.array(self._line, dtype=np.int64),
            hashes=np.array(self._hash, dtype=np.uint64),
            ledger=np.frombuffer(b"".join(self._ledger_lines), dtype=np.uint8),
            ledger_files=np.array(self._ledger_file, dtype=np.int32),
            ledger_lines=np.array(self._ledger_line, dtype=np.int64),
            about=np.frombuffer(json.dumps(about, ensure_ascii=False).encode(), dtype=np.uint8),
        )
        atomic_write(path, file.getvalue())


class SavedChunk:
    """A chunk file; arrays are read on access, and each has a CRC, which zip files do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._arrays = np.load(path, allow_pickle=False)
        except Exception as error:  # a damaged file can raise almost anything
            raise self._damage(error) from None
        about = json.loads(bytes(self["about"]))
        self.source: int = about["source"]
        self.files: list[str] = about["files"]
        self.account = Account.restore(about["account"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            found: NDArray[Any] = self._arrays[name]
        except Exception as error:
            raise self._damage(error) from None
        return found

    def ledger_with(self, more: Sequence[tuple[int, int, bytes]]) -> bytes:
        """Its lines of ledger.jsonl with `more` (number of the file, line, text) among them, in the data's order."""
        own = self["ledger"].tobytes()
        if not more:
            return own
        places = zip(self["ledger_files"].tolist(), self["ledger_lines"].tolist(), strict=True)
        listed = [(*place, text) for place, text in zip(places, own.splitlines(keepends=True), strict=True)]
        return b"".join(text for *_, text in sorted([*listed, *more], key=lambda entry: entry[:2]))

    def _damage(self, error: Exception) -> WhetError:
        return os_error(error, "merging the prepared data", self._path) or WhetError(
            f"{self._path}: damaged ({first_line(error)}). Start again: the data is prepared anew"
        )

    def close(self) -> None:
        self._arrays.close()


def merge_chunks(
    paths: Sequence[Path], folder: Path, key: str, sources: Sequence[Source], use: str, config: DataConfig,
    tokenizer: ConversationTokenizer,
) -> None:  # fmt: skip
    """Merge the chunks in `paths`, in order, into a store in `folder`: find duplicates, add up the accounts."""
    accounts = [Account() for _ in sources]
    files = _FileTable()
    originals = _find_originals(paths)
    with contextlib.closing(StoreWriter(folder, tokenizer.vocabulary_size())) as writer:
        with (folder / LEDGER_LINES).open("wb") as ledger:
            for path in paths:
                with contextlib.closing(SavedChunk(path)) as chunk:
                    _append_chunk(chunk, originals, accounts[chunk.source], files, writer, ledger, config.deduplicate)
        _require_conversations(accounts, sources, folder / LEDGER_LINES)
        writer.finish(
            {
                "key": key,
                "files": {"name": files.names, "source": files.sources},
                "accounts": [account.as_dict(s.path, use) for account, s in zip(accounts, sources, strict=True)],
                **tokenizer.identity,
            }
        )


class _FileTable:
    """Numbers the files of all chunks in order of appearance, and knows where each document came from."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sources: list[int] = []
        self._known: dict[tuple[int, str], int] = {}
        self._file, self._line = array("i"), array("q")

    def __len__(self) -> int:
        """The number of documents so far."""
        return len(self._line)

    def add_documents(self, file: NDArray[np.int64], line: NDArray[np.int64]) -> None:
        self._file.frombytes(file.astype(np.int32).tobytes())
        self._line.frombytes(line.astype(np.int64).tobytes())

    def origin(self, document: int) -> Origin:
        return Origin(self.names[self._file[document]], self._line[document])

    def indices(self, chunk: SavedChunk) -> NDArray[np.int64]:
        """The numbers of a chunk's files."""
        for name in chunk.files:
            if (chunk.source, name) not in self._known:
                self._known[chunk.source, name] = len(self.names)
                self.names.append(name)
                self.sources.append(chunk.source)
        return np.array([self._known[chunk.source, name] for name in chunk.files], dtype=np.int64)


def _find_originals(paths: Sequence[Path]) -> NDArray[np.int64]:
    """For each document of a conversation that duplicates an earlier one exactly, the first document of that one; −1
    for all others."""
    hashes, starts = [np.empty(0, np.uint64)], [np.empty(0, bool)]
    for path in paths:
        with contextlib.closing(SavedChunk(path)) as chunk:
            hashes.append(chunk["hashes"])
            starts.append(_conversation_starts(chunk["files"], chunk["lines"]))
    hash_, start = np.concatenate(hashes), np.concatenate(starts)
    conversation, begins = np.cumsum(start) - 1, np.flatnonzero(start)
    _, first, same = np.unique(hash_[start], return_index=True, return_inverse=True)
    original = first[same]  # of each conversation: the first one with its content
    document = np.where(original == np.arange(len(original)), -1, begins[original])
    return document[conversation]


def _conversation_starts(file: NDArray[np.integer], line: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which documents start a conversation: the documents of a split one have the same origin."""
    changes = np.ones(len(line), dtype=bool)
    changes[1:] = (np.diff(file) != 0) | (np.diff(line) != 0)
    return changes


def _append_chunk(
    chunk: SavedChunk,
    originals: NDArray[np.int64],
    account: Account,
    files: _FileTable,
    writer: StoreWriter,
    ledger: IO[bytes],
    drop: bool,
) -> None:
    numbers = files.indices(chunk)
    sizes, targets, file, line = (chunk[name] for name in ("sizes", "targets", "files", "lines"))
    original = originals[len(files) : len(files) + len(sizes)]
    files.add_documents(numbers[file], line)
    duplicates = original >= 0
    part = chunk.account
    listed: list[tuple[int, int, bytes]] = []
    for i in np.flatnonzero(duplicates & _conversation_starts(file, line)):
        origin = Origin(chunk.files[int(file[i])], int(line[i]))
        part.duplicates += 1
        if drop:
            part.kept -= 1
            part.drop("duplicate", origin)
        else:
            part.add_example("duplicate", origin)
        detail = f"the same tokens as {files.origin(int(original[i]))}"
        text = ledger_line(chunk.source, origin, "dropped" if drop else "kept", "duplicate", detail)
        listed.append((int(file[i]), origin.line, text))
    ledger.write(chunk.ledger_with(listed))
    if drop:
        part.documents -= int(duplicates.sum())
        part.ended -= int(chunk["ended"][duplicates].sum())
        part.tokens -= int(sizes[duplicates].sum())
        part.supervised -= int(targets[duplicates].sum())
    account.add(part)
    tokens, loss = chunk["tokens"], chunk["loss"]
    keep = ~duplicates if drop else np.ones(len(sizes), dtype=bool)
    if not keep.all():
        kept = np.repeat(keep, sizes)
        tokens, loss = tokens[kept], loss[kept]
    origins = np.stack([numbers[file], line.astype(np.int64)], axis=1) if len(line) else np.empty((0, 2), np.int64)
    writer.add(tokens, loss, sizes[keep], targets[keep], origins[keep], chunk["hashes"][keep])


def _require_conversations(accounts: Sequence[Account], sources: Sequence[Source], ledger: Path) -> None:
    if any(account.kept for account in accounts):
        return
    reasons = "; ".join(
        f"{source.path}: "
        + (", ".join(f"{n} {reason}" for reason, n in account.reasons.items()) or "no conversation in it")
        for account, source in zip(accounts, sources, strict=True)
    )
    remedy = "Fix the data, or check what data.sources selects"
    with ledger.open("rb") as lines:
        dropped = next(filter(None, map(parse_json_line, lines)), None)
    if dropped is not None:
        remedy = f"The first: {dropped['file']}:{dropped['line']}: {dropped['detail']}. {remedy}"
    if any("too long" in account.reasons for account in accounts):
        remedy = "Raise data.max_length, or choose data.too_long=split or truncate"
    raise WhetError(f"no conversation is left to train on ({reasons}). {remedy}")
