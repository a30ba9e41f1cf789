"""Experts by whet's operators: against a naive loop in fp64, and against transformers and peft in whole models."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_architectures import tiny_model
from whet.model.config import AdapterConfig
from whet.model.experts.install import install_experts
from whet.model.experts.operators import ExpertsShape, ExpertsWeights, LoraPair, experts
from whet.model.experts.steps import register_activation, sort_by_expert
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.modules import KeepFloat64

TOKENS, CHOICES, EXPERTS, HIDDEN, INTERMEDIATE = 23, 3, 6, 10, 7


class PlainExperts(nn.Module):
    """Attributes as transformers' decorator sets them."""

    def __init__(self, has_gate: bool, interleaved: bool) -> None:
        super().__init__()
        self.has_gate, self.interleaved = has_gate, interleaved
        self.act_fn = nn.GELU()

    def _apply_gate(self, row: Tensor) -> Tensor:
        gate, up = (row[..., ::2], row[..., 1::2]) if self.interleaved else row.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class ExpertsInFp32(PlainExperts):
    """Whose activation is computed in fp32, as Beam's."""

    def _apply_gate(self, row: Tensor) -> Tensor:
        return super()._apply_gate(row.float()).to(row.dtype)


class Case:
    """Random weights, adapters and routing, with one expert that gets no token."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, transposed: bool = False, bias: bool = False, gated: bool = True,
        interleaved: bool = False, up_rank: int = 2, down_rank: int = 3, tokens: int = TOKENS,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        up = INTERMEDIATE * (2 if gated else 1)
        self.module = PlainExperts(gated, interleaved)
        self.shape = ExpertsShape(EXPERTS, HIDDEN, up, INTERMEDIATE, int(transposed))

        def parameter(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes, dtype=dtype) / 2)

        turned = (lambda i, o: (EXPERTS, i, o)) if transposed else (lambda i, o: (EXPERTS, o, i))
        self.up, self.down = parameter(*turned(HIDDEN, up)), parameter(*turned(INTERMEDIATE, HIDDEN))
        self.biases = (parameter(EXPERTS, up), parameter(EXPERTS, HIDDEN)) if bias else (None, None)
        self.up_lora = self._lora(parameter, up_rank, HIDDEN, up, 0.7)
        self.down_lora = self._lora(parameter, down_rank, INTERMEDIATE, HIDDEN, 1.3)
        self.x = parameter(tokens, HIDDEN)
        index = torch.stack([torch.randperm(EXPERTS - 1)[:CHOICES] for _ in range(tokens)])
        self.index, self.weights = index, nn.Parameter(torch.rand(tokens, CHOICES, dtype=dtype))

    def _lora(self, parameter: Any, rank: int, inputs: int, outputs: int, scale: float) -> LoraPair | None:
        return LoraPair(parameter(EXPERTS * rank, inputs), parameter(outputs, rank * EXPERTS), scale) if rank else None

    def computed(self) -> Tensor:
        weights = ExpertsWeights(
            self.shape, [self.up], [self.down], *self.biases, self.up_lora, self.down_lora,
            register_activation(self.module),
        )  # fmt: skip
        return experts(self.x, self.index, self.weights, weights)

    def by_loop(self) -> Tensor:
        """One token and one expert at a time, with B·A added to the weights."""
        rows = []
        for token in range(len(self.x)):
            total = self.x.new_zeros(HIDDEN)
            for choice in range(CHOICES):
                expert = int(self.index[token, choice])
                h = self.x[token] @ self._matrix(self.up, self.up_lora, expert)
                h = h if self.biases[0] is None else h + self.biases[0][expert]
                h = self.module._apply_gate(h) if self.module.has_gate else self.module.act_fn(h)
                y = h @ self._matrix(self.down, self.down_lora, expert)
                y = y if self.biases[1] is None else y + self.biases[1][expert]
                total = total + self.weights[token, choice] * y
            rows.append(total)
        return torch.stack(rows)

    def _matrix(self, weight: Tensor, lora: LoraPair | None, expert: int) -> Tensor:
        matrix = weight[expert] if self.shape.is_transposed else weight[expert].T
        if lora is None:
            return matrix
        rank = len(lora.a) // EXPERTS
        a = lora.a[expert * rank : (expert + 1) * rank]
        b = lora.b[:, expert::EXPERTS]
        return matrix + lora.scale * (b @ a).T

    @property
    def leaves(self) -> list[Tensor]:
        pairs = [pair for pair in (self.up_lora, self.down_lora) if pair]
        biases = [bias for bias in self.biases if bias is not None]
        return [self.x, self.weights, self.up, self.down, *biases, *(t for pair in pairs for t in (pair.a, pair.b))]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"transposed": True, "bias": True, "interleaved": True},
    {"gated": False},
    {"up_rank": 0},
    {"down_rank": 0, "bias": True},
    {"up_rank": 0, "down_rank": 0, "transposed": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_gradients_are_those_of_a_naive_loop(layout: dict[str, Any]) -> None:
    case = Case(**layout)
    found, expected = case.computed(), case.by_loop()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(found)
    own, theirs = (torch.autograd.grad(y, case.leaves, upstream) for y in (found, expected))
    for mine, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_an_activation_that_goes_through_fp32_stays_in_fp64() -> None:
    """The KeepFloat64 of the whole pass has no effect inside an operator."""
    case = Case()
    case.module = ExpertsInFp32(has_gate=True, interleaved=False)
    with KeepFloat64():
        found, expected = case.computed(), case.by_loop()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        own, theirs = (torch.autograd.grad(y.sum(), case.up)[0] for y in (found, expected))
    torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def test_rows_do_not_influence_each_other() -> None:
    """So packed conversations are computed as single ones."""
    case = Case()
    whole = case.computed()
    x, index, weights = case.x, case.index, case.weights
    for part in (slice(0, 5), slice(5, 6), slice(6, None)):
        case.x, case.index, case.weights = x[part], index[part], weights[part]  # type: ignore[assignment]
        torch.testing.assert_close(case.computed(), whole[part], rtol=1e-12, atol=1e-12)


def test_16_bit_experts_with_fp32_adapters() -> None:
    """Inputs in bf16, adapters in fp32, as LoRA trains: gradients have the adapters' dtype, and are close to fp64's."""
    exact, case = Case(), Case(dtype=torch.float32)
    for name in ("x", "up", "down"):
        setattr(case, name, nn.Parameter(getattr(case, name).detach().bfloat16()))
    exact.index = case.index
    for name in ("x", "up", "down", "weights"):
        getattr(exact, name).data.copy_(getattr(case, name))
    for pair in ("up_lora", "down_lora"):
        for mine, other in zip(getattr(exact, pair)[:2], getattr(case, pair)[:2], strict=True):
            mine.data.copy_(other)
    found, expected = case.computed(), exact.by_loop()
    assert found.dtype == torch.bfloat16
    upstream = torch.randn(found.shape).bfloat16()
    own = torch.autograd.grad(found, case.leaves, upstream)
    theirs = torch.autograd.grad(expected, exact.leaves, upstream.double())
    for mine, leaf, other in zip((found, *own), (found, *case.leaves), (expected, *theirs), strict=True):
        assert mine.dtype == leaf.dtype
        assert ((mine - other).norm() / other.norm()).item() < 0.02


def test_the_order_keeps_tokens_of_an_expert_in_order() -> None:
    index = torch.tensor([[2, 0], [0, 3], [2, 0]])
    rows = sort_by_expert(index, 5)
    assert rows.order.tolist() == [1, 2, 5, 0, 4, 3]
    assert rows.ends.tolist() == [3, 3, 5, 6, 6]
    assert rows.order[rows.inverse.long()].tolist() == list(range(6))


def test_one_compilation_serves_all_layers_of_a_kind() -> None:
    first, second = PlainExperts(True, False), PlainExperts(True, False)
    assert register_activation(first) == register_activation(second)
    assert register_activation(PlainExperts(True, True)) != register_activation(first)


def test_no_weight_outlives_its_model() -> None:
    module = tiny_model("mixtral", torch.float32).get_submodule("model.layers.0.mlp.experts")
    register_activation(module)
    weight = weakref.ref(module.gate_up_proj)
    del module
    gc.collect()
    assert weight() is None


def noisy(model: nn.Module) -> nn.Module:
    """Weights with which experts and adapters make a difference."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or parameter.ndim == 3:
            nn.init.normal_(parameter, std=0.3)
        parameter.data = parameter.data.double()
    return model


FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
MORE_FAMILIES = [
    "mixtral",
    "glm4_moe",
    "olmoe",
    "granitemoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "nemotron_h",
]


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_FAMILIES)])
def test_a_model_with_adapters_computes_what_transformers_and_peft_compute(kind: str) -> None:
    """peft adds B·A to the stacked weights and transformers multiplies expert by expert."""
    model = tiny_model(kind)
    targets: Any = "all-linear" if kind != "nemotron_h" else ["q_proj", "up_proj", "down_proj"]
    method = {"method": "rslora"} if kind == "gpt_oss" else {}
    plain = noisy(add_adapter(model, AdapterConfig(rank=3, alpha=5, targets=targets, **method), seed=0))  # type: ignore[arg-type]
    own = copy.deepcopy(plain)
    assert install_experts(unwrap_peft(own)) > 0
    assert not any(".gate.lora" in name or ".router.lora" in name for name, _ in own.named_parameters())
    ids = torch.randint(3, 90, (2, 9))
    results = []
    for each in (plain, own):
        logits = each(input_ids=ids, use_cache=False).logits
        logits.double().log_softmax(-1)[..., 3].sum().backward()
        results.append([logits, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert sum(".experts." in name for name, p in own.named_parameters() if p.requires_grad) > 0
    bound = 1e-5 if kind == "nemotron_h" else 1e-9  # its recurrence is computed in fp32
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_peft_computes_where_adapters_are_disabled_or_merged() -> None:
    model = noisy(add_adapter(tiny_model("qwen3_moe"), AdapterConfig(rank=2), seed=0))
    install_experts(unwrap_peft(model))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():  # type: ignore[operator]
            without = model(input_ids=ids).logits
        merged = model.merge_and_unload()(input_ids=ids).logits  # type: ignore[operator]
    assert (adapted - without).abs().max() > 1e-3
    torch.testing.assert_close(merged, adapted, rtol=1e-9, atol=1e-9)


def test_full_fine_tuning_gives_every_weight_the_gradient_of_transformers() -> None:
    plain = noisy(tiny_model("gpt_oss"))
    own = copy.deepcopy(plain)
    install_experts(own)
    ids = torch.arange(3, 20)[None]
    for each in (plain, own):
        each(input_ids=ids).logits.double().log_softmax(-1)[..., 3].sum().backward()
    for (name, mine), other in zip(own.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_block_compiles_to_one_graph_for_all_layers() -> None:
    """With router and adapters, under autocast as training is; what is compiled gives the same bits."""
    from torch._dynamo.testing import CompileCounterWithBackend

    plain: Any = unwrap_peft(noisy(add_adapter(tiny_model("qwen3_moe", torch.float32), AdapterConfig(rank=2), seed=0)))
    install_experts(plain.float())
    compiled = copy.deepcopy(plain)
    backend = CompileCounterWithBackend("aot_eager")
    for layer in compiled.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend=backend, fullgraph=True, dynamic=False)
    results = []
    for each in (plain, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            logits = each(input_ids=torch.arange(3, 30)[None], use_cache=False).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        results.append([logits, *(p.grad for p in each.parameters() if p.requires_grad)])
    assert backend.frame_count == 1
    assert all(torch.equal(own, other) for own, other in zip(*results, strict=True))
