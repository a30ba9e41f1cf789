"""Utilities for modules: decoder layers, eval mode as a context, mixin classes, gated MLPs, fp64 that stays fp64,
whether a cache works."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whet.compat.torch_private import copy_module_without_children, set_module_class
from whet.core.console import warn
from whet.core.errors import WhetError, first_line


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Eval mode inside the context; afterwards every module is in the mode it was in."""
    return mode_of_modules(model, training=False)


@contextlib.contextmanager
def mode_of_modules(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or eval mode inside the context; afterwards every module is in the mode it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def add_mixin(module: nn.Module, other: Any) -> None:
    """Give `module` a class derived from `other` and its own: methods of `other` come first, `super()` is its own.

    The module stays the same object, so names, weights and hooks stay valid.
    """
    own: Any = type(module)
    set_module_class(module, _mixed_class(own, other))


@functools.cache
def _mixed_class(own: Any, other: Any) -> Any:
    """One class for all modules of a type: torch.compile shares compiled code between instances of a class."""
    return type(own.__name__, (other, own), {"__module__": own.__module__})


# Detection of gated MLPs, y = down(silu(gate(x)) · up(x)), by what they compute

GATED_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
_LARGE_INPUT_SCALE = 1000
"""Inputs this much larger reach the clamps that some MLPs apply to gate and up."""
_PROBE_TOKENS, _PROBE_HIDDEN, _PROBE_INTERMEDIATE = 3, 8, 12
_PROBE_IN_SHAPE, _PROBE_OUT_SHAPE = (_PROBE_HIDDEN, _PROBE_INTERMEDIATE), (_PROBE_INTERMEDIATE, _PROBE_HIDDEN)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether `module` is a gated MLP. Runs its forward with small layers in place of its own, whose weights may be
    placeholders or on another device; in training mode, so that dropout shows."""
    if {name for name, _ in module.named_children()} != {*GATED_MLP_LAYERS, "act_fn"}:
        return False
    grid, draw = torch.linspace(-6, 6, 97), torch.Generator().manual_seed(0)  # the global generator is not used
    small = copy_module_without_children(module, {"act_fn": module.act_fn})
    small.training = True
    for name, (inside, outside) in zip(
        GATED_MLP_LAYERS, (_PROBE_IN_SHAPE, _PROBE_IN_SHAPE, _PROBE_OUT_SHAPE), strict=True
    ):
        layer = nn.Linear(inside, outside, device="meta").to_empty(device="cpu")
        for weight in layer.parameters():
            nn.init.normal_(weight, std=inside**-0.5, generator=draw)
        setattr(small, name, layer)
    x = torch.randn(1, _PROBE_TOKENS, _PROBE_HIDDEN, generator=draw)
    # functional dropout would advance the global generator
    with torch.random.fork_rng([]), torch.no_grad():
        try:
            if not torch.allclose(small.act_fn(grid), F.silu(grid), rtol=1e-5, atol=1e-6):
                return False
            return all(_computes_gated_mlp(small, x * scale) for scale in (1, _LARGE_INPUT_SCALE))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # it relies on something that the small layers lack


def _computes_gated_mlp(small: Any, x: Tensor) -> bool:
    found = small.forward(x)  # without hooks
    own = small.down_proj(F.silu(small.gate_proj(x)) * small.up_proj(x))
    return isinstance(found, Tensor) and found.shape == own.shape and torch.allclose(found, own, rtol=1e-4, atol=1e-5)


# fp64 that stays fp64, for exact comparisons
#
# transformers' models convert to fp32 in places (norms, rotary embeddings, softmax, routers), whatever their dtype. An
# fp64 model rounds there: values that differ by 1e-16 can end up 1e-7 apart (seen: losses 4e-9 apart after six steps).

_PRODUCTS = (
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm,
    torch.baddbmm, torch.einsum, F.linear, F.conv1d,
)  # fmt: skip
"""Functions that demand one dtype of all tensors. Models keep routers and rotary frequencies in fp32."""
_FP32_NAMES = {torch.float32, torch.FloatTensor, "torch.FloatTensor", "torch.cuda.FloatTensor"}


class KeepFloat64(TorchFunctionMode):
    """Inside this context, what is computed from fp64 tensors is fp64, also where the model casts to fp32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0]
        # x.to(other) and x.type_as(other) take the dtype of other
        widens_tensors = func in _PRODUCTS or func in (Tensor.to, Tensor.type_as)
        args = tuple(_widened(value, widens_tensors) for value in args)
        return func(*args, **{name: _widened(value, widens_tensors) for name, value in kwargs.items()})


def _widened(value: Any, widens_tensors: bool) -> Any:
    """fp64 for a dtype or type name that means fp32, and for fp32 tensors if `widens_tensors`."""
    if isinstance(value, Tensor):
        return value.double() if widens_tensors and value.dtype == torch.float32 else value
    is_name = isinstance(value, torch.dtype | str | type(torch.FloatTensor))
    return torch.float64 if is_name and value in _FP32_NAMES else value


# The parts of a language model, independent of the architecture


def model_body(language_model: nn.Module) -> nn.Module:
    """The language model without its output head: returns hidden states."""
    body: nn.Module = language_model.base_model  # type: ignore[assignment]
    if body is language_model:  # Llama 4 and Mllama: base_model names a part of the larger, multimodal model
        inner: nn.Module | None = getattr(language_model, "model", None)
        body = model_body(language_model.language_model) if inner is None else inner  # type: ignore[arg-type]
    return body


def is_multimodal(model: Any) -> bool:
    """Whether a language model is one part of the model, as of image-text checkpoints."""
    config: Any = getattr(model, "config", None)
    return hasattr(config, "get_text_config") and config.get_text_config() is not config


def other_modalities(model: Any) -> list[str]:
    """The names of the largest modules of a multimodal model that are no part of its language model: vision and audio
    towers, projectors. Training on text does not reach them."""
    if not is_multimodal(model):
        return []
    text = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    used = {weight for module in text for weight in module.parameters()}
    found: list[str] = []
    for name, module in model.named_modules():
        weights = set(module.parameters())
        if weights and not weights & used and not any(name.startswith(f"{other}.") for other in found):
            found.append(name)
    return found


def decoder_layers(language_model: nn.Module) -> list[nn.Module]:
    """The decoder layers in order: the ModuleList with the most weights. Lists of experts are inside a layer and so
    hold less."""
    decoder: Any = language_model.get_decoder() if is_multimodal(language_model) else language_model  # type: ignore[operator]
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise WhetError(
            "model.path: this model's decoder layers cannot be found, so they cannot be compiled, recomputed or "
            "offloaded. Set model.compile=false, parallel.recompute=none and remove activations from parallel.offload"
        )
    sizes = [sum(parameter.numel() for parameter in modules.parameters()) for modules in lists]
    return list(lists[sizes.index(max(sizes))])


@contextlib.contextmanager
def without_generation_config(model: Any) -> Iterator[None]:
    """`model.generate` completes the settings that it is given with those of the model's generation_config.json, such
    as beams, stop strings and forced tokens. Not inside the context."""
    from transformers import GenerationConfig

    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


_CACHE_WORKS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.inference_mode()
def cache_works(model: nn.Module) -> bool:
    """Whether transformers can generate with the model's own cache. That of xLSTM fails where widths are no multiples
    of 64 (transformers 5.22); without a cache such a model generates slowly, but it does."""
    if model not in _CACHE_WORKS:
        tokens = torch.ones((1, 4), dtype=torch.long, device=next(model.parameters()).device)
        try:
            with without_generation_config(model):
                model.generate(  # type: ignore[operator]
                    tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False, pad_token_id=0,
                    eos_token_id=1 << 30,
                )  # fmt: skip
            _CACHE_WORKS[model] = True
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's code is foreign: it can raise anything
            warn(
                f"{type(model).__name__} cannot generate with its cache ({first_line(error)}); "
                "generating without one, which is slow"
            )
            _CACHE_WORKS[model] = False
    return _CACHE_WORKS[model]
