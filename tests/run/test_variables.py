"""Environment variables of a run: the folder names them, finds changed ones, and never holds their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.config import read_config
from whet.core.yaml import dump_yaml, parse_yaml
from whet.run.resume import VariableHashes, read_run_config

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
PASSWORD = "correct horse battery"
LINE = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
_RECIPE = """
run:
  seed: 5
  dir: FOLDER
  tags: ["${DB_PASSWORD}", "$${plain}"]
model:
  path: ${TINY}
data:
  sources:
    - path: ${DATA}/d.jsonl
  max_length: 64
train:
  steps: 2
  batch: {conversations: 2}
  optimizer:
    lr: ${LR}
eval:
  tasks:
    - ${DATA}/t.jsonl:exact
launch:
  env:
    HF_TOKEN: ${HUB}
    SERVICE: "correct horse battery"
track: []
"""
TASK = {"prompt": "Hi", "answer": "Hello!"}


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    data = tmp_path / "data"
    data.mkdir()
    (data / "d.jsonl").write_text(f"{json.dumps(LINE)}\n" * 8)
    (data / "t.jsonl").write_text(f"{json.dumps(TASK)}\n")
    values = {
        "TINY": "builtin:tiny", "DATA": str(data), "LR": "3e-3", "HUB": TOKEN, "DB_PASSWORD": PASSWORD,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(_RECIPE.replace("FOLDER", str(tmp_path / "run")))
    return path


def files_of(folder: Path) -> str:
    """The content of every file of a run, as text."""
    return "\n".join(file.read_bytes().decode(errors="replace") for file in folder.rglob("*") if file.is_file())


@pytest.mark.usefixtures("variables")
def test_the_folder_names_variables_and_resumes_with_them(
    whet: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    ended = whet("train", recipe, "--until", "1", "eval.at_start=false")
    assert ended.code == 0, ended.err
    settings = parse_yaml((folder / "config.yaml").read_text(), "config.yaml", expand="none").plain()
    assert settings["model"]["path"] == "${TINY}"
    assert settings["data"]["sources"][0]["path"] == "${DATA}/d.jsonl"
    assert settings["train"]["optimizer"]["lr"] == "${LR}"
    assert settings["eval"]["tasks"] == ["${DATA}/t.jsonl:exact"]
    assert settings["run"]["tags"] == ["${DB_PASSWORD}", "${plain}"]
    assert settings["launch"]["env"] == ["HF_TOKEN", "SERVICE"]
    again = read_config(folder / "config.yaml").resolved()
    assert again == read_config(recipe, ["eval.at_start=false"]).resolved() | {"launch": settings["launch"]}
    for secret in (TOKEN, PASSWORD):
        assert secret not in files_of(folder)

    # a variable that training needs: refused; the message names it and has neither value
    monkeypatch.setenv("LR", "4e-3")
    for given in (recipe, folder / "config.yaml"):
        ended = whet("train", given, "--resume")
        assert ended.code == 1
        assert "train.optimizer.lr: ${LR}: the environment variable LR had another value then" in ended.err
        assert "e-3" not in ended.err
    monkeypatch.setenv("LR", "0.003")  # the same number
    monkeypatch.delenv("TINY")
    ended = whet("train", folder / "config.yaml", "--resume")
    assert ended.code == 1
    assert "the environment variable TINY is not set" in ended.err
    monkeypatch.setenv("TINY", "builtin:tiny")

    # a variable that it does not need: reported
    monkeypatch.setenv("DB_PASSWORD", "another password")
    ended = whet("train", recipe, "--resume")
    assert ended.code == 0, ended.err
    assert "run.tags.0: its environment variable has another value than when the run began" in ended.err
    assert "another password" not in ended.err + files_of(folder)
    assert "${TINY}" in (folder / "report.html").read_text()

    # the model is used without the variables of the data, not without its own, and not with another value
    monkeypatch.delenv("DATA")
    assert read_run_config(folder).model.path == "builtin:tiny"
    monkeypatch.delenv("TINY")
    assert "model.path: ${TINY}: the environment variable TINY is not set" in whet("chat", folder, "-p", "Hi").err
    monkeypatch.setenv("TINY", "builtin:smollm2")
    assert "model.path: ${TINY}: the environment variable TINY had another" in whet("chat", folder, "-p", "Hi").err


@pytest.mark.slow
@pytest.mark.usefixtures("variables")
def test_a_model_is_used_without_the_variables_of_its_data(
    whet: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert whet("train", recipe).code == 0
    for name in ("DATA", "DB_PASSWORD", "HUB"):
        monkeypatch.delenv(name)
    for words in (["chat", folder, "--prompt", "Hi"], ["inspect", folder], ["report", folder], ["export", folder],
                  ["eval", folder, "--tasks", tmp_path / "data" / "t.jsonl"]):  # fmt: skip
        ended = whet(*words)
        assert ended.code == 0, ended.err


@pytest.mark.usefixtures("variables")
def test_launch_names_variables(whet: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["launch", recipe, "launch.env.EXTRA=secret one", "--dry-run"]
    for options in ([], ["--json"]):
        line = whet(*words, *options).out.replace('\\"', '"')
        assert 'HF_TOKEN="${HF_TOKEN:?}" SERVICE="${SERVICE:?}" EXTRA="${EXTRA:?}"' in line
        assert """'launch.env.EXTRA="${EXTRA}"'""" in line
        for secret in (TOKEN, PASSWORD, "secret one"):
            assert secret not in line
    assert "secret" not in whet(*words[:2], "launch={processes: 1, env: {A: secret}}", "--dry-run").out
    assert TOKEN not in whet(*words[:2], f"run.tags=[{TOKEN}]", "--dry-run").out
    ended = whet("launch", recipe, "launch.env=[MISSING]", "--dry-run")
    assert ended.code == 1
    assert "launch.env: the environment variable MISSING is not set" in ended.err
    monkeypatch.setenv("MISSING", "here")
    assert 'MISSING="${MISSING:?}"' in whet("launch", recipe, "launch.env=[MISSING]", "--dry-run").out


def test_a_token_on_the_command_line_is_a_warning(whet: Any, recipe: Path, variables: dict[str, str]) -> None:
    ended = whet("train", recipe, f"run.tags=[{TOKEN}]", "--until", "1", "eval.tasks=[]", "eval.at_start=false")
    assert ended.code == 0, ended.err
    assert "warning: run.tags.0: hf_*** looks like a secret" in ended.err
    assert "run.tags.0='${MY_TOKEN}'" in ended.err
    assert TOKEN not in ended.err
    assert TOKEN not in (Path(variables["DATA"]).parent / "run" / "report.html").read_text()


@pytest.mark.usefixtures("variables")
def test_an_invalid_value_is_named(whet: Any, recipe: Path) -> None:
    ended = whet("train", recipe, "train.steps=${LR}")
    assert ended.code == 1
    assert "train.steps: '${LR}' is not valid" in ended.err
    assert "0.003" not in ended.err


def test_a_relative_path_is_valid_from_everywhere(
    recipe: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "data")
    config = read_config(recipe)
    dumped = config.dump()
    assert f'"{tmp_path}/${{DATA}}/d.jsonl"' in dumped
    monkeypatch.chdir("/")
    (tmp_path / "again.yaml").write_text(dumped)
    found = read_config(tmp_path / "again.yaml")
    assert found.data.sources[0].path == f"{variables['DATA']}/d.jsonl"
    assert found.eval.tasks[0].path == f"{variables['DATA']}/t.jsonl"


def test_a_start_killed_before_config_yaml_starts_again(whet: Any, recipe: Path, variables: dict[str, str]) -> None:
    folder = Path(variables["DATA"]).parent / "run"
    folder.mkdir()
    VariableHashes(folder).write({"other": 1})
    assert whet("train", recipe, "--until", "1", "eval.tasks=[]", "eval.at_start=false").code == 0
    (folder / "variables.json").unlink()
    ended = whet("train", recipe, "--resume")
    assert ended.code == 1
    assert "variables.json: the hash of model.path is gone" in ended.err
    (folder / "variables.json").write_text('{"salt": "00", "hashes": {}, "hash": "1"}')
    ended = whet("train", recipe, "--resume")
    assert (ended.code, "variables.json" in ended.err) == (1, True)


def test_a_template_is_written_as_it_stands() -> None:
    text = 'a: "x ${HOME} $${Y}"\nb: ${HOME}\n'
    node = parse_yaml(text, "x", expand="none").plain()
    node["b"].is_text = False
    assert dump_yaml(node) == text
