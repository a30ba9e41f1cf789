"""Ranges in recipes: what is found, what a trial's recipe becomes, and what is refused."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config import Config, read_config
from whet.core.config import read_tree
from whet.core.errors import WhetError
from whet.core.yaml import dump_yaml, parse_yaml
from whet.search.space import Space, read_space

RANGES = """
extends: {recipe}
train:
  optimizer:
    momentum: {{search: float, low: 0.8, high: 0.95, when: {{train.optimizer.name: muon}}}}
    name: {{search: choice, values: [adamw, muon]}}
    lr: {{search: log, low: 1e-5, high: 1e-1, count: 3}}
"""


@pytest.fixture
def make_space(tmp_path, recipe):
    def make(*overrides: str) -> Space:
        file = tmp_path / "space.yaml"
        file.write_text(RANGES.format(recipe=recipe))
        return read_space(read_tree(Config, file, overrides))

    return make


def test_a_trial_has_values_where_ranges_stood_and_no_key_that_does_not_apply(make_space):
    space = make_space()
    assert [p.name.rpartition(".")[2] for p in space.parameters] == ["lr", "name", "momentum"]
    optimizer = space.recipe({"train.optimizer.name": "adamw", "train.optimizer.lr": 0.01}).plain()["train"][
        "optimizer"
    ]
    assert optimizer == {"lr": 0.01, "name": "adamw"}
    values = {"train.optimizer.name": "muon", "train.optimizer.lr": 0.01, "train.optimizer.momentum": 0.9}
    assert space.config(values).train.optimizer.momentum == 0.9


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_random_values_are_within_their_range_and_valid(tmp_path_factory, recipe, seed):
    file = tmp_path_factory.getbasetemp() / "drawn.yaml"
    file.write_text(RANGES.format(recipe=recipe))
    space, randomness = read_space(read_tree(Config, file)), random.Random(seed)
    values = space.assign(lambda parameter: parameter.draw(randomness))
    assert ("train.optimizer.momentum" in values) == (values["train.optimizer.name"] == "muon")
    assert 1e-5 <= values["train.optimizer.lr"] <= 1e-1
    assert space.config(values).train.optimizer.lr == values["train.optimizer.lr"]


def test_a_grid_has_every_combination_once(make_space):
    space = make_space("train.optimizer.momentum.count=2")
    grid = list(space.grid())
    assert len(grid) == 3 + 2 * 3  # adamw has no momentum
    assert len({tuple(sorted(each.items())) for each in grid}) == 9
    rates = sorted({each["train.optimizer.lr"] for each in grid})
    assert rates == [1e-5, pytest.approx(1e-3), 1e-1]


def test_integers_and_choices_of_sections_and_lists(make_space):
    space = make_space(
        "train.batch={search: choice, values: [{conversations: 2}, {rows: 1}]}",
        "adapter.rank={search: int, low: 2, high: 5}",
        "train.optimizer.betas=[0.9, {search: choice, values: [0.95, 0.99]}]",
    )
    grids = {parameter.name: parameter.points() for parameter in space.parameters if parameter.kind != "float"}
    assert grids["adapter.rank"] == [2, 3, 4, 5]
    assert grids["train.batch"] == ["{conversations: 2}", "{rows: 1}"]
    values = {
        "train.batch": "{rows: 1}", "adapter.rank": 3, "train.optimizer.betas.1": 0.99,
        "train.optimizer.name": "adamw", "train.optimizer.lr": 0.01,
    }  # fmt: skip
    config = space.config(values)
    assert (config.train.batch.rows, config.adapter.rank, config.train.optimizer.betas) == (1, 3, (0.9, 0.99))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.optimizer.lr={search: lg, low: 1, high: 2}", "lr.search: 'lg' is not valid: expected log, float"),
        ("train.optimizer.lr={search: log, low: 0, high: 1}", "lr.low: 0 has no logarithm"),
        ("train.optimizer.lr={search: log, low: 1e-3, high: 1e-4}", "lr.high: 0.0001 is not above low = 0.001"),
        ("train.optimizer.lr={search: log, low: 1e-5}", "lr.high: missing. Write the range as {search: log"),
        ("train.optimizer.lr={search: log, low: 1e-5, high: .inf}", "lr.high: inf is not valid: expected a number"),
        ("train.optimizer.lr={search: log, low: a, high: 1}", "lr.low: 'a' is not valid: expected a number"),
        ("train.optimizer.lr={search: log, low: 1e-5, high: 1, cuont: 3}", "lr.cuont: unknown key (value 3). Did you"),
        ("train.optimizer.lr={search: log, low: 1e-5, high: 1, count: 0}", "lr.count: 0 is not valid"),
        ("adapter.rank={search: int, low: 1.5, high: 3}", "rank.low: 1.5 is not valid: expected an integer"),
        ("adapter.rank={search: int, low: 0, high: 3}", "adapter.rank: 0 is not valid (input should be greater"),
        ("adapter.rank={search: float, low: 1, high: 3}", "is not valid: expected integer. Rank of"),
        ("train.optimizer.name={search: choice, values: []}", "name.values: [] is not valid: expected a list"),
        ("train.optimizer.name={search: choice, values: [muon, muon]}", "name.values: 'muon' is given twice"),
        ("train.precision={search: choice, values: [fp32, fp23]}", "train.precision: 'fp23' is not valid: expected"),
        ("train.optimizer.name={search: choice, values: [adamw, {search: int}]}", "name.values: a range inside"),
        ("train.optimizer.momentum.when={train.optimizer.name: mun}", "'mun' is not among its values (adamw, muon)"),
        ("train.optimizer.momentum.when={train.optimizer.eps: 1}", "neither searches train.optimizer.eps nor gives"),
        ("train.optimizer.momentum.when=muon", "momentum.when: 'muon' is not valid: expected settings"),
        ("train.optimizer.name.when={train.optimizer.momentum: 0.9}", "depends on itself"),
        ("train.optimizer.betas=[0.9, {search: float, low: 0, high: 0.9, when: {run.seed: 1}}]", "always there"),
        ("search.max_trials={search: int, low: 1, high: 2}", "settings of the search itself cannot be searched"),
        ("search=asha", "search: 'asha' is not valid: expected a section"),
        ("train.stepss=3", "unknown key train.stepss (value 3). Did you mean train.steps?"),
    ],
)
def test_an_error_names_the_key_the_value_and_the_remedy(make_space, override, message):
    with pytest.raises(WhetError) as raised:
        make_space(override)
    assert message in str(raised.value)


def test_a_grid_of_a_range_needs_its_number_of_points(make_space):
    with pytest.raises(WhetError, match=r"train.optimizer.momentum: count is missing.*count: 4"):
        list(make_space().grid())


def test_a_value_on_the_command_line_replaces_a_range(make_space):
    space = make_space("train.optimizer.name=adamw", "train.optimizer.lr=1e-3", "train.optimizer.momentum=0.95")
    assert (space.parameters, space.config({}).train.optimizer.lr) == ((), 1e-3)


def test_a_condition_on_a_fixed_setting(make_space):
    space = make_space("train.optimizer.name=muon")
    assert "train.optimizer.momentum" in space.assign(lambda parameter: parameter.low)


def test_train_names_ranges(tmp_path, recipe):
    file = tmp_path / "space.yaml"
    file.write_text(RANGES.format(recipe=recipe))
    with pytest.raises(WhetError, match=r"space.yaml:7: train.optimizer.lr: .* is a range to search. Run `whet search"):
        read_config(file)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["search", "low", "high", "count", "when", "values", "train.steps", "x"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["low", "high", "count", "when", "values", "x"]), _JUNK, max_size=5),
       st.sampled_from(["log", "float", "int", "choice", "", 3]))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_range_is_taken_or_refused_with_its_key(junk, kind):
    text = dump_yaml({"model": {"path": "builtin:tiny"}, "data": {"sources": [{"path": "builtin:orders"}]},
                      "train": {"steps": {"search": kind, **junk}}})  # fmt: skip
    error, space = "", None
    try:
        space = read_space(parse_yaml(text, "my.yaml"))
    except WhetError as refused:
        error = str(refused)
    assert "train.steps" in error if space is None else math.isfinite(space.parameters[0].high)
