"""short: its kernels in Triton's interpreter, where Triton is installed, its operators and its requirements."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from whet.core.errors import WhetError
from whet.model import attention
from whet.model.attention import (
    AttentionSpec,
    Documents,
    LayerAttention,
    eager_attention_forward,
    sdpa_attention_forward,
    short_attention_forward,
)
from whet.model.attention.interface import document_spans
from whet.model.loss.loss_model import LossModel

CHOOSING = importlib.import_module("whet.model.attention.dispatch")  # the package gives its function that name


def documents_of(edges: tuple[int, ...]) -> Documents:
    return attention.document_kwargs(torch.tensor(edges, dtype=torch.int32), max(1, edges[-1]), edges)["documents"]


class Case(NamedTuple):
    """States of so many heads and widths, in documents of such edges."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    by_token: bool = False
    """Strides as a linear layer leaves them."""
    edges: tuple[int, ...] = (0, 5, 70, 71, 72, 130, 150, 150, 150)

    def states(self) -> list[Tensor]:
        shapes = ((self.heads, self.width), (self.key_heads, self.width), (self.key_heads, self.value_width))
        generator = torch.Generator().manual_seed(self.heads * self.width)
        made = [torch.randn(self.edges[-1], *shape, generator=generator).to(self.dtype) for shape in shapes]
        rows = [state.transpose(0, 1)[None] for state in made]
        return rows if self.by_token else [row.contiguous() for row in rows]

    def results(self, backend: Any, dtype: torch.dtype, changed: slice | None = None) -> list[Tensor]:
        """The output and all gradients. `changed`: tokens whose states are others."""
        inputs = [state.to(dtype) for state in self.states()]
        if changed is not None:
            for state in inputs:
                state[:, :, changed] += 1
        for state in inputs:
            state.requires_grad_()
        out = backend(*inputs, AttentionSpec(0.25, self.window), documents_of(self.edges))
        slope = torch.arange(out.numel(), dtype=torch.float64).cos().view_as(out).to(dtype)
        (out * slope).sum().backward()
        return [out.detach(), *(state.grad for state in inputs)]


CASES = {
    "four share": Case(8, 2, 32, 32),
    "four share, by token": Case(8, 2, 32, 32, by_token=True),
    "none shares": Case(2, 2, 16, 16),
    "three share": Case(3, 1, 20, 20, window=9),
    "seven share": Case(14, 2, 80, 80, edges=(0, 33, 50)),
    "more share than a tile has rows": Case(40, 1, 16, 16, edges=(0, 3, 37, 45)),
    "other values": Case(4, 2, 24, 10, window=16),
    "a window of one": Case(4, 2, 16, 16, window=1),
    "one document": Case(4, 2, 16, 16, edges=(0, 97)),
    "a window in one document": Case(4, 2, 16, 16, window=40, edges=(0, 97)),
    "documents of a token": Case(4, 2, 16, 16, edges=tuple(range(35))),
    "one token": Case(4, 2, 16, 16, edges=(0, 1)),
    "fp16": Case(8, 2, 64, 64, dtype=torch.float16),
    "fp16, a window": Case(6, 2, 16, 16, window=24, dtype=torch.float16),
    "no mask where all see": Case(8, 2, 16, 16, dtype=torch.float16, edges=(0, 197, 230)),
    "no mask where all see, a window": Case(8, 2, 16, 16, window=60, dtype=torch.float16, edges=(0, 197, 230)),
}
SPARING = ("no mask where all see", "no mask where all see, a window")
LEAK = "four share"
CHANGED = slice(5, 70)


def compute(path: str) -> None:
    """Run in Triton's interpreter."""
    from whet.model.attention import short_kernels

    found = {
        name: case.results(short_attention_forward, case.dtype) for name, case in CASES.items() if name not in SPARING
    }
    states = [state.requires_grad_() for state in CASES["three share"].states()]
    spans = document_spans(torch.tensor(CASES["three share"].edges, dtype=torch.int32), CASES["three share"].edges[-1])
    torch.library.opcheck(torch.ops.whet.short_attention, (*states, spans, 0.25, 9))  # as the compiler relies on it
    found["again"] = CASES[LEAK].results(short_attention_forward, torch.float32)
    found["changed"] = CASES[LEAK].results(short_attention_forward, torch.float32, CHANGED)
    for kernel in short_kernels.ATTENTION_TILES.values():
        kernel[64] = short_kernels.AttentionTile(32, 16, 4, 2, skip_mask=True)
    found.update({name: CASES[name].results(short_attention_forward, torch.float16) for name in SPARING})
    torch.save(found, path)


@pytest.fixture(scope="module")
def found(in_tritons_interpreter: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """What the kernels compute here, on the CPU."""
    path = tmp_path_factory.mktemp("short") / "found.pt"
    in_tritons_interpreter(__file__, f"compute({str(path)!r})")
    return torch.load(path)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_the_definition(name: str, found: dict[str, list[Tensor]]) -> None:
    case = CASES[name]
    truth, sdpa = case.results(eager_attention_forward, torch.float64), case.results(sdpa_attention_forward, case.dtype)
    for exact, ours, theirs in zip(truth, found[name], sdpa, strict=True):
        assert ours.dtype == case.dtype
        assert ours.shape == exact.shape
        allowed = 2 * (theirs.double() - exact).abs().max() + 1e-6 * max(1, exact.abs().max())
        assert (ours.double() - exact).abs().max() <= allowed


def test_documents_do_not_influence_each_other_and_runs_are_equal(found: dict[str, list[Tensor]]) -> None:
    for before, again, after in zip(found[LEAK], found["again"], found["changed"], strict=True):
        assert torch.equal(before, again)
        tokens = 1 if before is found[LEAK][0] else 2
        one, other = (result.transpose(1, tokens) for result in (before, after))
        assert torch.equal(one[:, : CHANGED.start], other[:, : CHANGED.start])
        assert torch.equal(one[:, CHANGED.stop :], other[:, CHANGED.stop :])
        assert not torch.equal(one[:, CHANGED], other[:, CHANGED])


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_spans_are_start_and_end_of_each_tokens_document(lengths: list[int]) -> None:
    edges = tuple(itertools.accumulate(lengths, initial=0))
    spans = document_spans(torch.tensor(edges, dtype=torch.int32), edges[-1])
    wanted = [(a, b) for a, b in itertools.pairwise(edges) for _ in range(a, b)]
    assert spans.dtype == torch.int32
    assert list(zip(*spans.tolist(), strict=True)) == wanted


def test_spans_are_computed_for_short_only(
    make_model: Any, make_documents: Any, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, told = make_model("Llama"), pack(make_documents(3, 4)), []

    def body(documents: Documents, **_: Any) -> Any:
        told.append(documents.spans)
        raise InterruptedError

    monkeypatch.setattr(type(model), "base_model", property(lambda _: body))
    for backend in ("sdpa", "short"):
        attention.install_backend(model, backend)
        assert attention.describe_backend(model) == backend
        with pytest.raises(InterruptedError):
            LossModel(model).hidden(batch.tokens, batch.positions, batch.cu_seqlens, 4, batch.cu_seqlens_host)
    assert told[0] is None
    assert torch.equal(told[1], document_spans(batch.cu_seqlens, 7))


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "layers", "reason"),
    [
        (torch.device("cpu"), torch.bfloat16, [], "needs a CUDA device"),
        (CUDA, torch.float32, [], "needs a CUDA device and bf16 or fp16"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0, softcap=50.0), 64)], "soft-caps nor sinks"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 512)], "up to 256; this model's are 512"),
    ],
)
def test_unsupported_devices_dtypes_and_layers_are_errors(
    device: torch.device, dtype: torch.dtype, layers: list[LayerAttention], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHOOSING, "has_triton", lambda: True)
    with pytest.raises(WhetError, match=rf"model\.attention: short .*{reason}"):
        attention.choose_backend("short", device, dtype, layers)


def test_short_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHOOSING, "has_triton", lambda: False)
    with pytest.raises(WhetError, match=r"model\.attention: short needs Triton, which is not installed"):
        attention.choose_backend("short", CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (AttentionSpec(1.0, softcap=2.0), "neither soft-caps nor sinks"),
        (AttentionSpec(1.0, sinks=torch.zeros(2)), "neither soft-caps nor sinks"),
        (AttentionSpec(-1.0), r"positive scale, not -1\.0"),
    ],
)
def test_an_unsupported_spec_is_an_error(spec: AttentionSpec, reason: str) -> None:
    states = [torch.zeros(1, 2, 4, 16) for _ in range(3)]
    with pytest.raises(WhetError, match=rf"model\.attention: short .*{reason}"):
        short_attention_forward(*states, spec, documents_of((0, 4)))
