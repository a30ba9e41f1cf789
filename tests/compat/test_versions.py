"""The installed versions, pyproject.toml's bounds and the versions that private APIs were tried with agree."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from seen_versions import SEEN

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
]


@pytest.mark.parametrize("library", SEEN)
def test_the_installed_version_was_tried(library: str) -> None:
    try:
        installed = version(library)
    except PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    assert ".".join(installed.split(".")[:2]) in SEEN[library], (
        f"whet's use of {library}'s private APIs was tried with {', '.join(SEEN[library])}, not {installed}: if the "
        "tests of tests/compat pass, add it to tests/compat/seen_versions.py and raise the bound in pyproject.toml"
    )


@pytest.mark.parametrize("library", SEEN)
def test_pyproject_has_an_upper_bound(library: str) -> None:
    bounds = [Requirement(each).specifier for each in REQUIREMENTS if Requirement(each).name == library]
    assert bounds
    for bound in bounds:
        assert all(bound.contains(seen) for seen in SEEN[library])
        assert not bound.contains("999"), f"{library} needs an upper bound in pyproject.toml: whet uses private APIs"
