"""CUDA graphs of the decoder layers, captured per batch shape: for launch-bound models and batches.

The host needs some milliseconds to launch the kernels of a layer's two passes. If the device needs less, because the
model or the batch is small, it idles most of the time. Two CUDA graphs, one for each pass, launch the same kernels in
the same order with two calls. Graphs hold their memory between steps; they are released when something else needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from whet.compat.torch_compiler import compiled_graph_count
from whet.compat.torch_private import foreach_add_, foreach_copy_, has_forward_hooks, release_graph_pool
from whet.core.console import warn
from whet.core.errors import WhetError, first_line
from whet.execution.recompute import has_dropout
from whet.model.attention import supports_fullgraph
from whet.model.flops import count_step_flops
from whet.model.loss.loss_model import LossModel
from whet.model.modules import decoder_layers, model_body

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a function's kernels in a graph and returns the function that replays it."""

_LAUNCH_BOUND_S = 0.005
"""A layer whose two passes take longer than this at the device's peak FLOP/s is not launch-bound."""
MAX_GRADIENT_BYTES = 2**30
"""Gradients are allocated a second time for the graphs, a third time if micro-batches accumulate them."""
_MAX_GRADIENT_SHARE = 1 / 32
"""Of a large device's memory, unless memory is scarce: adapters of all experts of Qwen3-30B-A3B have 2.4 GiB of
gradients, and its layers take the host twice as long as an H200."""
_MAX_SHAPES = 8
"""Batch shapes for which graphs are kept."""
_not_capturable: WeakSet[LossModel] = WeakSet()
"""Models of which a capture has failed, not for lack of memory."""


def make_capture() -> Capture:
    """Graphs captured by one Capture share a memory pool: only one of them may be in flight.

    A capture that fails raises RuntimeError and leaves torch usable without graphs."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[stream.device_index]
        before = generator.clone_state()
        try:
            # thread_local: other threads (the loader, a checkpoint, NCCL) may use the device meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            # when the driver invalidates a capture, torch restores neither stream nor generator nor allocator
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(before.graphsafe_get_state())
            release_graph_pool(stream.device_index, pool)
            raise
        return graph.replay

    return capture


def root_cause(error: BaseException) -> str:
    """The first line of the error that came first: ending an invalid capture raises another one, which says less."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


def max_gradient_bytes(device_bytes: int, saves_memory: bool) -> int:
    """The gradients for which graphs are worth their memory; `saves_memory`: the run recomputes to need less of it."""
    return MAX_GRADIENT_BYTES if saves_memory else max(MAX_GRADIENT_BYTES, int(device_bytes * _MAX_GRADIENT_SHARE))


def enable_cuda_graphs(
    root: LossModel, tokens: int, peak: float | None, max_gradients: int = MAX_GRADIENT_BYTES
) -> bool:
    """Capture the hidden states of `root` from now on, if that is possible and worthwhile; returns whether it is.

    Possible: no dropout, no auxiliary loss of routers, attention that does not synchronize with the host, small
    gradients, no tied weights inside the layers. Worthwhile: the layers are launch-bound for a batch of `tokens` at
    `peak` FLOP/s (None: unknown), and gradients take at most `max_gradients` bytes."""
    model = root.language_model
    if root in _not_capturable or root.unpacked or peak is None:
        return False
    if root.router_aux_loss is not None:  # hooks add it
        return False
    if not supports_fullgraph(model) or has_dropout(model):
        return False
    try:
        layers = decoder_layers(model)
    except WhetError:
        return False
    gradients = StaticGradients(root)
    if not gradients.weights or not gradients.are_untied:
        return False
    if sum(weight.nbytes for weight in gradients.weights) > max_gradients:
        return False
    if count_step_flops(model).per_token * tokens / len(layers) / peak > _LAUNCH_BOUND_S:
        return False
    root.hidden = GraphedHidden(root, gradients, make_capture)  # type: ignore[method-assign]
    return True


def disable_cuda_graphs(root: LossModel) -> None:
    """Undo `enable_cuda_graphs`; a model that could not be captured stays without graphs."""
    hidden: Any = root.hidden
    if isinstance(hidden, GraphedHidden):
        hidden.release()
        del root.hidden
        if hidden.is_impossible:
            _not_capturable.add(root)


def uses_cuda_graphs(root: LossModel) -> bool:
    return isinstance(root.hidden, GraphedHidden)


def release_cuda_graphs(root: LossModel) -> None:
    """Free the memory of all graphs; they are captured again when needed."""
    hidden: Any = getattr(root, "hidden", None)
    if isinstance(hidden, GraphedHidden):
        hidden.release()


def compile_and_capture_count() -> int:
    """Compilations and captures so far in this process: a step in which it grows is not representative of speed."""
    return compiled_graph_count() + GraphedHidden.captures


class _GraphInputs(NamedTuple):
    """The arguments of `LossModel.hidden`. Batches of one shape differ in tensor values and in `cu_seqlens_host`."""

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    cu_seqlens_host: Sequence[int]

    @property
    def shape(self) -> _ShapeKey:
        return len(self.tokens), len(self.cu_seqlens), self.max_seqlen

    def copy(self) -> _GraphInputs:
        return self._replace(
            tokens=self.tokens.clone(), positions=self.positions.clone(), cu_seqlens=self.cu_seqlens.clone()
        )

    def copy_from(self, other: _GraphInputs) -> None:
        """Copy the values of another batch of the same shape."""
        self.tokens.copy_(other.tokens)
        self.positions.copy_(other.positions)
        self.cu_seqlens.copy_(other.cu_seqlens)


_ShapeKey = tuple[int, ...]


class GraphedHidden:
    """Replaces `LossModel.hidden`: replays a graph if gradients are enabled and the batch's shape has one, else runs
    eagerly. A shape is captured when it comes a second time, after its layers are compiled and kernels are loaded."""

    captures: ClassVar[int] = 0
    """Captures so far in this process."""

    def __init__(self, root: LossModel, gradients: StaticGradients, make_capture: Callable[[], Capture]) -> None:
        self._base_model = model_body(root.language_model)
        self._compute = root.hidden
        self._gradients = gradients
        self._tensors = [*root.parameters(), *root.buffers()]
        self._make_capture, self._is_enabled = make_capture, True
        self.is_impossible = False
        """A capture has failed, not for lack of memory."""
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd call the backward pass
        self._warm_shapes: set[_ShapeKey] = set()  # seen in both passes
        self._generation = 0  # counts replays and releases: each invalidates the forward passes before it
        self.release()

    def release(self) -> None:
        self._capture = self._make_capture() if self._is_enabled else None
        self._graphs: dict[_ShapeKey, GraphPair] = {}
        self._gradients.release()
        self._weight_addresses: list[int] = []
        self._generation += 1

    def __call__(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int, cu_seqlens_host: Sequence[int]
    ) -> Tensor:
        batch = _GraphInputs(tokens, positions, cu_seqlens, max_seqlen, cu_seqlens_host)
        # a replay calls no module hooks
        if not (self._is_enabled and torch.is_grad_enabled()) or has_forward_hooks(self._base_model):
            return self._compute(*batch)
        graphs = self._find_or_capture(batch)
        if graphs is None:
            hidden, shape = self._compute(*batch), batch.shape
            hidden.register_hook(lambda _: self._warm_shapes.add(shape))
            return hidden
        self._generation += 1
        graphs.batch.copy_from(batch)
        replayed: Tensor = _ReplayFunction.apply(self._anchor, self, graphs, self._generation)
        return replayed

    def _find_or_capture(self, batch: _GraphInputs) -> GraphPair | None:
        if self._graphs and self._weight_addresses != [tensor.data_ptr() for tensor in self._tensors]:
            self.release()  # weights have moved; the graphs would read the old addresses
        found = self._graphs.get(batch.shape)
        if found is not None or len(self._graphs) == _MAX_SHAPES:
            return found
        if batch.shape in self._warm_shapes:
            return self._capture_pair(batch)
        largest = max((len(graphs.batch.tokens) for graphs in self._graphs.values()), default=len(batch.tokens))
        if len(batch.tokens) > largest:
            self.release()  # a larger batch, computed without a graph, may need the memory that they hold
        return None

    def _capture_pair(self, batch: _GraphInputs) -> GraphPair | None:
        assert self._capture is not None
        GraphedHidden.captures += 1
        self._gradients.allocate()
        try:
            graphs = GraphPair(self._compute, batch.copy(), self._gradients, self._capture)
        except RuntimeError as error:  # out of memory, or a layer synchronizes with the host after all
            warn(f"CUDA graph capture failed ({root_cause(error)}); running without graphs")
            self._is_enabled = False
            self.is_impossible = not isinstance(error, torch.OutOfMemoryError)
            self.release()
            return None
        self._graphs[batch.shape] = graphs
        self._weight_addresses = [tensor.data_ptr() for tensor in self._tensors]
        return graphs

    def backward(self, graphs: GraphPair, generation: int, d_hidden: Tensor) -> None:
        """Add the gradients of the latest forward pass to those of the weights."""
        if generation != self._generation:
            raise RuntimeError("backward is too late: a later forward pass or release has reused the graph's memory")
        graphs.d_hidden.copy_(d_hidden)
        self._gradients.vacate()
        graphs.backward()
        self._gradients.accumulate()


class StaticGradients:
    """The trained weights that hidden states depend on, and buffers at fixed addresses for their gradients.

    The graphs write gradients into the buffers, so autograd must not accumulate them: during capture, the model
    computes with aliases of the weights, parameters of their own that share memory. In a step of one micro-batch the
    buffers are the weights' gradients, and nothing has to be zeroed or added.
    """

    def __init__(self, root: LossModel) -> None:
        self._slots = [
            (module, name, weight)
            for module in model_body(root.language_model).modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.requires_grad
        ]
        self.weights = [weight for _, _, weight in self._slots]
        self.buffers: list[Tensor] = []
        self.aliases: list[nn.Parameter] = []

    @property
    def are_untied(self) -> bool:
        """Whether every weight belongs to one module only."""
        return len(set(map(id, self.weights))) == len(self.weights)

    def release(self) -> None:
        self.buffers, self.aliases = [], []

    def allocate(self) -> None:
        self.buffers = self.buffers or [torch.zeros_like(weight, dtype=weight.grad_dtype) for weight in self.weights]
        self.aliases = [nn.Parameter(weight.detach()) for weight in self.weights]

    @contextlib.contextmanager
    def aliased(self) -> Iterator[None]:
        """The model computes with the aliases."""
        try:
            for (module, name, _), alias in zip(self._slots, self.aliases, strict=True):
                module.register_parameter(name, alias)
            yield
        finally:
            for module, name, weight in self._slots:
                module.register_parameter(name, weight)

    def vacate(self) -> None:
        """Before a replay overwrites the buffers: copy the gradients of an earlier micro-batch out of them."""
        for weight, buffer in zip(self.weights, self.buffers, strict=True):
            if weight.grad is buffer:
                weight.grad = buffer.clone()

    def accumulate(self) -> None:
        """After a replay: add the buffers to the gradients of the weights; where there is none, the buffer becomes it.
        A tied weight may have one from the output head."""
        sums, addends = [], []
        for weight, buffer in zip(self.weights, self.buffers, strict=True):
            if weight.grad is None:
                weight.grad = buffer
            else:
                sums.append(weight.grad)
                addends.append(buffer)
        if sums:
            foreach_add_(sums, addends)


class GraphPair:
    """The forward and the backward graph of one batch shape, with their inputs and outputs."""

    def __init__(
        self, compute: Callable[..., Tensor], batch: _GraphInputs, gradients: StaticGradients, capture: Capture
    ) -> None:
        self.batch = batch
        self._compute, self._gradients = compute, gradients
        self.forward = capture(self._forward)
        self.d_hidden = torch.zeros_like(self.hidden)
        self.backward = capture(self._backward)

    @torch.enable_grad()
    def _forward(self) -> None:
        with self._gradients.aliased():
            self._result: Tensor | None = self._compute(*self.batch)
        self.hidden = self._result.detach()

    def _backward(self) -> None:
        result, self._result = self._result, None  # frees the saved activations
        assert result is not None
        # an unused weight is an error: the model may use it in another way, and would not learn it
        found = torch.autograd.grad(result, self._gradients.aliases, self.d_hidden)
        foreach_copy_(self._gradients.buffers, found)


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: GraphedHidden, graphs: GraphPair, generation: int) -> Tensor:
        ctx.hidden, ctx.graphs, ctx.generation = hidden, graphs, generation
        graphs.forward()
        return graphs.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.hidden.backward(ctx.graphs, ctx.generation, grads[0])
        return None, None, None, None
