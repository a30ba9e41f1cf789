"""The parts of a run, each made from its configuration: loader, model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from whet.config import Config
from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.data.loader import Loader
from whet.data.plan import Plan
from whet.data.store import Store
from whet.model import attention
from whet.model.load import load_model
from whet.model.lora import add_adapter
from whet.model.precision import HonestDouble


class VocabularyError(WhetError):
    """The tokenizer is not this model's."""


def make_loader(config: Config, store: Store, plan: Plan, ranks: Ranks) -> Loader:
    """This rank's share of a plan; rows are padded to a constant length where kernels are compiled for it."""
    padded = config.row_length if ranks.device.type == "cuda" else None
    return Loader(store, plan, config.train.micro_rows, ranks.rank, ranks.world, padded)


def be_deterministic(config: Config) -> None:
    """Where the configuration asks for it, the same numbers every time."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses, or varies
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """In which numbers a run computes."""

    name: str
    weights: torch.dtype
    compute: torch.dtype

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Mixed precision where weights and arithmetic differ; fp64 without the models' own excursions to fp32."""
        if self.name in ("bf16", "fp16"):
            return torch.autocast(device.type, self.compute)
        return HonestDouble() if self.name == "fp64" else nullcontext()


def choose_arithmetic(config: Config, device: torch.device) -> Arithmetic:
    """Mixed precision keeps trained weights in fp32 and frozen ones in the type that is computed in."""
    name = config.train.precision
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    compute = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if config.model.dtype == "bf16" and name != "bf16":
        raise WhetError(
            f"model.dtype: bf16 weights are trained in bf16, and train.precision is {name} here. Leave model.dtype "
            "out, or set train.precision=bf16"
        )
    if config.model.dtype == "auto":
        weights = compute if config.adapter or compute.itemsize > 2 else torch.float32
    else:
        weights = {"fp32": torch.promote_types(torch.float32, compute), "bf16": torch.bfloat16}[config.model.dtype]
    return Arithmetic(name, weights, compute)


def build_model(config: Config, arithmetic: Arithmetic, device: torch.device, vocabulary: int) -> nn.Module:
    """The model with its adapters on its device, attending by documents."""
    model = load_model(config.model, arithmetic.weights)
    room = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > room:
        raise VocabularyError(
            f"model.path: {config.model.path}: the tokenizer knows {vocabulary:,} tokens and the model only {room:,}. "
            "They do not belong together: use the tokenizer that came with the model"
        )
    attention.install(model, attention.choose(config.model.attention, device, arithmetic.compute))
    if config.adapter is not None:
        model = add_adapter(model, config.adapter, config.run.seed)
    return model.to(device)
