"""Configuration: every mistake is an error with its place, the nearest name and what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from whet.config import Config, RunConfig, read_config
from whet.core.config import Section, config_error, describe_type, list_settings, load_config
from whet.core.errors import WhetError


class Leaf(Section):
    """A section at the bottom."""

    alternatives = (("a", "b"),)

    a: int | None = Field(default=None, ge=1, description="The first way.")
    b: int | None = Field(default=None, description="The second way.")


class Optimizer(Section):
    lr: float = Field(default=0.1, gt=0, description="The learning rate.")


class Train(Section):
    alternatives = (("steps", "epochs", "tokens"),)

    steps: int | None = Field(default=None, ge=1, le=100, description="How many steps.")
    epochs: float | None = Field(default=None, gt=0, description="How many epochs.")
    tokens: int | None = Field(default=None)
    optimizer: Optimizer = Field(default=Optimizer())
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = Field(default=0, description="Rise.")


class Root(Section):
    name: str = Field(description="What it is called.")
    kind: Literal["one", "two"] = Field(default="one", description="Which of two.")
    train: Train = Field(default=Train())
    leaves: list[Leaf] = Field(default=[], max_length=3, description="Many of them.")
    leaf: Leaf | None = Field(default=None)
    more: list[Leaf] | None = Field(default=None, description="Even more of them.")
    on: bool = Field(default=False, description="Whether.")
    pair: Annotated[tuple[float, float], Field(strict=False)] = Field(default=(0.0, 1.0), description="Two numbers.")
    tags: list[str] = Field(default=["x"], description="Words.")

    @model_validator(mode="after")
    def _together(self) -> Root:
        if self.on and self.kind == "two":
            raise config_error("kind", "two cannot be on")
        return self


Write = Callable[..., Path]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Write:
    """Writes a recipe: recipe_file("name: x", "kind: one")."""

    def write(*lines: str, file: str = "r.yaml") -> Path:
        path = tmp_path / file
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def fault(path: Path | None, *overrides: str) -> str:
    with pytest.raises(WhetError) as caught:
        load_config(Root, path, overrides)
    return str(caught.value)


# What is right


def test_a_recipe_is_read_into_typed_sections(recipe_file: Write) -> None:
    path = recipe_file(
        "name: x", "train:", "  steps: 3", "  optimizer: {lr: 1e-6}", "leaves: [{a: 1}, {b: 2}]", "pair: [0, 2]"
    )
    config = load_config(Root, path)
    assert (config.name, config.train.steps, config.train.optimizer.lr) == ("x", 3, 1e-6)
    assert [leaf.b for leaf in config.leaves] == [None, 2]
    assert config.pair == (0.0, 2.0)
    assert config.kind == "one"


def test_without_a_file_the_overrides_are_the_recipe() -> None:
    assert load_config(Root, None, ["name=x", "train.steps=4"]).train.steps == 4


def test_values_cannot_be_changed_later(recipe_file: Write) -> None:
    config = load_config(Root, recipe_file("name: x"))
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "y"


# What is wrong, with file and line


def test_an_unknown_key_is_named_with_the_nearest_one(recipe_file: Write) -> None:
    path = recipe_file("name: x", "train:", "  stepz: 3")
    assert fault(path) == f"{path}:3: unknown key train.stepz (value 3). Did you mean train.steps?"


def test_a_key_in_the_wrong_section_names_the_right_one(recipe_file: Write) -> None:
    path = recipe_file("name: x", "lr: 1e-4")
    assert fault(path) == f"{path}:2: unknown key lr (value 0.0001). Did you mean train.optimizer.lr?"


def test_a_key_that_has_several_right_places_names_them_all(recipe_file: Write) -> None:
    path = recipe_file("name: x", "a: 3")
    assert fault(path).endswith("Did you mean leaves[].a or leaf.a or more[].a?")


def test_a_key_like_no_other_lists_the_known_ones(recipe_file: Write) -> None:
    path = recipe_file("name: x", "train:", "  optimizer:", "    zzz: 3")
    assert (
        fault(path)
        == f"{path}:4: unknown key train.optimizer.zzz (value 3). Known here: lr. `whet config` explains them all."
    )


def test_an_unknown_key_in_a_list_names_its_item(recipe_file: Write) -> None:
    path = recipe_file("name: x", "leaves:", "  - a: 1", "  - aa: 2")
    assert fault(path).startswith(f"{path}:4: unknown key leaves.1.aa (value 2). ")


def test_a_missing_key_is_explained(recipe_file: Write) -> None:
    path = recipe_file("kind: one")
    assert fault(path) == f"{path}:1: name is missing. What it is called."


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train: {steps: many}", "train.steps: 'many' is not valid: expected integer. How many steps."),
        ("train: {steps: 1.5}", "train.steps: 1.5 is not valid: expected integer. How many steps."),
        ("train: {steps: '3'}", "train.steps: '3' is not valid: expected integer. How many steps."),
        ("train: {steps: true}", "train.steps: True is not valid: expected integer. How many steps."),
        ("train: {steps: [1]}", "train.steps: [1] is not valid: expected integer. How many steps."),
        (
            "train: {optimizer: {lr: fast}}",
            "train.optimizer.lr: 'fast' is not valid: expected number. The learning rate.",
        ),
        ("train: 3", "train: 3 is not valid: expected a section with steps, epochs, tokens, optimizer, warmup."),
        ("train:", "train: None is not valid: expected a section with"),
        ("kind: three", "kind: 'three' is not valid: expected one | two. Which of two."),
        ("on: yes", "on: 'yes' is not valid: expected true or false. Whether."),
        ("on: 1", "on: 1 is not valid: expected true or false. Whether."),
        ("tags: word", "tags: 'word' is not valid: expected list of strings. Words."),
        ("tags: [1]", "tags.0: 1 is not valid: expected list of strings. Words."),
        ("pair: [1, b]", "pair.1: 'b' is not valid: expected [number, number]. Two numbers."),
        ("leaves: {a: 1}", "leaves: {'a': 1} is not valid: expected list of sections with a, b. Many of them."),
        ("leaves: [3]", "leaves.0: 3 is not valid: expected list of sections with a, b. Many of them."),
        ("train: {warmup: x}", "train.warmup: 'x' is not valid: expected integer | number. Rise."),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_the_type_expected(recipe_file: Write, line: str, says: str) -> None:
    path = recipe_file("name: x", line)
    assert fault(path).startswith(f"{path}:2: {says}")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train: {steps: 0}", "train.steps: 0 is not valid (input should be greater than or equal to 1)"),
        ("train: {steps: 101}", "train.steps: 101 is not valid (input should be less than or equal to 100)"),
        ("train: {optimizer: {lr: 0.0}}", "train.optimizer.lr: 0.0 is not valid (input should be greater than 0)"),
        ("train: {warmup: 1.5}", "train.warmup: 1.5 is not valid (input should be less than or equal to 1)"),
        ("leaves: [{}, {}, {}, {}]", "leaves: [{}, {}, {}, {}] is not valid (list should have at most 3 items"),
        ("pair: [1, 2, 3]", "pair: [1, 2, 3] is not valid (tuple should have at most 2 items"),
    ],
)
def test_a_value_out_of_range_names_the_range(recipe_file: Write, line: str, says: str) -> None:
    path = recipe_file("name: x", line)
    assert f"{path}:2: {says}" in fault(path).splitlines()[0] or f"{path}:2: {says}" in fault(path)


def test_values_that_are_invalid_together_are_reported_at_a_key(recipe_file: Write) -> None:
    path = recipe_file("name: x", "on: true", "kind: two")
    assert fault(path) == f"{path}:3: kind: two cannot be on"


def test_all_errors_are_listed_at_once_each_with_its_line(recipe_file: Write) -> None:
    path = recipe_file("nam: x", "kind: three", "train:", "  steps: 0")
    told = fault(path).splitlines()
    assert sorted(re.findall(r":(\d+): ", line)[0] for line in told) == ["1", "1", "2", "4"]
    assert any("Did you mean name?" in line for line in told)


# Alternatives


def test_two_alternatives_in_one_recipe_are_an_error(recipe_file: Write) -> None:
    path = recipe_file("name: x", "train:", "  steps: 3", "  epochs: 1.0")
    assert fault(path) == f"{path}:4: train.epochs: steps and epochs are alternatives: give one of them"


def test_an_override_replaces_an_inherited_alternative(recipe_file: Write) -> None:
    path = recipe_file("name: x", "train: {steps: 3, warmup: 2}")
    train = load_config(Root, path, ["train.epochs=2.0"]).train
    assert (train.steps, train.epochs, train.warmup) == (None, 2.0, 2)


def test_two_alternatives_on_one_command_line_are_an_error(recipe_file: Write) -> None:
    path = recipe_file("name: x", "train: {steps: 3}")
    assert fault(path, "train.epochs=2.0", "train.tokens=9") == (
        "command line, train.tokens=9: train.tokens: epochs and tokens are alternatives: give one of them"
    )
    assert "steps and epochs are alternatives" in fault(path, "train.steps=3", "train={epochs: 2.0}")


def test_the_last_of_several_overrides_of_a_key_wins(recipe_file: Write) -> None:
    path = recipe_file("name: x", "train: {steps: 3}", "leaves: [{a: 1}, {a: 2}]")
    config = load_config(
        Root, path, ["train.epochs=2.0", "train.warmup=1", "train.epochs=3.0", "leaves.0.a=5", "leaves.1={b: 4}"]
    )
    assert (config.train.steps, config.train.epochs, config.train.warmup) == (None, 3.0, 1)
    assert config.leaves == [Leaf(a=5), Leaf(b=4)]


def test_a_child_recipe_replaces_an_inherited_alternative(recipe_file: Write) -> None:
    recipe_file("name: x", "train: {steps: 3, warmup: 2}", "leaf: {a: 1}", file="base.yaml")
    child = recipe_file("extends: base.yaml", "train: {tokens: 9}", "leaf: {b: 2}")
    config = load_config(Root, child)
    assert (config.train.steps, config.train.tokens, config.train.warmup) == (None, 9, 2)
    assert config.leaf == Leaf(b=2)


def test_two_alternatives_in_a_child_are_still_an_error(recipe_file: Write) -> None:
    recipe_file("name: x", file="base.yaml")
    child = recipe_file("extends: base.yaml", "train:", "  epochs: 1.0", "  tokens: 9")
    assert fault(child) == f"{child}:4: train.tokens: epochs and tokens are alternatives: give one of them"


# Extending


def test_a_chain_of_recipes_merges_key_by_key_and_errors_name_the_right_file(recipe_file: Write) -> None:
    recipe_file("name: x", "kind: two", "train: {steps: 3, warmup: 2}", "tags: [p, q]", file="a.yaml")
    recipe_file("extends: a.yaml", "train: {steps: 5}", "tags: [r]", file="b.yaml")
    path = recipe_file("extends: b.yaml", "name: y")
    config = load_config(Root, path)
    assert (config.name, config.kind, config.train.steps, config.train.warmup) == ("y", "two", 5, 2)
    assert config.tags == ["r"], "lists are replaced, not joined"


def test_an_error_in_a_parent_names_the_parent(recipe_file: Write) -> None:
    base = recipe_file("name: x", "train:", "  steps: 0", file="base.yaml")
    child = recipe_file("extends: base.yaml", "kind: two")
    assert fault(child).startswith(f"{base.resolve()}:3: train.steps: 0")


def test_of_several_parents_the_later_wins(recipe_file: Write) -> None:
    recipe_file("name: a", "kind: two", file="a.yaml")
    recipe_file("name: b", file="b.yaml")
    config = load_config(Root, recipe_file("extends: [a.yaml, b.yaml]", "on: false"))
    assert (config.name, config.kind) == ("b", "two")


def test_parents_are_found_beside_the_recipe(
    recipe_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "elsewhere").mkdir()
    recipe_file("name: x", file="base.yaml")
    child = recipe_file("extends: ../base.yaml", file="deep/child.yaml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(Root, child).name == "x"


def test_the_same_parent_twice_is_not_circular(recipe_file: Write) -> None:
    recipe_file("name: x", file="base.yaml")
    recipe_file("extends: base.yaml", "kind: two", file="a.yaml")
    recipe_file("extends: base.yaml", file="b.yaml")
    assert load_config(Root, recipe_file("extends: [a.yaml, b.yaml]")).kind == "two"


def test_circular_extends_are_an_error(recipe_file: Write) -> None:
    a = recipe_file("name: x", "extends: b.yaml", file="a.yaml")
    b = recipe_file("extends: a.yaml", file="b.yaml")
    assert fault(a) == f"{b.resolve()}:1: circular extends: a.yaml extends itself"
    own = recipe_file("name: x", "extends: r.yaml")
    assert fault(own) == f"{own}:2: circular extends: r.yaml extends itself"


def test_a_missing_parent_is_an_error_with_its_full_path(recipe_file: Write, tmp_path: Path) -> None:
    path = recipe_file("name: x", "extends: nope.yaml")
    assert fault(path).startswith(f"{path}:2: extends nope.yaml: no such file ({(tmp_path / 'nope.yaml').resolve()})")


@pytest.mark.parametrize("line", ["extends: 3", "extends: [3]", "extends: {a: b}"])
def test_extends_takes_paths_only(recipe_file: Write, line: str) -> None:
    path = recipe_file("name: x", line)
    assert fault(path).startswith(f"{path}:2: extends takes the path of a recipe, or a list of them, not ")


# Overrides


@pytest.mark.parametrize("text", ["train.steps", "=3", "train..steps=3", ".train=3", "train.=3", ""])
def test_an_override_without_key_or_value_is_an_error(text: str) -> None:
    assert fault(None, text).startswith(f"command line: '{text}' is not of the form KEY=VALUE, such as train.steps=100")


def test_an_error_in_an_override_names_the_command_line(recipe_file: Write) -> None:
    path = recipe_file("name: x")
    assert fault(path, "train.stepz=3").startswith("command line, train.stepz=3: unknown key train.stepz (value 3)")
    assert fault(path, "train.steps=x").startswith("command line, train.steps=x: train.steps: 'x' is not valid")
    assert fault(path, "tags=[a").startswith("command line, tags=[a: not valid YAML")


def test_an_override_is_yaml_and_may_hold_equals_signs(recipe_file: Write) -> None:
    path = recipe_file("name: x")
    config = load_config(Root, path, ["name=a=b", "train.optimizer.lr=1e-6", "tags=[p, 'no']", "leaf={a: 2}"])
    assert (config.name, config.train.optimizer.lr, config.tags, config.leaf) == ("a=b", 1e-6, ["p", "no"], Leaf(a=2))


def test_an_override_can_empty_a_value(recipe_file: Write) -> None:
    path = recipe_file("name: x", "leaf: {a: 1}")
    assert load_config(Root, path, ["leaf="]).leaf is None


def test_a_number_indexes_into_a_list(recipe_file: Write) -> None:
    path = recipe_file("name: x", "leaves: [{a: 1}, {b: 2}]", "tags: [p, q]")
    config = load_config(Root, path, ["leaves.1.b=5", "tags.0=z"])
    assert (config.leaves, config.tags) == ([Leaf(a=1), Leaf(b=5)], ["z", "q"])


def test_a_number_beyond_the_list_is_an_error(recipe_file: Write) -> None:
    path = recipe_file("name: x", "tags: [p, q]")
    assert fault(path, "tags.2=z") == "command line, tags.2=z: there is no item 2: the list has 2 (counted from 0)"


def test_variables_are_expanded_in_overrides_too(recipe_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    assert load_config(Root, recipe_file("name: x"), ["name=${WHO}"]).name == "me"


# Describing


def test_every_setting_is_listed_in_order_with_type_default_and_description() -> None:
    listed = {setting.key: setting for setting in list_settings(Root)}
    assert list(listed) == [
        "name", "kind", "train.steps", "train.epochs", "train.tokens", "train.optimizer.lr", "train.warmup", "leaves",
        "leaves[].a", "leaves[].b", "leaf.a", "leaf.b", "more", "more[].a", "more[].b", "on", "pair", "tags",
    ]  # fmt: skip
    assert (listed["name"].default, listed["name"].description) == ("required", "What it is called.")
    assert (listed["kind"].type, listed["kind"].default) == ("one | two", "one")
    assert (listed["train.steps"].type, listed["train.steps"].default) == ("integer", "")
    assert (listed["on"].type, listed["on"].default) == ("true or false", "false")
    assert (listed["pair"].type, listed["pair"].default) == ("[number, number]", "[0.0, 1.0]")
    assert (listed["leaves"].type, listed["leaves"].default) == ("list of sections", "[]")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (str, "string"),
        (int | None, "integer"),
        (Literal["auto"] | int, "auto | integer"),
        (list[str], "list of strings"),
        (dict[str, Annotated[int, Field(ge=1)]], "mapping of names to integers"),
        (tuple[int, float], "[integer, number]"),
        (Annotated[int, Field(ge=1)], "integer"),
        (Optimizer, "a section with lr"),
        (Optimizer | None, "a section with lr"),
        (bytes, "<class 'bytes'>"),
    ],
)
def test_types_are_named_in_the_words_of_the_docs(annotation: object, words: str) -> None:
    assert describe_type(annotation) == words


# The real tree

SMALL = ("model: {path: builtin:tiny}", "data: {sources: [{path: builtin:orders}], max_length: 64}")


def test_every_setting_of_the_real_tree_has_a_description() -> None:
    assert [setting.key for setting in list_settings(Config) if not setting.description] == []


def test_misplaced_and_misspelt_keys_of_the_real_tree(recipe_file: Write) -> None:
    path = recipe_file(*SMALL, "lr: 3", "train: {stepz: 4}")
    with pytest.raises(WhetError) as caught:
        read_config(path)
    assert set(str(caught.value).splitlines()) == {
        f"{path}:3: unknown key lr (value 3). Did you mean train.optimizer.lr?",
        f"{path}:4: unknown key train.stepz (value 4). Did you mean train.steps?",
    }


def test_a_run_is_named_after_its_recipe(recipe_file: Write, tmp_path: Path) -> None:
    assert read_config(recipe_file(*SMALL, file="orders.yaml")).folder == Path("runs/orders")
    (tmp_path / "old").mkdir()
    assert read_config(recipe_file(*SMALL, file="old/config.yaml")).run.name == "old"
    assert read_config(recipe_file(*SMALL, "run: {name: n}")).run.name == "n"
    assert read_config(recipe_file(*SMALL, "run: {dir: /x/y}")).folder == Path("/x/y")


def test_a_home_folder_in_run_dir_is_expanded(recipe_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert read_config(recipe_file(*SMALL, "run: {dir: ~/x}")).folder == Path("/somewhere/x")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train: {row_length: 63}", "row_length: 63 is shorter than data.max_length = 64"),
        ("train: {batch: {tokens: 63}}", "batch.tokens: 63 is less than one row of 64 tokens"),
        ("train: {row_length: 100, batch: {tokens: 99}}", "batch.tokens: 99 is less than one row of 100 tokens"),
        ("train: {batch: {}}", "give one of conversations, rows, tokens"),
        ("export: {at_end: adapter}", "without an adapter section every weight is trained"),
    ],
)
def test_values_of_different_sections_that_do_not_go_together(recipe_file: Write, line: str, says: str) -> None:
    path = recipe_file(*SMALL, line)
    with pytest.raises(WhetError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert says in str(caught.value)


def test_the_row_length_is_the_longest_conversation_unless_given(recipe_file: Write) -> None:
    assert read_config(recipe_file(*SMALL)).row_length == 64
    assert read_config(recipe_file(*SMALL, "train: {row_length: 100}")).row_length == 100
    assert read_config(recipe_file(*SMALL, "train: {row_length: 64}")).row_length == 64
    assert read_config(recipe_file(*SMALL, "train: {batch: {tokens: 64}}")).train.batch.tokens == 64


def test_a_dumped_config_reads_back_as_the_same(recipe_file: Write, tmp_path: Path) -> None:
    lines = ("train: {optimizer: {lr: 1e-9, betas: [0.5, 1e-5]}, batch: {rows: 3}}", "adapter: {targets: [a, 'no']}")
    config = read_config(recipe_file(*SMALL, *lines, "run: {name: '${nope}', tags: ['1e-6']}".replace("$", "$$")))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(config.dump())
    assert read_config(dumped) == config
    assert config.run.name == "${nope}"


def test_the_same_run_in_another_folder_differs_in_nothing_else(recipe_file: Write, tmp_path: Path) -> None:
    config = read_config(recipe_file(*SMALL))
    moved = config.with_folder(tmp_path / "other")
    assert moved.folder == tmp_path / "other"
    assert moved.with_folder(config.folder).folder == config.folder
    assert moved.model_copy(update={"run": config.run}) == config


def test_a_resolved_config_has_absolute_paths(
    recipe_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "m"):
        Path(name).touch()
    path = recipe_file(
        "model: {path: m}", "data: {sources: [{path: a.jsonl}, {path: gone}], validation: {sources: [{path: b.jsonl}]}}"
    )
    settled = read_config(path).resolved()
    assert "adapter" not in settled, "what is absent stays absent"
    assert settled["model"]["path"] == str(tmp_path.resolve() / "m")
    assert [source["path"] for source in settled["data"]["sources"]] == [str(tmp_path.resolve() / "a.jsonl"), "gone"]
    assert settled["data"]["validation"]["sources"][0]["path"] == str(tmp_path.resolve() / "b.jsonl")


def test_the_seed_is_zero_by_default() -> None:
    assert RunConfig().seed == RunConfig(seed=0).seed == 0
