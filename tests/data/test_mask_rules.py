"""GPT-NeoX's mask rules: its documentation's own examples, LUMI's turns, and a naive walk along the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.config import MaskRules
from whet.data.read.mask_rules import describe_mask_rules, loss_mask_from_rules


def loss(ids: list[int], **rules: Any) -> list[int]:
    found = loss_mask_from_rules(np.array(ids, dtype=np.int32), MaskRules(**rules))
    assert found.dtype == np.uint8
    return found.tolist()


def test_the_examples_in_neox_s_own_words() -> None:
    """It writes masks of outputs, 1 for masked, and leaves the first token out: outputs are data[1:]."""
    data = [9, 5, 2, 4, 1, 3, 1, 2, 3]
    assert [1 - bit for bit in loss(data, pairs=[(2, 3)])[1:]] == [0, 1, 1, 1, 1, 0, 1, 1]
    assert [1 - bit for bit in loss(data, individual=[2, 3, 5])[1:]] == [1, 1, 0, 0, 1, 0, 1, 1]
    data = [1, 2, 3, 1, 4, 5, 6, 1, 1, 1, 1]
    assert [1 - bit for bit in loss(data, alternating=[1])[1:]] == [0, 0, 0, 0, 0, 0, 1, 0, 1, 0]


def test_lumi_s_turns_by_hand() -> None:
    ids = [7, 50, 51, 7, 8, 60, 61, 8, 7, 52, 7, 8, 62, 8, 3]
    assert loss(ids, pairs=[(7, 7)]) == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    # whet's own view: the opening 8 is given, the closing one and the end of document are learned
    assert loss(ids, pairs=[(7, 7)], alternating=[8]) == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("ids", "rules", "expected"),
    [
        ([5, 3, 6], {"eod": 3}, [0, 1, 0]),  # not the end itself: what is predicted from it
        ([5, 2, 4, 2, 4, 3, 4, 3, 4], {"pairs": [(2, 3)]}, [0, 0, 0, 0, 0, 0, 0, 0, 1]),  # nested: until as many closed
        ([5, 7, 4, 4], {"pairs": [(7, 7)]}, [0, 0, 0, 0]),  # never closed: to the end
        ([5, 3, 2, 4], {"pairs": [(2, 3)]}, [0, 1, 1, 1]),  # a closing too many swallows the next opening
        ([5, 7, 7, 4], {"pairs": [(7, 7)]}, [0, 0, 0, 1]),
        ([5, 6], {}, [0, 1]),
        ([], {"pairs": [(7, 7)], "eod": 3, "individual": [1], "alternating": [2]}, []),
    ],
)
def test_edges(ids: list[int], rules: dict[str, Any], expected: list[int]) -> None:
    assert loss(ids, **rules) == expected


def walk(ids: list[int], rules: MaskRules) -> list[int]:
    """Token by token, as the rules are described."""
    learned = []
    depth = [0] * len(rules.pairs or [])
    seen: dict[int, int] = {}
    for place, token in enumerate(ids):
        ok = place > 0 and token not in (rules.individual or [])
        for number, (opening, closing) in enumerate(rules.pairs or []):
            was = depth[number] > 0
            if opening == closing:
                depth[number] = (not was) if token == opening else was
            else:
                depth[number] += (token == opening) - (token == closing)
            ok = ok and not was and depth[number] <= 0
        seen[token] = seen.get(token, 0) + 1
        if token in (rules.alternating or []) and seen[token] % 2:
            ok = False
        if place and ids[place - 1] == rules.eod:
            ok = False
        learned.append(int(ok))
    return learned


TOKEN = st.integers(1, 5)


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(TOKEN, max_size=20), pairs=st.none() | st.lists(st.tuples(TOKEN, TOKEN), max_size=2),
    individual=st.none() | st.lists(TOKEN, max_size=2), alternating=st.none() | st.lists(TOKEN, max_size=2),
    eod=st.none() | TOKEN,
)  # fmt: skip
def test_the_arrays_agree_with_a_walk(
    ids: list[int], pairs: Any, individual: list[int] | None, alternating: list[int] | None, eod: int | None
) -> None:
    rules = MaskRules(pairs=pairs, individual=individual, alternating=alternating, eod=eod)
    assert loss_mask_from_rules(np.array(ids, dtype=np.int32), rules).tolist() == walk(ids, rules)


def test_what_is_learned_is_said() -> None:
    assert "every token is learned" in describe_mask_rules(None)
    assert describe_mask_rules(MaskRules()) == describe_mask_rules(None)
    assert describe_mask_rules(MaskRules(pairs=[(7, 7)], eod=3)) == "learned is what the mask rules leave: pairs, eod"
