"""torch.compile by region: every decoder layer is compiled, and all layers share what was compiled for the first.

The compiler caches by the code of `forward` and takes a layer's weights as inputs, so layers that differ only in their
weights share one compilation. It compiles again for another kind of layer (a sliding window), for the first layer
behind frozen embeddings (its input needs no gradient), for evaluation, and for each batch length.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from whet.compat.torch_compiler import (
    RecompileLimitError,
    default_inductor_cache,
    enable_autograd_cache,
    enable_graph_cache,
    set_activation_budget,
    set_cache_tag,
    set_recompile_limit,
)
from whet.core.console import warn
from whet.core.files import cache_dir
from whet.core.resources import has_triton
from whet.execution.merge_linears import compile_with_merged_linears

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILED_PACKAGES = ("compat", "execution", "model", "parallel")
_RECOMPILE_LIMIT = 32
"""Two kinds of layer × four lengths × training and evaluation × with and without a gradient of the input."""


def should_compile(setting: Literal["auto"] | bool, device: torch.device, dtype: torch.dtype) -> bool:
    """`auto` compiles on CUDA with Triton, except in fp64, which is for proofs."""
    if setting == "auto":
        return device.type == "cuda" and dtype != torch.float64 and has_triton()
    return setting


def set_activation_memory_budget(full: bool) -> None:
    """What compiled layers save for the backward pass: `full` their inputs, else matrix products and attention.

    The compiler sees both passes, so it recomputes no more than the backward pass needs: not a layer's last matrix
    product, which is a quarter of a layer. Its default would also save what the backward pass has to write to memory
    again, such as the activations of the MLP: a fifth of all memory for 1 % of the time.
    """
    set_activation_budget(0.0 if full else 1.0)


@functools.cache
def use_compile_cache() -> None:
    """Keep compiled code in whet's cache directory, for the next start; warns once if it is not writable.

    torch's default is a folder in /tmp, which a reboot empties. Directories that the user has set are kept. Code that
    another version of whet compiled is not used.
    """
    set_cache_tag(f"whet-{_hash_compiled_sources()}")
    if os.environ.get(_CACHE_VARIABLE) in (None, default_inductor_cache()):  # torch sets the variable to its default
        folder = cache_dir() / "compiled"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            warn(
                f"{folder}: compiled code is not cached ({error.strerror}); every start compiles again. Set WHET_CACHE "
                f"or {_CACHE_VARIABLE} to a writable directory"
            )
            return
        os.environ[_CACHE_VARIABLE] = str(folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if "TORCHINDUCTOR_FX_GRAPH_CACHE" not in os.environ:
        enable_graph_cache()
    if "TORCHINDUCTOR_AUTOGRAD_CACHE" not in os.environ:
        enable_autograd_cache()


def _hash_compiled_sources() -> str:
    """The hash of whet's modules with operators, or with changes to the compiler."""
    package = Path(__file__).parents[1]
    files = [file for name in _COMPILED_PACKAGES for file in sorted((package / name).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def compile_forward(forward: Callable[..., Any], backend: Any = compile_with_merged_linears) -> Callable[..., Any]:
    """Compiles a layer's forward pass for packed batches (calls with `documents`); other calls, such as generation, run
    eagerly."""
    use_compile_cache()
    set_recompile_limit(_RECOMPILE_LIMIT)
    compiled: Callable[..., Any] | None = torch.compile(forward, backend=backend, dynamic=False)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None or "documents" not in kwargs:
            return forward(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except RecompileLimitError:
            compiled = None
            warn(
                f"a decoder layer was recompiled more than {_RECOMPILE_LIMIT} times, because something in it differs "
                "from batch to batch; it runs eagerly now, which is slower. Set model.compile=false to skip compilation"
            )
            return forward(*args, **kwargs)

    return run
