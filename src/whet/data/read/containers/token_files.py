"""Pretokenized documents in Megatron's .bin/.idx files, as GPT-NeoX and Megatron-LM write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from whet.core.errors import WhetError
from whet.core.files import hash_file
from whet.data.config import MaskRules
from whet.data.conversation import Origin, TokenizedDocument
from whet.data.indexed_dataset import IndexedReader
from whet.data.read.containers.container import Container, RawRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TokenFile(Container):
    """A .bin/.idx pair, by document: one sequence, or several that the index's doc_idx groups."""

    kind = "tokens"

    def __init__(self, name: str, path: Path, mask: MaskRules | None = None) -> None:
        """`path` may end in .bin, in .idx or in neither."""
        super().__init__(name, path)
        self._mask = mask
        self._reader = IndexedReader(
            path.with_suffix("") if path.suffix in (".bin", ".idx") else path, contiguous=False
        )
        if self._reader.dtype.kind == "f":
            raise WhetError(f"{self._reader.index}: the file holds {self._reader.dtype} numbers, not token ids")
        self._bounds = self._reader.documents

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def ids(self, document: int) -> NDArray[np.int32]:
        """The token ids of a document, counted from 0."""
        reader = self._reader
        first, last = int(self._bounds[document]), int(self._bounds[document + 1])
        if not 0 <= first <= last <= len(reader):
            raise WhetError(f"{reader.index}: corrupt: document {document + 1} has sequences {first} to {last}")
        parts = [reader[sequence] for sequence in range(first, last)]
        whole = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, reader.dtype), *parts])
        wide = whole.astype(np.int64)
        invalid = wide[(wide < 0) | (wide > np.iinfo(np.int32).max)]
        if len(invalid):
            raise WhetError(f"{self.origin(document)}: {int(invalid[0])} is not a token id; the file is corrupt")
        return wide.astype(np.int32)

    def loss(self, document: int) -> NDArray[np.uint8]:
        """The loss mask of a document, by the mask rules of the source."""
        return loss_mask_from_rules(self.ids(document), self._mask)

    def origin(self, document: int) -> Origin:
        return Origin(self.name, document + 1)

    def document(self, document: int) -> TokenizedDocument:
        ids = self.ids(document)
        return TokenizedDocument(ids, loss_mask_from_rules(ids, self._mask), self.origin(document))

    def records(self) -> Iterator[RawRecord]:
        for document in range(len(self)):
            yield RawRecord(document + 1, _LazyDocument(self, document), self.name)

    def count(self) -> int:
        return len(self)

    def content_key(self) -> list[str]:
        return [*super().content_key(), hash_file(self.path.with_suffix(".idx"))]

    def size(self) -> int:
        return self.path.stat().st_size


class _LazyDocument(NamedTuple):
    file: TokenFile
    document: int

    def decode(self) -> TokenizedDocument:
        return self.file.document(self.document)


# Loss masks by GPT-NeoX's rules on token ids. As in GPT-NeoX, they apply to targets: loss[i] = 1 means that token i is
# to be predicted.
#
# ids          7  a  b  7  8  c  d  8  EOD        pairs [[7, 7]], alternating [8]
# pairs        ·  ·  ·  ·  1  1  1  1  1          a pair of one id: from each odd occurrence to the next, inclusive
# alternating  1  1  1  1  ·  1  1  1  1          each odd occurrence of the id
# loss         0  0  0  0  0  1  1  1  1
#
# A pair of two ids nests: a token is masked while more openings than closings precede it. `eod` masks the token *after*
# that id, which GPT-NeoX predicts across a document boundary; in whet no document attends to another.


def loss_mask_from_rules(ids: NDArray[np.int32], rules: MaskRules | None) -> NDArray[np.uint8]:
    """1 for each supervised token of a document. The first token has no context, so it is never supervised."""
    masked = np.zeros(len(ids), dtype=np.bool_)
    masked[:1] = True
    if rules is not None:
        for opening, closing in rules.pairs or ():
            masked |= _inside_pairs(ids, opening, closing)
        masked |= np.isin(ids, rules.individual or [])
        for number in rules.alternating or ():
            found = ids == number
            masked |= found & (np.cumsum(found) % 2 == 1)
        if rules.eod is not None:
            masked[1:] |= ids[:-1] == rules.eod
    return (~masked).astype(np.uint8)


def _inside_pairs(ids: NDArray[np.int32], opening: int, closing: int) -> NDArray[np.bool_]:
    """From each opening to its closing, inclusive; to the end of the document if it is never closed."""
    opened = np.cumsum(ids == opening)
    inside = opened % 2 == 1 if opening == closing else opened > np.cumsum(ids == closing)
    inside[1:] |= inside[:-1]  # the closing itself
    return inside


def describe_mask_rules(rules: MaskRules | None) -> str:
    """Which tokens of a pretokenized source are supervised, in one sentence."""
    given = [] if rules is None else [name for name in type(rules).model_fields if getattr(rules, name) is not None]
    if not given:
        return "tokens; every token is supervised, because the source has no mask rules (data.sources.N.mask)"
    return f"tokens; the loss mask follows the rules {', '.join(given)}"
