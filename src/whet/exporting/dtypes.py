"""The dtypes of exports: their names in --dtype, and how far rounding to each may move weights and predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from whet.core.errors import WhetError


@dataclass(frozen=True, slots=True)
class ExportDtype:
    """A dtype by its name in --dtype, and how far rounding to it may move the predictions."""

    name: str
    torch_name: str
    bytes_per_weight: float
    max_logit_difference: float
    """Relative to the largest logit."""
    max_kl: float
    """Mean Kullback-Leibler divergence per position, in nats."""
    min_same_next_token: float
    """Fraction of positions."""
    rounding: float | None = None
    """For quantized types: at most this ‖rounded − W‖ ÷ ‖W‖."""
    usual_same_next_token: float = 0.0
    """For quantized types: the fraction that a model of a billion parameters or more usually reaches."""
    llama_ftype: int | None = None
    """llama.cpp's number of a type that its quantizer writes; None if whet does."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.torch_name)

    @property
    def uses_blocks_of_256(self) -> bool:
        """Whether it groups 256 weights, so that matrices with other rows get another type."""
        return self.llama_ftype is not None and self.name not in ("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4_moe")

    @property
    def is_quantized(self) -> bool:
        return self.rounding is not None


def _by_llama_cpp(name: str, ftype: int, bits: float, rounding: float, usual_same: float) -> ExportDtype:
    """A type that llama.cpp writes. The unquantized file is compared strictly before; how far the quantized one moves
    the predictions depends on the model, so it is reported and not judged."""
    return ExportDtype(name, "float32", bits / 8, math.inf, math.inf, 0.0, rounding, usual_same, ftype)


EXPORT_DTYPES = {
    dtype.name: dtype
    for dtype in (
        ExportDtype("f64", "float64", 8, 1e-4, 1e-6, 0.99),
        ExportDtype("f32", "float32", 4, 1e-3, 1e-5, 0.99),
        ExportDtype("bf16", "bfloat16", 2, 0.1, 0.05, 0.9),
        ExportDtype("f16", "float16", 2, 0.05, 0.02, 0.9),
        ExportDtype("q8_0", "float32", 34 / 32, math.inf, math.inf, 0.0, 2**-6, 0.97),  # reported, not judged, too
        _by_llama_cpp("q6_k", 18, 6.6, 0.05, 0.95),
        _by_llama_cpp("q5_k_m", 17, 5.7, 0.1, 0.93),
        _by_llama_cpp("q5_k_s", 16, 5.5, 0.1, 0.92),
        _by_llama_cpp("q5_1", 9, 6.0, 0.1, 0.92),
        _by_llama_cpp("q5_0", 8, 5.5, 0.1, 0.92),
        _by_llama_cpp("q4_k_m", 15, 4.9, 0.2, 0.88),
        _by_llama_cpp("q4_k_s", 14, 4.6, 0.2, 0.87),
        _by_llama_cpp("q4_1", 3, 5.0, 0.2, 0.85),
        _by_llama_cpp("q4_0", 2, 4.5, 0.2, 0.85),
        _by_llama_cpp("iq4_nl", 25, 4.5, 0.2, 0.87),
        _by_llama_cpp("iq4_xs", 30, 4.3, 0.2, 0.87),
        _by_llama_cpp("mxfp4_moe", 38, 4.5, 0.3, 0.85),
        _by_llama_cpp("q3_k_l", 13, 4.3, 0.4, 0.82),
        _by_llama_cpp("q3_k_m", 12, 3.9, 0.4, 0.8),
        _by_llama_cpp("q3_k_s", 11, 3.5, 0.4, 0.77),
        _by_llama_cpp("iq3_m", 27, 3.7, 0.4, 0.8),
        _by_llama_cpp("iq3_s", 26, 3.5, 0.4, 0.79),
        _by_llama_cpp("iq3_xs", 22, 3.3, 0.4, 0.78),
        _by_llama_cpp("iq3_xxs", 23, 3.1, 0.5, 0.75),
        _by_llama_cpp("q2_k", 10, 3.2, 0.6, 0.68),
        _by_llama_cpp("q2_k_s", 21, 2.8, 0.6, 0.65),
        _by_llama_cpp("iq2_m", 29, 2.7, 0.7, 0.68),
        _by_llama_cpp("iq2_s", 28, 2.5, 0.7, 0.65),
        _by_llama_cpp("iq2_xs", 20, 2.4, 0.7, 0.63),
        _by_llama_cpp("iq2_xxs", 19, 2.1, 0.8, 0.6),
        _by_llama_cpp("iq1_m", 31, 1.9, 0.9, 0.5),
        _by_llama_cpp("iq1_s", 24, 1.7, 0.9, 0.45),
    )
}
EXACT = "exact"
QUANTIZER_TYPES = tuple(name for name, dtype in EXPORT_DTYPES.items() if dtype.llama_ftype is not None)
"""What llama.cpp's quantizer offers, except types for models trained with ternary weights."""
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "fp16": "f16", "fp32": "f32", "fp64": "f64"}
"""As llama-quantize and train.precision have them."""
_DTYPES_OF_KIND = {
    "merged": ("f64", "f32", "bf16", "f16"),
    "gguf": ("f32", "bf16", "f16", "q8_0", *QUANTIZER_TYPES),
    "megatron": ("f32", "bf16", "f16"),
    "neox": ("f32", "bf16", "f16"),
    "nanochat": ("f32", "bf16"),
}
_NAME_OF_TORCH_DTYPE = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def dtype_name(requested: str) -> str:
    """The name of --dtype in small letters, without aliases."""
    return _ALIASES.get(requested.lower(), requested.lower())


def choose_dtype(kind: str, requested: str | None, compute: torch.dtype, weights: torch.dtype) -> ExportDtype:
    """The requested dtype, or by default the one that training computed in: a bf16 run with fp32 master weights exports
    bf16. `exact` is the dtype of the trained weights, and the default for nanochat, which trains on with them."""
    if kind == "adapter":
        if requested is not None:
            raise WhetError(
                f"--dtype: {requested}, but an adapter is exported in the dtype it was trained in. Leave --dtype out"
            )
        return export_dtype_of(compute)
    if requested is not None:
        requested = dtype_name(requested)
    supported = _DTYPES_OF_KIND[kind]
    if requested == EXACT or (requested is None and kind == "nanochat"):
        requested, compute = None, weights
    if requested is not None and requested not in supported:
        also = " (--to gguf has it)" if requested in _DTYPES_OF_KIND["gguf"] else ""
        raise WhetError(
            f"--dtype: {requested} does not exist for --to {kind}{also}. Use one of {', '.join((*supported, EXACT))}"
        )
    name = requested or _NAME_OF_TORCH_DTYPE[compute]
    return EXPORT_DTYPES[name if name in supported else "f32"]


def export_dtype_of(dtype: torch.dtype) -> ExportDtype:
    """The tolerances of bf16 for dtypes without a name, such as fp8."""
    return EXPORT_DTYPES[_NAME_OF_TORCH_DTYPE.get(dtype, "bf16")]


_SMALL_MODELS_LOSE = 0.06
"""Of the same next tokens, compared with large models: SmolLM2-135M was seen with 94 % in q8_0, 84 % in q4_k_m."""


def assess_quantization(dtype: ExportDtype, same_next_token: float, kl: float) -> str:
    """What a user should make of a quantized model's predictions."""
    found = f"{same_next_token:.0%} same next token"
    if same_next_token >= dtype.usual_same_next_token or kl < 1e-3:
        return f"{found}: as expected of {dtype.name}"
    larger = list(EXPORT_DTYPES)[3 : list(EXPORT_DTYPES).index(dtype.name)]
    better = "q8_0" if "q8_0" in larger else "f16"
    if same_next_token >= dtype.usual_same_next_token - _SMALL_MODELS_LOSE:
        return f"{found}: normal for a small model in {dtype.name}; {better} keeps more"
    expected = f"large models usually reach {dtype.usual_same_next_token:.0%} in {dtype.name}"
    if same_next_token < 0.5:
        return f"{found}: little is left of the model; {expected}. Use a larger type, such as {better}"
    return f"{found}: below the usual, as small models often are; {expected}. {better} keeps more"
