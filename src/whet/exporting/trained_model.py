"""The trained model as an export reads it: merged weights one at a time, and reference logits, in bounded memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.peft_private import modules_to_save_type, trainable_tokens_type, tuner_layer_type
from whet.compat.torch_private import persistent_buffers
from whet.model.attention import native_attention
from whet.model.layers import decoder_layers
from whet.model.load.placeholder import is_placeholder
from whet.model.lora.peft_adapters import unwrap_peft
from whet.model.quantize import count_weights, dequantize_linear, is_quantized

# Memory that was freed goes back to the system now: glibc keeps blocks of up to 32 MB for later, in every thread.


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None


def trim_heap() -> None:
    trimmer = _malloc_trim()
    if trimmer is not None:
        trimmer(0)


# The trained model as an export needs it: its logits, and its weights one at a time with adapters merged in.
#
# Weights may be hollow (see model/hollow.py): then they are read where and while they are needed, a layer at a time for
# the logits, a matrix at a time for the files. So an export needs little memory, whatever the size of the model.

ReadWeight = Callable[[str, torch.dtype], Tensor]
"""(name inside the language model, type) → a weight."""

_MAX_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """One weight of the merged model; `read` gives it on the host, as exact as it can be had."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class TrainedModel:
    """A model with its adapters in place, which this class leaves as it was."""

    def __init__(self, model: nn.Module, read: ReadWeight | None = None, room: int = 5 * 10**9) -> None:
        """`read` gives hollow weights. `room`: bytes that may be in memory at once; a model that is larger is computed
        layer by layer."""
        self.model = model.eval()
        self.language_model = unwrap_peft(model)
        self._read, self._room = read, room
        self._names = {id(weight): name for name, weight in self.language_model.named_parameters()}
        """By weight: tied ones have one name."""

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def is_packed(self) -> bool:
        """Whether its base is in 4 bits."""
        return any(map(is_quantized, self.model.modules()))

    @property
    def numbers(self) -> int:
        """Of the merged model, about: adapters count too."""
        return sum(map(count_weights, self.language_model.parameters()))

    @property
    def kept_in(self) -> torch.dtype:
        return self.language_model.get_input_embeddings().weight.dtype  # type: ignore[operator]

    @property
    def adapter_in(self) -> torch.dtype:
        """The type of the adapter's numbers; of the model's, if it has none."""
        learned = [weight.dtype for weight in self.language_model.parameters() if weight.requires_grad]
        return learned[0] if learned else self.kept_in

    @property
    def learned_in(self) -> torch.dtype:
        """In which no bit of what was learned is lost."""
        return torch.promote_types(self.kept_in, self.adapter_in)

    @torch.inference_mode()
    def logits(self, probes: Sequence[Sequence[int]]) -> Tensor:
        """At the last positions of each probe, on the host."""
        with contextlib.ExitStack() as stack:
            for unit, parts in self._units():
                stack.enter_context(self._filled_to_compute(unit, parts))
            return compute_logits(self.language_model, probes)

    def weights(self) -> Iterator[MergedWeight]:
        """Every weight of the merged model, by its name in memory, in the model's order; tied ones once."""
        rows, layers, copies = _peft_wrapper_types() if self.has_adapter else ((), (), ())
        seen: set[int] = set()
        inside: list[str] = []
        for name, module in self.language_model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in inside):
                continue
            if isinstance(module, rows):  # rows of an embedding, or of a head, are trained
                inside.append(name)
                kept = module.token_adapter.get_base_layer().weight
                if id(kept) not in seen:
                    seen.add(id(kept))
                    yield from self._merged(name, module.token_adapter)
                continue
            if isinstance(module, layers):
                inside.append(name)
                yield from self._merged(name, module)
                continue
            if is_quantized(module):  # in 4 bits without an adapter
                yield from (
                    MergedWeight(f"{name}.{key}", shape, _dequantized_reader(module, key))
                    for key, shape in _dequantized_shapes(module)
                )
                continue
            chosen = module
            if isinstance(module, copies):
                inside.append(name)
                (adapter,) = module.active_adapters
                chosen = module.modules_to_save[adapter]
            for key, tensor in _own_tensors(chosen, deep=chosen is not module):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield MergedWeight(f"{name}.{key}".lstrip("."), tuple(tensor.shape), self._reading(tensor))

    def _reading(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: self._value(tensor).cpu()

    def _value(self, tensor: Tensor) -> Tensor:
        if not is_placeholder(tensor):
            return tensor.detach()
        assert self._read is not None, "hollow weights need someone who reads them"
        return self._read(self._names[id(tensor)], tensor.dtype)

    def _merged(self, name: str, layer: Any) -> Iterator[MergedWeight]:
        base = layer.get_base_layer()
        plain_ones = [(key, tuple(tensor.shape)) for key, tensor in base.named_parameters()]
        for key, shape in _dequantized_shapes(base) if is_quantized(base) else plain_ones:
            yield MergedWeight(f"{name}.{key}", shape, self._merging(layer, key))

    def _merging(self, layer: Any, key: str) -> Callable[[], Tensor]:
        """peft's own merge, in fp32 or better whatever the weight is kept in: it is rounded once, when written."""

        @torch.no_grad()
        def merge() -> Tensor:
            base = layer.get_base_layer()
            packed = is_quantized(base)
            work = dequantize_linear(base) if packed else base
            if packed:
                layer.base_layer = work
            before = dict(work.named_parameters(recurse=False))
            device = _adapter_device(layer)
            try:
                for inner, tensor in before.items():
                    exact = torch.promote_types(tensor.dtype, torch.float32)
                    value = self._value(tensor).to(device, exact, copy=True)
                    work.register_parameter(inner, nn.Parameter(value, requires_grad=False))
                layer.merge()
                return work.get_parameter(key).detach().cpu()
            finally:
                layer.merged_adapters.clear()
                for inner, tensor in before.items():
                    work.register_parameter(inner, tensor)
                layer.base_layer = base

        return merge

    def _units(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """Whose weights are filled at once: everything if there is room, else a layer at a time."""
        hollow = [weight for weight in self.language_model.parameters() if is_placeholder(weight)]
        if not hollow:
            return []
        if sum(weight.nbytes for weight in hollow) <= self._room:
            return [(self.language_model, list(self.language_model.modules()))]
        layers = decoder_layers(self.language_model)
        inside = {module for layer in layers for module in layer.modules()}
        rest = [module for module in self.language_model.modules() if module not in inside and _placeholders_in(module)]
        return [*((layer, list(layer.modules())) for layer in layers), *((module, [module]) for module in rest)]

    @contextlib.contextmanager
    def _filled_to_compute(self, unit: nn.Module, parts: list[nn.Module]) -> Iterator[None]:
        """While this lasts, the unit reads its weights before it computes and lets go of them after."""
        whole = unit is self.language_model
        hollow = [(module, key, weight) for module in parts for key, weight in _placeholders_in(module)]

        def fill(*_: object) -> None:
            made: dict[int, nn.Parameter] = {}
            for module, key, weight in hollow:
                if id(weight) not in made:
                    value = self._value(weight).to(self._device, weight.dtype)
                    made[id(weight)] = nn.Parameter(value, requires_grad=False)
                    trim_heap()  # what reading it took besides
                module.register_parameter(key, made[id(weight)])

        def empty(*_: object) -> None:
            for module, key, weight in hollow:
                module.register_parameter(key, weight)
            trim_heap()

        handles = [] if whole else [unit.register_forward_pre_hook(fill), unit.register_forward_hook(empty)]
        if whole:
            fill()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            empty()

    @property
    def _device(self) -> torch.device:
        """Where it computes: what is in no file (adapters, positions) was placed there."""
        everything = (*self.language_model.parameters(), *self.language_model.buffers())
        return next((tensor.device for tensor in everything if not is_placeholder(tensor)), torch.device("cpu"))


def _peft_wrapper_types() -> tuple[Any, Any, Any]:
    """Of trained rows, of layers, and of whole copies. Who has none does not wait for peft."""
    return trainable_tokens_type(), tuner_layer_type(), modules_to_save_type()


def _adapter_device(layer: nn.Module) -> torch.device:
    """A base that is read from files, to the host, must meet its adapter there."""
    return next(weight.device for name, weight in layer.named_parameters() if not name.startswith("base_layer."))


def _dequantized_shapes(layer: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The shapes of what a 4-bit layer stands for."""
    found: list[tuple[str, tuple[int, ...]]] = [("weight", (layer.out_features, layer.in_features))]
    return found if layer.bias is None else [*found, ("bias", tuple(layer.bias.shape))]


def _dequantized_reader(layer: Any, key: str) -> Callable[[], Tensor]:
    return lambda: dequantize_linear(layer).get_parameter(key).detach().cpu()


def _placeholders_in(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(key, weight) for key, weight in own if is_placeholder(weight)]


def _own_tensors(module: nn.Module, deep: bool) -> list[tuple[str, Tensor]]:
    """Parameters and saved buffers, those of inner modules only if `deep`."""
    if deep:
        return list(module.state_dict(keep_vars=True).items())
    return [*module.named_parameters(recurse=False, remove_duplicate=False), *persistent_buffers(module)]


@torch.inference_mode()
def compute_logits(model: nn.Module, probes: Sequence[Sequence[int]]) -> Tensor:
    """[N, V] at the last positions of each probe, one conversation at a time, with transformers' own attention, on the
    host."""
    model.eval()
    places = [tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"]
    device = next((found for found in places if found.type != "cpu"), torch.device("cpu"))
    each = max(1, _MAX_POSITIONS // max(1, len(probes)))
    few = {"logits_to_keep": each} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with native_attention(model):
        rows = []
        for ids in probes:
            found = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False, **few)
            rows.append(found.logits[0, -each:].float().cpu())
    return torch.cat(rows)
