"""What `make test` leaves out is there, and so is the quicker test that stands for it."""

from __future__ import annotations

import subprocess

import pytest

from slow_cases import SLOW_CASES, matches


def test_every_slow_case_and_the_test_that_stands_for_it_exist(real_python: str) -> None:
    files = sorted({f"tests/{case.partition('::')[0]}" for pair in SLOW_CASES.items() for case in pair})
    command = [real_python, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *files]
    lines = subprocess.run([*command, "-o", "addopts="], capture_output=True, text=True, check=True).stdout.splitlines()
    nodes = [line for line in lines if "::" in line]
    for case, quicker in SLOW_CASES.items():
        assert any(matches(case, node) for node in nodes), case
        stands = [node for node in nodes if matches(quicker, node)]
        assert any(not any(matches(slow, node) for slow in SLOW_CASES) for node in stands), quicker


@pytest.mark.parametrize(
    ("case", "node", "is_one"),
    [
        ("a.py::test_x", "tests/a.py::test_x[1]", True),
        ("a.py::test_x[1]", "tests/a.py::test_x[11]", False),
        ("a.py::test_x[*-off]", "tests/a.py::test_x[big-off]", True),
        ("a.py::test_x[*-off]", "tests/a.py::test_x[big-on]", False),
        ("a.py::test_x", "tests/a.py::test_xy", False),
    ],
)
def test_cases_match(case: str, node: str, is_one: bool) -> None:
    assert matches(case, node) is is_one
