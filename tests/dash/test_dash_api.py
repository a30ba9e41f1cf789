"""What the page is told, compared with the files of runs."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs.made_runs import add_losses, make_run, write_lock
from whet.core.checksums import write_hashed_json
from whet.core.costs import write_usage
from whet.core.json_lines import read_json_lines
from whet.dash.curves import MetricsFile, axis_values, read_curves
from whet.dash.run_details import log_tail, shown_state
from whet.dash.runs_folder import RunsFolder
from whet.evaluation.training_losses import losses_of_step, read_training_losses
from whet.runs.summary import summarize_run_folder


def append(folder: Path, *lines: dict) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


# The list.


def test_the_list_has_every_run_with_state_progress_tokens_hours_and_tags(dash, tmp_path):
    run = make_run(tmp_path / "group" / "one", project="p")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("  seed: 0\n", "  seed: 0\n  tags:\n  - a b\n  - '<b>'\n"))
    write_usage(run, [{"seconds": 1800, "devices": 4}, {"seconds": 3600, "devices": 2}], None)
    make_run(tmp_path / "two", state="failed", reason="out of disk")
    rows = {row["name"]: row for row in dash(tmp_path).get("/api/runs").json["runs"]}
    one = rows["group/one"]
    assert (one["state"], one["step"], one["steps"], one["project"]) == ("finished", 10, 20, "p")
    assert one["tags"] == ["a b", "<b>"]
    assert (one["best"], one["best_metric"], one["tokens"]) == (4.1, "val_loss", 1000)
    assert one["device_hours"] == pytest.approx(4)
    assert (rows["two"]["state"], rows["two"]["note"]) == ("failed", "out of disk")


def test_a_list_that_would_take_long_comes_without_the_best_values_and_they_follow(dash, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("whet.dash.app._LIST_S", -1.0)
    run = make_run(tmp_path / "runs" / "one")
    append(run, *({"step": step, "loss": 1.0, "tokens": step, "note": "x" * 1000} for step in range(11, 111)))
    server = dash(tmp_path / "runs")
    (row,) = server.get("/api/runs").json["runs"]
    assert (row["step"], row["tokens"], row["best"]) == (110, 110, None)
    with urllib.request.urlopen(f"{server.url}/api/live", timeout=30) as stream:
        line = next(line for line in stream if line.startswith(b"data: "))
    (changed,) = json.loads(line.removeprefix(b"data: "))["changed"]
    assert changed == row | {"best": 4.1}


def test_a_run_that_waits_again_after_it_has_trained_is_requeued(tmp_path):
    from dataclasses import replace

    from whet.runs.state import State

    run = summarize_run_folder(make_run(tmp_path / "one"))
    assert shown_state(replace(run, state=State("queued", "job 1: pending"))) == "requeued"
    new = summarize_run_folder(make_run(tmp_path / "new", state=None))
    (tmp_path / "new" / "metrics.jsonl").unlink()
    new = summarize_run_folder(tmp_path / "new")
    assert shown_state(replace(new, state=State("queued"))) == "queued"


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_folder_and_none_are_lists_without_runs(dash, tmp_path, exists):
    root = tmp_path if exists else tmp_path / "nothing"
    assert dash(root).get("/api/runs").json["runs"] == []


# Curves.


def test_curves_are_the_numbers_of_the_file(dash, tmp_path):
    make_run(tmp_path / "one")
    charts = {chart["id"]: chart for chart in dash(tmp_path).get("/api/run/curves", run="one").json["charts"]}
    loss, validation = charts["loss"]["series"]
    assert loss["x"] == list(range(1, 11)) == loss["step"]
    assert loss["y"] == pytest.approx([5 - step / 10 for step in range(1, 11)])
    assert (validation["key"], validation["x"], validation["y"]) == ("val_loss", [0, 10], [5.0, 4.1])
    assert charts["accuracy"]["series"][0]["key"] == "val_accuracy"
    assert "mfu" not in charts


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=400),
    st.integers(10, 60),
    st.sampled_from(["step", "tokens", "time"]),
)
def test_down_sampling_keeps_every_extreme_and_invents_nothing(tmp_path_factory, values, points, axis):
    folder = tmp_path_factory.mktemp("run")
    append(
        folder,
        *({"step": i + 1, "time": 100.0 + i, "tokens": 10 * i, "loss": v, "lr": 1} for i, v in enumerate(values)),
    )
    file = MetricsFile(folder / "metrics.jsonl")
    assert file.refresh()
    charts = {chart["id"]: chart["series"][0] for chart in read_curves(file, axis, None, None, points, 0.5)}
    known = [value for value in values if value is not None]
    if not known:
        assert "loss" not in charts or all(y is None for y in charts["loss"]["y"])
        return
    series = charts["loss"]
    shown = [y for y in series["y"] if y is not None]
    for wanted in (min(known), max(known)):
        assert any(y == pytest.approx(wanted, rel=1e-5, abs=1e-9) for y in shown)
    places = axis_values(file, file.steps, axis)
    for step, x, y in zip(series["step"], series["x"], series["y"], strict=True):
        assert x == pytest.approx(places[step - 1], rel=1e-6, abs=1e-9)
        assert (y is None) == (values[step - 1] is None)
    assert series["x"] == sorted(series["x"])
    assert len(series["x"]) <= 2 * points + 8


def test_a_zoom_reads_more_points_of_a_part(tmp_path):
    append(tmp_path, *({"step": i, "loss": (i * 7919) % 1000} for i in range(1, 5001)))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.refresh()
    (chart,) = read_curves(file, "step", 1000, 1100, 200, 0.0)
    assert chart["series"][0]["step"] == list(range(1000, 1101))


def test_a_file_that_grows_is_read_once_and_one_that_was_rewound_again(tmp_path):
    append(tmp_path, *({"step": i, "time": i, "loss": i} for i in range(1, 6)))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.refresh()
    generation = file.generation
    with (tmp_path / "metrics.jsonl").open("a") as opened:
        opened.write('{"step": 6, "loss":')  # a line that is being written
        opened.flush()
        file.refresh()
        assert file.steps.rows == 5
        opened.write(" 6}\n")
    file.refresh()
    assert (file.steps.rows, file.generation) == (6, generation)
    # resumed at step 3: truncated, then longer than before
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    append(tmp_path, *({"step": i, "time": i + 100, "loss": -i} for i in range(4, 9)))
    file.refresh()
    assert file.generation != generation
    assert file.steps.column("loss").tolist() == [1, 2, 3, -4, -5, -6, -7, -8]
    (tmp_path / "metrics.jsonl").unlink()
    file.refresh()
    assert file.steps.rows == 0


DAMAGED = [
    b'{"step": 1, "loss": 2.0}\n', b'{"step": 1, "loss": NaN}\n', b'{"step": true, "loss": 1}\n', b'{"step": "1"}\n',
    b'{"step": 1, "loss": "x", "lr": {}}\n', b'{"step": 1e400, "loss": 1}\n', b"\xff\xfe\n", b"\n", b"[]\n",
    b'{"step": 123456789012345678901234567890, "loss": 1}\n', b"[" * 5000 + b"\n", b'{"step": 3, "loss": null}\n',
    b'{"step": 2, "loss": 1e308, "lr": -1e308}\n', b'{"step": 5, "val_loss": 1.5}\n', b'{"step": 2',
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(DAMAGED), max_size=12))
def test_damaged_lines_are_counted_and_never_an_error(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    file = MetricsFile(folder / "metrics.jsonl")
    file.refresh()
    json.dumps(read_curves(file, "time", None, None, 100, 0.9), allow_nan=False)
    whole = b"".join(lines)
    complete = whole.count(b"\n")
    assert file.steps.rows + file.evaluations.rows + file.damaged == complete


def test_a_long_file_is_read_in_parts_so_that_the_page_does_not_wait(tmp_path):
    text = "".join(f'{{"step": {i}, "loss": {i % 7}, "padding": "{"x" * 400}"}}\n' for i in range(12_000))
    (tmp_path / "metrics.jsonl").write_text(text)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert not file.refresh(0.0)
    assert 0 < file.steps.rows < 12_000
    while not file.refresh(0.0):
        pass
    assert file.steps.rows == 12_000


# A run.


def test_the_page_of_a_run_tells_what_its_files_do(dash, tiny_run, tmp_path):
    (tmp_path / "tiny").symlink_to(tiny_run)  # inside: resolved below
    server = dash(tiny_run.parent)
    details = server.get("/api/run", run=tiny_run.name).json
    plan = json.loads((tiny_run / "plan.json").read_text())
    ledger = json.loads((tiny_run / "ledger.json").read_text())
    assert details["plan"]["supervised_tokens"] == plan["supervised_tokens"]
    assert [source["total"] for source in details["sources"]] == [
        each["conversations"]["in"] for each in ledger["sources"]
    ]
    assert details["checkpoints"]
    promises = {each["title"]: each["state"] for each in details["promises"]}
    assert len(promises) == 6
    assert promises["Nothing is lost"] == promises["Nothing leaks"] == promises["A run survives"] == "proven"
    assert promises["The layout does not matter"] == "open"
    lines = [line for line in read_json_lines(tiny_run / "metrics.jsonl")[0] if "loss" in line]
    assert details["summary"]["loss"] == lines[-1]["loss"]


def test_time_and_memory_are_predicted_and_measured(dash, tmp_path):
    run = make_run(tmp_path / "one")
    write_hashed_json(run / "plan.json", {"steps": 20, "worst_batch_gib": 11.5})
    write_usage(run, [{"seconds": 1800, "devices": 4}], {"seconds": 3600, "devices": 4})
    append(run, {"step": 11, "loss": 1.0, "peak_gib": 12.5}, {"step": 12, "loss": 1.0, "peak_gib": 12.0})
    costs = dash(tmp_path).get("/api/run", run="one").json["costs"]
    assert costs["predicted"] == {"peak_gib": 11.5, "seconds": 3600, "device_hours": 4, "kwh": None, "money": None}
    assert costs["measured"] == {"peak_gib": 12.5, "seconds": 1800, "device_hours": 2, "kwh": None, "money": None}
    (run / "plan.json").unlink()
    (run / "usage.json").unlink()
    costs = dash(tmp_path).get("/api/run", run="one").json["costs"]
    assert costs == {"predicted": {"peak_gib": None}, "measured": {"peak_gib": 12.5}}


def test_the_conversations_of_a_step_are_those_of_the_plan_with_their_masks(dash, tiny_run):
    from whet.data.plan.planner import Plan
    from whet.data.prepare.store import Store
    from whet.data.render.detokenize import open_decoder

    answer = dash(tiny_run.parent).get("/api/run/step", run=tiny_run.name, step=2).json
    documents = Plan.load(tiny_run / "plan").documents_of(1).tolist()
    recorded = losses_of_step(read_training_losses(tiny_run), 2)
    losses = dict(zip(recorded["document"].tolist(), recorded["loss"].tolist(), strict=True))
    assert sorted(losses) == sorted(documents)
    worst_first = sorted(documents, key=losses.__getitem__, reverse=True)
    assert [(each["document"], each["loss"]) for each in answer["conversations"]] == [
        (document, pytest.approx(losses[document])) for document in worst_first
    ]
    store = Store(Path(json.loads((tiny_run / "ledger.json").read_text())["stores"]["train"]))
    decoder = open_decoder(store.folder)
    for each in answer["conversations"]:
        ids, loss = store.ids(each["document"]).tolist(), store.loss(each["document"])
        assert "".join(text for text, _ in each["segments"]) == decoder.text(ids)
        assert each["supervised"] == int(loss[1:].sum())
        trained = "".join(text for text, supervised in each["segments"] if supervised)
        assert trained == decoder.text([token for token, learned in zip(ids, loss, strict=True) if learned])


def test_the_losses_of_tokens_are_those_of_the_step_and_the_model_answers(dash, tiny_run):
    """By the processes that load models: a replay, then a chat."""
    server = dash(tiny_run.parent)
    events = [
        json.loads(line) for line in server.post("/api/run/replay", {"run": tiny_run.name, "step": 5}).body.splitlines()
    ]
    (found,) = events
    assert found.get("exact"), found
    recorded = losses_of_step(read_training_losses(tiny_run), 5)
    expected = dict(zip(recorded["document"].tolist(), recorded["loss"].tolist(), strict=True))
    for each in found["conversations"]:
        losses = [loss for _, loss in each["losses"] if loss is not None]
        assert np.mean(losses) == pytest.approx(expected[each["document"]], rel=1e-5)
    body = {"run": tiny_run.name, "with_base": False, "messages": [[{"role": "user", "content": "Hi"}]],
            "sampling": {"max_new_tokens": 4}}  # fmt: skip
    *streamed, answer = [json.loads(line) for line in server.post("/api/chat", body).body.splitlines()]
    assert "".join(event.get("text", "") for event in streamed) == answer["answer"]
    assert len(answer["explain"]) == answer["tokens"] == 4
    assert all(0 <= token["probability"] <= 1 for token in answer["explain"])
    failed = server.post("/api/run/replay", {"run": tiny_run.name, "step": 5000}).body
    assert "step 5000" in json.loads(failed)["error"]


def test_what_cannot_be_chatted_with_is_refused_at_once(dash, tiny_run, tmp_path):
    make_run(tmp_path / "new")
    server = dash(tmp_path)
    body = {"run": "new", "messages": [[{"role": "user", "content": "Hi"}]]}
    assert server.post("/api/chat", body).status == 404
    for change in ({"step": 3}, {"messages": []}, {"sampling": {"temperature": -1}}, {"run": "/etc"}, {"model": "/etc"},
                   {"messages": [[{"role": "user", "content": "x", "path": "/etc"}]]}):  # fmt: skip
        assert dash(tiny_run.parent).post("/api/chat", body | {"run": tiny_run.name} | change).status in (400, 404, 422)


def test_conversations_by_loss_are_those_of_whet_inspect(dash, tiny_run):
    from whet.run.loss_histories import ConversationHistories

    expected = ConversationHistories.read(tiny_run)
    server = dash(tiny_run.parent)
    answer = server.get("/api/run/losses", run=tiny_run.name, limit=200).json
    assert (answer["seen"], answer["total"]) == (len(expected.histories), expected.total)
    lasts = [row["last"] for row in answer["rows"]]
    assert lasts == sorted(expected.histories.last.tolist(), reverse=True)[: len(lasts)]
    row = answer["rows"][0]
    text = server.get("/api/run/conversation", run=tiny_run.name, document=row["document"]).json
    assert (text["source"], text["line"]) == (row["source"], row["line"])
    for wrong in ({"sort": "x"}, {"pattern": "x"}, {"limit": 10**6}):
        assert server.get("/api/run/losses", run=tiny_run.name, **wrong).status in (400, 422)


@pytest.mark.parametrize("step", [0, 99999])
def test_a_step_that_does_not_exist_is_an_error_that_says_how_many_there_are(dash, tiny_run, step):
    answer = dash(tiny_run.parent).get("/api/run/step", run=tiny_run.name, step=step)
    assert answer.status == 404
    assert "the plan has steps 1 to 12" in answer.json["error"]


def test_a_damaged_run_is_shown_with_what_is_left(dash, tmp_path):
    run = make_run(tmp_path / "bad")
    for name in ("status.json", "plan.json", "ledger.json", "effect.json"):
        (run / name).write_bytes(b"\x00garbage\xff")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    server = dash(tmp_path)
    answer = server.get("/api/run", run="bad")
    assert answer.status == 200
    damage = " ".join(answer.json["damage"])
    assert all(
        name in damage
        for name in ("status.json", "plan.json", "ledger.json", "metrics.jsonl: lines that cannot be read: 1")
    )
    assert server.get("/api/run/curves", run="bad").json["rows"] == 10
    for path in ("/api/run/step?step=1&", "/api/run/ledger?", "/api/run/losses?"):
        assert server.get(f"{path}run=bad").status in (200, 400, 404)
    (run / "config.yaml").write_text("{{{")
    assert server.get("/api/run", run="bad").json["damage"]
    assert server.get("/api/runs").status == 200


def test_numbers_that_are_not_finite_and_pipes_in_place_of_files_do_no_harm(dash, tmp_path):
    run = make_run(tmp_path / "one")
    (run / "plan.json").write_text('{"steps": NaN, "rows": Infinity, "batch": [1e999], "text": "\\ud800"}')
    server = dash(tmp_path)
    assert server.get("/api/run", run="one").json["plan"]["steps"] is None
    (run / "logs").mkdir()
    (run / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "logs/rank-0.log", "checkpoints/best", "samples.jsonl", "losses.bin", "ledger.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    for path in ("/api/runs", "/api/run?run=one", "/api/run/curves?run=one", "/api/run/log?run=one"):
        assert server.get(path).status in (200, 400, 404)


def test_lines_of_the_ledger_behind_a_branch(dash, tmp_path):
    run = make_run(tmp_path / "one")
    lines = [{"use": "train", "file": "a.jsonl", "line": n, "outcome": "dropped" if n % 2 else "truncated",
              "reason": "empty" if n % 2 else "too long", "detail": ""} for n in range(1, 501)]  # fmt: skip
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = dash(tmp_path)
    first = server.get("/api/run/ledger", run="one", outcome="dropped", reason="empty").json
    assert ([line["line"] for line in first["lines"]], first["more"]) == ([str(n) for n in range(1, 401, 2)], True)
    rest = server.get("/api/run/ledger", run="one", outcome="dropped", reason="empty", start=200).json
    assert ([line["line"] for line in rest["lines"]], rest["more"]) == ([str(n) for n in range(401, 501, 2)], False)


def test_the_tail_of_a_log_goes_on_where_it_ended(tmp_path):
    file = tmp_path / "rank-0.log"
    file.write_text("one\ntwo\nthr")
    lines, position = log_tail(file, None)
    assert lines == ["one", "two"]
    with file.open("a") as opened:
        opened.write("ee\n")
    assert log_tail(file, position) == (["three"], 14)
    file.write_text("anew\n")
    assert log_tail(file, 14)[0] == ["anew"]
    file.write_text("x" * 100_000 + "\nend\n")
    assert log_tail(file, None)[0] == ["end"]


# Compare.


def test_a_comparison_is_that_of_whet_runs_compare(dash, tmp_path):
    from whet.runs.compare import compare_runs, read_compared

    draw = np.random.default_rng(0)
    for name, lr, loss in (("a", 1e-3, 2.0), ("b", 1e-2, 1.5)):
        add_losses(make_run(tmp_path / name, lr=lr), 10, loss + draw.normal(size=50) / 10)
    found = dash(tmp_path).get("/api/compare", run=["a", "b"]).json
    expected = compare_runs(read_compared([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert found["settings"] == expected["settings"] == {"train.optimizer.lr": [1e-3, 1e-2]}
    assert found["metrics"] == expected["metrics"]
    assert found["paired"][0]["p"] == expected["paired"][0]["p"] < 0.05
    assert "better, significant" in found["sentences"][0]
    server = dash(tmp_path)
    assert server.get("/api/compare", run=["a", "a@10"]).status == 200
    assert server.get("/api/compare", run=["a"]).status == 400
    assert server.get("/api/compare", run=["a", "../b"]).status == 404
    assert server.get("/api/compare", run=["a", "b@7"]).status in (200, 400)


# Live.


def read_event(stream) -> tuple[str, dict]:
    name = data = ""
    while True:
        line = stream.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and name:
            return name, json.loads(data)


def test_new_steps_logs_and_states_arrive_by_themselves(dash, tmp_path):
    run = make_run(tmp_path / "one", state="running", host=os.uname().nodename)
    write_lock(run, os.uname().nodename, os.getpid(), time.time() - 100)
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("hello\n")
    server = dash(tmp_path)
    with urllib.request.urlopen(f"{server.url}/api/live?run=one", timeout=30) as stream:
        first = dict([read_event(stream), read_event(stream)])
        assert first["log"] == {"rank": 0, "start": None, "end": 6, "lines": ["hello"]}
        assert first["state"]["name"] == "one"
        append(run, {"time": time.time(), "step": 11, "loss": 1.25, "lr": 1e-3, "tokens": 1100})
        name, lines = read_event(stream)
        assert (name, lines[0]["step"], lines[0]["loss"]) == ("steps", 11, 1.25)
        append(run, {"time": time.time(), "step": 11, "val_loss": 1.0})
        assert read_event(stream)[0] == "evaluation"


def test_a_name_in_runs_folder_is_relative(tmp_path):
    make_run(tmp_path / "a" / "b")
    assert RunsFolder(tmp_path).names() == ["a/b"]
    assert RunsFolder(tmp_path / "a" / "b").names() == ["."]
    assert RunsFolder(tmp_path / "a" / "b").find(".")
