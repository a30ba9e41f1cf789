"""What the passes over a model keep and compute, from its own code run on fake tensors.

Compiled layers are traced as torch.compile traces them, one of each kind: what they save for the backward pass is what
the compiler decides to save. What runs eagerly saves what autograd asks to keep.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from whet.compat.torch_compiler import trace_passes
from whet.compat.torch_private import (
    OperationCount,
    map_tensors,
    replace_forward,
    storage_key,
    tree_flatten,
    tree_unflatten,
)
from whet.core.errors import WhetError, first_line
from whet.execution.transform import transform_layers
from whet.fit.fake_model import FakeModel
from whet.fit.graph_cost import GraphCost, graph_cost, node_bytes, saved_nodes
from whet.fit.operator_cost import Operation
from whet.model.attention import Documents, document_kwargs
from whet.model.lora.fuse import use_low_memory_backward_
from whet.model.modules import decoder_layers, model_body
from whet.parallel.config import ParallelConfig

Recompute = str
"""none, selective or full: parallel.recompute."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike: their weights, and one micro-batch in one of them."""

    count: int
    weights: int
    """Bytes of all its weights."""
    parameters: int
    """Their number."""
    trained: int
    """The number of those that are trained."""
    saved: int
    """Bytes kept for the backward pass."""
    hidden: int
    """Bytes of its input, which is part of `saved`."""
    forward: GraphCost
    backward: GraphCost
    """With what it computes again."""

    @property
    def forward_scratch(self) -> int:
        """Bytes that the forward pass needs at most, without what it saves."""
        return max(0, self.forward.peak - self.saved)

    @property
    def backward_scratch(self) -> int:
        """Bytes that the backward pass needs at most, without what was saved; with the gradients of its weights."""
        return self.backward.peak - self.saved


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """The passes of one micro-batch."""

    tokens: int
    layers: tuple[LayerKind, ...]
    shared: int
    """Bytes that all layers save together, such as rotary embeddings."""
    ends: int
    """Bytes saved before the first layer and behind the last."""

    @property
    def saved(self) -> int:
        """Bytes kept for the backward pass."""
        return self.shared + self.ends + sum(kind.count * kind.saved for kind in self.layers)

    def extrapolated(self, longer: ModelTrace, tokens: int) -> ModelTrace | None:
        """About the trace of so many tokens, from those of two lengths: all that is not constant grows with the tokens.
        None if the compiler made something else of the two."""
        factor = (tokens - self.tokens) / (longer.tokens - self.tokens)

        def between(short: int, long: int) -> int:
            return round(short + factor * (long - short))

        kinds = []
        for short, long in zip(self.layers, longer.layers, strict=True):
            costs = (short.forward, long.forward), (short.backward, long.backward)
            if any(len(one.operations) != len(other.operations) for one, other in costs):
                return None
            forward, backward = (one.extrapolated(other, factor) for one, other in costs)
            kinds.append(
                replace(
                    short, saved=between(short.saved, long.saved), hidden=between(short.hidden, long.hidden),
                    forward=forward, backward=backward,
                )
            )  # fmt: skip
        shared, ends = between(self.shared, longer.shared), between(self.ends, longer.ends)
        return ModelTrace(tokens, tuple(kinds), shared, ends)


def trace_model(fake: FakeModel, tokens: int, recompute: Recompute, in_one_graph: bool = True) -> ModelTrace:
    """One micro-batch of so many tokens. `in_one_graph`: whether a compiled layer is one graph, so that the compiler
    itself recomputes."""
    if recompute == "full":
        use_low_memory_backward_(fake.root.language_model)
    layers = decoder_layers(fake.root.language_model)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # failures are reported here
    calls, tracer = _LayerCalls(), _LayerTracer(fake, recompute == "full", in_one_graph)
    try:
        with fake.computing():
            _refuse_loops_over_tokens(fake, layers)
            with _replaced_forwards(layers, calls.forward_of), _counting_saved(fake.root) as saved:
                _run_body(fake, tokens)
            kinds = [tracer.trace(*call[:3], calls.counts[kind]) for kind, call in calls.calls.items()]
    except WhetError:
        raise
    except Exception as error:  # the model's code is foreign, and fake tensors have no values to decide on
        raise WhetError(
            f"model.path: {type(fake.root.language_model).__name__} cannot be traced on paper ({first_line(error)}). "
            "Measure it on the device instead: whet fit CONFIG without --plan"
        ) from error
    return ModelTrace(tokens, tuple(kinds), tracer.shared, saved.bytes)


def saved_in_eager(fake: FakeModel, tokens: int, parallel: ParallelConfig) -> int:
    """Bytes that a forward pass without compilation keeps for the backward pass, loss excluded."""
    model = fake.root.language_model
    with fake.computing(), _replaced_forwards(decoder_layers(model), lambda _, forward: forward):
        transform_layers(model, parallel, compile=False)
        with _counting_saved(fake.root) as saved:
            _run_body(fake, tokens)
    return saved.bytes


def _run_body(fake: FakeModel, tokens: int) -> Tensor:
    """The last hidden states of one document of so many tokens."""
    ids, bounds = torch.zeros(1, tokens, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    documents = document_kwargs(bounds, tokens, (0, tokens), with_spans=fake.attention is not None)
    output = model_body(fake.root.language_model)(input_ids=ids, position_ids=ids.clone(), use_cache=False, **documents)
    hidden: Tensor = output.last_hidden_state
    return hidden


def _refuse_loops_over_tokens(fake: FakeModel, layers: list[nn.Module]) -> None:
    """Recurrent models without their kernels compute token by token: the graph of a row would never be done."""
    counts = []
    for tokens in (16, 32):
        with _replaced_forwards(layers, _LayerCalls().forward_of), OperationCount() as operations:
            _run_body(fake, tokens)
        counts.append(operations.count)
    if counts[1] > 1.5 * counts[0]:
        raise WhetError(
            f"model.path: {type(fake.root.language_model).__name__} computes token by token without the kernels of its "
            "own packages, so it cannot be estimated on paper. Measure it where it will train: whet fit CONFIG"
        )


class _SavedBytes:
    """Counts each storage once, and no weights."""

    def __init__(self, root: nn.Module) -> None:
        self.bytes = 0
        self._known = {storage_key(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self._kept: list[Tensor] = []  # a freed storage's address would be used again

    def add(self, tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in self._known:
            self._known.add(storage_key(tensor))
            self._kept.append(tensor)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def _counting_saved(root: nn.Module) -> Iterator[_SavedBytes]:
    saved = _SavedBytes(root)
    with saved_tensors_hooks(saved.add, lambda tensor: tensor):
        yield saved


@contextmanager
def _replaced_forwards(
    layers: list[nn.Module], replacement: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    before = [layer.forward for layer in layers]
    try:
        for layer, forward in zip(layers, before, strict=True):
            replace_forward(layer, replacement(layer, forward))
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            replace_forward(layer, forward)


@dataclass(slots=True)
class _LayerCalls:
    """Stands in for the layers' forward passes: keeps the first call of each kind of layer, and answers for all."""

    counts: Counter[Any] = field(default_factory=Counter)
    calls: dict[Any, tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)
    """By kind: a layer, its arguments and its output."""

    def forward_of(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kind = type(layer), *((name, w.shape, w.dtype, w.requires_grad) for name, w in layer.named_parameters())
            self.counts[kind] += 1
            if kind not in self.calls:
                with torch.no_grad():
                    self.calls[kind] = layer, args, kwargs, forward(*args, **kwargs)
            # what follows must see a gradient, also behind frozen embeddings
            return map_tensors(_with_gradient, self.calls[kind][3])

        return run


@dataclass(slots=True)
class _LayerTracer:
    """Traces layers and notes what they share."""

    fake: FakeModel
    full: bool
    in_one_graph: bool
    shared: int = 0

    def trace(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> LayerKind:
        call = _LayerCall(layer, args, kwargs)
        if self.in_one_graph or self.fake.attention is None:
            passes = call.trace(0.0 if self.full and self.fake.compiles else 1.0)
        else:
            passes = self._trace_in_parts(call)
        self.shared = max(self.shared, passes.shared)
        kept, back, hidden = passes.saved, passes.backward, _bytes(call.hidden)
        if self.full and not (self.in_one_graph and self.fake.compiles):  # all of the layer is computed again
            again = max(0, passes.forward.peak - kept)
            back = GraphCost(back.peak + again, (*passes.forward.operations, *back.operations))
            kept = hidden
        weights = call.weights
        return LayerKind(
            count, sum(map(self.fake.weight_bytes, weights)), sum(weight.numel() for weight in weights),
            sum(weight.numel() for weight in weights if weight.requires_grad), kept, hidden, passes.forward, back,
        )  # fmt: skip

    def _trace_in_parts(self, call: _LayerCall) -> _Passes:
        """Attention outside of the compiled graphs: what precedes it is compiled by itself, and so is what follows."""
        stand_in = self.fake.attention
        assert stand_in is not None

        def before(*tensors: Tensor) -> Any:
            states: list[Tensor] = []
            stand_in.inputs = states
            call.compute(*tensors)
            stand_in.inputs = None
            return states

        def after(output: Tensor, *tensors: Tensor) -> Any:
            stand_in.output = output
            try:
                return call.compute(*tensors)
            finally:
                stand_in.output = None

        query, key, value = before(*call.inputs)
        attended = query.new_empty(1, query.shape[1], query.shape[2], value.shape[-1])
        sums = 4 * query.shape[1] * query.shape[2]
        first = call.trace(1.0, before)
        second = call.trace(1.0, after, attended.transpose(1, 2).requires_grad_())
        # The graph breaks in the frames of the layer and of its attention, so that the attention's input is saved too
        entering = call.hidden.numel() * query.element_size()
        saved = sum(map(_bytes, (query, key, value, attended))) + sums + entering
        moved = Operation("memory", 0, saved), Operation("memory", 0, 3 * saved)
        both_save_input = first.saves_hidden and second.saves_hidden
        return _Passes(
            first.saved + saved + second.saved - both_save_input * _bytes(call.hidden),
            max(first.shared, second.shared),
            True,
            GraphCost(
                first.saved + saved + second.forward.peak,
                (*first.forward.operations, moved[0], *second.forward.operations),
            ),
            GraphCost(
                first.saved + saved + max(second.backward.peak, saved, first.backward.peak - first.saved),
                (*second.backward.operations, moved[1], *first.backward.operations),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Passes:
    """Both passes over a layer or a part of it."""

    saved: int
    shared: int
    saves_hidden: bool
    """Whether its input is part of what is saved."""
    forward: GraphCost
    backward: GraphCost


class _LayerCall:
    """One call of a layer, as a function of tensors alone."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer, self._documents = layer, kwargs.get("documents") or Documents(None, 0, (), None)  # type: ignore[arg-type]
        given = args[0] if args else kwargs["hidden_states"]
        self.hidden = _with_gradient(given)
        self.weights = list(layer.parameters())
        leaves, self._structure = tree_flatten((dict(layer.named_parameters()), args, kwargs))
        self._leaves = [self.hidden if leaf is given else leaf for leaf in leaves]
        bounds = (each for each in (self._documents.cu_seqlens, self._documents.spans) if each is not None)
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        self.inputs = list(dict.fromkeys([self.hidden, *self.weights, *bounds, *tensors]))
        """Each once: the layer's input, its weights, and what all layers get."""

    def compute(self, *tensors: Tensor) -> Any:
        """The layer's output for tensors in the place of `inputs`."""
        now = dict(zip(self.inputs, tensors, strict=True))
        documents = self._documents
        bounds = documents.cu_seqlens, documents.spans
        documents.cu_seqlens, documents.spans = (None if each is None else now[each] for each in bounds)
        try:
            filled = [now[leaf] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
            named, *call = tree_unflatten(filled, self._structure)
            return torch.func.functional_call(self._layer, named, *call, tie_weights=False)
        finally:
            documents.cu_seqlens, documents.spans = bounds

    def trace(self, budget: float, function: Callable[..., Any] | None = None, *more: Tensor) -> _Passes:
        """The graphs of `function`, by default of the whole layer; `more`: inputs that it takes before the others, and
        that others save."""
        first = len(more) + 1
        static = range(first, first + len(self.weights))
        forward, backward, outputs = trace_passes(function or self.compute, [*more, *self.inputs], static, budget)
        inputs = [node for node in forward.nodes if node.op == "placeholder"]
        own, common = inputs[len(more)], inputs[first + len(self.weights) :]
        resident = {node.name for node in inputs if node is not own}
        saved = saved_nodes(forward, outputs)
        return _Passes(
            sum(node_bytes(node) for node in saved if node.name not in resident),
            sum(node_bytes(node) for node in saved if node in common),
            own in saved,
            graph_cost(forward, resident),
            graph_cost(backward, resident),
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_gradient(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).requires_grad_() if tensor.is_floating_point() else tensor
