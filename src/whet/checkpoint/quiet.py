"""Warnings of torch about what is meant."""

from __future__ import annotations

import warnings


def quiet() -> None:
    """A single process saves alone. Said for good: filters that are put back cannot be used from two threads."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")
