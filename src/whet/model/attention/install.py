"""Back-ends, registered with transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from whet.core.console import warn
from whet.model.attention import variable_length
from whet.model.attention.ask import Backend, Documents
from whet.model.attention.flexible import flex
from whet.model.attention.long_documents import cudnn
from whet.model.attention.look import ask_of
from whet.model.attention.per_document import per_document_sdpa
from whet.model.attention.reference import eager
from whet.model.attention.short_documents import short

BACKENDS: dict[str, Backend] = {
    "sdpa": per_document_sdpa,
    "eager": eager,
    "varlen": variable_length.varlen,
    "flex": flex,
    "cudnn": cudnn,
    "short": short,
}

_NAMES = {
    "sdpa": "whet_per_document",
    "eager": "whet_reference",
    "varlen": "whet_varlen",
    "flex": "whet_blocks",
    "cudnn": "whet_long",
    "short": "whet_short",
}
"""A name with `sdpa`, `flex` or `flash` in it would make transformers check for its own."""


_AROUND = "_across"

_IN_ONE_GRAPH = ("varlen", "short", "eager")
"""The compiler passes by the others, which need to know on the host where documents begin, or ask other processes."""


def install(model: nn.Module, backend: str, around: Callable[[Backend], Backend] | None = None) -> None:
    """Make `model` (a transformers model) attend by documents from now on; `around` changes how the back-end is called,
    as for rows that several processes compute together."""
    if any(getattr(model.config, name, 0) for name in ("attention_dropout", "attn_pdrop")):
        warn("the model's configuration asks for dropout inside attention; whet trains without it")
    if backend == "varlen":
        variable_length.newest_kernel()
    compute = around(BACKENDS[backend]) if around else BACKENDS[backend]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        scaling: float | None = None, *, documents: Documents, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        ask = ask_of(query, scaling, **kwargs)
        # rotary positions and norms leave fp32 behind under autocast
        kind = query.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind)  # torch knows no mixed precision there
        dtype = torch.get_autocast_dtype(kind) if mixed else value.dtype
        return compute(query.to(dtype), key.to(dtype), value.to(dtype), ask, documents), None

    # no mask goes with it: documents are told apart by their edges, and to see whether it needs one, transformers would
    # ask the device in every forward pass
    name = name_of(backend) + (_AROUND if around else "")
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)  # type: ignore[operator]


def name_of(backend: str) -> str:
    """What transformers knows a back-end by."""
    return _NAMES[backend]


def wants_spans(model: nn.Module) -> bool:
    """Whether the back-end that serves `model` asks for each token's document (`described`)."""
    return _installed(model).removesuffix(_AROUND) == name_of("short")


def _installed(model: nn.Module) -> str:
    return str(model.config._attn_implementation)  # type: ignore[union-attr]


def served_by(model: nn.Module) -> str:
    """The back-end that serves `model`."""
    installed = _installed(model).removesuffix(_AROUND)
    return next((backend for backend, name in _NAMES.items() if name == installed), f"its own ({installed})")


def serving(model: nn.Module) -> str:
    """The back-end that serves `model`, and its kernel where that is not torch's own: `varlen (FA3)`."""
    backend = served_by(model)
    kernel = variable_length.kernel() if backend == "varlen" else None
    return f"{backend} ({kernel})" if kernel else backend


def compiles_through(model: nn.Module) -> bool:
    """Whether a compiled layer of `model` is one graph, with attention inside it, and not two around it."""
    return _installed(model) in [_NAMES[backend] for backend in _IN_ONE_GRAPH]


def leave(model: nn.Module) -> None:
    """Make `model` attend as it does by itself."""
    # transformers' sdpa leaves soft-caps out without a word, and not every version says that it does not serve them
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")  # type: ignore[operator]


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """transformers' own attention for a while, as for generating: that of documents knows no cache."""
    before = _installed(model)
    leave(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
