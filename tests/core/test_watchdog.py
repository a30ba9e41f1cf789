"""Who is late, as far as the processes have told."""

from __future__ import annotations

from typing import Any

from whet.core.heartbeat import Phase, describe_phase
from whet.core.watchdog import describe_hang, lagging_ranks, stalled_s

NOW = 10_000.0


def told(
    meeting: int, waiting: bool, heard_s: float = 1.0, long: bool = False, doing: str = "computing"
) -> dict[str, Any]:
    return {
        "step": 12, "doing": doing, "meeting": meeting, "waiting": waiting, "long": long, "for_s": 100.0,
        "time": NOW - heard_s, "host": "node",
    }  # fmt: skip


def test_the_rank_that_has_not_come_to_the_meeting_is_late() -> None:
    assert lagging_ranks({0: told(5, True), 1: told(4, False), 2: told(5, True)}, NOW, 20) == [1]
    assert lagging_ranks({0: told(5, True), 1: told(4, True)}, NOW, 20) == [1]
    assert lagging_ranks({0: told(5, True), 1: told(5, False)}, NOW, 20) == [1]


def test_a_rank_that_is_not_heard_of_is_late_wherever_it_was() -> None:
    assert lagging_ranks({0: told(5, False), 1: told(5, True, heard_s=30)}, NOW, 20) == [1]


def test_none_is_late_where_all_wait_for_each_other() -> None:
    everyone = {0: told(5, True), 1: told(5, True)}
    assert lagging_ranks(everyone, NOW, 20) == []
    assert "the network between them is at fault" in describe_hang(everyone, NOW, 60, 20)


def test_the_late_rank_is_named_with_what_it_did() -> None:
    words = describe_hang({0: told(5, True), 1: told(4, False, heard_s=30, doing="saving")}, NOW, 60, 20)
    assert "parallel.timeout = 1 minutes" in words
    assert "rank 1 on node, last heard of 30 s ago in step 12, saving" in words
    assert "Waiting for it: rank 0, in step 12, computing, waiting for the others" in words


def test_who_works_at_length_is_not_stuck_while_it_is_heard_of() -> None:
    assert stalled_s(told(4, False, heard_s=1), NOW, 20) == 101
    assert stalled_s(told(4, False, heard_s=1, long=True), NOW, 20) == 0
    assert stalled_s(told(4, False, heard_s=30, long=True), NOW, 20) == 130
    assert stalled_s(told(4, True, heard_s=1, long=True), NOW, 20) == 101


def test_whereabouts_tell_the_step_and_how_long() -> None:
    here = Phase()
    assert describe_phase(here.told()) == "before the first step, starting"
    here.at("computing gradients", 7)
    here.meets()
    assert describe_phase(here.told()) == "in step 7, computing gradients, waiting for the others"
    here.met()
    assert (here.meeting, here.waiting) == (1, False)
    assert 0 <= here.told()["for_s"] < 5
