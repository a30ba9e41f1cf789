"""The script that takes tiny models of several families from check to export."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from model_families import FAMILIES, commands, write_recipe


@pytest.mark.slow
def test_every_family_goes_from_check_to_export(tmp_path: Path) -> None:
    script = Path(__file__).with_name("model_families.py")
    done = subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == sum(len(commands(tmp_path, family)) for family in FAMILIES)


def test_a_base_model_without_a_template_is_ready_to_train(whet: object, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "gpt_neox")
    checked = whet(*commands(recipe, "gpt_neox")[0])  # type: ignore[operator]
    assert checked.code == 0, checked.out + checked.err
