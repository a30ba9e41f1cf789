"""The precision policy of a run: dtype of the weights, dtype of the computation, autocast, loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from whet.config import Config
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.resources import multiplies_bf16
from whet.model.fp8.conversion import fp8_unsupported_reason, require_fp8
from whet.model.modules import KeepFloat64


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The dtypes of a run; `name` is a value of train.precision, never `auto`."""

    name: str
    weights: torch.dtype
    compute: torch.dtype

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """torch.autocast for mixed precision. In fp64 it disables the casts to fp32 inside the models."""
        if self.name in ("bf16", "fp16", "fp8"):
            return torch.autocast(device.type, self.compute)
        return KeepFloat64() if self.name == "fp64" else nullcontext()


def choose_precision(config: Config, device: torch.device, trains: bool = True) -> PrecisionPolicy:
    """`resolve_precision`, with a warning where that precision is slow."""
    precision = resolve_precision(config, device, trains)
    is_slow = precision.name == "fp16" or (precision.name == "bf16" and not multiplies_bf16())
    if is_slow and device.type == "cpu" and config.train.precision == precision.name:
        warn(f"train.precision: {precision.name} on a CPU is often many times slower than fp32")
    return precision


def resolve_precision(config: Config, device: torch.device, trains: bool = True) -> PrecisionPolicy:
    """The precision for `train.precision` and `model.dtype` on a device.

    Mixed precision keeps trained weights in fp32 and frozen weights in the compute dtype. Without training (`trains`
    is False), fp8 falls back to bf16 on a device without fp8: the weights are bf16 anyway.
    """
    name = _best_precision(device) if config.train.precision == "auto" else config.train.precision
    if name == "fp8" and trains:
        require_fp8(device, name)
    elif name == "fp8" and fp8_unsupported_reason(device):
        name = "bf16"
    return precision_policy(config, name)


def precision_policy(config: Config, name: str) -> PrecisionPolicy:
    """The dtypes for a precision, on whatever device; `name` is a value of train.precision, never `auto`."""
    compute = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16)
    if config.model.dtype == "bf16" and compute != torch.bfloat16:
        raise WhetError(
            f"model.dtype: bf16 weights are trained in bf16, and train.precision is {name} here. Leave model.dtype "
            "out, or set train.precision=bf16"
        )
    if config.model.dtype == "auto":
        weights = compute if config.adapter or compute.itemsize > 2 else torch.float32
    else:
        weights = {"fp32": torch.promote_types(torch.float32, compute), "bf16": torch.bfloat16}[config.model.dtype]
    return PrecisionPolicy(name, weights, compute)


def _best_precision(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


# Dynamic loss scaling for fp16, whose range ends at 6e-8 below and 65 504 above.
#
# The scale doubles after 2000 steps without overflow and halves with each overflow; the step that overflowed is
# skipped. In every other precision the scale is 1 and constant.

_INITIAL_SCALE, _MAX_SCALE, _GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000


@dataclass(slots=True)
class LossScaler:
    """The factor of the loss in the backward pass. The names are keys of a checkpoint's manifest."""

    value: float = 1.0
    moves: bool = False
    """Whether the scale is dynamic."""
    calm: int = 0
    """Steps since it last changed."""

    @classmethod
    def for_fp16(cls) -> LossScaler:
        return cls(_INITIAL_SCALE, moves=True)

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        self.value, self.calm = saved["value"], saved["calm"]

    def can_shrink(self) -> bool:
        """Whether a smaller scale could avoid an overflow. At 1 the model itself overflows."""
        return self.moves and self.value > 1

    def update(self, overflowed: bool) -> None:
        """After each step."""
        if not self.moves:
            return
        if overflowed:
            self.value, self.calm = max(1.0, self.value / 2), 0
            return
        self.calm += 1
        if self.calm == _GROWTH_INTERVAL:
            self.value, self.calm = min(_MAX_SCALE, self.value * 2), 0
