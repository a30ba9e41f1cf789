"""Retention: the union of the newest, the best and every n-th; never empty."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from whet.checkpoint import directory
from whet.checkpoint.directory import DamagedCheckpointError, Retention, lower_is_better, rank_by_score
from whet.checkpoint.load import load_checkpoint
from whet.checkpoint.save import CheckpointSaver
from whet.core.distributed import Ranks
from whet.core.errors import WhetError

ALONE = Ranks(0, 1, torch.device("cpu"))

policies = st.builds(
    Retention, st.integers(1, 5), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 20))
)  # fmt: skip
all_steps = st.lists(st.integers(1, 200), unique=True)
all_scores = st.dictionaries(st.integers(1, 200), st.floats(0, 10, allow_nan=False))


@given(all_steps, all_scores, policies, st.booleans())
def test_a_step_is_kept_exactly_if_a_rule_keeps_it(
    steps: list[int], scores: dict[int, float], policy: Retention, lower: bool
) -> None:
    kept = policy.steps_to_keep(steps, scores, lower)
    assert kept <= set(steps)
    for step in steps:
        newer = sum(other > step for other in steps)
        sign = 1 if lower else -1
        better = [
            other for other in steps
            if other in scores and step in scores and (sign * scores[other], other) < (sign * scores[step], step)
        ]  # fmt: skip
        expected = (
            newer < policy.last
            or (step in scores and len(better) < policy.best)
            or (policy.every is not None and step % policy.every == 0)
        )
        assert (step in kept) == expected


@given(all_steps, all_scores, policies)
def test_the_newest_is_never_deleted(steps: list[int], scores: dict[int, float], policy: Retention) -> None:
    kept = policy.steps_to_keep(steps, scores)
    assert bool(kept) == bool(steps)
    assert not steps or max(steps) in kept


@given(st.integers(1, 60), st.integers(1, 7), all_scores, policies)
def test_applying_retention_after_every_save_equals_applying_it_once(
    steps: int, every: int, scores: dict[int, float], policy: Retention
) -> None:
    """A step deleted early is never needed later, and max_kept is never exceeded."""
    kept: set[int] = set()
    saved = range(every, steps + 1, every)
    for step in saved:
        kept = policy.steps_to_keep({*kept, step}, {s: v for s, v in scores.items() if s <= step})
        assert len(kept) <= policy.max_kept(steps)
    assert kept == policy.steps_to_keep(saved, scores)


def test_lower_is_better_for_losses_only() -> None:
    assert [lower_is_better(metric) for metric in ("val_loss", "val_bpb", "val_accuracy", "task/orders")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert rank_by_score([1, 2, 3, 4], {1: 0.5, 2: 0.9, 3: 0.5}, lower_is_better=False) == [2, 1, 3]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 4)
    return model, torch.optim.AdamW(model.parameters())


def test_the_best_checkpoint_is_marked_and_kept(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, *make(), ALONE, Retention(last=1, best=1, every=10)) as saver:
        for step, loss in ((5, 3.0), (7, 1.0), (9, 2.0), (10, 2.5), (11, 1.5)):
            saver.save(step, {})
            saver.add_scores({step: loss})
    assert directory.list_steps(tmp_path) == [7, 10, 11]
    assert (tmp_path / "best").read_text().startswith("step-000007\n")
    assert [directory.resolve_step(tmp_path, which) for which in ("best", "latest", "10")] == [7, 11, 10]
    with pytest.raises(WhetError, match=r"@8: no such checkpoint\. Use one of 7, 10, 11, latest, best"):
        directory.resolve_step(tmp_path, "8")


def test_without_an_evaluation_there_is_no_best(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, *make(), ALONE) as saver:
        saver.save(1, {})
    with pytest.raises(WhetError, match="@best: none of its checkpoints was evaluated"):
        directory.resolve_step(tmp_path, "best")


def test_a_damaged_best_never_names_another_checkpoint(tmp_path: Path) -> None:
    """step-000007 and step-000006 differ in one bit."""
    with CheckpointSaver(tmp_path, *make(), ALONE, Retention(last=9)) as saver:
        for step in range(1, 9):
            saver.save(step, {})
        saver.wait()
        saver.add_scores({7: 0.5})
    file = tmp_path / "best"
    content = file.read_bytes()
    assert directory.resolve_step(tmp_path, "best") == 7
    flipped = [content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]
               for bit in range(8 * len(content))]  # fmt: skip
    for damaged in (*flipped, b"", b"\0" * 12, b"\xff\xfe", content[:5], b"step-000006\n" + content[12:]):
        file.write_bytes(damaged)
        with pytest.raises(WhetError, match=r"best: damaged: .* Use one of 1, .* 8, latest; --resume writes it again"):
            directory.resolve_step(tmp_path, "best")
    file.write_bytes(b"\xff")
    directory.mark_best(tmp_path, 7)
    assert file.read_bytes() == content
    file.write_text("step-000006\n")  # as earlier versions wrote it
    assert directory.resolve_step(tmp_path, "best") == 6


def test_older_checkpoints_lose_their_optimizer_state_and_stay_loadable(tmp_path: Path) -> None:
    model, optimizer = make()
    with CheckpointSaver(tmp_path, model, optimizer, ALONE, Retention(last=4), optimizers="newest") as saver:
        for step in (1, 2, 3, 4):
            saver.save(step, {})
    assert [(tmp_path / f"step-00000{step}/optimizer").exists() for step in (1, 2, 3, 4)] == [False, False, True, True]
    assert directory.resumable_steps(tmp_path) == [3, 4]
    assert load_checkpoint(tmp_path / "step-000001", make()[0], None, ALONE)["step"] == 1
    with pytest.raises(DamagedCheckpointError, match="the optimizer state was deleted"):
        load_checkpoint(tmp_path / "step-000001", *make(), ALONE)


def test_a_start_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    for name in (".step-000003.writing", ".step-000001.deleting", "step-000009"):
        (tmp_path / name / "model").mkdir(parents=True)
    with CheckpointSaver(tmp_path, *make(), ALONE):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == [
        "step-000009"
    ]  # without a manifest it may be a user's own folder
