"""Generation on CUDA: captured decode steps give the same tokens as eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from whet.inference import kv_cache
from whet.inference.generate import generate
from whet.inference.sampling import Sampling
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model

if torch.cuda.is_available():
    from whet.inference.decode_kernel import decode_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 400, (n,), generator=generator).tolist() for n in (5, 1, 230, 17, 2, 90, 3, 40, 33)]


@pytest.fixture(scope="module")
def model() -> Any:
    model_ = load_model(ModelConfig(path="builtin:tiny"), torch.float32, torch.device("cuda"))
    for parameter in model_.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return model_


def test_greedy_completions_are_those_of_transformers(model: Any, prompts: list[list[int]]) -> None:
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device="cuda")
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=40, eos_token_id=1 << 30,
            pad_token_id=0,
        )  # fmt: skip
        expected.append(output[0, len(prompt) :].tolist())
    for batch_size in (1, 4, 32):
        found = generate(model, prompts, Sampling(max_new_tokens=40), batch_size=batch_size)
        assert [completion.ids for completion in found] == expected


def test_many_sequences_at_once_are_those_of_transformers(model: Any, prompts: list[list[int]]) -> None:
    """As many as the kernel of decoding needs to be used."""
    many = [[first, *prompt] for first in range(3, 33) for prompt in prompts]
    one_by_one = generate(model, many, Sampling(max_new_tokens=20), batch_size=8)
    at_once = generate(model, many, Sampling(max_new_tokens=20), batch_size=len(many))
    assert [each.ids for each in at_once] == [each.ids for each in one_by_one]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(("heads", "width", "value_width"), [((9, 3), 64, 64), ((4, 4), 96, 32), ((14, 2), 128, 128)])
def test_the_kernel_of_decoding_computes_attention(
    heads: tuple[int, int], width: int, value_width: int, window: int | None, dtype: torch.dtype
) -> None:
    """Compared with attention in fp64; what lies behind a sequence's position does not matter, not even a NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, slots, length = 90, 100, 200
    query = torch.randn(rows, heads[0], 1, width, device="cuda", generator=generator).to(dtype)
    keys = torch.randn(slots, length, heads[1], width, device="cuda", generator=generator).to(dtype)
    values = torch.randn(slots, length, heads[1], value_width, device="cuda", generator=generator).to(dtype)
    positions = torch.arange(rows, device="cuda") * 2
    for row, position in enumerate(positions.tolist()):
        keys[row, position + 1 :] = values[row, position + 1 :] = torch.nan
    found = decode_attention(query, keys[:rows], values[:rows], positions, 0.3, window)[:, 0]
    expected, by_sdpa = torch.empty_like(found, dtype=torch.float64), torch.empty_like(found)
    for row, position in enumerate(positions.tolist()):
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        k, v = (
            cache[row, seen].repeat_interleave(heads[0] // heads[1], 1).transpose(0, 1)[None]
            for cache in (keys, values)
        )
        scores = query[row].double() @ k[0].double().transpose(1, 2) * 0.3
        expected[row] = (scores.softmax(-1) @ v[0].double())[:, 0]
        by_sdpa[row] = F.scaled_dot_product_attention(query[row][None], k, v, scale=0.3)[0, :, 0]
    error, error_of_sdpa = ((each.double() - expected).norm() for each in (found, by_sdpa))
    assert error <= 2 * error_of_sdpa + 1e-6 * expected.norm()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=40),
        Sampling(temperature=2.0, top_p=0.9, min_p=0.01, repetition_penalty=1.3, max_new_tokens=40, seed=3),
        Sampling(temperature=2.0, top_k=0, max_new_tokens=40),
    ],
)
def test_cuda_graphs_give_the_same_tokens(
    model: Any, prompts: list[list[int]], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [40, 3, 12, 40, 1, 7, 25, 30, 40]
    captured = generate(model, prompts, sampling, batch_size=4, limits=limits)
    graphs: list[int] = []
    real = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (graphs.append(1), real(graph))[1])
    assert generate(model, prompts, sampling, batch_size=4, limits=limits) == captured
    assert len(graphs) > 20, "no CUDA graph was replayed"
    original = kv_cache.DecodeRunner.__init__
    monkeypatch.setattr(
        kv_cache.DecodeRunner,
        "__init__",
        lambda self, *rest: original(self, *rest[:-2], False, False),  # neither graphs nor padding
    )
    assert generate(model, prompts, sampling, batch_size=4, limits=limits) == captured


def test_bf16_with_varlen_prompts_follows_fp32(model: Any, prompts: list[list[int]]) -> None:
    """Large random weights give clear maxima, so most first tokens are the same in 16 bits."""
    exact = generate(model, prompts, Sampling(max_new_tokens=4))
    coarse_model = load_model(ModelConfig(path="builtin:tiny"), torch.bfloat16, torch.device("cuda"))
    for parameter in coarse_model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    coarse = generate(coarse_model, prompts, Sampling(max_new_tokens=4))
    first = [one.ids[0] == other.ids[0] for one, other in zip(exact, coarse, strict=True)]
    assert sum(first) >= len(first) - 2
