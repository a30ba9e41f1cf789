"""Fixtures for tests that compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before the test, and torch's own settings after it."""
    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    before = dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit, functorch.ban_recompute_materialized_backward
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit, functorch.ban_recompute_materialized_backward = before
