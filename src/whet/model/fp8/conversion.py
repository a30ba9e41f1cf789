"""Conversion of a model to fp8 training: which linear layers and gated MLPs multiply in fp8, on which devices.

Scaling is tensorwise: one scale for a whole matrix. See `whet.model.fp8.linear` for the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from whet.compat.torch_private import set_module_class
from whet.core.errors import WhetError
from whet.model.fp8 import casting
from whet.model.fp8.casting import (
    E4M3,
    E5M2,
    cast_to_fp8,
    cast_to_fp8_both,
    cast_to_fp8_transposed,
    compute_scale,
    scale_from_amax,
)
from whet.model.fp8.linear import FP8_ALIGNMENT, FP8Linear, apply_padded, scaled_matmul
from whet.model.lora.swiglu import silu_mul, silu_mul_backward
from whet.model.modules import GATED_MLP_LAYERS, add_mixin, is_gated_mlp

_BREAK_EVEN_WIDTH = 800
_ADAPTER_NAME = re.compile(r"\.lora_[A-Za-z]+(\.|$)")
_ROUTER_NAME = re.compile(r"\.(gate|router|wg|shared_expert_gate)(\.|$)")
"""Routers are small, and rounding there would send tokens to other experts."""


class FP8Error(WhetError):
    """This model or device does not support fp8 training."""


def is_faster_in_fp8(out_features: int, in_features: int) -> bool:
    """Whether a weight is large enough for fp8 to be faster than bf16, casts included.

    Per token, the product costs out · in and the casts cost out + in; less where layers share their input, as q, k and
    v do.
    """
    return out_features * in_features >= _BREAK_EVEN_WIDTH * (out_features + in_features)


def convert_to_fp8_(
    language_model: nn.Module, *, convert_if: Callable[[int, int], bool] = is_faster_in_fp8, emulate: bool = False
) -> list[str]:
    """Convert the decoder's linear layers to fp8 where `convert_if(out_features, in_features)`; returns their names.

    Embedding, head, norms, routers, adapter matrices and fused experts stay as they are. Weights keep their dtypes and
    names. `emulate` computes the same roundings on devices without fp8 matrix products.
    """
    converted = {
        name: module
        for name, module in _convertible_linears(language_model)
        if convert_if(module.out_features, module.in_features)
    }
    if not converted:
        raise FP8Error(
            "train.precision: no layer of this model would be faster in fp8: they are too small, or their sizes are "
            f"not multiples of {FP8_ALIGNMENT}. Set train.precision=bf16"
        )
    for module in converted.values():
        set_module_class(module, FP8Linear)  # the same object: adapters around it, hooks and names stay valid
        module.emulate = emulate  # type: ignore[assignment]
    for mlp in language_model.modules():
        if _is_fp8_mlp(mlp):
            add_mixin(mlp, FP8MLP)
            mlp.emulate = emulate  # type: ignore[assignment]
    return list(converted)


def count_fp8_layers(model: nn.Module) -> int:
    """The number of layers that multiply in fp8."""
    return sum(isinstance(module, FP8Linear) for module in model.modules())


def require_fp8(device: torch.device, precision: str) -> None:
    """Raise FP8Error if the device does not support fp8."""
    reason = fp8_unsupported_reason(device)
    if reason is not None:
        raise FP8Error(f"train.precision: {precision} is not supported: {reason}. Set train.precision=bf16")


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """Why the device does not support fp8; None if it does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"fp8 needs an NVIDIA GPU, and this device is {'ROCm' if device.type == 'cuda' else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, and fp8 needs 8.9"
    return None


def _convertible_linears(language_model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside ModuleLists, that is of the decoder layers, with sizes that fp8 can multiply."""
    lists = [name for name, module in language_model.named_modules() if isinstance(module, nn.ModuleList)]
    head = language_model.get_output_embeddings()  # type: ignore[operator]
    for name, module in language_model.named_modules():
        if type(module) is not nn.Linear or module is head:  # quantised layers inherit from Linear
            continue
        if (
            not any(name.startswith(f"{held}.") for held in lists)
            or _ADAPTER_NAME.search(name)
            or _ROUTER_NAME.search(name)
        ):
            continue
        if module.in_features % FP8_ALIGNMENT == 0 and module.out_features % FP8_ALIGNMENT == 0:
            yield name, module


def _is_fp8_mlp(module: nn.Module) -> bool:
    """Whether it is a gated MLP whose three layers are all FP8Linear without bias."""
    layers = [getattr(module, name, None) for name in GATED_MLP_LAYERS]
    ready = all(isinstance(layer, FP8Linear) and layer.bias is None for layer in layers)
    return ready and is_gated_mlp(module)


# A gated MLP whose three products run in fp8 during training; the intermediate activations are cast on the fly.
#
# Shape letters: T tokens, E hidden size, F intermediate size. The rules are those of `whet.model.fp8.linear`.

# The activation h = silu(gate) · up and its gradients, cast to fp8 without being written in 16 bits
#
# Values are rounded to 16 bits first, so that kernels and torch agree. All inputs are contiguous [T, F].

CastGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("whet::silu_mul_amax", mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor")
def silu_mul_amax(gate: Tensor, up: Tensor) -> Tensor:
    """The amax of h, in fp32."""
    kernels = _silu_mul_kernels_for(gate)
    return kernels.silu_mul_amax(gate, up).amax() if kernels else silu_mul(gate, up).abs().amax().float()


@silu_mul_amax.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=gate.device)


@torch.library.custom_op(
    "whet::silu_mul_cast", mutates_args=(), schema="(Tensor gate, Tensor up, Tensor scale) -> Tensor"
)
def silu_mul_cast(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """h [T, F] in fp8."""
    kernels = _silu_mul_kernels_for(gate)
    if kernels is None:
        return cast_to_fp8(silu_mul(gate, up), scale, E4M3)
    h_tf = torch.empty(gate.shape, dtype=E4M3, device=gate.device)
    kernels.silu_mul_cast(gate, up, scale, h_tf)
    return h_tf


@silu_mul_cast.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=E4M3, device=gate.device)


@torch.library.custom_op(
    "whet::silu_mul_backward_amax", mutates_args=(), schema="(Tensor d_h, Tensor gate, Tensor up) -> Tensor"
)
def silu_mul_backward_amax(d_h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """[2] the amax of d_gate and of d_up, in fp32."""
    kernels = _silu_mul_kernels_for(gate)
    if kernels is not None:
        return kernels.silu_mul_backward_amax(d_h, gate, up).amax(1)
    return torch.stack([each.abs().amax() for each in silu_mul_backward(d_h, gate, up)[:2]]).float()


@silu_mul_backward_amax.register_fake
def _(d_h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.float32, device=gate.device)


@torch.library.custom_op(
    "whet::silu_mul_backward_cast",
    mutates_args=(),
    schema="(Tensor d_h, Tensor gate, Tensor up, Tensor h_scale, Tensor gate_scale, Tensor up_scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def silu_mul_backward_cast(
    d_h: Tensor, gate: Tensor, up: Tensor, h_scale: Tensor, gate_scale: Tensor, up_scale: Tensor
) -> CastGradients:
    """In 8 bits: d gate [T, F] and [F, T], d up likewise, and h [F, T]."""
    kernels = _silu_mul_kernels_for(gate)
    if kernels is not None:
        found = _empty_cast_gradients(gate)
        kernels.silu_mul_backward_cast(d_h, gate, up, h_scale, gate_scale, up_scale, *found)
        return found
    d_gate, d_up, h = silu_mul_backward(d_h, gate, up)
    d_gate, d_up, h = (
        cast_to_fp8(d_gate, gate_scale, E5M2), cast_to_fp8(d_up, up_scale, E5M2), cast_to_fp8(h, h_scale, E4M3)
    )  # fmt: skip
    return d_gate, d_gate.t().contiguous(), d_up, d_up.t().contiguous(), h.t().contiguous()


@silu_mul_backward_cast.register_fake
def _(d_h: Tensor, gate: Tensor, up: Tensor, h_scale: Tensor, gate_scale: Tensor, up_scale: Tensor) -> CastGradients:
    return _empty_cast_gradients(gate)


def _silu_mul_kernels_for(gate: Tensor) -> Any:
    """Of 16-bit numbers only: from fp32, triton 3.6 writes what is both straight and turned wrong."""
    return casting.triton_kernels_for(gate) if gate.dtype.itemsize == 2 else None


def _empty_cast_gradients(gate: Tensor) -> CastGradients:
    tokens, width = gate.shape

    def new(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=gate.device)

    return (
        new(tokens, width, E5M2), new(width, tokens, E5M2), new(tokens, width, E5M2),
        new(width, tokens, E5M2), new(width, tokens, E4M3),
    )  # fmt: skip


# The MLP: y = down(silu(gate) · up)
#
# The only [T, F] matrices in 16 bits are outputs of products: gate and up, which are saved, and d_h. For the others a
# first pass computes the amax and a second one writes the fp8 operands of the next products.


class FP8MLP(nn.Module):
    """Mixin for a gated MLP without biases; in eval mode the module's own forward runs."""

    gate_proj: FP8Linear
    up_proj: FP8Linear
    down_proj: FP8Linear
    emulate: bool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.training or args or kwargs:
            return super().forward(x, *args, **kwargs)
        gate, up, down = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return apply_padded(lambda rows: _FP8MLPFunction.apply(rows, gate, up, down, self.emulate), x)


@torch.compiler.allow_in_graph
class _FP8MLPFunction(torch.autograd.Function):
    """Saves x, gate, up and the scales. torch.compile sees inside, except for the activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, emulate: bool) -> Tensor:
        weights = gate, up, down
        scales = [compute_scale(matrix, E4M3) for matrix in (x, *weights)]
        gate_8, up_8, down_8 = (cast_to_fp8(w, s, E4M3).t() for w, s in zip(weights, scales[1:], strict=True))
        x_te = cast_to_fp8(x, scales[0], E4M3)
        gate_tf = scaled_matmul(x_te, gate_8, scales[0], scales[1], x.dtype, emulate, fast=True)
        up_tf = scaled_matmul(x_te, up_8, scales[0], scales[2], x.dtype, emulate, fast=True)
        h_scale = scale_from_amax(silu_mul_amax(gate_tf, up_tf), E4M3)
        ctx.save_for_backward(x, *weights, gate_tf, up_tf, *scales, h_scale)
        ctx.emulate = emulate
        h_tf = silu_mul_cast(gate_tf, up_tf, h_scale)
        return scaled_matmul(h_tf, down_8, h_scale, scales[3], x.dtype, emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gate_tf, up_tf, x_scale, gate_scale, up_scale, down_scale, h_scale = ctx.saved_tensors
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        dtype, emulate = d_y.dtype, ctx.emulate
        d_scale = compute_scale(d_y, E5M2)
        d_te, d_et = cast_to_fp8_both(d_y, d_scale, E5M2)
        down_8 = cast_to_fp8_transposed(down, down_scale, E4M3).t()
        d_h = scaled_matmul(d_te, down_8, d_scale, down_scale, dtype, emulate)  # [T, E] · [E, F]
        amax = silu_mul_backward_amax(d_h, gate_tf, up_tf)
        dg_scale, du_scale = scale_from_amax(amax[0], E5M2), scale_from_amax(amax[1], E5M2)
        dg_tf, dg_ft, du_tf, du_ft, h_ft = silu_mul_backward_cast(d_h, gate_tf, up_tf, h_scale, dg_scale, du_scale)
        d_x = d_gate = d_up = d_down = None
        if needs_down:  # [E, T] · [T, F]
            d_down = scaled_matmul(d_et, h_ft.t(), d_scale, h_scale, dtype, emulate)
        if needs_gate or needs_up:  # [F, T] · [T, E]
            x_8 = cast_to_fp8_transposed(x, x_scale, E4M3).t()
            d_gate = scaled_matmul(dg_ft, x_8, dg_scale, x_scale, dtype, emulate) if needs_gate else None
            d_up = scaled_matmul(du_ft, x_8, du_scale, x_scale, dtype, emulate) if needs_up else None
        if needs_x:  # [T, F] · [F, E]
            gate_8, up_8 = (
                cast_to_fp8_transposed(gate, gate_scale, E4M3).t(),
                cast_to_fp8_transposed(up, up_scale, E4M3).t(),
            )
            d_x = scaled_matmul(dg_tf, gate_8, dg_scale, gate_scale, dtype, emulate)
            d_x = d_x + scaled_matmul(du_tf, up_8, du_scale, up_scale, dtype, emulate)
        return d_x, d_gate, d_up, d_down, None
