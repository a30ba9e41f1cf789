"""When a run is restarted, and when not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.launch.restart_policy import AttemptResult, Finish, Restart, decide_restart, is_same_failure


def crash(step: int = 0, message: str = "lost", rank: int | None = 1) -> AttemptResult:
    return AttemptResult("crashed", 3, step, message, rank)


def test_backoff_doubles_up_to_a_minute() -> None:
    history, waits = [], []
    for step in range(9):
        history.append(crash(step))
        decision = decide_restart(history, max_restarts=100, first_wait_s=1.0)
        assert isinstance(decision, Restart)
        waits.append(decision.after_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_the_number_of_restarts_is_limited() -> None:
    history = [crash(1), crash(2), crash(3)]
    assert isinstance(decide_restart(history[:2], 2, 1.0), Restart)
    last = decide_restart(history, 2, 1.0)
    assert isinstance(last, Finish)
    assert last.exit_code == 3
    assert "no restarts left (launch.max_restarts = 2); rank 1 failed after step 3: lost" in last.reason
    assert isinstance(decide_restart([crash()], 0, 1.0), Finish)


def test_the_same_failure_twice_in_a_row_is_not_restarted() -> None:
    one, other = (
        crash(7, "Connection closed by peer [10.0.0.1]:4711"),
        crash(7, "Connection closed by peer [10.0.0.1]:9"),
    )
    decision = decide_restart([one, other], 9, 1.0)
    assert isinstance(decision, Finish)
    assert (decision.exit_code, "failed again after step 7" in decision.reason) == (3, True)
    assert isinstance(decide_restart([one, crash(8, other.message)], 9, 1.0), Restart)
    assert isinstance(decide_restart([one, crash(7, "out of memory")], 9, 1.0), Restart)
    assert isinstance(decide_restart([one, crash(9), other], 9, 1.0), Restart)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (AttemptResult("done", 0, 30), 0),
        (AttemptResult("stopped", 75, 12, "stopped"), 75),
        (AttemptResult("stopped", 130, 0, "interrupted"), 130),
        (AttemptResult("input", 1, 0, "model.path: no such folder"), 1),
    ],
)
def test_only_a_crash_is_restarted(ending: AttemptResult, code: int) -> None:
    for history in ([ending], [crash(1), ending]):
        decision = decide_restart(history, 9, 1.0)
        assert isinstance(decision, Finish)
        assert decision.exit_code == code


def test_a_program_of_which_steps_are_not_known_uses_up_its_restarts_and_its_exit_code_stays() -> None:
    attempts = [AttemptResult("crashed", 7, None, "exit code 7", 0)] * 3
    assert isinstance(decide_restart(attempts[:2], 2, 1.0), Restart)
    last = decide_restart(attempts, 2, 1.0)
    assert last == Finish(7, "no restarts left (launch.max_restarts = 2); rank 0 failed: exit code 7")


endings = st.builds(
    AttemptResult, st.sampled_from(["done", "stopped", "input", "crashed"]), st.sampled_from([0, 1, 3, 75, 130]),
    st.none() | st.integers(0, 3), st.sampled_from(["a 1", "a 2", "b"]), st.none() | st.integers(0, 3),
).filter(lambda one: one.kind != "crashed" or one.exit_code)  # fmt: skip


@given(st.lists(endings, min_size=1, max_size=8), st.integers(0, 5), st.floats(0.01, 100))
def test_a_restart_is_bounded_and_follows_only_a_new_crash(
    history: list[AttemptResult], most: int, wait: float
) -> None:
    decision = decide_restart(history, most, wait)
    if isinstance(decision, Restart):
        assert history[-1].kind == "crashed"
        assert len(history) <= most
        assert len(history) < 2 or not is_same_failure(*history[-2:])
        assert 0 < decision.after_s <= 60
    else:
        assert decision.exit_code != 0 or history[-1].kind != "crashed"
