"""The training panel: right in any window, with any numbers, and nothing of it in a log."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from whet.core.display import sparkline
from whet.training.panel import LossCurve, TrainingPanel

ANY = st.none() | st.floats(allow_nan=True, allow_infinity=True)
LINE: dict[str, Any] = {
    "loss": 1.5, "lr": 1e-4, "grad_norm": 0.7, "tokens_per_s": 12345.6, "mfu": 0.41, "peak_gib": 61.24, "epoch": 0.5,
    "step_s": 1.0, "data_s": 0.2,
}  # fmt: skip


def shown(panel: TrainingPanel, width: int, **options: Any) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None, **options).print(panel)
    return file.getvalue().rstrip("\n").split("\n")


@given(st.lists(ANY, max_size=200), st.integers(0, 60))
def test_a_sparkline_fits_and_has_gaps_where_nothing_was_measured(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    if len(values) <= width:
        finite = [value is not None and math.isfinite(value) for value in values]
        assert [sign != " " for sign in line] == finite


def test_a_sparkline_of_the_largest_floats() -> None:
    assert sparkline([1.7e308, -1.7e308, 1.7e308, 1.7e308], 4) == "█▁██"
    assert len(sparkline([1.7e308, 1.7e308, -1.7e308], 2)) == 2


def test_a_sparkline_falls_with_the_loss() -> None:
    assert sparkline([8.0, 6.0, 4.0, 2.0, 1.0], 5) == "█▆▄▂▁"
    assert sparkline([1.0, 2.0], 2, ascii_only=True) == "_#"
    assert sparkline([3.0, 3.0], 9) == "▁▁"


@given(st.lists(ANY, min_size=1, max_size=40), st.integers(1, 120))
def test_the_panel_fits_any_window(losses: list[float | None], width: int) -> None:
    panel = TrainingPanel()
    for loss in losses:
        panel.update(LINE | {"loss": loss, "mean_loss": loss})
    assert all(len(line) <= width for line in shown(panel, width))


def test_the_panel_shows_what_was_measured_and_nothing_else() -> None:
    panel = TrainingPanel()
    assert shown(panel, 100) == [""]
    panel.update(LINE | {"mean_loss": 1.5})
    assert shown(panel, 100) == [
        "mean loss 1.5000 ▁  lr 1.00e-04  norm 0.7",
        "12,346 tokens/s · MFU 41.0% · 61.2 GiB · epoch 0.50 · data wait 20%",
    ]
    panel.update({"loss": None, "mean_loss": None, "tokens_per_s": None, "mfu": None, "skipped": "nonfinite"})
    assert shown(panel, 100) == ["loss not measured ▁   skipped: nonfinite"]


def test_a_long_run_keeps_a_short_curve() -> None:
    curve = LossCurve()
    for step in range(10_000):
        curve.add(10_000.0 - step)
    assert len(curve.values) < 1100
    known = [value for value in curve.values if value is not None]
    assert known == sorted(known, reverse=True)
    assert known[0] == pytest.approx(10_000, rel=0.01)
