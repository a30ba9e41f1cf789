"""Terminal output: the selection of samples, answers with control sequences, and the loss curve."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from whet.report.run_view import RunView
from whet.report.samples import LoggedSample, SamplePair, select_pairs
from whet.report.terminal_report import before_after_table, draw_loss_curve, score_line

MakeRun = Callable[..., Path]


def shown(renderable: RenderableType, colour: bool = False) -> str:
    file = StringIO()
    console = Console(
        file=file, width=100, force_terminal=colour, color_system="standard" if colour else None, no_color=False
    )
    console.print(renderable)
    return file.getvalue()


def sample(step: int, prompt: str, right: bool, answer: str = "a") -> dict[str, object]:
    return {"step": step, "task": "t", "prompt": prompt, "expected": "e", "answer": answer, "right": right}


def pair(before: bool, after: bool) -> SamplePair:
    return SamplePair(LoggedSample(0, "t", "p", "e", "a", before), LoggedSample(9, "t", "p", "e", "a", after))


@given(st.lists(st.builds(pair, st.booleans(), st.booleans())), st.integers(1, 9))
def test_the_selection_includes_wrong_answers(pairs: list[SamplePair], limit: int) -> None:
    chosen = select_pairs(pairs, limit)
    assert len(chosen) == min(limit, len(pairs))
    assert any(p.wrong_after for p in chosen) == any(p.wrong_after for p in pairs)
    improved = sum(p.improved for p in pairs)
    plain = sum(not p.wrong_after and not p.improved for p in chosen)
    assert plain == 0 or sum(p.improved for p in chosen) == improved, "an improved example was skipped"


def test_three_of_many_samples_include_a_wrong_one(make_run: MakeRun) -> None:
    lines = [sample(0, f"p{i}", False) for i in range(20)] + [sample(5, f"p{i}", i != 13) for i in range(20)]
    text = shown(before_after_table(RunView.read(make_run(samples=lines))))
    assert [f"p{i} " in text for i in (0, 1, 13)] == [True] * 3
    assert "3 of 20" in text


def test_right_is_green_and_wrong_is_red(make_run: MakeRun) -> None:
    lines = [sample(0, "p", False, "bad"), sample(5, "p", True, "good")]
    text = shown(before_after_table(RunView.read(make_run(samples=lines))), colour=True)
    assert "\x1b[31mbad" in text
    assert "\x1b[32mgood" in text


def test_answers_are_neither_markup_nor_control_sequences(make_run: MakeRun) -> None:
    lines = [sample(0, "[bold]p[/bold] [/nonsense]", False, "\x1b]0;title\x07 \x1b[2J"), sample(5, "x", True)]
    text = shown(before_after_table(RunView.read(make_run(samples=lines))))
    assert "[bold]p[/bold]" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_long_text_is_wrapped_and_truncated(make_run: MakeRun) -> None:
    text = shown(before_after_table(RunView.read(make_run(samples=[sample(0, "y" * 1000, False)]))))
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("y") == 200
    assert "800 more" in " ".join(text.replace("│", " ").split())


def test_a_missing_answer_is_a_dash(make_run: MakeRun) -> None:
    text = shown(before_after_table(RunView.read(make_run(samples=[sample(0, "p", False)]))))
    assert "–" in text


def test_the_score_line(make_run: MakeRun) -> None:
    assert shown(score_line(RunView.read(make_run()))).strip() == "orders 0% → 75%"


def test_the_score_line_shows_an_early_step(make_run: MakeRun) -> None:
    run = RunView.read(make_run(metrics=[{"step": 2, "task/orders": 0.5}]))
    assert shown(score_line(run)).strip() == "orders – → 50% (after step 2)"


def test_the_score_line_without_tasks(make_run: MakeRun) -> None:
    run = RunView.read(make_run(metrics=[{"step": 0, "val_loss": 3.0}, {"step": 3, "val_loss": 1.5}]))
    assert shown(score_line(run)).strip() == "validation loss 3 → 1.5"
    run = RunView.read(make_run(metrics=[]))
    assert shown(score_line(run)).strip() == "not evaluated"


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
