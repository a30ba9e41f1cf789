"""The Data and Search tabs, feedback, and near-duplicates, compared with their files and with brute force."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs.made_runs import make_run
from whet.core.errors import WhetError
from whet.core.json_lines import read_json_lines
from whet.dash.actions import write_feedback
from whet.dash.store_browser import find_near_duplicates, shingle_hashes
from whet.data.prepare.store import Store
from whet.data.render.detokenize import open_decoder


class Documents(list):
    """Lists of ids as a store has them."""

    def ids(self, document: int) -> np.ndarray:
        return np.array(self[document], dtype=np.int64)


# Near-duplicates.


def similarity(a: list[int], b: list[int]) -> float:
    def shingles(ids: list[int]) -> set[tuple[int, ...]]:
        width = min(5, max(1, len(ids)))
        return {tuple(ids[i : i + width]) for i in range(len(ids) - width + 1)}

    one, other = shingles(a), shingles(b)
    return len(one & other) / max(1, len(one | other))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_what_is_found_is_as_similar_as_by_brute_force_and_copies_with_a_few_changes_are_found(seed, changes):
    draw = np.random.default_rng(seed)
    documents = Documents(draw.integers(0, 500, size=draw.integers(30, 300)).tolist() for _ in range(40))
    changed = list(documents[7])
    for place in draw.integers(0, len(changed), size=changes):
        changed[place] = 9999
    documents += [changed, list(documents[3])]
    found, count = find_near_duplicates(documents)
    assert count == len(documents)
    pairs = {(pair.first, pair.second): pair.similarity for pair in found}
    assert pairs[3, 41] == 1.0
    for (a, b), measured in pairs.items():
        assert measured == pytest.approx(similarity(documents[a], documents[b]))
        assert measured >= 0.8
    if similarity(documents[7], changed) > 0.9:
        assert (7, 40) in pairs


def test_many_copies_short_and_empty_documents_are_compared_too():
    documents = Documents([[1, 2, 3]] * 300 + [[], [5], [1, 2, 4]])
    found, count = find_near_duplicates(documents)
    assert count == 303
    assert len(found) == 299
    assert all(pair.similarity == 1.0 for pair in found)
    assert len(shingle_hashes(np.array([], dtype=np.int64))) == 1


def test_the_time_limit_ends_the_comparison():
    assert find_near_duplicates(Documents([[1] * 50] * 2000), seconds=0.0)[1] < 2000


# A store.


def open_of(run: Path) -> tuple[Store, list[str]]:
    store = Store(Path(json.loads((run / "ledger.json").read_text())["stores"]["train"]))
    decoder = open_decoder(store.folder)
    return store, [decoder.text(store.ids(each).tolist()) for each in range(len(store))]


def test_pages_of_a_store_a_search_and_histograms_are_its_documents(dash, tiny_run):
    server, (store, texts) = dash(tiny_run.parent), open_of(tiny_run)
    shown, start = [], 0
    while start is not None:
        page = server.get("/api/data", run=tiny_run.name, start=start).json
        shown += ["".join(text for text, _ in each["segments"]) for each in page["documents"]]
        start = page["next"]
    assert shown == texts
    word = "MONDAY"
    found, start = [], 0
    while start is not None:
        page = server.get("/api/data", run=tiny_run.name, start=start, query=word).json
        found += [each["document"] for each in page["documents"]]
        start = page["next"]
    assert found == [number for number, text in enumerate(texts) if word.casefold() in text.casefold()] != []
    assert server.get("/api/data/problem", run=tiny_run.name).json == {"problem": None}
    drawn = server.get("/api/data/histograms", run=tiny_run.name).json
    assert sum(drawn["lengths"]["counts"]) == sum(drawn["shares"]["counts"]) == len(store) == drawn["documents"]
    assert drawn["tokens"] == int(store.lengths.sum())
    twins = server.get("/api/data/duplicates", run=tiny_run.name).json
    assert twins["compared"] == len(store)


def test_a_store_that_is_gone_or_elsewhere_is_an_error_that_says_so(dash, tmp_path):
    run = make_run(tmp_path / "runs" / "one")
    server = dash(tmp_path / "runs")
    for stores in ({"train": "/etc"}, {"train": str(tmp_path)}, {"train": 1}, [], {}):
        (run / "ledger.json").write_text(json.dumps({"sources": [], "stores": stores}))
        for path in ("/api/data", "/api/data/histograms", "/api/data/duplicates"):
            answer = server.get(path, run="one")
            assert answer.status == 404
            assert "one" in answer.json["error"] or "store" in answer.json["error"]
        answer = server.get("/api/data/problem", run="one")  # the page asks this first
        assert (answer.status, bool(answer.json["problem"])) == (200, True)


# Feedback.

ASKED = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello"}]


def test_thumbs_write_lines_that_whet_trains_on(dash, tmp_path):
    from whet.config import read_config
    from whet.run.data import prepare_data

    run = make_run(tmp_path / "one")
    server = dash(tmp_path)
    for good in (True, False):
        body = {"run": "one", "step": 10, "model": "tuned", "good": good, "messages": ASKED}
        assert server.post("/api/feedback", body).status == 200
    for name in ("good", "bad"):
        ((line,), damaged) = read_json_lines(run / "feedback" / f"{name}.jsonl")
        assert not damaged
        assert line["messages"] == ASKED
    config = tmp_path / "feedback.yaml"
    config.write_text(
        "model: {path: builtin:tiny}\n"
        f"data: {{sources: [{{path: {run / 'feedback' / 'good.jsonl'}}}]}}\n"
        "train: {steps: 1, batch: {conversations: 1}}\n"
    )
    assert len(prepare_data(read_config(config, [])).train.store) == 1


NONSENSE = [
    {"messages": ASKED[:1]}, {"messages": []}, {"messages": [*ASKED, {"role": "tool", "content": "x"}]}, {"extra": 1},
    {"model": "other"}, {"run": "../one"}, {"messages": [{"role": "assistant", "content": "x"}] * 2}, {"good": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("change", NONSENSE)
def test_feedback_that_makes_no_sense_writes_nothing(dash, tmp_path, change):
    run = make_run(tmp_path / "one")
    body = {"run": "one", "step": 10, "model": "tuned", "good": True, "messages": ASKED} | change
    assert dash(tmp_path).post("/api/feedback", body).status in (400, 404, 422)
    assert not list(run.glob("feedback/*"))


def test_feedback_does_not_follow_a_link(tmp_path):
    run = make_run(tmp_path / "one")
    (tmp_path / "outside").mkdir()
    (run / "feedback").symlink_to(tmp_path / "outside")
    with pytest.raises(WhetError, match="link"):
        write_feedback(run, ASKED, True, "tuned", None)
    assert not list((tmp_path / "outside").iterdir())


# Searches.


def make_search(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "search.yaml").write_text("search:\n  method: asha\n  metric: val_loss\n")
    lr = "train.optimizer.lr"
    trials = [
        {"number": 0, "state": "complete", "value": 1.5, "step": 10, "tokens": 5, "values": {lr: 1e-3},
         "bracket": 0, "rungs": {"5": 2.0, "10": 1.5}, "folder": str(folder / "trial-000"), "error": None},
        {"number": 1, "state": "stopped", "value": 3.0, "step": 5, "tokens": 2, "values": {lr: 1e-1},
         "bracket": 0, "rungs": {"5": 3.0}, "folder": "/elsewhere/trial-001", "error": "hf_abcdefghijklmnopqrstuv"},
    ]  # fmt: skip
    found = {"search": str(folder), "method": "asha", "metric": "val_loss", "unit": "steps", "best": {"trial": 0},
             "importance": {"train.optimizer.lr": 1.0}, "trials": trials}  # fmt: skip
    (folder / "search.json").write_text(json.dumps(found))
    (folder / "best.yaml").write_text("train:\n  optimizer:\n    lr: 1e-3\n")


def test_a_finished_search_is_told_from_its_files(dash, tmp_path):
    make_search(tmp_path / "group" / "lr")
    server = dash(tmp_path)
    assert server.get("/api/searches").json == {"searches": ["group/lr"]}
    found = server.get("/api/search", name="group/lr").json
    assert [trial["run"] for trial in found["trials"]] == ["group/lr/trial-000", None]
    assert (found["metric"], found["finished"], found["best"]["trial"]) == ("val_loss", True, 0)
    assert "lr: 1e-3" in found["recipe"]
    assert "hf_abcdefghij" not in json.dumps(found)


@pytest.mark.parametrize("name", ["../x", "", "group", "/etc", "group/lr/..", "x" * 1500])
def test_no_other_folder_is_a_search(dash, tmp_path, name):
    make_search(tmp_path / "group" / "lr")
    assert dash(tmp_path).get("/api/search", name=name).status in (404, 422)


def test_a_search_that_runs_is_read_from_its_journal_which_stays_as_it_is(dash, tmp_path):
    optuna = pytest.importorskip("optuna")
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    make_search(tmp_path / "lr")
    (tmp_path / "lr" / "search.json").unlink()
    journal = tmp_path / "lr" / "journal.log"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(journal))), study_name="lr")
    trial = study.ask({"train.optimizer.lr": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True)})
    trial.report(2.5, 5)
    before = journal.read_bytes()
    found = dash(tmp_path).get("/api/search", name="lr").json
    assert not found["finished"]
    assert [(each["state"], each["value"]) for each in found["trials"]] == [("running", 2.5)]
    assert journal.read_bytes() == before
    journal.write_bytes(before[:-7])
    assert dash(tmp_path).get("/api/search", name="lr").status in (200, 400)
