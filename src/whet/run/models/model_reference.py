"""model.path: a run (RUN, RUN@STEP, RUN@best, RUN@latest), whose weights are exported, or a registered model, whose
version is fixed for the life of the run. Without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from whet.checkpoint import directory
from whet.checkpoint.directory import MANIFEST_NAME, read_manifest
from whet.config import Config, read_config
from whet.core.checksums import read_hashed_json
from whet.core.console import info, warn
from whet.core.errors import WhetError
from whet.core.files import file_lock, resolve_path, user_path
from whet.core.launch_env import RANK_VARIABLES
from whet.core.run_folder import parse_run_reference
from whet.model.load.weight_files import require_certified_files
from whet.registry.references import is_registered, keep_version, model_folder, pin_version


def resolve_model_reference(config: Config) -> Config:
    """Replace model.path, if it is a run (RUN, RUN@STEP, RUN@best, RUN@latest) or the folder of a checkpoint, by the
    model folder that is exported from it; of a registered model, the alias by the version.

    Step and version are thereby fixed for the life of the run. Called before the process group exists: the first
    process exports while the others wait for its file lock.
    """
    if is_registered(config.model.path):
        return _with_version(config)
    found = _parse_run_reference(config.model.path)
    if found is None:
        return config
    before = _recorded_model(config, *found)
    if before is not None:
        require_certified_files(before)
        return _with_model(config, str(before))
    return _with_model(config, exported_model(config.model.path))


def exported_model(path: str) -> str:
    """The model folder of a run or a checkpoint: an earlier export, or a new one. Any other model path as it is."""
    found = _parse_run_reference(path)
    if found is None:
        return path
    run, which = found
    step = directory.resolve_step(run / "checkpoints", which)
    with file_lock(run / "exports" / f".{directory.checkpoint_name(step)}.lock"):
        folder = _find_export(run, step)
        if folder is None:
            info(f"model.path: {path}: exporting the weights after step {step}")
            folder = _export_in_subprocess(run, step, "--to", "merged", "--dtype", "exact")
    require_certified_files(folder)
    return str(resolve_path(folder))


def exported_adapter(run: Path, which: str) -> Path:
    """The folder of the adapter that a run trained, after a step: an earlier export, or a new one."""
    step = directory.resolve_step(run / "checkpoints", which)
    exports = run / "exports"
    with file_lock(exports / f".{directory.checkpoint_name(step)}.lock"):
        for name in ("adapter", f"adapter-{directory.checkpoint_name(step)}"):
            said = _read_certificate(exports / name / "certificate.json")
            if said.get("step") == step and said.get("verified"):
                return exports / name
        info(f"{run}: exporting its adapter after step {step}")
        return _export_in_subprocess(run, step, "--to", "adapter")


def _with_version(config: Config) -> Config:
    """A resumed run keeps the version that it began with, whatever the alias names now."""
    path, recorded = config.model.path, _model_path_of_run(config)
    version = pin_version(path) if recorded is None else keep_version(path, recorded)
    if version == recorded != path:
        info(f"model.path: {path}: this run continues with {version}, as it began")
    model_folder(version)  # an error now, not after the data is prepared
    return _with_model(config, version)


def _with_model(config: Config, path: str) -> Config:
    model = config.model.model_copy(update={"path": path})
    return config.model_copy(update={"model": model})


def _recorded_model(config: Config, run: Path, which: str) -> Path | None:
    """The model folder in the config.yaml of a run that exists: for a resumed run, `latest` is what it was then."""
    recorded = _model_path_of_run(config)
    if recorded is None or is_registered(recorded):
        return None
    folder = Path(recorded)
    certificate = folder / "certificate.json"
    if folder.parent != resolve_path(run / "exports") or not certificate.exists():
        return None
    return folder if which in ("latest", "best", str(_read_certificate(certificate).get("step"))) else None


def _model_path_of_run(config: Config) -> str | None:
    """model.path as the run in the folder recorded it, if there is one; where its config.yaml is damaged, from its
    newest checkpoint."""
    file = config.folder / "config.yaml"
    if not file.exists():
        return None
    try:
        return read_config(file, expand="set").model.path
    except WhetError:
        newest = directory.newest_checkpoint(config.folder / "checkpoints")
        if newest is None:
            raise
        return str(read_manifest(newest)["config"]["model"]["path"])


def _read_certificate(file: Path) -> dict[str, Any]:
    """The certificate of an export; empty if there is none, or a damaged one, which certifies nothing."""
    try:
        return read_hashed_json(file, "The model is exported again") if file.exists() else {}
    except WhetError as error:
        warn(str(error))
        return {}


def _parse_run_reference(path: str) -> tuple[Path, str] | None:
    """(run folder, step), if the path is a run or a checkpoint."""
    folder = user_path(path)
    if (folder / MANIFEST_NAME).is_file() and folder.parent.name == "checkpoints":
        return folder.parent.parent, str(int(folder.name.removeprefix("step-")))
    run, which = parse_run_reference(str(folder))
    if (run / "config.yaml").is_file() and not (run / "config.json").exists():
        return run, which
    return None


def _find_export(run: Path, step: int) -> Path | None:
    """An earlier export of this step in full precision that passed its verification."""
    for name in ("merged-exact", "merged"):
        for folder in (name, f"{name}-{directory.checkpoint_name(step)}"):
            certificate = run / "exports" / folder / "certificate.json"
            said = _read_certificate(certificate)
            whole = name == "merged-exact" or said.get("dtype") in ("f32", "f64")  # computed in, so also kept in
            if said.get("step") == step and said.get("verified") and whole:
                return certificate.parent
    return None


def _export_in_subprocess(run: Path, step: int, *options: str) -> Path:
    """In a subprocess, so that nothing of that model stays in memory."""
    command = [sys.executable, "-m", "whet", "export", f"{run}@{step}", *options, "--json", "--quiet"]
    alone = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if "export" in answer:
        return Path(answer["export"])
    reason = answer.get("error") or (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise WhetError(f"{run}@{step}: the weights of this run cannot be exported: {reason}")
