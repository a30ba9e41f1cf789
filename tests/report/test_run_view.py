"""Reading a run folder with any of its files missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from whet.core.errors import WhetError
from whet.report.run_view import RunView, TaskScore
from whet.report.samples import LoggedSample, SamplePair
from whet.report.terminal_report import score_line, summarize_run

MakeRun = Callable[..., Path]
ALL_BUT_CONFIG = ("status", "ledger", "plan", "metrics", "samples", "certificate")


def test_all_files(make_run: MakeRun) -> None:
    run = RunView.read(make_run())
    assert run.name == "orders"
    assert run.losses == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert run.val_losses == [(0, 3.1), (3, 1.1)]
    assert run.scores == {"orders": [(0, 0.0), (3, 0.75)]}
    assert run.train_seconds == 6.0
    assert (run.tokens, run.supervised_tokens, run.conversations) == (3000, 900, 24)
    assert run.tokens_per_s == 500
    assert (run.step, run.steps, run.peak_gib) == (3, 3, 1.5)
    assert run.sources[0].unaccounted == 0
    assert run.certificates[0]["verified"] is True


def test_samples_are_paired_by_prompt(make_run: MakeRun) -> None:
    pairs = RunView.read(make_run()).pairs
    assert [(pair.before.right, pair.after.right) for pair in pairs if pair.before and pair.after] == [
        (False, True),
        (False, False),
    ]


def test_an_evaluation_after_step_0_does_not_count_as_before(make_run: MakeRun) -> None:
    run = RunView.read(make_run(metrics=[{"step": 2, "task/orders": 0.5}]))
    assert (run.task_scores[0].before, run.task_scores[0].after) == (None, 0.5)


def test_with_a_start_step_the_evaluation_there_counts_as_before(make_run: MakeRun) -> None:
    metrics = [
        {"step": 25, "val_loss": 3.1, "task/orders": 0.25},
        *({"step": step, "loss": 1.0, "tokens": 1000 * step, "step_s": 2.0} for step in range(26, 31)),
        {"step": 30, "val_loss": 1.1, "task/orders": 0.75},
    ]
    samples = [
        {"step": step, "task": "orders", "prompt": "p", "expected": "e", "answer": f"answer {step}", "right": step > 25}
        for step in (25, 30)
    ]
    run = RunView.read(make_run(config="train: {start_step: 25}\n", metrics=metrics, samples=samples))
    assert run.task_scores == [TaskScore("orders", 0.25, 0.75, 30)]
    assert run.validation["val_loss"] == (3.1, 1.1)
    before, after = (LoggedSample(step, "orders", "p", "e", f"answer {step}", step > 25) for step in (25, 30))
    assert run.pairs == [SamplePair(before, after)]
    assert run.tokens_per_s == pytest.approx(500)  # the 25,000 tokens of skipped steps do not count
    assert "(starting at step 25)" in summarize_run(run)
    assert score_line(run).plain.startswith("orders 25")


def test_the_base_model_alone_has_no_after(make_run: MakeRun) -> None:
    run = RunView.read(make_run(metrics=[{"step": 0, "task/orders": 0.5}]))
    assert (run.task_scores[0].before, run.task_scores[0].after) == (0.5, None)


@pytest.mark.parametrize("missing", ALL_BUT_CONFIG)
def test_any_other_file_may_be_missing(make_run: MakeRun, missing: str) -> None:
    RunView.read(make_run(**{missing: None}))


def test_a_run_that_has_just_started(make_run: MakeRun) -> None:
    run = RunView.read(make_run(**dict.fromkeys(ALL_BUT_CONFIG)))
    assert run.losses == []
    assert run.pairs == []
    assert (run.tokens, run.train_seconds, run.tokens_per_s, run.step) == (None, None, None, None)


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_is_not_a_run(tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # away from runs/demo, which `make demo` leaves and the error would propose
    folder = tmp_path if exists else tmp_path / "nothing"
    with pytest.raises(WhetError, match=r"not a run.*whet train") as error:
        RunView.read(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("keep", [1, 20, 60])
def test_a_truncated_last_line_is_ignored(make_run: MakeRun, keep: int) -> None:
    folder = make_run()
    whole = RunView.read(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "step": 4, "loss": 0.5, "name": "é", "step_s": 2.0}'[:keep])
    assert RunView.read(folder).metrics == whole.metrics


def test_a_damaged_line_is_left_out_and_named(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    run = RunView.read(folder)
    assert [line["step"] for line in run.metrics] == [1, 3]
    assert run.damage == ("metrics.jsonl: line 2 cannot be read",)


def test_a_loss_that_is_not_a_number_is_a_gap(make_run: MakeRun) -> None:
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "lr": 0.1}, {"step": 4, "loss": 2.0}]
    run = RunView.read(make_run(metrics=lines))
    assert run.series("loss") == [(1, 1.0), (2, None), (3, None), (4, 2.0)]
    assert run.losses == [(1, 1.0), (4, 2.0)]


def test_without_the_time_of_a_step_the_total_is_unknown(make_run: MakeRun) -> None:
    lines = [{"step": 1, "loss": 1.0, "step_s": 2.0}, {"step": 2, "loss": 1.0, "step_s": None}]
    assert RunView.read(make_run(metrics=lines)).train_seconds is None
