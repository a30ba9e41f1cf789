"""whet fine-tunes language models on conversations."""

import importlib
import logging
import os
from typing import Any

__version__ = "0.2.0"

# Before anything imports torch, whose OpenMP reads it once. By default a thread that has nothing to do spins on its
# core and keeps it from the thread that all wait for: on two cores that other programs use too, a step of SmolLM2 took
# 273 s instead of 13.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Before anything imports transformers, which imports torchao where it finds it, which complains of what is not used.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


_API = frozenset(
    ("Chat", "Export", "Run", "WhetError", "chat", "check", "evaluate", "export", "generate", "load_run", "prepare",
     "propose", "train")
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """The Python API, imported on first use: `import whet` alone stays light."""
    if name in _API:
        return getattr(importlib.import_module("whet.api"), name)
    raise AttributeError(f"module 'whet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
