"""Load models for inference: a run's checkpoint, a model folder or hub id, and adapters that share one base."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.config import Config, read_config
from whet.core.console import silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.run_folder import parse_run_reference
from whet.data.render.renderer import Renderer
from whet.inference.adapters import attach_adapters, base_model_of, has_4bit_base, has_embedding_rows, is_adapter_folder
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.resize_embeddings import resize_embeddings_
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import load_error, locate_model
from whet.model.lora.peft_adapters import cast_trained_modules_, embedding_rows, merge_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import quantize_
from whet.run.assemble import build_model
from whet.run.data import load_run_tokenizer, require_same_tokenizer
from whet.run.evaluation import stop_token_ids
from whet.run.resume import require_same_base
from whet.training.precision import PrecisionPolicy, choose_precision, resolve_precision

# A run's model at work again.


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run's model as a checkpoint left it."""

    config: Config
    model: nn.Module
    step: int
    precision: PrecisionPolicy
    ranks: Ranks


def load_run(path: Path, step: str = "latest") -> LoadedRun:
    """The model of a run after a step, or as the newest or the best checkpoint has it."""
    config = read_run_config(path)
    require_same_tokenizer(config, path / "ledger.json")
    folder = path / "checkpoints"
    number = directory.resolve_step(folder, step)
    ranks = init_distributed()
    precision = resolve_precision(config, ranks.device, trains=False)
    return LoadedRun(config, load_checkpoint_model(config, number, ranks), number, precision, ranks)


def read_run_config(path: Path) -> Config:
    """The configuration of a run, wherever it was moved to."""
    if not (path / "config.yaml").exists():
        raise WhetError(f"{path}: not a run (it has no config.yaml). Give the folder of a run, such as runs/demo")
    return read_config(path / "config.yaml").with_folder(path)


def load_checkpoint_model(
    config: Config, step: int, ranks: Ranks, precision: PrecisionPolicy | None = None
) -> nn.Module:
    """A run's model as the checkpoint after `step` has it, whole, on the device of `ranks`."""
    precision = precision or choose_precision(config, ranks.device, trains=False)
    model = build_model(config, precision, ranks.device, 0)
    folder = config.folder / "checkpoints" / directory.checkpoint_name(step)
    manifest = load_checkpoint(folder, LossModel(unwrap_peft(model)), None, ranks)
    require_same_base(config, manifest, ranks)
    return model


# Models ready to answer: from a folder, a hub, a run, or an adapter beside its base.

LoadMode = Literal["auto", "4bit", "spread"]
"""Onto one device as it is saved; its linear layers in 4 bits; divided over all GPUs that can be seen."""


@dataclass(frozen=True, slots=True)
class InferenceModel:
    """A model that can answer."""

    model: nn.Module
    renderer: Renderer
    stops: list[int]
    name: str = ""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered while it answers: models that share weights switch their adapters there."""


def load_inference_model(reference: str, load: LoadMode = "auto") -> InferenceModel:
    """A model folder, a hub id, a built-in model, an adapter's folder, or a run (RUN, RUN@STEP, RUN@best, RUN@latest),
    ready to answer."""
    silence_libraries()
    path, step = parse_run_reference(reference)
    if (path / "config.yaml").exists():
        _require_auto_load(path, load)
        run = load_run(path, step)
        cast_trained_modules_(run.model)
        # merged it would answer a little faster, but a model in 4 bits may be too large for that
        model = unwrap_peft(run.model) if run.config.quantize else merge_adapter(run.model)
        attention.use_native_attention(model)
        return _inference_model(model.to(run.ranks.device), Renderer(load_run_tokenizer(run.config), "assistant"), run.config.model,
                      reference)  # fmt: skip
    if is_adapter_folder(path):
        return _load_adapter_and_base(reference, base_model_of(path), load)[0]
    config = _model_config(reference)
    renderer = Renderer(load_tokenizer(config), "assistant")
    return _inference_model(_load_base_model(config, load), renderer, config, reference)


def load_model_pair(reference: str, against: str, load: LoadMode = "auto") -> tuple[InferenceModel, InferenceModel]:
    """Two models to compare; where the first is an adapter over the second, they share weights."""
    path, step = parse_run_reference(reference)
    if is_adapter_folder(path) and _is_same_model(base_model_of(path), against):
        return _load_adapter_and_base(reference, against, load)
    if _is_adapter_run_of(path, against):
        _require_auto_load(path, load)
        silence_libraries()
        run = load_run(path, step)
        cast_trained_modules_(run.model)
        model = unwrap_peft(run.model)
        attention.use_native_attention(model)
        own, base = Renderer(load_run_tokenizer(run.config), "assistant"), _model_config(against)
        off: Any = run.model.disable_adapter
        name = f"{against} in 4 bits" if run.config.quantize else against
        return (
            _inference_model(model, own, run.config.model, reference),
            _inference_model(model, Renderer(load_tokenizer(base), "assistant"), base, name, off),
        )
    return load_inference_model(reference, load), load_inference_model(against, load)


NO_ADAPTER = "none"
"""What the model without any adapter is called."""


def load_adapter_models(base: str, adapters: dict[str, Path], load: LoadMode = "auto") -> dict[str, InferenceModel]:
    """One model with several adapters by name, and under `none` the model without them; all share its weights."""
    silence_libraries()
    config = _model_config(base)
    plain = load_tokenizer(config)
    tokenizers = {}
    for name, folder in adapters.items():
        own = (folder / "tokenizer_config.json").exists()  # an export brings the tokenizer it was trained with
        tokenizers[name] = load_tokenizer(ModelConfig(path=base, tokenizer=str(folder))) if own else plain
    bare = _load_base_model(config, load)
    for name, folder in adapters.items():
        if has_embedding_rows(folder, len(tokenizers[name])):
            resize_embeddings_(bare, len(tokenizers[name]))
        if load != "4bit" and has_4bit_base(folder):
            warn(f"{folder}: trained beside {base} in 4 bits, and that is loaded whole here: it may say something else "
                 "than what was trained. Add --load 4bit")  # fmt: skip
    adapted = attach_adapters(bare, base, adapters)
    model = unwrap_peft(adapted)
    found = {NO_ADAPTER: _inference_model(model, Renderer(plain, "assistant"), config, base, adapted.disable_adapter)}
    for name, tokenizer in tokenizers.items():
        renderer = Renderer(tokenizer, "assistant")
        found[name] = _inference_model(model, renderer, config, name, lambda name=name: _active_adapter(adapted, name))  # type: ignore[misc]
    return found


def _load_adapter_and_base(reference: str, base: str, load: LoadMode) -> tuple[InferenceModel, InferenceModel]:
    """The adapter in a folder, and its base; a path has dots, which a name must not have."""
    both = load_adapter_models(base, {"tuned": Path(reference)}, load)
    return replace(both["tuned"], name=reference), both[NO_ADAPTER]


@contextlib.contextmanager
def _active_adapter(adapted: Any, name: str) -> Any:
    adapted.set_adapter(name)
    yield


def _inference_model(
    model: nn.Module, renderer: Renderer, config: ModelConfig, name: str,
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> InferenceModel:  # fmt: skip
    known, room = len(renderer.tokenizer), embedding_rows(model)
    if known > room:
        raise WhetError(
            f"{name}: the tokenizer knows {known:,} tokens and the model only {room:,}. They do not belong together: "
            "use the tokenizer that came with the model, or the base that the adapter was trained beside"
        )
    return InferenceModel(model.eval(), renderer, stop_token_ids(renderer, config), name, within)


def _load_base_model(config: ModelConfig, load: LoadMode) -> nn.Module:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if load == "spread":
        return _load_with_device_map(config)
    if load == "4bit":
        model = load_model(config, "auto", torch.device("cpu")).requires_grad_(False)
        quantize_(model, device)
        return model.to(device)
    return load_model(config, "auto", device).to(device)


def _load_with_device_map(config: ModelConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            locate_model(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code, dtype="auto",
            device_map="auto",
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise load_error(config.path, "model", error) from None


def _require_auto_load(path: Path, load: LoadMode) -> None:
    if load != "auto":
        raise WhetError(
            f"--load: {load} is for models, and {path} is a run. Export it first: whet export {path}, then "
            f"whet chat {path}/exports/merged --load {load}"
        )


def _model_config(reference: str) -> ModelConfig:
    """A mistyped path must not become a question to a hub: what begins with a folder that is here is a path."""
    path = Path(reference).expanduser()
    if ":" not in reference and not path.exists() and len(path.parts) > 1 and path.parent.is_dir():
        there = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
        near = difflib.get_close_matches(path.name.partition("@")[0], there, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
        raise WhetError(f"{reference}: no such folder (looked in {Path.cwd()}).{hint}")
    return ModelConfig(path=reference)


def _is_adapter_run_of(path: Path, base: str) -> bool:
    """Whether `path` is a run that trained an adapter beside the model `base`."""
    if not (path / "config.yaml").exists():
        return False
    config = read_config(path / "config.yaml")
    return config.adapter is not None and _is_same_model(config.model.path, base)


def _is_same_model(one: str, other: str) -> bool:
    try:
        places = [locate_model(path) for path in (one, other)]
    except WhetError:
        return False
    first, second = map(Path, places)
    return places[0] == places[1] or (first.is_dir() and second.is_dir() and first.samefile(second))
