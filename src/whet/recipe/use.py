"""A run's model at work again: answering, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whet.checkpoint import place
from whet.checkpoint.load import load
from whet.config import Config, read_config
from whet.core.errors import WhetError
from whet.core.ranks import Ranks, start_ranks
from whet.core.run import split_reference
from whet.data.render import Renderer
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load import load_model
from whet.model.lora import language_model, merge
from whet.model.loss import LossModel
from whet.model.tokenizer import load_tokenizer
from whet.recipe.about import require_base
from whet.recipe.data import hush_libraries, prepare_data, recorded_data, tokenizer_of
from whet.recipe.folder import changed_settings, frozen_date
from whet.recipe.measure import answer_stops, measure
from whet.recipe.parts import Arithmetic, arithmetic_of, build_model, choose_arithmetic, make_root


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that can answer."""

    model: nn.Module
    renderer: Renderer
    stops: list[int]


def load_ready(reference: str) -> Ready:
    """A model folder, a hub id, a built-in model, or a run (RUN, RUN@STEP, RUN@best, RUN@latest), ready to answer."""
    hush_libraries()
    path, step = split_reference(reference)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if not (path / "config.yaml").exists():
        config = ModelConfig(path=reference)
        model, tokenizer = load_model(config, "auto", device), load_tokenizer(config)
    else:
        run = load_run(path, step)
        # merged it would answer a little faster, but a model in 4 bits may be too large for that
        model = language_model(run.model) if run.config.quantize else merge(run.model)
        config, tokenizer = run.config.model, tokenizer_of(run.config)
        attention.leave(model)
    model = model.to(device).eval()
    renderer = Renderer(tokenizer, "assistant")
    return Ready(model, renderer, answer_stops(renderer, config))


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run's model as a checkpoint left it."""

    config: Config
    model: nn.Module
    step: int
    arithmetic: Arithmetic
    ranks: Ranks


def load_run(path: Path, step: str = "latest") -> LoadedRun:
    """The model of a run after a step, or as the newest or the best checkpoint has it."""
    config = run_config(path)
    folder = path / "checkpoints"
    number = place.find(folder, step)
    ranks = start_ranks()
    arithmetic = arithmetic_of(config, ranks.device, trains=False)
    return LoadedRun(config, model_after(config, number, ranks), number, arithmetic, ranks)


def run_config(path: Path) -> Config:
    """The configuration of a run, wherever it was moved to."""
    if not (path / "config.yaml").exists():
        raise WhetError(f"{path}: not a run (it has no config.yaml). Give the folder of a run, such as runs/demo")
    return read_config(path / "config.yaml").at(path)


def model_after(config: Config, step: int, ranks: Ranks, arithmetic: Arithmetic | None = None) -> nn.Module:
    """A run's model as the checkpoint after `step` has it, whole, on the device of `ranks`."""
    arithmetic = arithmetic or choose_arithmetic(config, ranks.device, trains=False)
    model = build_model(config, arithmetic, ranks.device, 0)
    folder = config.folder / "checkpoints" / place.name_of(step)
    manifest = load(folder, LossModel(language_model(model)), None, ranks)
    require_base(config, manifest, ranks)
    return model


def evaluate_run(reference: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure a run again, as its configuration, or `overrides`, say."""
    hush_libraries()
    path, step = split_reference(reference)
    run = load_run(path, step)
    config = read_config(path / "config.yaml", overrides).at(path)
    changed = [key for key, _, _ in changed_settings(path, config) if not key.startswith("data.validation.sources")]
    if changed:
        raise WhetError(
            f"{changed[0]}: an evaluation cannot change what was trained, or trained conversations might be measured. "
            "It takes eval.*, data.validation.sources and train.micro_rows"
        )
    if config.data.validation == run.config.data.validation:
        data = recorded_data(config, path / "ledger.json")
    else:
        data = prepare_data(config, frozen_date(path))
    root = make_root(config, run.model, run.arithmetic, run.ranks.device, len(data.tokenizer), data.longest)
    results, _ = measure(config, data, root, run.ranks, run.arithmetic)
    if not results:
        raise WhetError(
            f"{path}: this run has neither validation data nor tasks, so there is nothing to measure. Give some: "
            "eval.tasks=[orders], or data.validation.sources=[{path: FILE}]"
        )
    return {"run": str(path), "step": run.step, **results}
