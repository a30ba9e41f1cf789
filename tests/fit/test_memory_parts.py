"""The parts of a peak add up to it."""

from __future__ import annotations

from whet.fit.estimate import GIB, MemoryParts


def test_parts_add_up_to_the_peak() -> None:
    parts = MemoryParts(weights=4 * GIB, gradients=2 * GIB, optimizer=GIB, activations=512, loss=256, workspace=256)
    assert parts.total == 7 * GIB + 1024
    assert list(parts.gib()) == [
        "weights", "gradients", "optimizer", "activations", "loss", "workspace", "total"
    ]  # fmt: skip
    assert parts.gib()["optimizer"] == 1.0
