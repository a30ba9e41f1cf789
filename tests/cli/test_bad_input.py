"""Bad input: exit 1, one paragraph with place and remedy, and nothing half-written."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.core.run_folder import FolderLock
from whet.model.load.builtin_models import builtin_folder

USER, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
GOOD = {"messages": [USER, HELLO]}

Refused = Callable[..., str]


def test_no_file(refused: Refused, tmp_path: Path) -> None:
    error = refused("data.validation=null", f"data.sources.0.path={tmp_path / 'no.jsonl'}")
    assert f"{tmp_path / 'no.jsonl'}: no such file" in error
    assert "builtin:orders" in error


def test_an_empty_file(refused: Refused, write_data: Any) -> None:
    file = write_data()
    error = refused("data.validation=null", f"data.sources.0.path={file}")
    assert f"{file}: the file is empty" in error
    assert '{"messages": [' in error


@pytest.mark.parametrize(
    ("line", "explanation"),
    [
        ('{"messages": [', "not valid JSON: Expecting value at column"),
        ({"messages": [{"content": "Hi"}, HELLO]}, "message 1 has no 'role'; set it to one of system, developer, user"),
        ({"messages": [USER, {"role": "robot", "content": "Hi"}]}, "message 2 has the role 'robot'; known: system"),
        ({"txt": "Hi"}, "no 'messages'"),
        ({"messages": [USER]}, "no message has the role 'assistant'"),
    ],
    ids=["broken JSON", "no role", "unknown role", "no messages", "no assistant"],
)
def test_a_bad_line_is_named_with_its_number(refused: Refused, write_data: Any, line: Any, explanation: str) -> None:
    file = write_data(GOOD, GOOD, line, GOOD)
    error = refused("data.validation=null", f"data.sources.0.path={file}")
    assert f"{file}:3: " in error
    assert explanation in error
    assert "data.on_bad=skip" in error


def test_a_role_that_the_template_does_not_know(refused: Refused, write_data: Any, tmp_path: Path) -> None:
    model = shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model")
    template = (model / "chat_template.jinja").read_text()
    refuse = "{% if m.role == 'tool' %}{{ raise_exception('No tools here') }}{% endif %}"
    (model / "chat_template.jinja").write_text("{% for m in messages %}" + refuse + "{% endfor %}" + template)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    file = write_data(GOOD, {"messages": [USER, call, {"role": "tool", "content": "7"}, HELLO]})
    error = refused("data.validation=null", f"data.sources.0.path={file}", f"model.path={model}")
    assert f"{file}:2: the chat template refuses it: No tools here" in error


def test_a_model_folder_without_a_tokenizer(refused: Refused, tmp_path: Path) -> None:
    model = shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    error = refused(f"model.path={model}")
    assert f"model.path: {model}: the folder has no tokenizer" in error
    assert "Copy" in error


@pytest.mark.parametrize("path", ["/no/such/model", "nobody/no-such-model", "builtin:huge"])
def test_a_model_that_does_not_exist(refused: Refused, path: str) -> None:
    assert path in refused(f"model.path={path}")


def test_nothing_left_to_train_on(refused: Refused) -> None:
    error = refused("data.validation=null", "data.max_length=3", "train.row_length=4")
    assert "no conversation is left to train on" in error
    assert "200 too long" in error


def test_an_unknown_task(refused: Refused) -> None:
    assert "eval.tasks: unknown task 'ordrs'; built in are: orders" in refused("eval.tasks=[ordrs]")


def test_a_misspelt_key_proposes_the_right_one(refused: Refused) -> None:
    error = refused("train.stepz=3")
    assert "unknown key train.stepz (value 3). Did you mean train.steps?" in error


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.steps=many", "train.steps: 'many' is not valid: expected integer"),
        ("train.steps=0", "train.steps: 0 is not valid"),
        ("train.row_length=100", "shorter than data.max_length = 256"),
        ("export.at_end=adapter", "without an adapter section"),
        ("train.steps", "KEY=VALUE"),
    ],
)
def test_an_invalid_setting_is_refused(refused: Refused, setting: str, said: str) -> None:
    assert said in refused(setting)


def test_a_recipe_that_does_not_exist(whet: Any, tmp_path: Path) -> None:
    ended = whet("train", tmp_path / "no.yaml")
    assert ended.code == 1
    assert f"{tmp_path / 'no.yaml'}: no such file" in ended.err


def test_a_folder_that_holds_other_files(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    error = refused(folder=folder)
    assert f"run.dir: {folder} holds files that do not belong to a run (thesis.tex)" in error


def test_a_run_folder_that_is_a_file(whet: Any, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    ended = whet("train", recipe, f"run.dir={tmp_path / 'file'}")
    assert ended.code == 1
    assert f"run.dir: {tmp_path / 'file'} cannot be used as a folder" in ended.err


def test_a_folder_in_use_by_another_process(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "busy"
    folder.mkdir()
    lock = FolderLock(folder)
    error = refused(folder=folder)
    assert f"{folder}: in use by " in error
    assert " pid " in error
    lock.release()


@pytest.mark.parametrize(
    "arguments",
    [["eval"], ["export"], ["chat", "--prompt", "Hi"], ["report"]],
    ids=lambda arguments: arguments[0],
)
def test_a_run_that_does_not_exist(whet: Any, arguments: list[str], tmp_path: Path) -> None:
    verb, *rest = arguments
    ended = whet(verb, tmp_path / "no-run", *rest)
    assert ended.code == 1
    assert str(tmp_path / "no-run") in ended.err
    assert not (tmp_path / "no-run").exists()


def test_a_missing_checkpoint_lists_the_existing_ones(whet: Any, tiny_run: Path) -> None:
    ended = whet("eval", f"{tiny_run}@7")
    assert ended.code == 1
    assert "no such checkpoint. Use one of 8, 12, latest" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [["eval"], ["export"], ["chat", "--prompt", "Hi"], ["report"], ["inspect"], ["train", "--resume"]],
    ids=lambda arguments: arguments[0],
)
def test_the_run_folder_of_a_newer_version_is_refused(
    whet: Any, recipe: str, arguments: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(recipe, run / "config.yaml")
    (run / "status.json").write_text('{"format": 2, "state": "stopped", "step": 1, "steps": 2}')
    verb, *rest = arguments
    ended = whet(*([verb, recipe, f"run.dir={run}"] if verb == "train" else [verb, run]), *rest)
    assert ended.code == 1
    assert f"{run}: this run folder has format 2 (in status.json), and whet " in ended.err
    assert "pip install --upgrade whet" in ended.err
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "status.json"]


# Values and files that once ended in a traceback


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.steps=1e26", "train.steps: 1e+26 is not valid: expected integer"),
        ("train.steps=1000000000000", "train.steps: 1000000000000 is not valid"),
        ("train.steps=1000000000", "Lower train.steps, or"),
        ("run.seed=9223372036854775808", "run.seed: 9223372036854775808 is too large"),
        ("data.store=FILE", "data.store: FILE is not a folder. Give a folder"),
        ("data.store=LOOP", "data.store: LOOP is not a folder. Give a folder"),
        ("data.sources.0.path=LOOP", "LOOP: no such file"),
        ("data.sources.0.path=PIPE", "PIPE: not a regular file; to read from a pipe, give -"),
        ("data.template=LOOP.jinja", "data.template: LOOP.jinja cannot be read"),
        ("run.dir=FILE", "FILE"),
        ("run.dir=LOOP", "LOOP"),
    ],
    ids=lambda value: value[:40],
)
def test_a_value_that_nothing_can_be_made_of(refused: Refused, tmp_path: Path, setting: str, words: str) -> None:
    (tmp_path / "LOOP").symlink_to("LOOP")
    (tmp_path / "LOOP.jinja").symlink_to("LOOP.jinja")
    (tmp_path / "FILE").touch()
    os.mkfifo(tmp_path / "PIPE")
    for name in ("LOOP", "FILE", "PIPE"):
        setting, words = setting.replace(name, f"{tmp_path}/{name}"), words.replace(name, f"{tmp_path}/{name}")
    began = time.monotonic()
    assert words in refused("data.validation=null", setting)
    assert time.monotonic() - began < 20


def test_a_template_without_end(refused: Refused, write_data: Any, tmp_path: Path) -> None:
    (tmp_path / "bomb.jinja").write_text("{{ 'a' * 10**12 }}")
    error = refused(
        "data.validation=null", f"data.sources.0.path={write_data(GOOD)}", f"data.template={tmp_path}/bomb.jinja"
    )
    assert "the chat template is not usable: it needs more than 2 GiB of memory" in error
    assert "data.template=FILE.jinja" in error
