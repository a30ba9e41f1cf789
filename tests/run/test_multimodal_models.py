"""Checkpoints of image-text models train on text with their language model; the other parts stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from whet.model.load.builtin_models import builtin_folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma") / "model"
    tokenizer = AutoTokenizer.from_pretrained(builtin_folder("builtin:tiny"))
    first = len(tokenizer)
    text = {
        "vocab_size": first + 3, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=first,
        boi_token_index=first + 1, eoi_token_index=first + 2,
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("settings", [(), ("adapter={rank: 2}",)], ids=["full", "lora"])
def test_the_language_model_is_trained_and_nothing_else(
    gemma: Path, whet: Callable[..., Any], recipe: str, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    ended = whet(
        "train", recipe, f"model.path={gemma}", f"run.dir={run}", "train.steps=2", "export.at_end=merged", *settings
    )
    assert ended.code == 0, ended.err
    before, after = (load_file(folder / "model.safetensors") for folder in (gemma, run / "exports/merged"))
    assert before.keys() == after.keys()
    is_text = {name: "language_model" in name or "lm_head" in name for name in before}
    for name in before:
        same = torch.equal(before[name], after[name])
        assert same or is_text[name], f"{name} changed"
        if is_text[name] and "proj" in name:
            assert not same, f"{name} did not change"
    assert sum(is_text.values()) < len(before)
    base, tuned = (
        AutoModelForImageTextToText.from_pretrained(place).state_dict() for place in (gemma, run / "exports/merged")
    )
    assert all(torch.equal(base[name], tuned[name]) for name in base if "vision" in name or "projector" in name)
    if settings:
        exported = whet("export", str(run), "--to", "adapter")
        assert exported.code == 0, exported.err
        names = load_file(run / "exports/adapter/adapter_model.safetensors")
        assert names
        assert all("language_model" in name for name in names)
