"""torch.compile by region: every decoder layer shares one compiled forward."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import torch

from whet.compat.torch_compiler import (
    RecompileLimitError,
    default_inductor_cache,
    enable_autograd_cache,
    enable_graph_cache,
    set_activation_budget,
    set_recompile_limit,
)
from whet.core.console import warn
from whet.core.files import cache_dir
from whet.core.imports import has_triton

# torch.compile by region: each layer's forward is compiled, and all layers share what was compiled for the first.
#
# The compiler keeps what it made with the code of `forward`, and takes a layer's weights as inputs: layers that differ in
# weights only are one compile. A second one is made where something else differs: another kind of layer (a window), the
# first layer behind frozen embeddings (its input needs no gradient), evaluation, each length of a batch.

LayerForward = Callable[..., Any]

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_RECOMPILE_LIMIT = 32
"""Two kinds of layer × four lengths × training and evaluation × with and without a gradient of the input."""


def should_compile(wanted: Literal["auto"] | bool, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are compiled. `auto`: on CUDA where triton is there, and not in fp64, which is for proofs."""
    if wanted == "auto":
        return device.type == "cuda" and dtype != torch.float64 and has_triton()
    return wanted


def set_activation_memory_budget(full: bool) -> None:
    """What compiled layers keep for the backward pass, from now on; `full`: their inputs alone.

    The compiler sees both passes, so it computes again no more than the backward pass needs: not a layer's last matrix
    product, which is a quarter of a layer. By itself it would keep what the backward pass has to write to memory again,
    as the feed-forward part's product: a fifth of all memory for one hundredth of the time. So it keeps matrix products
    and attention.
    """
    set_activation_budget(0.0 if full else 1.0)


@functools.cache
def use_compile_cache() -> None:
    """Have torch keep what it compiles in whet's cache, where the next start finds it; said once if it cannot.

    torch's own choice is a folder in /tmp, which a restart empties. Folders that the user has set stay.
    """
    if os.environ.get(_CACHE_VARIABLE) in (None, default_inductor_cache()):  # torch itself writes its own choice there
        folder = cache_dir() / "compiled"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            warn(
                f"{folder}: compiled code cannot be kept here ({error.strerror}), so the next start compiles again. "
                f"Set WHET_CACHE or {_CACHE_VARIABLE} to a folder that can be written"
            )
            return
        os.environ[_CACHE_VARIABLE] = str(folder)
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if "TORCHINDUCTOR_FX_GRAPH_CACHE" not in os.environ:
        enable_graph_cache()
    if "TORCHINDUCTOR_AUTOGRAD_CACHE" not in os.environ:
        enable_autograd_cache()


def compile_forward(forward: LayerForward, backend: Any = "inductor") -> LayerForward:
    """The same forward pass, compiled for batches of documents; anything else, as generating, runs as it is."""
    use_compile_cache()
    set_recompile_limit(_RECOMPILE_LIMIT)
    fast: LayerForward | None = torch.compile(forward, backend=backend, dynamic=False)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal fast
        if fast is None or "documents" not in kwargs:
            return forward(*args, **kwargs)
        try:
            return fast(*args, **kwargs)
        except RecompileLimitError:
            fast = None
            warn(
                f"a layer was compiled more than {_RECOMPILE_LIMIT} times, because something in it differs from batch to "
                "batch; it runs uncompiled from now on, which is slower. model.compile=false spares the attempts"
            )
            return forward(*args, **kwargs)

    return run
