"""The layout does not matter: losses, also of each conversation, gradient norms and final weights are those of the
plainest loop there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import (
    ALL,
    ALONE,
    CHOICES,
    CLIP,
    FEW_STEPS,
    STEPS,
    Layout,
    Trace,
    in_pairs,
    layouts_of,
    make_store,
    plan_of,
    run_naively,
    run_steps,
)

from several_processes import on_gpu, torchrun
from whet.data.prepare.store import Store


@pytest.fixture(scope="module")
def store() -> Store:
    return make_store()


@pytest.fixture(scope="module")
def naive(store: Store) -> Trace:
    return run_naively(store)


@pytest.fixture(scope="module")
def few_naive(store: Store) -> Trace:
    return run_naively(store, steps=FEW_STEPS)


def assert_equal(found: Trace, naive: Trace) -> None:
    """fp64: 1e-9 over thirty steps."""
    assert len(found.losses) == len(naive.losses)
    assert found.losses == pytest.approx(naive.losses, rel=1e-9)
    assert found.norms == pytest.approx(naive.norms, rel=1e-9)
    assert found.conversations == pytest.approx(naive.conversations, rel=1e-8)
    for name, weight in naive.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-9, atol=1e-9)


def test_the_comparison_is_worth_something(store: Store, naive: Trace) -> None:
    """Clipping takes part, the last batch is incomplete, packing packs, and the model learns."""
    assert len(naive.losses) == STEPS
    assert max(naive.norms) > CLIP
    assert naive.losses[-1] < naive.losses[0] - 1
    for packing in CHOICES["packing"]:
        plan = plan_of(store, packing)
        assert [len(plan.documents_of(step)) for step in range(len(plan))] == [5] * 29 + [3]
        assert (len(plan.rows) - 1 < len(plan.documents)) == (packing != "none")


def test_two_choices_of_any_kind_meet() -> None:
    chosen = LAYOUTS
    assert {(layout.packing, layout.micro_rows) for layout in chosen} == {
        (packing, rows) for packing in CHOICES["packing"] for rows in CHOICES["micro_rows"]
    }
    assert len({(layout.attention, layout.padded) for layout in chosen}) == 4
    assert len({(layout.recompute, layout.chunk_rows) for layout in chosen}) == 9


LAYOUTS = in_pairs(CHOICES)
"""All steps for one of them, in `make test-all` for one of each packing; few for the others."""
LONG = [next(layout for layout in LAYOUTS if layout.packing == packing) for packing in CHOICES["packing"]][
    : None if ALL else 1
]


@pytest.mark.parametrize("layout", LONG, ids=str)
def test_no_layout_of_one_process_matters(store: Store, naive: Trace, layout: Layout) -> None:
    assert_equal(run_steps(store, layout), naive)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in LONG], ids=str)
def test_no_pair_of_choices_matters(store: Store, few_naive: Trace, layout: Layout) -> None:
    assert_equal(run_steps(store, replace(layout, steps=FEW_STEPS)), few_naive)


def plain_of(layout: Layout) -> Layout:
    """What a layout is compared with, by one process."""
    adapter = "none" if layout.adapter == "none" else "peft"
    return Layout(
        optimizer=layout.optimizer, adapter=adapter, family=layout.family, steps=layout.steps,
        router_aux_loss=layout.router_aux_loss,
    )  # fmt: skip


def run_plainly(store: Store, plain: Layout, device: torch.device) -> Trace:
    if plain.optimizer != "adamw" or plain.adapter != "none":
        return run_steps(store, plain, ranks=replace(ALONE, device=device))
    return run_naively(store, plain.family, plain.steps, plain.router_aux_loss, device)


@pytest.mark.parametrize(
    ("world", "device"),
    [pytest.param(2, "cpu", id="2"), pytest.param(4, "cpu", id="4"), on_gpu(2, "cuda"), on_gpu(4, "cuda")],
)
def test_neither_the_number_of_processes_matters_nor_what_they_shard(
    store: Store, naive: Trace, tmp_path: Path, world: int, device: str
) -> None:
    """Compared with one process on the same device: transformers computes rotary tables in fp32, whose last bit differs
    between a CPU and a GPU, and AdamW enlarges that where a gradient is almost zero (seen: 1e-7)."""
    done = torchrun(world, Path(__file__).with_name("layouts.py"), tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    alone = {Layout(): naive} if device == "cpu" else {}
    for number, layout in enumerate(layouts_of(world)):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        weights = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        if (plain := plain_of(layout)) not in alone:
            alone[plain] = run_plainly(store, plain, torch.device(device))
        trace = Trace(found["losses"], found["norms"], weights, conversations=tuple(found["conversations"]))
        assert_equal(trace, alone[plain])
        assert found["apart"] == []
    assert json.loads((tmp_path / "noisy.json").read_text()) == []
    ends = json.loads((tmp_path / "ends.json").read_text())
    assert ends == ends[:1] * world, "random rounding moved the weights of the ranks apart"


@pytest.mark.gpu
def test_losses_and_norms_of_a_gpu_are_those_of_a_cpu(store: Store, few_naive: Trace) -> None:
    ranks = replace(ALONE, device=torch.device("cuda"))
    for found in (
        run_naively(store, steps=FEW_STEPS, device=ranks.device),
        run_steps(store, Layout(steps=FEW_STEPS), ranks=ranks),
    ):
        assert found.losses == pytest.approx(few_naive.losses, rel=1e-9)
        assert found.norms == pytest.approx(few_naive.norms, rel=1e-9)
