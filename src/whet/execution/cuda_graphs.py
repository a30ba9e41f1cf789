"""CUDA graphs of the decoder layers, captured per batch shape: for launch-bound models and batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from whet.compat.torch_compiler import compiled_graph_count
from whet.compat.torch_private import foreach_add_, foreach_copy_, foreach_zero_, has_forward_hooks, release_graph_pool
from whet.core.console import warn
from whet.core.errors import WhetError, first_line
from whet.execution.recompute import has_dropout
from whet.model.attention import supports_fullgraph
from whet.model.flops import count_step_flops
from whet.model.layers import decoder_layers
from whet.model.loss.loss_model import LossModel

# CUDA graphs: what was asked of the device, asked for again in one call.

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what asks the device for something, and gives what asks for it again."""


def make_capture() -> Capture:
    """Graphs that share their memory: only one of them is on its way at a time.

    One that cannot be recorded is a RuntimeError, which leaves torch able to compute without."""
    pool = torch.cuda.graph_pool_handle()

    def capture(ask: Callable[[], None]) -> Callable[[], None]:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # other threads may go on using the device, as for the next batch, a checkpoint, or NCCL's own
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                ask()
        except RuntimeError:
            # torch leaves both as they were in the middle of it where the driver has given up the recording
            torch.cuda.set_stream(here)
            release_graph_pool(here.device_index, pool)
            raise
        return graph.replay

    return capture


def root_cause(error: BaseException) -> str:
    """The first line of what came first: what ends a recording fails too, and says no more than that."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


# Hidden states asked for at once: what the layers ask of the device for a batch, recorded for each shape of batches.
#
# A layer's two passes take the host some milliseconds to ask for. Where the device needs less for them, because the model
# is small or the batch is, it waits for the host most of the time. Two CUDA graphs, one each way, ask for the same and in
# the same order, in two calls. They hold their memory from one step to the next, so they are forgotten where something
# else needs it.

_LAUNCH_BOUND_S = 0.005
"""Of a layer's two passes, by the peak of the device: where they take longer, the host is fast enough."""
_MAX_GRADIENT_BYTES = 2**30
"""Bytes of gradients, which are there twice."""
_MAX_SHAPES = 8
"""Shapes that are recorded."""


def enable_cuda_graphs(root: LossModel, tokens: int, peak: float | None) -> bool:
    """Record what `root`'s layers ask for from now on, if nothing in them is random or looks at the device, if their
    gradients are small, and if the host is slower than the device for a batch of `tokens`; gives whether it does.

    `peak`: FLOP/s of the device; None where it is not known."""
    model = root.language_model
    if root.alone or peak is None or not supports_fullgraph(model) or has_dropout(model):
        return False
    try:
        layers = decoder_layers(model)
    except WhetError:
        return False
    learned = StaticGradients(root)
    if (
        not learned.weights
        or not learned.are_single
        or sum(weight.nbytes for weight in learned.weights) > _MAX_GRADIENT_BYTES
    ):
        return False
    if count_step_flops(model).per_token * tokens / len(layers) / peak > _LAUNCH_BOUND_S:
        return False
    root.hidden = GraphedHidden(root, learned, make_capture)  # type: ignore[method-assign]
    return True


def uses_cuda_graphs(root: LossModel) -> bool:
    """Whether it records what its layers ask for."""
    return isinstance(root.hidden, GraphedHidden)


def release_cuda_graphs(root: LossModel) -> None:
    """Give back the memory of what was recorded; it is recorded again when it is needed."""
    hidden: Any = getattr(root, "hidden", None)
    if isinstance(hidden, GraphedHidden):
        hidden.forget()


def compile_and_capture_count() -> int:
    """How much was compiled and recorded in this process: a step in which it grows says nothing about speed."""
    return compiled_graph_count() + GraphedHidden.made


class _GraphInputs(NamedTuple):
    """What `LossModel.hidden` is told. Batches of one shape differ in the numbers of the tensors and in edges."""

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    longest: int
    edges: Sequence[int]

    @property
    def shape(self) -> _ShapeKey:
        return len(self.tokens), len(self.cu_seqlens), self.longest

    def copy(self) -> _GraphInputs:
        return self._replace(
            tokens=self.tokens.clone(), positions=self.positions.clone(), cu_seqlens=self.cu_seqlens.clone()
        )

    def take(self, other: _GraphInputs) -> None:
        """The numbers of another one of the same shape."""
        self.tokens.copy_(other.tokens)
        self.positions.copy_(other.positions)
        self.cu_seqlens.copy_(other.cu_seqlens)


_ShapeKey = tuple[int, ...]


class GraphedHidden:
    """`LossModel.hidden`, computed as before or, where gradients are wanted and the shape is known, by a recording."""

    made: ClassVar[int] = 0
    """Recordings so far in this process."""

    def __init__(self, root: LossModel, learned: StaticGradients, capturing: Callable[[], Capture]) -> None:
        self._body = _base_model(root)
        self._compute = root.hidden
        self._learned = learned
        self._tensors = [*root.parameters(), *root.buffers()]
        self._capturing, self._possible = capturing, True
        self._anchor = torch.zeros((), requires_grad=True)
        self._warm: set[_ShapeKey] = set()  # in both of their passes layers were compiled and kernels loaded
        self._number = 0
        self.forget()

    def forget(self) -> None:
        self._capture = self._capturing() if self._possible else None
        self._recordings: dict[_ShapeKey, GraphPair] = {}
        self._learned.lose()
        self._places: list[int] = []
        self._number += 1

    def __call__(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, longest: int, edges: Sequence[int]
    ) -> Tensor:
        batch = _GraphInputs(tokens, positions, cu_seqlens, longest, edges)
        # a recording calls no hooks, by which somebody looks at what modules compute
        if not (self._possible and torch.is_grad_enabled()) or has_forward_hooks(self._body):
            return self._compute(*batch)
        recording = self._recording(batch)
        if recording is None:
            hidden, shape = self._compute(*batch), batch.shape
            hidden.register_hook(lambda _: self._warm.add(shape))
            return hidden
        self._number += 1
        recording.batch.take(batch)
        replayed: Tensor = _ReplayFunction.apply(self._anchor, self, recording, self._number)
        return replayed

    def _recording(self, batch: _GraphInputs) -> GraphPair | None:
        if self._recordings and self._places != [tensor.data_ptr() for tensor in self._tensors]:
            self.forget()  # it would read weights where they were
        found = self._recordings.get(batch.shape)
        if found is not None or len(self._recordings) == _MAX_SHAPES:
            return found
        if batch.shape in self._warm:
            return self._record(batch)
        largest = max(
            (len(recording.batch.tokens) for recording in self._recordings.values()), default=len(batch.tokens)
        )
        if len(batch.tokens) > largest:
            self.forget()  # the memory that they keep is needed
        return None

    def _record(self, batch: _GraphInputs) -> GraphPair | None:
        assert self._capture is not None
        GraphedHidden.made += 1
        self._learned.find()
        try:
            recording = GraphPair(self._compute, batch.copy(), self._learned, self._capture)
        except RuntimeError as error:  # too little memory, or something in the layers looks at the device after all
            warn(f"what layers ask of the device cannot be recorded, so the host asks each time: {root_cause(error)}")
            self._possible = False
            self.forget()
            return None
        self._recordings[batch.shape] = recording
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        return recording

    def backward(self, recording: GraphPair, number: int, d_hidden: Tensor) -> None:
        """Add the gradients of what was the last to be computed forward to those of the weights."""
        if number != self._number:
            raise RuntimeError("the memory of this forward pass was used for another; its backward pass comes too late")
        recording.d_hidden.copy_(d_hidden)
        self._learned.gather()
        recording.backward()
        self._learned.hand_out()


class StaticGradients:
    """The trained weights that hidden states come from, under other names while they are recorded, and the sums of
    their gradients.

    Gradients are added up by the recording itself, so autograd must not: it is asked for those of other tensors with
    the same numbers, which it has never seen before. What the head adds to a weight that is its own too, it adds.
    """

    def __init__(self, root: LossModel) -> None:
        self._places = [
            (module, name, weight)
            for module in _base_model(root).modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.requires_grad
        ]
        self.weights = [weight for _, _, weight in self._places]
        self.sums: list[Tensor]
        self.aliases: list[nn.Parameter]
        self.lose()

    @property
    def are_single(self) -> bool:
        """Whether each stands in one place only."""
        return len(set(map(id, self.weights))) == len(self.weights)

    def lose(self) -> None:
        self.sums, self.aliases = [], []

    def find(self) -> None:
        """Where the weights are now."""
        self.sums = self.sums or [torch.zeros_like(weight, dtype=weight.grad_dtype) for weight in self.weights]
        self.aliases = [nn.Parameter(weight.detach()) for weight in self.weights]

    @contextlib.contextmanager
    def aliased(self) -> Iterator[None]:
        """The model computes with the aliases."""
        try:
            for (module, name, _), alias in zip(self._places, self.aliases, strict=True):
                module.register_parameter(name, alias)
            yield
        finally:
            for module, name, weight in self._places:
                module.register_parameter(name, weight)

    def gather(self) -> None:
        """Let the sums begin with the gradients that the weights have."""
        pairs = list(zip(self.weights, self.sums, strict=True))
        none = [total for weight, total in pairs if weight.grad is None]
        others = [(total, grad) for weight, total in pairs if (grad := weight.grad) is not None and grad is not total]
        if none:
            foreach_zero_(none)
        if others:
            foreach_copy_([total for total, _ in others], [grad for _, grad in others])

    def hand_out(self) -> None:
        """Let the weights have the sums as their gradients."""
        for weight, total in zip(self.weights, self.sums, strict=True):
            weight.grad = total


class GraphPair:
    """The hidden states of one shape of batches, and their gradients, in memory of their own."""

    def __init__(
        self, compute: Callable[..., Tensor], batch: _GraphInputs, learned: StaticGradients, capture: Capture
    ) -> None:  # fmt: skip
        self.batch = batch
        self._compute, self._learned = compute, learned
        self.forward = capture(self._ask_forward)
        self.d_hidden = torch.zeros_like(self.hidden)
        self.backward = capture(self._ask_backward)

    @torch.enable_grad()
    def _ask_forward(self) -> None:
        with self._learned.aliased():
            self._result: Tensor | None = self._compute(*self.batch)
        self.hidden = self._result.detach()

    def _ask_backward(self) -> None:
        result, self._result = self._result, None  # with it goes what it has kept
        assert result is not None
        # a weight that nothing comes from is an error: the model may have another way to it, and would learn nothing
        found = torch.autograd.grad(result, self._learned.aliases, self.d_hidden)
        foreach_add_(self._learned.sums, found)


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, replay: GraphedHidden, recording: GraphPair, number: int) -> Tensor:
        ctx.replay, ctx.recording, ctx.number = replay, recording, number
        recording.forward()
        return recording.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.replay.backward(ctx.recording, ctx.number, grads[0])
        return None, None, None, None


def _base_model(root: LossModel) -> nn.Module:
    """What hidden states come from."""
    body = root.language_model.base_model
    assert isinstance(body, nn.Module)
    return body
