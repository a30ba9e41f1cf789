"""On CUDA: what a run leaves ships with a certificate, in every form, and answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

TOKENS = ("adapter.tokens=['<|im_end|>']", "model.add_tokens=['<|tool|>',' lamps']")
RUNS = {
    "whole": (),
    "in 16 bits": ("model.dtype=bf16", "train.optimizer.name=adamw16bit"),
    "lora": ("adapter.rank=4",),
    "dora with new tokens": ("adapter.method=dora", "adapter.rank=4", *TOKENS),
    "in 4 bits": ("quantize=nf4", "adapter.rank=4", "adapter.also_train=[norm]"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_exports_and_answers(kind: str, whet: Any, recipe: str, tmp_path: Path) -> None:
    if "quantize=nf4" in RUNS[kind]:
        pytest.importorskip("bitsandbytes")
    pytest.importorskip("gguf")
    run = tmp_path / "run"
    ended = whet(
        "train",
        recipe,
        f"run.dir={run}",
        "train.steps=6",
        "train.optimizer.lr=1e-2",
        "export.at_end=merged",
        *RUNS[kind],
    )
    assert ended.code == 0, ended.err
    assert json.loads((run / "exports/merged/certificate.json").read_text())["verified"]
    adapter = [("adapter",)] if any(option.startswith("adapter.") for option in RUNS[kind]) else []
    for form in [("gguf", "--dtype", "f32"), ("gguf", "--dtype", "q8_0"), *adapter]:
        ended = whet("export", run, "--to", *form, "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["certificate"]["verified"]
    question = ("--prompt", "Please send two red mugs to Anna.", "--max-new-tokens", "8", "--json")
    ended = whet("chat", run, "--against", "builtin:tiny", *question)
    assert ended.code == 0, ended.err
    assert set(json.loads(ended.out)) >= {"answer", "against"}
    ended = whet("eval", run, "--tasks", "orders", "eval.examples=8", "--json")
    assert ended.code == 0, ended.err
    assert set(json.loads(ended.out)["tasks"]["orders"]) >= {"score", "base", "difference"}
