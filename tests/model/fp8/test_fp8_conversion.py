"""fp8 training with emulated products: against its definition, against exact gradients, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from whet.core.errors import WhetError
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.flops import count_step_flops, matrix_costs
from whet.model.fp8.conversion import (
    convert_to_fp8_,
    count_fp8_layers,
    fp8_unsupported_reason,
    is_faster_in_fp8,
    require_fp8,
)
from whet.model.fp8.linear import FP8Linear, fp8_matmul
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel

Make = Callable[..., Any]


def everything(*sizes: Any) -> bool:
    return True


def emulated_(model: nn.Module) -> list[str]:
    return convert_to_fp8_(model, convert_if=everything, emulate=True)


def emulated_matmul(input: Tensor, weight: Tensor) -> Tensor:
    return fp8_matmul(input, weight, emulate=True)


def gradients(function: Callable[..., Tensor], input: Tensor, weight: Tensor) -> list[Tensor]:
    """Output, and the gradients of both, for a small gradient of the output."""
    d_output = torch.randn(len(input), len(weight), generator=torch.Generator().manual_seed(5)) * 1e-5
    input, weight = input.detach().requires_grad_(), weight.detach().requires_grad_()
    output = function(input, weight)
    return [output.detach(), *torch.autograd.grad(output, (input, weight), d_output.to(output.dtype))]


def matrices(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return 3 * torch.randn(48, 64, generator=draw).to(dtype), torch.randn(96, 64, generator=draw).to(dtype) / 8


def rounded(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition: scale to the largest fp8 value, round to nearest (ties to even), divide by the scale."""
    values = torch.tensor([*range(0, 256, 2), *range(1, 256, 2)], dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    scale = (values.max().double() / matrix.abs().max().double()).float()
    nearest = (matrix.float() * scale)[..., None].sub(values).abs().argmin(dim=-1)  # the first of equals
    return values[nearest] / scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_nearest_fp8_values(dtype: torch.dtype) -> None:
    input, weight = matrices(dtype)
    d_output = (torch.randn(48, 96, generator=torch.Generator().manual_seed(5)) * 1e-5).to(dtype)
    input_8, weight_8 = rounded(input, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
    d_output_8 = rounded(d_output, torch.float8_e5m2)
    wanted = [input_8 @ weight_8.T, d_output_8 @ weight_8, d_output_8.T @ input_8]
    for found, exact in zip(gradients(emulated_matmul, input, weight), wanted, strict=True):
        assert found.dtype == dtype
        tolerance = torch.finfo(dtype).eps
        torch.testing.assert_close(found.float(), exact, rtol=2 * tolerance, atol=4e-7 * exact.abs().max().item())


def test_the_error_of_a_product_is_that_of_three_mantissa_bits() -> None:
    exact = gradients(lambda input, weight: input @ weight.T, *matrices())
    found = gradients(emulated_matmul, *matrices())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert all(0.01 < error < 0.1 for error in errors), errors  # a rounding to e4m3 is 2.6 %, to e5m2 5 %


def test_zeros_and_nonfinite_values_propagate() -> None:
    input, weight = matrices()
    assert torch.equal(emulated_matmul(torch.zeros_like(input), weight), torch.zeros(48, 96))
    for broken in (float("nan"), float("inf")):
        input[3, 5] = broken
        assert not torch.isfinite(emulated_matmul(input, weight)[3]).any()


def layer_of(weight: Tensor, bias: Tensor | None = None) -> FP8Linear:
    layer = FP8Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.emulate = True
    layer.weight.data = weight
    if bias is not None:
        layer.bias.data = bias
    return layer


def test_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA multiplies multiples of 16 tokens only: the input is padded with zeros and the output sliced."""
    sizes: list[int] = []

    def spy(input: Tensor, weight: Tensor, emulate: bool) -> Tensor:
        sizes.append(len(input))
        return fp8_matmul(input, weight, emulate)

    monkeypatch.setattr("whet.model.fp8.linear.fp8_matmul", spy)
    input, weight = matrices()
    bias = torch.arange(96.0)
    direct = gradients(emulated_matmul, input[:13], weight)
    layer = layer_of(weight, bias)
    rows = input[:13].clone().requires_grad_()
    output = layer(rows[None])
    d_output = torch.randn(13, 96, generator=torch.Generator().manual_seed(5)) * 1e-5
    d_input, d_weight = torch.autograd.grad(output, (rows, layer.weight), d_output[None])
    assert sizes == [16]
    torch.testing.assert_close(output[0], direct[0] + bias, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(d_input, direct[1], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(d_weight, direct[2], rtol=1e-5, atol=1e-9)


def test_autocast_decides_the_dtype_of_the_output() -> None:
    layer = layer_of(matrices()[1])
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(matrices()[0])
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("trained", "products"), [(True, 3), (False, 2)])
def test_nothing_is_computed_for_a_frozen_weight(trained: bool, products: int) -> None:
    input, weight = matrices()
    input.requires_grad_()
    weight.requires_grad_(trained)
    with Products() as counter:
        emulated_matmul(input, weight).sum().backward()
    assert counter.count == products


@pytest.mark.parametrize(
    ("out_features", "in_features", "is_faster"),
    [
        (4096, 4096, True),  # an 8B Llama's q and o
        (1024, 4096, True),  # its k and v
        (14336, 4096, True),  # gate and up
        (4096, 14336, True),  # down
        (2048, 2048, True),
        (8192, 2048, True),  # a 1B Llama's gate
        (2048, 8192, True),
        (8960, 1536, True),
        (512, 2048, False),  # a 1B Llama's k and v
        (1536, 1536, False),
    ],
)
def test_small_matrices_stay(out_features: int, in_features: int, is_faster: bool) -> None:
    assert is_faster_in_fp8(out_features, in_features) == is_faster


ALL_SEVEN = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj"]  # fmt: skip


def test_the_decoders_matrices_are_converted_and_nothing_else(make_model: Make) -> None:
    model = make_model("Llama", tie_word_embeddings=False)
    assert emulated_(model) == [f"model.layers.{number}.{name}" for number in (0, 1) for name in ALL_SEVEN]
    assert count_fp8_layers(model) == 14
    assert type(model.lm_head) is nn.Linear


def test_sizes_that_are_not_multiples_of_16_stay(make_model: Make) -> None:
    model = make_model("Llama", hidden_size=32, intermediate_size=40)
    assert {name.rpartition(".")[2] for name in emulated_(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_routers_stay_and_so_do_fused_experts(make_model: Make) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model = make_model("Qwen3Moe", decoder_sparse_step=1, **sizes)
    model.model.layers[0].mlp.gate = nn.Linear(32, 16)  # as where a router is a plain linear layer
    assert {name.rpartition(".")[2] for name in emulated_(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_with_adapters_the_weights_below_are_converted(make_model: Make) -> None:
    model = unwrap_peft(add_adapter(make_model("Llama"), AdapterConfig(rank=16), seed=0))
    names = emulated_(model)
    assert len(names) == 14
    assert all(name.endswith(".base_layer") for name in names)


def test_a_model_without_large_matrices_is_refused(make_model: Make) -> None:
    with pytest.raises(WhetError, match=r"train\.precision=bf16"):
        convert_to_fp8_(make_model("Llama"), emulate=True)


def test_weights_names_and_flops_stay(make_model: Make) -> None:
    model = make_model("Llama")
    before = {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()}
    parameters, work, held = [id(p) for p in model.parameters()], count_step_flops(model), matrix_costs(model)
    emulated_(model)
    assert {name: (value.data_ptr(), value.dtype) for name, value in model.state_dict().items()} == before
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert (count_step_flops(model), matrix_costs(model)) == (work, held)


@pytest.mark.parametrize("adapter", [False, True])
def test_gradients_are_close_and_evaluation_is_unchanged(
    make_model: Make, make_documents: Make, pack: Make, adapter: bool
) -> None:
    def passes(convert: bool) -> tuple[Tensor, Tensor, Tensor]:
        model = make_model("Llama", torch.float32)
        if adapter:
            model = add_adapter(model, AdapterConfig(rank=4), seed=0)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        attention.install_backend(unwrap_peft(model), "sdpa")
        root = LossModel(unwrap_peft(model))
        if convert:
            assert len(emulated_(root.language_model)) == 14
        batch = pack(make_documents(20, 13))
        with torch.no_grad():
            measured = root.eval()(batch).nll
        loss = root.train()(batch)
        loss.objective.backward()
        found = [p.grad.flatten() for p in root.parameters() if p.grad is not None]
        return measured, loss.nll, torch.cat(found)

    exact, rounded = passes(False), passes(True)
    assert torch.equal(rounded[0], exact[0])
    assert not torch.equal(rounded[1], exact[1])
    torch.testing.assert_close(rounded[1], exact[1], rtol=0.02, atol=0.02)
    assert 0.001 < ((rounded[2] - exact[2]).norm() / exact[2].norm()).item() < 0.15


def test_compiled_products_share_the_cast_of_an_input(make_model: Make) -> None:
    """q, k and v share their input, so do gate and up: 4 inputs and 7 weights are rounded for the forward pass, and
    turned once for the backward pass; there 7 gradients are looked through, and nothing else is a second time."""
    rounded: dict[str, int] = {}
    looked: dict[str, int] = {}
    called: dict[str, Counter[str]] = {}

    def count(name: str) -> Any:
        def compiler(module: Any, inputs: Any) -> Any:
            types = [node.meta["val"].dtype for node in module.graph.nodes if "convert_element" in str(node.target)]
            rounded[name] = sum(dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for dtype in types)
            looked[name] = sum("aten.max.default" in str(node.target) for node in module.graph.nodes)
            called[name] = Counter(
                str(node.target).split(".")[1] for node in module.graph.nodes if str(node.target).startswith("whet.")
            )
            return module.forward

        return compiler

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    model = make_model("Llama", torch.float32).train()
    emulated_(model)
    layer = model.model.layers[0]
    hidden = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    places = model.model.rotary_emb(hidden, torch.arange(32)[None])
    wanted = torch.autograd.grad(layer(hidden, position_embeddings=places).square().sum(), hidden)[0]
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda *a: make_boxed_func(count("forward")(*a)),
        bw_compiler=lambda *a: make_boxed_func(count("backward")(*a)),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    run = torch.compile(lambda x: layer(x, position_embeddings=places), backend=backend, fullgraph=True)
    # torch's defaults: a compiled run in this process has set its own
    with torch._functorch.config.patch(activation_memory_budget=1.0, ban_recompute_materialized_backward=True):
        found = torch.autograd.grad(run(hidden).square().sum(), hidden)[0]
    torch._dynamo.reset()
    # the middle of the MLP, an input of a product and two gradients, is looked through and rounded by itself
    assert (rounded["forward"], looked) == (10, {"forward": 10, "backward": 5})
    assert rounded["backward"] == 0
    once = {"silu_mul_amax": 1, "silu_mul_cast": 1, "silu_mul_backward_amax": 1, "silu_mul_backward_cast": 1}
    assert called["forward"] + called["backward"] == once | {"cast_to_fp8_both": 5, "cast_to_fp8_transposed": 10}
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


def test_devices_without_fp8_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WhetError, match=r"train\.precision: fp8 .* NVIDIA .* cpu\. Set train\.precision=bf16"):
        require_fp8(torch.device("cpu"), "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    for capability, can in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (fp8_unsupported_reason(torch.device("cuda", 0)) is None) == can
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "A100" in str(fp8_unsupported_reason(torch.device("cuda", 0)))
