"""Determined's searcher and searched hyperparameters become the section `search` and ranges in the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config import Config
from whet.convert.configs.draft import Draft
from whet.convert.configs.importer import KINDS, fill, import_config
from whet.core.config import read_tree
from whet.core.errors import WhetError
from whet.core.yaml import dump_yaml, parse_yaml
from whet.search.space import read_space

ENTRY = "python3 run_clm.py --model_name_or_path m --train_file a.txt --validation_file b.txt"
ASHA = {"name": "adaptive_asha", "metric": "eval_loss", "max_trials": 8, "max_length": {"batches": 40}}


def imported(
    arguments: dict[str, Any], searcher: dict[str, Any] | None = None, *, entry: str = ENTRY, **hyperparameters: Any
) -> Draft:
    tree = {
        "entrypoint": entry,
        "searcher": ASHA if searcher is None else searcher,
        "hyperparameters": {**hyperparameters, "training_arguments": arguments},
    }
    return fill(KINDS["determined"], parse_yaml(dump_yaml(tree), "given.yaml", expand="none"))


def value(draft: Draft, key: str) -> Any:
    return draft.settings[key].plain() if key in draft.settings else None


def texts(draft: Draft, category: str) -> str:
    return "\n".join(note.text for note in draft.notes if note.category == category)


LOG = {"type": "log", "base": 10, "minval": -5, "maxval": -3}


@pytest.mark.parametrize(
    ("argument", "given", "to", "wanted"),
    [
        ("learning_rate", LOG, "train.optimizer.lr", {"search": "log", "low": 1e-5, "high": 1e-3}),
        ("learning_rate", {"type": "log", "minval": -4, "maxval": -2, "count": 5}, "train.optimizer.lr",
         {"search": "log", "low": 1e-4, "high": 1e-2, "count": 5}),
        ("learning_rate", {**LOG, "base": 2, "minval": -8, "maxval": -4}, "train.optimizer.lr",
         {"search": "log", "low": 2**-8, "high": 2**-4}),
        ("weight_decay", {"type": "double", "minval": 0, "maxval": 0.1}, "train.optimizer.weight_decay",
         {"search": "float", "low": 0.0, "high": 0.1}),
        ("warmup_steps", {"type": "int", "minval": 0, "maxval": 10}, "train.schedule.warmup",
         {"search": "int", "low": 0, "high": 9}),
        ("lr_scheduler_type", {"type": "categorical", "vals": ["linear", "cosine"]}, "train.schedule.name",
         {"search": "choice", "values": ["linear", "cosine"]}),
        ("per_device_train_batch_size", {"type": "categorical", "vals": [2, 4]}, "train.batch.rows",
         {"search": "choice", "values": [2, 4]}),
        ("gradient_accumulation_steps", {"type": "int", "minval": 1, "maxval": 4}, "train.batch.rows",
         {"search": "choice", "values": [8, 16, 24]}),
        ("num_train_epochs", {"type": "int", "minval": 1, "maxval": 4}, "train.epochs",
         {"search": "choice", "values": [1.0, 2.0, 3.0]}),
        ("learning_rate", {"type": "const", "val": 3e-4}, "train.optimizer.lr", 3e-4),
        ("learning_rate", "2e-4", "train.optimizer.lr", 2e-4),
    ],
)  # fmt: skip
def test_where_a_hyperparameter_lands(argument: str, given: Any, to: str, wanted: Any) -> None:
    draft = imported({argument: given})
    assert value(draft, to) == wanted
    assert value(draft, "search.method") == "asha"


def test_integers_of_a_grid_include_the_highest() -> None:
    draft = imported({"warmup_steps": {"type": "int", "minval": 1, "maxval": 10, "count": 4}}, {"name": "grid"})
    assert value(draft, "train.schedule.warmup") == {"search": "int", "low": 1, "high": 10, "count": 4}


def test_hyperparameters_outside_of_the_arguments_and_nested_ones() -> None:
    draft = imported({}, lr=LOG, model={"depth": {"type": "int", "minval": 1, "maxval": 3}}, optimizer={"type": "adam"})
    assert value(draft, "train.optimizer.lr") == {"search": "log", "low": 1e-5, "high": 1e-3}
    assert "hyperparameters.lr is read by the script; it is taken for --learning_rate" in texts(draft, "decide")
    assert "model.depth: {'type': 'int', 'minval': 1, 'maxval': 3}: the script reads it" in texts(
        draft, "no equivalent"
    )
    both = imported({"learning_rate": 5e-5}, learning_rate=LOG)
    assert value(both, "train.optimizer.lr") == 5e-5


@pytest.mark.parametrize(
    ("searcher", "wanted"),
    [
        ({"name": "adaptive_asha", "metric": "validation_loss", "max_trials": 64, "divisor": 3, "max_rungs": 4,
          "mode": "conservative", "max_concurrent_trials": 2},
         {"method": "asha", "metric": "val_loss", "max_trials": 64, "divisor": 3, "max_rungs": 4,
          "mode": "conservative", "concurrent": 2}),
        ({"name": "async_halving", "metric": "eval_accuracy", "smaller_is_better": False, "num_rungs": 3},
         {"method": "asha", "metric": "val_accuracy", "max_rungs": 3, "mode": "aggressive"}),
        ({"name": "asha", "metric": "eval_loss", "max_trials": 9},
         {"method": "asha", "metric": "val_loss", "max_trials": 9, "mode": "aggressive"}),
        ({"name": "random", "metric": "eval_loss", "max_trials": 5}, {"method": "random", "metric": "val_loss",
                                                                      "max_trials": 5}),
        ({"name": "grid", "metric": "perplexity"}, {"method": "grid", "metric": "val_loss"}),
        ({"name": "single", "metric": "eval_loss"}, {"method": "single"}),
    ],
)  # fmt: skip
def test_searchers(searcher: dict[str, Any], wanted: dict[str, Any]) -> None:
    draft = imported({"learning_rate": LOG}, searcher)
    found = {key.removeprefix("search."): draft.settings[key].plain() for key in draft.settings if "search." in key}
    assert found == wanted


@pytest.mark.parametrize(
    ("length", "to", "wanted"),
    [
        ({"batches": 100}, "train.steps", 100),
        (70, "train.steps", 70),
        ({"epochs": 2}, "train.epochs", 2.0),
        ({"records": 4000}, "train.steps", 500),
    ],
)
def test_length_of_a_trial(length: Any, to: str, wanted: float) -> None:
    draft = imported({}, {"name": "single", "max_length": length})
    assert value(draft, to) == wanted
    assert {"train.steps", "train.epochs"} & draft.settings.keys() == {to}
    own = imported({}, {"name": "single", "max_length": length}, entry=f"{ENTRY} --max_steps 7")
    assert value(own, "train.steps") == 7
    assert "the script's own arguments give the length" in texts(own, "different")


def test_what_has_no_place_is_named() -> None:
    searcher = {**ASHA, "metric": "bleu", "source_trial_id": 4, "bracket_rungs": [1, 2], "colour": "red"}
    draft = imported({"optim": {"type": "categorical", "vals": ["adamw_torch", "adamw_8bit"]}}, searcher)
    decided, lost = texts(draft, "decide"), texts(draft, "no equivalent")
    assert "metric: 'bleu'" in decided
    assert "source_trial_id: 4" in lost
    assert "bracket_rungs: [1, 2]" in lost
    assert "colour: 'red'" in texts(draft, "unknown")
    assert "smaller_is_better" in texts(imported({}, {**ASHA, "smaller_is_better": False}), "decide")
    assert "no range is left" in texts(imported({}), "decide")
    assert "custom: a searcher that whet does not have" in texts(imported({}, {"name": "custom"}), "decide")
    assert "needs data.validation" in texts(imported({}, entry="python run_clm.py --train_file a"), "decide")


@settings(max_examples=8, deadline=None)
@given(base=st.sampled_from([2, 10, 2.718]), low=st.floats(-7, -3), width=st.floats(0.1, 2.5))
def test_exponents_become_ends(base: float, low: float, width: float) -> None:
    draft = imported({"learning_rate": {"type": "log", "base": base, "minval": low, "maxval": low + width}})
    found = value(draft, "train.optimizer.lr")
    assert found["low"] == pytest.approx(base**low)
    assert found["high"] == pytest.approx(base ** (low + width))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type": "log", "minval": -3}, r"maxval is missing, which type log needs"),
        ({"type": "log", "base": 10, "minval": 3, "maxval": 900}, "are exponents of base"),
        ({"type": "log", "base": -2, "minval": -1.5, "maxval": 0}, "are exponents of base"),
        ({"type": "double", "minval": "a", "maxval": 1}, r"minval: 'a' is not a number"),
        ({"type": "categorical", "vals": []}, "give a list of values"),
        ({"type": "const"}, "val is missing"),
    ],
)
def test_wrong_ranges_are_named_with_their_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(
        WhetError, match=rf"given\.yaml:\d+: hyperparameters\.training_arguments\.learning_rate.*{message}"
    ):
        imported({"learning_rate": wrong})


def test_imported_recipe_can_be_searched(tmp_path: Path) -> None:
    file, out = tmp_path / "experiment.yaml", tmp_path / "my.yaml"
    text = {
        "entrypoint": ENTRY, "searcher": ASHA,
        "hyperparameters": {"training_arguments": {
            "learning_rate": LOG, "lr_scheduler_type": {"type": "categorical", "vals": ["linear", "cosine"]}}},
    }  # fmt: skip
    file.write_text(dump_yaml(text))
    import_config("determined", file, out=out)
    space = read_space(read_tree(Config, out))
    assert {parameter.name for parameter in space.parameters} == {"train.optimizer.lr", "train.schedule.name"}
    assert "lr: {search: log, low: 1.0e-05, high: 0.001}  # experiment.yaml:" in out.read_text()
