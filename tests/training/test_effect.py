"""The effect of a run: gradients, movement and the size of updates, against what is computed from all weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from tiny_architectures import tiny_model
from whet.core.distributed import Ranks
from whet.model.config import AdapterConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.weight_effect import effect_summary, effect_warnings, relative_change
from whet.training.config import OptimizerConfig
from whet.training.effect_meter import EffectMeter, sketch
from whet.training.optimizers.factory import build_optimizer

ALONE = Ranks(0, 1, torch.device("cpu"))
TOKENS = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, frozen: str = "none", **options: Any) -> tuple[EffectMeter, Any, nn.Module]:
    """Train for three steps; weights whose name contains `frozen` get no gradient."""
    root = LossModel(unwrap_peft(model))
    for name, weight in root.named_parameters():
        if frozen in name:
            weight.register_hook(torch.zeros_like)
    meter = EffectMeter(root, ALONE)
    optimizer = build_optimizer(root, OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.0, **options}), seed=0)
    for _ in range(3):
        optimizer.zero_grad()
        root.language_model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    return meter, optimizer, root.language_model


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 3), columns=st.integers(0, 5000), seed=st.integers(0, 100))
def test_a_sketch_is_linear_and_keeps_norms(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight, update = torch.randn(rows, columns), 1e-3 * torch.randn(rows, columns)
    difference = sketch(weight.double() + update.double()) - sketch(weight.double())
    torch.testing.assert_close(difference, sketch(update), rtol=0, atol=1e-12)
    if update.numel() > 100:
        assert difference.norm() == pytest.approx(update.norm().item(), rel=0.2)


@pytest.mark.parametrize("place", [0, 1, 299_999])
def test_a_sketch_sees_one_element_and_correlated_updates(place: int) -> None:
    weight = torch.randn(1, 300_000, generator=torch.Generator().manual_seed(0))
    changed = weight.clone()
    changed[0, place] = torch.nextafter(changed[0, place], torch.tensor(9.0))
    assert (sketch(changed) - sketch(weight)).norm() > 0
    assert sketch(torch.ones(1, 300_000)).norm() == pytest.approx(300_000**0.5, rel=0.1)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_every_weight_of_full_fine_tuning(name: str) -> None:
    model = tiny_model("llama", torch.float32)
    before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
    meter, optimizer, model = trained(model, frozen="layers.1.mlp.up_proj", name=name)
    effects = {each.module: each for each in meter.measure(optimizer)}
    assert list(effects) == list(before)
    unmoved = effects.pop("model.layers.1.mlp.up_proj.weight")
    assert (unmoved.gradient, unmoved.moved, unmoved.change) == (False, False, 0)
    for key, effect in effects.items():
        assert effect.gradient
        assert effect.moved
        exact = (model.get_parameter(key).detach() - before[key]).norm() / before[key].norm()
        assert effect.change == pytest.approx(exact.item(), rel=0.2)
    [warning] = effect_warnings([*effects.values(), unmoved])
    assert f"1 of {len(before)} trained weights got no gradient" in warning
    assert "model.layers.1.mlp.up_proj.weight" in warning


def test_adapters_that_the_model_reads_past_have_no_gradient() -> None:
    model = add_adapter(tiny_model("mamba", torch.float32), AdapterConfig(rank=2, targets=["in_proj", "dt_proj"]), 0)
    root = LossModel(unwrap_peft(model))
    meter = EffectMeter(root, ALONE)
    root.language_model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert meter.without_gradient() == [f"backbone.layers.{layer}.mixer.dt_proj.weight" for layer in (0, 1)]


def test_a_learning_rate_that_rounding_swallows() -> None:
    meter, optimizer, _ = trained(tiny_model("llama", torch.float32), lr=1e-30)
    effects = meter.measure(optimizer)
    assert all(each.gradient and each.moved is False for each in effects)
    assert "got a gradient and did not move" in effect_warnings(effects)[0]


@pytest.mark.parametrize("settings", [{}, {"method": "dora"}, {"also_train": ["norm"], "targets": ["embed_tokens"]}])
def test_adapters(settings: dict[str, Any]) -> None:
    adapted: Any = add_adapter(tiny_model("llama", torch.float32), AdapterConfig(rank=4, **settings), seed=0)
    before = dict(tiny_model("llama", torch.float32).named_parameters())
    meter, optimizer, _ = trained(adapted)
    effects = meter.measure(optimizer)
    after = dict(adapted.merge_and_unload().named_parameters())
    assert len(effects) == (14 if "targets" not in settings else 6)
    for each in effects:
        exact = (after[each.module] - before[each.module]).norm() / before[each.module].norm()
        assert each.change == pytest.approx(exact.item(), rel=1e-3)
        assert each.gradient
        assert each.moved
    assert effect_warnings(effects) == []


@pytest.mark.parametrize("adapter", [True, False])
def test_experts_without_a_token_are_listed(adapter: bool) -> None:
    model: Any = tiny_model("qwen3_moe", torch.float32)
    for layer in model.model.layers:  # the router prefers 0 and 1, and sees no difference between tokens
        layer.mlp.gate.weight.data = torch.zeros_like(layer.mlp.gate.weight)
        layer.mlp.gate.register_forward_hook(_choose_first_two)
    model = add_adapter(model, AdapterConfig(rank=2), seed=0) if adapter else model
    meter, optimizer, _ = trained(model, weight_decay=0.1)
    effects = [each for each in meter.measure(optimizer) if each.experts]
    assert len(effects) == 4
    assert [(each.experts, each.untouched_experts, each.experts_touched) for each in effects] == [(4, [2, 3], 0.5)] * 4
    assert effect_summary(effects)["untouched_experts"] == 8
    assert "experts got no token" in effect_warnings(effects)[0]
    assert "(2, 3)" in effect_warnings(effects)[0]


def _choose_first_two(router: nn.Module, inputs: Any, output: Any) -> Any:
    *rest, indices = output
    return (*rest, torch.arange(indices.shape[-1]).expand_as(indices))


def test_a_run_writes_its_effect(tiny_run: Path) -> None:
    effect = json.loads((tiny_run / "effect.json").read_text())
    base = load_file(Path(builtin_folder("builtin:tiny")) / "model.safetensors")
    merged = load_file(tiny_run / "exports/merged/model.safetensors")
    assert {each["module"] for each in effect["modules"]} == set(merged)
    assert effect["moved"] == effect["weights"] == len(merged)
    assert (effect["without_gradient"], effect["unmoved"]) == ([], [])
    certificate = json.loads((tiny_run / "exports/merged/certificate.json").read_text())
    exact = {each["module"]: each for each in certificate["effect"]["modules"]}
    for each in effect["modules"]:
        old, new = base[each["module"]].double(), merged[each["module"]].double()
        assert exact[each["module"]]["change"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-6)
        assert each["change"] == pytest.approx(exact[each["module"]]["change"], rel=0.2)
        assert exact[each["module"]]["gradient"] is True


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_weight_with_numbers_that_are_not_finite_has_no_relative_change(number: float) -> None:
    """JSON has none of them: effect.json could not be written, and the run failed at its end."""
    assert relative_change(number, 1.0) is None
    assert relative_change(1.0, number) is None
    assert relative_change(4.0, 16.0) == 0.5
