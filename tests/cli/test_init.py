"""`whet init`: a recipe for a stranger's file, with reasons, that trains as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from data.template_families import FAMILIES, small_tokenizer
from data.trl_templates import TRL_TEMPLATES
from tiny_architectures import save_tiny_model
from whet.config import read_config
from whet.preflight.recipe_proposal import KNOWN_MODELS, KnownModel, ProposedSetting, propose_recipe, render_recipe

ROWS = "".join(f'Wie heißt Stück {n}?;Es heißt "Stück {n}", bitte.\n' for n in range(60))


@pytest.fixture
def fragen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fragen.csv").write_bytes(("Frage;Antwort\n" + ROWS).encode("utf-8-sig"))
    return tmp_path


def test_a_spreadsheet_becomes_a_model(fragen: Path, whet: Any) -> None:
    written = whet("init", "fragen.csv", "--model", "builtin:tiny", "--json")
    assert written.code == 0, written.err
    assert json.loads(written.out)["settings"]["data.validation"] == {"fraction": 0.1}
    text = Path("fragen.yaml").read_text()
    assert "guessed from the names of the columns" in text
    assert "semicolon-separated, UTF-8 with BOM; 60" in text
    config = read_config(Path("fragen.yaml"))
    assert config.data.sources[0].fields == {"prompt": "Frage", "completion": "Antwort"}
    assert config.adapter is not None
    trained = whet("train", "fragen.yaml", "train.steps=2", "eval.every=null", "export.at_end=none")
    assert trained.code == 0, trained.err
    assert "whet chat runs/fragen" in trained.err
    again = whet("train", "fragen.yaml")
    assert (again.code, "move it aside with --fresh" in again.err) == (1, True)
    fresh = whet("train", "fragen.yaml", "--fresh", "train.steps=1", "eval.every=null", "export.at_end=none")
    assert fresh.code == 0, fresh.err
    assert "now in runs/fragen.1" in fresh.err
    assert Path("runs/fragen.1/metrics.jsonl").exists()
    longer = whet("train", "fragen.yaml", "--resume", "train.steps=3", "eval.every=null", "export.at_end=none")
    assert (longer.code, "model.path=runs/fragen run.dir=runs/fragen-2" in longer.err) == (1, True)


def test_a_data_file_in_place_of_a_recipe(fragen: Path, whet: Any) -> None:
    refused = whet("train", "fragen.csv", "model.path=builtin:tiny")
    assert refused.code == 1
    assert "fields: {prompt: Frage, completion: Antwort}}]" in refused.err
    Path("good.csv").write_text("prompt,completion\n" + ROWS.replace(",", "").replace('"', "").replace(";", ","))
    done = whet(
        "train", "good.csv", "model.path=builtin:tiny", "train.steps=1", "eval.every=null", "export.at_end=none"
    )
    assert done.code == 0, done.err
    assert Path("runs/good/metrics.jsonl").exists()
    assert (
        "this is a data file, not a recipe. Make a recipe for it: whet init good.csv" in whet("check", "good.csv").err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nix.csv"], "nix.csv: no such file"),
        ([], "DATA is missing"),
        (["fragen.csv", "--model", "no-such-model"], "no-such-model: no such folder"),
        (["fragen.csv", "--out", "fragen.csv"], "fragen.csv: it exists. Give another name (--out FILE), or --fresh"),
    ],
)
def test_bad_input(fragen: Path, whet: Any, arguments: list[str], message: str) -> None:
    ended = whet("init", *arguments)
    assert ended.code in (1, 2)
    assert message in ended.err
    assert (fragen / "fragen.csv").read_bytes().startswith(b"\xef\xbb\xbfFrage")


def test_models_are_listed(whet: Any) -> None:
    listed = whet("init", "--list", "--json")
    names = [each["name"] for each in json.loads(listed.out)["models"]]
    assert len(names) == len(set(names)) == len(KNOWN_MODELS)
    assert {"llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "mistral-7b", "phi-4", "gpt-oss-20b"} <= set(names)


def test_the_recipe_is_what_was_proposed() -> None:
    settings = [
        ProposedSetting("model.path", "a b: c", ""),
        ProposedSetting("data.sources", [{"path": "ü.csv", "fields": {"prompt": "Was?"}}], "x " * 80),
        ProposedSetting("train.optimizer", {"lr": 2e-4}, "usual"), ProposedSetting("train.epochs", 3, ""),
    ]  # fmt: skip
    text = render_recipe(settings, "A heading")
    assert yaml.safe_load(text) == {
        "model": {"path": "a b: c"}, "data": {"sources": [{"path": "ü.csv", "fields": {"prompt": "Was?"}}]},
        "train": {"optimizer": {"lr": 2e-4}, "epochs": 3},
    }  # fmt: skip
    assert max(map(len, text.splitlines())) <= 110


def test_more_data_is_seen_less_often(tmp_path: Path) -> None:
    """Every value follows from the data: 6,000 conversations get fewer epochs and a smaller held-out share."""
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt": "a b c", "completion": "d e f"}\n' * 6000)
    many = {each.key: each.value for each in propose_recipe(str(file), "builtin:tiny")}
    assert many["train.epochs"] == 2
    assert many["data.validation"] == {"fraction": 0.05}
    assert many["data.max_length"] == 64


def _trl(name: str) -> Callable[[], PreTrainedTokenizerFast]:
    return next(each for each in TRL_TEMPLATES if each.name == name).tokenizer


def _family(name: str) -> Callable[[], PreTrainedTokenizerFast]:
    found = next(each for each in FAMILIES if each.name == name)
    return lambda: small_tokenizer(found.template, found.markers, found.bos, found.eos)


def _phi4() -> PreTrainedTokenizerFast:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
    )
    return small_tokenizer(template, ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), eos="<|im_end|>")


TEMPLATES = {
    "smollm": _family("chatml"), "llama-3.1": _trl("llama3_1"), "llama-3": _trl("llama3_2"),
    "qwen3-4b": _trl("qwen3_instruct_2507"), "qwen3-30b": _trl("qwen3_instruct_2507"), "qwen3": _trl("qwen3"),
    "gemma-3": _trl("gemma3"), "mistral": _family("mistral"), "phi-4-mini": _trl("phi3"), "phi-4": _phi4,
    "gpt-oss": _trl("gptoss"),
}  # fmt: skip
"""A stand-in tokenizer with the chat template of the models whose name begins so, from trl or as written here."""


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(each, id=each.name, marks=[] if each.name == "gpt-oss-20b" else pytest.mark.slow)
        for each in KNOWN_MODELS
    ],
)
def test_the_recipe_of_each_known_model_passes_a_smoke_test(fragen: Path, whet: Any, known: KnownModel) -> None:
    """On a random model of its architecture, four layers deep, with its chat template."""
    written = whet("init", "fragen.csv", "--model", known.name, "--out", "a.yaml")
    assert written.code == 0, written.err
    assert f"model:\n  path: {known.path}" in Path("a.yaml").read_text()
    tokenizer = next(make for name, make in TEMPLATES.items() if known.name.startswith(name))()
    model = save_tiny_model(known.architecture, fragen / "model", tokenizer=tokenizer, layers=4)
    done = whet("train", "a.yaml", "--smoke", model, "data.max_length=1024")
    assert done.code == 0, done.err
    assert "smoke test passed" in done.err
