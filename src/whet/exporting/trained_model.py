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

from whet.compat.bitsandbytes_private import quant_state
from whet.compat.peft_private import adapted_parameter, modules_to_save_type, trainable_tokens_type, tuner_layer_type
from whet.compat.torch_private import persistent_buffers
from whet.compat.transformers_private import joined_in_files
from whet.model.attention import native_attention
from whet.model.load.placeholder import is_placeholder
from whet.model.lora.peft_adapters import unwrap_peft
from whet.model.lora.trained_weights import TrainedWeight
from whet.model.modules import decoder_layers
from whet.model.quantize import count_weights, dequantize_linear, dequantize_parameter, is_quantized, weight_shape

ReadWeight = Callable[[str, torch.dtype], Tensor]
"""(name inside the language model, dtype) → weight."""

MAX_POSITIONS = 512
"""At which logits are compared, in all probes together."""
_TRIMS_PER_SHARD = 20
"""So freed memory that waits for its return is at most 5 % of a shard."""


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """One weight of the merged model. `read` returns it in host memory, unrounded."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class TrainedModel:
    """A trained model with its adapters attached. Nothing here changes it.

    Weights may be placeholders (model/load/placeholder.py), which are read where and while they are needed: one decoder
    layer at a time for logits, one matrix at a time for files. So an export needs little memory for a model of any
    size.
    """

    def __init__(
        self, model: nn.Module, read: ReadWeight | None = None, max_bytes: int = 5 * 10**9,
        read_base: Callable[[str], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`read` returns the weights of placeholders, `read_base` weights before training. A model larger than
        `max_bytes` is computed layer by layer; one of half that size is read once and kept in host memory, because
        files, comparison and logits need every weight."""
        self.model = model.eval()
        self.language_model = unwrap_peft(model)
        self._read_base, self._max_bytes, self._freed_bytes = read_base, max_bytes, 0
        size = sum(weight.nbytes for weight in model.parameters() if is_placeholder(weight))
        self._read = functools.cache(read) if read is not None and 2 * size <= max_bytes else read
        self._names = {id(weight): name for name, weight in self.language_model.named_parameters()}
        """By identity: tied weights have one name."""

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def is_quantized(self) -> bool:
        """Whether the base is in 4 bits."""
        return any(quant_state(weight) is not None for weight in self.model.parameters())

    @property
    def num_parameters(self) -> int:
        """Of the merged model, approximately: adapters are counted, too."""
        return sum(map(count_weights, self.language_model.parameters()))

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.language_model.get_input_embeddings().weight.dtype  # type: ignore[operator]

    @property
    def adapter_dtype(self) -> torch.dtype:
        """The dtype of the adapter, or of the model if it has none."""
        trainable = [weight.dtype for weight in self.language_model.parameters() if weight.requires_grad]
        return trainable[0] if trainable else self.weight_dtype

    @property
    def lossless_dtype(self) -> torch.dtype:
        """The smallest dtype that holds base and adapter without rounding."""
        return torch.promote_types(self.weight_dtype, self.adapter_dtype)

    @torch.inference_mode()
    def logits(self, probes: Sequence[Sequence[int]], in_fp32: bool = False) -> Tensor:
        """compute_logits of this model."""
        with contextlib.ExitStack() as stack:
            for unit, modules in self._materialization_units():
                stack.enter_context(self._materialized_for_forward(unit, modules, in_fp32))
            return compute_logits(self.language_model, probes, in_fp32)

    def weights(self) -> Iterator[MergedWeight]:
        """Every weight of the merged model, by its name in memory, in the model's order; tied weights once."""
        token_wrappers, adapted_layers, saved_copies = _peft_wrapper_types() if self.has_adapter else ((), (), ())
        seen: set[int] = set()
        handled: list[str] = []  # modules whose children belong to them
        for name, module in self.language_model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in handled):
                continue
            if isinstance(module, token_wrappers):  # trained rows of the embedding or of the head
                handled.append(name)
                embedding = module.token_adapter.get_base_layer().weight
                if id(embedding) not in seen:
                    seen.add(id(embedding))
                    yield from self._merged_layer(name, module.token_adapter)
                continue
            if isinstance(module, adapted_layers):
                handled.append(name)
                yield from self._merged_layer(name, module)
                continue
            if is_quantized(module):  # in 4 bits without an adapter
                yield from (
                    MergedWeight(f"{name}.{key}", shape, _dequantized_reader(module, key))
                    for key, shape in _dequantized_shapes(module)
                )
                continue
            owner = module
            if isinstance(module, saved_copies):  # adapter.also_train
                handled.append(name)
                (adapter,) = module.active_adapters
                owner = module.modules_to_save[adapter]
            for key, tensor in _own_tensors(owner, deep=owner is not module):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield MergedWeight(f"{name}.{key}".lstrip("."), tuple(weight_shape(tensor)), self._reader(tensor))

    def joined_weights(self) -> dict[str, list[str]]:
        """See `joined_in_files`."""
        return joined_in_files(self.language_model, {weight.name: weight.shape for weight in self.weights()})

    def _reader(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: self.value(tensor).cpu()

    def before(self, weight: TrainedWeight, device: torch.device) -> Tensor | None:
        """A weight before training, at least in fp32, on `device`; None if it is not known."""
        before = weight.before(lambda tensor: self.value(tensor).to(device))
        if before is None and self._read_base is not None:
            before = self._read_base(weight.name).to(device)
            before = before.to(torch.promote_types(before.dtype, torch.float32))
        return before

    def value(self, tensor: Tensor) -> Tensor:
        """A weight of the model, read if it is a placeholder."""
        if not is_placeholder(tensor):
            return dequantize_parameter(tensor).detach()
        assert self._read is not None, "a model with placeholder weights needs `read`"
        return self._read(self._names[id(tensor)], tensor.dtype)

    def trim_heap(self, freed_bytes: int) -> None:
        """Return freed memory to the system once it adds up: glibc keeps blocks of up to 32 MB, in every thread.
        Trimming takes milliseconds, which after every weight would be a tenth of an export."""
        self._freed_bytes += freed_bytes
        trim = _malloc_trim()
        if trim is not None and self._freed_bytes > self._max_bytes // _TRIMS_PER_SHARD:
            trim(0)
            self._freed_bytes = 0

    def _merged_layer(self, name: str, layer: Any) -> Iterator[MergedWeight]:
        base = layer.get_base_layer()
        plain = [(key, tuple(weight_shape(tensor))) for key, tensor in base.named_parameters()]
        for key, shape in _dequantized_shapes(base) if is_quantized(base) else plain:
            yield MergedWeight(f"{name}.{key}", shape, self._merged_reader(layer, key))

    def _merged_reader(self, layer: Any, key: str) -> Callable[[], Tensor]:
        """peft's own merge, but in fp32 or better: the result is rounded once, when it is written."""

        @torch.no_grad()
        def read() -> Tensor:
            base = layer.get_base_layer()
            quantized = is_quantized(base)
            work = dequantize_linear(base) if quantized else base
            if quantized:
                layer.base_layer = work
            merging, before = [layer], dict(work.named_parameters(recurse=False))
            if adapted_parameter(layer) is not None:  # one wrapper for each adapted weight
                merging = [each for each in _nested_wrappers(layer) if each.parameter_name == key]
                before = {key: before[key]}
            # A base read from files is in host memory; merge on the device of the adapter.
            device = next(
                weight.device for path, weight in layer.named_parameters() if not path.startswith("base_layer.")
            )
            try:
                for inner, tensor in before.items():
                    value = self.value(tensor)
                    value = value.to(device, torch.promote_types(value.dtype, torch.float32), copy=True)
                    work.register_parameter(inner, nn.Parameter(value, requires_grad=False))
                for each in merging:
                    each.merge()
                return work.get_parameter(key).detach().cpu()
            finally:
                for each in merging:
                    each.merged_adapters.clear()
                for inner, tensor in before.items():
                    work.register_parameter(inner, tensor)
                if quantized:
                    layer.base_layer = base

        return read

    def _materialization_units(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """(module, its submodules) whose placeholders are read together: the whole model if it fits, else by layer."""
        placeholders = [weight for weight in self.language_model.parameters() if is_placeholder(weight)]
        if not placeholders:
            return []
        room = self._max_bytes
        if self.device.type == "cuda":  # by layer, the weights would be read again for every probe
            torch.cuda.empty_cache()
            room = max(room, torch.cuda.mem_get_info(self.device)[0] // 2)
        if sum(weight.nbytes for weight in placeholders) <= room:
            return [(self.language_model, list(self.language_model.modules()))]
        layers = decoder_layers(self.language_model)
        inside = {module for layer in layers for module in layer.modules()}
        rest = [module for module in self.language_model.modules() if module not in inside and _placeholders_in(module)]
        return [*((layer, list(layer.modules())) for layer in layers), *((module, [module]) for module in rest)]

    @contextlib.contextmanager
    def _materialized_for_forward(self, unit: nn.Module, modules: list[nn.Module], in_fp32: bool) -> Iterator[None]:
        """Inside this context the unit reads its weights before its forward pass and frees them afterwards."""
        is_whole_model = unit is self.language_model
        placeholders = [(module, key, weight) for module in modules for key, weight in _placeholders_in(module)]

        def materialize(*_: object) -> None:
            made: dict[int, nn.Parameter] = {}
            device = self.device
            for module, key, weight in placeholders:
                if id(weight) not in made:
                    dtype = torch.promote_types(weight.dtype, torch.float32) if in_fp32 else weight.dtype
                    value = self.value(weight).to(device, weight.dtype).to(dtype)
                    made[id(weight)] = nn.Parameter(value, requires_grad=False)
                    self.trim_heap(weight.nbytes)  # buffers of the reader
                module.register_parameter(key, made[id(weight)])

        def free(*_: object) -> None:
            for module, key, weight in placeholders:
                module.register_parameter(key, weight)
            self.trim_heap(sum(weight.nbytes for _, _, weight in placeholders))

        hooks = (
            [] if is_whole_model else [unit.register_forward_pre_hook(materialize), unit.register_forward_hook(free)]
        )
        if is_whole_model:
            materialize()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            free()

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the tensors that are in no file: adapters and RoPE buffers."""
        everything = (*self.language_model.parameters(), *self.language_model.buffers())
        return next((tensor.device for tensor in everything if not is_placeholder(tensor)), torch.device("cpu"))


def _peft_wrapper_types() -> tuple[Any, Any, Any]:
    """peft's wrappers of trained tokens, of adapted layers and of modules_to_save. Importing peft takes seconds, so
    models without adapters do without."""
    return trainable_tokens_type(), tuner_layer_type(), modules_to_save_type()


def _nested_wrappers(layer: Any) -> list[Any]:
    """peft's wrappers of a module with several adapted weights, from the outside in."""
    found = [layer]
    while hasattr(found[-1].base_layer, "parameter_name"):
        found.append(found[-1].base_layer)
    return found


def _dequantized_shapes(layer: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the parameters of a 4-bit layer after dequantization."""
    found: list[tuple[str, tuple[int, ...]]] = [("weight", (layer.out_features, layer.in_features))]
    return found if layer.bias is None else [*found, ("bias", tuple(layer.bias.shape))]


def _dequantized_reader(layer: Any, key: str) -> Callable[[], Tensor]:
    return lambda: dequantize_linear(layer).get_parameter(key).detach().cpu()


def _placeholders_in(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(key, weight) for key, weight in own if is_placeholder(weight)]


def _own_tensors(module: nn.Module, deep: bool) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers; those of submodules only if `deep`."""
    if deep:
        return list(module.state_dict(keep_vars=True).items())
    return [*module.named_parameters(recurse=False, remove_duplicate=False), *persistent_buffers(module)]


@torch.inference_mode()
def compute_logits(model: nn.Module, probes: Sequence[Sequence[int]], in_fp32: bool = False) -> Tensor:
    """Logits [N, V] in host memory at the last positions of each probe (512 in all), with transformers' own
    attention. `in_fp32`: of a model in 16 bits, whose activations would round, too."""
    model.eval()
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"]
    device = next((found for found in devices if found.type != "cpu"), torch.device("cpu"))
    positions = max(1, MAX_POSITIONS // max(1, len(probes)))
    has_option = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": positions} if has_option else {}
    with native_attention(model), _weights_in_fp32(model) if in_fp32 else contextlib.nullcontext():
        rows = []
        for ids in probes:
            output = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False, **options)
            rows.append(output.logits[0, -positions:].float().cpu())
    return torch.cat(rows)


@contextlib.contextmanager
def _weights_in_fp32(model: nn.Module) -> Iterator[None]:
    """Inside this context, weights of 16 bits are in fp32, and layers with 4-bit weights compute in it."""
    copies: dict[int, nn.Parameter] = {}  # by identity: tied weights stay tied
    weights, layers = [], []
    for module in model.modules():
        for key, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight.dtype.itemsize == 2 and weight.is_floating_point() and not is_placeholder(weight):
                weights.append((module, key, weight))
        if is_quantized(module):
            layers.append((module, module.compute_dtype))
    try:
        for module, key, weight in weights:
            if id(weight) not in copies:
                copies[id(weight)] = nn.Parameter(weight.detach().float(), requires_grad=False)
            module.register_parameter(key, copies[id(weight)])
        for layer, _ in layers:
            layer.compute_dtype = torch.float32  # type: ignore[assignment]
        yield
    finally:
        for module, key, weight in weights:
            module.register_parameter(key, weight)
        for layer, dtype in layers:
            layer.compute_dtype = dtype


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None
