"""The registry's files: names and references, many writers at once, kills, damage, and what other users own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import killed_at
from whet.core.errors import WhetError
from whet.core.files import hash_json
from whet.registry.references import keep_version, pin_version, versions_inside
from whet.registry.registry import REGISTRY_FORMAT, Registry, parse_reference

RECORD = {"folder": "/nowhere", "kind": "merged", "files": "0", "run": None, "step": None, "lineage": {}}
NOBODY = 65534


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("WHET_MODELS", str(tmp_path / "registry"))
    return Registry()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A folder with a certificate; its model is as small as can be."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_certificate(folder)
    return folder


def write_certificate(folder: Path, **changes: Any) -> None:
    from whet.core.checksums import write_hashed_json
    from whet.model.load.weight_files import hash_model_folder

    said = {"kind": "merged", "verified": True, "step": 3, "files": hash_model_folder(folder)}
    write_hashed_json(folder / "certificate.json", said | changes)


# Names and references.


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "..", "../x", ".hidden", "-x", "a b", "a\nb", "\x1b[31m", "é", "a" * 101, "a@", "a@b@c", "a@../b"],
)
def test_a_name_that_cannot_be_is_refused(name: str, whet: Any, registry: Registry, export: Path) -> None:
    for ended in (whet("models", "show", "--", name), whet("models", "add", "--", name, export)):
        assert ended.code == 1, ended.err
        assert "\x1b" not in ended.err
    assert not registry.root.exists()


@settings(max_examples=50)
@given(st.text(alphabet=st.sampled_from("a1./@-_\n\0é~\x1b"), max_size=8) | st.text(max_size=8))
def test_whatever_is_typed_stays_in_the_registry(text: str) -> None:
    try:
        name, which = parse_reference(f"models:{text}")
    except WhetError:
        return
    for part in (name, which or name):
        assert "/" not in part
        assert not part.startswith(".")
        assert part.isascii()
        assert part.isprintable()


def test_references_by_number_alias_and_alone(registry: Registry) -> None:
    assert [registry.add("m", RECORD) for _ in range(12)] == list(range(1, 13))
    registry.set_alias("m", 2, "production")
    assert [pin_version(f"models:m{which}") for which in ("", "@latest", "@production", "@3", "@03")] == [
        "models:m@12", "models:m@12", "models:m@2", "models:m@3", "models:m@3",
    ]  # fmt: skip
    assert pin_version("org/m@production") == "org/m@production"
    registry.remove("m", 12)
    assert pin_version("models:m") == "models:m@11"
    assert registry.add("m", RECORD) == 13, "the number of a removed version is not used again"
    assert keep_version("models:m@production", "models:m@1") == "models:m@1"
    assert keep_version("models:m", "models:m@1") == "models:m@1"
    assert keep_version("models:m@3", "models:m@1") == "models:m@3"
    assert keep_version("models:m@12", "models:m@12") == "models:m@12", "also a removed one"
    assert keep_version("models:m", "models:mm@1") == "models:m@13"
    assert keep_version("models:m@production", "models:other@1") == "models:m@2"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("models:suport", "no model of this name in the registry"),
        ("models:suport", "Did you mean models:support?"),
        (
            "models:support@prodution",
            "no such alias. Did you mean models:support@production? Use one of old, production, 2",
        ),
        ("models:support@7", "models:support@7: no such version. Use one of 2"),
        ("models:support@1", "models:support@1: this version was removed. Use one of 2"),
        ("models:support@old", "this alias names version 1, which was removed"),
        ("models:support@0", "no such version"),
    ],
)
def test_what_is_not_there_is_named(reference: str, said: str, registry: Registry) -> None:
    registry.add("support", RECORD)
    registry.set_alias("support", registry.add("support", RECORD), "production")
    registry.set_alias("support", 1, "old")
    registry.remove("support", 1)
    with pytest.raises(WhetError) as error:
        pin_version(reference)
    assert said in str(error.value)


@pytest.mark.parametrize("alias", ["latest", "12", "a/b", "", "."])
def test_an_alias_that_cannot_be_is_refused(alias: str, whet: Any, registry: Registry) -> None:
    registry.add("m", RECORD)
    assert whet("models", "alias", "m", "--", alias).code == 1
    assert registry.aliases("m") == []


# Several writers, and writers that die.


def fork(function: Callable[[], object]) -> int:
    """Call a function in a process of its own; returns its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return child


def test_twenty_processes_lose_nothing(registry: Registry) -> None:
    def add() -> None:
        for number in range(2):
            registry.add("m", RECORD | {"files": f"{os.getpid()}-{number}"})
            registry.add_note("m", 1, f"{os.getpid()}-{number}")
            registry.set_alias("m", 1 + number, "production")

    children = [fork(add) for _ in range(20)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 20
    assert registry.versions("m") == list(range(1, 41))
    written = {f"{child}-{number}" for child in children for number in range(2)}
    assert {registry.version("m", number).files for number in range(1, 41)} == written
    assert {note.text for note in registry.notes("m", 1)} == written
    assert registry.alias_target("m", "production") == 2
    assert list(registry.root.rglob(".*")) == []


@pytest.mark.slow
def test_twenty_commands_lose_nothing(registry: Registry, export: Path) -> None:
    command = [sys.executable, "-m", "whet", "models", "add", "m", str(export), "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(20)]
    printed = [json.loads(each.communicate(timeout=120)[0])["version"] for each in running]
    assert sorted(printed) == registry.versions("m") == list(range(1, 21))


COMMANDS = {
    "add": ("models", "add", "m", "{export}"),
    "alias": ("models", "alias", "m@2", "production"),
    "note": ("models", "note", "m@2", "better"),
    "remove": ("models", "remove", "m@1", "-y"),
    "remove alias": ("models", "remove", "m@staging", "-y"),
    "remove all": ("models", "remove", "m", "-y"),
}


@pytest.fixture
def crowded(registry: Registry) -> Registry:
    for _ in range(2):
        registry.add("m", RECORD)
    registry.set_alias("m", 2, "production")
    registry.set_alias("m", 2, "staging")
    registry.add_note("m", 1, "first")
    return registry


def require_whole(registry: Registry, verb: str) -> None:
    """What was there is there, unless it was being removed; what was being written is whole or absent."""
    numbers, aliases = registry.versions("m"), registry.aliases("m")
    assert {1, 2} <= set(numbers) or "remove" in verb
    assert {"production", "staging"} <= set(aliases) or "remove" in verb
    assert all(registry.version("m", number).kind == "merged" for number in (1, 2, *numbers))
    assert all(registry.alias_target("m", alias) == 2 for alias in aliases)
    assert all(registry.find("m", alias) == 2 for alias in aliases)
    assert [note.text for note in registry.notes("m", 1)] == ["first"]
    assert [note.text for note in registry.notes("m", 2)] in ([], ["better"])


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=[] if verb in ("add", "alias") else pytest.mark.slow) for verb in COMMANDS]
)
def test_a_death_in_any_call_leaves_a_registry(
    verb: str, whet: Any, crowded: Registry, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, words = crowded.root.with_name("before"), [word.format(export=export) for word in COMMANDS[verb]]
    shutil.copytree(crowded.root, before)
    calls = 0

    def die_at(number: int) -> None:
        count = iter(range(1, number))
        for name in ("mkdir", "fsync", "replace", "rename", "link", "unlink", "chmod"):
            real = getattr(os, name)

            def call(*args: Any, real: Any = real, **options: Any) -> Any:
                if next(count, None) is None:
                    os._exit(9)
                return real(*args, **options)

            setattr(os, name, call)
        assert whet(*words).code == 0

    for number in range(1, 100):
        shutil.rmtree(crowded.root)
        shutil.copytree(before, crowded.root)
        died = os.waitstatus_to_exitcode(os.waitpid(fork(lambda number=number: die_at(number)), 0)[1])
        require_whole(crowded, verb)
        if died == 0:
            break
        assert died == 9
        calls += 1
        ended = whet(*words)  # the same again
        assert ended.code == 0 or verb.startswith("remove"), ended.err
    assert calls >= (2 if verb == "remove alias" else 4)


@pytest.mark.slow
@pytest.mark.skipif(not killed_at.IS_SUPPORTED, reason="needs Linux on x86-64 or ARM64")
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_kill_before_any_file_operation_leaves_a_registry(verb: str, crowded: Registry, export: Path) -> None:
    before, words = crowded.root.with_name("before"), [word.format(export=export) for word in COMMANDS[verb]]
    shutil.copytree(crowded.root, before)
    for number in range(1, 200):
        shutil.rmtree(crowded.root)
        shutil.copytree(before, crowded.root)
        command = [sys.executable, killed_at.__file__, str(number), str(crowded.root.parent), *words]
        code = subprocess.run(command, capture_output=True, check=False).returncode
        require_whole(crowded, verb)
        if code == 0:
            break
    assert code == 0, "it never got to the end"
    assert number > 2, "there was nothing to kill"


def test_another_host_leaves_an_unfinished_file(registry: Registry, export: Path) -> None:
    registry.add("m", RECORD)
    (registry.root / "m/versions/.new.other-host-17").write_text('{"folder": "/no')
    (registry.root / "m/versions/notes.txt").write_text("of a user")
    assert registry.add("m", RECORD) == 2
    assert registry.versions("m") == [1, 2]


# Damage, newer versions, and what belongs to others.


def damage(file: Path, how: str) -> None:
    content = json.loads(file.read_text())
    if how == "truncated":
        file.write_text(file.read_text()[:40])
    elif how == "edited":
        file.write_text(json.dumps(content | {"user": "mallory", "version": 7, "folder": "/elsewhere"}))
    elif how == "newer":
        content = {**content, "format": REGISTRY_FORMAT + 1}
        content.pop("hash")
        file.write_text(json.dumps({**content, "hash": hash_json(content)}))
    elif how == "other JSON":
        file.write_text("[1, 2]")
    elif how == "folder":
        file.unlink()
        file.mkdir()


@pytest.mark.parametrize("how", ["truncated", "edited", "newer", "other JSON", "folder"])
def test_a_damaged_version_is_named_and_the_others_are_listed(how: str, whet: Any, registry: Registry) -> None:
    for _ in range(2):
        registry.add("m", RECORD)
    registry.set_alias("m", 1, "production")
    file = registry.root / "m/versions/2.json"
    damage(file, how)
    for words in (["show", "m"], ["show", "m@2"], ["alias", "m@2", "x"]):
        ended = whet("models", *words)
        assert ended.code == 1, words
        assert str(file) in ended.err
        assert "pip install --upgrade" in ended.err if how == "newer" else "models:m@1" in ended.err
    listed = whet("models", "list")
    assert listed.code == 0
    assert "m@1" in listed.out
    assert "cannot be read" in listed.out
    assert whet("models", "show", "m@production").code == 0
    assert whet("models", "remove", "m@2", "--yes").code == 0
    assert registry.find("m") == 1
    assert file.exists(), "nothing is lost"


@pytest.mark.parametrize("how", ["truncated", "edited", "newer", "other JSON"])
def test_a_damaged_alias_is_named(how: str, whet: Any, registry: Registry) -> None:
    registry.add("m", RECORD)
    registry.set_alias("m", 1, "production")
    damage(registry.root / "m/aliases/production.json", how)
    ended = whet("models", "show", "m@production")
    assert ended.code == 1
    assert "aliases/production.json" in ended.err
    assert whet("models", "list").code == 0
    assert whet("models", "alias", "m@1", "production").code == 0
    assert whet("models", "show", "m@production").code == 0


@pytest.fixture
def as_another_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A registry that all may read, and a call after which this process may not write to it: root becomes nobody."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is in a folder that nobody else may enter
        root = Path(folder) / "registry"
        monkeypatch.setenv("WHET_MODELS", str(root))

        def become() -> None:
            Path(folder).chmod(0o755)
            for each in (root, *root.rglob("*")):
                each.chmod((0o755 if is_root else 0o555) if each.is_dir() else 0o444)
            if is_root:
                os.seteuid(NOBODY)

        yield become
        if is_root:
            os.seteuid(0)
        for each in (root, *root.rglob("*")):
            each.chmod(0o755)


def test_a_registry_of_another_user_is_read_only(whet: Any, as_another_user: Callable[[], None]) -> None:
    registry = Registry()
    registry.add("m", RECORD)
    as_another_user()
    for words in (["alias", "m", "production"], ["note", "m", "hello"], ["remove", "m", "-y"]):
        ended = whet("models", *words)
        assert ended.code == 1, words
        assert "you cannot write to this registry of models" in ended.err
        assert "belongs to " in ended.err
        assert "WHET_MODELS" in ended.err
    assert registry.find("m") == 1
    assert whet("models", "list").code == 0


def test_what_a_group_may_write_it_may_write_everywhere(registry: Registry) -> None:
    registry.root.mkdir()
    registry.root.chmod(0o2775)
    registry.add("m", RECORD)
    assert (registry.root / "m").stat().st_mode & 0o7777 == 0o2775
    assert (registry.root / "m/versions").stat().st_mode & 0o7777 == 0o2775
    assert (registry.root / "m/versions/1.json").stat().st_mode & 0o777 == 0o664


def test_a_file_system_without_hard_links_is_named(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(WhetError, match="has no hard links"):
        registry.add("m", RECORD)
    assert registry.names() == []


def test_where_the_registry_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WHET_MODELS", "~/models")
    assert Registry().root == Path.home() / "models"
    monkeypatch.delenv("WHET_MODELS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Registry().root == tmp_path / "whet/models"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # which the XDG specification says to ignore
    assert Registry().root == Path.home() / ".local/share/whet/models"
    monkeypatch.setenv("WHET_MODELS", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(WhetError, match="file: this is a file, and the registry"):
        Registry().add("m", RECORD)
    with pytest.raises(WhetError, match="file: not a folder"):
        Registry().names()


def test_versions_of_a_run_are_found(registry: Registry, tmp_path: Path) -> None:
    for folder in ("runs/a/exports/merged", "runs/ab/exports/merged", "elsewhere"):
        registry.add("m", RECORD | {"folder": str(tmp_path / folder)})
    assert versions_inside(tmp_path / "runs" / "a") == ["models:m@1"]


# Removing.


def test_removing_needs_a_yes_and_no_alias(whet: Any, registry: Registry, export: Path) -> None:
    assert whet("models", "add", "m", export).code == 0
    assert whet("models", "add", "m", export).code == 0
    assert whet("models", "alias", "m@1", "production").code == 0
    ended = whet("models", "remove", "m@2")
    assert ended.code == 1
    assert "add --yes" in ended.err
    assert registry.versions("m") == [1, 2]
    ended = whet("models", "remove", "m@1", "--yes")
    assert ended.code == 1
    assert "m@1 is production. Move the alias first" in ended.err
    assert whet("models", "remove", "m@production", "--yes").code == 0
    assert registry.versions("m") == [1, 2]
    assert whet("models", "remove", "m", "--yes").code == 0
    assert registry.names() == []
    assert (export / "config.json").exists()
    assert whet("models", "list").code == 0


def test_the_verbs_load_no_torch(real_python: str, registry: Registry, export: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from whet.cli.app import app\n"
        f"for words in (['add', 'm', {str(export)!r}], ['list'], ['show', 'm'], ['alias', 'm', 'p'], "
        "['note', 'm', 'x'], ['remove', 'm@p', '-y']):\n"
        "    assert CliRunner().invoke(app, ['models', *words]).exit_code == 0, words\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
