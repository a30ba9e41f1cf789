"""torch.compile by region: each layer's forward is compiled, and all layers share what was compiled for the first.

The compiler keeps what it made with the code of `forward`, and takes a layer's weights as inputs: layers that differ in
weights only are one compile. A second one is made where something else differs: another kind of layer (a window), the
first layer behind frozen embeddings (its input needs no gradient), evaluation, each length of a batch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from whet.core.console import warn

Forward = Callable[..., Any]

_VARIANTS = 32
"""Two kinds of layer × four lengths × training and evaluation × with and without a gradient of the input."""


def compiles(wanted: Literal["auto"] | bool, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are compiled. `auto`: on CUDA where triton is there, and not in fp64, which is for proofs."""
    if wanted == "auto":
        return device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None
    return wanted


def compile_count() -> int:
    """How many graphs have been compiled so far in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def choose_kept(recompute: Literal["none", "selective", "full"]) -> None:
    """What compiled layers keep for the backward pass, from now on.

    The compiler sees both passes, so it computes again no more than the backward pass needs: not a layer's last matrix
    product, which is a quarter of a layer. By itself it keeps whatever the backward pass would have to write to memory
    again; `selective` lets go of that too where it is not a matrix product.
    """
    torch._functorch.config.activation_memory_budget = 0.0 if recompute == "full" else 1.0
    torch._functorch.config.ban_recompute_materialized_backward = recompute != "selective"


def compiled(forward: Forward, backend: Any = "inductor") -> Forward:
    """The same forward pass, compiled for batches of documents; anything else, as generating, runs as it is."""
    # torch would go on uncompiled in silence where something is compiled again and again
    torch._dynamo.config.recompile_limit = _VARIANTS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    fast: Forward | None = torch.compile(forward, backend=backend, dynamic=False)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal fast
        if fast is None or "documents" not in kwargs:
            return forward(*args, **kwargs)
        try:
            return fast(*args, **kwargs)
        except FailOnRecompileLimitHit:
            fast = None
            warn(
                f"a layer was compiled more than {_VARIANTS} times, because something in it differs from batch to "
                "batch; it runs uncompiled from now on, which is slower. model.compile=false spares the attempts"
            )
            return forward(*args, **kwargs)

    return run
