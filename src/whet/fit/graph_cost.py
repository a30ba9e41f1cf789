"""What one pass of a layer costs, read from its graph: the most memory alive at a time, and the work of its kernels.

The graph is torch.compile's, before it makes kernels of it: matrix products, attention and whet's own operators run one
by one, and everything between two of them is fused into kernels that write only what is read again later.

Shape letters: T tokens, E input features, F intermediate size, O output features, R rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx


class Operation(NamedTuple):
    """One kernel or several: their time is that of their FLOPs or of their bytes, whichever is longer."""

    kind: Literal["matmul", "fp8", "memory"]
    flops: int
    bytes: int
    inner: int = 0
    """The inner dimension of a product: short sums keep tensor cores less busy."""
    kernels: int = 1


class GraphCost(NamedTuple):
    """The cost of one pass over one layer."""

    peak: int
    """The most bytes that are alive at a time, inputs included."""
    operations: tuple[Operation, ...]

    def scaled(self, factor: float) -> GraphCost:
        """For so many times the tokens."""
        operations = (
            each._replace(flops=round(factor * each.flops), bytes=round(factor * each.bytes))
            for each in self.operations
        )
        return GraphCost(round(factor * self.peak), tuple(operations))


_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind",
}  # fmt: skip
_FUSED = {
    "convert_element_type", "_to_copy", "clone", "copy", "cat", "constant_pad_nd", "full", "full_like", "zeros_like",
    "empty", "iota", "arange", "scalar_tensor", "slice_scatter", "select_scatter", "index", "index_select", "gather",
    "embedding", "repeat", "device_put",
}  # fmt: skip
"""Beside what torch tags as pointwise."""
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "prod", "any", "all", "max", "min"}
_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""By name: the index of the left matrix among the arguments."""


def graph_cost(graph: fx.Graph, resident: Collection[str] = ()) -> GraphCost:
    """Walk through a graph in its order. `resident`: inputs that are not counted, such as weights, which stay."""
    nodes = list(graph.nodes)
    buffers = _Buffers(nodes)
    alive = {
        node: _bytes_of(node) for node in nodes if node.op == "placeholder" and node.name not in resident
    }  # fmt: skip
    size = peak = sum(alive.values())
    operations: list[Operation] = []
    fresh: set[fx.Node] = set()  # read or written since the last operator that is not fused: still being computed with
    for at, node in enumerate(nodes):
        if node in buffers.written:
            alive[node] = _bytes_of(node)
            size += alive[node]
            peak = max(peak, size + _scratch_bytes(node))
            sources = buffers.sources(node)
            if node.target is operator.getitem:
                pass
            elif _is_fusible(node):
                read = sum(min(_bytes_of(each), _read_limit(node)) for each in sources if each not in fresh)
                is_scalar = _bytes_of(node) <= 8  # computed by its neighbours' kernels
                operations.append(Operation("memory", 0, read + _bytes_of(node), kernels=0 if is_scalar else 1))
                fresh.update(sources, (node,))
            else:
                operations.extend(_operator_cost(node))
                fresh = set()
        for buffer in [each for each in alive if buffers.last_use[each] <= at]:
            size -= alive.pop(buffer)
    return GraphCost(peak, tuple(operations))


def saved_nodes(graph: fx.Graph, outputs: int) -> list[fx.Node]:
    """The tensors that a forward graph returns after its `outputs`, each once, whatever views it returns of them."""
    saved = [node for node in list(graph.nodes)[-1].args[0][outputs:] if isinstance(node, fx.Node)]
    return list(dict.fromkeys(map(_owner, saved)))


def node_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor or tensors."""
    return _bytes_of(node)


class _Buffers:
    """Which nodes write memory, and until when it is read."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.written: set[fx.Node] = set()
        for node in nodes:
            if node.op == "call_function" and not _is_view(node) and self._is_written(node):
                self.written.add(node)
        order = {node: at for at, node in enumerate(nodes)}
        needed: dict[fx.Node, int] = {}  # until when a node's value is read, through views and fused nodes
        for node in reversed(nodes):
            reads = [order[user] if self._runs(user) else needed[user] for user in node.users]
            needed[node] = max(reads, default=order[node])
        self.last_use = needed

    def _runs(self, node: fx.Node) -> bool:
        return node in self.written or node.op == "output"

    def _is_written(self, node: fx.Node) -> bool:
        if not _is_fusible(node) or _name(node) in _REDUCTIONS:
            return True
        return any(user.op == "output" or not _is_fusible(user) for user in _users_through_views(node))

    def sources(self, node: fx.Node) -> set[fx.Node]:
        """The buffers and inputs that a kernel reads, through views and what is fused into it."""
        found: set[fx.Node] = set()
        pending = list(node.all_input_nodes)
        seen: set[fx.Node] = set()
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            if each.op == "placeholder" or each in self.written:
                found.add(each)
            else:
                pending.extend(each.all_input_nodes)
        return found


def _users_through_views(node: fx.Node) -> Iterable[fx.Node]:
    for user in node.users:
        if _is_view(user):
            yield from _users_through_views(user)
        else:
            yield user


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # of a list of views
        return _is_view(node.all_input_nodes[0])
    return node.op == "call_function" and _name(node) in _VIEWS


def _is_fusible(node: fx.Node) -> bool:
    name = _name(node)
    if name in _FUSED or name in _REDUCTIONS:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _name(node: fx.Node) -> str:
    """mm of aten.mm.default, whet::lora_mlp_down of whet's own operator."""
    schema = getattr(node.target, "_schema", None)
    name = str(getattr(schema, "name", node.target))
    return name.removeprefix("aten::").removeprefix("prims::")


def _bytes_of(node: fx.Node) -> int:
    """Of a node with several results 0: `getitem` takes each of them."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _read_limit(node: fx.Node) -> float:
    """Gathering reads the rows that it returns, not the whole table."""
    return _bytes_of(node) if _name(node) in ("index", "index_select", "gather", "embedding") else math.inf


# Operators that are not fused


def _operator_cost(node: fx.Node) -> list[Operation]:
    name = _name(node)
    if name in _OWN_OPERATORS:
        return _OWN_OPERATORS[name](*(_values(argument) for argument in node.args))
    moved = _bytes_of(node) + sum(_bytes_of(_owner(each)) for each in node.all_input_nodes)
    if name not in _PRODUCTS:
        return [Operation("memory", 0, moved)]
    left, result = node.args[_PRODUCTS[name]], node.meta["val"]
    matrix = left.meta["val"]  # type: ignore[union-attr]
    inner = matrix.shape[-1]
    flops = 2 * matrix.numel() * result.shape[-1]
    if name == "_grouped_mm":  # experts get few tokens each: five sixths of the rate (LOG.md, 2026-11-16)
        flops = flops * 6 // 5
    return [Operation("fp8" if name == "_scaled_mm" else "matmul", flops, moved, inner)]


def _scratch_bytes(node: fx.Node) -> int:
    """What an operator allocates and frees inside."""
    if _name(node) == "whet::lora_mlp_backward":
        gate, adapters, chunk = (_values(node.args[at]) for at in (2, 8, 10))
        tokens = min(len(gate), chunk)
        matrices = 2 if len(adapters[4]) <= _MAX_RANK_IN_PLACE else 3
        return int(matrices * tokens * gate.shape[1] * gate.element_size())
    if _name(node) == "whet::lora_mlp_down":
        gate = _values(node.args[0])
        return int(gate.numel() * gate.element_size())
    return 0


_MAX_RANK_IN_PLACE = 32
"""Up to this rank the backward kernel of the gated MLP does not write the activations again (lora_kernels.py)."""


def _values(argument: Any) -> Any:
    """The fake tensors behind a node or a list of nodes."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    return [_values(each) for each in argument] if isinstance(argument, list | tuple) else argument


def _frozen_product(tokens: int, a: Tensor, b: Tensor, parts: Sequence[Tensor], itemsize: int) -> list[Operation]:
    """[T, E] · [E, O] with a frozen weight; in fp8 the weight is cast each time."""
    inside, outside = a.shape[1], len(b)
    moved = tokens * (inside + outside) * itemsize + inside * outside * itemsize
    product = Operation("fp8" if len(parts) == 2 else "matmul", 2 * tokens * inside * outside, moved, inside)
    return [product, Operation("memory", 0, 5 * inside * outside, kernels=2)] if len(parts) == 2 else [product]


def _fp8_cast(x: Tensor, frozen: Sequence[Tensor], layers: int) -> list[Operation]:
    """An operand is read for its amax, read again and written in 8 bits, once for all layers that share it."""
    return [Operation("memory", 0, 5 * x.numel(), kernels=2)] if len(frozen) == 2 * layers else []


def _lora_linear(
    x: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int], biases: Any, adapters: Sequence[Tensor], scales: Any
) -> list[Operation]:
    size, tokens = x.element_size(), x.shape[:-1].numel()
    pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
    low_rank = x.numel() + sum(2 * tokens * len(b) for _, b in pairs)  # written by the low-rank product, then read
    products = [
        each for (a, b), count in zip(pairs, sizes, strict=True)
        for each in _frozen_product(tokens, a, b, frozen[:count], size)
    ]  # fmt: skip
    return [
        *_fp8_cast(x, frozen, len(pairs)),
        *products,
        Operation("memory", 0, low_rank * size, kernels=2 + len(pairs)),
    ]


def _lora_linear_backward(
    d_outputs: Sequence[Tensor], x: Tensor, xa: Tensor, frozen: Sequence[Tensor], sizes: Sequence[int],
    adapters: Sequence[Tensor], scales: Any, needs_x: bool,
) -> list[Operation]:  # fmt: skip
    size, tokens = x.element_size(), x.shape[:-1].numel()
    pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
    low_rank = (1 + 2 * needs_x) * x.numel() + 2 * sum(d_y.numel() for d_y in d_outputs)
    found = [Operation("memory", 0, low_rank * size, kernels=4 + 3 * len(pairs))]
    if needs_x:
        for (a, b), count in zip(pairs, sizes, strict=True):
            found += _frozen_product(tokens, b.T, a.T, frozen[:count], size)
        for d_y in d_outputs:
            found += _fp8_cast(d_y, frozen, len(pairs))
    return found


def _lora_mlp_gate_up(
    x: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor], gate_bias: Any, up_bias: Any, adapters: Sequence[Tensor],
    scales: Any,
) -> list[Operation]:  # fmt: skip
    size, tokens = x.element_size(), x.shape[:-1].numel()
    a_gate, b_gate, a_up, b_up = adapters
    return [
        *_fp8_cast(x, gate, 1), *_frozen_product(tokens, a_gate, b_gate, gate, size),
        *_frozen_product(tokens, a_up, b_up, up, size), Operation("memory", 0, x.numel() * size, kernels=3),
    ]  # fmt: skip


def _lora_mlp_down(
    gate0: Tensor, up0: Tensor, xa: Tensor, down: Sequence[Tensor], bias: Any, adapters: Sequence[Tensor], scale: Any
) -> list[Operation]:
    size, tokens = gate0.element_size(), len(gate0)
    a_down, b_down = adapters[4], adapters[5]
    activations = (3 * gate0.numel() + 2 * tokens * len(b_down)) * size
    return [
        Operation("memory", 0, activations, kernels=4), *_fp8_cast(gate0, down, 1),
        *_frozen_product(tokens, a_down, b_down, down, size),
    ]  # fmt: skip


def _lora_mlp_backward(
    d_y: Tensor, x: Tensor, gate0: Tensor, up0: Tensor, xa: Tensor, gate: Sequence[Tensor], up: Sequence[Tensor],
    down: Sequence[Tensor], adapters: Sequence[Tensor], scales: Any, chunk: int, needs_x: bool,
) -> list[Operation]:  # fmt: skip
    size, tokens = x.element_size(), len(gate0)
    a_gate, b_gate, a_up, b_up, a_down, b_down = adapters
    # the kernel of the activations reads three and writes two; dB reads both gradients again
    moved = (7 * gate0.numel() + (2 + 2 * needs_x) * x.numel() + 2 * d_y.numel()) * size
    found = [
        Operation("memory", 0, moved, kernels=13), *_fp8_cast(d_y, down, 1),
        *_frozen_product(tokens, b_down.T, a_down.T, down, size),
    ]  # fmt: skip
    if needs_x:
        for a, b, parts in ((a_gate, b_gate, gate), (a_up, b_up, up)):
            found += [*_fp8_cast(gate0, parts, 1), *_frozen_product(tokens, b.T, a.T, parts, size)]
    return found


_OWN_OPERATORS: dict[str, Callable[..., list[Operation]]] = {
    "whet::lora_linear": _lora_linear,
    "whet::lora_linear_backward": _lora_linear_backward,
    "whet::lora_mlp_gate_up": _lora_mlp_gate_up,
    "whet::lora_mlp_down": _lora_mlp_down,
    "whet::lora_mlp_backward": _lora_mlp_backward,
}
"""Operators that do more than read their inputs and write their outputs."""
