"""How many examples a property test tries."""

from __future__ import annotations

import os


def examples(count: int, quick: int | None = None) -> int:
    """`count` in `make test-all`; a third of it, or `quick`, in `make test`, where every run tries others."""
    if os.environ.get("WHET_TEST_ALL") == "1":
        return count
    return max(10, count // 3) if quick is None else quick
