"""The scripts in bench/ call whet as it is: most of them need a GPU or minutes, so no test runs them."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))


def imported(tree: ast.Module) -> dict[str, Any]:
    """What a script imports from whet, by its name there; kernels only where there is Triton."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "whet":
            for each in node.names:
                try:
                    owner = importlib.import_module(str(node.module))
                    if not hasattr(owner, each.name):
                        importlib.import_module(f"{node.module}.{each.name}")
                except ModuleNotFoundError as error:
                    if error.name != "triton":  # which a machine without a GPU does not have
                        raise
                else:
                    found[each.asname or each.name] = getattr(owner, each.name)
    return found


def wrong_calls(source: str) -> Iterator[str]:
    """The calls of whet's functions and classes whose arguments do not fit."""
    tree = ast.parse(source)
    names = imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        function, path = node.func, list[str]()
        while isinstance(function, ast.Attribute):
            function, path = function.value, [function.attr, *path]
        if not isinstance(function, ast.Name) or function.id not in names or None in [k.arg for k in node.keywords]:
            continue
        called = names[function.id]
        for name in path:
            called = getattr(called, name)
        try:
            inspect.signature(called).bind(*node.args, **{str(each.arg): each for each in node.keywords})
        except TypeError as error:
            yield f"{ast.unparse(node)}: {error}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_calls_whet_as_it_is(script: Path) -> None:
    assert list(wrong_calls(script.read_text())) == []


def test_a_call_without_an_argument_is_found() -> None:
    source = "from whet.run.loader import make_loader\nmake_loader(config, store, plan, ranks)"
    assert list(wrong_calls(source)) == ["make_loader(config, store, plan, ranks): missing a required argument: 'root'"]
