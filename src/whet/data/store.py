"""The store: conversations as tokens and loss masks on disk, with their origins, complete or absent.

tokens.bin/.idx   ids                         loss.bin/.idx   u8; loss[i] = 1: token i is a target
origin.npy        (source, line) of each      targets.npy     number of targets of each
manifest.json     written last: present means complete
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.core.errors import WhetError
from whet.core.files import read_json, write_json
from whet.data.conversation import Origin
from whet.data.indexed import IndexedReader, IndexedWriter, token_dtype
from whet.data.render import Rendered

if TYPE_CHECKING:
    from numpy.typing import NDArray

MANIFEST = "manifest.json"


class StoreWriter:
    """Fills a folder that becomes a store when `finish` writes its manifest."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        self._tokens = IndexedWriter(folder / "tokens", token_dtype(vocabulary))
        self._loss = IndexedWriter(folder / "loss", np.uint8)
        self._origins: list[tuple[int, int]] = []
        self._targets: list[int] = []

    def add(self, document: Rendered, source: int, line: int) -> None:
        """Append a document that came from line `line` of source number `source`."""
        self._tokens.add(document.ids)
        self._loss.add(document.loss)
        self._origins.append((source, line))
        self._targets.append(count_targets(document))

    def close(self) -> None:
        self._tokens.close()
        self._loss.close()

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write what makes the folder a store, the manifest last."""
        self._tokens.finish()
        self._loss.finish()
        np.save(self._folder / "origin.npy", np.array(self._origins, dtype=np.int64).reshape(-1, 2))
        np.save(self._folder / "targets.npy", np.array(self._targets, dtype=np.int32))
        write_json(self._folder / MANIFEST, manifest)


class Store:
    """A complete store, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        if not (folder / MANIFEST).exists():
            raise WhetError(f"{folder}: no complete store here ({MANIFEST} is missing); run `whet prepare` again")
        self.folder = folder
        self.manifest: dict[str, Any] = read_json(folder / MANIFEST)
        try:
            self._tokens, self._loss = IndexedReader(folder / "tokens"), IndexedReader(folder / "loss")
        except WhetError as error:
            raise WhetError(f"{error}. Delete the folder {folder}: it will be made again") from None
        self._origins: NDArray[np.int64] = _load(folder / "origin.npy")
        self.targets: NDArray[np.int32] = _load(folder / "targets.npy")
        if not len(self._tokens) == len(self._loss) == len(self._origins) == len(self.targets):
            raise WhetError(f"{folder}: its files disagree on the number of documents; delete it and prepare again")

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document."""
        return self._tokens.sizes

    def ids(self, document: int) -> NDArray[np.int64]:
        return self._tokens[document].astype(np.int64)

    def loss(self, document: int) -> NDArray[np.bool_]:
        return self._loss[document].astype(np.bool_)

    def gather(self, documents: NDArray[np.integer], ids: NDArray[np.int64], loss: NDArray[np.uint8]) -> None:
        """Write these documents back to back into `ids` and `loss`, which are as long as they are together."""
        self._tokens.gather(documents, ids)
        self._loss.gather(documents, loss)

    @property
    def sources(self) -> NDArray[np.int64]:
        """The number of the source that each document came from."""
        return self._origins[:, 0]

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """What each document says, in 64 bits."""
        digests = (
            hashlib.blake2b(self._tokens[number].tobytes(), digest_size=8).digest() for number in range(len(self))
        )
        return np.frombuffer(b"".join(digests), dtype=np.uint64)

    def origin(self, document: int) -> Origin:
        """The source and line that a document was read from."""
        source, line = self._origins[document]
        return Origin(self.manifest["sources"][int(source)], int(line))


def _load(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        raise WhetError(f"{path}: missing or damaged; delete its folder and prepare the data again") from None


def count_targets(document: Rendered) -> int:
    """How many tokens of a document are learned; its first one has nothing before it to be predicted from."""
    return int(document.loss[1:].sum())
