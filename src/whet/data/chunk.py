"""A chunk: the documents of some successive records, in a file of its own until all are merged into the store.

Chunks are what processes, and machines, share the work by, and what a killed preparation continues from. Their borders
depend on the sources alone.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.files import atomic_write
from whet.data.conversation import Origin
from whet.data.indexed import token_dtype
from whet.data.ledger import Account
from whet.data.render import Rendered
from whet.data.store import content_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Chunk:
    """Documents as flat arrays, with the part of the ledger that belongs to them."""

    def __init__(self, source: int, vocabulary: int) -> None:
        self.source, self.vocabulary = source, vocabulary
        self.account = Account()
        self._dtype = token_dtype(vocabulary)
        self._tokens: list[NDArray[np.int32]] = []
        self._loss: list[NDArray[np.uint8]] = []
        self._sizes, self._targets, self._ended = array("i"), array("i"), array("B")
        self._files: dict[str, int] = {}
        self._file, self._line, self._hash = array("i"), array("q"), array("Q")

    def add(self, documents: Sequence[tuple[Rendered, int]], origin: Origin) -> None:
        """Append the documents of one conversation, each with the number of its targets; their common hash tells
        copies of it."""
        content = content_hash((document.ids, document.loss) for document, _ in documents)
        for document, targets in documents:
            self._tokens.append(document.ids)
            self._loss.append(document.loss)
            self._sizes.append(len(document.ids))
            self._targets.append(targets)
            self._ended.append(document.ends)
            self._file.append(self._files.setdefault(origin.source, len(self._files)))
            self._line.append(origin.line)
            self._hash.append(content)

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
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
            about=np.frombuffer(json.dumps(about, ensure_ascii=False).encode(), dtype=np.uint8),
        )
        atomic_write(path, file.getbuffer())


class SavedChunk:
    """A chunk in its file; arrays are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._arrays = np.load(path, allow_pickle=False)
        about = json.loads(bytes(self._arrays["about"]))
        self.source: int = about["source"]
        self.files: list[str] = about["files"]
        self.account = Account.restore(about["account"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self._arrays[name]
        return found

    def close(self) -> None:
        self._arrays.close()
