"""The search itself: which trials it starts, stops, replaces and resumes. Its trials are curves (curves.py)."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest
from curves import BEST_RATE, CurvePlace, planted_loss

pytest.importorskip("optuna")

from whet.config import read_config
from whet.core.errors import ExitCode, RunFailedError, WhetError
from whet.search.results import collect_results, write_results
from whet.search.search import open_search_folder, plan_search, preview, run_search
from whet.search.trials import TrialEnd

RANGES = (
    "train.optimizer.name={search: choice, values: [adamw, muon]}",
    "train.optimizer.lr={search: log, low: 1e-6, high: 1e-1, count: 6}",
    "train.optimizer.momentum={search: float, low: 0.8, high: 0.9, count: 2, when: {train.optimizer.name: muon}}",
)  # fmt: skip


@pytest.fixture
def make_plan(tmp_path, recipe):
    def make(*settings: str):
        length = [] if any(text.startswith("train.tokens") for text in settings) else ["train.steps=64"]
        return plan_search(Path(recipe), [*RANGES, f"run.dir={tmp_path / 'search'}", *length, *settings])

    return make


def run(plan, place, resume=False):
    with open_search_folder(plan, resume):
        return collect_results(run_search(plan, place, resume), plan)


@pytest.mark.parametrize("method", ["asha", "tpe", "random", "grid"])
def test_every_method_finds_the_planted_decade(make_plan, method):
    plan = make_plan(
        f"search.method={method}", "search.concurrent=2", *([] if method == "grid" else ["search.max_trials=20"])
    )
    place = CurvePlace()
    result = run(plan, place)
    assert abs(math.log10(result.best.values["train.optimizer.lr"] / BEST_RATE)) < 1
    assert len(result.trials) == (6 + 6 * 2 if method == "grid" else 20)
    assert place.most_running == 2
    assert result.best.state == "complete"
    assert all(("train.optimizer.momentum" in each.values) == (each.values["train.optimizer.name"] == "muon")
               for each in result.trials)  # fmt: skip
    assert max(result.importance, key=result.importance.__getitem__) == "train.optimizer.lr"
    spent = sum(trial.tokens for trial in result.trials)
    full = 6400 * len(result.trials)
    assert spent < 0.5 * full if method == "asha" else spent == full


def test_asha_stops_trials_at_the_rungs_of_their_bracket_and_draws_what_random_draws(make_plan, tmp_path):
    plan = make_plan("search.max_trials=20")
    result = run(plan, CurvePlace())
    rungs = [bracket.rungs for bracket in plan.brackets]
    assert rungs == [(4, 16, 64), (16, 64)]
    for trial in result.trials:
        assert tuple(trial.rungs) == rungs[trial.bracket][: len(trial.rungs)]
        assert (trial.state == "complete") == (max(trial.rungs) == 64)
    assert [sum(trial.bracket == index for trial in result.trials) for index in (0, 1)] == [15, 5]
    other = make_plan("search.method=random", "search.max_trials=20", f"run.dir={tmp_path / 'random'}")
    drawn = run(other, CurvePlace())
    assert {each.number: each.values for each in drawn.trials} == {each.number: each.values for each in result.trials}


def test_a_crash_is_the_worst_and_an_invalid_combination_is_replaced(make_plan):
    def loss(trial):
        if trial.number == 1:
            return TrialEnd(1, ExitCode.FAILED, "out of memory")
        if trial.number in (2, 3):
            return TrialEnd(trial.number, ExitCode.INPUT, "train.batch.rows: too few")
        return planted_loss(trial)

    result = run(make_plan("search.max_trials=8", "search.method=random"), CurvePlace(loss))
    by_number = {trial.number: trial for trial in result.trials}
    assert sorted(by_number) == [0, 1, *range(4, 10)]
    assert (by_number[1].state, by_number[1].error, by_number[1].value) == ("crashed", "out of memory", None)
    assert result.trials[-1].number == 1
    assert result.invalid == 2


def test_a_crash_ranks_last_at_its_rung(make_plan):
    """Of four trials at a rung, one in four continues: with a crash before it, the second is not the first of its rung
    by default."""

    def loss(trial):
        return TrialEnd(trial.number, ExitCode.FAILED, "boom") if trial.number == 0 else planted_loss(trial)

    plan = make_plan("search.max_trials=8", "search.mode=aggressive")
    result = run(plan, CurvePlace(loss))
    assert result.best.state == "complete"
    assert [trial.number for trial in result.trials if trial.state == "crashed"] == [0]


def test_a_search_killed_anywhere_goes_on_without_a_trial_twice(make_plan, tmp_path):
    whole = run(make_plan("search.max_trials=6", f"run.dir={tmp_path / 'whole'}"), CurvePlace())
    expected = {trial.number: (trial.values, trial.rungs, trial.state) for trial in whole.trials}
    for dies_at in range(0, 40, 5):
        plan = make_plan("search.max_trials=6", f"run.dir={tmp_path / str(dies_at)}")
        first, second = CurvePlace(dies_at=dies_at), CurvePlace()
        is_killed = False
        try:
            run(plan, first)
        except MemoryError:
            is_killed = True
        result = run(plan, second, resume=True)
        starts = first.starts + second.starts
        assert len(starts) == len(set(starts)), f"killed at {dies_at}"
        assert {trial.number: (trial.values, trial.rungs, trial.state) for trial in result.trials} == expected
        if not is_killed:
            assert second.starts == []
            return
    pytest.fail("no run got to its end")


def test_a_choice_of_few_combinations_is_not_repeated(make_plan):
    plan = make_plan(
        "search.method=random", "train.optimizer.lr=1e-3", "train.optimizer.momentum=0.95", "search.max_trials=9",
        "train.optimizer.name={search: choice, values: [adamw, adamw8bit]}",
    )  # fmt: skip
    result = run(plan, CurvePlace())
    assert sorted(trial.values["train.optimizer.name"] for trial in result.trials) == ["adamw", "adamw8bit"]


@pytest.mark.parametrize("method", ["asha", "random", "tpe"])
def test_all_combinations_of_choices_are_tried_and_the_plan_counts_them(make_plan, method):
    """One of the twelve is invalid, the last one is as likely to be drawn as the others."""
    plan = make_plan(
        f"search.method={method}", "train.optimizer.lr=1e-3", "search.max_trials=40", "search.concurrent=1",
        "train.batch.conversations={search: int, low: 2, high: 7}", "train.optimizer.momentum=0.95",
        "train.optimizer.name={search: choice, values: [adamw, adamw8bit]}",
    )  # fmt: skip
    assert plan.trials == 12
    place = CurvePlace(
        lambda trial: (
            TrialEnd(trial.number, ExitCode.INPUT, "invalid")
            if (trial.config.train.batch.conversations, trial.config.train.optimizer.name) == (3, "adamw")
            else planted_loss(trial)
        )
    )
    result = run(plan, place)
    tried = [tuple(trial.values.values()) for trial in result.trials]
    assert len(tried) == len(set(tried)) == 11
    assert result.is_tied


def test_combinations_that_are_all_invalid_end_the_search_with_the_reason(make_plan):
    place = CurvePlace(lambda trial: TrialEnd(trial.number, ExitCode.INPUT, "data.sources: nothing left"))
    with pytest.raises(WhetError, match=r"20 combinations in a row .* data.sources: nothing left"):
        run(make_plan(), place)


def test_a_metric_that_is_never_measured_ends_the_search_with_its_first_trial(make_plan):
    """Bits per byte of a tokenizer whose bytes are unknown. A value that is not finite is a crash of one trial."""
    measured = []

    def loss(trial):
        measured.append(trial.number)
        trial.folder.mkdir(parents=True, exist_ok=True)
        name = "val_loss" if len(measured) > 1 else "val_bpb"
        (trial.folder / "metrics.jsonl").write_text(
            f'{{"step": {trial.until}, "loss": 1.0}}\n{{"step": {trial.until}, "{name}": null}}\n'
        )
        return TrialEnd(trial.number, ExitCode.DONE)

    settings = ("search.method=random", "search.max_trials=3", "search.metric=val_bpb")
    with pytest.raises(WhetError, match=r"search.metric: val_bpb is not among what trial 1 .* \(val_loss\)"):
        run(make_plan(*settings), CurvePlace(loss))
    assert measured == [0, 1]


def test_trials_that_all_crash_are_an_error_that_names_one(make_plan):
    place = CurvePlace(lambda trial: TrialEnd(trial.number, ExitCode.FAILED, "the loss is not finite"))
    with pytest.raises(WhetError, match="none of 4 trials reached an evaluation; trial 0 failed with: the loss is not"):
        run(make_plan("search.max_trials=4"), place)


def test_the_bar_shows_the_steps_of_running_trials(make_plan, monkeypatch):
    notes = []
    monkeypatch.setattr("whet.core.console.ProgressBar.advance", lambda bar, n=1, note="": notes.append(note))
    place = CurvePlace()
    started = place.start

    def start(trial):
        trial.folder.mkdir(parents=True, exist_ok=True)
        (trial.folder / "status.json").write_text(json.dumps({"step": 3}))
        started(trial)

    place.start = start
    run(make_plan("search.max_trials=3", "search.method=random", "search.concurrent=2"), place)
    assert any("trial 1 step 3/64" in note for note in notes)
    assert any("best val_loss" in note for note in notes)


def test_the_best_recipe_is_ready_and_the_results_are_json(make_plan):
    plan = make_plan("search.max_trials=5", "search.method=tpe")
    result = run(plan, CurvePlace())
    found = write_results(result, plan)
    assert json.loads((plan.folder / "search.json").read_text()) == json.loads(json.dumps(found))
    best = read_config(plan.folder / "best.yaml")
    assert best.train.optimizer.lr == result.best.values["train.optimizer.lr"]
    assert (best.search, best.run.name, best.run.dir) == (None, "tiny-best", None)
    assert (best.eval.at_start, best.checkpoint.keep_last) == (True, 2)  # which trials do without


def test_rungs_in_tokens_are_steps_of_each_trial(make_plan):
    plan = make_plan("train.tokens=20000", "train.batch.conversations={search: choice, values: [2, 8]}",
                     "search.max_trials=17", "search.mode=aggressive")  # fmt: skip
    assert plan.unit == "tokens"
    [bracket] = plan.brackets
    assert bracket.rungs == (1250, 5000, 20000)
    seen = {}

    def loss(trial):
        planned = plan.lengths.of(trial.config)
        reached = seen.setdefault(trial.number, [])
        tokens, before = planned.tokens[trial.until - 1], planned.tokens[trial.until - 2] if trial.until > 1 else 0
        if trial.until < planned.steps:
            assert before < bracket.rungs[len(reached)] <= tokens
        reached.append(trial.until)
        return planted_loss(trial)

    run(plan, CurvePlace(loss))
    assert len({tuple(steps) for steps in seen.values()}) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["search.metric=loss"], "search.metric: loss is not measured"),
        (["search.metric=task/orders"], "eval.tasks does not have orders"),
        (["train.steps={search: int, low: 4, high: 9}"], "train.steps: asha compares trials after parts"),
        (["train.start_step=3"], "train.start_step: 3: trials begin at step 0"),
        (["run.dir={search: choice, values: [a, b]}"], "run.dir: does not change what is trained"),
        (["search.method=grid", "train.optimizer.lr={search: log, low: 1e-5, high: 1e-3}"], "lr: count is missing"),
        (["train.clip_norm={low: 0.5, high: 2}"], "train.clip_norm.search: missing. Write the range as {search: log"),
        (["train.schedule.name={values: [wsd, cosine]}"], "name.search: missing. Write the range as {search: choice"),
        (["search.divisor=1"], "search.divisor: 1 is not valid (input should be greater than or equal to 2)"),
        (["train.optimizer.name=adamw", "train.optimizer.lr=1e-3", "train.optimizer.momentum=0.95"], "has no range"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_work_is_refused(make_plan, settings, message):
    with pytest.raises(WhetError) as raised:
        make_plan(*settings)
    assert message in str(raised.value)


def test_a_folder_with_something_else_or_another_search_is_refused(make_plan):
    plan = make_plan("search.max_trials=2", "search.method=random")
    run(plan, CurvePlace())
    with pytest.raises(WhetError, match=r"holds a search already. Continue it with --resume"):
        run(plan, CurvePlace())
    changed = make_plan("search.max_trials=2", "search.method=random", "train.clip_norm=0.5")
    with pytest.raises(WhetError, match=r"train.clip_norm: None then, 0.5 now"):
        run(changed, CurvePlace(), resume=True)
    more = CurvePlace()
    run(make_plan("search.max_trials=3", "search.method=random"), more, resume=True)
    assert more.starts == [(2, 64)]
    (plan.folder / "journal.log").unlink()
    with pytest.raises(WhetError, match=r"journal.log is gone"):
        run(plan, CurvePlace(), resume=True)
    (plan.folder / "search.yaml").unlink()
    with pytest.raises(WhetError, match="holds files that do not belong to a search"):
        run(plan, CurvePlace())


def test_half_a_line_and_a_lock_of_a_killed_process_do_not_stop_a_search(make_plan):
    plan = make_plan("search.max_trials=2", "search.method=random")
    run(plan, CurvePlace())
    journal = plan.folder / "journal.log"
    journal.write_bytes(journal.read_bytes() + b'{"op_code":')
    journal.with_name("journal.log.lock").symlink_to(journal)
    result = run(plan, CurvePlace(), resume=True)
    assert len(result.trials) == 2


class MeddlingPlace(CurvePlace):
    """Calls a function before a start, the fourth by default."""

    def __init__(self, meddle, after=3):
        super().__init__()
        self._meddle, self._after = meddle, after

    def start(self, trial):
        if len(self.starts) == self._after:
            self._meddle()
        super().start(trial)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_journal_that_is_deleted_or_replaced_meanwhile_is_put_back(make_plan, tmp_path, capsys, how):
    expected = run(make_plan("search.max_trials=4", f"run.dir={tmp_path / 'whole'}"), CurvePlace())
    plan = make_plan("search.max_trials=4")
    journal = plan.folder / "journal.log"

    def meddle():
        journal.unlink()
        if how == "replaced":
            journal.write_text("edited\n")

    found = run(plan, MeddlingPlace(meddle))
    assert f"{journal}: {how}" in capsys.readouterr().err
    again = run(plan, CurvePlace(), resume=True)
    for result in (found, again):
        assert [(each.number, each.state, each.rungs) for each in result.trials] == [
            (each.number, each.state, each.rungs) for each in expected.trials
        ]
    if how == "replaced":
        assert (plan.folder / "journal.1.log").read_text() == "edited\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda old: b"", r"journal.log: damaged \(it was shortened while"),
        (lambda old: old + b"{\n", r"journal.log: damaged \(line \d+ cannot be read\), .* from a copy"),
    ],
    ids=["shortened", "a line that is no JSON"],
)
def test_a_journal_that_is_damaged_meanwhile_ends_the_search_at_once(make_plan, content, message):
    plan = make_plan("search.max_trials=4")
    journal = plan.folder / "journal.log"
    place = MeddlingPlace(lambda: journal.write_bytes(content(journal.read_bytes())))
    with pytest.raises(WhetError, match=message):
        run(plan, place)
    assert len(place.starts) == 4
    with pytest.raises(WhetError, match=r"journal.log: .*so the trials of this search are unknown"):
        run(plan, CurvePlace(), resume=True)


def test_a_search_whose_folder_is_moved_ends_and_goes_on_there(make_plan, tmp_path):
    plan, moved = make_plan("search.max_trials=4"), tmp_path / "moved"
    with pytest.raises(WhetError, match=r"search's folder was deleted or moved .*run\.dir=FOLDER with --resume"):
        run(plan, MeddlingPlace(lambda: plan.folder.rename(moved)))
    result = run(make_plan("search.max_trials=4", f"run.dir={moved}"), CurvePlace(), resume=True)
    assert len(result.trials) == 4
    assert all(trial.tokens == 100 * max(trial.rungs) for trial in result.trials)
    assert Path(result.best.folder).parent == moved


def test_a_search_without_its_id_continues_its_trials_and_a_damaged_one_is_named(make_plan):
    plan = make_plan("search.max_trials=4", "search.method=random")
    with pytest.raises(MemoryError):
        run(plan, CurvePlace(dies_at=4))
    (plan.folder / "search.id").write_bytes(b"\xff")
    with pytest.raises(WhetError, match=r"search.id: not a text file"):
        run(plan, CurvePlace(), resume=True)
    (plan.folder / "search.id").unlink()
    result = run(plan, CurvePlace(), resume=True)
    assert {trial.state for trial in result.trials} == {"complete"}


def test_a_search_goes_on_with_a_recipe_of_another_name(make_plan, tmp_path, recipe):
    settings = ("search.method=random", "search.max_trials=2", f"run.dir={tmp_path / 'search'}", "train.steps=64")
    copy = tmp_path / "other.yaml"
    copy.write_text(Path(recipe).read_text())
    run(plan_search(Path(recipe), [*RANGES, *settings]), CurvePlace())
    place = CurvePlace()
    assert len(run(plan_search(copy, [*RANGES, *settings]), place, resume=True).trials) == 2
    assert place.starts == []


def test_what_cannot_be_written_or_read_in_its_folder_is_named(make_plan):
    plan = make_plan("search.max_trials=2", "search.method=random")
    (plan.folder / "recipes").parent.mkdir()
    (plan.folder / "recipes").touch()
    with pytest.raises(WhetError, match=r"search/recipes: cannot be used \(File exists\)\. Move what is there away"):
        run(plan, CurvePlace())
    (plan.folder / "recipes").unlink()
    result = run(plan, CurvePlace(), resume=True)
    metrics = Path(result.best.folder) / "metrics.jsonl"
    metrics.write_text('{"step": 64, "loss": 1, "tokens": "many"}\n')
    assert run(plan, CurvePlace(), resume=True).best.tokens == 0


def test_a_database_that_fails_meanwhile_ends_the_search_which_can_be_resumed(make_plan, tmp_path):
    file = tmp_path / "search.db"
    plan = make_plan("search.max_trials=2", "search.method=random", f"search.storage=sqlite:///{file}?timeout=0")
    blocker = sqlite3.connect(file)
    with pytest.raises(RunFailedError, match=r"search.storage: sqlite.*database is locked\)\. .*--resume"):
        run(plan, MeddlingPlace(lambda: blocker.execute("BEGIN EXCLUSIVE"), after=1))
    blocker.close()
    assert len(run(plan, CurvePlace(), resume=True).trials) == 2
    file.unlink()
    with pytest.raises(WhetError, match=r"it has no study named tiny, .*run.name=NAME"):
        run(plan, CurvePlace(), resume=True)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///"])
def test_a_database_in_memory_is_refused(make_plan, url):
    with pytest.raises(WhetError, match=r"in memory, so the search could not be resumed"):
        run(make_plan(f"search.storage={url}"), CurvePlace())


def test_a_database_that_cannot_be_opened_is_named(make_plan):
    plan = make_plan("search.storage=postgresql://localhost:1/none")
    with pytest.raises(
        WhetError, match=r"search.storage: postgresql://localhost:1/none: the study tiny cannot be opened"
    ):
        run(plan, CurvePlace())


def test_the_preview_has_trials_and_tokens_of_each_rung(make_plan):
    planned = preview(make_plan("search.max_trials=20"))
    assert [bracket["trials"] for bracket in planned["brackets"]] == [15, 5]
    first = planned["brackets"][0]["rungs"]
    assert [rung["steps"] for rung in first] == [4, 16, 64]
    assert first[0]["trials"] == 15
    assert planned["tokens"] == sum(rung["tokens"] for each in planned["brackets"] for rung in each["rungs"])
    assert planned["share"] == pytest.approx(planned["tokens"] / planned["full_length_tokens"])
    json.dumps(planned)
