"""Linear cross-entropy on CUDA: against its definition in fp64, torch's gradients, and its memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from whet.model.loss import linear_cross_entropy as cross_entropy_module
from whet.model.loss.linear_cross_entropy import LossTerms, linear_cross_entropy, row_losses_torch
from whet.model.loss.output_head import OutputHead

pytestmark = pytest.mark.gpu

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
SCALE = 1024 / 700  # with a loss scale, without which fp16 has no numbers for most gradients
TERMS = {
    "plain": LossTerms(),
    "everything": LossTerms(scale=0.5, cap=8.0, smoothing=0.1, z_loss=1e-2),
    "no powers of two": LossTerms(scale=0.3, cap=30.0),
    "scaled gradient": LossTerms(scale=2.0, smoothing=0.3, gradient_scale=1024.0),
}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def targets_for(rows: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(rows))


@pytest.mark.parametrize("vocabulary", [1, 50, 4096, 49152, 50257, 151936])
@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize("kind", TERMS)
def test_the_kernel_computes_the_definition(kind: str, rows: int, vocabulary: int) -> None:
    from whet.model.loss.cross_entropy_kernel import row_losses_triton

    logits, targets, terms = 5 * drawn(rows, vocabulary), targets_for(rows, vocabulary), TERMS[kind]
    targets[: rows // 2] = logits[: rows // 2].argmax(dim=-1)
    exact = row_losses_torch(logits.double(), targets, terms, torch.float64)
    for gradient in (None, *ROUNDING):
        found = row_losses_triton(logits.clone(), targets, terms, gradient)
        torch.testing.assert_close(found.nll.double(), exact.nll, rtol=5e-6, atol=1e-5)
        torch.testing.assert_close(found.cost.double(), exact.cost, rtol=5e-6, atol=1e-5)
        assert torch.equal(found.hits, exact.hits)
        if gradient is None:
            assert found.d_logits is None
        else:
            assert found.d_logits.dtype == gradient
            torch.testing.assert_close(
                found.d_logits.double(), exact.d_logits, rtol=ROUNDING[gradient], atol=2e-6 * terms.gradient_scale
            )


def test_of_equal_logits_the_first_is_the_argmax_and_nan_is_no_hit() -> None:
    from whet.model.loss.cross_entropy_kernel import row_losses_triton

    logits = torch.zeros(4, 5000, device="cuda")
    logits[:2, [70, 4200]] = 9.0
    logits[3, 8] = float("nan")
    found = row_losses_triton(logits, torch.tensor([70, 4200, 0, 3], device="cuda"), LossTerms(), None)
    assert found.hits.tolist() == [True, False, True, False]
    assert found.nll.isnan().tolist() == [False, False, False, True]


def test_the_triton_kernel_is_used_on_cuda() -> None:
    from whet.model.loss.cross_entropy_kernel import row_losses_triton

    assert cross_entropy_module._triton_row_losses() is row_losses_triton


def gradients(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    learned = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    head = OutputHead(learned[1], learned[2], cap=20.0)
    result = linear_cross_entropy(learned[0], head, targets, SCALE, smoothing=0.1, z_loss=1e-3)
    return result.nll, list(torch.autograd.grad(result.objective, learned))


def by_torch(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
    learned = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = 20 * torch.tanh((learned[0] @ learned[1].T + learned[2]) / 20)
    smoothed = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    objective = smoothed + 1e-3 * logits.logsumexp(dim=-1).square().sum()
    return F.cross_entropy(logits, targets, reduction="none"), list(torch.autograd.grad(SCALE * objective, learned))


@pytest.mark.parametrize("dtype", [torch.float64, *ROUNDING], ids=str)
@pytest.mark.parametrize("vocabulary", [49152, 50257, 151936])
@pytest.mark.parametrize("rows", [0, 1, 700])
def test_gradients_are_those_of_torch(
    rows: int, vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy_module, "_CHUNK_BYTES_GPU", 300 * vocabulary * 8)  # several chunks
    hidden, weight = drawn(rows, 64, dtype=dtype), drawn(vocabulary, 64, dtype=dtype)
    bias, targets = drawn(vocabulary, dtype=dtype), targets_for(rows, vocabulary)
    (nll, found), (exact_nll, exact) = (way(hidden, weight, bias, targets) for way in (gradients, by_torch))
    torch.testing.assert_close(nll.double(), exact_nll, rtol=1e-5, atol=1e-4)
    bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_gradients_of_fp32_tensors_are_not_rounded(kept: torch.dtype) -> None:
    hidden, weight = drawn(700, 64, dtype=kept), drawn(5000, 64)
    bias, targets = drawn(5000), targets_for(700, 5000)
    with torch.autocast("cuda", torch.bfloat16):
        _, found = gradients(hidden, weight, bias, targets)
    _, exact = by_torch(hidden.bfloat16(), weight.bfloat16(), bias, targets)
    assert [one.dtype for one in found] == [kept, torch.float32, torch.float32]
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other).norm() <= 4e-3 * other.norm()
    assert (found[1].bfloat16() != found[1]).float().mean() > 0.9


@pytest.mark.parametrize("count", [513, 1021])
def test_the_gradient_of_a_mean_is_not_rounded_by_its_count(count: int) -> None:
    values, weight = drawn(count, 8, dtype=torch.bfloat16), drawn(16, 8, dtype=torch.bfloat16)
    targets = targets_for(count, 16)

    def norm_of_sum(divisor: int) -> float:
        hidden = values.clone().requires_grad_()
        linear_cross_entropy(hidden, OutputHead(weight), targets, 1 / divisor).objective.backward()
        return hidden.grad.double().norm().item() * divisor

    assert norm_of_sum(count) == pytest.approx(norm_of_sum(512), rel=5e-4)


def test_two_runs_are_bit_equal() -> None:
    given = (drawn(900, 64, dtype=torch.bfloat16), drawn(50257, 64), drawn(50257), targets_for(900, 50257))
    one, other = gradients(*given), gradients(*given)
    assert all(torch.equal(a, b) for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True))


@pytest.mark.parametrize("learns_weight", [True, False])
def test_logits_are_never_materialised_at_once(learns_weight: bool) -> None:
    rows, vocabulary, width = 8192, 151936, 256
    hidden = drawn(rows, width, dtype=torch.bfloat16).requires_grad_()
    weight = drawn(vocabulary, width, dtype=torch.bfloat16).requires_grad_(learns_weight)
    targets = targets_for(rows, vocabulary)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, OutputHead(weight), targets, 1 / rows).objective.backward()
    peak = torch.cuda.max_memory_allocated() - before
    own = 2 * vocabulary * width * 4 if learns_weight else 0  # the gradient in fp32, and its copies in bf16
    chunk = cross_entropy_module._CHUNK_BYTES_GPU_TRAINED if learns_weight else cross_entropy_module._CHUNK_BYTES_GPU
    assert peak <= chunk + own + 128 * 2**20
    assert peak < rows * vocabulary * 4 / 4
