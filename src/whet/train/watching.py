"""Where in a model numbers stop being finite: forward, or else backward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whet.parallel.shard import local

_OWN = "language_model."


class Watch:
    """The first modules that failed, in the order of execution."""

    def __init__(self) -> None:
        self.forward: str | None = None
        self._backward: list[str] = []
        self._tensor = 0

    @property
    def backward(self) -> str | None:
        """Several, where modules share their input: which of them it was cannot be told from its gradient."""
        return " or ".join(self._backward) or None

    def enters(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.forward is None and not all(map(_finite, _inputs(args, kwargs))):
            self.forward = name.rpartition(".")[0] or name  # made between its parent's modules

    def leaves(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.forward is None and not all(map(_finite, _tensors(output))):
            self.forward = name
        if any(tensor.requires_grad for tensor in _tensors(output)):
            for tensor in _inputs(args, kwargs):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._gradient, name, _number_of(tensor)))

    def _gradient(self, name: str, tensor: int, gradient: Tensor) -> None:
        """Of what a module took in. Inner modules end first, so they are named and not the layer around them."""
        if self._backward and tensor != self._tensor:
            return
        if not any(inner.startswith(f"{name}.") for inner in self._backward) and not _finite(gradient):
            self._tensor = tensor
            self._backward.append(name)


_numbers = itertools.count(1)


def _number_of(tensor: Any) -> int:
    """The same for the same tensor, and no other's; `id` is given again when a tensor is gone."""
    if not hasattr(tensor, "_whet_number"):
        tensor._whet_number = next(_numbers)
    number: int = tensor._whet_number
    return number


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """Look at all that goes in and out of the modules of `model` while the block runs."""
    watch = Watch()
    hooks = []
    for name, module in _named(model):
        hooks.append(module.register_forward_pre_hook(partial(watch.enters, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(watch.leaves, name), with_kwargs=True))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def order_of(model: nn.Module) -> dict[str, int]:
    """The names that a watch gives, each with its place in the model."""
    return {name: place for place, (name, _) in enumerate(_named(model))}


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for full, module in model.named_modules():
        if full not in ("", _OWN.rstrip(".")):
            yield full.removeprefix(_OWN), module


def broken_weights(model: nn.Module) -> list[str]:
    """The names of weights that are not finite themselves."""
    return [name.removeprefix(_OWN) for name, weight in model.named_parameters() if not _finite(weight.detach())]


def broken_gradients(model: nn.Module) -> list[str]:
    """The names of weights whose gradient is not finite."""
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    return [name.removeprefix(_OWN) for name, grad in named if grad is not None and not _finite(grad)]


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(local(tensor)).all())


def _inputs(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """What a module computes on; masks, which may hold -inf, and caches are something else."""
    return _tensors((args, kwargs.get("hidden_states")))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
