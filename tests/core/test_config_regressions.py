"""Faults that were met once: each had a run that looked healthy or an error that explained nothing."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from pathlib import Path

import pytest

from whet.config import Config, read_config
from whet.core.config import list_settings
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


# Files and values that are meant to fill the memory or to never end

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "aliases stand for more than 100,000 values. Write them out"),
        (BOMB.replace("[", "{k: [").replace("]", "]}"), "aliases stand for more than 100,000 values. Write them out"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("".join(" " * i + "a:\n" for i in range(1000)), "nested too deeply"),
    ],
    ids=["aliases", "aliases of mappings", "brackets", "indentation"],
)
def test_a_yaml_bomb_is_refused_at_once(text: str, reason: str) -> None:
    began = time.thread_time()
    with pytest.raises(WhetError, match=re.escape(reason)):
        parse_yaml(text, "f.yaml")
    assert time.thread_time() - began < 5


def test_a_file_without_end_and_a_pipe_without_writer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="/dev/zero: the file has more than 1 MiB"):
        read_yaml(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WhetError, match="pipe: the file is empty"):
        read_yaml(tmp_path / "pipe")


def test_a_recipe_from_a_pipe_is_read() -> None:
    reading, writing = os.pipe()
    threading.Timer(0.1, lambda: (os.write(writing, b"a: 1"), os.close(writing))).start()
    assert read_yaml(Path(f"/dev/fd/{reading}")).plain() == {"a": 1}
    os.close(reading)


def test_recipes_that_all_extend_each_other_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "0.yaml").write_text(SMALL)
    for number in range(1, 40):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {[f'{number - 1}.yaml'] * 9}")
    assert read_config(tmp_path / "20.yaml").model.path
    with pytest.raises(WhetError, match=r"/7\.yaml:1: extends 6\.yaml: more than 32 recipes extend each other"):
        read_config(tmp_path / "39.yaml")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("9223372036854775808", "too large"),
        ("-9223372036854775809", "too large"),
        ('"a\\0b"', "contains NUL"),
        ('"\\ud800"', "not valid UTF-8"),
    ],
)
@pytest.mark.parametrize("key", ["run.seed", "run.name", "data.sources.0.path", "train.steps", "no.such"])
def test_what_no_setting_can_be_is_named(tmp_path: Path, key: str, value: str, reason: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError, match=rf"command line, {key}.*: {key}: .*{reason}"):
        read_config(path, [f"{key}={value}"])


def test_a_byte_that_is_not_utf_8_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError, match=r"command line, run\.name=.*: unacceptable character #xdcff[^\n]*$"):
        read_config(path, ["run.name=a\udcffb"])


@pytest.mark.parametrize("override", ["a." * 5000 + "b=1", "data.sources." + "9" * 5000 + ".path=x"])
def test_a_key_without_end_is_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError, match="command line"):
        read_config(path, [override])


def test_links_in_a_circle_and_users_who_do_not_exist_are_paths(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    for place in (f"{tmp_path}/loop", f"{tmp_path}/loop/x", "~nosuchuser/x"):
        settings = [f"{key}={place}" for key in ("data.sources.0.path", "run.dir", "data.store", "data.template")]
        read_config(path, settings).dump()
    with pytest.raises(WhetError, match="loop: its symbolic links lead in a circle"):
        read_config(tmp_path / "loop")


@pytest.mark.parametrize("value", [".nan", "-1", "1e300", "9223372036854775808", "LOOP/x", "~nosuchuser", "{a: [1]}"])
def test_any_key_takes_any_value_or_names_it(tmp_path: Path, value: str) -> None:
    (tmp_path / "LOOP").symlink_to("LOOP")
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    for setting in list_settings(Config):
        key = setting.key.replace("[]", ".0")
        try:
            read_config(path, [f"{key}={value.replace('LOOP', f'{tmp_path}/LOOP')}"]).dump()
        except WhetError as refused:
            assert key.partition(".")[0] in str(refused)  # noqa: PT017


@pytest.mark.parametrize("name", [".", "..", "../other", "a/../b"])
def test_a_name_that_leads_out_of_runs_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    with pytest.raises(WhetError, match="the run would be in another folder than runs/NAME"):
        read_config(path, [f"run.name={name}"])
