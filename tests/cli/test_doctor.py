"""`whet doctor` says what there is and how to get the rest."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.preflight import doctor

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_it_names_device_back_ends_and_what_is_missing(whet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor._EXTRAS, "no_such_module", ("data", "something new"))
    ended = whet("doctor", "--json")
    assert ended.code == 0, ended.err
    facts = {fact["subject"]: fact for fact in json.loads(ended.out)["facts"]}
    assert {"whet", "libraries", "attention", "torch.compile", "host", "cache"} <= facts.keys()
    assert {"device", "cuda:0"} & facts.keys()
    assert facts["no_such_module"]["level"] == "missing"
    assert "pip install 'whet[data]'" in facts["no_such_module"]["text"]
    assert "no_such_module" in ended.err


def test_it_knows_every_extra() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert {extra for extra, _ in doctor._EXTRAS.values()} == extras.keys() - {"dev", "docs"}
    required = {
        re.split(r"[\[<>=;]", each)[0].replace("-", "_")
        for name in extras.keys() - {"dev", "docs"}
        for each in extras[name]
    }
    imported = {"flash_linear_attention": "fla", "nvidia_cutlass_dsl": "cutlass", "flash_attn_4": "cutlass"}
    assert {imported.get(name, name) for name in required} == doctor._EXTRAS.keys()


@pytest.mark.parametrize("is_faster", [False, True])
def test_a_cpu_that_multiplies_bf16_is_told_apart(is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "multiplies_bf16", lambda: is_faster)
    precision = next(fact for fact in doctor._back_ends(torch.device("cpu")) if fact.subject == "precision")
    assert ("train.precision=bf16" in precision.text) == is_faster
