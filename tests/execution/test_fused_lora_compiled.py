"""Fused adapters in layers with compile, recompute and offload."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition

from whet.execution.transform import transform_layers
from whet.model.lora.fuse import fuse_lora_
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64, decoder_layers
from whet.parallel.config import ParallelConfig

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Make = Callable[..., Any]
BATCHES = ([9, 20, 8], [48], [1, 2, 3, 4, 5, 6, 7])


def gradients(root: LossModel, make_batch: Make) -> list[Tensor]:
    """Accumulated over two micro-batches."""
    for lengths in BATCHES[:2]:
        with KeepFloat64():
            result = root(make_batch(lengths))
        result.objective.backward()
    return [weight.grad for weight in root.parameters() if weight.requires_grad]


VARIANTS = [
    (True, "none", "none", "aot_eager"),
    pytest.param(True, "none", "none", "inductor", marks=pytest.mark.slow),
    (True, "full", "none", "aot_eager"),
    (True, "selective", "activations", "aot_eager"),
    (False, "full", "none", ""),
    (False, "selective", "none", ""),
    (False, "none", "activations", ""),
]


@pytest.mark.parametrize(("compile", "recompute", "offload", "backend"), VARIANTS)
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [("Llama", "eager"), ("Qwen2", "eager"), pytest.param("Llama", "sdpa", marks=pytest.mark.slow)],
)
def test_gradients_are_those_of_peft_uncompiled(
    make_root: Make, make_batch: Make, compile: bool, recompute: Any, offload: Any, backend: str, architecture: str,
    attention: str,
) -> None:  # fmt: skip
    plain = make_root(architecture, dropout=0.0, backend=attention, num_hidden_layers=2)
    fused = copy.deepcopy(plain)
    assert fuse_lora_(fused) == 6
    transform_layers(fused.language_model, ParallelConfig(recompute=recompute, offload=offload), compile, backend)
    for one, other in zip(gradients(plain, make_batch), gradients(fused, make_batch), strict=True):
        assert (one - other).norm() <= 1e-12 * one.norm()


def test_fused_layers_are_compiled_once_for_training_and_once_for_evaluation(make_root: Make, make_batch: Make) -> None:
    """And once for the first, whose input needs no gradient. With eager attention a layer is one graph."""
    root, counter = make_root(dropout=0.0, backend="eager"), CompileCounterWithBackend("eager")
    fuse_lora_(root)
    transform_layers(root.language_model, ParallelConfig(), True, counter)
    for lengths in BATCHES:
        root(make_batch(lengths)).objective.backward()
        assert counter.frame_count == 2
    with torch.no_grad():
        for lengths in BATCHES:
            root.eval()(make_batch(lengths))
    assert counter.frame_count == 3


def saved_by_a_layer(root: LossModel, make_batch: Make) -> list[tuple[int, ...]]:
    """The shapes of what the third layer saves for the backward pass, without weights."""
    weights = {weight.data_ptr() for weight in root.parameters()}
    found: dict[int, tuple[int, ...]] = {}
    layer = decoder_layers(root.language_model)[2]
    forward = layer.forward

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
        return tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer.forward = run
    with torch.autocast("cpu", torch.bfloat16):
        root(make_batch([48])).objective.backward()
    return list(found.values())


@pytest.mark.parametrize("fuse", [False, True])
def test_a_compiled_layer_saves_gate_and_up_but_neither_their_product_nor_norm_outputs(
    make_root: Make, make_batch: Make, fuse: bool
) -> None:
    """Of the width of a token: the layer's input, attention's result, their sum, and here a copy of q for eager
    attention's products; of the MLP's width two matrices."""
    torch._dynamo.reset()
    root = make_root(dtype=torch.bfloat16, dropout=0.0, backend="eager", intermediate_size=80)
    if fuse:
        fuse_lora_(root)
    transform_layers(
        root.language_model, ParallelConfig(), True, "aot_eager_decomp_partition"
    )  # partitions as inductor does
    shapes = saved_by_a_layer(root, make_batch)
    assert [sum(shape[-1] == width for shape in shapes) for width in (80, 32)] == [2, 3]


def test_a_fused_mlp_is_recomputed_without_its_last_product(make_root: Make, make_batch: Make) -> None:
    torch._dynamo.reset()
    calls: list[str] = []

    def list_operators(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(" ".join(str(node.target) for node in graph.graph.nodes if "whet" in str(node.target)))
        return make_boxed_func(graph.forward)

    root = make_root(dropout=0.0, backend="eager")
    fuse_lora_(root)
    backend = aot_autograd(
        fw_compiler=list_operators, bw_compiler=list_operators, partition_fn=min_cut_rematerialization_partition
    )
    transform_layers(root.language_model, ParallelConfig(recompute="full"), True, backend)
    with KeepFloat64():
        root(make_batch([9, 20, 8])).objective.backward()
    backward = [graph for graph in calls if "lora_mlp_backward" in graph]
    assert backward
    assert all("lora_mlp_gate_up" in graph and "lora_mlp_down" not in graph for graph in backward)
