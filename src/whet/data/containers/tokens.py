"""`.bin` with its `.idx`: documents that were tokenised before."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from whet.core.errors import WhetError
from whet.core.files import hash_file
from whet.data.config import MaskRules
from whet.data.containers.base import Container, Raw, Ready

_READER = "whet.data.external"


class TokenFile(Container):
    """The tokens are handed on as they are, with the mask that the source's rules give."""

    kind = "tokens"

    def __init__(self, name: str, path: Path, mask: MaskRules | None) -> None:
        super().__init__(name, path)
        self._mask = mask
        if not path.with_suffix(".idx").exists():
            raise WhetError(
                f"data.sources: {name}: {path.with_suffix('.idx').name} is missing beside it. "
                "Both files are needed: the .idx says where documents begin"
            )
        if importlib.util.find_spec(_READER) is None:
            raise WhetError(f"data.sources: {name}: .bin files cannot be read by this version of whet; give JSONL")

    def records(self) -> Iterator[Raw]:
        read_tokens = importlib.import_module(_READER).read_tokens
        for number, document in enumerate(read_tokens(self.path, self._mask), 1):
            yield Raw(number, Ready(document), self.name)

    def identity(self) -> list[str]:
        return [*super().identity(), hash_file(self.path.with_suffix(".idx"))]

    def count(self) -> int:
        with self.path.with_suffix(".idx").open("rb") as file:
            file.seek(18)  # magic (9 bytes), version (8), type of a token (1); then the number of documents
            return int.from_bytes(file.read(8), "little")
