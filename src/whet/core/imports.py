"""Faster imports of large libraries, and whether Triton is installed."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

from whet.core.errors import WhetError


@contextlib.contextmanager
def import_without_gc() -> Iterator[None]:
    """Turn off garbage collection while importing, and freeze what was imported.

    Imports create no garbage. This saves a sixth of the import time of torch and transformers, and a quarter of a
    second in every later collection.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@functools.cache
def has_triton() -> bool:
    """Whether whet's Triton kernels can be compiled. Only torch for CUDA depends on Triton."""
    return importlib.util.find_spec("triton") is not None


def require_pyarrow(name: str) -> Any:
    """The module, or a WhetError with the command that installs it."""
    try:
        import pyarrow
    except ImportError:
        raise WhetError(
            f"data.sources: {name}: reading this file needs pyarrow, which is not installed: pip install 'whet[data]'"
        ) from None
    return pyarrow
