"""generation_config.json gives the stop tokens: a missing one is none, a damaged or unreadable one is an error."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_generation_settings, stop_ids


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text("{}")
    return ModelConfig(path=str(tmp_path))


def test_without_the_file_there_are_no_settings(model: ModelConfig) -> None:
    assert stop_ids(model) == []
    assert load_generation_settings(model) == {}


def test_a_damaged_file_is_an_error_and_not_a_model_without_stop_tokens(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "generation_config.json").write_bytes(b'{"eos_token_id": 2\x00')
    for read in (stop_ids, load_generation_settings):
        with pytest.raises(WhetError, match=r"generation settings of .* cannot be loaded"):
            read(model)


def test_settings_that_contradict_each_other_are_an_error(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "generation_config.json").write_text('{"num_return_sequences": 3}')
    with pytest.raises(WhetError, match=r"generation settings of .* cannot be loaded: Greedy .*num_return_sequences"):
        stop_ids(model)


def test_too_many_open_files_is_an_error_with_its_remedy(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert stop_ids(model) == [2]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(WhetError, match="ulimit -n"):
            stop_ids(model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
