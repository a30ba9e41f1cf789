"""Checkpoints of image-text models train on text with their language model; the other parts stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tiny_architectures import save_tiny_model
from whet.model.load.pretrained import load_with_transformers
from whet.model.modules import other_modalities

FAMILIES = (
    "qwen3_5", "gemma3", "mistral3", "llama4", "qwen3_vl", "llava", "smolvlm", "internvl", "lfm2_vl",
    "mllama", "idefics3", "qwen3_5_moe", "llava_next", "got_ocr2",
)  # fmt: skip
_PROCESSOR = b'{"image_processor_type": "SiglipImageProcessor",  "size": 28}\n'


@pytest.mark.parametrize("how", [[], ["adapter={rank: 2}"]], ids=["full", "lora"])
@pytest.mark.parametrize("kind", [FAMILIES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES[1:])])
def test_the_language_model_is_trained_and_nothing_else(
    whet: Callable[..., Any], recipe: str, tmp_path: Path, kind: str, how: list[str]
) -> None:
    """The base is in bf16 and trained in fp32: what was not trained is exported in bf16, as it was."""
    run, base = tmp_path / "run", tmp_path / "model"
    model = save_tiny_model(kind, base, torch.bfloat16)
    (base / "preprocessor_config.json").write_bytes(_PROCESSOR)
    if not how:
        checked = whet("check", recipe, model, "--json")
        assert checked.code == 0, checked.out + checked.err
    ended = whet("train", recipe, model, f"run.dir={run}", "train.steps=2", "export.at_end=merged", *how)
    assert ended.code == 0, ended.err
    merged = run / "exports/merged"
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    first = AutoModelForImageTextToText.from_pretrained(base)
    others = tuple(f"{name}." for name in other_modalities(first))
    assert others
    loaded = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).state_dict()
    for name, weight in first.float().state_dict().items():
        if name.startswith(others):
            assert torch.equal(loaded[name], weight), name
    assert any(not torch.equal(loaded[name], weight) for name, weight in first.state_dict().items())
    unchanged = [name for name in before if before[name].dtype == after[name].dtype]
    assert unchanged
    assert all(before[name].equal(after[name]) for name in unchanged)
    assert all(after[name].dtype == torch.float32 for name in before.keys() - set(unchanged))
    assert (merged / "preprocessor_config.json").read_bytes() == _PROCESSOR
    if how:
        exported = whet("export", run, "--to", "adapter")
        assert exported.code == 0, exported.err
        folder = run / "exports/adapter"
        assert json.loads((folder / "certificate.json").read_text())["verified"]
        assert all("vision" not in name for name in load_file(folder / "adapter_model.safetensors"))
        tuned = PeftModel.from_pretrained(
            AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32), folder
        )
        tokens = torch.arange(3, 12)[None]
        with torch.no_grad():
            ours = load_with_transformers(merged, dtype=torch.float32).eval()(input_ids=tokens).logits
            torch.testing.assert_close(tuned.eval()(input_ids=tokens).logits, ours, rtol=1e-3, atol=1e-4)
