"""The loss scale: falls at once, rises slowly, and stays 1 where nothing can overflow."""

from __future__ import annotations

from whet.training.precision import LossScaler


def test_an_overflow_halves_it_and_a_long_calm_doubles_it() -> None:
    scale = LossScaler.for_fp16()
    start = scale.value
    scale.update(overflowed=True)
    assert scale.value == start / 2
    for _ in range(1999):
        scale.update(overflowed=False)
    assert scale.value == start / 2
    scale.update(overflowed=False)
    assert scale.value == start
    for _ in range(1999):
        scale.update(overflowed=False)
    scale.update(overflowed=True)  # the calm is over and begins anew
    for _ in range(1999):
        scale.update(overflowed=False)
    assert scale.value == start / 2


def test_at_one_an_overflow_is_not_its_fault() -> None:
    scale = LossScaler.for_fp16()
    for _ in range(40):
        scale.update(overflowed=True)
    assert scale.value == 1
    assert not scale.can_shrink()


def test_other_precisions_have_none() -> None:
    scale = LossScaler()
    for overflowed in (True, False) * 3000:
        scale.update(overflowed)
    assert scale.value == 1
    assert not scale.can_shrink()


def test_it_continues_as_it_was() -> None:
    one, other = LossScaler.for_fp16(), LossScaler.for_fp16()
    one.update(overflowed=True)
    one.update(overflowed=False)
    other.restore({"value": one.value, "moves": True, "calm": one.calm})
    assert other == one
