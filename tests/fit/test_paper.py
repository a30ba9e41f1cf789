"""`whet fit --plan`: hardware by name, layouts, and what is said about them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.cli.preflight.fit import _fit_on_paper
from whet.config import Config
from whet.core.errors import WhetError
from whet.fit.estimate import GIB
from whet.fit.hardware import CARDS, Hardware, find_card, parse_hardware
from whet.fit.paper import DataFacts, PaperEstimate, _smaller_settings, _with_settings, estimate_on_paper
from whet.fit.paper_text import as_json, published_speeds, reasons, verdict

TINY = Path(__file__).parents[1] / "fixtures" / "tiny.yaml"


def test_hardware_is_nodes_times_devices_times_card() -> None:
    hardware = parse_hardware("24x8xMI250X")
    assert (hardware.nodes, hardware.devices, hardware.world, hardware.card.name) == (24, 8, 192, "MI250X")
    assert parse_hardware(" 1 × 8 × h200 ") == parse_hardware("1x8xH200")
    assert parse_hardware("1x4xRTX 4090").card.name == "RTX4090"
    assert parse_hardware("1X1Xa100-80GB").card.name == "A100"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH200", "such as --plan 1x8xH200"),
        ("H200", "such as --plan 1x1xH200"),
        ("", "NODESxDEVICESxCARD"),
        ("1x8x", "NODESxDEVICESxCARD"),
        ("-1x8xH200", "NODESxDEVICESxCARD"),
        ("1.5x8xH200", "NODESxDEVICESxCARD"),
        ("0x8xH200", "0 nodes. Give at least 1"),
        ("2x0xH200", "0 devices. Give at least 1"),
        ("1x8xH20", "whet does not know the card 'H20'. Known cards: H200"),
        ("1x8xx", "whet does not know the card 'x'"),
        ("999999999x8xH200", "more than 1,000,000 devices"),
    ],
)
def test_other_hardware_is_refused_with_a_remedy(text: str, says: str) -> None:
    with pytest.raises(WhetError, match=r"^--plan: ") as error:
        parse_hardware(text)
    assert says in str(error.value)


@given(st.text("0123456789x×* H.-L4S\n", max_size=20))
def test_any_text_is_hardware_or_an_error(text: str) -> None:
    try:
        hardware = parse_hardware(text)
    except WhetError:
        return
    assert hardware.world >= 1
    assert hardware.card in CARDS


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_has_its_rates(card: Any) -> None:
    assert find_card(card.name) is card
    assert card.peak("bf16")
    assert card.peak("fp32")
    assert Hardware(1, 1, card).usable_bytes > GIB


def recipe(**sections: Any) -> Config:
    """A tiny run whose settings leave one layout, unless a test sets others: each trace takes a moment."""
    parts: dict[str, Any] = {
        "run": {"name": "x", "dir": "unused"}, "model": {"path": "builtin:tiny"},
        "data": {"sources": [{"path": "builtin:orders"}], "max_length": 256},
        "train": {"batch": {"rows": 16}, "micro_rows": 2}, "parallel": {"recompute": "none"},
    }  # fmt: skip
    for name, section in sections.items():
        parts[name] = {**parts.get(name, {}), **section} if isinstance(section, dict) else section
    return Config.model_validate(parts)


def facts(rows: int = 16, length: int = 256) -> DataFacts:
    return DataFacts(100, rows, rows * length * 0.9, length * 0.5, length, np.full(4, length // 2), 2)


def estimate(config: Config, hardware: Hardware, known: DataFacts | None = None) -> PaperEstimate:
    found = estimate_on_paper(config, hardware, known or facts())
    json.dumps(as_json(config, found))
    return found


@pytest.fixture(scope="module")
def on_eight() -> PaperEstimate:
    return estimate(recipe(), parse_hardware("1x8xH200"))


def test_what_fits_is_not_sharded(on_eight: PaperEstimate) -> None:
    best, config = on_eight.best, recipe()
    assert best is not None
    assert (best.shard, best.recompute, best.micro_rows, best.micro_batches) == (1, "none", 2, 1)
    assert [each.shard for each in on_eight.candidates] == [1, 2, 4, 8]
    assert "nothing needs to be sharded" in " ".join(reasons(config, on_eight))
    assert verdict(config, on_eight)[1] == "fits"
    assert best.settings(config) == {}
    assert on_eight.hours == pytest.approx(100 * best.step.total / 3600)


def test_too_large_a_model_is_sharded_with_its_reason() -> None:
    """SmolLM2's shape on cards with 1.17 GiB for tensors."""
    config, card = recipe(model={"path": "random:smollm-135m"}, train={"precision": "bf16"}), find_card("H200")
    sharded = estimate(config, Hardware(1, 8, replace(card, memory=int((1.5 + 1.17) * GIB / 0.92))))
    assert sharded.candidates[0].memory.total > sharded.unsharded > 2 * GIB
    assert sharded.best is not None
    assert sharded.best.settings(config) == {"parallel.shard": 4}
    assert "(parallel.shard=4, inside a node): with 1/2 on each, a device would need 1.4 GiB" in " ".join(
        reasons(config, sharded)
    )


def test_what_does_not_fit_is_said_with_remedies(on_eight: PaperEstimate) -> None:
    config, refused = recipe(), replace(on_eight, best=None)
    sign, title, text = verdict(config, refused)
    assert (sign, title) == ("✗", "does not fit")
    assert text.endswith("Use more devices, or cards with more memory")
    assert as_json(config, refused)["fits"] is False
    ways = [({"adapter.rank": 16, "quantize": "nf4"}, on_eight.smallest)]
    assert "adapter.rank=16 quantize=nf4 (0.1 GiB" in verdict(config, replace(refused, proposals=tuple(ways)))[2]


def test_smaller_settings_are_those_of_valid_configurations() -> None:
    config = recipe()
    tried = list(_smaller_settings(config))
    assert [list(settings.values()) for settings in tried] == [
        ["bf16", "adamw16bit"],
        ["bf16", "adamw8bit"],
        [16],
        [16, "nf4"],
    ]
    for settings in tried:
        smaller = _with_settings(config, settings)
        assert Config.model_validate(smaller.model_dump()) == smaller


def test_settings_of_the_configuration_are_kept() -> None:
    config = recipe(parallel={"shard": 4, "recompute": "full"})
    found = estimate(config, parse_hardware("1x8xH200"))
    assert {(each.shard, each.recompute, each.micro_rows) for each in found.candidates} == {(4, "full", 2)}


def test_a_mesh_that_does_not_fit_the_devices_is_refused() -> None:
    with pytest.raises(WhetError, match=r"parallel\.shard=3 does not fit 8 processes"):
        estimate(recipe(parallel={"shard": 3}), parse_hardware("1x8xH200"))


def test_a_precision_that_the_card_lacks_is_refused() -> None:
    with pytest.raises(WhetError, match=r"train\.precision: fp8: whet has no speed for it on MI250X"):
        estimate(recipe(train={"precision": "fp8"}), parse_hardware("1x8xMI250X"))


def test_what_the_numbers_do_not_know_is_said(on_eight: PaperEstimate) -> None:
    config = recipe()
    text = " ".join(reasons(config, replace(on_eight, hardware=parse_hardware("3x8xMI250X"))))
    assert "16 rows for 24 devices, so 8 idle" in text
    assert "not measured by whet" in text
    assert "has not been measured on several GPUs" in " ".join(reasons(config, on_eight))
    assert "measured" not in " ".join(reasons(config, replace(on_eight, hardware=parse_hardware("1x1xH200"))))


def test_published_speeds_of_like_models_are_found() -> None:
    tools = {each.tool for each in published_speeds(recipe(adapter={"rank": 16}), 8 * 10**9)}
    assert {"whet", "TRL 1.16 + Liger", "NeMo Automodel"} <= tools
    assert published_speeds(recipe(), 3 * 10**9) == []


def test_the_command_estimates_for_its_own_data() -> None:
    result = _fit_on_paper(TINY, ["train.micro_rows=1", "parallel.recompute=none"], "1x1xH200")
    assert result["fits"]
    assert result["exit_code"] == 0
    assert result["steps"] == 12
    assert result["hours"] > 0
    with pytest.raises(WhetError, match="such as --plan 1x8xH200"):
        _fit_on_paper(Path("no.yaml"), [], "8xH200")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "in_16_bits", "where", "less"),
    [("1x8xH200", True, "parallel.shard=8, inside a node", "1/4"),
     ("2x8xH200", False, "parallel.shard=16, over 2 nodes", "1/8")],
)  # fmt: skip
def test_70b_is_sharded_over_all_devices(plan: str, in_16_bits: bool, where: str, less: str) -> None:
    hardware = parse_hardware(plan)
    train: dict[str, Any] = {"precision": "bf16", "batch": {"rows": hardware.world}, "micro_rows": 1}
    config = recipe(
        model={"path": "random:llama-70b", "dtype": "bf16" if in_16_bits else "auto"}, data={"max_length": 4096},
        train=train | ({"optimizer": {"name": "adamw16bit"}} if in_16_bits else {}), parallel={"recompute": "full"},
    )  # fmt: skip
    found = estimate(config, hardware, facts(rows=hardware.world, length=4096))
    assert found.unsharded / GIB == pytest.approx(4 * (2 if in_16_bits else 4) * 70.55e9 / GIB, rel=0.01)
    assert found.best is not None, verdict(config, found)
    assert found.best.shard == hardware.world
    assert verdict(config, found)[1] == "fits"
    assert (
        f"each device holds 1/{hardware.world} of it ({where}): with {less} on each, a device would need "
        in " ".join(reasons(config, found))
    )
