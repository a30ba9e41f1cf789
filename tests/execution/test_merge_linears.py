"""Merged linear layers: the same losses and gradients from fewer products."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule

from whet.execution import merge_linears
from whet.execution.compile import compile_forward
from whet.execution.merge_linears import compile_with_merged_linears, merge_linears_
from whet.execution.transform import transform_layers
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.parallel.config import ParallelConfig

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Make = Callable[..., Any]


class MergingBackend:
    """A backend of torch.compile that merges and then runs eagerly; counts the products of each graph."""

    def __init__(self, is_merged: Callable[[Tensor], bool] = lambda weight: True, **limit: float) -> None:
        self.counts: list[tuple[int, int]] = []
        self._is_merged, self._limit = is_merged, limit

    def __call__(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        before = count_linears(module)
        merge_linears_(module.graph, self._is_merged, **self._limit)
        module.graph.lint()
        module.recompile()
        self.counts.append((before, count_linears(module)))
        # or AOTAutograd would not cache the graph ("Unsupported call_method target")
        assert all("example_value" in node.args[0].meta for node in module.graph.nodes if node.op == "call_method")
        return module.forward


def count_linears(module: GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=F.linear))


def loss_and_gradients(root: LossModel, batch: Any) -> list[Tensor]:
    root.zero_grad()
    with KeepFloat64():
        loss = root(batch)
        loss.objective.backward()
    return [loss.nll, *(weight.grad.clone() for weight in root.parameters() if weight.grad is not None)]


KINDS = [
    ("Llama", (7, 4), {}),
    ("Qwen2", (7, 4), {}),  # queries, keys and values have biases
    ("Llama", (7, 4), {"attention_bias": True, "mlp_bias": True}),
    ("Gemma3Text", (7, 4), {"head_dim": 8, "layer_types": ["full_attention"] * 4}),
    ("GPTNeoX", (4, 4), {}),  # one product for all three
]


@pytest.mark.parametrize(("architecture", "counts", "settings"), KINDS)
def test_merged_layers_compute_the_same(
    make_root: Make, make_batch: Make, architecture: str, counts: tuple[int, int], settings: dict[str, Any]
) -> None:
    root, batch = make_root(architecture, backend="eager", **settings).double(), make_batch([9, 20, 8])
    expected = loss_and_gradients(root, batch)
    backend = MergingBackend()
    transform_layers(root.language_model, ParallelConfig(), True, backend)
    found = loss_and_gradients(root, batch)
    assert backend.counts == [counts]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_large_products_and_other_weights_stay_as_they_are(make_root: Make, make_batch: Make) -> None:
    for backend in (MergingBackend(max_flops=1.0), MergingBackend(lambda weight: weight.is_cuda)):
        root = make_root("Llama", backend="eager")
        transform_layers(root.language_model, ParallelConfig(), True, backend)
        root(make_batch([9, 20, 8])).objective.backward()
        assert backend.counts == [(7, 7)]


class WritesBetween(nn.Module):
    """Changes the input between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor, documents: int) -> Tensor:
        x = x * documents
        first = self.first(x)
        x.add_(1)
        return torch.cat([first, self.second(x)], dim=-1)


def test_layers_between_which_the_input_changes_are_not_merged() -> None:
    module, x, backend = WritesBetween(), torch.randn(2, 4), MergingBackend()
    with torch.no_grad():
        torch.testing.assert_close(compile_forward(module.forward, backend)(x, documents=2), module(x, documents=2))
    assert backend.counts == [(2, 2)]


def test_without_mixed_precision_on_cuda_layers_are_compiled_as_they_are(
    make_root: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor is left out: on a CPU its C++ compiler takes 40 s, and what it receives is what counts."""
    monkeypatch.setattr(merge_linears, "compile_with_inductor", lambda module, inputs: module.forward)
    root, counter = make_root("Llama", backend="eager"), CompileCounterWithBackend(compile_with_merged_linears)
    transform_layers(root.language_model, ParallelConfig(), True, counter)
    root(make_batch([9, 20, 8])).objective.backward()
    assert [count_linears(graph) for graph in counter.graphs] == [7]


@pytest.mark.gpu
def test_merged_layers_learn_as_others_do_in_mixed_precision(make_root: Make, make_batch: Make) -> None:
    """bf16 on a GPU, with inductor: gradients differ by roundings only."""
    gradients = []
    for backend in ("inductor", compile_with_merged_linears):
        torch._dynamo.reset()
        root = make_root("Llama", torch.float32, backend="eager").cuda()
        transform_layers(root.language_model, ParallelConfig(), True, CompileCounterWithBackend(backend))
        with torch.autocast("cuda", torch.bfloat16):
            batch = vars(make_batch([9, 20, 8]))
            on_device = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in batch.items()}
            root(SimpleNamespace(**on_device)).objective.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in root.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.01 * gradients[0].norm()
    assert gradients[0].norm() > 0
