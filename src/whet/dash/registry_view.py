"""The registry of models, for the list of runs."""

from __future__ import annotations

from typing import Any

from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.registry.registry import Registry

_MAX_MODELS = 200


def registered_models() -> list[dict[str, Any]]:
    """Each model with its newest version, its aliases, and the run that trained it."""
    registry, found = Registry(), list[dict[str, Any]]()
    try:
        names = registry.names()[:_MAX_MODELS]
    except WhetError as error:
        return [{"problem": mask_secrets(str(error))}]
    for name in names:
        try:
            versions, aliases = registry.versions(name), registry.aliases(name)
            newest = registry.version(name, versions[-1])
        except WhetError as error:
            found.append({"name": name, "problem": mask_secrets(str(error))})
            continue
        found.append({
            "name": name, "versions": len(versions), "newest": newest.number, "aliases": aliases, "kind": newest.kind,
            "run": newest.run, "step": newest.step, "time": newest.time, "user": newest.user,
        })  # fmt: skip
    return found
