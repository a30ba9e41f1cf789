"""`.bin` with its `.idx`: documents that were tokenised before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import hash_file
from whet.data.config import MaskRules
from whet.data.containers.base import Container, Raw
from whet.data.conversation import Tokens
from whet.data.external import TokenFile


@dataclass(frozen=True, slots=True)
class _Document:
    """One document of a file, read when it is asked for."""

    file: TokenFile
    number: int

    def record(self) -> Tokens:
        return Tokens(self.file.ids(self.number), self.file.loss(self.number), self.file.origin(self.number))


class TokenRecords(Container):
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

    def records(self) -> Iterator[Raw]:
        for number in range(len(self._file)):
            yield Raw(number + 1, _Document(self._file, number), self.name)

    def identity(self) -> list[str]:
        return [*super().identity(), hash_file(self.path.with_suffix(".idx"))]

    def count(self) -> int:
        return len(self._file)
