"""Faults that were met once: each had a run that looked healthy or an error that explained nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.config import read_config
from whet.core.errors import WhetError
from whet.core.yaml import dump_yaml, parse_yaml, read_yaml

SMALL = "model: {path: builtin:tiny}\ndata:\n  sources: [{path: a.jsonl}]\n  validation: {sources: [{path: b.jsonl}]}\n"


def test_an_index_reaches_into_a_list_that_is_one_of_alternatives(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    config = read_config(path, ["data.validation.sources.0.max_samples=5"])
    assert config.data.validation.sources[0].path == "b.jsonl"


def test_an_empty_mapping_is_not_a_list(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError, match=r"data\.sources: {} is not valid"):
        read_config(path, ["data.sources={}"])


def test_a_digit_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError):
        read_config(path, ["data.sources.².path=x"])


@pytest.mark.parametrize(
    "text",
    ["a: &x [*x]", "a: &x {b: *x}", "a: " + "1" * 5000, 'a: "\\UFFFFFFFF"'],
    ids=["list", "mapping", "digits", "escape"],
)
def test_hostile_yaml_is_a_whet_error(text: str) -> None:
    with pytest.raises(WhetError, match=r"^f\.yaml"):
        parse_yaml(text, "f.yaml")


def test_a_path_below_a_file_or_too_long_is_a_whet_error(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").touch()
    for path in (tmp_path / "f.yaml" / "g.yaml", tmp_path / ("x" * 300)):
        with pytest.raises(WhetError):
            read_yaml(path)


@pytest.mark.parametrize("text", ["\x85", "a\x85b"])
def test_unusual_line_separators_survive_the_round_trip(text: str) -> None:
    assert parse_yaml(dump_yaml({"a": text}), "x").plain() == {"a": text}


def test_keys_survive_the_round_trip() -> None:
    assert parse_yaml(dump_yaml({"${a}": 1}), "x").plain() == {"${a}": 1}


@pytest.mark.parametrize("key", ["train.epochs", "train.optimizer.lr", "train.clip_norm"])
def test_infinity_is_not_a_valid_value(tmp_path: Path, key: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError, match=key):
        read_config(path, [f"{key}=.inf"])


def test_an_error_between_sections_is_reported_at_the_key_that_was_set(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL + "train:\n  steps: 3\n")
    with pytest.raises(WhetError, match=r"^command line, train\.row_length=3: "):
        read_config(path, ["train.row_length=3"])
