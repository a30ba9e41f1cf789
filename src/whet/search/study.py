"""The study in Optuna's storage: samplers, the pruner for brackets and rungs, and how trials are recorded.

Optuna's states: RUNNING, also of a trial that waits for the search to be resumed; COMPLETE at full length; PRUNED if it
was stopped at a rung, or crashed, with the worst value at the rung that it did not reach; FAIL if it does not count,
because its combination is invalid or was tried before.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from whet.core.console import warn
from whet.core.display import mask_secrets
from whet.core.errors import RunFailedError, WhetError, first_line
from whet.core.files import atomic_write, hash_json, is_open_at, move_aside
from whet.core.json_lines import describe_lines, read_json_lines
from whet.search.brackets import continues
from whet.search.space import Assignment, Parameter, Space, Value

RECIPE, JOURNAL = "search.yaml", "journal.log"
"""In the search's folder: the recipe with its ranges, and Optuna's records."""
BRACKET, CONTINUES, UNCOUNTED, ERROR = "bracket", "continues", "uncounted", "error"
FOLDER, OWNER = "folder", "owner"
"""Attributes of a trial: the number of its bracket; the number of rungs beyond which it may continue; why it does not
count; why it crashed; its run folder; the search that runs it, of those that share a storage."""
_CREATING_S = 0.5
_RECIPE = "recipe"
"""Attribute of the study: the hash of what all trials have in common."""


class AshaPruner(BasePruner):
    """Stops a trial that does not rank among the first of its rung, in its bracket."""

    def __init__(self, divisor: float) -> None:
        self._divisor = divisor

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Compare the trial with those that have reported the same rung."""
        rung = trial.last_step
        if rung is None:
            return False
        sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        others = [
            sign * other.intermediate_values[rung]
            for other in study.get_trials(deepcopy=False)
            if other.number != trial.number
            and other.user_attrs.get(BRACKET) == trial.user_attrs.get(BRACKET)
            and rung in other.intermediate_values
            and counts(other)
        ]
        return not continues(sign * trial.intermediate_values[rung], others, self._divisor)


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial is one of search.max_trials."""
    return UNCOUNTED not in trial.user_attrs and (trial.state != TrialState.FAIL)


def worst_value(study: Study) -> float:
    """The value of a trial that crashed."""
    return -math.inf if study.direction == StudyDirection.MAXIMIZE else math.inf


def open_study(
    folder: Path, storage: str | None, name: str, lower_is_better: bool, pruner: BasePruner, recipe: str,
    exists: bool, joins: bool,
) -> Study:  # fmt: skip
    """Create the study of a search, load it if the search `exists`, or join that of a search elsewhere. `recipe`: a
    hash, which all searches of a study have in common."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    direction = "minimize" if lower_is_better else "maximize"
    try:
        opened = _open_journal(folder / JOURNAL, exists) if storage is None else _open_database(storage)
        if exists:
            known = optuna.get_all_study_names(opened)
            name = known[0] if storage is None and known else name  # a journal has one, also if the recipe was renamed
            if name not in known:
                where = str(folder / JOURNAL) if storage is None else f"search.storage: {mask_secrets(storage)}"
                raise WhetError(
                    f"{where}: it has no study named {name}, so the trials of this search are unknown. If the search "
                    "had another name, give it back: run.name=NAME. If its data is gone, bring it back from a copy"
                )
            return optuna.load_study(study_name=name, storage=opened, pruner=pruner)
        study = optuna.create_study(
            study_name=name, storage=opened, direction=direction, pruner=pruner, load_if_exists=joins
        )
        if study.user_attrs.setdefault(_RECIPE, recipe) != recipe:
            raise WhetError(
                f"search.storage: its study {name} is a search with another recipe, so trials cannot be compared. Use "
                "the same recipe and overrides, or give this search another name: run.name=NAME"
            )
        study.set_user_attr(_RECIPE, recipe)
        return study
    except WhetError:
        raise
    except optuna.exceptions.DuplicatedStudyError:
        raise WhetError(
            f"search.storage: it has a study named {name} already. Continue it, or join it from another machine, with "
            "--resume; or give this search another name: run.name=NAME"
        ) from None
    except Exception as error:  # of the database, its driver, or a damaged file
        if storage is None:
            raise _damaged_journal(folder / JOURNAL, first_line(error)) from None
        raise WhetError(
            f"search.storage: {mask_secrets(storage)}: the study {name} cannot be opened ({type(error).__name__}: "
            f"{first_line(error)}). Check the URL and that the database is reachable and its driver is installed, or "
            "bring the file back"
        ) from None


@contextlib.contextmanager
def storage_failures(storage: str | None) -> Iterator[None]:
    """A database that fails while the search uses it: its trials save and end, and --resume continues them."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise RunFailedError(
            f"search.storage: {mask_secrets(storage or '')}: the database failed while the search used it "
            f"({first_line(error.__cause__ or error)}). See that it can be reached and written, then continue with "
            "--resume"
        ) from None


def _open_database(url: str, tries: int = 5) -> BaseStorage:
    """PostgreSQL with psycopg 3, where that is installed; SQLAlchemy would take psycopg2."""
    scheme, colon, rest = url.partition("://")
    if scheme in ("postgresql", "postgres") and find_spec("psycopg") is not None:
        scheme = "postgresql+psycopg"
    if scheme.startswith("sqlite") and rest in ("", "/"):
        raise WhetError(
            f"search.storage: {url}: this database is in memory, so the search could not be resumed. Name a file, such "
            "as sqlite:////home/me/search.db"
        )
    while True:
        try:
            return optuna.storages.get_storage(f"{scheme}{colon}{rest}")
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError):
            # another search creates the tables at this moment
            tries -= 1
            if not tries:
                raise
            time.sleep(_CREATING_S)


def _open_journal(file: Path, resume: bool) -> BaseStorage:
    """Removes what a killed process has left: Optuna's lock, half a line. The folder's lock excludes other writers."""
    if resume and not file.exists():
        raise WhetError(
            f"{file} is gone, so the trials of this search are unknown. Bring it back, or use another run.dir"
        )
    with contextlib.suppress(FileNotFoundError):
        file.with_name(f"{file.name}.lock").unlink()
    if file.exists():
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    return JournalStorage(_Journal(file))


class _Journal(JournalFileBackend):
    """The journal of a search, which is its memory: if someone deletes or replaces it meanwhile, as editors do when
    they save, it is put back. One that was shortened is an error at once: what Optuna writes then would be lost."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path, self._file = path, path.open("rb")
        self._size = 0

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._require_whole()
        super().append_logs(logs)
        self._size = self._path.stat().st_size

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        self._require_whole()
        try:
            yield from super().read_logs(log_number_from)
        except ValueError as error:
            raise _damaged_journal(self._path, first_line(error)) from None

    def _require_whole(self) -> None:
        if not is_open_at(self._file, self._path):
            self._put_back()
        if self._path.stat().st_size < self._size:
            raise _damaged_journal(self._path, "it was shortened while the search wrote to it")

    def _put_back(self) -> None:
        if not self._path.with_name(RECIPE).exists():  # a trial may have made the folder again
            raise WhetError(
                f"{self._path.parent}: the search's folder was deleted or moved while the search was writing to it. If "
                "you moved it, continue it there: run.dir=FOLDER with --resume"
            )
        other = move_aside(self._path).name if os.path.lexists(self._path) else None
        self._file.seek(0)
        atomic_write(self._path, self._file.read())
        self._file.close()
        self._file = self._path.open("rb")
        happened = f"replaced by another file, which is now {other}," if other else "deleted"
        warn(f"{self._path}: {happened} while the search was writing to it. All that it knew is in it again")


def _damaged_journal(file: Path, reason: str) -> WhetError:
    """For a journal that cannot be read, with the lines that are at fault."""
    with contextlib.suppress(OSError):
        if lines := read_json_lines(file)[1]:
            reason = f"{describe_lines(lines)} cannot be read"
    return WhetError(
        f"{file}: damaged ({reason}), so the trials of this search are unknown. Bring it back from a copy, or start a "
        "new search: run.dir=FOLDER. The runs of its trials stay as they are"
    )


def suggest_values(study: Study, trial: optuna.trial.Trial, space: Space, sampler: BaseSampler) -> Assignment:
    """Draw the values of a new trial."""
    study.sampler = sampler
    return space.assign(lambda parameter: _suggest(trial, parameter))


def make_sampler(method: str, seed: int, number: int, max_trials: int, point: Assignment | None = None) -> BaseSampler:
    """A sampler for one trial, with a seed of its own: a resumed search goes on as if it had not been interrupted.
    `point`: the values, where they are chosen already."""
    own_seed = int(hash_json([seed, number])[:8], 16)
    if method == "tpe" and point is None:
        return TPESampler(seed=own_seed, n_startup_trials=max(4, min(10, max_trials // 4)))
    drawn = RandomSampler(seed=own_seed)
    return drawn if point is None else PartialFixedSampler(point, drawn)


def _suggest(trial: optuna.trial.Trial, parameter: Parameter) -> Value:
    if parameter.kind == "choice":
        value: Value = trial.suggest_categorical(parameter.name, parameter.values)
        return value
    if parameter.kind == "int":
        return int(trial.suggest_int(parameter.name, int(parameter.low), int(parameter.high)))
    return float(trial.suggest_float(parameter.name, parameter.low, parameter.high, log=parameter.kind == "log"))


def find_duplicate(study: Study, number: int, values: Assignment) -> int | None:
    """The trial that had the same values before."""
    for other in study.get_trials(deepcopy=False):
        if other.number != number and counts(other) and other.params == values:
            return other.number
    return None


_FEWEST_RANKED, _TOP, _SHUFFLES = 10, 5, 40


def parameter_importance(study: Study) -> dict[str, float]:
    """How much each parameter decides whether a trial is among the best, as shares of 1; empty if that cannot be told.

    PED-ANOVA over the ranks of all trials. Of few trials it finds a pattern in anything, most in parameters that only
    some trials have; so what nine of ten random orders of the same trials give is subtracted.
    """
    ranked = _rank_by_wins(study)
    if len(ranked) < _FEWEST_RANKED:
        return {}
    randomness, by_chance = random.Random(0), dict[str, list[float]]()
    found = _rank_importance(ranked)
    for _ in range(_SHUFFLES):
        for name, value in _rank_importance(randomness.sample(ranked, len(ranked))).items():
            by_chance.setdefault(name, []).append(value)
    beyond = {name: max(0.0, value - sorted(by_chance[name])[_SHUFFLES * 9 // 10]) for name, value in found.items()}
    total = sum(beyond.values())
    ordered = sorted(beyond, key=lambda name: -beyond[name])
    return {name: beyond[name] / total for name in ordered} if total > 0 else {}


def _rank_by_wins(study: Study) -> list[FrozenTrial]:
    """All trials, the best first: by the share of its bracket that a trial beats, each at the last rung that both have
    reached. The first trials of a bracket get far without being good."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if counts(trial) and trial.intermediate_values]
    sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0

    def beaten(trial: FrozenTrial) -> float:
        shares = []
        for other in trials:
            common = trial.intermediate_values.keys() & other.intermediate_values.keys()
            if other is not trial and common and other.user_attrs.get(BRACKET) == trial.user_attrs.get(BRACKET):
                own, theirs = (sign * each.intermediate_values[max(common)] for each in (trial, other))
                shares.append(float(own < theirs))
        return sum(shares) / max(1, len(shares))

    return sorted(trials, key=lambda trial: -beaten(trial))


def _rank_importance(ranked: Sequence[FrozenTrial]) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(direction="minimize")
        study.add_trials(
            optuna.create_trial(params=trial.params, distributions=trial.distributions, value=float(rank))
            for rank, trial in enumerate(ranked)
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=max(0.1, _TOP / len(ranked)))
        found: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator, normalize=False)
    return {name: value if math.isfinite(value) else 0.0 for name, value in found.items()}
