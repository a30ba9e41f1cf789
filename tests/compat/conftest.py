"""A failing test in this folder names the installed version, those that were seen to work, and the file to adapt."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest
from seen_versions import SEEN


@pytest.fixture
def private(request: pytest.FixtureRequest) -> ModuleType:
    """The module of whet.compat that a test file is about, imported inside the test, where its failure is explained."""
    return importlib.import_module(f"whet.compat.{request.module.MODULE}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report: Any = yield
    module = getattr(item.module, "MODULE", None)  # type: ignore[attr-defined]
    if report.failed and module is not None:
        library = module.partition("_")[0]
        seen = " and ".join(SEEN[library])
        hint = f"{library} {version(library)} is installed; this works with {seen}. Adapt src/whet/compat/{module}.py"
        report.sections.append(("private API changed", hint))
    return report
