"""Fixtures of the inference tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model


@pytest.fixture(scope="module")
def model() -> Any:
    """builtin:tiny with larger weights, so that the most likely token is clear and completions differ."""
    model_ = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
    for parameter in model_.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return model_
