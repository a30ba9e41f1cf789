"""From a configuration with several sources to its plan: shares, and what a change of them leaves alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.config import Config
from whet.data.plan.planner import Plan
from whet.run.data import RunData, make_plan, prepare_data


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """planned({source settings}, {source settings}, fraction) → data and plan; ten and twenty conversations."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    for name, count in (("a", 10), ("b", 20)):
        talks = [[("user", f"{name} {i // 2}?"), ("assistant", f"{i // 2}!")] for i in range(count)]  # each one twice
        lines = [
            json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]}) + "\n" for talk in talks
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def plan(first: dict[str, Any], second: dict[str, Any], **data: Any) -> tuple[RunData, Plan]:
        sources = [{"path": str(tmp_path / f"{name}.jsonl"), **own} for name, own in (("a", first), ("b", second))]
        config = Config.model_validate(
            {
                "model": {"path": "builtin:tiny"},
                "data": {"sources": sources, "max_length": 128, **data},
                "train": {"epochs": 2.0, "batch": {"conversations": 4}},
            }
        )
        made = prepare_data(config)
        return made, make_plan(config, made)

    return plan


def shares(data: RunData, plan: Plan) -> dict[int, int]:
    return dict(Counter(data.train.store.sources[plan.documents].tolist()))


def test_shares_change_the_plan_and_nothing_else(planned: Any) -> None:
    plain, plan = planned({}, {})
    assert shares(plain, plan) == {0: 20, 1: 40}
    assert set(Counter(plan.documents.tolist()).values()) == {2}
    often, plan = planned({"epochs": 3.0}, {"epochs": 0.5})
    assert shares(often, plan) == {0: 60, 1: 20}
    assert set(Counter(plan.documents.tolist()).values()) == {6, 1}
    assert plan.stats.per_epoch == 40
    weighted, plan = planned({"weight": 1.0}, {"weight": 4.0})
    assert shares(weighted, plan) == {0: 12, 1: 48}
    assert {plain.train.store.folder} == {often.train.store.folder, weighted.train.store.folder}
    assert often.train.reused
    assert weighted.train.reused


def test_what_is_held_out_is_not_trained_on_not_even_as_a_copy(planned: Any) -> None:
    data, plan = planned({"weight": 1.0}, {"weight": 1.0}, validation={"fraction": 0.2})
    store = data.train.store
    assert len(data.validation_documents) == 6
    trained, held = np.unique(plan.documents), data.validation_documents
    assert not set(store.hashes[trained].tolist()) & set(store.hashes[held].tolist())
    assert {tuple(store.ids(int(i))) for i in held}.isdisjoint({tuple(store.ids(int(i))) for i in trained})
    assert len(trained) == 24
