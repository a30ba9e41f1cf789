"""Arithmetic in honest double precision, for proofs.

Models of transformers convert to fp32 in places (norms, rotary positions, softmax), whatever type they are in. In an
fp64 model that rounds: two layouts that differ by 1e-16 can come out 1e-7 apart where a value falls on the other side
of a rounding border (seen: losses 4e-9 apart after six steps). Inside this context such conversions do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax)
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class HonestDouble(TorchFunctionMode):
    """fp64 tensors stay fp64 when a model asks for fp32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.float) and args[0].dtype == torch.float64:
            asked = [*args[1:], *kwargs.values()] if func is Tensor.to else [torch.float32]
            if torch.float32 in [value for value in asked if isinstance(value, torch.dtype)]:
                return args[0]
        if func in _SOFTMAX and args[0].dtype == torch.float64 and kwargs.get("dtype") == torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func in _MATMUL and args[0].dtype == torch.float64 and args[0].shape[-1] == 1:
            args = (args[0], args[1].double())  # the angle of one position by positions, which are counted in fp32
        return func(*args, **kwargs)
