"""Where in a model numbers stop being finite: forward, or else backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_OWN = "language_model."


class Watch:
    """The first module that failed, in the order of execution."""

    def __init__(self) -> None:
        self.forward: str | None = None
        self.backward: str | None = None
        self._tensor = 0

    def enters(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in _tensors((args, kwargs.get("hidden_states"))):
            if self.forward is None and not _finite(tensor):
                self.forward = name.rpartition(".")[0] or name  # made between its parent's modules
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, name, id(tensor)))

    def leaves(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.forward is None and not all(map(_finite, _tensors(output))):
            self.forward = name

    def _gradient(self, name: str, tensor: int, gradient: Tensor) -> None:
        """Of what a module takes in. A layer and its first module take in the same tensor: the inner one is named."""
        is_inner = tensor == self._tensor and name.startswith(f"{self.backward}.")
        if (self.backward is None or is_inner) and not _finite(gradient):
            self.backward, self._tensor = name, tensor


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """Look at all that goes in and out of the modules of `model` while the block runs."""
    watch = Watch()
    hooks = []
    for full, module in model.named_modules():
        name = full.removeprefix(_OWN)
        if full in ("", _OWN.rstrip(".")):
            continue
        hooks.append(module.register_forward_pre_hook(partial(watch.enters, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(watch.leaves, name)))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def broken_weights(model: nn.Module) -> list[str]:
    """The names of weights that are not finite themselves."""
    return [name.removeprefix(_OWN) for name, weight in model.named_parameters() if not _finite(weight.detach())]


def broken_gradients(model: nn.Module) -> list[str]:
    """The names of weights whose gradient is not finite."""
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    return [name.removeprefix(_OWN) for name, grad in named if grad is not None and not _finite(grad)]


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
