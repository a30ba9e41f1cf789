"""Steps that are recorded choose what plain ones choose. On a CPU a recording is what asks again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from whet.execution.cuda_graphs import Capture
from whet.inference import decode_runner
from whet.inference.generate import Sampling, generate
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=20, seed=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(ModelConfig(path="builtin:tiny"), torch.float32)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[Capture], None]:
    """Let steps be recorded by something else than CUDA graphs."""

    def by(capture: Capture) -> None:
        original = decode_runner.DecodeRunner.__init__
        monkeypatch.setattr(decode_runner, "make_capture", lambda: capture)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(
            decode_runner.DecodeRunner, "__init__", lambda self, *rest: original(self, *rest[:-2], True, True)
        )

    return by


def test_the_second_step_of_a_size_is_recorded(model: Any, record: Callable[[Capture], None]) -> None:
    plain = generate(model, PROMPTS, [], 0, SAMPLING, 4)
    recorded, asked = [], []

    def capture(ask: Callable[[], None]) -> Callable[[], None]:
        recorded.append(1)
        return lambda: (asked.append(1), ask())[1]

    record(capture)
    assert generate(model, PROMPTS, [], 0, SAMPLING, 4) == plain
    assert len(recorded) == 1
    assert len(asked) == 18  # of twenty tokens the prompt gives the first, and a plain step the second


def test_where_steps_cannot_be_recorded_answers_are_the_same(
    model: Any, record: Callable[[Capture], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = generate(model, PROMPTS, [], 0, SAMPLING, 4)

    def capture(ask: Callable[[], None]) -> Callable[[], None]:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    record(capture)
    assert generate(model, PROMPTS, [], 0, SAMPLING, 4) == plain
    said = capsys.readouterr().err
    assert said.count("cannot be recorded (operation not permitted when stream is capturing)") == 1
