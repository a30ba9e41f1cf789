"""torch.compile by region: one compilation for all layers, and none after the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from whet.execution import compile as compiling
from whet.execution.compile import compile_forward, should_compile
from whet.execution.transform import transform_layers
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.parallel.config import ParallelConfig

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Make = Callable[..., Any]
BATCHES = ([9, 20, 8], [48], [1, 2, 3, 4, 5, 6, 7], [30, 10], [17, 17, 14], [5])


def steps(root: LossModel, make_batch: Make, counter: Any) -> list[int]:
    """Compilations so far, after each of six batches with different documents."""
    counts = []
    for lengths in BATCHES:
        root(make_batch(lengths)).objective.backward()
        counts.append(counter.frame_count)
    return counts


KINDS = [
    ("Llama", 1, {}),
    ("Qwen3", 1, {"head_dim": 8}),
    ("GPTNeoX", 1, {}),
    ("GPT2", 1, {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
    ("Gemma3Text", 2, {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}),
]


@pytest.mark.parametrize(("architecture", "kinds", "settings"), KINDS, ids=[kind[0] for kind in KINDS])
def test_layers_of_a_kind_share_one_compilation_for_all_batches(
    make_root: Make, make_batch: Make, architecture: str, kinds: int, settings: dict[str, Any]
) -> None:
    """With eager attention, which the compiler traces: a layer is one graph."""
    root, counter = make_root(architecture, backend="eager", **settings), CompileCounterWithBackend("eager")
    transform_layers(root.language_model, ParallelConfig(), True, counter)
    assert steps(root, make_batch, counter) == [kinds] * len(BATCHES)
    with torch.no_grad():  # evaluation is compiled once more
        for lengths in BATCHES:
            root.eval()(make_batch(lengths))
    assert counter.frame_count == 2 * kinds


@pytest.mark.parametrize(("recompute", "dropout"), [("full", None), ("none", 0.0)], ids=["whole", "lora"])
def test_graph_breaks_at_attention_cause_no_recompilation(
    make_root: Make, make_batch: Make, recompute: Any, dropout: float | None
) -> None:
    counts = []
    for layers in (2, 3):
        torch._dynamo.reset()
        root, counter = make_root(dropout=dropout, num_hidden_layers=layers), CompileCounterWithBackend("eager")
        transform_layers(root.language_model, ParallelConfig(recompute=recompute), True, counter)
        found = steps(root, make_batch, counter)
        assert found == found[:1] * len(BATCHES)
        counts.append(found[0])
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("backend", ["varlen", "short"])
def test_layers_with_a_cuda_attention_kernel_are_one_graph(make_root: Make, make_batch: Make, backend: str) -> None:
    """On the meta device: the kernels need CUDA, but the compiler traces to them in the same way."""
    root = make_root(dtype=torch.bfloat16, backend=backend).to("meta")
    counter = CompileCounterWithBackend("eager")
    transform_layers(root.language_model, ParallelConfig(), True, counter)
    for lengths in BATCHES:
        batch = make_batch(lengths)
        root.hidden(
            *(part.to("meta") for part in (batch.tokens, batch.positions, batch.cu_seqlens)), 48, batch.cu_seqlens_host
        )
    assert counter.frame_count == 1


def test_two_lengths_are_two_compilations(make_root: Make, make_batch: Make) -> None:
    root, counter = make_root(backend="eager"), CompileCounterWithBackend("eager")
    transform_layers(root.language_model, ParallelConfig(), True, counter)
    for total in (48, 32, 48, 32, 48):
        root(make_batch([9, 20], total)).objective.backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("backend", "recompute", "offload"),
    [("sdpa", "full", "activations"), ("eager", "none", "none"), ("eager", "selective", "activations")],
)
def test_compiled_layers_compute_the_same_gradients(
    make_root: Make, make_batch: Make, backend: str, recompute: Any, offload: Any
) -> None:
    plain, changed = (make_root(backend=backend, num_hidden_layers=2) for _ in range(2))
    transform_layers(changed.language_model, ParallelConfig(recompute=recompute, offload=offload), True, "aot_eager")
    assert list(plain.state_dict()) == list(changed.state_dict())
    for lengths in BATCHES[:2]:
        for root in (plain, changed):
            with KeepFloat64():
                result = root(make_batch(lengths))
            result.objective.backward()
    for (name, one), two in zip(plain.named_parameters(), changed.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_generation_is_not_compiled(make_root: Make) -> None:
    from whet.model.attention import native_attention

    root, counter = make_root(), CompileCounterWithBackend("eager")
    transform_layers(root.language_model, ParallelConfig(), True, counter)
    with native_attention(root.language_model), torch.no_grad():
        root.language_model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert counter.frame_count == 0


def test_endless_recompilation_falls_back_to_eager_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(compiling, "warn", warnings.append)
    monkeypatch.setattr(compiling, "_RECOMPILE_LIMIT", 3)
    run = compile_forward(lambda x, documents: x * documents, "eager")
    for number in range(6):
        assert run(torch.ones(2), documents=number / 8).tolist() == [number / 8] * 2
    assert len(warnings) == 1
    assert "more than 3 times" in warnings[0]


@pytest.mark.slow
def test_a_run_compiled_for_the_cpu_has_the_same_losses(whet: Any, recipe: str, tmp_path: Path) -> None:
    losses = []
    for compile in ("true", "false"):
        folder = tmp_path / compile
        ended = whet("train", recipe, f"run.dir={folder}", f"model.compile={compile}", "train.steps=5")
        assert ended.code == 0, ended.err
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_auto_compiles_on_cuda_but_not_in_fp64() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not should_compile("auto", cpu, torch.float32)
    assert not should_compile("auto", cuda, torch.float64)
    assert should_compile(True, cpu, torch.float32)
    assert not should_compile(False, cuda, torch.bfloat16)
