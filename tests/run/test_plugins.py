"""Functions of the user's own, from a distribution that is really installed: in a folder with its .dist-info."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.data.read.containers.locate import forget_plugin_records

CODE = '''
def score_greeting(answer, example):
    """Half a point for any answer to a question that was asked."""
    assert example.answers == ("hello",) and example.messages[-1].content == "hi"
    return 0.5

def score_badly(answer, example):
    return 7

def mean_length(samples):
    return sum(len(sample["answer"]) for sample in samples) / len(samples) + 1000

def tickets(argument):
    for number in range(int(argument or 3)):
        yield {"prompt": f"ticket {number}", "completion": "closed"}

def breaks(argument):
    yield {"prompt": "a", "completion": "b"}
    raise KeyError("no such table")
'''
POINTS = """
[whet.scorers]
greeting = own_whet:score_greeting
bad = own_whet:score_badly

[whet.metrics]
mean-length = own_whet:mean_length
gone = no_such_module:x

[whet.sources]
tickets = own_whet:tickets
breaks = own_whet:breaks
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that pip could have filled, on sys.path."""
    site = tmp_path / "site"
    about = site / "own_whet-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "own_whet.py").write_text(CODE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-whet\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "greet.jsonl").write_text('{"prompt": "hi", "answer": "hello"}\n')
    yield tmp_path
    sys.modules.pop("own_whet", None)
    forget_plugin_records()


def recipe(folder: Path, source: str = "plugin:tickets:8", **evaluation: Any) -> str:
    file = folder / "own.yaml"
    tree = {
        "model": {"path": "builtin:tiny"},
        "data": {"sources": [{"path": source}]},
        "train": {"steps": 1, "batch": {"conversations": 2}},
        "eval": {"at_start": False, **evaluation},
        "export": {"at_end": "none"},
        "run": {"dir": str(folder / "run")},
    }
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def test_a_run_with_a_source_a_scorer_and_a_metric_of_ones_own(installed: Path, whet: Any) -> None:
    tasks = [{"path": "greet.jsonl", "scorer": "greeting", "max_new_tokens": 2}]
    file = recipe(installed, tasks=tasks, metrics=["mean-length"], best="metric/mean-length")
    ended = whet("train", file)
    assert ended.code == 0, ended.err
    metrics = [json.loads(line) for line in (installed / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["task/greet"] == 0.5
    assert metrics[-1]["metric/mean-length"] >= 1000
    ledger = json.loads((installed / "run/ledger.json").read_text())
    assert "plugin:tickets:8" in json.dumps(ledger)
    evaluated = json.loads(whet("eval", str(installed / "run"), "--json").out)
    assert "metric/mean-length" in json.dumps(evaluated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "plugin:nothing"}, "no installed package offers 'nothing'. Installed: breaks, tickets. Declare it"),
        ({"source": "plugin:breaks"}, "plugin:breaks: KeyError after 1 records: 'no such table'"),
        ({"source": "plugin:tickets:x"}, "plugin:tickets:x: ValueError before its first record: invalid literal"),
        ({"tasks": ["greet.jsonl:greetings"]}, "'greetings'; did you mean greeting? whet has exact, number"),
        ({"tasks": ["greet.jsonl:bad"]}, "scorer 'bad' returned '7', not a finite number from 0 to 1"),
        ({"tasks": ["greet.jsonl"], "metrics": ["gone"]}, "'gone' (no_such_module:x) cannot be imported: ModuleNotFou"),
        ({"tasks": ["greet.jsonl"], "metrics": ["len"]}, "there is no metric 'len'. Installed packages offer: gone"),
        ({"metrics": ["mean-length"], "prompts": []}, "eval.metrics: there are no answers to measure"),
    ],
)  # fmt: skip
def test_errors_name_what_is_installed(installed: Path, whet: Any, changes: dict[str, Any], message: str) -> None:
    ended = whet("train", recipe(installed, **changes), "train.steps=1")
    assert ended.code == 1, ended.err
    assert message in ended.err
    assert "Traceback" not in ended.err
