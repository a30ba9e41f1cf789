"""Recorded passes compute what the host would ask for each time. On a CPU a recording is what asks again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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
"""Batches of two shapes; in some steps the first of a shape, which is not recorded, comes before one that is."""


def again() -> Capture:
    def capture(ask: Callable[[], None]) -> Callable[[], None]:
        ask()
        return ask

    return capture


@pytest.fixture
def roots(make_root: Make) -> tuple[LossModel, LossModel]:
    """One as it is, and one that records."""
    plain = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    recorded = copy.deepcopy(plain)
    recorded.hidden = GraphedHidden(recorded, StaticGradients(recorded), again)
    return plain, recorded


def take_step(root: LossModel, batches: Sequence[Any], rate: float = 0.5) -> tuple[list[float], list[Tensor | None]]:
    """Losses of micro-batches, and the gradients by which the weights were moved."""
    for weight in root.trained:
        weight.grad = None
    losses = []
    for batch in batches:
        result = root(batch)
        result.objective.backward()
        losses.append(float(result.loss))
    gradients = [None if weight.grad is None else weight.grad.clone() for weight in root.trained]
    with torch.no_grad():
        for weight in root.trained:
            assert weight.grad is not None
            weight -= rate * weight.grad
    return losses, gradients


def compare(plain: LossModel, recorded: LossModel, batches: Sequence[Any]) -> None:
    wanted, found = take_step(plain, batches), take_step(recorded, batches)
    assert found[0] == wanted[0]
    for mine, its in zip(found[1], wanted[1], strict=True):
        assert mine is not None
        assert its is not None
        assert torch.equal(mine, its)


def test_losses_and_gradients_are_the_same(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, recorded = roots
    before = compile_and_capture_count()
    for step in STEPS:
        batches = [make_batch(lengths, total) for lengths, total in step]
        for batch in batches:
            batch.max_seqlen = 48  # as in a run, whatever the length of a batch
        compare(plain, recorded, batches)
    assert compile_and_capture_count() - before == 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_can_be_trained(make_root: Make, make_batch: Make, tied: bool, dtype: torch.dtype) -> None:
    """The head adds to tied embeddings by itself, in another order; 16-bit weights have fp32 gradients."""
    plain = make_root(dtype=dtype, backend="eager", tie_word_embeddings=tied)
    recorded = copy.deepcopy(plain)
    recorded.hidden = GraphedHidden(recorded, StaticGradients(recorded), again)
    for root in (plain, recorded):
        accumulate_in_fp32(root)
    for step in STEPS:
        batches = [make_batch(lengths, total) for lengths, total in step]
        wanted, found = (take_step(root, batches, rate=1e-4) for root in (plain, recorded))
        assert found[0] == pytest.approx(wanted[0], rel=1e-5 if dtype == torch.float32 else 0.02)
        for mine, its in zip(found[1], wanted[1], strict=True):
            assert mine is not None
            assert its is not None
            assert mine.dtype == torch.float32
            assert (mine - its).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * its.norm()


def test_the_first_pass_of_a_shape_is_not_recorded(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    _, root = roots
    counts = []
    for total in (48, 48, 40, 40, 44, 44):
        before = compile_and_capture_count()
        root(make_batch([9, 20, 8], total)).objective.backward()
        counts.append(compile_and_capture_count() - before)
    assert counts == [0, 1, 0, 1, 0, 1]


def test_a_larger_shape_is_not_computed_beside_what_smaller_ones_keep(
    roots: tuple[LossModel, LossModel], make_batch: Make
) -> None:
    plain, recorded = roots
    counts = []
    for total in (32, 32, 48, 32, 48, 32):
        before = compile_and_capture_count()
        compare(plain, recorded, [make_batch([9, 20], total)])
        counts.append(compile_and_capture_count() - before)
    assert counts == [0, 1, 0, 1, 1, 0]


def test_so_many_shapes_and_no_more(
    roots: tuple[LossModel, LossModel], make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_MAX_SHAPES", 1)
    before = compile_and_capture_count()
    for total in (48, 48, 32, 32, 48, 32):
        compare(*roots, [make_batch([9, 20], total)])
    assert compile_and_capture_count() - before == 1


def test_a_shape_whose_backward_pass_never_came_is_not_recorded(
    roots: tuple[LossModel, LossModel], make_batch: Make
) -> None:
    _, root = roots
    before = compile_and_capture_count()
    for _ in range(3):
        root(make_batch([9, 20]))
    assert compile_and_capture_count() == before


def test_a_weight_that_nothing_comes_from_is_not_taken_for_one_with_zeros(
    make_root: Make, make_batch: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    spare = torch.nn.Parameter(torch.ones(3))
    root.language_model.base_model.register_parameter("spare", spare)
    root.hidden = GraphedHidden(root, StaticGradients(root), again)
    for _ in range(3):
        root(make_batch([9, 20])).objective.backward()
    assert spare.grad is None
    assert "cannot be recorded" in capsys.readouterr().err


def test_a_pass_whose_memory_was_used_again_is_refused(
    roots: tuple[LossModel, LossModel], make_batch: Make
) -> None:  # fmt: skip
    _, root = roots
    batch = make_batch([9, 20, 8])
    for _ in range(2):
        root(batch).objective.backward()
    early, _ = root(batch), root(batch)
    with pytest.raises(RuntimeError, match="too late"):
        early.objective.backward()


def test_weights_that_moved_are_found(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, recorded = roots
    batches = [make_batch([9, 20, 8]), make_batch([5, 6, 7])]
    for _ in range(2):
        compare(plain, recorded, batches)
    for root in roots:
        for weight in root.parameters():  # frozen ones too
            weight.data = weight.data * 1.25
    before = compile_and_capture_count()
    for _ in range(2):
        compare(plain, recorded, batches)
    assert compile_and_capture_count() == before + 1


def test_what_is_forgotten_is_recorded_again(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, recorded = roots
    batches, before = [make_batch([9, 20, 8]), make_batch([5, 6, 7])], compile_and_capture_count()
    for count in (1, 2, 3):
        compare(plain, recorded, batches)
        assert compile_and_capture_count() - before == count
        release_cuda_graphs(plain)
        release_cuda_graphs(recorded)


def test_a_pass_that_was_forgotten_is_refused(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    _, root = roots
    batch = make_batch([9, 20, 8])
    for _ in range(2):
        root(batch).objective.backward()
    result = root(batch)
    release_cuda_graphs(root)
    with pytest.raises(RuntimeError, match="too late"):
        result.objective.backward()


def test_whoever_watches_modules_sees_them(
    roots: tuple[LossModel, LossModel], make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, root = roots
    batch = make_batch([9, 20, 8])
    for _ in range(3):
        root(batch).objective.backward()
    monkeypatch.setattr(GraphedHidden, "_recording", lambda *_: pytest.fail("a graph calls no hooks"))
    weight = next(weight for name, weight in root.named_parameters() if "layers.2.mlp.up_proj" in name)
    weight.data[0, 0] = torch.nan
    with watch_nonfinite(root) as watch:
        root(batch).objective.backward()
    assert watch.forward is not None
    assert "layers.2.mlp.up_proj" in watch.forward


def test_without_gradients_nothing_is_recorded(roots: tuple[LossModel, LossModel], make_batch: Make) -> None:
    plain, recorded = roots
    before = compile_and_capture_count()
    with torch.no_grad():
        for _ in range(3):
            batch = make_batch([9, 20, 8])
            assert torch.equal(recorded(batch).nll, plain(batch).nll)
    assert compile_and_capture_count() == before


def test_where_it_cannot_be_recorded_the_run_goes_on(
    make_root: Make, make_batch: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> Capture:
        def capture(ask: Callable[[], None]) -> Callable[[], None]:
            ask()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")

        return capture

    plain = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    recorded = copy.deepcopy(plain)
    recorded.hidden = GraphedHidden(recorded, StaticGradients(recorded), failing)
    for step in STEPS:
        compare(plain, recorded, [make_batch(lengths, total) for lengths, total in step])
    said = capsys.readouterr().err
    assert said.count("cannot be recorded") == 1
    assert "Tried to allocate 2 GiB." in said
    assert "and more" not in said


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_layers_are_not_compiled_again(make_root: Make, make_batch: Make) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    plain = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    recorded = copy.deepcopy(plain)
    transform_layers(recorded.language_model, ParallelConfig(), compile=True, backend=counter)
    recorded.hidden = GraphedHidden(recorded, StaticGradients(recorded), again)
    batches, counts = [make_batch([9, 20, 8]), make_batch([48])], []
    for _ in range(3):
        wanted, found = take_step(plain, batches), take_step(recorded, batches)
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3
    assert counts[0] > 0


def test_small_batches_are_recorded(make_root: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(dropout=0.0, dtype=torch.float32, backend="eager")
    monkeypatch.setattr("whet.execution.cuda_graphs.make_capture", again)
    assert enable_cuda_graphs(root, tokens=4096, peak=989e12)
    assert isinstance(root.hidden, GraphedHidden)


@pytest.mark.parametrize("reason", ["device", "dropout", "large", "host", "alone", "head only", "twice"])
def test_others_are_not(make_root: Make, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr("whet.execution.cuda_graphs.make_capture", again)
    dropout = {"dropout": 0.1, "head only": None}.get(reason, 0.0)
    root = make_root(dropout=dropout, dtype=torch.float32, backend="eager")
    model: Any = root.language_model
    if reason == "large":
        monkeypatch.setattr(cuda_graphs, "_MAX_GRADIENT_BYTES", sum(weight.nbytes for weight in root.trained) - 1)
    if reason == "head only":
        model.model.requires_grad_(False)
    if reason == "twice":
        first, second, *_ = model.model.layers
        first.mlp.up_proj.lora_A.default.weight = second.mlp.up_proj.lora_A.default.weight
    if reason == "host":
        attention.install_backend(root.language_model, "sdpa")  # looks at the edges
    root.alone = reason == "alone"
    assert not enable_cuda_graphs(root, tokens=4096, peak=1e6 if reason == "device" else 989e12)
    assert not isinstance(root.hidden, GraphedHidden)
