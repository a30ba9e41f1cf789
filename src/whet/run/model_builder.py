"""Builds the model and the loader of a run: weights, adapters, quantization, attention, packing check and loss."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

import torch
from torch import nn

from whet.compat.torch_compiler import import_inductor
from whet.config import Config
from whet.core.distributed import Ranks, get_local_device
from whet.core.errors import WhetError
from whet.core.signals import abandon_thread
from whet.data.loader import Loader
from whet.data.plan.planner import Plan
from whet.data.prepare.store import Store
from whet.data.prepare.workers import fork_lock
from whet.execution.compile import should_compile
from whet.model import attention
from whet.model.fp8.conversion import convert_to_fp8_
from whet.model.load.placeholder import WeightSource, is_placeholder, load_placeholder_model, move_real_tensors_
from whet.model.load.pretrained import load_model
from whet.model.load.random_models import is_random_model
from whet.model.load.resize_embeddings import trainable_token_ids
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.packing_check import PackingError, check_packing, check_unpacked
from whet.model.quantize import quantize_
from whet.parallel.fsdp import apply_fsdp, reshard
from whet.parallel.mesh import Mesh
from whet.parallel.tensor_parallel import verify_tensor_parallel
from whet.training.precision import PrecisionPolicy, resolve_precision

# The parts of a run, each made from its configuration: loader, model.

_PADDED_LENGTHS = 4


class VocabularyError(WhetError):
    """The tokenizer is not this model's."""


def make_loader(config: Config, store: Store, plan: Plan, ranks: Ranks) -> Loader:
    """This rank's share of a plan; rows are padded to a constant length where kernels are compiled for it.

    Packed rows are full, and one length is enough; single conversations get the smallest of a few.
    """
    padded = config.row_length if ranks.device.type == "cuda" or config.model.compile is True else None
    lengths = _PADDED_LENGTHS if config.data.packing == "none" else 1
    return Loader(
        store, plan, config.train.micro_rows, ranks.data_rank, ranks.data_size, padded, lengths, ranks.device,
        (ranks.context_rank, ranks.context_size),
    )  # fmt: skip


def set_deterministic(config: Config) -> None:
    """Where the configuration asks for it, the same numbers every time."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses, or varies
        torch.use_deterministic_algorithms(True)


def build_loss_model(
    config: Config, model: nn.Module, precision: PrecisionPolicy, device: torch.device, tokens: int, longest: int
) -> LossModel:
    """The model with its loss, after a proof that packed conversations of up to `longest` tokens do not see each other
    in it; `tokens` is the size of the vocabulary.

    A model in which they would is trained unpacked, if the configuration puts one conversation into each batch.
    8 bits come after the proof: with one scale for all tokens of a batch, conversations change each other's rounding.
    """
    root = LossModel(unwrap_peft(model), config.train.label_smoothing, config.train.z_loss)
    verify_packing(config, root, precision, device, tokens, longest)
    return root


def build_sharded_loss_model(
    config: Config, model: nn.Module, precision: PrecisionPolicy, mesh: Mesh, tokens: int, longest: int, typical: float,
    source: WeightSource | None,
) -> LossModel:  # fmt: skip
    """The same with weights divided among processes, each of which reads its rows from `source`; all of them make the
    proof together."""
    device = mesh.ranks.device
    root = LossModel(unwrap_peft(model), config.train.label_smoothing, config.train.z_loss)
    apply_fsdp(root, mesh, precision.compute, source, config.parallel.offload == "weights")
    with precision.autocast(device):
        verify_tensor_parallel(root)
    root.with_full_weights(
        functools.partial(install_attention, config, root.language_model, precision, device, typical)
    )
    if _fuses_lora(config, precision, device):
        fuse_lora_(root)
    verify_packing(config, root, precision, device, tokens, longest)
    reshard(root)
    return root


def verify_packing(
    config: Config, root: LossModel, precision: PrecisionPolicy, device: torch.device, tokens: int, longest: int
) -> None:
    """See `make_root`; changes what the proof decides about."""
    with precision.autocast(device):
        try:
            check_packing(root, tokens, longest)
        except PackingError:
            if config.data.packing != "none" or config.train.micro_rows != 1:
                raise
            attention.use_native_attention(root.language_model)
            root.unpacked = True
            check_unpacked(root, tokens, longest)
        if precision.name == "fp8":
            convert_to_fp8_(root.language_model)


def weights_device(config: Config, device: torch.device) -> torch.device:
    """Where a model is loaded: one that will be in 4 bits on the host, because it may be too large for the device."""
    on_host = config.quantize is not None and not is_random_model(config.model.path)
    return torch.device("cpu") if on_host else device


def build_model(
    config: Config, precision: PrecisionPolicy, device: torch.device, vocabulary: int,
    loaded: Callable[[], nn.Module] | None = None, typical: float = 0,
) -> nn.Module:  # fmt: skip
    """The model with its adapters on its device, attending by documents of `typical` length; `loaded` gives one that
    was loaded before."""
    model = loaded() if loaded else load_model(config.model, precision.weights, weights_device(config, device))
    room = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > room:
        raise VocabularyError(
            f"model.path: {config.model.path}: the tokenizer knows {vocabulary:,} tokens and the model only {room:,}. "
            "They do not belong together: use the tokenizer that came with the model"
        )
    if config.quantize is not None:
        quantize_(model.requires_grad_(False), device)
    if config.adapter is not None:
        tokens = trainable_token_ids(config.model, config.adapter.tokens)
        model = add_adapter(model, config.adapter, config.run.seed, tokens)
    if any(is_placeholder(weight) for weight in model.parameters()):  # nothing can be computed with it yet
        move_real_tensors_(model, device)
        return model
    model = model.to(device)  # what the adapters brought along
    if _fuses_lora(config, precision, device):
        fuse_lora_(model)
    install_attention(config, unwrap_peft(model), precision, device, typical)
    return model


def _fuses_lora(config: Config, precision: PrecisionPolicy, device: torch.device) -> bool:
    """Whether adapters are computed together with their layers."""
    return config.adapter is not None and device.type == "cuda"


def install_attention(
    config: Config, plain: nn.Module, precision: PrecisionPolicy, device: torch.device, typical: float
) -> None:
    """Let a model attend by documents of `typical` length."""
    backend = attention.choose_backend(
        config.model.attention, device, precision.compute, attention.inspect_attention(plain), typical
    )
    attention.install_backend(plain, backend)


# The model, loaded in a thread while the data is prepared: neither needs the other.
#
# The thread loads and does nothing else. transformers sets torch's default type while it builds a model, so the process's
# main thread computes nothing with torch until it has asked for the result; preparing data does not, and a test sees to
# it. What depends on random numbers, as an adapter's start, comes after.


class BackgroundModelLoader:
    """A model on its way to the device."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread: threading.Thread | None = None
        self._model: nn.Module | None = None
        self._error: BaseException | None = None
        self.source: WeightSource | None = None
        """Where the weights are, if each process is to read its own part of them."""

    def start(self) -> None:
        """Start, once. Code that comes with a model may do anything: such a model is loaded in the main thread."""
        if self._thread is None and not self._config.model.trust_remote_code:
            # The main thread reads the tokenizer meanwhile. What both import is there before, because two threads that
            # import modules which need each other can see half of one.
            from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

            self._thread = threading.Thread(target=self._load, name="load the model", daemon=True)
            self._thread.start()

    def model(self) -> nn.Module:
        """The model, loaded now if it was not begun. Raises here what went wrong in the thread."""
        if self._thread is None:
            self._load()
        else:
            self._thread.join()
        error, model = self._error, self._model
        self._error = self._model = None
        if error is not None:
            raise error
        assert model is not None, "asked for twice"
        return model

    def close(self) -> None:
        """Nobody will ask for the model: the thread goes on alone and does not hold the process open."""
        if self._thread is not None:
            abandon_thread(self._thread)

    def _load(self) -> None:
        try:
            with fork_lock:
                device = get_local_device()
                precision = resolve_precision(self._config, device)
                if should_compile(self._config.model.compile, device, precision.compute):
                    import_inductor()
                self._model = self._loaded(precision.weights, device)
        except BaseException as error:
            self._error = error

    def _loaded(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        if not self._config.shards_weights:
            return load_model(self._config.model, dtype, weights_device(self._config, device))
        model, self.source = load_placeholder_model(self._config.model, dtype)
        return model


# Whether processes can compute a model's layers together, asked before anything else is done.


def require_tensor_parallel_plan(config: Config) -> None:
    """Refuse parallel.tensor for a model that cannot be divided so, by a look at the model without its weights.

    Code that comes with a model is run once, where it is loaded; such a model is refused there.
    """
    if config.parallel.tensor == 1 or config.model.trust_remote_code:
        return
    import torch

    from whet.model.load.placeholder import build_meta_model
    from whet.parallel.tensor_parallel import read_tensor_parallel_plan

    read_tensor_parallel_plan(build_meta_model(config.model, torch.float32), config.parallel.tensor)
