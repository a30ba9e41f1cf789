"""`whet check`: clean data passes, whatever its form; the command itself. Planted faults are in test_check_*.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.core import console

FORMS: dict[str, Any] = {
    "messages": lambda i: {
        "messages": [{"role": "user", "content": f"Is {i} odd?"}, {"role": "assistant", "content": f"{i} may be."}]
    },
    "sharegpt": lambda i: {
        "conversations": [{"from": "human", "value": f"Say {i}"}, {"from": "gpt", "value": f"It is {i}."}]
    },
    "alpaca": lambda i: {"instruction": f"Double {i}", "input": "", "output": str(2 * i)},
    "prompt-completion": lambda i: {"prompt": f"Half of {i}?", "completion": str(i / 2)},
    "gsm8k": lambda i: {"question": f"{i} and {i}?", "answer": f"They are <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"},
    "text": lambda i: {"text": f"The number {i} comes before {i + 1}."},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_clean_data_passes(check: Any, tmp_path: Path, form: str) -> None:
    lines = [json.dumps(FORMS[form](i)) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    found = check("data.validation={fraction: 0.1}")
    found.passed()
    checks = [each["check"] for each in found.checks]
    assert checks == [
        "kept", "end of turn", "overlap", "store", "ids", "template", "steps", "vocabulary", "leak", "time",
        "positions",
    ]  # fmt: skip
    assert "40 of 40 conversations kept" in found.texts("kept", "ok")
    assert "supervised in 100.0%" in found.texts("end of turn", "ok")
    assert "40 conversations, rendered again" in found.texts("ids", "ok")
    assert " s of training on this CPU, for " in found.texts("time", "ok")


def test_token_files_pass(check: Any, write: Any, whet: Any, tmp_path: Path) -> None:
    write()
    check(f"data.store={tmp_path / 'store'}").passed()
    found = check(f"data.sources=[{{path: {tmp_path / 'store/train/tokens.bin'}}}]")
    assert "are token ids" in found.texts("ids", "ok")
    assert found.texts("store", "ok")


@pytest.mark.parametrize(
    "settings", [[], ["adapter.rank=4"], ["train.precision=bf16"], ["data.train_on=last"]], ids=str
)
def test_the_recipe_passes(whet: Any, recipe: str, settings: list[str]) -> None:
    ended = whet("check", recipe, *settings, "--json")
    result = json.loads(ended.out)
    assert (result["verdict"], result["faults"], result["warnings"], ended.code) == ("pass", 0, 0, 0)


def test_long_conversations_that_are_split_pass(check: Any, write: Any, talk: Any) -> None:
    write(*({"messages": [m for j in range(8) for m in talk(100 * i + j + 100)["messages"]]} for i in range(3)))
    found = check("data.too_long=split", "data.max_length=64")
    found.passed()
    assert "43 of 43 conversations kept" in found.texts("kept", "ok")
    assert "40 conversations, rendered again" in found.texts("ids", "ok")


def test_what_passes_is_one_line_unless_it_tells_something(whet: Any, recipe: str) -> None:
    lines = whet("check", recipe).err.splitlines()
    told = [line for line in lines if line.startswith("✓ ") and not line.startswith("✓ passed: ")]
    assert {line.split(":")[0] for line in told} == {"✓ kept", "✓ steps", "✓ time"}
    assert lines[-2].startswith("✓ passed: end of turn, overlap, store, ids, template, ")
    assert lines[-1] == "→ ready to train: 0 faults, 0 warnings, 15 checks"


def test_each_finding_is_one_line(whet: Any, recipe: str) -> None:
    ended = whet("check", recipe, "--all")
    assert ended.out == ""
    lines = [line for line in ended.err.splitlines() if not line.startswith(("preparing", "loading"))]
    assert len(lines) == 16
    assert all(line.startswith("✓ ") for line in lines[:-1])
    assert lines[-1] == "→ ready to train: 0 faults, 0 warnings, 15 checks"


def test_further_lines_are_indented_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = console.SafeConsole(force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(console, "_console", terminal)
    with terminal.capture() as shown:
        console.info_item("✗", "kept", "a [sentence] that is longer than the terminal is wide", "bold red")
    assert [line.rstrip() for line in shown.get().splitlines()] == [
        "✗ kept: a [sentence] that is longer than",
        "  the terminal is wide",
    ]


def test_quiet_prints_nothing_without_faults(
    whet: Any, recipe: str, check: Any, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_quiet", False)
    ended = whet("check", recipe, "--quiet")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    write("{")
    ended = whet("check", tmp_path / "recipe.yaml", "--quiet")
    first, last = ended.err.splitlines()
    assert ended.code == 1
    assert first.startswith(f"✗ bad lines: {tmp_path / 'data.jsonl'}:1: not valid JSON")
    assert last == "→ not ready to train: 1 fault, 1 warning, 13 checks"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no.yaml"], "no.yaml: no such file"),
        (["RECIPE", "train.stepz=3"], "Did you mean train.steps?"),
        (["RECIPE", "data.max_length=none"], "data.max_length"),
        (["RECIPE", "train.row_length=100"], "shorter than data.max_length"),
    ],
    ids=["no recipe", "misspelt key", "no number", "contradiction"],
)
def test_a_wrong_recipe_is_an_error(whet: Any, recipe: str, arguments: list[str], words: str) -> None:
    ended = whet("check", *(recipe if argument == "RECIPE" else argument for argument in arguments), "--json")
    result = json.loads(ended.out)
    assert (ended.code, sorted(result)) == (1, ["error", "exit_code"])
    assert words in result["error"]
    assert "Traceback" not in ended.err


def test_a_source_that_does_not_exist(check: Any, tmp_path: Path) -> None:
    found = check()
    found.fault("data", f"{tmp_path / 'data.jsonl'}: no such file")
    found.texts("leak", "ok")  # the model is checked anyway


def test_bad_lines_leave_no_store_that_training_would_refuse(check: Any, write: Any, tmp_path: Path) -> None:
    write("{")
    setting = f"data.store={tmp_path / 'store'}"
    check(setting).fault("bad lines")
    assert not (tmp_path / "store/train").exists()
    write()
    check(setting).passed()
    assert (tmp_path / "store/train/manifest.json").exists()


def test_moved_data_is_compared_with_its_store(check: Any, write: Any, tmp_path: Path) -> None:
    """A store is found by content; its source must be found under the new name."""
    write()
    check().passed()
    (tmp_path / "data.jsonl").rename(tmp_path / "moved.jsonl")
    found = check(f"data.sources.0.path={tmp_path / 'moved.jsonl'}")
    found.passed()
    assert "40 conversations, rendered again" in found.texts("ids", "ok")


@pytest.mark.parametrize("path", ["folder", "folder/*.jsonl"])
def test_the_files_of_a_folder_are_compared(check: Any, write: Any, tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    file = write("{", name="folder/one.jsonl")
    found = check(f"data.sources.0.path={tmp_path / path}", "data.on_bad=skip")
    found.warning("bad lines", f"first {file}:1")
    assert "40 conversations, rendered again" in found.texts("ids", "ok")
    write(name="folder/two.jsonl", good=range(50, 60))
    found = check(f"data.sources.0.path={tmp_path / path}", "data.on_bad=skip")
    assert "50 conversations, rendered again" in found.texts("ids", "ok")


@pytest.mark.parametrize("where", ["prepare_data", "check_model"])
def test_ctrl_c(whet: Any, recipe: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"whet.preflight.run_checks.{where}", interrupt)
    ended = whet("check", recipe, "--json")
    assert ended.code == 130
    assert json.loads(ended.out) == {"error": "interrupted", "exit_code": 130}
    assert "Traceback" not in ended.err
