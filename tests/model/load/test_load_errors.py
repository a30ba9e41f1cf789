"""Errors of models that cannot be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.core.errors import WhetError
from whet.core.run_folder import not_a_run
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.placeholder import build_meta_model
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer, stop_ids
from whet.model.load.weight_files import locate_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model"))


def test_a_model_folder_loads(folder: Path) -> None:
    config = ModelConfig(path=str(folder))
    assert len(load_tokenizer(config)) == load_model(config, "auto").config.vocab_size
    assert stop_ids(config) == [load_tokenizer(config).eos_token_id]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_that_is_not_installed_does_not_matter(key: str, folder: Path) -> None:
    """Models are published with FlashAttention in config.json; whet attends by itself."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {key: "flash_attention_2"}))
    config = ModelConfig(path=str(folder))
    assert load_model(config, "auto").config._attn_implementation == "sdpa"
    build_meta_model(config, torch.float32)


def test_a_folder_without_a_config_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"model\.path: .*no config\.json"):
        locate_model(str(tmp_path))


def test_a_folder_without_a_tokenizer_names_the_files_to_copy(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(WhetError, match=r"model\.path: .*no tokenizer.*Copy"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(WhetError, match="this is a file; give the folder"):
        locate_model(str(file))


def test_a_recipe_is_not_a_model_and_the_runs_here_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tea").mkdir(parents=True)
    for file in ("tea.yaml", "runs/tea/config.yaml"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(WhetError, match=r"tea\.yaml: this is a file.* of a run\. Runs here: runs/tea$"):
        locate_model("tea.yaml")
    for path, what in (("tea.yaml", "it is a file"), ("runs", "it has no config.yaml")):
        with pytest.raises(WhetError, match=rf"^{path}: not a run: {what}\. .* of a run\. Runs here: runs/tea$"):
            raise not_a_run(Path(path))


@pytest.mark.parametrize("path", ["/no/such/model", "./nothing/here", "nonsense", "a/b/c"])
def test_a_missing_path_names_the_searched_folder(path: str) -> None:
    with pytest.raises(WhetError, match=f"{path}: no such folder .looked in .*OWNER/NAME"):
        locate_model(path)


def test_owner_and_name_is_a_hub_id_and_an_unreachable_one_is_an_error() -> None:
    assert locate_model("nobody/no-such-model") == "nobody/no-such-model"
    for load in (load_tokenizer, lambda config: load_model(config, "auto")):
        with pytest.raises(WhetError, match="nobody/no-such-model cannot be loaded"):
            load(ModelConfig(path="nobody/no-such-model"))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_an_error(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(WhetError, match=r"model\.path"):
        load_model(ModelConfig(path=str(folder)), "auto")


def test_a_broken_config_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("{broken")
    with pytest.raises(WhetError, match="cannot be loaded"):
        load_model(ModelConfig(path=str(folder)), "auto")


def test_a_model_without_generation_settings_has_no_stop_ids(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert stop_ids(ModelConfig(path=str(folder))) == []


def test_a_mixture_of_experts_computes_in_fp64(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    settings = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    make_model("Qwen3Moe", **settings).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), torch.float64)
    with torch.no_grad():
        assert model(input_ids=torch.arange(5)[None]).logits.dtype == torch.float64
