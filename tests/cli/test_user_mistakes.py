"""What a person met in the first hour with data of their own; each of these once went wrong or unsaid."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

Prepare = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def prepare(whet: Any, recipe: str, tmp_path: Path) -> Prepare:
    """Prepare records of one's own: (exit code, result)."""

    def run(records: list[dict[str, Any]], *options: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "own.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        own = [f"data.sources=[{{path: {path}}}]", "data.validation=null", *options]
        ended = whet("prepare", recipe, *own, "--json")
        return ended.code, json.loads(ended.out)

    return run


def test_tools_that_the_template_ignores_are_reported(prepare: Prepare) -> None:
    code, result = prepare([{"messages": TURNS}, {"messages": TURNS, "tools": [TOOL]}])
    assert code == 0
    assert result["notes"] == {"tools left out by the template": 1}
    assert result["first"]["tools left out by the template"][0].endswith("own.jsonl:2")


def test_a_field_that_a_record_lacks_is_not_a_filter(prepare: Prepare) -> None:
    records = [{"messages": TURNS, "lang": "de"}, {"messages": TURNS}]
    _, result = prepare(records, "data.on_bad=skip", "data.sources.0.where=lang == 'de'")
    assert result["reasons"] == {"where": 1}
    _, result = prepare(records, "data.on_bad=skip", "data.sources.0.where=\"'lang' in record and lang == 'de'\"")
    assert result["reasons"] == {"filter": 1}


def test_a_very_long_conversation_follows_data_too_long(prepare: Prepare) -> None:
    long = [TURNS[0] | {"content": "a" * 700_000}, TURNS[1]]
    code, result = prepare([{"messages": TURNS}, {"messages": long}], "data.too_long=drop")
    assert code == 0
    assert result["reasons"] == {"too long to mask": 1}
    code, result = prepare([{"messages": TURNS}, {"messages": long}], "data.too_long=error")
    assert code == 1
    assert "own.jsonl:2" in result["error"]


def test_calculator_calls_need_a_format_that_has_them(prepare: Prepare) -> None:
    code, result = prepare([{"messages": TURNS}], "data.sources.0.calculator=calls")
    assert code == 1
    assert "gsm8k" in result["error"]


def test_a_dash_is_standard_input(recipe: str, tmp_path: Path) -> None:
    own = ["data.sources.0.path=-", "data.sources.0.max_samples=null", "data.validation=null", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "whet", "prepare", recipe, *own],
        input=json.dumps({"messages": TURNS}) + "\n", capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["conversations"]["kept"] == 1


def test_data_in_place_of_a_recipe(whet: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n")
    ended = whet("prepare", path, "--json")
    assert ended.code == 1
    assert f"Make a recipe for it: whet init {path}" in json.loads(ended.out)["error"]


def test_counts_into_a_missing_folder_are_refused(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("inspect", recipe, "--count", tmp_path / "no" / "x.csv", "--json")
    assert ended.code == 1
    assert str(tmp_path / "no") in json.loads(ended.out)["error"]


def test_a_recipe_of_the_pages_is_found_where_whet_is_installed(
    whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = whet("check", "recipes/lumi.yaml")
    assert ended.code == 1
    assert Path(re.findall(r"cp (\S+/recipes/lumi.yaml) \.", ended.err)[0]).is_file()


def test_a_misspelt_file_is_recognised(whet: Any, tmp_path: Path) -> None:
    (tmp_path / "Kundenfragen.csv").write_text("Frage,Antwort\n")
    ended = whet("init", tmp_path / "Kundenfrage.csv", "--model", "builtin:tiny")
    assert ended.code == 1
    assert f"Did you mean {tmp_path / 'Kundenfragen.csv'}?" in ended.err
