"""A run's folder: open it, check that it can be resumed with this configuration, and write the run's inputs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from whet.checkpoint import directory
from whet.checkpoint.directory import read_manifest
from whet.config import Config, read_config
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.config import ConfigPath, Section, value_at
from whet.core.console import info, warn
from whet.core.display import holds_secret
from whet.core.errors import CancelledError, ExitCode, StoppedError, WhetError, os_error
from whet.core.files import atomic_dir
from whet.core.heartbeat import read_neighbour_error
from whet.core.run_folder import VARIABLES_FILE, RunFolder, config_was_edited, not_a_run, write_config
from whet.core.signals import STOPPED_BEFORE_CHECKPOINT, StopRequested, ignore_stop_signals
from whet.core.yaml import Template, parse_yaml, read_yaml
from whet.data.prepare.ledger import LEDGER_LINES, has_changes
from whet.inference.tasks.load_tasks import loaded_tasks
from whet.run.data import RunData, make_plan, read_ledger
from whet.training.records import Prefix, initial_evaluation, intact_lines


@contextlib.contextmanager
def open_run_folder(config: Config, resume: bool, first: bool) -> Iterator[RunFolder | None]:
    """The run's folder, for rank 0 alone. Leaving the block writes how the run ended to status.json."""
    if not first:
        yield None
        return
    folder = RunFolder(config.folder)
    try:
        _require_usable_folder(folder, config, resume)
        yield folder
    except BaseException as error:
        ignore_stop_signals()
        if gone := folder.gone_error():
            folder.release()
            raise gone from None
        known = None if isinstance(error, WhetError) else os_error(error, "writing the run", folder.path)
        if isinstance(error, StopRequested) and (neighbour := read_neighbour_error()):
            known = neighbour
        elif isinstance(error, KeyboardInterrupt) and directory.newest_checkpoint(folder.path / "checkpoints"):
            quoted = shlex.quote(str(folder.path))
            known = StoppedError(f"interrupted; the last checkpoint is good. To continue: whet runs resume {quoted}")
        elif isinstance(error, StopRequested):
            known = StoppedError(STOPPED_BEFORE_CHECKPOINT)
        elif isinstance(error, KeyboardInterrupt):
            known = CancelledError("interrupted before the first checkpoint: there is nothing to save. Start it again")
        end = known or error
        code = end.exit_code if isinstance(end, WhetError) else ExitCode.FAILED
        stays = isinstance(known, StoppedError) and isinstance(error, StopRequested)
        with contextlib.suppress(OSError):
            state = "failed" if code in (ExitCode.INPUT, ExitCode.FAILED) else "stopped"
            folder.set_ended(state, code, str(end) or type(end).__name__, begun=stays and folder.holds_run())
        folder.abandon(stays)
        raise end from None
    folder.close()


def _require_usable_folder(folder: RunFolder, config: Config, resume: bool) -> None:
    if not folder.holds_run():
        if directory.newest_checkpoint(folder.path / "checkpoints"):
            raise WhetError(
                f"{folder.path}: an incomplete run: it has checkpoints but no config.yaml. Restore it from a copy "
                "(`config` in checkpoints/*/manifest.json has the settings), or give another folder: run.dir=FOLDER"
            )
        folder.require_empty()
        return
    if not resume:
        raise _used_folder_error(folder.path)
    require_same_settings(folder.path, config)
    hashes = VariableHashes(folder.path)
    for key, value in config.variables().items():
        if hashes.has(key) and not hashes.matches(key, value):
            info(f"{key}: its environment variable has another value than when the run began; training does not change")


def refuse_used_folder(path: Path) -> None:
    """Refuse a new run in a folder that holds one, before anything slow is done: this module imports no torch."""
    if (path / "config.yaml").exists():
        RunFolder(path).release()  # or an error that names the process that uses it
        raise _used_folder_error(path)


def _used_folder_error(path: Path) -> WhetError:
    return WhetError(
        f"{path}: this folder holds a run already. Continue it with --resume, move it aside with --fresh, or give the "
        "new run another folder: run.dir=FOLDER"
    )


def require_same_settings(path: Path, config: Config) -> None:
    """Refuse to resume the run in this folder with settings under which it would be another run."""
    changed = changed_settings(path, config)
    for key, old, new in changed:
        if _is_missing(old, new):
            raise WhetError(f"{key}: {old}: no such file or folder. Bring it back, then resume {path}")
    if changed:
        shown = "; ".join(_describe_change(*each) for each in changed[:5])
        is_length = any(key in ("train.steps", "train.epochs", "train.tokens") for key, _, _ in changed)
        other_length = f". To end it earlier, add --until STEP. {train_longer(path)}" if is_length else ""
        restored = "" if config_was_edited(path) else " (`whet runs resume` does)"
        raise WhetError(
            f"{path}: this folder holds another run, which cannot be resumed with this configuration ({shown}). Set "
            f"these back{restored}, move it aside with --fresh, or give the new run another folder: "
            f"run.dir=FOLDER{other_length}"
        )


def _is_missing(old: Any, new: Any) -> bool:
    """Whether a recipe names the same file as then, which is gone: paths become absolute only if they exist."""
    if not (isinstance(old, str) and isinstance(new, str)) or isinstance(old, Template) or isinstance(new, Template):
        return False
    then, now = Path(old), Path(new)
    return then.is_absolute() and not now.is_absolute() and then.name == now.name and not os.path.lexists(then)


def train_longer(run: Path) -> str:
    """How to train a run for longer than it was planned: its learning rate has decayed for the planned length."""
    return f"To train on from its weights, start a new run: whet train CONFIG model.path={run} run.dir={run}-2"


def _describe_change(key: str, old: Any, new: Any) -> str:
    if isinstance(old, Template) and old == new:
        state = f"{old.unset[0]} is not set" if old.unset else f"{' or '.join(old.names)} had another value then"
        return f"{key}: {old}: the environment variable {state}"
    then, now = ("not set" if value is None else repr(value) for value in (old, new))
    return f"{key}: {then} then, {now} now"


_CHANGEABLE_ON_RESUME = (
    "run.name", "run.dir", "run.project", "run.tags", "run.notify", "run.price", "run.device", "eval.", "checkpoint.",
    "export.", "track.", "profile.",
    "parallel.", "launch.", "search.",
    "train.micro_rows", "train.on_nonfinite", "train.on_spike", "model.attention", "model.compile",
)  # fmt: skip
"""Settings that may change when a run is resumed."""


def changed_settings(path: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, value then, value now) of the settings that prevent resuming the run in the folder with `config`.

    Where config.yaml is damaged or was edited, the newest checkpoint knows them. Values of environment variables are
    compared by their hashes, and named in the result.
    """
    file, hashes = path / "config.yaml", VariableHashes(path)
    newest = _newest_manifest(path)
    try:
        if newest is None or not config_was_edited(path):
            return _differences(read_yaml(file, expand="none").plain(), config, hashes)
        reason = f"{file} was changed after the run wrote it"
    except WhetError as error:
        if newest is None:
            raise WhetError(f"{error}. Bring the file back, or start a new run: run.dir=FOLDER") from None
        reason = str(error)
    manifest, content = newest
    warn(f"{reason}. The settings in {manifest.parent.name}/{manifest.name} take its place")
    saved = json.dumps(content["config"])  # JSON is YAML
    return _differences(parse_yaml(saved, str(manifest), expand="none").plain(), config, hashes)


def _newest_manifest(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest manifest of a checkpoint that is not damaged, and its content."""
    for step in reversed(directory.list_steps(path / "checkpoints")):
        folder = path / "checkpoints" / directory.checkpoint_name(step)
        with contextlib.suppress(directory.DamagedCheckpointError):
            return folder / directory.MANIFEST_NAME, read_manifest(folder)
    return None


def _differences(before: Any, config: Config, hashes: VariableHashes) -> list[tuple[str, Any, Any]]:
    now, named = config.resolved(), config.unexpanded()

    def differences(then: Any, at: ConfigPath) -> Iterator[tuple[str, Any, Any]]:
        key, value = ".".join(map(str, at)), value_at(now, at)
        if f"{key}.".startswith(_CHANGEABLE_ON_RESUME):
            return
        if isinstance(then, Template):
            if not hashes.matches(key, value):
                yield key, then, value_at(named, at)
        elif isinstance(then, dict) and isinstance(value, dict):
            for name in dict.fromkeys([*then, *value]):
                yield from differences(then.get(name), (*at, name))
        elif isinstance(then, list) and isinstance(value, list) and len(then) == len(value):
            for index, item in enumerate(then):
                yield from differences(item, (*at, index))
        elif then != value and not (then is None and _is_default_of_new_key(config, at)):
            yield key, then, value_at(named, at)

    return list(differences(before, ()))


def _is_default_of_new_key(config: Config, at: ConfigPath) -> bool:
    """Whether the setting, which the run's config.yaml does not have, came after it and has its default. Settings that
    are None are not written, so it must be one that cannot be None."""
    section: Any = config
    for key in at[:-1]:
        section = getattr(section, key) if isinstance(key, str) and isinstance(section, Section) else section[key]
    field = type(section).model_fields.get(str(at[-1])) if isinstance(section, Section) else None
    if field is None or type(None) in get_args(field.annotation):
        return False
    return bool(getattr(section, str(at[-1])) == field.get_default(call_default_factory=True))


_NOT_NEEDED_FOR_INFERENCE = ("data.sources", "data.validation", "data.store", *_CHANGEABLE_ON_RESUME)


def read_run_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, for using its model, with the folder where it is now.

    Environment variables that only training needs may be missing or have changed; one that others need may not.
    """
    file = path / "config.yaml"
    if not file.exists():
        raise not_a_run(path)
    config, then = read_config(file, overrides, expand="set").with_folder(path), read_config(file, expand="set")
    for key, old, new in _differences(read_yaml(file, expand="none").plain(), then, VariableHashes(path)):
        if not f"{key}.".startswith(_NOT_NEEDED_FOR_INFERENCE):
            raise WhetError(f"{file}: {_describe_change(key, old, new)}. Set it back")
    _warn_about_edited_config(path)
    return config


def _warn_about_edited_config(path: Path) -> None:
    """Print a warning if the config.yaml of a run is not what the run wrote."""
    if config_was_edited(path):
        warn(
            f"{path / 'config.yaml'} was changed after the run wrote it, so the result may not be the run's. If you "
            "did not edit it, restore it: `config` in checkpoints/*/manifest.json has the original"
        )


def _require_same_examples(path: Path, config: Config) -> None:
    """Refuse tasks that have other examples than those that the run has scored: the report and eval.best would compare
    scores on different questions."""
    newest = _newest_manifest(path)
    if newest is None:
        prefix = initial_evaluation(path, config.train.first_step).get("samples", Prefix())
    else:
        prefix = Prefix.from_state(newest[1]["state"], "samples")
    scored = {(line["task"], line["number"]): line for line in intact_lines(path, "samples", prefix)}
    for task, count in loaded_tasks(config.eval):
        for number, example in enumerate(task.examples(count)):
            then = scored.get((task.name, number))
            if then is not None and (then["prompt"], then["expected"]) != (example.prompt, example.expected):
                raise WhetError(
                    f"eval.tasks: {task.name}: example {number + 1} ({example.origin}) is not the one that the run has "
                    "scored so far, so scores before and after could not be compared. Restore the file, or give the "
                    f"task another name: eval.tasks=[{{path: FILE, name: {task.name}-2}}]"
                )


def write_run_inputs(folder: RunFolder, config: Config, data: RunData) -> None:
    """Write configuration, ledger and plan before training. config.yaml comes first: it makes the folder a run."""
    path = folder.path
    if (path / "ledger.json").exists():
        _require_same_data(path, data)
    elif directory.newest_checkpoint(path / "checkpoints"):
        raise WhetError(
            f"{path}/ledger.json is gone, so it cannot be known whether the data is still the same. Bring it back, or "
            "start a new run: run.dir=FOLDER"
        )
    _require_same_examples(path, config)
    _warn_of_secrets(config.unexpanded())
    VariableHashes(path).write(config.variables())
    write_config(path, config.dump())
    (path / "checkpoints").mkdir(exist_ok=True)
    data.write_ledger_lines(path / LEDGER_LINES)
    ledger = data.ledger()
    if any(map(has_changes, ledger["sources"])) and (path / LEDGER_LINES).exists():
        info(f"{path / LEDGER_LINES} names every line of the data that was dropped or changed")
    if shared := ledger["overlap"]["conversations"]:
        first = ", ".join(ledger["overlap"]["first"][:3])
        warn(
            f"data.validation: {shared:,} conversations are in the training data too, first {first}, so validation "
            "measures memorization. Remove them from one of the two, or use validation.fraction"
        )
    write_hashed_json(path / "ledger.json", ledger)
    if not (path / "plan").exists():
        with atomic_dir(path / "plan") as temporary:
            make_plan(config, data).save(temporary)


def _warn_of_secrets(settings: Any, above: str = "") -> None:
    """Warn of tokens that a recipe or the command line spells out: config.yaml would keep them."""
    if isinstance(settings, dict | list):
        for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
            _warn_of_secrets(value, f"{above}{key}.")
    elif isinstance(settings, str) and not isinstance(settings, Template) and holds_secret(settings):
        key = above.rstrip(".")
        warn(
            f"{key}: {settings} looks like a secret, and config.yaml in the run folder keeps it. Put it into an "
            f"environment variable and name that instead: {key}='${{MY_TOKEN}}'"
        )


def _require_same_data(path: Path, data: RunData) -> None:
    """The plan refers to conversations by index: other data would change their meaning."""
    then, now = read_ledger(path / "ledger.json")["stores"], data.store_folders()
    if {use: Path(store).name for use, store in then.items()} != {use: Path(store).name for use, store in now.items()}:
        raise WhetError(
            f"{path}: the data is not what it was when this run began (a file, the tokenizer or its template changed), "
            "so the run cannot be resumed. Restore the old data, or start a new run: run.dir=FOLDER"
        )


def recorded_data(path: Path) -> tuple[str | None, dict[str, str]]:
    """The date with which the run's chat template was rendered, if the template uses one, and the folders of its stores
    by use; none if the run does not exist."""
    if not (path / "ledger.json").exists():
        return None, {}
    ledger = read_ledger(path / "ledger.json")
    return ledger["today"], ledger["stores"]


# The environment variables of a run: config.yaml names them, variables.json finds out whether a value has changed.
#
# Values may be secrets, so they are kept as salted hashes, slow ones: a short password cannot be guessed in a moment.


class VariableHashes:
    """The salted hashes of a run's settings that come from environment variables, by key."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / VARIABLES_FILE
        found: dict[str, Any] = {"salt": secrets.token_hex(16), "hashes": {}}
        remedy = "Bring it back, or start a new run: run.dir=FOLDER"
        if self._file.exists():
            found = read_hashed_json(self._file, remedy)
        try:
            self._salt, self._hashes = bytes.fromhex(found["salt"]), dict(found["hashes"])
        except (KeyError, TypeError, ValueError):
            raise WhetError(f"{self._file}: damaged. {remedy}") from None

    def has(self, key: str) -> bool:
        return key in self._hashes

    def matches(self, key: str, value: Any) -> bool:
        """Whether the setting had this value."""
        if key not in self._hashes:
            raise WhetError(
                f"{self._file}: the hash of {key} is gone, so it cannot be known whether its environment variable is "
                "still the same. Bring the file back, or start a new run: run.dir=FOLDER"
            )
        return bool(self._hashes[key] == _hash(self._salt, value))

    def write(self, values: Mapping[str, Any]) -> None:
        """Add the hashes of these settings. Those of others stay: config.yaml is replaced after this file."""
        hashes = self._hashes | {key: _hash(self._salt, value) for key, value in values.items()}
        if hashes:
            write_hashed_json(self._file, {"salt": self._salt.hex(), "hashes": hashes})


def _hash(salt: bytes, value: Any) -> str:
    return _slow_hash(salt, json.dumps(value, sort_keys=True))


@functools.cache
def _slow_hash(salt: bytes, text: str) -> str:
    return hashlib.scrypt(text.encode(), salt=salt, n=2**12, r=8, p=1, dklen=32).hex()  # 10 ms
