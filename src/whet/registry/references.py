"""`models:NAME@WHICH` wherever a model path may be given: which version that is, and where its files are. No torch."""

from __future__ import annotations

from pathlib import Path

from whet.core.checksums import read_hashed_json
from whet.core.errors import WhetError
from whet.core.files import hash_json, resolve_path, user_path
from whet.registry.registry import PREFIX, ModelVersion, Registry, parse_reference

CERTIFICATE = "certificate.json"


def is_registered(path: str) -> bool:
    """Whether a model path is a reference to the registry."""
    return path.startswith(PREFIX)


def pin_version(path: str) -> str:
    """`models:NAME@NUMBER` for a reference by alias, or to the newest version; any other model path as it is.

    Commands do this once, at the beginning: an alias that moves meanwhile changes nothing.
    """
    if not is_registered(path):
        return path
    name, which = parse_reference(path)
    return f"{PREFIX}{name}@{Registry().find(name, which)}"


def keep_version(path: str, recorded: str) -> str:
    """`path` pinned for a run that recorded `recorded`: an alias, or the newest version, stays what it was then."""
    if path == recorded:  # also where that version was removed since
        return recorded
    name, which = parse_reference(path)
    by_number = which is not None and which.isdecimal()
    return recorded if recorded.startswith(f"{PREFIX}{name}@") and not by_number else pin_version(path)


def find_version(path: str) -> ModelVersion:
    """The version of a reference. By number also one that was removed: runs that were trained from it need it."""
    name, which = parse_reference(path)
    registry = Registry()
    if which is not None and which.isdecimal() and registry.ever_had(name, int(which)):
        return registry.version(name, int(which))
    return registry.version(name, registry.find(name, which))


def model_folder(path: str) -> Path:
    """The folder of a registered model, after a check that it still holds this version. Its files are compared with
    the certificate when they are loaded."""
    version = find_version(path)
    certificate = version.folder / CERTIFICATE
    try:
        is_there = certificate.exists()
    except OSError as error:
        raise WhetError(
            f"{version.reference}: {version.folder} cannot be read: {error.strerror}. Ask {version.user}, who added "
            "this version, for permission to read it"
        ) from None
    if not is_there:
        raise WhetError(
            f"{version.reference}: its files are gone: {version.folder} does not exist any more, or has no "
            f"{CERTIFICATE}. {_remedy(version)}"
        )
    files = read_hashed_json(certificate, _remedy(version), files=dict)["files"]
    if hash_json(files) != version.files:
        raise WhetError(
            f"{version.reference}: {version.folder} holds another model than when this version was added "
            f"({CERTIFICATE} lists other files). {_remedy(version)}"
        )
    return version.folder


def local_path(path: str) -> Path:
    """The folder of a registered model, or the path as a user wrote it."""
    return model_folder(path) if is_registered(path) else user_path(path)


def _remedy(version: ModelVersion) -> str:
    export = ""
    if version.run is not None and version.step is not None:
        kind = f" --to {version.kind}" if version.kind == "adapter" else ""
        export = f", or export it again (whet export {version.run}@{version.step}{kind})"
    return f"Bring the folder back{export}; or add what you have as a new version: whet models add {version.name}"


def versions_inside(folder: Path) -> list[str]:
    """References to the versions whose files are in a folder, such as that of a run; without damaged ones."""
    registry, place, found = Registry(), resolve_path(folder), []
    for name in registry.names():
        for number in registry.versions(name):
            try:
                version = registry.version(name, number)
            except WhetError:
                continue
            if version.folder.is_relative_to(place):
                found.append(version.reference)
    return found
