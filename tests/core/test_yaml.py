"""YAML 1.2 whose values know their file and line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import examples
from whet.core.errors import WhetError
from whet.core.yaml import Node, dump_yaml, parse_yaml, read_yaml


def plain(text: str) -> Any:
    return parse_yaml(text, "here").plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("2.5e+3", 2500.0), ("3.", 3.0), (".5", 0.5), ("-1.5", -1.5), ("1_000.5", 1000.5),
        ("12", 12), ("-3", -3), ("+4", 4), ("1_000", 1000), ("007", 7),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"),
        ("true", True), ("False", False), ("TRUE", True), ("null", None), ("~", None), ("Null", None), ("", None),
        (".inf", math.inf), ("-.INF", -math.inf),
        ("1e", "1e"), ("e5", "e5"), ("1.2.3", "1.2.3"), ("1:30", "1:30"), ("2024-01-02", "2024-01-02"),
        ("0x1f", "0x1f"), ("-", [None]), ("inf", "inf"), ("nan", "nan"), (".", "."), ("_1", "_1"),
        ("'1e-6'", "1e-6"), ('"true"', "true"), ("''", ""), ("|\n  12\n", "12\n"), (">\n  a\n  b\n", "a b\n"),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    found = plain(text)
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_is_one() -> None:
    assert math.isnan(plain(".nan"))


def test_every_value_has_its_line() -> None:
    node = parse_yaml("a: 1\nb:\n  c: [x,\n    y]\n  d:\n    - e: 2\n", "f.yaml")
    places = {
        (): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 0): 3, ("b", "c", 1): 4, ("b", "d"): 5, ("b", "d", 0): 6,
        ("b", "d", 0, "e"): 6,
    }  # fmt: skip
    for path, line in places.items():
        assert node.at(path).place == f"f.yaml:{line}", path


def test_a_path_that_does_not_exist_gives_its_deepest_ancestor() -> None:
    node = parse_yaml("a:\n  b: [1]\n", "f.yaml")
    assert node.at(("a", "x", "y")) == node.at(("a",))
    assert node.at(("a", "x", "b")) == node.at(("a",)), "what comes after a missing key is not looked for"
    assert node.at(("a", "b", 1)).plain() == [1]
    assert node.at(("a", "b", 5)).plain() == [1]
    assert node.at(("a", "b", "0")).plain() == [1]


def test_unnumbered_places_have_no_line() -> None:
    node = parse_yaml("{a: [1]}", "command line", numbered=False)
    assert {node.place, node.at(("a",)).place, node.at(("a", 0)).place} == {"command line"}


# The environment


def test_variables_are_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "there")
    monkeypatch.setenv("NUMBER", "12")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert plain("a: ${HERE}/x/${HERE}") == {"a": "there/x/there"}
    assert plain("a: ${NUMBER}") == {"a": 12}
    assert plain("a: '${NUMBER}'") == {"a": "12"}
    assert plain("a: ${NOT_SET:-fallback}") == {"a": "fallback"}
    assert plain("a: ${HERE:-fallback}") == {"a": "there"}
    assert plain("a: x${NOT_SET:-}") == {"a": "x"}
    assert plain("a: $${HERE}") == {"a": "${HERE}"}
    assert plain("a: $HERE") == {"a": "$HERE"}
    assert plain("[a, '${HERE}']") == ["a", "there"]


def test_a_variable_that_is_not_set_is_named_with_place_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(WhetError) as caught:
        parse_yaml("a: 1\nb: ${NOT_SET}\n", "f.yaml")
    assert str(caught.value).startswith("f.yaml:2: the environment variable NOT_SET is not set")
    assert "${NOT_SET:-value}" in str(caught.value)


# Errors


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: the key 'a' is given twice (first at f.yaml:1)"),
        ("x:\n  a: 1\n  a: 1\n", "f.yaml:3: the key 'a' is given twice (first at f.yaml:2)"),
        ("a: 1\nb: [\n", "f.yaml:3:1: not valid YAML"),
        ("a: 1\n\tb: 2\n", "f.yaml:2:1: not valid YAML"),
        ("a: b: c\n", "f.yaml:1:5: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: not valid YAML"),
        ("a: *nowhere\n", "f.yaml:1:4: not valid YAML"),
        ("a: 1\n? [b]\n: 2\n", "f.yaml:1: a key must be plain text"),
        ("a: \x00\n", "f.yaml: not valid YAML: unacceptable character #x0000"),
        ("[" * 5000, "f.yaml: not valid YAML"),
    ],
    ids=lambda value: repr(value[:25]),
)
def test_what_is_not_yaml_is_an_error_with_file_line_and_column(text: str, says: str) -> None:
    with pytest.raises(WhetError) as caught:
        parse_yaml(text, "f.yaml")
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: !!str 5", "here:1:4: not valid YAML: whet reads no tags, such as !!str. Remove it; for text write quotes"),
        ("a: 1\nb: !include x.yaml", "here:2:4: not valid YAML: whet reads no tags, such as !include"),
        ("a: !!python/object/apply:os.system [ls]", "such as !!python/object/apply:os.system"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2", "here:3: <<: whet reads no merge keys. Write the keys out"),
    ],
)
def test_tags_and_merge_keys_are_refused(text: str, says: str) -> None:
    """They would be read as something else than they say."""
    with pytest.raises(WhetError) as caught:
        plain(text)
    assert says in str(caught.value)


def test_an_alias_is_read_and_a_quoted_merge_sign_is_a_key() -> None:
    assert plain("a: &x {b: 1}\nc: *x\n'<<': 2") == {"a": {"b": 1}, "c": {"b": 1}, "<<": 2}


def test_the_same_key_in_different_mappings_is_fine() -> None:
    assert plain("- a: 1\n- a: 2\n") == [{"a": 1}, {"a": 2}]


@settings(max_examples=examples(300), deadline=None)
@given(st.text(max_size=30) | st.text(st.sampled_from("ab:-[]{}'\"\\ \n\t#&*!|>%@`,?$~=<0.1eE_"), max_size=30))
@example("&a a: *a")
@example("%YAML 1.9\n--- a")
@example("? ")
@example("!!binary x")
def test_any_text_is_a_value_or_a_whet_error(text: str) -> None:
    try:
        node = parse_yaml(text, "here")
    except WhetError as refused:
        told = str(refused)
        assert told.startswith("here")
    else:
        assert isinstance(node, Node)
        node.plain()


# Files


def test_a_file_is_read_with_its_name_as_place(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("\n# a comment\na: é\n")
    node = read_yaml(file)
    assert node.plain() == {"a": "é"}
    assert node.at(("a",)).place == f"{file}:3"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n", "a recipe is a mapping of keys to values, not ['a']"),
        (b"hello\n", "keys to values, not 'hello'"),
        (b"a: \xff\n", "not a text file"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error_that_names_it(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(content)
    with pytest.raises(WhetError) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(str(file))
    assert says in str(caught.value)


def test_a_missing_file_and_a_folder_are_errors_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=r"nope\.yaml: no such file\. Give the path of a recipe"):
        read_yaml(tmp_path / "nope.yaml")
    with pytest.raises(WhetError, match=rf"{tmp_path}: this is a folder\. Give the path of a recipe"):
        read_yaml(tmp_path)


# Writing

LETTERS = st.characters(exclude_characters="\x85")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(LETTERS, max_size=20)
TRICKY = st.sampled_from(
    ["no", "1e-6", "12", "true", "null", "~", "", " a ", "a: b", "- a", "#x", "${HOME}", "$${X}", "$$${", "a\nb\n", "=",
     "<<", "\u2028", "a\u2029b", "\x00", "\ud800", "'", '"', "\\", "!!int 3", "&a", "*a", "2024-01-01", "1:30", "0x1f",
     "0o7", "é", "😀", ".inf", ".nan", "%", "@", "`", "?", "| x", "x" * 120, "word " * 40]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS | TRICKY,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(LETTERS, max_size=8).filter(lambda k: "${" not in k), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(100), deadline=None)
@given(VALUES)
@example({"a": ["${HOME}", "$${HOME}"]})
def test_what_is_dumped_is_parsed_as_the_same_value(value: Any) -> None:
    assert plain(dump_yaml(value)) == value


@pytest.mark.parametrize("number", [0.0, -0.5, 1e-8, 1e16, -1e-300, 1.5e300, 123456.789, math.inf, -math.inf])
def test_numbers_survive_the_round_trip(number: float) -> None:
    found = plain(dump_yaml({"a": number}))["a"]
    assert found == number
    assert type(found) is float


def test_dumped_keys_keep_their_order_and_text_stays_readable() -> None:
    assert dump_yaml({"b": 1, "a": "é", "c": [True, None]}) == "b: 1\na: é\nc:\n- true\n- null\n"
