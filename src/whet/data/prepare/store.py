"""The store: tokenized documents and loss masks on disk, with origins and checksums. It is complete or absent.

tokens.bin/.idx   ids                         loss.bin/.idx   u8; loss[i] = 1: token i is a target
origin.npy        (file, line) of each        targets.npy     number of targets of each
hashes.npy        identify duplicates         tokenizer.json  what the ids mean
ledger.jsonl      every line that was dropped or changed
manifest.json     written last: present means complete; has the checksums of all files and of itself
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.checksums import FileRecords, find_damage, hash_files, read_hashed_json, write_hashed_json
from whet.core.errors import WhetError, describe_error, os_error
from whet.core.files import resolve_path, user_path
from whet.data.conversation import Origin
from whet.data.indexed_dataset import IndexedReader, IndexedWriter, token_dtype
from whet.data.prepare.ledger import LEDGER_LINES, has_changes, with_use
from whet.data.render.renderer import Rendered

if TYPE_CHECKING:
    from numpy.typing import NDArray


MANIFEST = "manifest.json"
_CHECKSUM_BLOCK = 2**26  # bytes; blocks are hashed in parallel


class StoreWriter:
    """Writes a store into a folder; `finish` completes it."""

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        self._folder = folder
        self._tokens = IndexedWriter(folder / "tokens", token_dtype(vocabulary_size))
        self._loss = IndexedWriter(folder / "loss", np.uint8)
        self._origins: list[NDArray[np.int64]] = []
        self._targets: list[NDArray[np.int32]] = []
        self._hashes: list[NDArray[np.uint64]] = []

    def add(
        self,
        tokens: NDArray[np.generic],
        loss: NDArray[np.uint8],
        sizes: NDArray[np.int32],
        targets: NDArray[np.int32],
        origins: NDArray[np.int64],
        hashes: NDArray[np.uint64],
    ) -> None:
        """Append documents, back to back in `tokens` and `loss`. `origins[i]` is (file, line)."""
        self._tokens.add(tokens, sizes)
        self._loss.add(loss, sizes)
        self._origins.append(origins)
        self._targets.append(targets)
        self._hashes.append(hashes)

    def close(self) -> None:
        self._tokens.close()
        self._loss.close()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the arrays and, last, the manifest."""
        self._tokens.finish()
        self._loss.finish()
        np.save(self._folder / "origin.npy", np.concatenate([np.empty((0, 2), np.int64), *self._origins]))
        np.save(self._folder / "targets.npy", np.concatenate([np.empty(0, np.int32), *self._targets]))
        np.save(self._folder / "hashes.npy", np.concatenate([np.empty(0, np.uint64), *self._hashes]))
        checksums = hash_files(self._folder, self._folder.iterdir(), _CHECKSUM_BLOCK)
        write_hashed_json(self._folder / MANIFEST, {**manifest, "checksums": checksums})


class Store:
    """A complete store, memory-mapped: opening takes the same time at any size."""

    def __init__(self, folder: Path) -> None:
        if not (folder / MANIFEST).exists():
            raise WhetError(f"{folder}: no complete store here ({MANIFEST} is missing); run `whet prepare` again")
        self.folder = folder
        self.renamed: dict[tuple[int, str], str] = {}
        """(source, name when the store was built) → name of today, of files that have another."""
        self.manifest = read_hashed_json(folder / MANIFEST, f"Delete the folder {folder} and prepare the data again")
        try:
            self._tokens, self._loss = IndexedReader(folder / "tokens"), IndexedReader(folder / "loss")
        except WhetError as error:
            raise WhetError(f"{error}. Delete the folder {folder} and prepare the data again") from None
        self._origins: NDArray[np.int64] = _load_array(folder / "origin.npy", np.int64, 2)
        self.targets: NDArray[np.int32] = _load_array(folder / "targets.npy", np.int32)
        self.hashes: NDArray[np.uint64] = _load_array(folder / "hashes.npy", np.uint64)
        counts = {len(part) for part in (self._tokens, self._loss, self._origins, self.targets, self.hashes)}
        if len(counts) > 1:
            raise WhetError(f"{folder}: its files disagree on the number of documents; delete it and prepare again")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def checksums(self) -> FileRecords:
        """Of all files but the manifest; empty for a store of an earlier version."""
        return dict(self.manifest.get("checksums", {}))

    @property
    def ledger_lines(self) -> Path | None:
        """The file that names every dropped or changed line; None for a store of an earlier version, which names only
        the first of each reason."""
        file = self.folder / LEDGER_LINES
        return file if file.is_file() else None

    def describe_ledger_lines(self) -> str | None:
        """Where to find every line that was dropped or changed; None if there is none."""
        if not any(map(has_changes, self.manifest["accounts"])):
            return None
        if self.ledger_lines is None:
            return (
                f"{self.folder} was prepared by an earlier version, which named the first lines of each reason only. "
                "To get all of them, delete the folder and prepare the data again"
            )
        return f"{self.ledger_lines} names every line that was dropped or changed"

    def iter_ledger_lines(self, use: str) -> Iterator[bytes]:
        """The lines of that file as a run has them. `use` is train or validation."""
        with (self.folder / LEDGER_LINES).open("rb") as file:
            for line in file:
                yield with_use(line, use, self.renamed)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document."""
        return self._tokens.sizes

    @property
    def sources(self) -> NDArray[np.int64]:
        """The source number of each document."""
        return np.array(self.manifest["files"]["source"], dtype=np.int64)[self._origins[:, 0]]

    def ids(self, document: int) -> NDArray[np.int64]:
        return self._tokens[document].astype(np.int64)

    def loss(self, document: int) -> NDArray[np.bool_]:
        return self._loss[document].astype(np.bool_)

    def gather(self, documents: NDArray[np.integer], ids: NDArray[np.int64], loss: NDArray[np.uint8]) -> None:
        """Write these documents back to back into `ids` and `loss`, which have exactly their total length."""
        self._tokens.gather(documents, ids)
        self._loss.gather(documents, loss)

    def origin(self, document: int) -> Origin:
        """The file and line that a document was read from."""
        file, line = self._origins[document]
        return Origin(self.manifest["files"]["name"][int(file)], int(line))

    def lines_of_source(self, source: int) -> dict[str, NDArray[np.int64]]:
        """The lines that the documents of a source come from, by file."""
        files = self.manifest["files"]
        numbers = [number for number, owner in enumerate(files["source"]) if owner == source]
        return {
            str(resolve_path(user_path(files["name"][i]))): self._origins[self._origins[:, 0] == i, 1] for i in numbers
        }

    def find(self, origin: Origin) -> NDArray[np.int64]:
        """The documents of a line: none, one, or several if it was split."""
        if origin.source not in self.manifest["files"]["name"]:
            return np.empty(0, dtype=np.int64)
        file = self.manifest["files"]["name"].index(origin.source)
        first, last = np.searchsorted(
            self._origins[:, 0], [file, file + 1]
        )  # files are numbered in order of appearance
        lines = self._origins[first:last, 1]
        a, b = np.searchsorted(lines, [origin.line, origin.line + 1])
        return np.arange(first + a, first + b, dtype=np.int64)

    def conversation_offsets(self) -> NDArray[np.int64]:
        """Conversation c consists of the documents offsets[c] to offsets[c + 1]: one, or several if it was split."""
        changes = np.flatnonzero((np.diff(self._origins, axis=0) != 0).any(axis=1)) + 1
        return np.concatenate([[0], changes, [len(self)]]).astype(np.int64)

    def matches_hash(self, documents: Iterable[int]) -> bool:
        """Whether ids and masks of a conversation's documents still match its hash."""
        numbers = list(documents)
        parts = ((self._tokens[i].astype(np.int32), self._loss[i].astype(np.uint8)) for i in numbers)
        return content_hash(parts) == int(self.hashes[numbers[0]])


def _load_array(path: Path, dtype: type[np.generic], dimensions: int = 1) -> Any:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype != dtype or array.ndim != dimensions:
            raise ValueError(f"{array.ndim} dimensions of {array.dtype}")
        return array
    except Exception as error:  # a damaged header can raise almost anything
        raise os_error(error, "opening prepared data", path) or WhetError(
            f"{path}: missing or damaged; delete its folder and prepare the data again"
        ) from None


def content_hash(documents: Iterable[tuple[NDArray[np.int32], NDArray[np.uint8]]]) -> int:
    """A 64-bit hash of ids and loss masks."""
    digest = hashlib.blake2b(digest_size=8)
    for ids, loss in documents:
        digest.update(np.ascontiguousarray(ids).data)
        digest.update(np.ascontiguousarray(loss).data)
    return int.from_bytes(digest.digest(), "little")


def count_targets(document: Rendered) -> int:
    """The number of supervised tokens; the first one has no context to be predicted from and does not count."""
    return int(np.count_nonzero(document.loss[1:]))


def find_overlap(one: Store, other: Store) -> NDArray[np.int64]:
    """Documents of `one` that are exact duplicates of documents in `other`."""
    return np.flatnonzero(np.isin(one.hashes, other.hashes))


# The check of a run's stores: in the background while the run starts, because a large store takes minutes to read.


class StoreCheck:
    """Compares the files of stores with the checksums in their manifests, in a thread of low priority.

    An error inside the `with` block may come from damage that is not found yet, such as a token that the model does not
    know: the check is then completed, and damage is raised instead of the error.
    """

    def __init__(self, stores: Iterable[Store]) -> None:
        self._stores = {store.folder: store for store in stores}
        self._damage: WhetError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="check the stores", daemon=True)

    def __enter__(self) -> StoreCheck:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self._thread.join()
            if self._damage is not None and error is not self._damage:
                raise self._damage from error
        self._stop.set()
        self._thread.join()

    @property
    def has_failed(self) -> bool:
        """Whether damage has been found so far."""
        return self._damage is not None

    def result(self) -> WhetError | None:
        """The damage that was found. Blocks until the check is complete."""
        self._thread.join()
        return self._damage

    def require_intact(self) -> None:
        """Raise the damage that was found. Blocks until the check is complete."""
        if (damage := self.result()) is not None:
            raise damage

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread and those it starts
        try:
            for folder, store in self._stores.items():
                for message in find_damage(folder, store.checksums, stop=self._stop):
                    raise WhetError(
                        f"{message}. Delete the folder {folder} and start again (whet train: with --resume): the data "
                        "is then prepared again"
                    )
        except WhetError as error:
            self._damage = error
        except Exception as error:
            self._damage = WhetError(f"{folder}: checking the prepared data failed: {describe_error(error)}")
