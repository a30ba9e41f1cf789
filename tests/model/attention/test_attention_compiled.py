"""Compiled and recomputed layers: other documents in a row of the same length do not recompile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from whet.model import attention
from whet.model.attention import backends
from whet.model.loss.loss_model import LossModel


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def batches(make_documents: Any, pack: Any) -> list[Any]:
    """Rows of 24 tokens with as many edges, as batches on CUDA have them."""
    rows = [pack(make_documents(*lengths)) for lengths in ((3, 20, 1), (8, 8, 8), (1, 2, 21), (12, 11, 1))]
    for row in rows:
        row.max_seqlen = 24
    return rows


def _hidden(model: nn.Module, batch: Any) -> Tensor:
    return LossModel(model).hidden(
        batch.tokens, batch.positions, batch.cu_seqlens, batch.max_seqlen, batch.cu_seqlens_host
    )


def states_and_slopes(model: nn.Module, batch: Any) -> list[Tensor]:
    """Hidden states and the gradient of every weight."""
    model.zero_grad()
    hidden = _hidden(model, batch)
    hidden.cos().sum().backward()
    return [hidden.detach(), *(p.grad.clone() for p in model.model.parameters())]  # type: ignore[union-attr]


def _kernel(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _: Tensor, most: int, __: int, **options: Any) -> Tensor:
    """In the place of the CUDA kernel: reads nothing but tensors."""
    place = torch.arange(len(q), dtype=torch.int32)
    document = torch.searchsorted(cu, place, right=True)
    window = options["window_size"][0] + 1 or len(q)
    back = place[:, None] - place
    visible = (document[:, None] == document) & (back >= 0) & (back < window)
    spec = attention.AttentionSpec(options["scale"])
    states = (states.transpose(0, 1)[None] for states in (q, k, v))
    return backends.reference_attention(*states, spec, visible)[0].transpose(0, 1)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "varlen"])
@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_other_documents_do_not_recompile(
    architecture: str, backend: str, make_model: Callable[..., Any], batches: list[Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(backends, "varlen_attn", _kernel)
    settings = {"sliding_window": 6} if architecture == "Mistral" else {}
    model = make_model(architecture, **settings)
    attention.install_backend(model, backend)
    wanted = [states_and_slopes(model, batch) for batch in batches]
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter, dynamic=False)
    after_first = 0
    for number, (batch, plain) in enumerate(zip(batches, wanted, strict=True)):
        for ours, exact in zip(states_and_slopes(model, batch), plain, strict=True):
            assert (ours - exact).abs().max() <= 1e-9
        if number == 0:
            after_first = counter.frame_count
            assert after_first > 0
        assert counter.frame_count == after_first
    if backend == "varlen":
        assert after_first == 1  # both layers in the same whole graph


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_works_with_compiled_layers(make_model: Callable[..., Any], batches: list[Any]) -> None:
    """Forward only: it has no gradient on the CPU."""
    model = make_model("Gemma2", torch.float32, head_dim=16, sliding_window=6, attn_logit_softcapping=0.5)
    counter, frames = CompileCounter(), []
    attention.install_backend(model, "eager")
    wanted = [_hidden(model, batch) for batch in batches]
    attention.install_backend(model, "flex")
    for layer in model.model.layers:
        layer.compile(backend=counter, dynamic=False)
    for batch, exact in zip(batches, wanted, strict=True):
        assert (_hidden(model, batch) - exact).abs().max() <= 1e-4
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * len(batches)
    assert frames[0] > 0


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_recomputed_layers_give_the_same_gradients(
    backend: str, make_model: Callable[..., Any], batches: list[Any]
) -> None:
    model = make_model("Gemma2", head_dim=16, sliding_window=6, attn_logit_softcapping=0.5)
    attention.install_backend(model, backend)
    wanted = states_and_slopes(model.train(), batches[0])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for ours, exact in zip(states_and_slopes(model, batches[0]), wanted, strict=True):
        assert torch.equal(ours, exact)


def test_inspecting_attention_compiles_nothing(make_model: Callable[..., Any]) -> None:
    model, counter = make_model("Mistral", sliding_window=6), CompileCounter()
    for layer in model.model.layers:
        layer.compile(backend=counter, dynamic=False)
    assert [layer.mask for layer in attention.inspect_attention(model)] == [6, 6]
    assert counter.frame_count == 0
