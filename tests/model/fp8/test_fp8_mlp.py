"""The fp8 MLP against three fp8 linear layers, its casts and activations, and the detection of gated MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.model import modules as gated_module
from whet.model.fp8.casting import (
    E4M3,
    E5M2,
    cast_to_fp8,
    cast_to_fp8_both,
    cast_to_fp8_eager,
    cast_to_fp8_transposed,
    compute_amax,
    compute_scale,
    scale_from_amax,
)
from whet.model.fp8.conversion import (
    FP8MLP,
    convert_to_fp8_,
    fp8_unsupported_reason,
    silu_mul_amax,
    silu_mul_backward_amax,
    silu_mul_backward_cast,
    silu_mul_cast,
)
from whet.model.modules import is_gated_mlp

Make = Callable[..., Any]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = fp8_unsupported_reason(torch.device("cuda", 0)) if request.param == "cuda" else None
    if reason is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Bit for bit."""
    return found.dtype == wanted.dtype and torch.equal(found.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (272, 400), (1024, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_transposed_casts_have_the_same_values(device: str, shape: Any, dtype: Any, kept: Any) -> None:
    matrix = drawn(*shape, dtype=kept)
    scale = compute_scale(matrix, dtype)
    wanted = cast_to_fp8(matrix, scale, dtype)
    there = matrix.to(device), scale.to(device), dtype
    assert compute_amax(there[0]).item() == matrix.abs().max().item()
    assert same(cast_to_fp8_eager(*there), wanted)
    assert same(cast_to_fp8_transposed(*there), wanted.t().contiguous())
    straight, turned = cast_to_fp8_both(*there)
    assert same(straight, wanted)
    assert same(turned, wanted.t().contiguous())
    columns = matrix.t().contiguous().t().to(device)  # other strides, as a compiler may hand over
    assert same(cast_to_fp8_transposed(columns, *there[1:]), wanted.t().contiguous())
    assert same(cast_to_fp8_eager(columns, *there[1:]).contiguous(), wanted)


@pytest.mark.parametrize("shape", [(16, 16), (48, 176), (1024, 4096)], ids=str)
def test_fp8_activations_are_the_16_bit_ones_cast(device: str, shape: Any) -> None:
    gate, up, d_h = (drawn(*shape, seed=seed).to(device) for seed in range(3))
    exact = [each.double().requires_grad_() for each in (gate, up)]
    h = nn.functional.silu(exact[0]) * exact[1]
    wanted = [each.detach().bfloat16() for each in (h, *torch.autograd.grad(h, exact, d_h.double()))]
    largest = [silu_mul_amax(gate, up), *silu_mul_backward_amax(d_h, gate, up)]
    for found, true in zip(largest, wanted, strict=True):
        torch.testing.assert_close(found, true.abs().max().float(), rtol=2**-7, atol=0)
    scales = [compute_scale(true, dtype) for true, dtype in zip(wanted, (E4M3, E5M2, E5M2), strict=True)]
    d_gate, d_gate_turned, d_up, d_up_turned, h_turned = silu_mul_backward_cast(d_h, gate, up, *scales)
    assert same(silu_mul_cast(gate, up, scales[0]), h_turned.t().contiguous())
    assert same(d_gate, d_gate_turned.t().contiguous())
    assert same(d_up, d_up_turned.t().contiguous())
    for small, true, scale in zip((h_turned.t(), d_gate, d_up), wanted, scales, strict=True):
        differs = (small.float() != cast_to_fp8(true, scale, small.dtype).float()).float().mean().item()
        assert differs < 0.005  # where fp64 lies between two numbers of 16 bits, and then of 8


def test_operators_pass_opcheck() -> None:
    """What they tell the compiler of shapes and strides is true, nothing is changed or shared behind its back."""
    gate, up, d_h = (drawn(16, 32, seed=seed) for seed in range(3))
    scale = torch.ones(())
    torch.library.opcheck(cast_to_fp8_transposed, (gate, scale, E4M3))
    torch.library.opcheck(cast_to_fp8_both, (gate.t(), scale, E5M2))
    torch.library.opcheck(silu_mul_amax, (gate, up))
    torch.library.opcheck(silu_mul_cast, (gate, up, scale))
    torch.library.opcheck(silu_mul_backward_amax, (d_h, gate, up))
    torch.library.opcheck(silu_mul_backward_cast, (d_h, gate, up, scale, scale, scale))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nonfinite_values_propagate(device: str, broken: float) -> None:
    gate, up = (drawn(16, 32, seed=seed).to(device) for seed in range(2))
    up[3, 5] = broken
    largest = silu_mul_amax(gate, up)
    assert not torch.isfinite(largest)
    assert not torch.isfinite(silu_mul_backward_amax(drawn(16, 32).to(device), gate, up)[0])
    assert not torch.isfinite(silu_mul_cast(gate, up, scale_from_amax(largest, E4M3)).float()[3, 5])


def mlps(make_model: Make, device: str, dtype: torch.dtype, **sizes: int) -> tuple[Any, Any]:
    """The MLP of a layer in 8 bits, and the same with three layers for themselves."""
    models = [make_model("Llama", dtype, **sizes).to(device).train() for _ in range(2)]
    for model in models:
        convert_to_fp8_(model, convert_if=lambda *sizes: True, emulate=device == "cpu")
    whole, parts = (model.model.layers[0].mlp for model in models)
    assert isinstance(whole, FP8MLP)
    parts.__class__ = parts.__class__.__mro__[2]
    assert not isinstance(parts, FP8MLP)
    assert parts.gate_proj.emulate == (device == "cpu")
    return whole, parts


def passes(mlp: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = mlp(x)
    y.backward(1e-5 * drawn(*y.shape, seed=9).to(y))
    return [y.detach(), x.grad, *(weight.grad for weight in mlp.parameters())]  # type: ignore[list-item]


def test_the_fused_mlp_equals_three_linear_layers(make_model: Make, device: str) -> None:
    on_cpu = device == "cpu"
    sizes = {} if on_cpu else {"hidden_size": 1024, "intermediate_size": 2048}
    whole, parts = mlps(make_model, device, torch.float32 if on_cpu else torch.bfloat16, **sizes)
    x = drawn(2, 21, parts.gate_proj.in_features).to(device, parts.gate_proj.weight.dtype)  # no multiple of 16
    found, wanted = passes(whole, x), passes(parts, x)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    assert len(errors) == 5
    if on_cpu:
        assert torch.equal(found[0], wanted[0])
    assert max(errors) < (0.01 if on_cpu else 0.03), errors
    whole.eval()
    parts.eval()
    assert torch.equal(whole(x), parts(x))


def test_frozen_weights_get_no_gradient(make_model: Make, device: str) -> None:
    sizes = {} if device == "cpu" else {"hidden_size": 1024, "intermediate_size": 2048}
    whole, parts = mlps(make_model, device, torch.bfloat16, **sizes)
    x = drawn(32, parts.gate_proj.in_features).to(device)
    full = passes(whole, x)
    for name, place in (("gate_proj", 2), ("up_proj", 3), ("down_proj", 4)):
        whole.zero_grad()
        whole.get_submodule(name).requires_grad_(False)
        found = passes(whole, x)
        whole.get_submodule(name).requires_grad_(True)
        assert found[place] is None
        for number, (one, other) in enumerate(zip(found, full, strict=True)):
            assert number == place or torch.equal(one, other)


@pytest.mark.gpu
def test_compiled_it_computes_the_same(make_model: Make, device: str) -> None:
    if device == "cpu":
        pytest.skip("compiled layers are CUDA's")
    whole, _ = mlps(make_model, device, torch.bfloat16, hidden_size=1024, intermediate_size=2048)
    x = drawn(2, 21, 1024).to(device)
    wanted = passes(whole, x)
    whole.zero_grad()
    whole.forward = torch.compile(whole.forward, dynamic=False, fullgraph=True)
    for found, true in zip(passes(whole, x), wanted, strict=True):
        assert ((found - true).norm() / true.norm()).item() < 0.005


class Rounding(nn.Module):
    """Looks like one, and is none: it rounds its gate."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, middle), nn.Linear(width, middle)
        self.down_proj, self.act_fn = nn.Linear(middle, width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).round()) * self.up_proj(x))


class Clamped(Rounding):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))


class Honest(Rounding):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Dropping(Rounding):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(nn.functional.dropout(h, 0.1, self.training))


class Sized(Honest):
    """Takes for known how wide its layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 32))


@pytest.mark.parametrize("kind", [Honest, Rounding, Clamped, Dropping, Sized])
def test_lookalikes_are_not_gated_mlps(kind: Any) -> None:
    module, is_one = kind(32, 48), kind is Honest
    before = {name: value.clone() for name, value in module.state_dict().items()}
    drawn_before = torch.random.get_rng_state()
    assert is_gated_mlp(module) == is_one
    assert is_gated_mlp(module.to("meta")) == is_one  # weights need not be there
    assert torch.equal(torch.random.get_rng_state(), drawn_before)
    assert dict(module.named_children()).keys() == {*gated_module.GATED_MLP_LAYERS, "act_fn"}
    assert {name: value.shape for name, value in module.state_dict().items()} == {n: v.shape for n, v in before.items()}


def test_another_activation_is_not_a_gated_mlp() -> None:
    module = Honest(32, 48)
    module.act_fn = nn.GELU()  # type: ignore[assignment]
    assert not is_gated_mlp(module)
