"""What whet keeps of transformers' start: the same structure, from the cache or not, and never a stale one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import transformers

from whet.compat import transformers_start

MODULE = "transformers_start"

_PROGRAM = """
import json, sys
import {first}
import transformers, transformers.models
from transformers.utils import import_utils

def listed(module):
    return sorted((name, module._class_to_module[name]) for name in module._class_to_module)

from transformers import LlamaForCausalLM
print(json.dumps([
    listed(transformers), listed(transformers.models), import_utils.PACKAGE_DISTRIBUTION_MAPPING,
    import_utils.define_import_structure.__module__, LlamaForCausalLM.__module__,
], sort_keys=True))
"""


def structure(real_python: str, cache: Path, first: str) -> list[object]:
    done = subprocess.run(
        [real_python, "-c", _PROGRAM.format(first=first)], env={**os.environ, "WHET_CACHE": str(cache)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[object] = json.loads(done.stdout)
    return found


def test_the_shared_structure_of_models_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    package = Path(transformers.__file__).parent
    file = package / "utils" / "import_utils.py"
    spec = importlib.util.spec_from_file_location("transformers.utils.unchanged_import_utils", file)
    assert spec is not None
    assert spec.loader is not None
    unchanged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchanged)
    expected = unchanged.define_import_structure(package / "models", prefix="models")
    for _ in ("computed", "kept"):
        shared = transformers_start._sharing(unchanged.define_import_structure, package)
        assert shared(package / "models" / "__init__.py", prefix="models") == expected
    assert len(list((tmp_path / "imports").iterdir())) == 1


@pytest.mark.slow
def test_the_kept_structure_is_that_of_transformers(real_python: str, tmp_path: Path) -> None:
    expected = structure(real_python, tmp_path, "json")
    assert not (tmp_path / "imports").exists()
    computed, kept = (structure(real_python, tmp_path, "whet.compat") for _ in range(2))
    assert expected.pop(3) == "transformers.utils.import_utils"
    assert (computed.pop(3), kept.pop(3)) == ("whet.compat.transformers_start",) * 2
    assert expected == computed == kept
    assert len(list((tmp_path / "imports").iterdir())) == 2


def test_a_value_is_computed_again_where_its_files_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "models" / "llama" / "modeling_llama.py"
    source.parent.mkdir(parents=True)
    source.write_text("__all__ = []")
    calls = []

    def value() -> object:
        files = transformers_start._source_files(tmp_path / "models")
        return transformers_start.cached("some", files, lambda: calls.append(1) or [len(calls)])

    assert [value(), value()] == [[1], [1]]
    source.write_text("__all__ = ['Llama']")
    assert [value(), value()] == [[2], [2]]
    (source.parent / "tokenization_llama.py").write_text("")
    assert [value(), value()] == [[3], [3]]
    (file,) = (tmp_path / "cache" / "imports").iterdir()
    file.write_text(file.read_text().replace("3", "4"))  # a flipped bit
    assert [value(), value()] == [[4], [4]]
    file.unlink()
    file.mkdir()  # cannot be read, nor replaced
    assert [value(), value()] == [[5], [6]]


def test_installed_packages_are_listed_again_where_one_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "missing"), "\0"])

    def listed() -> list[object]:
        return list(transformers_start._metadata_folders())

    before = listed()
    (tmp_path / "runs").mkdir()
    assert listed() == before
    (tmp_path / "some-1.0.dist-info").mkdir()
    installed = listed()
    assert installed != before
    (tmp_path / "some-1.0.dist-info").rename(tmp_path / "some-1.1.dist-info")
    assert listed() not in (before, installed)


@pytest.mark.parametrize(("first", "is_found"), [("pass", True), ("transformers_start.leave_out_packages()", False)])
def test_transformers_does_not_find_what_is_left_out(
    real_python: str, tmp_path: Path, first: str, is_found: bool
) -> None:
    for package, name in (("sklearn", "scikit_learn"), ("scipy", "scipy")):
        metadata = tmp_path / f"{name}-1.7.0.dist-info"
        for folder in (tmp_path / package, metadata):
            folder.mkdir()
        (tmp_path / package / "__init__.py").touch()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.7.0\n")
    program = f"""
import sys
from whet.compat import transformers_start
{first}
from transformers.utils import is_scipy_available, is_sklearn_available
print(is_scipy_available(), is_sklearn_available(), "sklearn" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WHET_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([real_python, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(is_found), str(is_found), "False"]
