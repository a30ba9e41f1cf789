"""Products with frozen matrices, in whatever they are kept, and with what adapters add to them.

Shape letters: T tokens, I features in, O features out, R rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from whet.model.fp8_linear import multiply
from whet.model.fp8_round import BACKWARD, FORWARD, largest_of, rounded_now, rounded_turned, scale_for
from whet.model.frozen_weight import is_eight_bit, matrix_from

PIECE = 4096
"""Tokens that are multiplied with a large matrix at a time: with 16 384 tokens and a matrix as large as those of an MLP
it is a few hundredths faster so, because more of what is read stays in the cache."""


class Frozen:
    """A frozen matrix [O, I], as high and wide as the adapter beside it says; made from its parts when it is needed."""

    def __init__(self, parts: Sequence[Tensor], a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
        self._parts = parts
        self._shape = len(b), a.shape[1]
        self._dtype = dtype

    @property
    def is_eight_bit(self) -> bool:
        return is_eight_bit(self._parts)

    @property
    def scale(self) -> Tensor:
        return self._parts[1]

    @functools.cached_property
    def matrix(self) -> Tensor:
        return matrix_from(self._parts, *self._shape, self._dtype)

    @functools.cached_property
    def for_inputs(self) -> Tensor:
        """[I, O] in 8 bits, column by column."""
        return rounded_now(self._parts[0], self.scale, FORWARD).t()

    @functools.cached_property
    def for_gradients(self) -> Tensor:
        """[O, I] in 8 bits, column by column."""
        return rounded_turned(self._parts[0], self.scale, FORWARD).t()


def split(parts: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """The parts of each of several matrices."""
    ends = list(itertools.accumulate(sizes))
    return [list(parts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


class Operand:
    """An input, to meet frozen matrices. For those that are multiplied in 8 bits it is rounded once."""

    is_gradient = False

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    @functools.cached_property
    def eight_bits(self) -> tuple[Tensor, Tensor]:
        """In 8 bits, and its scale."""
        kind = BACKWARD if self.is_gradient else FORWARD
        scale = scale_for(largest_of(self.matrix), kind)
        return rounded_now(self.matrix, scale, kind), scale


class Gradient(Operand):
    """The gradient of an output, to meet the same matrices from the other side."""

    is_gradient = True


Term = tuple[Operand, Frozen]
"""x [T, I] · Wᵀ, or of a gradient d [T, O] · W."""


def total(
    terms: Iterable[Term], thin: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None, *,
    piece: int | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum of `terms`, of the product of two `thin` matrices [T, R] and [R, …] and of a bias; by so many tokens at a
    time, and into `out`, if given.

    A product can be added to what is there at no further pass over memory, so the thin one is made first; but not one
    in 8 bits, so those come before it. What is made of one term is gone before the next one's is made, if nobody else
    holds it.
    """
    y, later = None, []
    for x, frozen in terms:
        if frozen.is_eight_bit:
            y = _in_eight_bits(x, frozen, out) if y is None else y.add_(_in_eight_bits(x, frozen))
        else:
            later.append((x, frozen))
    if y is not None and bias is not None:
        y += bias
    if thin is not None:
        y = _plus(y, *thin, bias, out)
    while later:
        x, frozen = later.pop(0)
        y = _plus(y, x.matrix, frozen.matrix if x.is_gradient else frozen.matrix.T, bias, out, piece)
    assert y is not None
    return y


def _plus(
    y: Tensor | None, left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor | None, piece: int | None = None
) -> Tensor:
    """y + left · right in y's place; if there is none yet, bias + left · right."""
    if y is None:
        if bias is None:
            return torch.mm(left, right, out=out)
        return torch.addmm(bias.to(left.dtype), left, right, out=out)
    size = piece or max(1, len(left))
    for part, of_left in zip(y.split(size), left.split(size), strict=True):
        part.addmm_(of_left, right)
    return y


def _in_eight_bits(x: Operand, frozen: Frozen, out: Tensor | None = None) -> Tensor:
    """By the rules of `fp8_linear`; elsewhere than on CUDA emulated."""
    left, scale = x.eight_bits
    right = frozen.for_gradients if x.is_gradient else frozen.for_inputs
    return multiply(
        left, right, scale, frozen.scale, x.matrix.dtype, emulate=not left.is_cuda, fast=not x.is_gradient, out=out
    )
