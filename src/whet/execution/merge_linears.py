"""One product instead of several where linear layers read the same input: queries, keys and values; gate and up.

A small product fills a part of the device and takes as long as a larger one. Weights in fp32 are cast to 16 bits in
every pass anyway, so casting them side by side into one matrix costs nothing. Larger products are left alone: they fill
the device, and one matrix would keep alive what the backward pass does not need.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from whet.compat.torch_compiler import compile_with_inductor, traced_value

_MAX_FLOPS = 2e10
"""Of a merged product: 20 µs at the peak of an H200."""


def compile_with_merged_linears(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile: inductor, after merging linear layers where they are computed in mixed precision on
    CUDA."""
    if torch.is_autocast_enabled("cuda"):
        merge_linears_(module.graph, lambda weight: weight.is_cuda and weight.dtype == torch.float32)
        module.recompile()
    return compile_with_inductor(module, inputs)


def merge_linears_(graph: Graph, is_merged: Callable[[Tensor], bool], max_flops: float = _MAX_FLOPS) -> None:
    """Merge the linear layers of a traced forward pass that read the same input, if all weights satisfy `is_merged`
    and the product has at most `max_flops`. The weights must be inputs of the graph."""
    groups: defaultdict[tuple[Node, bool], list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=F.linear):
        x, weight, bias = (*node.args, None)[:3]
        if node.kwargs or not isinstance(x, Node) or not isinstance(weight, Node) or weight.op != "placeholder":
            continue
        if is_merged(traced_value(weight)) and not any(map(_writes_in_place, x.users)):
            groups[x, bias is not None].append(node)
    for (x, has_bias), linears in groups.items():
        weights = [node.args[1] for node in linears]
        sizes = [len(traced_value(weight)) for weight in weights]
        flops = 2 * traced_value(x).numel() * sum(sizes)
        if len(linears) == 1 or flops > max_flops:
            continue
        with graph.inserting_before(linears[0]):
            weight = graph.call_function(torch.cat, (weights,))
            bias = graph.call_function(torch.cat, ([node.args[2] for node in linears],)) if has_bias else None
            parts = graph.call_function(torch.split, (graph.call_function(F.linear, (x, weight, bias)), sizes, -1))
            outputs = [graph.call_function(operator.getitem, (parts, number)) for number in range(len(sizes))]
        for linear, output in zip(linears, outputs, strict=True):
            output.meta |= linear.meta  # without example values AOTAutograd does not cache the graph
            linear.replace_all_uses_with(output)
            graph.erase_node(linear)


def _writes_in_place(user: Node) -> bool:
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")
