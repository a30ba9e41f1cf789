"""A search from start to end: read the ranges, plan rungs and budget, run the trials, write what they found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.checkpoint.directory import lower_is_better
from whet.config import Config
from whet.core.config import read_tree
from whet.core.errors import WhetError, os_error
from whet.core.files import atomic_write, hash_json, read_required_text
from whet.core.yaml import Node, dump_yaml, parse_yaml, read_yaml
from whet.search.brackets import Bracket, expected_at_rungs, make_brackets, rung_lengths
from whet.search.config import SearchConfig
from whet.search.controller import Controller, ScriptStartError
from whet.search.local_trials import LocalPlace
from whet.search.script import ScriptConfig, TrialConfig
from whet.search.slurm_trials import SlurmPlace
from whet.search.space import Space, read_space
from whet.search.study import JOURNAL, RECIPE, AshaPruner, open_study, storage_failures
from whet.search.trials import (
    OWNER_FILE,
    LengthTable,
    Place,
    length_in_steps,
    plain_recipe,
    require_metric,
    trial_length,
)

_DEFAULT_TRIALS = 16


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What a search will do."""

    space: Space
    config: TrialConfig
    """Of one trial, with the name and the folder of the search: for what all trials have in common."""
    settings: SearchConfig
    metric: str
    unit: str
    """Of the rungs: steps or tokens."""
    brackets: list[Bracket]
    tokens_per_unit: float | None
    """About, for the budget; None: not known, as of a script."""
    lengths: LengthTable

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def trials(self) -> int:
        return sum(bracket.trials for bracket in self.brackets)

    @property
    def minimizes(self) -> bool:
        if isinstance(self.config, ScriptConfig) and self.config.script.greater_is_better is not None:
            return not self.config.script.greater_is_better
        return lower_is_better(self.metric)


def plan_search(recipe: Path, overrides: Sequence[str]) -> SearchPlan:
    """Read the recipe and its ranges, prepare the data, and decide about brackets and rungs."""
    space = read_space(read_tree(Config, recipe, overrides))
    config = _any_valid_config(space)
    name = config.run.name or recipe.stem
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    settings = config.search or SearchConfig()
    _require_searchable(space, config, settings)
    metric = settings.metric or ("val_loss" if isinstance(config, ScriptConfig) else config.eval.best)
    require_metric(config, metric)
    lengths = LengthTable()
    length = trial_length(config, lengths)
    trials = _trial_count(space, settings)
    if settings.method == "asha":
        brackets = make_brackets(length, trials, settings.divisor, settings.max_rungs, settings.mode)
    else:
        brackets = [Bracket(rung_lengths(length, settings.divisor, 1), trials)]
    unit = "tokens" if length_in_steps(config) is None else "steps"
    tokens_per_unit = None
    if not isinstance(config, ScriptConfig):
        planned = lengths.of(config)
        tokens_per_unit = 1.0 if unit == "tokens" else float(planned.tokens[-1]) / planned.steps
    return SearchPlan(space, config, settings, metric, unit, brackets, tokens_per_unit, lengths)


def _any_valid_config(space: Space) -> TrialConfig:
    """The configuration of the first valid combination; read_space has found one."""
    randomness = random.Random(0)
    while True:
        with contextlib.suppress(WhetError):
            return space.config(space.assign(lambda parameter: parameter.draw(randomness)))


def _trial_count(space: Space, settings: SearchConfig) -> int:
    if settings.method == "single":
        return 1
    if settings.method != "grid":
        wanted = settings.max_trials or _DEFAULT_TRIALS
        every = space.combinations(wanted)
        return wanted if every is None else len(every)
    most = settings.max_trials or 10**5
    count = sum(1 for _, _ in zip(space.grid(), range(most), strict=False))
    if settings.max_trials is None and count == most:
        raise WhetError(f"search.method: the grid has more than {most:,} combinations. Set search.max_trials")
    return count


def _require_searchable(space: Space, config: TrialConfig, settings: SearchConfig) -> None:
    is_script = isinstance(config, ScriptConfig)
    if not space.parameters and settings.method != "single":
        raise WhetError(
            f"{space.tree.place}: this recipe has no range to search. Write one where a value stands, such as "
            f"{'script.arguments.learning_rate' if is_script else 'train.optimizer.lr'}: "
            "{search: log, low: 1e-6, high: 1e-4}"
        )
    for parameter in space.parameters:
        if is_script and parameter.path[:2] != ("script", "arguments"):
            raise WhetError(
                f"{parameter.place}: {parameter.name}: only script.arguments can be searched. Give one value"
            )
        if settings.method == "asha" and parameter.name in ("train.steps", "train.epochs", "train.tokens"):
            raise WhetError(
                f"{parameter.place}: {parameter.name}: asha compares trials after parts of their length, so the length "
                "cannot be searched. Give one value, or use search.method=tpe"
            )
        if parameter.path[0] in ("run", "launch", "export", "track", "profile") and parameter.name != "run.seed":
            raise WhetError(f"{parameter.place}: {parameter.name}: does not change what is trained. Give one value")
    if isinstance(config, ScriptConfig):
        return
    for key in ("start_step", "step_offset"):
        if given := getattr(config.train, key):
            raise WhetError(f"train.{key}: {given}: trials begin at step 0. Remove it")
    if config.checkpoint.optimizer == "none":
        raise WhetError("checkpoint.optimizer: none: promoted trials continue from their checkpoints. Remove it")


def preview(plan: SearchPlan) -> dict[str, Any]:
    """What the search will cost: for each bracket, how many trials reach each rung, and their tokens where they are
    known."""
    scale = plan.tokens_per_unit or 1.0
    full = plan.trials * max(bracket.rungs[-1] for bracket in plan.brackets) * scale
    brackets: list[dict[str, Any]] = []
    total = 0
    for bracket in plan.brackets:
        reached = expected_at_rungs(bracket, plan.settings.divisor)
        rungs: list[dict[str, Any]] = []
        for begin, end, n in zip((0, *bracket.rungs), bracket.rungs, reached, strict=False):
            cost = round(n * (end - begin) * scale)
            total += cost
            rungs.append({plan.unit: end, "trials": round(n, 1), "tokens": cost if plan.tokens_per_unit else None})
        brackets.append({"trials": bracket.trials, "rungs": rungs})
    tokens, full_tokens = (total, round(full)) if plan.tokens_per_unit else (None, None)
    return {
        "method": plan.settings.method, "metric": plan.metric, "trials": plan.trials, "unit": plan.unit,
        "parameters": {parameter.name: _describe_range(parameter) for parameter in plan.space.parameters},
        "brackets": brackets, "tokens": tokens, "full_length_tokens": full_tokens, "share": total / full,
    }  # fmt: skip


def _describe_range(parameter: Any) -> dict[str, Any]:
    if parameter.kind == "choice":
        described: dict[str, Any] = {"search": "choice", "values": parameter.values}
    else:
        described = {"search": parameter.kind, "low": parameter.low, "high": parameter.high}
    return described | ({"when": {key: list(values) for key, values in parameter.when}} if parameter.when else {})


def make_place(plan: SearchPlan, on_slurm: bool) -> Place:
    """Slurm, or the devices of this machine: as many for a trial as launch.gpus or launch.processes says, else one."""
    if on_slurm and isinstance(plan.config, ScriptConfig):
        raise WhetError(
            "--on slurm is for recipes: a script's trials run on one machine. Give the search a job of its own: whet "
            "launch --on slurm -- search CONFIG"
        )
    if on_slurm:
        return SlurmPlace()
    launch = plan.config.launch
    if launch.node_range()[1] > 1:
        raise WhetError(f"launch.nodes: {launch.nodes}: trials here use one machine. Add --on slurm, or remove it")
    modules = ["peft.tuners.lora"] if any(key == "adapter" for key in plan.space.tree.plain()) else []
    per_trial = launch.gpus or launch.processes or 1
    return LocalPlace(plan.folder / "logs", plan.settings.concurrent, per_trial, modules)


def run_search(plan: SearchPlan, place: Place, resume: bool) -> Any:
    """Run all trials in a place; returns Optuna's study. The caller has opened the folder."""
    exists = (plan.folder / RECIPE).exists()
    if not exists:  # of a search that was killed before its first trial
        (plan.folder / JOURNAL).unlink(missing_ok=True)
    study = open_study(
        plan.folder, plan.settings.storage, plan.config.run.name or "", plan.minimizes,
        AshaPruner(plan.settings.divisor), _hash_recipe(plan), exists=exists, joins=resume,
    )  # fmt: skip
    if not exists:
        atomic_write(plan.folder / OWNER_FILE, secrets.token_hex(8))
        atomic_write(plan.folder / RECIPE, dump_yaml(plain_recipe(plan.space.tree)))
    owner = _read_owner(plan.folder, plan.settings.storage is not None)
    controller = Controller(
        plan.space, plan.config, plan.settings, plan.metric, plan.brackets, study, plan.lengths, owner
    )  # fmt: skip
    try:
        controller.run(place)
    except ScriptStartError:
        if plan.settings.storage is None and not any(plan.folder.glob("trial-*")):
            (plan.folder / RECIPE).unlink()  # the corrected search may begin in this folder
        raise
    return study


def _read_owner(folder: Path, is_shared: bool) -> str:
    """What marks the trials of this search among those of a study that several share; empty in a search of an earlier
    version."""
    file = folder / OWNER_FILE
    if not file.exists() and not is_shared:  # deleted: all trials are of this search
        atomic_write(file, secrets.token_hex(8))
    if not file.exists():
        return ""
    remedy = "It tells which trials are of this search: bring it back from a copy"
    owner = read_required_text(file, remedy)
    if re.fullmatch(r"[0-9a-f]{16}", owner) is None:
        raise WhetError(f"{file}: damaged. {remedy}")
    return owner


# The folder of a search: search.yaml, journal.log, recipes/, logs/, one run folder a trial, and the results.


@contextlib.contextmanager
def open_search_folder(plan: SearchPlan, resume: bool) -> Iterator[None]:
    """Lock the folder of a search. Refuses one that holds something else, or another search."""
    folder = plan.folder
    entries = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    recipe = folder / RECIPE
    if entries and not recipe.exists() and set(entries) - {"search.lock", OWNER_FILE, "logs", JOURNAL, "recipes"}:
        raise WhetError(
            f"run.dir: {folder} holds files that do not belong to a search ({', '.join(entries[:3])}). Give an empty "
            "or new folder: run.dir=FOLDER"
        )
    if recipe.exists() and not resume:
        raise WhetError(
            f"{folder}: this folder holds a search already. Continue it with --resume, or give the new one another "
            "folder: run.dir=FOLDER"
        )
    if recipe.exists():
        _require_same_search(plan, recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "search.lock").open("a+")
    except OSError as error:
        raise os_error(error, "opening the search's folder", folder) or WhetError(
            f"run.dir: {folder} cannot be used as a folder: {error.strerror}. Give another one: run.dir=FOLDER"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise WhetError(
                f"{folder}: in use by another whet search ({lock.readline().strip()}). Wait for it, or give this one "
                "another folder: run.dir=FOLDER"
            ) from None
        lock.truncate(0)
        lock.write(f"{socket.gethostname()} pid {os.getpid()}\n")
        lock.flush()
        try:
            with storage_failures(plan.settings.storage):
                yield
        except OSError as error:
            place = error.filename2 or error.filename or folder
            raise os_error(error, "writing the search", folder) or WhetError(
                f"{place}: cannot be used ({error.strerror or error}). Move what is there away, then continue the "
                "search with --resume"
            ) from None


_CHANGEABLE = ("run.dir", "run.project", "search.concurrent", "search.storage", "launch", "track")
_CHANGEABLE_PREFIXES = tuple(f"{key}." for key in _CHANGEABLE)


def _require_same_search(plan: SearchPlan, recipe: Path) -> None:
    """The trials of a search are comparable only if all but their values is the same."""
    now = parse_yaml(dump_yaml(plain_recipe(plan.space.tree)), "now", expand="none")
    then, current = _flatten(read_yaml(recipe, expand="none")), _flatten(now)
    can_grow = (*_CHANGEABLE, *(() if plan.settings.method == "asha" else ("search.max_trials",)))
    for key in dict.fromkeys([*then, *current]):
        if then.get(key) != current.get(key) and not f"{key}.".startswith(tuple(f"{each}." for each in can_grow)):
            raise WhetError(
                f"{plan.folder}: this search cannot be resumed with another recipe ({key}: {then.get(key)!r} then, "
                f"{current.get(key)!r} now). Set it back, or start a new search: run.dir=FOLDER"
            )


def _hash_recipe(plan: SearchPlan) -> str:
    """Of what may not differ between the trials of a study."""
    tree = _flatten(parse_yaml(dump_yaml(plain_recipe(plan.space.tree)), "now", expand="none"))
    kept = {key: str(value) for key, value in tree.items() if not f"{key}.".startswith(_CHANGEABLE_PREFIXES)}
    return hash_json(kept)


def _flatten(node: Node, above: str = "") -> dict[str, Any]:
    if isinstance(node.value, dict | list) and node.value:
        inside = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        return {key: value for name, inner in inside for key, value in _flatten(inner, f"{above}{name}.").items()}
    return {above.rstrip("."): node.plain()}
