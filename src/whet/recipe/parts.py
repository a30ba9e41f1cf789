"""The parts of a run, each made from its configuration: data, plan, model."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from whet.config import Config
from whet.core.errors import WhetError
from whet.core.ranks import Ranks
from whet.data.config import DataConfig
from whet.data.loader import Loader
from whet.data.mixture import mix
from whet.data.plan import Plan
from whet.data.planner import Length, plan_by_conversations, plan_by_rows
from whet.data.prepare import Prepared, prepare
from whet.data.split import split_off
from whet.data.store import Store
from whet.model import attention
from whet.model.load import load_model, load_tokenizer, stop_ids
from whet.model.lora import add_adapter
from whet.model.precision import HonestDouble
from whet.model.turns import Mark, Turns

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Data:
    """The stores of a run, and which of their documents are used."""

    tokenizer: PreTrainedTokenizerFast
    train: Prepared
    train_documents: NDArray[np.int64]
    validation: Store | None
    validation_documents: NDArray[np.int64]

    def stores(self) -> dict[str, str]:
        """Where the documents are, by use."""
        held = {} if self.validation is None else {"validation": str(self.validation.folder)}
        return {"train": str(self.train.store.folder), **held}

    def ledger(self) -> dict[str, Any]:
        """What became of every conversation, and what a resumed run needs to find the same ones."""
        accounts = list(self.train.store.manifest["accounts"])
        if self.validation is not None and self.validation is not self.train.store:
            accounts += self.validation.manifest["accounts"]
        return {"sources": accounts, "stores": self.stores(), "today": self.train.store.manifest["today"]}


def prepare_data(config: Config, today: str | None = None) -> Data:
    """The stores that the configuration asks for, made or found. `today` is for templates that insert the date."""
    tokenizer = load_tokenizer(config.model, turns_of(config.data))
    stops = stop_ids(config.model)
    made = prepare(config.data, config.data.sources, "train", tokenizer, stops, today)
    everything = np.arange(len(made.store), dtype=np.int64)
    wanted = config.data.validation
    if wanted is None:
        return Data(tokenizer, made, everything, None, everything[:0])
    if wanted.sources is not None:
        held = prepare(config.data, wanted.sources, "validation", tokenizer, stops, today).store
        return Data(tokenizer, made, everything, held, np.arange(len(held), dtype=np.int64))
    train, held_out = split_off(made.store.hashes, wanted.fraction or 0.0, config.run.seed)
    return Data(tokenizer, made, train, made.store, held_out)


def turns_of(data: DataConfig) -> Turns | None:
    """The markers of data.markers as the tokenizer needs them."""
    if data.markers is None:
        return None
    named = {"user": data.markers.user, "assistant": data.markers.assistant, "system": data.markers.system}
    marks = {role: Mark(marker.text, marker.id) for role, marker in named.items() if marker is not None}
    return Turns(marks, data.markers.append_eod)


def make_plan(config: Config, data: Data) -> Plan:
    """Which conversations make which step."""
    train = config.train
    length = Length(train.steps, train.epochs, train.tokens)
    if (train.steps, train.epochs, train.tokens) == (None, None, None):
        length = Length(epochs=1.0)
    store, numbers = data.train.store, data.train_documents
    mixture = mix(numbers, store.sources[numbers], config.data.sources)
    common = (length, config.row_length, config.data.packing, config.data.bins, config.run.seed)
    if train.batch.conversations is not None:
        return plan_by_conversations(store.lengths, mixture, train.batch.conversations, *common)
    rows = train.batch.rows or (train.batch.tokens or 0) // config.row_length
    return plan_by_rows(store.lengths, mixture, rows, *common)


def make_loader(config: Config, store: Store, plan: Plan, ranks: Ranks) -> Loader:
    """This rank's share of a plan; rows are padded to a constant length where kernels are compiled for it."""
    padded = config.row_length if ranks.device.type == "cuda" else None
    return Loader(store, plan, config.train.micro_rows, ranks.rank, ranks.world, padded)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """In which numbers a run computes."""

    name: str
    weights: torch.dtype
    compute: torch.dtype

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Mixed precision where weights and arithmetic differ; fp64 without the models' own excursions to fp32."""
        if self.name == "bf16":
            return torch.autocast(device.type, self.compute)
        return HonestDouble() if self.name == "fp64" else nullcontext()


def choose_arithmetic(config: Config, device: torch.device) -> Arithmetic:
    """bf16 keeps trained weights in fp32 and frozen ones in bf16."""
    name = config.train.precision
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    if name == "bf16":
        return Arithmetic(name, torch.bfloat16 if config.adapter else torch.float32, torch.bfloat16)
    dtype = torch.float64 if name == "fp64" else torch.float32
    return Arithmetic(name, dtype, dtype)


def build_model(config: Config, arithmetic: Arithmetic, device: torch.device, vocabulary: int) -> nn.Module:
    """The model with its adapters on its device, attending by documents."""
    model = load_model(config.model, arithmetic.weights)
    room = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > room:
        raise WhetError(
            f"model.path: {config.model.path}: the tokenizer knows {vocabulary} tokens and the model only {room}. "
            "They do not belong together"
        )
    attention.install(model, attention.choose(config.model.attention, device, arithmetic.compute))
    if config.adapter is not None:
        model = add_adapter(model, config.adapter, config.run.seed)
    return model.to(device)


def hush_libraries() -> None:
    """Progress bars and advice of the libraries below would drown what whet has to say."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|transformers|peft")
