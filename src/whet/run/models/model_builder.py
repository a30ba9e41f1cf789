"""Builds the model of a run: weights, adapters, quantization, attention, packing check and loss."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

import torch
from torch import nn

from whet.compat.torch_compiler import hash_compilers, import_inductor
from whet.config import Config
from whet.core.distributed import get_local_device
from whet.core.errors import WhetError
from whet.core.signals import abandon_thread
from whet.data.prepare.workers import fork_lock
from whet.execution.compile import should_compile
from whet.model import attention
from whet.model.experts.install import install_experts
from whet.model.fp8.conversion import convert_to_fp8_
from whet.model.load.placeholder import (
    WeightSource,
    build_meta_model,
    is_placeholder,
    load_placeholder_model,
    move_real_tensors_,
)
from whet.model.load.pretrained import load_model, require_unquantized, trainable_token_ids
from whet.model.load.random_models import is_random_model
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.modules import other_modalities
from whet.model.packing_check import choose_packing
from whet.model.quantize import quantize_
from whet.model.randomness import is_stochastic, require_no_layer_drop
from whet.parallel.expert_parallel import require_divisible_experts
from whet.parallel.fsdp import apply_fsdp, reshard
from whet.parallel.mesh import Mesh
from whet.parallel.tensor_parallel import read_tensor_parallel_plan, verify_tensor_parallel
from whet.training.precision import PrecisionPolicy, resolve_precision


class VocabularyError(WhetError):
    """The tokenizer has more tokens than the model."""


def set_deterministic(config: Config) -> None:
    """Make kernels deterministic if train.deterministic is set; an earlier run of this process does not matter."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it
    torch.use_deterministic_algorithms(config.train.deterministic)


def build_loss_model(
    config: Config, model: nn.Module, precision: PrecisionPolicy, device: torch.device, tokens: int, longest: int
) -> LossModel:
    """The model with its loss, after a check that packed conversations of up to `longest` tokens do not influence each
    other; `tokens` is the size of the vocabulary.

    A model in which they do is trained unpacked. fp8 comes after the check: with one scale for all tokens of a batch,
    conversations change each other's rounding.
    """
    root = _loss_model(config, model)
    verify_packing(root, precision, device, tokens, longest)
    return root


def _loss_model(config: Config, model: nn.Module) -> LossModel:
    train = config.train
    return LossModel(unwrap_peft(model), train.label_smoothing, train.z_loss, train.router_aux_loss)


def build_sharded_loss_model(
    config: Config, model: nn.Module, precision: PrecisionPolicy, mesh: Mesh, tokens: int, longest: int, typical: float,
    source: WeightSource | None,
) -> LossModel:  # fmt: skip
    """`build_loss_model` with FSDP2: every process reads its shards from `source`, and all run the check together."""
    device = mesh.ranks.device
    if mesh.ranks.world_size > 1:
        require_no_layer_drop(unwrap_peft(model))
    root = _loss_model(config, model)
    apply_fsdp(root, mesh, precision.compute, source, config.parallel.offload == "weights")
    with precision.autocast(device):
        verify_tensor_parallel(root)
    root.with_full_weights(
        functools.partial(install_attention, config, root.language_model, precision, device, typical)
    )
    if _fuses_lora(config, precision, device):
        fuse_lora_(root)
    verify_packing(root, precision, device, tokens, longest)
    reshard(root)
    return root


def verify_packing(
    root: LossModel, precision: PrecisionPolicy, device: torch.device, tokens: int, longest: int
) -> None:
    """The check of `build_loss_model`, and what follows from it."""
    with precision.autocast(device):
        choose_packing(root, tokens, longest)
        root.is_stochastic = is_stochastic(root, tokens)
        if precision.name == "fp8":
            convert_to_fp8_(root.language_model)


def weights_device(config: Config, device: torch.device) -> torch.device:
    """Where a model is loaded: on the host if it will be quantized, because it may be too large for the device."""
    on_host = config.quantize is not None and not is_random_model(config.model.path)
    return torch.device("cpu") if on_host else device


def build_model(
    config: Config, precision: PrecisionPolicy, device: torch.device, vocabulary: int,
    loaded: Callable[[], nn.Module] | None = None, typical: float = 0,
) -> nn.Module:  # fmt: skip
    """The model with its adapter and attention backend on its device; `loaded` returns a model that is loaded already,
    `typical` is the typical document length."""
    model = loaded() if loaded else load_model(config.model, precision.weights, weights_device(config, device))
    require_unquantized(model, config.model.path)
    room = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if vocabulary > room:
        raise VocabularyError(
            f"model.path: {config.model.path}: the tokenizer knows {vocabulary:,} tokens and the model only {room:,}. "
            "They do not belong together: use the tokenizer that came with the model"
        )
    for name in other_modalities(model):
        model.get_submodule(name).requires_grad_(False)
    if config.quantize is not None:
        quantize_(model.requires_grad_(False), device)
    if config.adapter is not None:
        tokens = trainable_token_ids(config.model, config.adapter.tokens)
        model = add_adapter(model, config.adapter, config.run.seed, tokens)
    install_experts(unwrap_peft(model))
    if any(is_placeholder(weight) for weight in model.parameters()):  # FSDP loads the weights later
        move_real_tensors_(model, device)
        return model
    model = model.to(device)  # the adapter's weights, too
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
    """Choose and install the attention backend for documents of `typical` length."""
    backend = attention.choose_backend(
        config.model.attention, device, precision.compute, attention.inspect_attention(plain), typical
    )
    attention.install_backend(plain, backend)


# The model is loaded in a thread while the main thread prepares the data.
#
# transformers sets torch's default dtype while it builds a model, so the main thread must not use torch until `model()`
# returns; a test checks that preparing data does not. Whatever draws random numbers, such as an adapter, comes later.


class BackgroundModelLoader:
    """Loads a model in a background thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread: threading.Thread | None = None
        self._model: nn.Module | None = None
        self._error: BaseException | None = None
        self.source: WeightSource | None = None
        """Where the weights are, if every process reads its own shards."""

    def start(self) -> None:
        """Start the thread, once. With trust_remote_code the main thread loads the model: its code may do anything."""
        if self._thread is None and not self._config.model.trust_remote_code:
            # Import here what both threads need: two threads that import modules which import each other can see one
            # half-initialised.
            from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

            self._thread = threading.Thread(target=self._load, name="load the model", daemon=True)
            self._thread.start()

    def model(self) -> nn.Module:
        """The model, loaded now if the thread was not started. Raises the error of the thread."""
        if self._thread is None:
            self._load()
        else:
            self._thread.join()
        error, model = self._error, self._model
        self._error = self._model = None
        if error is not None:
            raise error
        assert model is not None, "called twice"
        return model

    def close(self) -> None:
        """Abandon the thread; it does not keep the process alive."""
        if self._thread is not None:
            abandon_thread(self._thread)

    def _load(self) -> None:
        try:
            with fork_lock:
                device = get_local_device(self._config.launch.share_gpu, self._config.run.device)
                precision = resolve_precision(self._config, device)
                # Import the compiler while weights are copied. It imports nothing that this thread may be importing,
                # so neither thread sees a module half-initialised.
                importing = threading.Thread(target=_import_compiler, name="import the compiler", daemon=True)
                if should_compile(self._config.model.compile, device, precision.compute):
                    importing.start()
                try:
                    self._model = self._loaded(precision.weights, device)
                finally:
                    if importing.ident is not None:
                        importing.join()  # no process may be forked while a thread imports
        except BaseException as error:
            self._error = error

    def _loaded(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        if not self._config.shards_weights:
            return load_model(self._config.model, dtype, weights_device(self._config, device))
        model, self.source = load_placeholder_model(self._config.model, dtype)
        return model


def _import_compiler() -> None:
    import_inductor()
    threading.Thread(target=hash_compilers, name="hash the compilers", daemon=True).start()


def require_parallel_layers(config: Config) -> None:
    """Refuse parallel.tensor for a model that has no tensor-parallel plan, and parallel.expert for one whose experts
    cannot be distributed, before loading its weights.

    With trust_remote_code the model's code runs only once, at loading, where such a model is refused.
    """
    if config.parallel.tensor * config.parallel.expert == 1 or config.model.trust_remote_code:
        return
    model = build_meta_model(config.model, torch.float32)
    if config.parallel.tensor > 1:
        read_tensor_parallel_plan(model, config.parallel.tensor)
    if config.parallel.expert > 1:
        require_divisible_experts(model, config.parallel.expert)
