"""Document attention on CUDA: the varlen kernel against the definition, and its silence between documents."""

from __future__ import annotations

import pytest
import torch

from whet.model.attention import Documents, eager, per_document_sdpa, varlen

pytestmark = pytest.mark.gpu

EDGES = (0, 5, 130, 131, 512, 900, 1024, 1024)  # the last document is empty, as padding makes it


def _documents() -> Documents:
    return Documents(torch.tensor(EDGES, dtype=torch.int32, device="cuda"), 1024, EDGES)


def _states(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, heads, 1024, 64, device="cuda", dtype=torch.float64, generator=generator).to(dtype)
        for heads in (8, 2, 2)
    ]


def _gradients(backend, states, dtype):
    inputs = [state.to(dtype).requires_grad_() for state in states]
    out = backend(*inputs, 0.125, _documents())
    out.double().pow(2).sum().backward()
    return [out.detach().double(), *(state.grad.double() for state in inputs)]


def test_varlen_is_as_close_to_the_definition_as_sdpa_is():
    states = _states(torch.bfloat16)
    truth = _gradients(eager, states, torch.float64)
    ours = _gradients(varlen, states, torch.bfloat16)
    sdpa = _gradients(per_document_sdpa, states, torch.bfloat16)
    for exact, kernel, reference in zip(truth, ours, sdpa, strict=True):
        assert (kernel - exact).abs().max() <= 2 * (reference - exact).abs().max() + 1e-6


def test_varlen_documents_do_not_see_each_other():
    states = _states(torch.bfloat16)
    before = varlen(*states, 0.125, _documents())
    changed = [state.clone() for state in states]
    for state in changed:
        state[:, :, 131:512] += 1
    after = varlen(*changed, 0.125, _documents())
    assert torch.equal(before[:, :131], after[:, :131])
    assert torch.equal(before[:, 512:], after[:, 512:])
    assert not torch.equal(before[:, 131:512], after[:, 131:512])
