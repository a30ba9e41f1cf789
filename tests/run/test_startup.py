"""From the command to the first step: the model is loaded beside the data, errors keep their order, time is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import forkserver
from whet.config import Config, read_config
from whet.core.errors import WhetError
from whet.core.run_folder import RunFolder
from whet.data.prepare.workers import notify_waiting
from whet.model.load.builtin_models import builtin_folder
from whet.run import data as run_data
from whet.run.data import prepare_data
from whet.run.models import model_builder
from whet.run.models.model_builder import BackgroundModelLoader
from whet.run.resume import write_run_inputs
from whet.training.metrics import StartupTimer, startup_summary

PARTS = ["import_s", "prepare_s", "load_s", "fit_s", "measure_s", "step_s"]


def config_of(recipe: str, folder: Path, *overrides: str) -> Config:
    return read_config(Path(recipe), [f"run.dir={folder}", *overrides])


def first_step(folder: Path) -> dict[str, float]:
    return dict(json.loads((folder / "status.json").read_text())["first_step"])


# The thread


@pytest.mark.parametrize(("trusts", "name"), [("false", "load the model"), ("true", "MainThread")])
def test_the_model_is_loaded_in_a_thread_unless_it_brings_code_of_its_own(
    trusts: str, name: str, whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    load = model_builder.load_model

    def noted(*arguments: Any) -> torch.nn.Module:
        threads.append(threading.current_thread().name)
        return load(*arguments)

    monkeypatch.setattr(model_builder, "load_model", noted)
    run = f"run.dir={tmp_path / 'run'}"
    ended = whet("train", recipe, run, "train.steps=1", f"model.trust_remote_code={trusts}", "export.at_end=none")
    assert ended.code == 0, ended.err
    assert threads == [name]
    assert torch.get_default_dtype() == torch.float32


class Operations(TorchDispatchMode):
    """What this thread computes with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_preparing_computes_nothing_with_torch_so_the_thread_cannot_be_in_its_way(recipe: str, tmp_path: Path) -> None:
    config = config_of(recipe, tmp_path / "run", "data.deduplicate=true", f"data.store={tmp_path / 'stores'}")
    folder = RunFolder(config.folder)
    with Operations() as operations:
        for _ in range(2):  # made, then found
            data = prepare_data(config)
            write_run_inputs(folder, config, data)
            assert len(data.tokenizer) > 0
    folder.close()
    assert operations.seen == []
    with Operations() as operations:
        torch.ones(1) + 1
    assert operations.seen  # it would have been noticed


@pytest.mark.parametrize("store", ["cold", "warm"])
def test_where_data_and_model_are_both_wrong_the_data_is_reported(
    store: str, whet: Any, recipe: str, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model"))
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "user", "content": "Only a question"}]}\n')
    arguments = ["train", recipe, f"model.path={model}", f"run.dir={tmp_path / 'run'}", "--json"]
    if store == "warm":
        assert whet("prepare", recipe, f"model.path={model}").code == 0
    (model / "model.safetensors").unlink()
    bad = "data.validation.sources=[{path: %s}]" % (tmp_path / "none.jsonl")
    ended = whet(*arguments, bad)
    assert ended.code == 1
    assert "none.jsonl" in json.loads(ended.out)["error"]
    ended = whet(*arguments)
    assert ended.code == 1
    assert re.match(r"model\.path: the model of .* cannot be loaded", json.loads(ended.out)["error"])
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


def test_the_model_is_loaded_once_no_store_but_the_last_is_left_to_prepare(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread holds the lock that forking takes: workers for another store would wait for the whole model."""
    seen: list[str] = []
    prepare_store = run_data.prepare_store

    def noted(config: Any, sources: Any, use: str, *more: Any) -> Any:
        seen.append(use)
        notify_waiting()  # as if workers had been forked
        return prepare_store(config, sources, use, *more)

    monkeypatch.setattr(run_data, "prepare_store", noted)
    prepare_data(config_of(recipe, tmp_path), while_waiting=lambda: seen.append("model"))
    assert seen == ["validation", "train", "model", "model"]


def test_a_model_that_is_no_longer_needed_is_abandoned_at_once(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(*_: Any) -> torch.nn.Module:
        begun.set()
        assert may_end.wait(60)
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(model_builder, "load_model", slow)
    loading = BackgroundModelLoader(config_of(recipe, tmp_path))
    loading.start()
    assert begun.wait(10)
    began = time.monotonic()
    loading.close()
    assert time.monotonic() - began < 30
    assert model_builder.fork_lock.locked()
    may_end.set()
    assert model_builder.fork_lock.acquire(timeout=10)  # it ends by itself, and nothing is held any more
    model_builder.fork_lock.release()


def test_an_error_of_the_thread_is_raised_by_model(recipe: str, tmp_path: Path) -> None:
    loading = BackgroundModelLoader(config_of(recipe, tmp_path, "model.path=/no/such/model"))
    loading.start()
    with pytest.raises(WhetError, match=r"model\.path: /no/such/model"):
        loading.model()


SLOW = """
import sys, time
from whet.run.models import model_builder

def slow(*_):
    print("loading", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.01)

model_builder.load_model = slow
from whet.cli.app import main
main()
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_the_model_is_loaded_ends_the_process(kind: int, recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, "train", recipe, f"run.dir={tmp_path / 'run'}"]
    process = forkserver.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line == "loading\n":
            break
    process.send_signal(kind)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    if kind == signal.SIGINT:
        assert process.returncode == 130
        assert said.strip().endswith("interrupted")
        assert not (tmp_path / "run").exists()
    else:  # of a program, which starts it again
        assert process.returncode == 75
        assert "stopped before a step was saved" in said


# The seconds


def test_a_run_reports_the_time_to_its_first_step_by_phase(
    real_python: str, start: Callable[..., Any], recipe: str, tmp_path: Path
) -> None:
    folder, began = tmp_path / "run", time.monotonic()
    process = start("train", recipe, f"run.dir={folder}", "train.steps=2")
    _, said = process.communicate()
    wall = time.monotonic() - began
    assert process.returncode == 0, said
    seconds = first_step(folder)
    assert list(seconds) == ["first_step_s", *PARTS]
    assert {part for part in PARTS if seconds[part] == 0} == {"fit_s"}  # a CPU has no memory to fit the worst batch to
    assert seconds["first_step_s"] == pytest.approx(sum(seconds[part] for part in PARTS), abs=0.01)
    assert 0.3 < seconds["import_s"] < seconds["first_step_s"] < wall
    line = re.search(r"first step after ([\d.]+) s: [\d.]+ s imports", said)  # parts that took no time are left out
    assert line is not None, said
    assert float(line[1]) == pytest.approx(seconds["first_step_s"], abs=0.06)
    assert said.index(line[0]) < said.index("step 2:")


def test_a_resumed_run_measures_itself_again(whet: Any, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", recipe, f"run.dir={folder}", "train.steps=4"]
    assert whet(*arguments, "--until", "2").code == 0
    before = first_step(folder)
    ended = whet(*arguments, "--resume")
    assert ended.code == 0, ended.err
    after = first_step(folder)
    assert after != before
    assert after["import_s"] < 3  # this process had trained before: it counts from the call
    assert ended.err.count("first step after") == 1


def test_parts_that_took_no_time_are_not_mentioned() -> None:
    watch = StartupTimer()
    watch.end_phase("import_s")
    seconds = watch.finish()
    assert watch.is_done
    assert list(seconds) == ["first_step_s", *PARTS]
    seconds |= dict.fromkeys(PARTS, 0.0) | {"first_step_s": 3.0, "load_s": 1.0, "step_s": 2.0}
    text = "first step after 3.0 s: 1.0 s model, 2.0 s the step"
    assert startup_summary(seconds) == text
    assert startup_summary(seconds, 570) == f"{text}; about 19 min for the 570 to come"


def run_in_new_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs whet not in a fork that has torch; prints which of torch and transformers were imported."""
    code = (
        "import sys\nfrom whet.cli.app import app\n"
        "try:\n    app()\nfinally:\n    print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    words = [os.environ["WHET_TEST_PYTHON"], "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_a_folder_that_holds_a_run_is_refused_before_torch_is_imported(tmp_path: Path, recipe: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: {path: builtin:tiny}\n")
    ended = run_in_new_python("train", recipe, f"run.dir={run}")
    assert (ended.returncode, ended.stdout) == (1, "[]\n"), ended.stderr
    assert f"{run}: this folder holds a run already. Continue it with --resume" in ended.stderr


@pytest.mark.parametrize("verb", ["chat", "eval", "export", "serve"])
def test_a_mistyped_run_is_named_before_torch_is_imported(tmp_path: Path, verb: str) -> None:
    (tmp_path / "faq").mkdir()
    ended = run_in_new_python(verb, f"{tmp_path}/fax@3")
    assert (ended.returncode, ended.stdout) == (1, "[]\n"), ended.stderr
    assert f"{tmp_path}/fax: no such folder" in ended.stderr
    assert f"Did you mean {tmp_path}/faq?" in ended.stderr
