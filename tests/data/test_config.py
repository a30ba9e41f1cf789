"""The data section of the configuration: options that exclude each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.core.config import load_config
from whet.core.errors import WhetError
from whet.data.config import DataConfig, common_records


def load(*overrides: str) -> DataConfig:
    return load_config(DataConfig, None, ["sources=[{path: a.jsonl}]", *overrides])


def test_a_training_source_cannot_be_a_validation_source() -> None:
    message = r"validation\.sources\.1: a\.jsonl is a training source too, and both read all records.*\.fraction"
    with pytest.raises(WhetError, match=message):
        load("validation={sources: [{path: b.jsonl}, {path: a.jsonl}]}")
    with pytest.raises(WhetError, match=r"a\.bin is a training source too"):  # token files may be named without .bin
        load("sources=[{path: a}]", "validation={sources: [{path: a.bin}]}")


@pytest.mark.parametrize(
    ("train", "held", "overlap"),
    [
        ("stop: 90", "start: 90", None),
        ("stop: 90", "start: 90, stop: 100", None),
        ("start: 100", "max_samples: 100", None),
        ("step: 2", "start: 1, step: 2", None),
        ("start: 6, step: 9", "start: 1, step: 6", None),
        ("stop: 90", "start: 89", "record 89"),
        ("stop: 90", "start: 80", "records 80 to 89"),
        ("start: 7", "step: 1", "all records from 7 on"),
        ("max_samples: 10, step: 3", "start: 1, step: 2", "records 3, 9, 15, …"),
        ("max_samples: 4, step: 3", "start: 1, step: 2", "records 3, 9 (counted"),
        (f"start: {2**62}, step: {2**62}, max_samples: 9", f"stop: {2**62}", None),
    ],
)
def test_slices_of_one_file_may_not_share_a_record(train: str, held: str, overlap: str | None) -> None:
    settings = (f"sources=[{{path: a.jsonl, {train}}}]", f"validation={{sources: [{{path: ./a.jsonl, {held}}}]}}")
    if overlap is None:
        assert load(*settings).validation
    else:
        with pytest.raises(WhetError) as caught:
            load(*settings)
        assert f"both read {overlap}" in str(caught.value)


RANGES = st.builds(range, st.integers(0, 12), st.integers(0, 60), st.integers(1, 9))


@given(RANGES, RANGES)
def test_common_records_are_the_intersection(one: range, other: range) -> None:
    assert [*common_records(one, other)] == sorted({*one} & {*other})


def test_slices_of_a_builtin_dataset_begin_after_its_default_number() -> None:
    train, held = "sources=[{path: 'builtin:orders'}]", "validation={sources: [{path: 'builtin:orders', start: %d}]}"
    assert load_config(DataConfig, None, [train, held % 1000]).validation
    with pytest.raises(WhetError, match="both read record 999 "):
        load_config(DataConfig, None, [train, held % 999])


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
