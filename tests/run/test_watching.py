"""What a run records and tells while it trains: losses by conversation, prompts, an early end, notifications, costs."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.core.costs import Costs, counted_costs, predicted_costs, write_usage
from whet.core.errors import WhetError
from whet.core.heartbeat import PHASE
from whet.core.notify import Notifier
from whet.evaluation.training_losses import losses_of_step, read_training_losses
from whet.run.loss_histories import ConversationHistories
from whet.run.monitor import RunMonitor
from whet.run.step_losses import choose_start, step_conversations
from whet.training.run_state import Run


def lines(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def test_damaged_losses_of_conversations_are_named(tiny_run: Path, tmp_path: Path) -> None:
    for name in ("ledger.json", "config.yaml"):
        shutil.copy(tiny_run / name, tmp_path)
    (tmp_path / "losses.bin").write_bytes(bytes([1, 0, 0, 0, 255, 255, 0, 0] * 2))
    with pytest.raises(WhetError, match=r"losses\.bin: damaged: it names conversation 65,535, and the data has 200"):
        ConversationHistories.read(tmp_path)


def test_the_losses_of_conversations_add_up_to_the_loss_of_each_step(tiny_run: Path) -> None:
    records = read_training_losses(tiny_run)
    for line in lines(tiny_run):
        if "loss" in line:
            mine = losses_of_step(records, line["step"])
            loss = (mine["loss"].astype(float) * mine["tokens"]).sum() / mine["tokens"].sum()
            assert loss == pytest.approx(line["loss"], rel=1e-6)
    found = ConversationHistories.read(tiny_run)
    assert (len(found.histories), found.total) == (48, 200)


@pytest.mark.parametrize(("step", "replayed"), [(1, 0), (7, 6), (9, 0), (12, 3)])
def test_a_replayed_step_has_the_losses_of_the_run(tiny_run: Path, step: int, replayed: int) -> None:
    """With and without a checkpoint just before it; fp64, so that the recorded fp32 is the only rounding."""
    found = step_conversations(tiny_run, step)
    assert (found.exact, found.weights, found.replayed) == (True, step - 1, replayed)
    for each in found.conversations:
        assert each.loss == pytest.approx(each.recorded_loss, rel=1e-6)
        known = [loss for loss in each.losses if loss is not None]
        assert len(known) == sum(each.supervised) > 0
        assert np.mean(known) == pytest.approx(each.loss)
        assert "".join(each.texts).startswith("<|im_start|>user")
        assert len(each.texts) == len(each.ids) == len(each.losses)


def test_a_replay_has_the_dropout_of_the_run(lora_run: Path) -> None:
    for each in step_conversations(lora_run, 7).conversations:
        assert each.loss == pytest.approx(each.recorded_loss, rel=1e-5)


def test_without_time_for_a_replay_the_nearest_checkpoint_serves_and_is_named(tiny_run: Path) -> None:
    found = step_conversations(tiny_run, 7, max_replay_s=0.0)
    assert (found.exact, found.weights, found.replayed) == (False, 8, 0)
    assert found.replay_s > 0
    assert all(each.loss != pytest.approx(each.recorded_loss, rel=1e-3) for each in found.conversations)


def test_a_replay_that_would_take_too_long_is_known_before(tmp_path: Path) -> None:
    """One-second steps, no checkpoint but the start: step 62 is a minute away, step 63 more."""
    taken = {step: {"step": step, "loss": 1.0, "step_s": 1.0, "tokens_per_s": 9.0} for step in range(1, 101)}
    assert choose_start(tmp_path, 61, 0, taken, 60.0).replayed == 60
    assert choose_start(tmp_path, 62, 0, taken, 60.0).replayed == 0


class Heard(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(500 if self.path == "/broken" else 204)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def heard() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    class Mine(Heard):
        bodies: list[dict[str, Any]] = []  # noqa: RUF012

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Mine.bodies
    server.shutdown()
    server.server_close()


def test_a_url_and_a_command_are_told(tmp_path: Path, heard: tuple[str, list[dict[str, Any]]]) -> None:
    url, bodies = heard
    told = tmp_path / "told"
    notifier = Notifier([f"{url}/x", f'cat > "{told}"; echo "$WHET_EVENT" >> "{told}"'], tmp_path / "my-run")
    notifier.send("failed", "no memory hf_abcdefghijklmnopqrstuvwx", step=3)
    notifier.wait()
    assert bodies[0]["event"] == "failed"
    assert bodies[0]["step"] == 3
    assert bodies[0]["text"] == "my-run failed: no memory hf_***"
    assert told.read_text().endswith("}failed\n")


def test_what_cannot_be_told_harms_nothing_and_shows_no_secret(
    tmp_path: Path, heard: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = heard
    targets = [f"{url}/broken", "http://127.0.0.1:1/secret-path", "exit 3", "sleep 60", "http://", "\0"]
    began = time.monotonic()
    notifier = Notifier(targets, tmp_path, timeout_s=0.5)
    notifier.send("finished", "done")
    notifier.wait()
    assert time.monotonic() - began < 30
    printed = capsys.readouterr().err
    assert printed.count("run.notify: ") == len(targets)
    assert "secret-path" not in printed
    assert "exit code 3" in printed
    assert "longer than" in printed


def test_a_stall_is_told_once_and_hours_add_up(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {price: 3.0}\n")
    told = tmp_path / "told"
    write_usage(tmp_path, [{"started": 0.0, "seconds": 3600.0, "devices": 2, "joules": 3.6e6}], None)
    notifier = Notifier([f'echo "$WHET_TEXT" >> "{told}"'], tmp_path)
    PHASE.enter("a phase that hangs", 7)
    monitor = RunMonitor(tmp_path, 1, notifier, stall_s=0.02, period_s=0.05)
    while not told.exists() or not told.read_text():
        time.sleep(0.01)
    time.sleep(0.2)
    monitor.close()
    notifier.wait()
    assert told.read_text().count("stalled") == 1
    assert "in step 7, a phase that hangs" in told.read_text()
    costs = counted_costs(tmp_path)
    assert costs is not None
    assert costs.device_hours == pytest.approx(2, abs=0.01)
    assert costs.money == pytest.approx(6, abs=0.03)
    assert costs.kwh is None, "the second session knows no energy"
    PHASE.enter("testing", 0)


@pytest.mark.parametrize("offset", [0, 400])
def test_the_whole_run_is_predicted_from_its_first_steps_and_once(tmp_path: Path, offset: int) -> None:
    from whet.core.run_folder import RunFolder

    (tmp_path / "config.yaml").write_text("run: {price: 3600.0}\n")
    folder = RunFolder(tmp_path)
    folder.step_offset = offset
    folder.set_status("running", offset + 6, offset + 100)
    common = {"time": time.time(), "loss": 1.0, "step_s": 2.0, "tokens_per_s": 1.0}
    steps = [common | {"step": offset + n} for n in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    RunMonitor(tmp_path, 4, Notifier([], tmp_path), 600.0).close()
    folder.close()
    costs = predicted_costs(tmp_path)
    assert costs is not None
    assert costs.seconds == pytest.approx(200, abs=2)
    assert costs.device_hours == pytest.approx(costs.seconds * 4 / 3600)
    assert costs.money == pytest.approx(costs.seconds * 4)
    steps[-1]["step_s"] = 99.0
    RunMonitor(tmp_path, 1, Notifier([], tmp_path), 600.0).close()
    assert predicted_costs(tmp_path) == costs


def test_damaged_usage_costs_nothing_but_itself(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {price: 1.0}\n")
    for content in ("", "{", '{"sessions": 3}', '{"sessions": [{"seconds": "x"}, 4]}'):
        (tmp_path / "usage.json").write_text(content)
        assert counted_costs(tmp_path) is None
        assert predicted_costs(tmp_path) is None
    assert str(Costs(5400.0, 3.0, 1.5, 4.0)) == "1.5 h, 3 device hours, 1.5 kWh, price 4.00"


EARLY = ("eval.every=2", "eval.patience=2", "train.optimizer.lr=0.5", 'eval.prompts=["Hello", "3 chairs"]')
"""The rate is far too high, so that every evaluation is worse than the first."""


def assert_ended_early(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("finished", 4, 12)
    assert (run / "checkpoints" / "best").read_text().startswith("step-000002")
    assert [event["kind"] for event in lines(run, "events")] == ["early-stop"]
    asked = [(line["step"], line["prompt"]) for line in lines(run, "samples")]
    assert asked == [(step, text) for step in (0, 2, 4) for text in ("Hello", "3 chairs")]


def test_patience_ends_a_run_with_its_best_kept_and_exported(
    whet: Callable[..., Any], tmp_path: Path, recipe: str
) -> None:
    whet("train", recipe, f"run.dir={tmp_path / 'run'}", *EARLY, "export.at_end=merged")
    assert_ended_early(tmp_path / "run")
    certificate = json.loads((tmp_path / "run/exports/merged/certificate.json").read_text())
    assert (certificate["verified"], certificate["step"]) == (True, 2)


def test_a_resumed_run_ends_early_where_an_uninterrupted_one_does(
    whet: Callable[..., Any], tmp_path: Path, recipe: str
) -> None:
    """Paused where no evaluation is due: the additional one there does not count."""
    whet("train", recipe, f"run.dir={tmp_path / 'whole'}", *EARLY)
    whet("train", recipe, f"run.dir={tmp_path / 'parts'}", *EARLY, "--until", "3")
    whet("train", recipe, f"run.dir={tmp_path / 'parts'}", *EARLY, "--resume")
    assert_ended_early(tmp_path / "whole")
    assert_ended_early(tmp_path / "parts")
    whole, parts = (read_training_losses(tmp_path / name) for name in ("whole", "parts"))
    assert whole.tobytes() == parts.tobytes()


@given(st.lists(st.floats(0, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 12))
def test_patience_counts_evaluations_since_the_best(losses: list[float], patience: int, resumed: int) -> None:
    """Of a run that evaluates every two steps, and was paused at an odd one."""
    for count in range(1, len(losses) + 1):
        done = {2 * i: {"val_loss": loss} for i, loss in enumerate(losses[:count])}
        done[2 * resumed + 1] = {"val_loss": 99.0}
        run: Any = SimpleNamespace(
            config=SimpleNamespace(eval=SimpleNamespace(best="val_loss", every=2, patience=patience)),
            intervals=SimpleNamespace(first=0, offset=0, steps=99), evaluations=done, step=2 * count,
        )  # fmt: skip
        run._scheduled_scores = lambda run=run: Run._scheduled_scores(run)
        run.best_evaluation = lambda run=run: Run.best_evaluation(run)
        best = losses.index(min(losses[:count]))
        assert Run.ends_early(run) == (count - 1 - best >= patience)
        run.step = 99
        assert not Run.ends_early(run), "it has ended anyway"


def test_without_tasks_a_run_answers_held_out_prompts_before_and_after(
    whet: Callable[..., Any], tmp_path: Path, recipe: str
) -> None:
    done = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=1", "eval.prompts=null")
    assert done.code == 0, done.err
    found = lines(tmp_path / "run", "samples")
    assert [line["step"] for line in found] == [0] * 4 + [1] * 4
    assert len({line["prompt"] for line in found}) == 4
    for line in found:
        assert line["task"] == "data.validation"
        assert line["prompt"].endswith("<|im_start|>assistant\n")
        assert line["expected"].startswith('{"item": ')
    page = (tmp_path / "run" / "report.html").read_text()
    assert "4 of 4 held-out samples" in page
    assert "4 of 200 conversations seen" in page
