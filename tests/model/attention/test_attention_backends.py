"""Back-ends against the definition, and the definition against a loop over tokens."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import _registry
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface

from examples import examples
from whet.core.errors import WhetError
from whet.model import attention
from whet.model.attention import (
    AttentionSpec,
    Documents,
    LayerAttention,
    backends,
    eager_attention_forward,
    flex_attention_forward,
    sdpa_attention_forward,
    varlen_attention_forward,
)
from whet.model.attention.backends import document_block_mask

CHOOSING = importlib.import_module("whet.model.attention.dispatch")  # the package gives its function that name
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def documents_of(edges: tuple[int, ...]) -> Documents:
    longest = max(b - a for a, b in itertools.pairwise(edges))
    return attention.document_kwargs(torch.tensor(edges, dtype=torch.int32), longest, edges)["documents"]


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Tensor], AttentionSpec, tuple[int, ...]]:
    """Random states, a layer's question and documents, empty ones among them."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any))
    edges = tuple(itertools.accumulate(lengths, initial=0))
    key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    width, value_width = draw(st.sampled_from([(4, 4), (8, 8), (6, 3), (4, 10)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    heads = key_heads * groups
    states = [
        random(1, number, edges[-1], size)
        for number, size in ((heads, width), (key_heads, width), (key_heads, value_width))
    ]
    spec = AttentionSpec(
        scale=draw(st.sampled_from([0.1, 0.5, 2.0])),
        window=draw(st.none() | st.integers(1, 14)),
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0])),
        sinks=random(heads) if draw(st.booleans()) else None,
    )
    return states, spec, edges


def token_by_token(states: list[Tensor], spec: AttentionSpec, edges: tuple[int, ...]) -> Tensor:
    """What each token of each head sees, as the sentence says it."""
    query, key, value = (state[0] for state in states)
    out = torch.zeros(1, query.shape[1], query.shape[0], value.shape[-1], dtype=torch.float64)
    groups = len(query) // len(key)
    for a, b in itertools.pairwise(edges):
        for i, head in itertools.product(range(a, b), range(len(query))):
            seen = range(max(a, i - (spec.window or i + 1) + 1), i + 1)
            scores = [float(query[head, i] @ key[head // groups, j]) * spec.scale for j in seen]
            if spec.softcap is not None:
                scores = [spec.softcap * math.tanh(score / spec.softcap) for score in scores]
            whole = sum(map(math.exp, scores)) + (0 if spec.sinks is None else math.exp(float(spec.sinks[head])))
            for score, j in zip(scores, seen, strict=True):
                out[0, i, head] += math.exp(score) / whole * value[head // groups, j]
    return out


@settings(max_examples=examples(40), deadline=None)
@given(questions())
def test_the_reference_equals_a_loop_over_tokens(question: Any) -> None:
    states, spec, edges = question
    assert (
        eager_attention_forward(*states, spec, documents_of(edges)) - token_by_token(*question)
    ).abs().max() <= 1e-10


@settings(max_examples=examples(150), deadline=None)
@given(questions())
def test_one_document_at_a_time_is_the_reference_with_its_gradients(question: Any) -> None:
    states, spec, edges = question
    inputs = [*states, spec.sinks] if spec.sinks is not None else states
    results = []
    for backend in (eager_attention_forward, sdpa_attention_forward):
        for tensor in inputs:
            tensor.requires_grad_().grad = None
        out = backend(*states, spec, documents_of(edges))
        (out * torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)).sum().backward()
        results.append([out.detach(), *(tensor.grad.clone() for tensor in inputs)])
    for exact, ours in zip(*results, strict=True):
        assert (ours - exact).abs().max() <= 1e-9


@settings(max_examples=examples(25), deadline=None)
@given(questions())
def test_flex_is_the_reference(question: Any) -> None:
    states, spec, edges = question
    with torch.no_grad():
        ours = flex_attention_forward(*states, spec, documents_of(edges))
        assert (
            ours - eager_attention_forward(*states, spec, documents_of(edges))
        ).abs().max() <= 1e-5  # log-sum-exp is kept in fp32


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(any), st.none() | st.integers(1, 400))
def test_block_masks_equal_those_of_torch(lengths: list[int], window: int | None) -> None:
    """The slow path that runs here looks at pairs of tokens only; the kernel skips what is not in these blocks."""
    edges = tuple(itertools.accumulate(lengths, initial=0))
    ours = document_block_mask(torch.tensor(edges, dtype=torch.int32), edges[-1], window)
    place = torch.arange(edges[-1])
    document = torch.searchsorted(torch.tensor(edges), place, right=True)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < (window or 10**6)) & (document[q] == document[k])

    theirs = create_block_mask(visible, 1, None, edges[-1], edges[-1], device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    for name in ("kv", "full_kv", "q", "full_q"):  # what lies behind their number has no meaning
        numbers = getattr(ours, f"{name}_num_blocks")[0, 0].tolist()
        for row, number in enumerate(numbers):
            found, wanted = (getattr(mask, f"{name}_indices")[0, 0, row, :number] for mask in (ours, theirs))
            assert torch.equal(found, wanted)


def test_layers_share_block_masks() -> None:
    documents, states = documents_of((0, 5, 12)), [torch.randn(1, 2, 12, 16) for _ in range(3)]
    for window in (None, 3, 7, None, 3):  # none of the documents outgrows 7
        flex_attention_forward(*states, AttentionSpec(1.0, window), documents)
    assert set(documents.block_masks) == {None, 3}


def _stand_in(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _: Tensor, most: int, __: int, **options: Any) -> Tensor:
    """What torch promises of its kernel, by its arguments; head widths are one, in eights."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    back, right = options["window_size"]
    assert right == 0
    spec = AttentionSpec(options["scale"], None if back < 0 else back + 1)
    return eager_attention_forward(
        *(s.transpose(0, 1)[None] for s in (q, k, v)), spec, Documents(cu, most, cu.tolist())
    )[0]


@settings(max_examples=examples(60), deadline=None)
@given(questions())
def test_varlen_passes_the_right_arguments_to_its_kernel(question: Any) -> None:
    """The kernel runs on CUDA alone; here its place is taken, and the GPU tests hold the kernel itself."""
    states, spec, edges = question
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "varlen_attn", _stand_in)
        if spec.softcap is not None or spec.sinks is not None:
            with pytest.raises(WhetError, match=r"model\.attention: varlen supports neither"):
                varlen_attention_forward(*states, spec, documents_of(edges))
        else:
            ours = varlen_attention_forward(*states, spec, documents_of(edges))
            assert (ours - eager_attention_forward(*states, spec, documents_of(edges))).abs().max() <= 1e-10


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CAPPED, SUNK = (
    LayerAttention(AttentionSpec(1.0, softcap=50.0), 64),
    LayerAttention(AttentionSpec(1.0, sinks=torch.zeros(2)), 64),
)


@pytest.mark.parametrize(
    ("device", "dtype", "seen", "typical", "best"),
    [
        (CPU, torch.float32, [CAPPED], 300, "sdpa"),
        (CPU, torch.bfloat16, [], 300, "sdpa"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0, window=4096), 256)], 300, "varlen"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0, window=4096), 128)], 300, "short"),
        (CUDA, torch.float16, [], 300, "short"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 128)], 9000, "cudnn"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0, window=4096), 128)], 9000, "short"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 256)], 9000, "varlen"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 64), CAPPED], 300, "flex"),
        (CUDA, torch.bfloat16, [SUNK], 9000, "flex"),
        (CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 512)], 300, "flex"),
        (CUDA, torch.float32, [SUNK], 300, "sdpa"),
    ],
)
def test_the_best_backend_for_device_model_and_documents_is_chosen(
    device: torch.device, dtype: torch.dtype, seen: list[LayerAttention], typical: float, best: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert attention.choose_backend("eager", device, dtype, seen, typical) == "eager"
    monkeypatch.setattr(CHOOSING, "has_triton", lambda: True)
    assert attention.choose_backend("auto", device, dtype, seen, typical) == best
    monkeypatch.setattr(CHOOSING, "has_triton", lambda: False)
    assert attention.choose_backend("auto", device, dtype, seen, typical) == ("varlen" if best == "short" else best)


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "layers", "reason"),
    [
        ("varlen", CPU, torch.bfloat16, [], "needs a CUDA device"),
        ("varlen", CUDA, torch.float32, [], "needs a CUDA device"),
        ("varlen", CUDA, torch.bfloat16, [SUNK], "soft-caps nor sinks"),
        (
            "varlen",
            CUDA,
            torch.bfloat16,
            [LayerAttention(AttentionSpec(1.0), 512)],
            "up to 256; this model's are 512",
        ),
        ("cudnn", CPU, torch.bfloat16, [], "needs a CUDA device"),
        ("cudnn", CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0, window=9), 64)], "sliding windows"),
        ("cudnn", CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 192)], "up to 128;"),
        ("flex", CPU, torch.float32, [], "needs a CUDA device"),
        ("flex", CUDA, torch.float64, [], "at most fp32"),
    ],
)
def test_an_unsupported_backend_is_an_error(
    requested: str, device: torch.device, dtype: torch.dtype, layers: list[LayerAttention], reason: str
) -> None:
    with pytest.raises(WhetError, match=rf"model\.attention: {requested} .*{reason}"):
        attention.choose_backend(requested, device, dtype, layers)


def test_under_autocast_states_that_a_model_left_in_fp32_are_computed_in_its_type(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes 16 bits alone and, unlike torch's own operations, is not converted for."""
    types = []
    monkeypatch.setattr(backends, "varlen_attn", lambda q, k, v, *_, **__: types.append((q, k, v)) or q)
    attention.install_backend(make_model("Llama"), "varlen")
    attend = AttentionInterface()[attention.registered_name("varlen")]
    states = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        attend(None, *states, None, documents=documents_of((0, 6)))
    attend(None, *states[:2], states[2].bfloat16(), None, documents=documents_of((0, 6)))
    assert [state.dtype for call in types for state in call] == [torch.bfloat16] * 6


class _Handle:
    def remove(self) -> None:
        """Nothing was put into torch's dispatcher."""


def _missing() -> _Handle:
    raise ModuleNotFoundError("no such package")


def _broken() -> _Handle:
    raise RuntimeError("no kernels inside")


@pytest.mark.parametrize(
    ("generation", "register", "serves"),
    [(9, _Handle, "varlen (FA3)"), (9, _missing, "varlen"), (9, _broken, "varlen"), (10, _Handle, "varlen")],
)
def test_flash_attention_3_is_activated_on_hopper(
    generation: int, register: Any, serves: str, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through torch's own registry, with packages that only say whether they are there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    model = make_model("Llama")
    try:
        attention.install_backend(model, "varlen")
        assert attention.describe_backend(model) == serves
    finally:
        _registry.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize(
    ("head_dim", "window", "typical", "best"),
    [(64, None, 4096, "fa4"), (128, 512, 9000, "fa4"), (128, None, 4000, "short"), (96, None, 9000, "cudnn")],
)
def test_flash_attention_4_serves_long_documents_where_it_is_installed(
    head_dim: int, window: int | None, typical: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHOOSING, "has_triton", lambda: True)
    monkeypatch.setattr(CHOOSING, "why_not_flash_attention_4", lambda: None)
    layers = [LayerAttention(AttentionSpec(1.0, window=window), head_dim)]
    assert attention.choose_backend("auto", CUDA, torch.bfloat16, layers, typical) == best
    torch.use_deterministic_algorithms(True)
    try:
        assert attention.choose_backend("auto", CUDA, torch.bfloat16, layers, typical) != "fa4"
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_attention_4_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WhetError, match=r"model\.attention: fa4 needs the package .*pip install 'whet\[flash\]'"):
        attention.choose_backend("fa4", CUDA, torch.bfloat16)
    monkeypatch.setattr(CHOOSING, "why_not_flash_attention_4", lambda: None)
    with pytest.raises(WhetError, match="head dimensions of 64 and 128; this model has others"):
        attention.choose_backend("fa4", CUDA, torch.bfloat16, [LayerAttention(AttentionSpec(1.0), 96)])
