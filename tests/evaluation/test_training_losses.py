"""losses.bin: what is written is read, a resumed run repeats nothing, and damage costs no more than losses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.evaluation.training_losses import (
    LOSS_RECORD,
    TRAINING_LOSSES,
    LossHistories,
    TrainingLossWriter,
    losses_of_step,
    read_training_losses,
)


def write_steps(folder: Path, first: int, last: int, after: int = 0) -> None:
    """Steps of two conversations, the loss of which is the step's number and one more."""
    writer = TrainingLossWriter(folder, after)
    for step in range(first, last + 1):
        tokens = np.array([2, 4])
        writer.write(step, np.array([step, 70]), tokens, tokens * np.array([step, step + 1.0]))
    writer.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    records = read_training_losses(tmp_path)
    assert records.tolist() == [(1, 1, 2, 1), (1, 70, 4, 2), (2, 2, 2, 2), (2, 70, 4, 3), (3, 3, 2, 3), (3, 70, 4, 4)]
    assert losses_of_step(records, 2)["document"].tolist() == [2, 70]
    assert len(losses_of_step(records, 4)) == 0
    assert len(read_training_losses(tmp_path / "none")) == 0


def test_what_is_not_finite_is_not_a_number(tmp_path: Path) -> None:
    writer = TrainingLossWriter(tmp_path, 0)
    writer.write(1, np.arange(4), np.array([1, 0, 1, 1]), np.array([np.inf, 0.0, 1e300, 2.0]))
    writer.close()
    assert np.isnan(read_training_losses(tmp_path)["loss"]).tolist() == [True, True, True, False]
    assert LossHistories(read_training_losses(tmp_path)).documents.tolist() == [3]


@given(st.integers(0, 6), st.integers(0, 15))
def test_a_resumed_run_has_every_step_once(tmp_path_factory: pytest.TempPathFactory, step: int, cut: int) -> None:
    """Killed in the middle of a write, then continued from the checkpoint of any step."""
    folder, whole = tmp_path_factory.mktemp("cut"), tmp_path_factory.mktemp("whole")
    write_steps(folder, 1, 6)
    file = folder / TRAINING_LOSSES
    os.truncate(file, file.stat().st_size - cut)
    write_steps(folder, step + 1, 8, after=step)
    write_steps(whole, 1, 8)
    if step < 6 or not cut:
        assert file.read_bytes() == (whole / TRAINING_LOSSES).read_bytes()
    else:  # a checkpoint is newer than the last loss: what was cut is missing, nothing is twice
        assert np.unique(read_training_losses(folder)[["step", "document"]]).size == len(read_training_losses(folder))


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_bytes_are_read_and_continued(tmp_path_factory: pytest.TempPathFactory, garbage: bytes, step: int) -> None:
    folder = tmp_path_factory.mktemp("garbage")
    write_steps(folder, 1, 2)
    with (folder / TRAINING_LOSSES).open("ab") as file:
        file.write(garbage)
    LossHistories(read_training_losses(folder))
    write_steps(folder, step + 1, step + 1, after=step)
    steps = read_training_losses(folder)["step"]
    assert (np.diff(steps.astype(np.int64)) >= 0).all()
    assert steps.max() <= step + 1
    assert (folder / TRAINING_LOSSES).stat().st_size % LOSS_RECORD.itemsize == 0


def test_a_folder_in_its_place_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / TRAINING_LOSSES).mkdir()
    write_steps(tmp_path, 1, 1)
    assert len(read_training_losses(tmp_path)) == 2
    assert (tmp_path / f"damaged-{TRAINING_LOSSES}").is_dir()


def records_of(epochs: list[list[float]]) -> np.ndarray:
    """One step an epoch, with the loss of each conversation."""
    rows = [(step, document, 10, loss) for step, losses in enumerate(epochs, 1) for document, loss in enumerate(losses)]
    return np.array(rows, dtype=LOSS_RECORD)


def test_patterns_name_the_planted_conversations() -> None:
    """100 conversations over three epochs: 17 is never learned, 23 is forgotten, 42 has a wrong label."""
    random = np.random.default_rng(0)
    epochs = [(level * random.uniform(0.8, 1.25, 100)).tolist() for level in (2.0, 1.0, 0.5)]
    for epoch, never, forgotten, wrong in zip(epochs, (2.4, 2.4, 2.4), (2.0, 0.4, 1.1), (6.0, 6.5, 5.0), strict=True):
        epoch[17], epoch[23], epoch[42] = never, forgotten, wrong
    histories = LossHistories(records_of(epochs))
    assert set(histories.rows("never-learned").tolist()) == {17}
    assert histories.rows("forgotten").tolist() == [23]
    assert histories.rows("suspicious").tolist()[0] == 42
    assert set(histories.rows("suspicious").tolist()) <= {42, 17, 23}
    assert histories.visits.tolist() == [3] * 100
    history = histories.history(histories.documents.tolist().index(23))
    assert history.steps == (1, 2, 3)
    assert history.losses == pytest.approx((2.0, 0.4, 1.1))
    assert len(LossHistories(records_of([]))) == 0
