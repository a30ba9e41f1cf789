"""`whet models add`: find the export of a run, and record where it comes from. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from whet.checkpoint import directory
from whet.checkpoint.directory import read_manifest
from whet.core.checksums import read_hashed_json
from whet.core.console import info, warn
from whet.core.errors import WhetError
from whet.core.files import hash_json, resolve_path
from whet.core.json_lines import read_json_lines
from whet.core.run_folder import check_run_format, parse_run_reference
from whet.core.yaml import read_yaml
from whet.model.load.weight_files import require_certified_files
from whet.registry.references import CERTIFICATE, find_version, is_registered, local_path, pin_version
from whet.registry.registry import ModelVersion, Registry, parse_reference

_LOADABLE = ("config.json", "adapter_config.json")


def add_model(name: str, reference: str, run: Path | None = None) -> ModelVersion:
    """Add the export of a run (RUN, RUN@STEP, RUN@best, RUN@latest), or any folder with a certificate, as a new version
    of a model. `run`: the run that such a folder was exported from."""
    if parse_reference(name)[1] is not None:
        raise WhetError(f"{name}: whet numbers the versions. Give only the name: {name.partition('@')[0]}")
    folder = resolve_path(_find_export(reference))
    certificate = _read_certificate(folder)
    info(f"checking the files of {folder}")
    require_certified_files(folder)
    run = _run_of(folder, run)
    step = certificate.get("step") if isinstance(certificate.get("step"), int) else None
    registry = Registry()
    record = {
        "folder": str(folder), "kind": certificate["kind"], "files": hash_json(certificate["files"]),
        "run": None if run is None else str(run), "step": step, "lineage": _lineage(run, step, certificate),
    }  # fmt: skip
    return registry.version(name, registry.add(name, record))


def run_reference(reference: str) -> str:
    """RUN@STEP of a registered model, for commands that need its checkpoint; any other reference as it is."""
    if not is_registered(reference):
        return reference
    version = find_version(pin_version(reference))
    if version.run is None or version.step is None:
        raise WhetError(
            f"{version.reference}: it was not exported from a run that is known, and this needs a checkpoint. Its "
            f"model is in {version.folder}"
        )
    then, now = version.lineage.get("checkpoint"), _checkpoint_hash(Path(version.run), version.step)
    if now is None:
        raise WhetError(
            f"{version.reference}: {version.run} has no checkpoint of step {version.step} any more, and this needs it. "
            f"The exported model is in {version.folder}"
        )
    if then is not None and then != now:
        raise WhetError(
            f"{version.reference}: {version.run}@{version.step} has other weights than when this version was added: "
            f"the run was trained again. The exported model is in {version.folder}"
        )
    return f"{version.run}@{version.step}"


# The files of the model.


def _find_export(reference: str) -> Path:
    """The folder that a reference names itself, or the verified export of a run's step."""
    folder = local_path(reference)
    if (folder / CERTIFICATE).is_file():
        return folder
    run, which = parse_run_reference(str(folder))
    if not (run / "config.yaml").is_file():
        if folder.is_dir():
            raise WhetError(
                f"{reference}: neither a run (no config.yaml) nor an export (no {CERTIFICATE}). Give the folder of a "
                "run, or one that whet exported, merged or imported; use other models by their path"
            )
        raise WhetError(f"{reference}: no such folder (looked in {Path.cwd()}). Give the folder of a run or an export")
    check_run_format(run)
    exports = _exports(run)
    step = _resolve_step(run, which, exports)
    found = [each for each, certificate in exports.items() if certificate.get("step") == step]
    if not found:
        others = sorted({certificate["step"] for certificate in exports.values()})
        there = f"; there are exports of step {', '.join(map(str, others))}" if others else ""
        raise WhetError(
            f"{run}@{step}: step {step} has no export{there}, and the registry refers to exports, because a run "
            f"deletes its older checkpoints. Export it first: whet export {run}@{step}"
        )
    return min(found, key=_preference)


def _exports(run: Path) -> dict[Path, dict[str, Any]]:
    """The verified exports of a run that whet can load, with their certificates."""
    found = {}
    for file in sorted((run / "exports").glob(f"[!.]*/{CERTIFICATE}")):  # hidden ones are being written
        try:
            certificate = read_hashed_json(file, "Export again")
        except WhetError as error:
            warn(str(error))
            continue
        if certificate.get("verified") and isinstance(certificate.get("step"), int) and _is_loadable(file.parent):
            found[file.parent] = certificate
    return found


def _resolve_step(run: Path, which: str, exports: dict[Path, dict[str, Any]]) -> int:
    """The step that is meant. An export may outlive the checkpoint it was made from."""
    steps = [certificate["step"] for certificate in exports.values()]
    if which.isdecimal() and int(which) in steps:
        return int(which)
    if which == "latest" and steps:
        return max(*steps, *directory.list_steps(run / "checkpoints"), 0)
    return directory.resolve_step(run / "checkpoints", which)


def _preference(folder: Path) -> tuple[int, str]:
    """Of several exports of a step: a whole model in the default dtype, then in another, then the adapter."""
    kind, first = re.sub(r"-step-\d+\Z", "", folder.name), ("merged", "merged-exact")
    return (first.index(kind) if kind in first else 2 + kind.startswith("adapter")), kind


def _is_loadable(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _LOADABLE)


def _read_certificate(folder: Path) -> dict[str, Any]:
    certificate = read_hashed_json(folder / CERTIFICATE, "Export the model again", files=dict, kind=str)
    if not certificate.get("verified"):
        raise WhetError(
            f"{folder / CERTIFICATE}: this export does not match the trained model "
            f"({'; '.join(map(str, certificate.get('reasons') or ['not verified']))}). Export it again"
        )
    if not _is_loadable(folder):
        raise WhetError(
            f"{folder}: an export of kind {certificate['kind']}, which whet does not load, so models:NAME would not "
            "work. Add the merged export of the same step, and keep this one next to it"
        )
    return certificate


# Lineage: what is known of the run, copied into the version, because runs are deleted some day.


def _run_of(folder: Path, named: Path | None) -> Path | None:
    """The run that an export is in, else the one that the user names. The export itself names none: it may be
    published, and where a run was is nobody else's business."""
    above = folder.parent.parent
    inside = above if folder.parent.name == "exports" and (above / "config.yaml").is_file() else None
    if named is None:
        return inside
    run = resolve_path(named)
    if not (run / "config.yaml").is_file():
        raise WhetError(f"--run {named}: not a run (no config.yaml). Give the folder of the run that was exported")
    if inside not in (None, run):
        raise WhetError(f"--run {named}: {folder} is an export of {inside}. Leave --run out")
    check_run_format(run)
    return run


def _lineage(run: Path | None, step: int | None, certificate: dict[str, Any]) -> dict[str, Any]:
    said = {key: value for key, value in certificate.items() if key != "files"}
    if run is None:
        return {"data": None, "config": None, "base": None, "checkpoint": None, "certificate": said, "scores": {}}
    config = read_yaml(run / "config.yaml", expand="none").plain()
    return {
        "data": _data(run),
        "config": config,
        "base": {"path": config.get("model", {}).get("path"), "hash": (_manifest(run, step) or {}).get("base")},
        "checkpoint": _checkpoint_hash(run, step),
        "certificate": said,
        "scores": _scores(run, step),
    }


def _data(run: Path) -> dict[str, Any] | None:
    """The conversations that were trained on, by source, and a hash of the files, tokenizer, template and options that
    their stores were made from."""
    ledger = _read_or_warn(run / "ledger.json")
    if ledger is None:
        return None
    keys = {use: _store_key(Path(folder)) for use, folder in sorted(ledger.get("stores", {}).items())}
    sources = [
        {"source": each["source"], "use": each["use"], "conversations": each["conversations"]["kept"]}
        for each in ledger.get("sources", [])
    ]
    return {"hash": hash_json(keys), "stores": keys, "sources": sources}


def _store_key(folder: Path) -> str:
    """The key of a store's content; of one that is gone the name of its folder, which is the key in whet's cache."""
    manifest = _read_or_warn(folder / "manifest.json") or {}
    return str(manifest.get("key") or folder.name)


def _checkpoint_hash(run: Path, step: int | None) -> str | None:
    """A hash of the weights of a checkpoint, without its optimizer state, which a run deletes."""
    files = (_manifest(run, step) or {}).get("files", {})
    return (
        hash_json({name: each["hash"] for name, each in files.items() if name.startswith("model/")}) if files else None
    )


def _manifest(run: Path, step: int | None) -> dict[str, Any] | None:
    folder = run / "checkpoints" / directory.checkpoint_name(step or 0)
    if not folder.exists():
        return None
    try:
        return read_manifest(folder)
    except WhetError as error:
        warn(str(error))
        return None


def _scores(run: Path, step: int | None) -> dict[str, float]:
    """Losses and task scores of the step: of the run's own evaluation, and of `whet eval` since."""
    lines = [line for line in read_json_lines(run / "metrics.jsonl")[0] if line.get("step") == step]
    evaluated = _read_or_warn(run / "evals" / f"{directory.checkpoint_name(step or 0)}.json") or {}
    return {
        key: value
        for each in (*lines, evaluated)
        for key, value in each.items()
        if key.startswith(("val_loss", "val_accuracy", "val_bpb", "task/")) and isinstance(value, int | float)
    }


def _read_or_warn(file: Path) -> dict[str, Any] | None:
    """The content of a file that a version can do without."""
    if not file.exists():
        return None
    try:
        return read_hashed_json(file, "The version is added without it")
    except WhetError as error:
        warn(str(error))
        return None
