"""Memory that was freed goes back to the system now: glibc keeps blocks of up to 32 MB for later, in every thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None


def trim() -> None:
    trimmer = _trimmer()
    if trimmer is not None:
        trimmer(0)
