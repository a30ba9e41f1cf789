"""Models, tokenizers and adapters of strangers: no file runs code, leaves its folder or ends in a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from whet.convert.foreign_checkpoint import load_pt
from whet.convert.nanochat import NanochatCheckpoint
from whet.convert.neox_files import NeoXFiles
from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.placeholder import build_meta_model, load_placeholder_model
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_generation_settings, load_tokenizer
from whet.model.lora.adapter_folder import attach_adapters

PYTHON = "import os, pathlib; pathlib.Path(os.environ['FORGED']).touch()\n"


class Code:
    """Unpickling it writes the file in the environment variable FORGED."""

    def __reduce__(self) -> Any:
        return os.system, ('touch "$FORGED"',)


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FORGED", str(tmp_path / "code-ran"))
    yield
    assert not (tmp_path / "code-ran").exists(), "code of a file ran"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model"))


def load_as_saved(config: ModelConfig) -> Any:
    return load_model(config, "auto")


def load_sharded(config: ModelConfig) -> Any:
    return load_placeholder_model(config, torch.float32)


LOADERS = [load_as_saved, load_sharded]


@pytest.mark.parametrize("load", LOADERS)
def test_code_in_a_bin_file_is_refused_by_name(folder: Path, load: Callable[[ModelConfig], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "model.norm.weight": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(WhetError, match=r"the model of .* contains more than weights: it refers to (posix|os)\.system"):
        load(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("outside", ["../secret.safetensors", "{absolute}", "a/../../secret.safetensors"])
def test_an_index_may_not_name_files_outside(
    folder: Path, load: Callable[[ModelConfig], Any], kind: str, outside: str
) -> None:
    secret = folder.parent / "secret.safetensors"
    shutil.move(folder / "model.safetensors", secret)
    name = outside.format(absolute=secret)
    weights = dict.fromkeys(load_file(secret), name)
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    with pytest.raises(WhetError, match=r"index\.json: it names the file .* outside of the folder"):
        load(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 7}', '{"weight_map": {"a": 3}}', "\0"])
@pytest.mark.parametrize("load", LOADERS)
def test_a_broken_index_is_an_error(folder: Path, load: Callable[[ModelConfig], Any], content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WhetError, match=r"model\.path|index\.json"):
        load(ModelConfig(path=str(folder)))


def remote_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "forged", "architectures": ["Forged"]}
    config["auto_map"] = {"AutoConfig": "code.Forged", "AutoModelForCausalLM": "code.Forged"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(PYTHON)


@pytest.mark.parametrize("load", [*LOADERS, lambda config: build_meta_model(config, torch.float32)])
def test_code_of_a_model_does_not_run_and_nothing_is_asked(
    folder: Path, load: Callable[[ModelConfig], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    remote_model(folder)
    with pytest.raises(WhetError, match=r"comes with Python code.*model\.trust_remote_code=true"):
        load(ModelConfig(path=str(folder)))


def test_code_of_a_tokenizer_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Forged", "auto_map": {"AutoTokenizer": ["code.Forged", "code.Forged"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(PYTHON)
    with contextlib.suppress(WhetError):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_code_in_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"})
    )
    torch.save({"a": Code()}, adapter / "adapter_model.bin")
    with pytest.raises(WhetError, match=r"adapter_model\.bin contains more than weights"):
        attach_adapters(load_model(ModelConfig(path=str(folder)), "auto"), str(folder), {"one": adapter})


def test_an_adapter_may_not_name_a_module_to_import(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    settings |= {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    torch.save({}, adapter / "adapter_model.bin")
    with pytest.raises(WhetError, match="does not fit"):
        attach_adapters(load_model(ModelConfig(path=str(folder)), "auto"), str(folder), {"one": adapter})


def test_a_link_in_latest_stays_inside(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("../elsewhere", str(tmp_path / "elsewhere"), "", "..", "a\0b", "no-such"):
        (tmp_path / "in" / "latest").write_text(name)
        with pytest.raises(WhetError, match=r"latest: it names .* not a folder here"):
            NeoXFiles(tmp_path / "in")


def test_code_in_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    torch.save({"transformer.wte.weight": Code()}, tmp_path / "model_000001.pt")
    with pytest.raises(WhetError, match=r"model_000001\.pt: contains more than weights"):
        NanochatCheckpoint(tmp_path)
    torch.save({"transformer.wte.weight": "text"}, tmp_path / "model_000001.pt")
    with pytest.raises(WhetError, match="is not a tensor"):
        NanochatCheckpoint(tmp_path)


def flip(file: Path, dice: random.Random, times: int = 1) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(times):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_pt_file_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    file, dice = tmp_path / "model.pt", random.Random(seed)
    torch.save({"a": torch.arange(9), "nested": {"b": [1, "two", torch.ones(2, dtype=torch.bfloat16)]}}, file)
    whole = file.read_bytes()
    for _ in range(25):
        file.write_bytes(whole)
        flip(file, dice, times=dice.choice((1, 3)))
        with contextlib.suppress(WhetError):
            load_pt(file)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_damaged_json_file_of_a_model_is_read_or_refused(folder: Path, name: str) -> None:
    file, dice = folder / name, random.Random(name)
    whole, config = file.read_bytes(), ModelConfig(path=str(folder))
    load = {
        "config.json": lambda c: build_meta_model(c, torch.float32),
        "generation_config.json": load_generation_settings,
    }
    for _ in range(12):
        file.write_bytes(whole)
        flip(file, dice)
        with contextlib.suppress(WhetError):
            load.get(name, load_tokenizer)(config)
