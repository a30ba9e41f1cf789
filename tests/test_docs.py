"""The pages that are made from the code are what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from whet.config import Config, read_config
from whet.core.config import list_settings, read_tree
from whet.search.space import read_space

ROOT = Path(__file__).parents[1]


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
        if recipe.stem == "search-tiny":
            assert len(read_space(read_tree(Config, recipe)).parameters) == 3
        else:
            assert read_config(recipe).run.name == recipe.stem


def test_the_recipe_in_the_readme_is_valid(tmp_path):
    text = (ROOT / "README.md").read_text()
    (recipe,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(recipe.splitlines()) == 10
    (tmp_path / "my.yaml").write_text(recipe)
    assert read_config(tmp_path / "my.yaml").train.epochs == 2


def test_links_between_the_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
