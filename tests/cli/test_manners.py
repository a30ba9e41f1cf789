"""Small things that a person meets in the first hour."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tiny_architectures import save_tiny_model
from whet.config import read_config
from whet.core import console
from whet.core.errors import WhetError
from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.weight_files import locate_model
from whet.run.data import prepare_data
from whet.run.models.load_models import load_inference_model

RECIPE = (
    "model: {path: builtin:tiny}\ndata: {sources: [{path: my.jsonl}], validation: {sources: [{path: held.jsonl}]}}\n"
)


def test_paths_in_a_recipe_are_relative_to_it_and_those_of_the_command_line_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for file in ("sub/my.jsonl", "my.jsonl", "held.jsonl", "other.jsonl"):
        Path(file).write_text("")
    Path("sub/a.yaml").write_text(RECIPE)
    Path("b.yaml").write_text("extends: sub/a.yaml\ndata: {sources: [{path: other.jsonl}]}\n")
    config = read_config(Path("sub/a.yaml"))
    assert config.data.validation is not None
    assert [each.path for each in (*config.data.sources, *(config.data.validation.sources or []))] == [
        "sub/my.jsonl", "held.jsonl",  # the second is not beside the recipe: it is found from here, as before
    ]  # fmt: skip
    assert read_config(Path("sub/a.yaml"), ["data.sources=[{path: my.jsonl}]"]).data.sources[0].path == "my.jsonl"
    assert read_config(Path("b.yaml")).data.sources[0].path == "other.jsonl"
    Path("sub/t.yaml").write_text(RECIPE + "eval: {tasks: [orders, my.jsonl:number, {path: my.jsonl, name: b}]}\n")
    Path("sub/orders").mkdir()  # a built-in task keeps its name
    assert [task.path for task in read_config(Path("sub/t.yaml")).eval.tasks] == ["orders", *["sub/my.jsonl"] * 2]


def test_a_mistyped_run_is_not_looked_up_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "other"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").write_text("")
    with pytest.raises(WhetError, match=r"no such folder .* Did you mean runs/demo\?"):
        locate_model("runs/dem0")
    with pytest.raises(WhetError, match="Runs here: runs/other, runs/demo"):
        locate_model("my-model")
    assert locate_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_settings_are_found_by_any_part_of_their_key_or_meaning(whet: Any) -> None:
    assert "train.optimizer.lr" in whet("config", "lr").out
    assert "train.clip_norm" in whet("config", "gradient norm").out
    assert "no setting has 'xyzzy'" in whet("config", "xyzzy").err


def test_kinds_and_dtypes_of_exports_are_read_in_any_case(whet: Any) -> None:
    missing = whet("export", "runs/none", "--to", "GGUF")
    assert (missing.code, "no such folder" in missing.err) == (1, True)
    wrong = run_whet("export", "runs/none", "--to", "pickle", "--json")
    assert "Invalid value for '--to': 'pickle' is not one of 'merged'" in wrong


def test_a_setting_given_as_an_option_is_named() -> None:
    for option, named in (
        ("--lr=1", "train.optimizer.lr=…"),
        ("--learning-rate", "such as train.steps=100; `whet config`"),
    ):
        assert f". Settings are given as KEY=VALUE: {named}" in run_whet("train", "x.yaml", option, "--json")
    assert "Settings are" not in run_whet("report", "--lr=1", "--json")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.sources=[a.jsonl]", "data.sources.0: 'a.jsonl' is not valid: expected {path: a.jsonl}."),
        ("data.sources=a.jsonl", "data.sources: 'a.jsonl' is not valid: expected [{path: a.jsonl}]."),
        ("data.sources=[3]", "data.sources.0: 3 is not valid: expected list of sections with path, format,"),
        ("data.validation={sources: [a, b]}", "data.validation.sources.1: 'b' is not valid: expected {path: b}."),
    ],
)
def test_a_file_in_place_of_a_source_is_shown_as_one(recipe: str, override: str, expected: str) -> None:
    with pytest.raises(WhetError) as error:
        read_config(Path(recipe), [override])
    assert expected in str(error.value)


def run_whet(*arguments: str) -> str:
    """What a process of its own writes to stdout: usage errors are shown by `main`, which the fixture `whet` skips."""
    command = [sys.executable, "-m", "whet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_a_system_message_for_conversations_without_one(tmp_path: Path, whet: Any) -> None:
    """In training, and in a chat with the run; a conversation that has one keeps it. `check` shows the template's."""
    own = '{"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}, '
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "completion": "Yo"}\n' * 3)
    (tmp_path / "b.jsonl").write_text(own + '{"role": "assistant", "content": "Yo"}]}\n')
    recipe = tmp_path / "a.yaml"
    recipe.write_text(
        "model: {path: builtin:tiny}\nexport: {at_end: none}\ntrain: {steps: 1}\n"
        "data: {system: Be brief., sources: [{path: a.jsonl}, {path: b.jsonl}, {path: a.jsonl, system: Mine.}]}\n"
        f"run: {{dir: {tmp_path / 'run'}}}\n"
    )
    data = prepare_data(read_config(recipe))
    shown = [data.tokenizer.decode(data.train.store.ids(number)) for number in range(7)]
    assert [next(each for each in ("Be brief.", "Own.", "Mine.") if each in text) for text in shown] == [
        *["Be brief."] * 3, "Own.", *["Mine."] * 3,
    ]  # fmt: skip
    assert whet("train", str(recipe)).code == 0
    model = load_inference_model(str(tmp_path / "run"))
    assert "Be brief." in model.renderer.prompt_text([Message("user", "Hi")])
    assert "Be brief." not in model.renderer.prompt_text([Message("system", "No."), Message("user", "Hi")])


def test_the_system_message_that_a_template_writes_is_known() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(builtin_folder("builtin:tiny")))
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    assert Renderer(tokenizer, "assistant", template=plain).default_system() == ""
    assert Renderer(tokenizer, "assistant", template=default + plain).default_system() == "Be kind."


def test_help_names_no_type_that_is_obvious(whet: Any) -> None:
    for verb in ("train", "chat", "export", "runs"):
        shown = whet(verb, "--help").out
        assert "--json" in shown or verb == "runs"
        assert "<bool>" not in shown
        assert "<list" not in shown


def test_completion_can_be_installed(whet: Any) -> None:
    assert "--install-completion" in whet("--help").out


def test_a_line_says_which_model_is_being_loaded(tiny_run: Path, whet: Any, tmp_path: Path) -> None:
    assert f"loading {tiny_run} (step 12)" in whet("chat", str(tiny_run), "--prompt", "Hi").err
    folder = save_tiny_model("llama", tmp_path / "model").removeprefix("model.path=")
    assert f"loading {folder}" in whet("eval", folder, "--tasks", "orders", "eval.examples=1").err


def test_a_terminal_shows_a_command_that_has_begun_until_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports take seconds; what is shown meanwhile is gone when something is printed."""
    shown = io.StringIO()
    monkeypatch.setattr(console, "_console", console.SafeConsole(file=shown, force_terminal=True, width=80))
    monkeypatch.setattr(console, "_quiet", False)
    monkeypatch.setenv("TERM", "xterm")
    console.show_start()
    assert console._start is not None
    time.sleep(0.3)  # it is drawn by a thread
    console.info("a line")
    assert console._start is None
    assert "starting" in shown.getvalue()
    assert shown.getvalue().endswith("a line\n")
    with console.loading("a model") as track:
        assert list(track(["weight", "bias"])) == ["weight", "bias"]
    assert "loading a model" in shown.getvalue()
    assert "2/2" in shown.getvalue()


def test_check_shows_the_system_message_that_the_template_writes(tmp_path: Path, whet: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "completion": "Yo"}\n' * 3)
    (tmp_path / "kind.jinja").write_text(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "a.yaml").write_text(
        "model: {path: builtin:tiny}\ntrain: {steps: 1}\ndata: {template: kind.jinja, sources: [{path: a.jsonl}]}\n"
    )
    shown = " ".join(whet("check", tmp_path / "a.yaml", f"run.dir={tmp_path / 'run'}").err.split())
    assert "the template writes 'Be kind.'. To change it: data.system" in shown


def test_a_gguf_export_ends_with_the_lines_for_ollama_and_lm_studio(tiny_run: Path, whet: Any, tmp_path: Path) -> None:
    out = tmp_path / "gguf"
    ended = whet("export", tiny_run, "--to", "gguf", "--dtype", "q8_0", "--out", out)
    assert ended.code == 0, ended.err
    assert "same next token: as expected of q8_0" in ended.err
    last = ended.err.strip().splitlines()[-3:]
    assert last[0].startswith("llama.cpp:  llama-server -m "), last
    assert any(line.startswith("Ollama:     ollama create ") and str(out / "Modelfile") in line for line in last), last
    assert any(line.startswith("LM Studio:  lms import ") for line in last), last


def test_a_fresh_demo_moves_the_old_one_aside(
    tiny_run: Path, whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's recipe is a tiny one here: the real one takes minutes."""
    (tmp_path / "recipes").mkdir()
    recipe = (Path(__file__).parents[1] / "fixtures" / "tiny.yaml").read_text().replace("steps: 12", "steps: 1")
    (tmp_path / "recipes/demo.yaml").write_text(recipe.replace("eval:\n", "eval:\n  tasks: [orders]\n  examples: 1\n"))
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    shutil.copytree(tiny_run, tmp_path / "demo")
    ended = whet("demo", "--fresh", "--dir", tmp_path / "demo")
    assert ended.code == 0, ended.err
    assert f"now in {tmp_path / 'demo.1'}" in ended.err
    assert "nothing to resume" not in ended.err
    assert (tmp_path / "demo.1/metrics.jsonl").read_bytes() == (tiny_run / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (">/dev/full", 1, "error: the result cannot be written to stdout: No space left on device"),
        ("| true", 0, ""),  # the shell gives the code of `true`
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
    ],
)
def test_streams_that_cannot_be_written(real_python: str, ending: str, code: int, said: str) -> None:
    """Files that are opened later do not take the place of a closed stream, and nothing ends in a traceback."""
    command = f"{real_python} -m whet config train.steps --json {ending}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(said) if said else not done.stderr


def test_idle_threads_wait_instead_of_spinning(real_python: str) -> None:
    """Set before torch is imported, unless the user did; a spinning thread takes the core from one that computes."""
    code = "import whet, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    for given, expected in (({}, "passive False"), ({"OMP_WAIT_POLICY": "active"}, "active False")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        done = subprocess.run([real_python, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
