"""What one pass of a layer costs, read from its graph: the most memory alive at a time, and the work of its kernels.

The graph is torch.compile's, before it makes kernels of it: matrix products, attention and whet's own operators run one
by one, and everything between two of them is fused into kernels that write only what is read again later.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from whet.fit.operator_cost import GROUPED_SLOWDOWN, OWN_OPERATORS, OWN_SCRATCH, Operation


class GraphCost(NamedTuple):
    """The cost of one pass over one layer."""

    peak: int
    """The most bytes that are alive at a time, inputs included."""
    operations: tuple[Operation, ...]

    def extrapolated(self, longer: GraphCost, factor: float) -> GraphCost:
        """This cost, plus `factor` times what a longer micro-batch costs more."""
        operations = (
            short._replace(
                flops=_affine(short.flops, long.flops, factor), bytes=_affine(short.bytes, long.bytes, factor),
                inner=_affine(short.inner, long.inner, factor),
            )
            for short, long in zip(self.operations, longer.operations, strict=True)
        )  # fmt: skip
        return GraphCost(_affine(self.peak, longer.peak, factor), tuple(operations))


def _affine(short: int, long: int, factor: float) -> int:
    return round(short + factor * (long - short))


_VIEWS = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "alias", "detach", "as_strided", "split", "split_with_sizes", "unbind",
}  # fmt: skip
_FUSED = {
    "convert_element_type", "_to_copy", "clone", "copy", "cat", "constant_pad_nd", "full", "full_like", "zeros_like",
    "empty", "iota", "arange", "scalar_tensor", "slice_scatter", "select_scatter", "index", "index_select", "gather",
    "embedding", "repeat", "device_put",
}  # fmt: skip
"""In addition to those that torch tags as pointwise."""
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
                read = sum(_read_bytes(node, each) for each in sources if each not in fresh)
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


def _read_bytes(node: fx.Node, source: fx.Node) -> int:
    """Gathering reads the rows that it returns, not the whole table."""
    gathers = _name(node) in ("index", "index_select", "gather", "embedding")
    return min(_bytes_of(source), _bytes_of(node)) if gathers else _bytes_of(source)


# Operators that are not fused


def _operator_cost(node: fx.Node) -> list[Operation]:
    name = _name(node)
    if name in OWN_OPERATORS:
        return OWN_OPERATORS[name](*(_values(argument) for argument in node.args))
    moved = _bytes_of(node) + sum(_bytes_of(_owner(each)) for each in node.all_input_nodes)
    if name not in _PRODUCTS:
        return [Operation("memory", 0, moved)]
    left, result = node.args[_PRODUCTS[name]], node.meta["val"]
    matrix = left.meta["val"]  # type: ignore[union-attr]
    inner = matrix.shape[-1]
    flops = 2 * matrix.numel() * result.shape[-1]
    if name == "_grouped_mm":
        flops = int(GROUPED_SLOWDOWN * flops)
    return [Operation("fp8" if name == "_scaled_mm" else "matmul", flops, moved, inner)]


def _scratch_bytes(node: fx.Node) -> int:
    """What an operator allocates and frees inside."""
    scratch = OWN_SCRATCH.get(_name(node))
    return 0 if scratch is None else int(scratch(*(_values(argument) for argument in node.args)))


def _values(argument: Any) -> Any:
    """The fake tensors behind a node or a list of nodes."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    return [_values(each) for each in argument] if isinstance(argument, list | tuple) else argument
