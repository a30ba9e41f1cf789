"""torch's `.pt` files, read without trusting them: tensors, numbers and texts; whatever else one names is refused.

Tensors are mapped from the file, not read: a file of any size costs memory only for what is looked at.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.core.errors import WhetError


def read_pt(path: Path) -> Any:
    """What was saved there. States of numpy's random numbers, which trainers keep beside weights, are let through."""
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise WhetError(f"{path}: no such file. Copy the whole checkpoint folder") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|Unsupported global:?|class)\s+([\w.]+\.[\w.]+)", str(error))
        what = f"it names {named[1]}" if named else str(error).splitlines()[0]
        raise WhetError(
            f"{path}: not only weights: {what}, and reading that could run code of whoever wrote the file. Save the "
            "state dictionaries alone where you trust it, and import those"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise WhetError(
            f"{path}: not a whole file of torch's ({first}). It was cut off or damaged: copy it again"
        ) from None


def _numpy_globals() -> list[Any]:
    core: Any = np._core if hasattr(np, "_core") else np.core
    kinds = [type(np.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    return [(core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"), core.multiarray._reconstruct,
            np.ndarray, np.dtype, *kinds]  # fmt: skip


_NUMPY = _numpy_globals()


@contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """Errors of looking into what was read, as errors of the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise WhetError(f"{path}: {what} is not there as it should be ({type(error).__name__}: {error})") from None
