"""Smoothing, downsampling, axes and SVG."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.report.charts import (
    ChartLine,
    downsample,
    render_chart,
    smooth,
    smoothing_beta,
    step_axis,
    value_axis,
)
from whet.report.formatting import finite_number, format_count, format_seconds, format_share

VALUES = st.floats(-1e6, 1e6)
ANY = st.floats(-1e300, 1e300)


@given(st.lists(VALUES, min_size=1, max_size=300), st.floats(0, 0.999))
def test_smoothing_is_a_mean_weighted_by_distance(values: list[float], beta: float) -> None:
    places = np.arange(len(values))
    weights = beta ** np.abs(places[:, None] - places)
    weights[places > 2 * places[:, None]] = 0  # near the start: as many after as before
    assert smooth(values, beta) == pytest.approx(weights @ values / weights.sum(axis=1), rel=1e-6, abs=1e-6)


def test_smoothing_does_not_lag() -> None:
    line = np.arange(1000.0)
    assert smooth(line, 0.9)[:-300] == pytest.approx(line[:-300])


@given(VALUES, st.integers(1, 50))
def test_smoothing_a_constant_changes_nothing(value: float, count: int) -> None:
    assert smooth([value] * count, 0.9) == pytest.approx([value] * count)


def test_a_gap_stays_a_gap_and_adds_no_data() -> None:
    with_gap, without = smooth([4.0, None, 2.0], 0.9), smooth([4.0, 2.0], 0.9)
    assert with_gap == pytest.approx([without[0], np.nan, without[1]], nan_ok=True)


def test_longer_runs_are_smoothed_more() -> None:
    assert [smoothing_beta(n) for n in (0, 20, 40, 10**6)] == pytest.approx([0, 0, 0.5, 0.98])


@given(st.lists(st.one_of(st.none(), VALUES), max_size=300), st.integers(6, 60))
def test_downsampling_keeps_ends_extremes_and_gaps(values: list[float | None], limit: int) -> None:
    kept = downsample(values, limit)
    assert kept == sorted(set(kept))
    assert len(kept) <= limit + 5
    known = [value for value in values if value is not None]
    left = [values[i] for i in kept]
    assert (None in left) == (None in values)
    if known:
        assert {min(known), max(known)} <= set(left)
        assert kept[0] == 0
        assert kept[-1] == len(values) - 1


@given(st.lists(ANY, min_size=1, max_size=20))
def test_any_values_lie_on_their_axis(values: list[float]) -> None:
    axis = value_axis(values)
    assert len(axis.ticks) == len(axis.texts()) <= 9
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)


@given(st.lists(st.floats(1e-6, 1e5), min_size=1))
def test_tick_labels_are_distinct_and_accurate(values: list[float]) -> None:
    axis = value_axis(values)
    assert len(set(axis.texts())) == len(axis.ticks) >= 2
    apart = axis.ticks[1] - axis.ticks[0]
    assert all(
        abs(float(text.replace(",", "")) - t) < 0.01 * apart for text, t in zip(axis.texts(), axis.ticks, strict=True)
    )


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_step_ticks_are_integers_and_include_the_ends(a: int, b: int) -> None:
    axis = step_axis([a, b])
    assert axis.ticks[0] == min(a, b)
    assert axis.ticks[-1] == max(a, b)
    assert all(tick == int(tick) for tick in axis.ticks)
    assert len(axis.ticks) <= 8


@given(st.lists(st.tuples(st.integers(0, 1000), st.one_of(st.none(), ANY)), max_size=20))
def test_any_series_can_be_drawn(points: list[tuple[int, float | None]]) -> None:
    html = render_chart("t", [ChartLine("a", points, "main"), ChartLine("b", points, "raw", joined=False)])
    assert not re.search(r"\b(nan|inf)\b", html)


def test_a_missing_loss_breaks_the_line() -> None:
    html = render_chart("loss", [ChartLine("loss", [(1, 3.0), (2, 2.0), (3, None), (4, 1.0), (5, 1.0)], "main")])
    (path,) = re.findall(r'<path class="main" d="([^"]*)"', html)
    assert (path.count("M"), path.count("L")) == (2, 2)
    data = json.loads(html.split('application/json">')[1].split("</script>")[0])
    assert data["series"][0]["values"] == [3.0, 2.0, None, 1.0, 1.0]


def test_a_name_cannot_end_the_script() -> None:
    html = render_chart("t", [ChartLine("</script><b>", [(1, 1.0)], "main")])
    assert html.count("</script>") == 1


def test_a_chart_without_values() -> None:
    assert "not measured" in render_chart("loss", [ChartLine("loss", [(1, None)], "main")])


def test_only_exactly_1_is_100_percent() -> None:
    shares = (None, 0.0, 0.0001, 0.5, 0.967, 0.9999, 1.0)
    assert [format_share(s) for s in shares] == ["–", "0%", "<0.1%", "50%", "96.7%", ">99.9%", "100%"]


def test_counts_and_durations() -> None:
    assert [format_count(n) for n in (None, 0, 31000, 9_999_999, 12_340_000, 1.5e12)] == [
        "–", "0", "31,000", "9,999,999", "12.34 M", "1.5 T",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (None, 0.35, 4.25, 59.4, 59.6, 3599.6, 7500)] == [
        "–", "350 ms", "4.2 s", "59 s", "1 min 00 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


def test_finite_number_rejects_everything_else() -> None:
    assert finite_number(3) == 3.0
    assert [finite_number(v) for v in (None, True, "3", math.nan, math.inf, 10**400)] == [None] * 6
