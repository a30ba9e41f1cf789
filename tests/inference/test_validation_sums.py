"""Sums per document, on batches small enough to add by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whet.core.distributed import Ranks
from whet.data.batch import PackedBatch
from whet.inference.validation import ValidationMetadata, ValidationSums
from whet.model.loss.loss_model import LossSum

ALONE = Ranks(0, 1, torch.device("cpu"))


def batch(documents: list[int], edges: tuple[int, ...], labels: list[int]) -> PackedBatch:
    wanted, empty = torch.tensor(labels), torch.zeros(len(labels), dtype=torch.int64)
    at = torch.nonzero(wanted >= 0)[:, 0]
    return PackedBatch(empty, wanted, empty, empty, 9, at, None, edges, np.array(documents, dtype=np.int64))


def losses(*nll: float) -> LossSum:
    values = torch.tensor(nll)
    return LossSum(values.sum(), values, values < 1)


def test_every_position_counts_for_its_document() -> None:
    """Documents 12, 5 and 9 in two rows, the first padded; token 3 is special, token 4 has four bytes."""
    metadata = ValidationMetadata(np.array([1, 1, 1, 0, 4]), np.array([0] * 6 + [1] * 7), ("a", "b"))
    sums = ValidationSums(np.array([12, 5, 9]), metadata)
    sums.add(batch([12, 5], (0, 2, 4, 6, 6), [4, -100, 3, -100, -100, -100]), losses(0.5, 8.0))
    sums.add(batch([9], (0, 3), [1, 4, -100]), losses(2.0, 0.25))
    sums.add(batch([], (0, 1), [-100]), losses())  # a rank without rows runs padding
    found = sums.results(ALONE)
    assert found == {
        "val_loss": 10.75 / 4,
        "val_accuracy": 2 / 4,
        "val_bpb": pytest.approx(2.75 / np.log(2) / 9),
        "val_loss/a": 8.0,
        "val_tokens/a": 1,
        "val_loss/b": 2.75 / 3,
        "val_tokens/b": 3,
    }


def test_without_bytes_there_is_no_bpb_and_with_one_source_no_names() -> None:
    sums = ValidationSums(np.array([0]), ValidationMetadata())
    sums.add(batch([0], (0, 2), [1, -100]), losses(2.0))
    assert sums.results(ALONE) == {"val_loss": 2.0, "val_accuracy": 0.0}
