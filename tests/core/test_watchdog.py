"""Which rank the others wait for, as far as the heartbeats tell."""

from __future__ import annotations

import json
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from whet.core.heartbeat import Phase, describe_phase
from whet.core.watchdog import Watchdog, describe_hang, lagging_ranks, stalled_s

NOW = 10_000.0


def beat(
    waits: int, waiting: bool, age_s: float = 1.0, unbounded: bool = False, name: str = "computing"
) -> dict[str, Any]:
    return {
        "step": 12, "name": name, "waits": waits, "waiting": waiting, "unbounded": unbounded, "for_s": 100.0,
        "time": NOW - age_s, "host": "node",
    }  # fmt: skip


def test_a_rank_that_has_not_entered_the_collective_lags() -> None:
    assert lagging_ranks({0: beat(5, True), 1: beat(4, False), 2: beat(5, True)}, NOW, 20) == [1]
    assert lagging_ranks({0: beat(5, True), 1: beat(4, True)}, NOW, 20) == [1]
    assert lagging_ranks({0: beat(5, True), 1: beat(5, False)}, NOW, 20) == [1]


def test_a_rank_without_a_fresh_heartbeat_lags_wherever_it_was() -> None:
    assert lagging_ranks({0: beat(5, False), 1: beat(5, True, age_s=30)}, NOW, 20) == [1]


def test_no_rank_lags_where_all_wait_in_the_same_collective() -> None:
    beats = {0: beat(5, True), 1: beat(5, True)}
    assert lagging_ranks(beats, NOW, 20) == []
    assert "the network between them is at fault" in describe_hang(beats, NOW, 60, 20)


def test_the_message_names_the_lagging_rank_and_its_phase() -> None:
    message = describe_hang({0: beat(5, True), 1: beat(4, False, age_s=30, name="saving")}, NOW, 60, 20)
    assert "parallel.timeout = 1 minutes" in message
    assert "rank 1 on node, last heartbeat 30 s ago in step 12, saving" in message
    assert "Waiting for it: rank 0, in step 12, computing, waiting for the others" in message


def test_a_rank_in_an_unbounded_phase_is_not_stuck_while_its_heartbeat_is_fresh() -> None:
    assert stalled_s(beat(4, False, age_s=1), NOW, 20) == 101
    assert stalled_s(beat(4, False, age_s=1, unbounded=True), NOW, 20) == 0
    assert stalled_s(beat(4, False, age_s=30, unbounded=True), NOW, 20) == 130
    assert stalled_s(beat(4, True, age_s=1, unbounded=True), NOW, 20) == 101


def test_a_phase_has_its_step_and_its_duration() -> None:
    phase = Phase()
    assert describe_phase(phase.snapshot()) == "before the first step, starting"
    phase.enter("computing gradients", 7)
    phase.begin_wait()
    assert describe_phase(phase.snapshot()) == "in step 7, computing gradients, waiting for the others"
    phase.end_wait()
    assert (phase.waits, phase.waiting) == (1, False)
    assert 0 <= phase.snapshot()["for_s"] < 5


def test_the_age_of_a_heartbeat_does_not_depend_on_the_clock_of_its_machine() -> None:
    """Rank 1 goes on, rank 2 is silent; their clocks do not enter."""
    store = HashStore()
    watchdog = Watchdog.__new__(Watchdog)
    watchdog._world_size, watchdog._began, watchdog._seen = 3, 5.0, {}
    for rank in (1, 2):
        store.set(f"whet/at/{rank}", json.dumps({"count": 0, "host": "a"}))
    assert [beat["time"] for beat in watchdog._read_heartbeats(store, now=10.0).values()] == [5.0, 10.0, 10.0]
    store.set("whet/at/1", json.dumps({"count": 1, "host": "a"}))
    assert [beat["time"] for beat in watchdog._read_heartbeats(store, now=30.0).values()] == [5.0, 30.0, 10.0]
