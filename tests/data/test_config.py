"""The data section of the configuration: options that exclude each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.core.config import load_config
from whet.core.errors import WhetError
from whet.data.config import DataConfig


def load(*overrides: str) -> DataConfig:
    return load_config(DataConfig, None, ["sources=[{path: a.jsonl}]", *overrides])


def test_a_training_source_cannot_be_a_validation_source() -> None:
    with pytest.raises(WhetError, match=r"validation: a\.jsonl is a training source too.*validation\.fraction"):
        load("validation={sources: [{path: b.jsonl}, {path: a.jsonl}]}")


def test_another_split_of_a_builtin_dataset_can() -> None:
    config = load_config(
        DataConfig,
        None,
        ["sources=[{path: 'builtin:orders'}]", "validation={sources: [{path: 'builtin:orders', split: held-out}]}"],
    )
    assert config.validation is not None
    with pytest.raises(WhetError, match="training source too"):
        load_config(
            DataConfig,
            None,
            ["sources=[{path: 'builtin:orders'}]", "validation={sources: [{path: 'builtin:orders'}]}"],
        )


def test_validation_is_a_fraction_or_sources() -> None:
    with pytest.raises(WhetError, match="sources and fraction are alternatives"):
        load("validation={sources: [{path: b.jsonl}], fraction: 0.1}")


@pytest.mark.parametrize("bad", ["sources=[]", "max_length=1", "validation.fraction=0", "validation.fraction=1.0"])
def test_limits_are_checked(bad: str) -> None:
    with pytest.raises(WhetError, match="is not valid"):
        load(bad)


def test_a_config_file_is_read(tmp_path: Path) -> None:
    recipe = tmp_path / "data.yaml"
    recipe.write_text("sources:\n  - path: a.jsonl\n    max_samples: 3\ntoo_long: truncate\n")
    config = load_config(DataConfig, recipe)
    assert (config.sources[0].path, config.sources[0].max_samples, config.too_long) == ("a.jsonl", 3, "truncate")
