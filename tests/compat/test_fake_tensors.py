"""Fake tensors, graphs of both passes, and what else an estimate on paper needs of torch."""

from __future__ import annotations

import torch

from whet.compat.torch_compiler import trace_passes
from whet.compat.torch_private import (
    OperationCount,
    fake_tensor_mode,
    map_tensors,
    storage_key,
    tree_flatten,
    tree_unflatten,
)


def test_fake_tensors_have_shapes_and_no_memory() -> None:
    with fake_tensor_mode(), OperationCount() as operations:
        large = torch.empty(2**40, 2)
        total = large.sum(dim=0)
    assert total.shape == (2,)
    assert operations.count == 2


def test_views_share_a_storage_key_and_copies_do_not() -> None:
    with fake_tensor_mode():
        one = torch.empty(4, 4)
        assert storage_key(one.T) == storage_key(one) != storage_key(one.clone())


def test_trees_of_tensors_are_taken_apart_and_put_together() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (None, torch.zeros(1))}
    leaves, structure = tree_flatten(tree)
    assert tree_unflatten(leaves, structure) == tree
    assert map_tensors(lambda tensor: tensor.shape, tree) == {"a": [(1,), 2], "b": (None, (1,))}


def test_the_compiler_saves_inputs_rather_than_what_it_can_compute_again() -> None:
    """sin · cos · exp of x: the backward pass needs all three, and x is enough for them."""

    def compute(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.cos() * (x @ w).exp()

    with fake_tensor_mode():
        x, w = (torch.empty(size, 8, requires_grad=True) for size in (64, 8))
        forward, backward, outputs = trace_passes(compute, [x, w], static=[1], budget=1.0)
    assert outputs == 1
    *_, result = forward.nodes
    saved = [node.name for node in result.args[0][outputs:]]
    assert saved == ["primals_1", "primals_2", "mm"], "the inputs and the product, which is not computed again"
    products = [node for node in backward.nodes if getattr(node.target, "overloadpacket", None) is torch.ops.aten.mm]
    assert len(products) == 2, "of the gradients of x and w"
