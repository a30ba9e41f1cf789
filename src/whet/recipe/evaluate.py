"""Measuring a run or a model again: loss, tasks, and beside what it is better."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.checkpoint import place
from whet.checkpoint.load import load
from whet.config import Config, read_config
from whet.core.config import load_config
from whet.core.console import be_quiet, warn
from whet.core.errors import WhetError
from whet.core.files import read_json, write_json
from whet.core.ranks import Ranks, start_ranks
from whet.core.run import split_reference
from whet.data.render import Renderer
from whet.infer.compare import as_record, from_record, report
from whet.infer.tasks.find import find_tasks
from whet.infer.tasks.task import Scored
from whet.model.lora import language_model
from whet.model.loss import LossModel
from whet.model.probe import require_sound
from whet.recipe.about import require_base
from whet.recipe.data import Data, hush_libraries, prepare_data, recorded_data, require_speech, tokenizer_of
from whet.recipe.folder import changed_settings, frozen_date
from whet.recipe.measure import measure_loss, measure_tasks
from whet.recipe.parts import Arithmetic, arithmetic_of, attend, build_model, make_root
from whet.recipe.ready import load_ready


@dataclass(frozen=True, slots=True)
class Question:
    """What the user wants to know of a run or a model."""

    reference: str
    overrides: Sequence[str] = ()
    tasks: str | None = None
    """Names and files with commas between them, or a YAML list."""
    data: str | None = None
    """A file to measure the loss on."""
    against: str | None = None
    """A run, a model, or a file that an evaluation left."""
    base: bool = True
    """Measure the model before training too, where it is a run."""
    out: str | None = None
    """A file for the result with all answers."""

    def settings(self) -> list[str]:
        tasks = [] if self.tasks is None else [f"eval.tasks={_listed(self.tasks)}"]
        # which checkpoints stay was decided by the run's own tasks; with others, its eval.best may not be among them
        return ["checkpoint.keep_best=0", *self.overrides, *tasks]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out about one model."""

    about: dict[str, Any]
    losses: dict[str, float]
    scored: list[Scored]
    before: list[Scored] | None = None
    """The same tasks before training."""


def evaluate(question: Question) -> dict[str, Any]:
    """Losses, scores with their intervals, and the difference from another model."""
    hush_libraries()
    ranks = start_ranks()
    if not ranks.is_first:
        be_quiet()
    config = _config(question)
    find_tasks(config.eval)  # what is wrong with them is told before a model is loaded
    if question.against is not None and not config.eval.tasks:
        raise WhetError("--against compares by tasks, and there are none. Give some: --tasks orders,my.jsonl")
    other = None if question.against is None else _other(question, config, ranks)
    wants_base = question.base and question.against is None
    found = _measured(question, config, ranks, wants_base)
    if not found.losses and not found.scored:
        raise WhetError(
            f"{question.reference}: there is neither validation data nor a task, so there is nothing to measure. Give "
            "some: --tasks orders, or --data FILE"
        )
    result = {**found.about, **_with_perplexity(found.losses)}
    if question.against is not None:
        result["against"] = question.against
    if found.scored:
        result |= {f"task/{each.task}": each.score for each in found.scored}
        result |= report(found.scored, other or found.before, "base" if other is None else "against")
    file = _file(question, found)
    if file is not None and ranks.is_first:
        result |= _kept(file, result, found.scored)
    ranks.leave_together()
    return result


def _listed(tasks: str) -> str:
    """As YAML: what is one already stays."""
    if tasks.lstrip().startswith("["):
        return tasks
    return json.dumps([name.strip() for name in tasks.split(",") if name.strip()])


def _is_run(reference: str) -> bool:
    return (split_reference(reference)[0] / "config.yaml").exists()


def _config(question: Question) -> Config:
    """A run's, with what the user changes of it; a model has none, and gets the usual one."""
    if not _is_run(question.reference):
        sources = [f"data.sources={json.dumps([{'path': question.data or 'builtin:orders'}])}"]
        return load_config(
            Config, None, [f"model.path={json.dumps(question.reference)}", *sources, *question.settings()]
        )
    path, _ = split_reference(question.reference)
    held = [] if question.data is None else [f"data.validation={json.dumps({'sources': [{'path': question.data}]})}"]
    config = read_config(path / "config.yaml", [*question.settings(), *held]).at(path)
    changed = [key for key, _, _ in changed_settings(path, config) if not key.startswith("data.validation")]
    if changed:
        raise WhetError(
            f"{changed[0]}: an evaluation cannot change what was trained, or trained conversations might be measured. "
            "It takes eval.*, data.validation.sources and train.micro_rows"
        )
    return config


def _measured(question: Question, config: Config, ranks: Ranks, wants_base: bool) -> Measured:
    found = (
        _of_run(question, config, ranks, wants_base)
        if _is_run(question.reference)
        else _of_model(question, config, ranks)
    )
    gc.collect()  # before another model is loaded
    if ranks.device.type != "cpu":
        torch.accelerator.empty_cache()
    return found


def _other(question: Question, config: Config, ranks: Ranks) -> list[Scored]:
    """The other model's scores on the same tasks; from a file they need not be found out again."""
    assert question.against is not None
    if question.against.endswith(".json"):
        return from_record(read_json(Path(question.against)), question.against)
    other = dataclasses.replace(question, reference=question.against, data=None, overrides=(), tasks=None)
    its = _config(other).model_copy(update={"eval": config.eval})
    return _measured(dataclasses.replace(other, data=""), its, ranks, wants_base=False).scored


def _of_run(question: Question, config: Config, ranks: Ranks, wants_base: bool) -> Measured:
    """The model as it was before training needs no second copy: the checkpoint is loaded into it afterwards."""
    path, step = split_reference(question.reference)
    number = place.find(path / "checkpoints", step)
    require_speech(config, path / "ledger.json")
    arithmetic = arithmetic_of(config, ranks.device, trains=False)
    context = arithmetic.context(ranks.device)
    model = build_model(config, arithmetic, ranks.device, 0)
    root = LossModel(language_model(model))
    renderer = Renderer(tokenizer_of(config), config.data.train_on)
    before = measure_tasks(config, renderer, root, ranks, context) if wants_base and config.eval.tasks else None
    manifest = load(path / "checkpoints" / place.name_of(number), root, None, ranks)
    require_base(config, manifest, ranks)
    with context:
        require_sound(root.language_model)
    losses: dict[str, float] = {}
    if config.data.validation is not None and question.data != "":
        losses = _losses(config, _data_of_run(path, config), model, ranks, arithmetic)
    scored = measure_tasks(config, renderer, root, ranks, context)
    return Measured({"run": str(path), "step": number}, losses, scored, before)


def _data_of_run(path: Path, config: Config) -> Data:
    if config.data.validation == read_config(path / "config.yaml").data.validation:
        return recorded_data(config, path / "ledger.json")
    return prepare_data(config, frozen_date(path))


def _losses(
    config: Config, data: Data, model: torch.nn.Module, ranks: Ranks, arithmetic: Arithmetic
) -> dict[str, float]:
    root = make_root(config, model, arithmetic, ranks.device, len(data.tokenizer), data.longest)
    return measure_loss(config, data, root, ranks, arithmetic.context(ranks.device))


def _of_model(question: Question, config: Config, ranks: Ranks) -> Measured:
    """A model folder or one of a hub, in the numbers that it was saved in."""
    ready = load_ready(question.reference)
    kept = next(ready.model.parameters()).dtype
    arithmetic = Arithmetic({torch.float64: "fp64"}.get(kept, "as saved"), kept, kept)
    losses: dict[str, float] = {}
    if question.data:
        made = prepare_data(config)
        data = dataclasses.replace(
            made, validation=made.train.store, validation_documents=np.arange(len(made.train.store), dtype=np.int64)
        )
        attend(config, ready.model, arithmetic, ranks.device, data.typical)
        losses = _losses(config, data, ready.model, ranks, arithmetic)
    root = LossModel(ready.model)
    scored = measure_tasks(config, ready.renderer, root, ranks, contextlib.nullcontext())
    return Measured({"model": question.reference}, losses, scored)


def _with_perplexity(losses: dict[str, float]) -> dict[str, float]:
    """e to the loss, where that is a number."""
    if losses.get("val_loss", math.inf) < 700:
        return {**losses, "val_perplexity": math.exp(losses["val_loss"])}
    return losses


def _file(question: Question, found: Measured) -> Path | None:
    """Answers are kept beside the run they are of, so that it can be compared later without asking again."""
    if question.out is not None:
        return Path(question.out).expanduser()
    if not found.scored or "run" not in found.about:
        return None
    return Path(found.about["run"]) / "evals" / f"{place.name_of(found.about['step'])}.json"


def _kept(file: Path, result: dict[str, Any], scored: list[Scored]) -> dict[str, str]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {**result, "scored": as_record(scored)})
    except OSError as error:
        warn(f"{file} could not be written: {error.strerror}; the result is not kept")
        return {}
    return {"file": str(file)}
