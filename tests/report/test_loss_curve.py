"""The loss curve in the terminal."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from whet.report.terminal_report import draw_loss_curve

POINTS = st.lists(
    st.tuples(st.integers(0, 10**30), st.floats(allow_nan=False, allow_infinity=False)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(POINTS, st.integers(1, 100), st.integers(1, 30))
def test_any_finite_points_give_lines_of_one_width(points: list[tuple[int, float]], width: int, height: int) -> None:
    lines = draw_loss_curve(points, width=width, height=height).split("\n")
    assert {len(line) for line in lines} == {max(width, 24)}
    assert len(lines) == max(height, 4)
    assert any("\u2800" < char <= "\u28ff" for line in lines for char in line), "no dot was drawn"


def test_a_falling_curve_goes_from_the_top_left_to_the_bottom_right() -> None:
    lines = draw_loss_curve([(1, 4.0), (100, 1.0)], width=40, height=10).split("\n")
    top, bottom = lines[0], lines[7]
    assert top.split("┤")[0].strip() == "4"
    assert bottom.split("┤")[0].strip() == "1"
    assert top.split("┤")[1][0] != "\u2800"
    assert top[-1] == "\u2800"
    assert bottom[-1] != "\u2800"
    assert lines[-1].split() == ["step", "1", "100"]


def test_labels_of_nearly_equal_losses_differ() -> None:
    labels = [
        line.split("┤")[0].strip() for line in draw_loss_curve([(1, 3.0001), (9, 3.0002)]).split("\n") if "┤" in line
    ]
    assert len(labels) == len(set(labels)) > 1


def test_a_constant_and_a_single_point_are_labelled() -> None:
    for points in ([(1, 0.5), (2, 0.5)], [(7, 0.5)]):
        assert "0.5 ┤" in draw_loss_curve(points)


def test_infinite_and_missing_losses() -> None:
    assert draw_loss_curve([(1, 2.0), (2, float("inf")), (3, 1.0)]) == draw_loss_curve([(1, 2.0), (3, 1.0)])
    assert "no loss logged" in draw_loss_curve([])
