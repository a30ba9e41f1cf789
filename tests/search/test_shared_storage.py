"""Several searches share a storage: each trial is run by one of them. PostgreSQL is real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from curves import CurvePlace, planted_loss
from postgresql import find_programs, postgresql

from whet.core.errors import WhetError
from whet.search.results import collect_results
from whet.search.search import open_search_folder, plan_search, run_search
from whet.search.trials import TrialRun

LR = "train.optimizer.lr={search: log, low: 1e-5, high: 1e-1, count: 6}"
TRIALS = 6


def searched(recipe: str, folder: Path, storage: str, place: CurvePlace, *settings: str, resume: bool = False) -> Any:
    overrides = [LR, f"search.max_trials={TRIALS}", "train.steps=16", f"search.storage={storage}", *settings]
    plan = plan_search(Path(recipe), [*overrides, f"run.dir={folder}", "run.name=shared"])
    with open_search_folder(plan, resume):
        return collect_results(run_search(plan, place, resume), plan)


def numbers(place: CurvePlace) -> set[int]:
    return {number for number, _ in place.starts}


@pytest.mark.parametrize("method", [pytest.param("asha", marks=pytest.mark.slow), "grid"])
def test_a_second_search_joins_and_none_runs_the_trials_of_the_other(recipe: str, tmp_path: Path, method: str) -> None:
    """The second one begins and ends while the first is in its second trial."""
    storage, other = f"sqlite:///{tmp_path / 'shared.db'}", CurvePlace()
    settings = (f"search.method={method}",)

    def loss(trial: TrialRun) -> float:
        if len(first.starts) == 2:
            searched(recipe, tmp_path / "b", storage, other, *settings, resume=True)
        return planted_loss(trial)

    first = CurvePlace(loss)
    result = searched(recipe, tmp_path / "a", storage, first, *settings)
    assert numbers(first) | numbers(other) == set(range(TRIALS))
    assert not numbers(first) & numbers(other)
    assert len(other.starts) > 1
    assert {Path(trial.folder).parent.name for trial in result.trials} == {"a", "b"}


def test_a_search_with_another_recipe_cannot_join(recipe: str, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    searched(recipe, tmp_path / "a", storage, CurvePlace(), "search.method=single")
    with pytest.raises(WhetError, match="another recipe"):
        searched(
            recipe, tmp_path / "b", storage, CurvePlace(), "search.method=single", "train.clip_norm=0.5", resume=True
        )
    with pytest.raises(WhetError, match="it has a study named shared already"):
        searched(recipe, tmp_path / "c", storage, CurvePlace(), "search.method=single")


@pytest.mark.slow
def test_trials_of_a_search_elsewhere_are_left_alone(recipe: str, tmp_path: Path) -> None:
    """A search that is resumed while another, killed or not, has unfinished trials in the same study."""
    storage, settings = f"sqlite:///{tmp_path / 'shared.db'}", ("search.method=random",)
    with pytest.raises(MemoryError):
        searched(recipe, tmp_path / "a", storage, CurvePlace(dies_at=4), *settings)
    second = CurvePlace()
    searched(recipe, tmp_path / "b", storage, second, *settings, resume=True)
    again = CurvePlace()
    searched(recipe, tmp_path / "a", storage, again, *settings, resume=True)
    assert not numbers(again) & numbers(second)
    assert numbers(again) <= {0, 1}


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    pytest.importorskip("psycopg", reason="needs psycopg, PostgreSQL's driver: pip install 'psycopg[binary]'")
    programs = find_programs()
    if programs is None:
        pytest.skip("needs the Debian package postgresql: make system-deps")
    with postgresql(programs) as url:
        yield url


_SEARCH = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_shared_storage as shared
from curves import CurvePlace, planted_loss

def slow(trial):
    time.sleep(0.02)
    return planted_loss(trial)

place = CurvePlace(slow)
shared.searched(sys.argv[2], Path(sys.argv[3]), sys.argv[4], place, f"search.method={sys.argv[5]}", resume=True)
print(json.dumps(place.starts))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["asha", "tpe", "grid"])
def test_two_machines_share_one_postgresql(recipe: str, tmp_path: Path, database: str, method: str) -> None:
    """Two processes with folders of their own begin at the same time, one database for all methods of this test."""
    storage = f"{database}?options=-csearch_path%3D{method}"
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {method}")
    words = [sys.executable, "-c", _SEARCH, str(Path(__file__).parent), recipe]
    both = [
        subprocess.Popen([*words, str(tmp_path / name), storage, method], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    outputs = [process.communicate(timeout=280)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    one, other = ({number for number, _ in json.loads(output.splitlines()[-1])} for output in outputs)
    assert one
    assert other
    assert not one & other
    if method == "grid":
        values = [path.read_text() for name in ("a", "b") for path in (tmp_path / name).glob("recipes/*.yaml")]
        rates = {line for text in values for line in text.splitlines() if " lr:" in line}
        assert len(rates) == TRIALS
    else:
        assert len(one | other) == TRIALS


@pytest.mark.slow
def test_real_trials_with_postgresql(whet: Callable[..., Any], recipe: str, tmp_path: Path, database: str) -> None:
    settings = (LR, "train.steps=4", "search.max_trials=3", "search.method=random", f"search.storage={database}")
    ended = whet("search", recipe, *settings, f"run.dir={tmp_path / 'a'}", "run.name=real", "--json")
    assert ended.code == 0, ended.err
    again = whet("search", recipe, *settings, f"run.dir={tmp_path / 'a'}", "run.name=real", "--resume", "--json")
    assert json.loads(again.out) == json.loads(ended.out)
    assert not (tmp_path / "a" / "journal.log").exists()
    secret = f"search.storage={database.replace('whet@', 'whet:topsecret@').replace('127.0.0.1', '127.0.0.1:1', 1)}"
    broken = whet("search", recipe, *settings[:-1], secret, f"run.dir={tmp_path / 'b'}", "run.name=x")
    assert broken.code == 1
    assert "search.storage" in broken.err
    assert "topsecret" not in broken.err
