"""Captured decode steps give the same tokens as eager ones. On a CPU a "capture" calls the function again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from whet.execution.cuda_graphs import Capture
from whet.inference import kv_cache
from whet.inference.generate import generate
from whet.inference.sampling import Sampling
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=20, seed=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(ModelConfig(path="builtin:tiny"), torch.float32)


@pytest.fixture
def use_capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Capture], None]:
    """Capture decode steps with a given function instead of CUDA graphs."""

    def use(capture: Capture) -> None:
        original = kv_cache.DecodeRunner.__init__
        monkeypatch.setattr(kv_cache, "make_capture", lambda: capture)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(
            kv_cache.DecodeRunner, "__init__", lambda self, *rest: original(self, *rest[:-2], True, True)
        )

    return use


def test_the_second_step_of_a_shape_is_captured(model: Any, use_capture: Callable[[Capture], None]) -> None:
    eager = generate(model, PROMPTS, SAMPLING, batch_size=4)
    captures, replays = [], []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        captures.append(1)
        return lambda: (replays.append(1), step())[1]

    use_capture(capture)
    assert generate(model, PROMPTS, SAMPLING, batch_size=4) == eager
    assert len(captures) == 1
    assert len(replays) == 18  # of twenty tokens prefill samples the first, and an eager step the second


def test_without_capture_the_tokens_are_the_same(
    model: Any, use_capture: Callable[[Capture], None], capsys: pytest.CaptureFixture[str]
) -> None:
    eager = generate(model, PROMPTS, SAMPLING, batch_size=4)

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    use_capture(capture)
    assert generate(model, PROMPTS, SAMPLING, batch_size=4) == eager
    warning = capsys.readouterr().err
    assert warning.count("CUDA graph capture failed (operation not permitted when stream is capturing)") == 1
