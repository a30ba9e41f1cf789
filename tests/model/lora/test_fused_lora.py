"""Fused LoRA against peft in fp64: results, gradients and behaviour."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whet.model import frozen_weight
from whet.model.config import AdapterConfig
from whet.model.flops import count_step_flops
from whet.model.frozen_weight import materialize_weight
from whet.model.lora import fuse, fused_mlp
from whet.model.lora.fuse import fuse_lora_, use_low_memory_backward_
from whet.model.lora.low_rank import extract_lora
from whet.model.lora.peft_adapters import add_adapter, merge_adapter, unwrap_peft
from whet.model.loss.output_head import read_output_head
from whet.model.modules import KeepFloat64

Make = Callable[..., Any]

KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("Llama", 3, {}),
    "with biases everywhere": ("Llama", 3, {"mlp_bias": True, "attention_bias": True}),
    "qwen2, biases of q k v": ("Qwen2", 3, {}),
    "qwen3, norms of q k": ("Qwen3", 3, {"head_dim": 8}),
    "three heads for a key": ("Llama", 3, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}),
    "mistral": ("Mistral", 3, {}),
    "gelu": ("Gemma", 5, {"head_dim": 8}),  # q k v, o, and the three of an MLP that is no SwiGLU
    "one matrix for q k v": ("GPTNeoX", 4, {}),
}


def with_adapters(model: nn.Module, **settings: Any) -> Any:
    dtype = next(model.parameters()).dtype
    model = add_adapter(model, AdapterConfig(**{"rank": 4, "alpha": 6, **settings}), seed=0).to(dtype)
    return noisy(model)


def noisy(model: nn.Module, std: float = 0.3) -> Any:
    """Adapters that do something: at first B is zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(parameter.numel()))
    return model.train()


def both(model: nn.Module, **settings: Any) -> tuple[Any, Any, int]:
    """The same model by peft alone and fused, and how many pieces were fused."""
    plain = with_adapters(model, **settings)
    fused = copy.deepcopy(plain)
    return plain, fused, fuse_lora_(fused)


def learn(model: Any, batches: int = 1) -> list[Tensor]:
    """The logits of the last batch, and gradients added up over the batches."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(batches):
        ids = torch.randint(3, 64, (2, 7), generator=generator)
        with KeepFloat64():
            logits = model(input_ids=ids).logits
        (logits * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)).sum().backward()
    return [logits.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


def assert_same(plain: Any, fused: Any, batches: int = 1, bound: float = 1e-12) -> None:
    one, other = learn(plain, batches), learn(fused, batches)
    assert len(one) == len(other) > 8
    for expected, found in zip(one, other, strict=True):
        assert found.dtype == expected.dtype
        assert expected.norm() > 0
        assert (found - expected).norm() <= bound * expected.norm()


def operators(model: Any) -> list[str]:
    """The fused operators that a forward pass calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        model(input_ids=torch.arange(9)[None])
    return [event.name for event in profile.events() if event.name in ("whet::lora_linear", "whet::lora_mlp_gate_up")]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_peft(make_model: Make, kind: str) -> None:
    architecture, pieces, settings = KINDS[kind]
    plain, fused, count = both(make_model(architecture, **settings))
    assert count == 2 * pieces  # in both layers
    assert len(operators(fused)) == count
    assert_same(plain, fused)


@pytest.mark.parametrize("rank", [1, 8, 16, 64])
@pytest.mark.parametrize("alpha", [0.5, 16])
def test_every_rank_and_scale(make_model: Make, rank: int, alpha: float) -> None:
    plain, fused, _ = both(make_model("Llama"), rank=rank, alpha=alpha)
    assert_same(plain, fused, batches=2)


def test_the_scale_is_the_layers_own_and_ranks_may_differ(make_model: Make) -> None:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, target_modules="all-linear", rank_pattern={"gate_proj": 2, "k_proj": 3},
        alpha_pattern={"up_proj": 3, "v_proj": 1, "down_proj": 5},
    )  # fmt: skip
    plain = noisy(get_peft_model(make_model("Llama"), settings).double())
    fused = copy.deepcopy(plain)
    assert fuse_lora_(fused) == 6
    assert_same(plain, fused)


def test_fused_experts_stay_and_the_rest_is_fused(make_model: Make) -> None:
    model = make_model("Mixtral", torch.float32, num_local_experts=4)
    model.set_experts_implementation("eager")
    plain, fused, count = both(model)
    assert count == 2 * 2  # q k v together, o
    assert_same(plain, fused, bound=1e-5)


def test_some_targets_only(make_model: Make) -> None:
    plain, fused, count = both(make_model("Llama"), targets=["q_proj", "up_proj", "down_proj"])
    assert count == 2 * 3
    assert_same(plain, fused)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_adapter_variants_are_computed_by_peft(make_model: Make, settings: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model = make_model("Qwen2")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=torch.float64))  # lora_bias wants one
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", **settings))
    assert fuse_lora_(model) == 0
    assert operators(model) == []


class Dropping(nn.Module):
    """Looks like a gated MLP and is none."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.dropout(self.gate_proj(x), 0.3, self.training)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Scaling(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1.05


@pytest.mark.parametrize("disguised", [Dropping, Scaling])
def test_an_mlp_is_known_by_what_it_computes(make_model: Make, disguised: type[Dropping]) -> None:
    model = make_model("Llama")
    for layer in model.model.layers:
        layer.mlp = disguised(layer.mlp)
    adapted = with_adapters(model).eval()
    drawn = torch.get_rng_state()
    assert fuse_lora_(adapted) == 2 * 5  # q k v together, o, and three layers of each MLP by themselves
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any(module.training for module in adapted.modules())
    assert set(operators(adapted)) == {"whet::lora_linear"}


def test_outputs_may_be_changed_in_place(make_model: Make) -> None:
    """As Gemma 3n, Llama 4 and others do."""

    class Halving(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mul_(0.5)

    pair = both(make_model("Llama", num_hidden_layers=1))[:2]
    for model in pair:
        layer = unwrap_peft(model).model.layers[0]
        layer.mlp, layer.self_attn.o_proj = Halving(layer.mlp), Halving(layer.self_attn.o_proj)
    assert_same(*pair)


def test_an_attention_with_other_qkv_inputs_gets_them_computed(make_model: Make) -> None:
    plain, fused, _ = both(make_model("Llama", num_hidden_layers=1))
    for model in (plain, fused):
        attention = unwrap_peft(model).model.layers[0].self_attn
        attention.k_proj.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    assert_same(plain, fused)
    attention = unwrap_peft(fused).model.layers[0].self_attn
    assert all(layer.precomputed is None for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert_same(plain, fused)


def test_names_weights_and_flops_are_what_they_were(make_model: Make) -> None:
    plain, fused, _ = both(make_model("Llama"))
    one, other = plain.state_dict(), fused.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert repr(plain) == repr(fused)
    assert count_step_flops(unwrap_peft(plain)) == count_step_flops(unwrap_peft(fused))
    assert fuse_lora_(fused) == 0  # once is enough
    assert_same(plain, fused)


def test_disabling_merging_and_saving_work_as_in_peft(make_model: Make, tmp_path: Path) -> None:
    from peft import PeftModel

    base = make_model("Llama")
    plain, fused, count = both(copy.deepcopy(base))
    ids = torch.arange(9)[None]
    assert len(operators(fused)) == count
    with torch.no_grad():
        with plain.disable_adapter(), fused.disable_adapter():
            assert operators(fused) == []
            assert torch.equal(fused(input_ids=ids).logits, plain(input_ids=ids).logits)
        adapted = fused(input_ids=ids).logits
        fused.merge_adapter()
        assert operators(fused) == []
        torch.testing.assert_close(fused(input_ids=ids).logits, adapted, rtol=1e-9, atol=1e-9)
        fused.unmerge_adapter()
        assert len(operators(fused)) == count
        fused.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        torch.testing.assert_close(loaded(input_ids=ids).logits, adapted, rtol=1e-9, atol=1e-9)
        merged = merge_adapter(fused)
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-9, atol=1e-9)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert type(merged) is type(base)


def test_two_active_adapters_are_computed_by_peft(make_model: Make) -> None:
    from peft import LoraConfig

    plain, fused, _ = both(make_model("Llama"))
    for model in (plain, fused):
        torch.manual_seed(5)
        model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        model.double().base_model.set_adapter(["default", "other"])
    assert operators(fused) == []
    assert_same(plain, fused)


def test_trained_base_weights_are_computed_by_peft(make_model: Make) -> None:
    plain, fused, _ = both(make_model("Qwen2"))
    for model in (plain, fused):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or "q_proj" in name or "down_proj" in name)
    assert_same(plain, fused)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32], ids=str)
def test_in_mixed_precision_it_is_at_least_as_exact_as_peft(make_model: Make, kept: torch.dtype) -> None:
    """Against fp64 with the same rounded weights; adapters and their gradients are fp32."""
    plain = add_adapter(make_model("Llama", num_hidden_layers=1).to(kept), AdapterConfig(rank=4), seed=0)
    plain = noisy(plain, std=0.02)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    assert fuse_lora_(fused) == 3
    ids, outer = torch.arange(3, 63)[None], torch.randn(60, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for model in (exact, plain, fused):
        with KeepFloat64() if model is exact else torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits[0]
        (logits.double() * outer).sum().backward()
        found.append([logits, *(weight.grad for name, weight in model.named_parameters() if "lora" in name)])
    true, one, other = found
    assert (
        [tensor.dtype for tensor in one]
        == [tensor.dtype for tensor in other]
        == [torch.bfloat16, *[torch.float32] * 14]
    )
    errors = [
        sum(((a.double() - b).norm() / b.norm()).item() for a, b in zip(some, true, strict=True))
        for some in (one, other)
    ]
    assert errors[1] <= 1.05 * errors[0]
    assert errors[1] / len(true) < 0.01


def test_without_autocast_mixed_dtypes_are_computed_by_peft(make_model: Make) -> None:
    model = noisy(add_adapter(make_model("Llama").bfloat16(), AdapterConfig(rank=4), seed=0))
    fuse_lora_(model)
    assert operators(model) == []


def test_nothing_is_computed_for_an_input_that_needs_no_gradient(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embeddings are frozen, so the first layer's q, k and v are where the backward pass ends."""
    sizes: list[int] = []

    def spy(*given: Any) -> list[Tensor]:
        found = backward(*given)
        sizes.append(found[0].numel())
        return found

    backward = fuse._backward
    monkeypatch.setattr(fuse, "_backward", spy)
    _, fused, _ = both(make_model("Llama"))
    learn(fused)
    assert sizes == [14 * 32, 14 * 32, 14 * 32, 0]  # o and q k v, from the last layer to the first


def test_dequantized_weights_are_freed_before_the_next(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 4-bit layers are as large as if they were not in 4 bits."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def make(*given: Any) -> Tensor:
        matrix = materialize_weight(*given).clone()
        made.append(weakref.ref(matrix))
        alive.append(sum(each() is not None for each in made))
        return matrix

    monkeypatch.setattr(frozen_weight, "materialize_weight", make)
    _, fused, _ = both(make_model("Llama", num_hidden_layers=1))
    fused.get_input_embeddings().weight.requires_grad_()  # so that gradients flow through q, k and v
    learn(fused)
    forward = [1, 1, 1, 1, 1, 1, 1]  # q, k, v, o, gate, up, down
    assert alive == [*forward, 1, 2, 3, 1, 1, 1, 1]  # down, gate and up, which are used for each part of the tokens


@pytest.mark.parametrize("shape", [(5, 32), (1, 5, 32), (2, 3, 32), (0, 32)], ids=str)
def test_operators_pass_opcheck(make_model: Make, shape: tuple[int, ...]) -> None:
    """What they tell the compiler of shapes and strides is true, nothing is changed or shared behind its back."""
    model = with_adapters(make_model("Llama", mlp_bias=True))
    mlp, attention = (
        model.get_submodule("base_model.model.model.layers.1.mlp"),
        "base_model.model.model.layers.1.self_attn",
    )
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gate, up, down = (extract_lora(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    q, k, v = (extract_lora(model.get_submodule(f"{attention}.{name}_proj")) for name in "qkv")
    adapters = [part.detach() for layer in (gate, up, down) for part in (layer.a, layer.b)]
    into, scales = (x.detach(), gate.frozen, up.frozen, gate.bias, up.bias, adapters[:4], [1.5, 2.0]), [1.5, 2.0, 0.5]
    kept = fused_mlp._gate_up_forward(*into)
    frozen = (gate.frozen, up.frozen, down.frozen)
    torch.library.opcheck(fused_mlp._gate_up_forward, into)
    torch.library.opcheck(fused_mlp._down_forward, (*kept, down.frozen, down.bias, adapters, 0.5))
    for at_a_time, needs_x in ((4096, True), (2, True), (4096, False)):
        torch.library.opcheck(
            fused_mlp._backward,
            (torch.ones_like(x).flatten(0, -2), x.detach(), *kept, *frozen, adapters, scales, at_a_time, needs_x),
        )
    for layers in ([q, k, v], [gate]):
        frozen, biases = (
            [layer.frozen[0] for layer in layers],
            [layer.bias for layer in layers if layer.bias is not None],
        )
        matrices = [matrix for layer in layers for matrix in (layer.a, layer.b)]
        sizes, factors = [1] * len(layers), [0.5] * len(layers)
        torch.library.opcheck(fuse._forward, (x, frozen, sizes, biases, matrices, factors))


class Limited(nn.Module):
    """A gated MLP that limits gate and up, as some models do."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            own.gate_proj,
            own.up_proj,
            own.down_proj,
            own.act_fn,
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        return self.down_proj(self.act_fn(gate) * up)


def test_an_mlp_with_clamps_is_not_fused(make_model: Make) -> None:
    model = with_adapters(make_model("Llama"))
    for layer in model.base_model.model.model.layers:
        layer.mlp = Limited(layer.mlp)
    fuse_lora_(model)
    assert not any(isinstance(layer.mlp, fuse._FusedLoraMLP) for layer in model.base_model.model.model.layers)


def test_an_adapted_head_is_not_fused(make_model: Make) -> None:
    settings = AdapterConfig(rank=4, targets=["q_proj", "lm_head"])
    model = add_adapter(make_model("Llama", tie_word_embeddings=False), settings, seed=0)
    before = read_output_head(unwrap_peft(model)).weight
    fuse_lora_(model)
    assert torch.equal(read_output_head(unwrap_peft(model)).weight, before)


def test_low_memory_changes_nothing_else(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_mlp, "_BACKWARD_CHUNK_LOW_MEMORY", 3)  # parts of 3, 3 and 1 tokens
    found = []
    for low_memory in (False, True):
        model = with_adapters(make_model("Llama"))
        assert fuse_lora_(model)
        if low_memory:
            use_low_memory_backward_(model)
        mlp = model.get_submodule("base_model.model.model.layers.1.mlp")
        x = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        mlp(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in mlp.parameters() if parameter.requires_grad)])
    assert len(found[0]) == 7
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
