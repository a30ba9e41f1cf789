"""Terminal output: the selection of samples, and answers with markup or control sequences."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from whet.report.run_view import LoggedSample, RunView, SamplePair, select_pairs
from whet.report.terminal_report import before_after_table, score_line

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
