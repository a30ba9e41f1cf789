"""The parts of a run, each made from its configuration: loader, model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from whet.config import Config
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.data.loader import Loader
from whet.data.plan import Plan
from whet.data.store import Store
from whet.model import attention
from whet.model.added_tokens import trained_tokens
from whet.model.fp8 import Recipe, cannot_fp8, require_fp8, to_fp8_
from whet.model.fused_lora import fuse_lora_
from whet.model.hollow import Source, is_hollow, place_
from whet.model.load import load_model
from whet.model.lora import add_adapter, language_model
from whet.model.loss import LossModel
from whet.model.precision import HonestDouble
from whet.model.probe import PackingError, probe, probe_alone
from whet.model.quantize import quantize_
from whet.model.shapes import is_random
from whet.parallel.mesh import Mesh
from whet.parallel.narrow import narrow
from whet.parallel.shard import give_back, shard_
from whet.parallel.tensor import try_out

_LENGTHS = 4
_EIGHT_BITS: dict[str, Recipe] = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}


class VocabularyError(WhetError):
    """The tokenizer is not this model's."""


def make_loader(config: Config, store: Store, plan: Plan, ranks: Ranks) -> Loader:
    """This rank's share of a plan; rows are padded to a constant length where kernels are compiled for it.

    Packed rows are full, and one length is enough; single conversations get the smallest of a few.
    """
    padded = config.row_length if ranks.device.type == "cuda" or config.model.compile is True else None
    lengths = _LENGTHS if config.data.packing == "none" else 1
    return Loader(
        store, plan, config.train.micro_rows, ranks.team, ranks.teams, padded, lengths, ranks.device,
        (ranks.slice, ranks.slices),
    )  # fmt: skip


def be_deterministic(config: Config) -> None:
    """Where the configuration asks for it, the same numbers every time."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses, or varies
        torch.use_deterministic_algorithms(True)


def most_micro_batches(config: Config, plan: Plan, ranks: Ranks) -> int:
    """In a step of one process."""
    most_rows = int(np.diff(plan.steps).max(initial=0))
    return -(-most_rows // (ranks.teams * config.train.micro_rows))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """In which numbers a run computes."""

    name: str
    weights: torch.dtype
    compute: torch.dtype

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Mixed precision where weights and arithmetic differ; fp64 without the models' own excursions to fp32."""
        if self.name in ("bf16", "fp16", *_EIGHT_BITS):
            return torch.autocast(device.type, self.compute)
        return HonestDouble() if self.name == "fp64" else nullcontext()


def choose_arithmetic(config: Config, device: torch.device, trains: bool = True) -> Arithmetic:
    """What `arithmetic_of` says, with a word to the user where it is slow."""
    arithmetic = arithmetic_of(config, device, trains)
    if arithmetic.name in ("bf16", "fp16") and device.type == "cpu" and config.train.precision == arithmetic.name:
        warn(f"train.precision: {arithmetic.name} on a CPU is often many times slower than fp32")
    return arithmetic


def arithmetic_of(config: Config, device: torch.device, trains: bool = True) -> Arithmetic:
    """Mixed precision keeps trained weights in fp32 and frozen ones in the type that is computed in.

    Whoever does not train can use what was trained in 8 bits on any device: then it is bf16, as its weights are.
    """
    name = _best_precision(device) if config.train.precision == "auto" else config.train.precision
    if name in _EIGHT_BITS and trains:
        require_fp8(device, name)
    elif name in _EIGHT_BITS and cannot_fp8(device):
        name = "bf16"
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
    return Arithmetic(name, weights, compute)


def make_root(
    config: Config, model: nn.Module, arithmetic: Arithmetic, device: torch.device, tokens: int, longest: int
) -> LossModel:
    """The model with its loss, after a proof that packed conversations of up to `longest` tokens do not see each other
    in it; `tokens` is the size of the vocabulary.

    A model in which they would is trained unpacked, if the configuration puts one conversation into each batch.
    8 bits come after the proof: with one scale for all tokens of a batch, conversations change each other's rounding.
    """
    root = LossModel(language_model(model), config.train.label_smoothing, config.train.z_loss)
    prove(config, root, arithmetic, device, tokens, longest)
    return root


def make_divided_root(
    config: Config, model: nn.Module, arithmetic: Arithmetic, mesh: Mesh, tokens: int, longest: int, typical: float,
    source: Source | None,
) -> LossModel:  # fmt: skip
    """The same with weights divided among processes, each of which reads its rows from `source`; all of them make the
    proof together."""
    device = mesh.ranks.device
    root = LossModel(language_model(model), config.train.label_smoothing, config.train.z_loss)
    shard_(root, mesh, arithmetic.compute, source, config.parallel.offload == "weights")
    with arithmetic.context(device):
        try_out(root)
    root.within(functools.partial(attend, config, root.language_model, arithmetic, device, typical))
    if _fuses(config, arithmetic, device):
        fuse_lora_(root)
    prove(config, root, arithmetic, device, tokens, longest)
    give_back(root)
    return root


def prove(
    config: Config, root: LossModel, arithmetic: Arithmetic, device: torch.device, tokens: int, longest: int
) -> None:
    """See `make_root`; changes what the proof decides about."""
    with arithmetic.context(device):
        try:
            probe(root, tokens, longest)
        except PackingError:
            if config.data.packing != "none" or config.train.micro_rows != 1:
                raise
            attention.leave(root.language_model)
            root.alone = True
            probe_alone(root, tokens, longest)
        if arithmetic.name in _EIGHT_BITS:
            to_fp8_(root.language_model, _EIGHT_BITS[arithmetic.name])
        narrow(root)


def _best_precision(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def place_of_weights(config: Config, device: torch.device) -> torch.device:
    """Where a model is loaded: one that will be in 4 bits on the host, because it may be too large for the device."""
    on_host = config.quantize is not None and not is_random(config.model.path)
    return torch.device("cpu") if on_host else device


def build_model(
    config: Config, arithmetic: Arithmetic, device: torch.device, vocabulary: int,
    loaded: Callable[[], nn.Module] | None = None, typical: float = 0,
) -> nn.Module:  # fmt: skip
    """The model with its adapters on its device, attending by documents of `typical` length; `loaded` gives one that
    was loaded before."""
    model = loaded() if loaded else load_model(config.model, arithmetic.weights, place_of_weights(config, device))
    room = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > room:
        raise VocabularyError(
            f"model.path: {config.model.path}: the tokenizer knows {vocabulary:,} tokens and the model only {room:,}. "
            "They do not belong together: use the tokenizer that came with the model"
        )
    if config.quantize is not None:
        quantize_(model.requires_grad_(False), device)
    if config.adapter is not None:
        tokens = trained_tokens(config.model, config.adapter.tokens)
        model = add_adapter(model, config.adapter, config.run.seed, tokens)
    if any(is_hollow(weight) for weight in model.parameters()):  # nothing can be computed with it yet
        place_(model, device)
        return model
    model = model.to(device)  # what the adapters brought along
    if _fuses(config, arithmetic, device):
        fuse_lora_(model)
    attend(config, language_model(model), arithmetic, device, typical)
    return model


def _fuses(config: Config, arithmetic: Arithmetic, device: torch.device) -> bool:
    """Whether adapters are computed together with their layers; those of torchao compute by themselves."""
    by_torchao = _EIGHT_BITS.get(arithmetic.name) == "rowwise"
    return config.adapter is not None and device.type == "cuda" and not by_torchao


def attend(config: Config, plain: nn.Module, arithmetic: Arithmetic, device: torch.device, typical: float) -> None:
    """Let a model attend by documents of `typical` length."""
    backend = attention.choose(config.model.attention, device, arithmetic.compute, attention.look(plain), typical)
    attention.install(plain, backend)
