"""What `make test` leaves out is there, and so is the quicker test that stands for it."""

from __future__ import annotations

import pytest

from slow_cases import SLOW_CASES, matches


def test_every_slow_case_and_the_test_that_stands_for_it_exist(collected: list[str]) -> None:
    files = {node.split("::")[0].removeprefix("tests/") for node in collected}
    for case, quicker in SLOW_CASES.items():
        if {case.split("::")[0], quicker.split("::")[0]} <= files:  # a part of the tests may be run
            assert any(matches(case, node) for node in collected), case
            stands = [node for node in collected if matches(quicker, node)]
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
