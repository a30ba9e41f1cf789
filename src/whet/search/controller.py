"""The search: samples trials, runs them up to their rungs, decides which continue, and resumes after a kill.

Optuna's storage and the run folders are the whole state. A search that was killed finds its trials there as RUNNING and
continues each from its checkpoint; what a trial has measured before the kill is read from its folder.
"""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from whet.core.console import ProgressBar, info, progress, warn
from whet.core.errors import ExitCode, StoppedError, WhetError
from whet.core.files import hash_json
from whet.core.run_folder import read_status
from whet.core.signals import collect_stop_signals
from whet.search.brackets import Bracket, choose_bracket
from whet.search.config import SearchConfig
from whet.search.script import ScriptConfig, TrialConfig
from whet.search.space import Assignment, Space
from whet.search.study import (
    BRACKET,
    CONTINUES,
    ERROR,
    FOLDER,
    OWNER,
    UNCOUNTED,
    counts,
    find_duplicate,
    make_sampler,
    suggest_values,
    worst_value,
)
from whet.search.trials import (
    OWNER_FILE,
    LengthTable,
    Place,
    Trial,
    TrialEnd,
    measured_names,
    read_progress,
    read_value,
    steps_at_rungs,
    trial_length,
    write_trial_recipe,
)

_MAX_REJECTED = 20
"""Combinations in a row that are invalid, or were tried before, until the search gives up finding another."""
_MAX_LISTED = 1000
"""Combinations of choices and integers, up to which none is drawn twice. Beyond, twice is rare."""
_POLL_S = 0.5
_MAX_SHOWN = 3
"""Running trials whose steps the progress bar shows."""


class ScriptStartError(WhetError):
    """The script fails in every trial before its first step: nothing was trained."""


class Controller:
    """Runs the trials of one search in one place."""

    def __init__(
        self, space: Space, config: TrialConfig, settings: SearchConfig, metric: str, brackets: Sequence[Bracket],
        study: Study, lengths: LengthTable, owner: str,
    ) -> None:  # fmt: skip
        """`config`: of any trial, for what all have in common. `owner`: marks the trials of this search, where several
        share a study."""
        self._space, self._settings, self._metric = space, settings, metric
        self._folder, self._name = config.folder, config.run.name or ""
        self._seed = config.run.seed
        self._brackets, self._study, self._lengths = brackets, study, lengths
        self._combinations = space.combinations(_MAX_LISTED)
        self._running: dict[int, Trial] = {}
        self._owner = owner
        self._rejected = 0  # in a row
        self._failed_start: str | None = None  # why the last trial failed, if no script has made a step yet
        self._is_exhausted = False

    def run(self, place: Place) -> None:
        """Run all trials. Raises StoppedError on request, after every trial has saved a checkpoint."""
        signals: list[int] = []
        total = sum(bracket.trials for bracket in self._brackets)
        done = sum(trial.state.is_finished() and counts(trial) for trial in self._trials())
        is_stopping = False
        with (
            collect_stop_signals(signals, lambda: info("stopping: trials save a checkpoint; Ctrl-C again kills them")),
            progress("searching", total, done) as bar,
        ):
            try:
                resumed = self._find_interrupted(bar)
                concurrent = self._settings.concurrent or place.slots
                while True:
                    if signals and not is_stopping:
                        is_stopping = True
                        place.stop()
                    while not is_stopping and not signals and len(self._running) < concurrent:
                        trial = resumed.pop(0) if resumed else self._next_trial()
                        if trial is None:
                            break
                        self._advance(trial, place, bar)
                    if not self._running:
                        break
                    for end in place.poll(_POLL_S):
                        self._take_end(end, place, bar, is_stopping)
                    bar.advance(0, self._describe_progress())
            except KeyboardInterrupt:
                place.kill()
                raise StoppedError(
                    f"{self._folder}: interrupted; the last checkpoints are good. Continue with --resume"
                ) from None
        if is_stopping:
            raise StoppedError(f"{self._folder}: stopped; its trials have saved checkpoints. Continue with --resume")

    # A trial's way

    def _advance(self, trial: Trial, place: Place, bar: ProgressBar, starts: bool = True) -> None:
        """Take the values of the rungs that the trial has reached; unless that ends it, start it up to its next."""
        while (value := read_value(trial.config.folder, trial.steps[trial.reached], self._metric)) is not None:
            if self._take_value(trial, value, bar):
                return
        if starts:
            self._running[trial.number] = trial
            place.start(trial.next_run())

    def _take_end(self, end: TrialEnd, place: Place, bar: ProgressBar, is_stopping: bool) -> None:
        trial = self._running.pop(end.number)
        has_value = read_value(trial.config.folder, trial.steps[trial.reached], self._metric) is not None
        if has_value:
            self._advance(trial, place, bar, starts=not is_stopping)
        elif end.exit_code == ExitCode.INPUT and read_progress(trial.config.folder)[0] == 0:
            self._reject(trial.number, f"invalid: {end.reason}")
        elif end.exit_code == ExitCode.DONE:
            self._require_measured(trial)
            self._take_crash(trial, f"its {self._metric} is not finite", bar)
        elif not (end.exit_code == ExitCode.STOPPED and is_stopping):
            self._require_started(trial, end)
            self._take_crash(trial, end.reason or "no message", bar)

    def _require_started(self, trial: Trial, end: TrialEnd) -> None:
        """End the search if its script does not take its arguments, or if two trials fail before their first step for
        the same reason and none has made one: all others would fail, too. One alone may be out of memory."""
        if not isinstance(trial.config, ScriptConfig) or self._failed_start == "":
            return
        if any(read_progress(folder)[0] for folder in self._folder.glob("trial-*")):
            self._failed_start = ""
            return
        if end.exit_code == ExitCode.USAGE or end.reason == self._failed_start:
            command = shlex.join(trial.config.script.argv())
            raise ScriptStartError(
                f"script: trial {trial.number} failed before its first step, and so would the others: "
                f"{end.reason.rstrip('.')}. Correct the script, script.command or script.arguments. It ran `{command}` "
                f"and {self._folder / 'logs'} has what it printed"
            )
        self._failed_start = end.reason

    def _require_measured(self, trial: Trial) -> None:
        """End the search if trials do not measure its metric at all: no other one would."""
        if isinstance(trial.config, ScriptConfig) and not (trial.config.folder / "metrics.jsonl").exists():
            raise WhetError(
                f"script.command: trial {trial.number} ended without a run folder: its trainer needs "
                "callbacks=[WhetCallback()], from whet.integrations.transformers. What it printed is in "
                f"{self._folder / 'logs'}"
            )
        found = measured_names(trial.config.folder, trial.steps[trial.reached])
        if self._metric not in found:
            raise WhetError(
                f"search.metric: {self._metric} is not among what trial {trial.number} has measured after step "
                f"{trial.steps[trial.reached]} ({', '.join(found) or 'nothing'}); {self._folder / 'logs'} has what it "
                "printed. Choose another one in a new folder: search.metric=NAME run.dir=FOLDER"
            )

    def _take_value(self, trial: Trial, value: float, bar: ProgressBar) -> bool:
        """Report the value of a rung; returns whether that ends the trial."""
        self._rejected = 0
        self._handle(trial.number).report(value, trial.rungs[trial.reached])
        trial.reached += 1
        return self._decide(trial, value, bar)

    def _decide(self, trial: Trial, value: float, bar: ProgressBar) -> bool:
        """End the trial at the rung that it has reached, or let it continue."""
        handle, text = self._handle(trial.number), f"trial {trial.number}: {self._metric} {value:.4f}"
        text += f" after step {trial.steps[trial.reached - 1]}"
        if trial.reached == len(trial.rungs):
            self._study.tell(trial.number, value, state=TrialState.COMPLETE)
        elif handle.should_prune():
            self._study.tell(trial.number, state=TrialState.PRUNED)
            text += f", stopped at rung {trial.reached} of {len(trial.rungs)}"
        else:
            handle.set_user_attr(CONTINUES, trial.reached)
            info(f"{text}, continues to step {trial.steps[trial.reached]}")
            return False
        info(text)
        bar.advance(1, self._describe_progress())
        return True

    def _take_crash(self, trial: Trial, reason: str, bar: ProgressBar) -> None:
        """A crash counts as the worst value at the rung that the trial did not reach."""
        warn(f"trial {trial.number} failed after step {read_progress(trial.config.folder)[0]}: {reason}")
        handle = self._handle(trial.number)
        handle.set_user_attr(ERROR, reason)
        handle.report(worst_value(self._study), trial.rungs[trial.reached])
        self._study.tell(trial.number, state=TrialState.PRUNED)
        bar.advance(1, self._describe_progress())

    def _reject(self, number: int, reason: str) -> None:
        """A trial that does not count: another takes its place."""
        self._handle(number).set_user_attr(UNCOUNTED, reason)
        self._study.tell(number, state=TrialState.FAIL)
        info(f"trial {number} is replaced: {reason}")
        self._rejected += 1
        if self._rejected < _MAX_REJECTED:
            return
        self._is_exhausted = True
        if reason.startswith("invalid") and not any(map(counts, self._trials())):
            raise WhetError(
                f"{self._rejected} combinations in a row are not valid trials. The last one is {reason}. Correct the "
                "recipe, or narrow its ranges"
            )
        warn(f"the last {self._rejected} combinations were invalid or had been tried: there will be no other trials")

    # New trials, and those of a search that was interrupted

    def _next_trial(self) -> Trial | None:
        """A trial with new values; None if there are enough, or no other combination is left."""
        while not self._is_exhausted:
            started = [0] * len(self._brackets)
            for frozen in filter(counts, self._trials()):
                started[min(int(frozen.user_attrs.get(BRACKET, 0)), len(started) - 1)] += 1
            bracket = choose_bracket(self._brackets, started)
            if bracket is None or not self._has_points(len(self._trials())):
                return None
            handle = self._study.ask()
            handle.set_user_attr(OWNER, self._owner)
            handle.set_user_attr(BRACKET, bracket)
            total, number = sum(each.trials for each in self._brackets), handle.number
            earlier = sum(counts(frozen) for frozen in self._trials() if frozen.number < number)
            if earlier >= total or not self._has_points(number):  # another search has asked at the same time
                handle.set_user_attr(UNCOUNTED, "there were enough trials")
                self._study.tell(number, state=TrialState.FAIL)
                return None
            sampler = make_sampler(self._settings.method, self._seed, number, total, self._fixed_point(number))
            values = suggest_values(self._study, handle, self._space, sampler)
            twin = find_duplicate(self._study, handle.number, values)
            if twin is not None:
                self._reject(handle.number, f"same values as trial {twin}")
                continue
            try:
                trial = self._make_trial(handle.number, values, bracket)
            except WhetError as error:
                self._reject(handle.number, f"invalid: {error}")
                continue
            handle.set_user_attr(FOLDER, str(trial.config.folder.absolute()))  # from here on it can be resumed
            return trial
        return None

    def _has_points(self, number: int) -> bool:
        """Whether a trial with this number would have values of its own."""
        if self._settings.method == "grid":
            return self._grid_point(number) is not None
        return self._untried() != []

    def _fixed_point(self, number: int) -> Assignment | None:
        """The values of this trial; None: the sampler draws them."""
        if self._settings.method == "grid":
            return self._grid_point(number)
        if self._settings.method == "tpe" and not self._rejected:
            return None
        untried = self._untried()
        return random.Random(hash_json([self._seed, number])).choice(untried) if untried else None

    def _grid_point(self, number: int) -> Assignment | None:
        return next(itertools.islice(self._space.grid(), number, None), None)

    def _untried(self) -> list[Assignment] | None:
        """The combinations that no trial has had; None if there are too many to list."""
        if self._combinations is None:
            return None
        tried = [trial.params for trial in self._trials()]
        return [values for values in self._combinations if values not in tried]

    def _make_trial(self, number: int, values: Assignment, bracket: int) -> Trial:
        recipe, config = write_trial_recipe(self._space, values, self._folder, number, self._name)
        rungs = self._brackets[bracket].rungs
        if len(rungs) == 1:  # its own length, which may be searched
            rungs = (trial_length(config, self._lengths),)
        return Trial(number, values, config, recipe, rungs, steps_at_rungs(config, rungs, self._lengths))

    def _find_interrupted(self, bar: ProgressBar) -> list[Trial]:
        """The trials that this search was running when it ended."""
        found = []
        for frozen in self._trials():
            if frozen.state != TrialState.RUNNING:
                continue
            folder, owner = (frozen.user_attrs.get(key) for key in (FOLDER, OWNER))
            is_here = Path(folder or ".").parent == self._folder.absolute()
            if owner and not self._owner and is_here:
                raise WhetError(
                    f"{self._folder / OWNER_FILE} is gone, so it cannot be known whether trial {frozen.number} is of "
                    "this search or of one elsewhere. Bring it back from a copy"
                )
            is_own = self._settings.storage is None or owner == self._owner or (not owner and is_here)
            if folder is None and (is_own or self._settings.storage is None):
                self._handle(frozen.number).set_user_attr(UNCOUNTED, "the search was killed before it began")
                self._study.tell(frozen.number, state=TrialState.FAIL)
            elif folder is not None and is_own:  # others are of a search elsewhere
                trial = self._make_trial(frozen.number, frozen.params, int(frozen.user_attrs[BRACKET]))
                trial.reached = sum(rung in frozen.intermediate_values for rung in trial.rungs)
                last = frozen.intermediate_values[trial.rungs[trial.reached - 1]] if trial.reached else 0.0
                is_undecided = trial.reached > int(frozen.user_attrs.get(CONTINUES, 0))
                if not (is_undecided and self._decide(trial, last, bar)):
                    found.append(trial)
        return found

    # Optuna

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _handle(self, number: int) -> optuna.trial.Trial:
        """Optuna's object to report to, also of a trial from before the search was resumed."""
        return optuna.trial.Trial(self._study, self._trials()[number]._trial_id)

    # The note of the progress bar

    def _describe_progress(self) -> str:
        """The steps of the trials that run, and the best that is complete."""
        running = [self._describe_steps(trial) for trial in itertools.islice(self._running.values(), _MAX_SHOWN)]
        more = len(self._running) - len(running)
        return " · ".join([*running, *([f"{more} more"] if more else []), *self._describe_best()])

    def _describe_steps(self, trial: Trial) -> str:
        step = read_status(trial.config.folder).get("step")
        return f"trial {trial.number} " + (f"step {step}/{trial.steps[trial.reached]}" if step else "starting")

    def _describe_best(self) -> list[str]:
        try:
            best = self._study.best_trial
        except ValueError:  # none is complete
            return []
        return [f"best {self._metric} {best.value:.4f} (trial {best.number})"]
