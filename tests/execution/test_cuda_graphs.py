"""Graphs compute what eager execution computes. On a CPU, a replay calls the captured function again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from whet.execution import cuda_graphs
from whet.execution.cuda_graphs import (
    Capture,
    GraphedHidden,
    StaticGradients,
    compile_and_capture_count,
    enable_cuda_graphs,
    max_gradient_bytes,
    release_cuda_graphs,
)
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.loss.loss_model import LossModel
from whet.parallel.config import ParallelConfig
from whet.parallel.ddp import accumulate_in_fp32
from whet.training.diagnose import watch_nonfinite

Make = Callable[..., Any]
STEPS: list[list[tuple[list[int], int]]] = [
    [([9, 20, 8], 48), ([48], 48)],
    [([1, 2, 3, 4, 5], 48), ([10, 7], 32), ([4, 4], 48)],
    [([30], 32), ([20, 20], 48), ([5, 6], 32)],
    [([12, 13], 32)],
    [([40, 8], 48), ([3], 48)],
]
"""Batches of two shapes; in some steps the first of a shape, which is not captured, comes before one that is."""


def eager_capture() -> Capture:
    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function

    return capture


@pytest.fixture
def roots(make_root: Make) -> tuple[LossModel, LossModel]:
    """A model without and one with graphs."""
    plain = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    graphed = copy.deepcopy(plain)
    graphed.hidden = GraphedHidden(graphed, StaticGradients(graphed), eager_capture)
    return plain, graphed


def take_step(root: LossModel, batches: Sequence[Any], rate: float = 0.5) -> tuple[list[float], list[Tensor | None]]:
    """Losses of the micro-batches, and the gradients that the weights were updated with."""
    for weight in root.trainable_parameters:
        weight.grad = None
    losses = []
    for batch in batches:
        result = root(batch)
        result.objective.backward()
        losses.append(float(result.loss))
    gradients = [None if weight.grad is None else weight.grad.clone() for weight in root.trainable_parameters]
    with torch.no_grad():
        for weight in root.trainable_parameters:
            assert weight.grad is not None
            weight -= rate * weight.grad
    return losses, gradients


def compare(plain: LossModel, graphed: LossModel, batches: Sequence[Any]) -> None:
    wanted, found = take_step(plain, batches), take_step(graphed, batches)
    assert found[0] == wanted[0]
    for mine, its in zip(found[1], wanted[1], strict=True):
        assert mine is not None
        assert its is not None
        assert torch.equal(mine, its)


def test_losses_and_gradients_are_the_same(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, graphed = roots
    before = compile_and_capture_count()
    for step in STEPS:
        batches = [make_batch(lengths, total) for lengths, total in step]
        for batch in batches:
            batch.max_seqlen = 48  # as in a run, whatever the length of a batch
        compare(plain, graphed, batches)
    assert compile_and_capture_count() - before == 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_can_be_trained(make_root: Make, make_batch: Make, tied: bool, dtype: torch.dtype) -> None:
    """The head adds to tied embeddings by itself, in another order; 16-bit weights have fp32 gradients."""
    plain = make_root(dtype=dtype, backend="eager", tie_word_embeddings=tied)
    graphed = copy.deepcopy(plain)
    graphed.hidden = GraphedHidden(graphed, StaticGradients(graphed), eager_capture)
    for root in (plain, graphed):
        accumulate_in_fp32(root)
    for step in STEPS:
        batches = [make_batch(lengths, total) for lengths, total in step]
        wanted, found = (take_step(root, batches, rate=1e-4) for root in (plain, graphed))
        assert found[0] == pytest.approx(wanted[0], rel=1e-5 if dtype == torch.float32 else 0.02)
        for mine, its in zip(found[1], wanted[1], strict=True):
            assert mine is not None
            assert its is not None
            assert mine.dtype == torch.float32
            assert (mine - its).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * its.norm()


def test_the_first_pass_of_a_shape_is_not_captured(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    _, root = roots
    counts = []
    for total in (48, 48, 40, 40, 44, 44):
        before = compile_and_capture_count()
        root(make_batch([9, 20, 8], total)).objective.backward()
        counts.append(compile_and_capture_count() - before)
    assert counts == [0, 1, 0, 1, 0, 1]


def test_a_larger_shape_releases_the_graphs_of_smaller_ones(
    roots: tuple[LossModel, LossModel], make_batch: Make
) -> None:
    plain, graphed = roots
    counts = []
    for total in (32, 32, 48, 32, 48, 32):
        before = compile_and_capture_count()
        compare(plain, graphed, [make_batch([9, 20], total)])
        counts.append(compile_and_capture_count() - before)
    assert counts == [0, 1, 0, 1, 1, 0]


def test_the_number_of_captured_shapes_is_limited(
    roots: tuple[LossModel, LossModel], make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_MAX_SHAPES", 1)
    before = compile_and_capture_count()
    for total in (48, 48, 32, 32, 48, 32):
        compare(*roots, [make_batch([9, 20], total)])
    assert compile_and_capture_count() - before == 1


def test_a_shape_without_a_backward_pass_is_not_captured(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    _, root = roots
    before = compile_and_capture_count()
    for _ in range(3):
        root(make_batch([9, 20]))
    assert compile_and_capture_count() == before


def test_an_unused_weight_gets_no_gradient_of_zeros(
    make_root: Make, make_batch: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    spare = torch.nn.Parameter(torch.ones(3))
    root.language_model.base_model.register_parameter("spare", spare)
    root.hidden = GraphedHidden(root, StaticGradients(root), eager_capture)
    for _ in range(3):
        root(make_batch([9, 20])).objective.backward()
    assert spare.grad is None
    assert "CUDA graph capture failed" in capsys.readouterr().err


def test_a_backward_pass_after_another_forward_pass_is_an_error(
    roots: tuple[LossModel, LossModel], make_batch: Make
) -> None:  # fmt: skip
    _, root = roots
    batch = make_batch([9, 20, 8])
    for _ in range(2):
        root(batch).objective.backward()
    early, _ = root(batch), root(batch)
    with pytest.raises(RuntimeError, match="too late"):
        early.objective.backward()


def test_moved_weights_are_captured_again(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, graphed = roots
    batches = [make_batch([9, 20, 8]), make_batch([5, 6, 7])]
    for _ in range(2):
        compare(plain, graphed, batches)
    for root in roots:
        for weight in root.parameters():  # frozen ones too
            weight.data = weight.data * 1.25
    before = compile_and_capture_count()
    for _ in range(2):
        compare(plain, graphed, batches)
    assert compile_and_capture_count() == before + 1


def test_released_graphs_are_captured_again(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, graphed = roots
    batches, before = [make_batch([9, 20, 8]), make_batch([5, 6, 7])], compile_and_capture_count()
    for count in (1, 2, 3):
        compare(plain, graphed, batches)
        assert compile_and_capture_count() - before == count
        release_cuda_graphs(plain)
        release_cuda_graphs(graphed)


def test_a_backward_pass_after_a_release_is_an_error(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    _, root = roots
    batch = make_batch([9, 20, 8])
    for _ in range(2):
        root(batch).objective.backward()
    result = root(batch)
    release_cuda_graphs(root)
    with pytest.raises(RuntimeError, match="too late"):
        result.objective.backward()


def test_modules_with_hooks_run_without_graphs(
    roots: tuple[LossModel, LossModel], make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, root = roots
    batch = make_batch([9, 20, 8])
    for _ in range(3):
        root(batch).objective.backward()
    monkeypatch.setattr(GraphedHidden, "_find_or_capture", lambda *_: pytest.fail("a graph calls no hooks"))
    weight = next(weight for name, weight in root.named_parameters() if "layers.2.mlp.up_proj" in name)
    weight.data[0, 0] = torch.nan
    with watch_nonfinite(root) as watch:
        root(batch).objective.backward()
    assert watch.forward is not None
    assert "layers.2.mlp.up_proj" in watch.forward


def test_without_gradients_nothing_is_captured(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, graphed = roots
    before = compile_and_capture_count()
    with torch.no_grad():
        for _ in range(3):
            batch = make_batch([9, 20, 8])
            assert torch.equal(graphed(batch).nll, plain(batch).nll)
    assert compile_and_capture_count() == before


def test_training_continues_after_a_failed_capture(
    make_root: Make, make_batch: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> Capture:
        def capture(function: Callable[[], None]) -> Callable[[], None]:
            function()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")

        return capture

    plain = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    graphed = copy.deepcopy(plain)
    graphed.hidden = GraphedHidden(graphed, StaticGradients(graphed), failing)
    for step in STEPS:
        compare(plain, graphed, [make_batch(lengths, total) for lengths, total in step])
    err = capsys.readouterr().err
    assert err.count("CUDA graph capture failed") == 1
    assert "Tried to allocate 2 GiB." in err
    assert "and more" not in err


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layers_are_not_compiled_again(make_root: Make, make_batch: Make) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    plain = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    graphed = copy.deepcopy(plain)
    transform_layers(graphed.language_model, ParallelConfig(), compile=True, backend=counter)
    graphed.hidden = GraphedHidden(graphed, StaticGradients(graphed), eager_capture)
    batches, counts = [make_batch([9, 20, 8]), make_batch([48])], []
    for _ in range(3):
        wanted, found = take_step(plain, batches), take_step(graphed, batches)
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3
    assert counts[0] > 0


def test_launch_bound_batches_use_graphs(make_root: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    monkeypatch.setattr("whet.execution.cuda_graphs.make_capture", eager_capture)
    assert enable_cuda_graphs(root, tokens=4096, peak=989e12)
    assert isinstance(root.hidden, GraphedHidden)


@pytest.mark.parametrize("reason", ["device", "dropout", "large", "host", "unpacked", "head only", "tied"])
def test_graphs_are_not_used_where_impossible_or_useless(
    make_root: Make, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr("whet.execution.cuda_graphs.make_capture", eager_capture)
    dropout = {"dropout": 0.1, "head only": None}.get(reason, 0.0)
    root = make_root(dropout=dropout, dtype=torch.float32, backend="eager")
    model: Any = root.language_model
    room = sum(weight.nbytes for weight in root.trainable_parameters) - (reason == "large")
    if reason == "head only":
        model.model.requires_grad_(False)
    if reason == "tied":
        first, second, *_ = model.model.layers
        first.mlp.up_proj.lora_A.default.weight = second.mlp.up_proj.lora_A.default.weight
    if reason == "host":
        attention.install_backend(root.language_model, "sdpa")  # reads the edges on the host
    root.unpacked = reason == "unpacked"
    assert not enable_cuda_graphs(root, 4096, 1e6 if reason == "device" else 989e12, room)
    assert not isinstance(root.hidden, GraphedHidden)


def test_large_devices_have_room_for_more_gradients_unless_the_run_saves_memory() -> None:
    assert max_gradient_bytes(24 * 2**30, saves_memory=False) == 2**30
    assert max_gradient_bytes(128 * 2**30, saves_memory=False) == 4 * 2**30
    assert max_gradient_bytes(128 * 2**30, saves_memory=True) == 2**30
