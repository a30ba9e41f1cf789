"""What tests of answers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model


@pytest.fixture(scope="module")
def model() -> Any:
    """Tiny with louder weights, so that the likeliest token is clear and answers differ."""
    made = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return made
