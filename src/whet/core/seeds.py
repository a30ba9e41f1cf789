"""Seeds derived from names and numbers, so that no random state has to be saved."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from, for example, (seed, step, row): the same after a restart and on every rank."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
