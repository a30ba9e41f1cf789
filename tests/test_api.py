"""`import whet`: a recipe, a dict or a path in; objects and exceptions out."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import whet
from whet.api import __all__ as documented

DATA = "prompt,completion\n" + "".join(f"What is {n} and one?,It is {n + 1}.\n" for n in range(30))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)
    Path("sums.csv").write_text(DATA)
    return {
        "model": {"path": "builtin:tiny"}, "adapter": {"rank": 4}, "export": {"at_end": "none"},
        "data": {"sources": [{"path": "sums.csv"}]}, "train": {"steps": 2, "batch": {"conversations": 2}},
    }  # fmt: skip


def test_a_dict_becomes_a_run_a_table_an_answer_and_an_export(recipe: dict[str, object]) -> None:
    assert {finding.level for finding in whet.check(recipe)} <= {"ok", "warning"}
    assert whet.prepare(recipe)["sources"][0]["conversations"]["kept"] == 30
    run = whet.train(recipe)
    assert (run.path, run.state, run.name) == (Path("runs/sums"), "finished", "sums")
    assert run.config["train"]["steps"] == 2
    assert run.metrics().dropna(subset="loss")["step"].tolist() == [1, 2]
    assert len(whet.generate(run, ["a", "b"], max_new_tokens=2)) == 2
    assert whet.generate(run, "a", max_new_tokens=2, stop="no such text") == whet.generate(run, "a", max_new_tokens=2)
    chat = run.chat(max_new_tokens=2)
    said = chat.send("Hi")
    assert [message["content"] for message in chat.messages] == ["Hi", said]
    assert run.export("adapter").verified
    with pytest.raises(whet.WhetError, match=r"'gugf' is not a kind of export\. Use one of merged, adapter, gguf"):
        run.export("gugf")
    with pytest.raises(whet.WhetError, match="holds a run already"):
        whet.train(recipe)
    again = whet.train(recipe, "train.steps=1", fresh=True)
    assert len(again.metrics().dropna(subset="loss")) == 1
    assert whet.load_run("runs/sums.1").state == "finished"


def test_a_paused_run_is_resumed(recipe: dict[str, object]) -> None:
    assert whet.train(recipe, until=1).state == "stopped"
    assert whet.train(recipe, resume=True).metrics().dropna(subset="loss")["step"].tolist() == [1, 2]


def test_a_dict_may_hold_paths_and_numbers_of_numpy(recipe: dict[str, object]) -> None:
    data = {"sources": ({"path": Path("sums.csv")},), "max_length": np.int64(64)}
    assert whet.prepare({**recipe, "data": data})["sources"][0]["conversations"]["kept"] == 30


def test_errors_are_exceptions_that_name_the_key(recipe: dict[str, object]) -> None:
    with pytest.raises(whet.WhetError, match="unknown key trian"):
        whet.train({**recipe, "trian": {}})
    with pytest.raises(whet.WhetError, match=r"train\.steps"):
        whet.check(recipe, "train.steps=none of it")
    with pytest.raises(whet.WhetError, match=r"override {'train.steps': 3}: give settings as text, such as"):
        whet.check(recipe, {"train.steps": 3})  # type: ignore[arg-type]
    with pytest.raises(whet.WhetError, match="not a run"):
        whet.load_run("nix")
    with pytest.raises(whet.WhetError, match=r"tags: .* is a set\. Give text, a number, a list or a dict"):
        whet.check({**recipe, "run": {"tags": {"a"}}})
    inside_itself = {**recipe}
    inside_itself["run"] = inside_itself
    with pytest.raises(whet.WhetError, match="contains itself"):
        whet.check(inside_itself)
    with pytest.raises(whet.WhetError, match="give one of them"):
        whet.train(recipe, fresh=True, resume=True)
    with ThreadPoolExecutor(1) as pool, pytest.raises(whet.WhetError, match="main thread alone"):
        pool.submit(whet.train, recipe).result()
    with pytest.raises(AttributeError, match="nix"):
        whet.nix  # noqa: B018


def test_the_names_are_those_of_the_api_and_importing_whet_is_light(real_python: str) -> None:
    assert set(documented) <= set(dir(whet))
    assert all(getattr(whet, name) is not None for name in documented)
    code = "import sys, whet; print([name for name in ('torch', 'pandas', 'pydantic') if name in sys.modules])"
    assert subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
