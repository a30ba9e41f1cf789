"""The pages say what the code does: settings, commands, error messages, imported keys; and the site builds."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
import yaml

from docs_commands import DOCS, PAGES, ROOT, lines_of, phrases_of
from whet.cli.app import app
from whet.cli.launch_verb import parse_verb
from whet.config import Config, read_config
from whet.convert.configs.importer import KINDS, fill
from whet.convert.configs.read import read_tree as read_foreign_tree
from whet.core.config import apply_overrides, list_settings, read_tree, validate_config
from whet.core.errors import WhetError
from whet.core.yaml import parse_yaml
from whet.search.space import read_space


def _generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_config_is_current():
    generate = _generator()
    assert generate.PAGE.read_text() == generate.config_page(), "run `make docs`"


def test_every_setting_has_a_description():
    assert [setting.key for setting in list_settings(Config) if not setting.description.endswith(".")] == []


def test_every_recipe_is_valid():
    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        if "search" in recipe.stem:
            assert len(read_space(read_tree(Config, recipe)).parameters) in (2, 3)
        else:
            assert read_config(recipe).run.name == recipe.stem


@functools.cache
def readme_recipe() -> str:
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return recipe


def test_the_recipe_in_the_readme_is_valid(tmp_path):
    recipe = readme_recipe()
    assert len(recipe.splitlines()) == 10
    (tmp_path / "my.yaml").write_text(recipe)
    assert read_config(tmp_path / "my.yaml").train.epochs == 2


def test_links_between_the_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    proofs = re.findall(r"`(tests/[^`]+)`", (DOCS / "design.md").read_text())
    assert len(proofs) > 10
    assert [file for file in proofs if not (ROOT / file).is_file()] == []


# Commands


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Each `whet …` of a page, and whether it is a line of a code block, which a reader may copy."""
    yield from ((line.text, True) for line in lines_of(page))
    yield from ((text, False) for text in phrases_of(page))


@functools.cache
def root_command() -> Any:
    return typer.main.get_command(app)


@functools.cache
def setting_keys() -> set[str]:
    return {setting.key for setting in list_settings(Config)}


def check_command(text: str, is_line: bool) -> None:
    """Parse a command as the command line does and validate its settings. In prose, a command may be named without its
    arguments; its verb and options are checked."""
    words = shlex.split(text.replace("…", ""), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    if words[0].startswith("-"):  # an option of whet itself
        root_command().make_context("whet", words, resilient_parsing=True)
        return
    verb = root_command().commands[words[0]]
    if not is_line:
        while words[1:] and words[1] in getattr(verb, "commands", ()):
            words, verb = words[1:], verb.commands[words[1]]
        known = {option for each in verb.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        before = words[: words.index("--")] if "--" in words else words
        options = {word for word in before if word.startswith("--")}
        assert options <= known, f"`whet {text}` has unknown options: {options - known}"
        overrides = [word for word in before[1:] if re.match(r"[a-z_]+\.[a-z_.0-9]+=", word)]
    else:
        overrides = parse_verb(typer.Context(root_command()), verb, words).overrides
    follows = words[words.index("--") + 1 :] if "--" in words else []
    if follows and follows[0] in root_command().commands:
        check_command(shlex.join(follows), is_line)
    of_the_shell = {word.partition("=")[0] for word in overrides if "=$" in word}  # the value is a variable
    assert of_the_shell <= setting_keys()
    tree = parse_yaml(readme_recipe(), "my.yaml")
    if any(word.startswith("parallel.tensor=") for word in overrides):
        del tree.value["adapter"]  # which excludes it
    validate_config(Config, apply_overrides(Config, tree, [word for word in overrides if "=$" not in word]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_those_of_whet(page: Path) -> None:
    for text, is_line in commands(page):
        try:
            check_command(text, is_line)
        except (WhetError, KeyError, ValueError) as error:
            pytest.fail(f"{page.name}: whet {text}: {error!r}")


def test_wrong_commands_are_found() -> None:
    check_command("train my.yaml train.epochs=3 --until 5", True)
    check_command("launch --on slurm -- eval runs/my --tasks my.jsonl", True)
    for text in (
        "train my.yaml train.epoch=3",
        "train my.yaml --untill 5",
        "launch --on slurm -- eval --task x",
        "eval",
    ):
        with pytest.raises(WhetError):
            check_command(text, True)
    with pytest.raises(AssertionError):
        check_command("train --untill", False)
    with pytest.raises(KeyError):
        check_command("trian my.yaml", False)
    lines = [text for page in PAGES for text, is_line in commands(page) if is_line]
    assert len(lines) > 200


def test_the_verbs_of_the_pages_are_all_there() -> None:
    """Every verb of whet is a line of a code block somewhere."""
    shown = {text.split()[0] for page in PAGES for text, is_line in commands(page) if is_line}
    assert set(root_command().commands) - shown == set()


# Error messages


def test_the_messages_under_troubleshooting_are_those_of_the_code() -> None:
    # strings that are concatenated over several lines become one
    joint = re.compile(r"""["'][ )]*\n\s*\+?\s*(?:rf|f|r)?["']""")
    source = "".join(joint.sub("", file.read_text()) for file in (ROOT / "src/whet").rglob("*.py"))
    messages = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(messages) >= 25
    gap = r"[^\n]{1,200}?"  # what a message is filled with
    missing = [
        each for each in messages if not re.search(gap.join(map(re.escape, map(str.strip, each.split("…")))), source)
    ]
    assert missing == []


# Other tools


def tool_rows() -> Iterator[tuple[str, list[str], list[str]]]:
    """(importer, what stands in the other tool's file, settings) of each row under coming-from.md."""
    titles = {"TRL": "trl", "Axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "nanochat": "nanochat",
              "GPT-NeoX": "neox", "Determined": "determined"}  # fmt: skip
    sections = re.split(r"^## (.*)\n", (DOCS / "coming-from.md").read_text(), flags=re.MULTILINE)[1:]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        for row in re.findall(r"^\| (`.*) \|$", text, flags=re.MULTILINE):
            there, here = (re.findall(r"`([^`]*)`", cell) for cell in row.split(" | ")[:2])
            if title in titles:
                yield titles[title], there, here


def test_what_stands_in_another_tools_file_becomes_the_setting_beside_it(tmp_path: Path) -> None:
    rows = list(tool_rows())
    assert len(rows) > 80
    assert len({kind for kind, _, _ in rows}) == 6
    for number, (name, there, here) in enumerate(rows):
        kind, file = KINDS[name], tmp_path / f"{number}.{'sh' if name == 'nanochat' else 'yaml'}"
        file.write_text(f"python -m scripts.chat_sft {' '.join(there)}" if name == "nanochat" else "\n".join(there))
        draft = fill(kind, read_foreign_tree(file, (kind.command,) if kind.command else ()))
        for setting in here:
            ((key, value),) = parse_yaml(setting, "page").plain().items()
            assert draft.settings[key].plain() == value, f"{name}: {there} gives {draft.settings[key].plain()!r}"


# The site


def site_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def nav_pages(nav: Any) -> Iterator[str]:
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []:
        yield from [entry] if isinstance(entry, str) else nav_pages(entry)


def test_the_site_leads_to_every_page_and_loads_nothing_from_elsewhere() -> None:
    site = site_config()
    pages = list(nav_pages(site["nav"]))
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert site["theme"]["font"] is False
    for script in site["extra"]["polyfills"]:
        assert (DOCS / script).is_file()
    assert "http" not in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.slow
@pytest.mark.system("chromium", "chromium")
def test_the_site_has_valid_links_and_works_from_a_folder_without_a_network(tmp_path: Path) -> None:
    """Built in an environment of its own: the extra `docs` is enough. Opened in a browser, with its search."""
    from playwright.sync_api import sync_playwright

    venv.create(tmp_path / "venv", with_pip=True)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *extra], check=True)
    build = [str(tmp_path / "venv/bin/mkdocs"), "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    requests: list[str] = []
    problems: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for name in nav_pages(site_config()["nav"]):
            page.goto((tmp_path / "site" / name).with_suffix(".html").as_uri())
        page.locator("input.md-search__input").click()
        page.keyboard.type("sentinel rendering")
        page.locator(".md-search-result__item", has_text="Masks and templates").first.wait_for()
        browser.close()
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert problems == []
