"""What `import transformers` computes anew in every process, kept in whet's cache. Seen in transformers 5.22.

transformers reads the source of all its models, 2,500 files, to learn which class is in which; twice, because its own
cache of 128 folders is smaller than its 540. It also reads the file lists of all installed packages. On one core that
takes 0.6 s, a fifth of all imports of a run; from the cache 0.02 s.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MODULE = "transformers.utils.import_utils"
_left_out: list[str] = []
"""Packages that transformers must not import."""


class _Finder:
    """Finds that one module as Python does, and replaces two functions around its execution."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(_execute, execute)  # type: ignore[method-assign]
        return spec


def keep_import_structure() -> None:
    """`transformers.utils.import_utils.define_import_structure` of `transformers/models`, and the call of
    `importlib.metadata.packages_distributions` beside it: read from whet's cache where the files have not changed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def leave_out_packages() -> None:
    """`transformers.utils.import_utils.is_sklearn_available` and `is_scipy_available` say no: importing them takes
    1.3 s, for object detection and assisted generation. For processes that are whet alone: a user's own may need
    them."""
    _left_out[:] = ["sklearn", "scipy"]


def _execute(execute: Callable[[Any], None], module: Any) -> None:
    import importlib.metadata

    compute = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: cached("distributions", _metadata_folders(), compute)
    try:
        execute(module)
    finally:
        importlib.metadata.packages_distributions = compute
    for name in _left_out:
        setattr(module, f"is_{name}_available", lambda: False)
    if hasattr(module, "define_import_structure"):  # otherwise another version, which has to do without
        module.define_import_structure = _sharing(module.define_import_structure, Path(module.__file__).parents[1])


def _sharing(define: Callable[..., Any], package: Path) -> Callable[..., Any]:
    """`define_import_structure` with one result for all models, which both of its callers use."""
    models = package / "models"

    @functools.cache
    def structure_of_models() -> Any:
        def compute() -> Any:
            return [[sorted(backends), _as_lists(modules)] for backends, modules in define(str(models)).items()]

        listed = cached("transformers", _source_files(models), compute)
        return {frozenset(backends): modules for backends, modules in listed}

    @functools.lru_cache
    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if Path(module_path) not in (models, models / "__init__.py"):
            return define(module_path, prefix)
        start = "" if prefix is None else f"{prefix}."
        return {
            backends: {start + name: set(objects) for name, objects in modules.items()}
            for backends, modules in structure_of_models().items()
        }

    return define_import_structure


def _as_lists(modules: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(objects) for name, objects in modules.items()}


def cached(name: str, inputs: Iterator[tuple[str, int, int]], compute: Callable[[], Any]) -> Any:
    """The value for these inputs (path, size, time of change) from the cache, or computed and written there. A cache
    that cannot be read or written costs the time to compute it."""
    from whet.core.errors import WhetError
    from whet.core.files import cache_dir, hash_json, read_json, write_json

    key = hash_json([sys.version, *inputs])
    file = cache_dir() / "imports" / f"{name}-{hash_json(sys.prefix)[:12]}.json"
    try:
        kept = read_json(file)
        if kept["key"] == key and kept["hash"] == hash_json(kept["value"]):
            return kept["value"]
    except (OSError, ValueError, KeyError, TypeError, WhetError):
        pass
    value = compute()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"key": key, "hash": hash_json(value), "value": value})
    except (OSError, WhetError):
        pass
    return value


def _source_files(folder: Path) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _source_files(Path(entry.path))
            elif entry.name.endswith(".py"):
                found = entry.stat()
                yield entry.path, found.st_size, found.st_mtime_ns


def _metadata_folders() -> Iterator[tuple[str, int, int]]:
    """The metadata of installed packages. Not the times of the folders around it: with `python -m whet` one of them is
    the working directory, which changes with every run."""
    for folder in sys.path:
        try:
            entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
        except (OSError, ValueError):  # sys.path may hold anything
            continue
        for entry in entries:
            if entry.name.endswith((".dist-info", ".egg-info", ".egg")):
                yield entry.path, 0, entry.stat().st_mtime_ns
