"""Pre-tokenized documents in Megatron's .bin/.idx files, as GPT-NeoX and Megatron-LM write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whet.core.errors import WhetError
from whet.core.files import hash_file
from whet.data.config import MaskRules
from whet.data.conversation import Origin, TokenizedDocument
from whet.data.indexed_dataset import IndexedReader
from whet.data.read.container import Container, RawRecord
from whet.data.read.mask_rules import loss_mask_from_rules

# Documents that were tokenised elsewhere: the `.bin/.idx` files of GPT-NeoX and Megatron-LM.

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TokenFile:
    """A `.bin/.idx` pair by document. The path may end in .bin, .idx or neither.

    A document is what the index's doc_idx groups: one sequence, or several that belong together.
    """

    def __init__(self, path: Path, mask: MaskRules | None = None) -> None:
        self._path, self._mask = path, mask
        self._reader = _open_index(path)
        self._bounds = self._reader.documents

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def ids(self, document: int) -> NDArray[np.int32]:
        reader = self._reader
        first, last = int(self._bounds[document]), int(self._bounds[document + 1])
        if not 0 <= first <= last <= len(reader):
            raise WhetError(
                f"{reader.index}: damaged: document {document + 1} is said to be sequences {first} to {last}"
            )
        parts = [reader[sequence] for sequence in range(first, last)]
        whole = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, reader.dtype), *parts])
        return _to_token_ids(whole, self.origin(document))

    def loss(self, document: int) -> NDArray[np.uint8]:
        """What the mask rules leave to learn."""
        return loss_mask_from_rules(self.ids(document), self._mask)

    def origin(self, document: int) -> Origin:
        return Origin(str(self._path), document + 1)


def read_token_file(path: Path, mask: MaskRules | None) -> Iterator[TokenizedDocument]:
    """The documents of a file, in order, with what `mask` leaves to learn."""
    file = TokenFile(path, mask)
    for number in range(len(file)):
        ids = file.ids(number)
        yield TokenizedDocument(ids, loss_mask_from_rules(ids, mask), file.origin(number))


def count_documents(path: Path) -> int:
    """How many documents a file holds, without reading it."""
    return len(TokenFile(path))


def _open_index(path: Path) -> IndexedReader:
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    reader = IndexedReader(prefix, contiguous=False)
    if reader.dtype.kind == "f":
        raise WhetError(f"{reader.index}: the file holds {reader.dtype} numbers, which are no token ids")
    return reader


def _to_token_ids(tokens: NDArray[np.generic], origin: Origin) -> NDArray[np.int32]:
    wide = tokens.astype(np.int64)
    wrong = wide[(wide < 0) | (wide > np.iinfo(np.int32).max)]
    if len(wrong):
        raise WhetError(f"{origin}: the document holds {int(wrong[0])}, which is no token id; the file is damaged")
    return wide.astype(np.int32)


# `.bin` with its `.idx`: documents that were tokenised before.


@dataclass(frozen=True, slots=True)
class _LazyDocument:
    """One document of a file, read when it is asked for."""

    file: TokenFile
    number: int

    def decode(self) -> TokenizedDocument:
        return TokenizedDocument(self.file.ids(self.number), self.file.loss(self.number), self.file.origin(self.number))


class TokenFileContainer(Container):
    """The tokens are handed on as they are, with the mask that the source's rules give."""

    kind = "tokens"

    def __init__(self, name: str, path: Path, mask: MaskRules | None) -> None:
        super().__init__(name, path)
        if not path.with_suffix(".idx").exists():
            raise WhetError(
                f"data.sources: {name}: {path.with_suffix('.idx').name} is missing beside it. "
                "Both files are needed: the .idx says where documents begin"
            )
        self._file = TokenFile(path, mask)

    def records(self) -> Iterator[RawRecord]:
        for number in range(len(self._file)):
            yield RawRecord(number + 1, _LazyDocument(self._file, number), self.name)

    def content_key(self) -> list[str]:
        return [*super().content_key(), hash_file(self.path.with_suffix(".idx"))]

    def count(self) -> int:
        return len(self._file)
