"""validation.npy: what is kept of each evaluation, and what a damaged file does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whet.core.errors import WhetError
from whet.evaluation import validation_losses
from whet.evaluation.statistics import paired_loss_difference
from whet.evaluation.validation_losses import (
    ConversationLosses,
    add_validation_losses,
    read_validation_losses,
    truncate_validation_losses,
)


def losses(*per_token: float, first: int = 0) -> ConversationLosses:
    count = len(per_token)
    return ConversationLosses.from_documents(
        np.arange(first, first + count, dtype=np.uint64),
        np.arange(1, count + 1),
        np.array(per_token) * np.arange(1, count + 1),
    )


def test_documents_of_a_conversation_are_joined_and_empty_ones_left_out() -> None:
    found = ConversationLosses.from_documents(
        np.array([9, 2, 9, 5], dtype=np.uint64), np.array([3.0, 1.0, 2.0, 0.0]), np.array([1.0, 2.0, 4.0, 0.0])
    )
    assert found.conversations.tolist() == [2, 9]
    assert found.tokens.tolist() == [1, 5]
    assert found.nats.tolist() == [2.0, 5.0]
    assert found.loss == 7 / 6


def test_evaluations_are_added_repeated_and_truncated(tmp_path: Path) -> None:
    for step, loss in ((0, 3.0), (10, 2.0), (20, 1.0), (10, 2.5)):
        add_validation_losses(tmp_path, step, losses(loss, loss))
    assert {step: each.loss for step, each in read_validation_losses(tmp_path).items()} == {0: 3.0, 10: 2.5}
    array = np.load(tmp_path / "validation.npy")
    assert array.dtype.names == ("conversation", "tokens", "step-000000", "step-000010")
    truncate_validation_losses(tmp_path, 5)
    assert list(read_validation_losses(tmp_path)) == [0]
    truncate_validation_losses(tmp_path, -1)
    assert not (tmp_path / "validation.npy").exists()
    truncate_validation_losses(tmp_path, 3)


def test_other_conversations_replace_the_file(tmp_path: Path) -> None:
    add_validation_losses(tmp_path, 1, losses(3.0, 2.0))
    add_validation_losses(tmp_path, 2, losses(3.0, 2.0, first=1))
    assert list(read_validation_losses(tmp_path)) == [2]


def test_the_newest_and_the_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation_losses, "_MAX_EVALUATIONS", 4)
    for step in range(20):
        add_validation_losses(tmp_path, step, losses(1.0 if step == 3 else 2.0))
    assert list(read_validation_losses(tmp_path)) == [3, 17, 18, 19]
    monkeypatch.setattr(validation_losses, "_MAX_BYTES", 0)
    add_validation_losses(tmp_path, 20, losses(2.0))
    assert list(read_validation_losses(tmp_path)) == [3, 20]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 300), st.binary(min_size=1, max_size=4))
def test_damage_is_named_and_set_aside(tmp_path: Path, at: int, content: bytes) -> None:
    (tmp_path / "validation.npy").unlink(missing_ok=True)
    add_validation_losses(tmp_path, 1, losses(3.0, 2.0))
    data = bytearray((tmp_path / "validation.npy").read_bytes())
    data[at : at + len(content)] = content
    (tmp_path / "validation.npy").write_bytes(data)
    with contextlib.suppress(WhetError):
        read_validation_losses(tmp_path)
        return
    with pytest.raises(WhetError, match=r"validation\.npy: cannot be read .*Delete it"):
        read_validation_losses(tmp_path)
    add_validation_losses(tmp_path, 2, losses(1.0))
    assert (tmp_path / "damaged-validation.npy").exists()
    assert list(read_validation_losses(tmp_path)) == [2]


def test_the_paired_difference_is_that_of_the_losses() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 100, 400)
    a = draw.normal(3, 1, 400) * tokens
    b = a - 0.05 * tokens + draw.normal(0, 0.1, 400) * tokens
    found = paired_loss_difference(a, b, tokens)
    assert found.mean == pytest.approx((a.sum() - b.sum()) / tokens.sum())
    assert found.interval[0] < found.mean < found.interval[1]
    assert found.p < 0.001
    # the delta method's standard error of a ratio
    residual = (a - b) - found.mean * tokens
    error = np.sqrt((residual**2).sum()) / tokens.sum()
    assert found.interval[1] - found.interval[0] == pytest.approx(2 * 1.96 * error, rel=0.1)
    shuffled = paired_loss_difference(a, a + draw.normal(0, 0.1, 400) * tokens, tokens)
    assert shuffled.p > 0.01
