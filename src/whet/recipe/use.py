"""A run's model at work again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from whet.checkpoint import place
from whet.checkpoint.load import load
from whet.config import Config, read_config
from whet.core.errors import WhetError
from whet.core.ranks import Ranks, start_ranks
from whet.model.lora import language_model
from whet.model.loss import LossModel
from whet.recipe.about import require_base
from whet.recipe.data import require_speech
from whet.recipe.parts import Arithmetic, arithmetic_of, build_model, choose_arithmetic


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
    require_speech(config, path / "ledger.json")
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
