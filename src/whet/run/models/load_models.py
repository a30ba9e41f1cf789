"""Load models for inference: a run's checkpoint, a model folder or hub id, and adapters that share one base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from whet.checkpoint import directory
from whet.checkpoint.load import load_checkpoint
from whet.compat.peft_private import mix_adapters
from whet.config import Config
from whet.core.console import info, silence_libraries, warn
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.run_folder import parse_run_reference
from whet.data.render.renderer import Renderer
from whet.inference.calculator_tool import calls_inline, make_calculator
from whet.inference.chat import ChatModels
from whet.inference.inference_model import InferenceModel, stop_token_ids
from whet.inference.online_engine import NO_ADAPTERS, Adapters
from whet.inference.sampling import Sampling
from whet.model import attention
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model, load_with_transformers, resize_embeddings_, show_loading
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import (
    load_error,
    locate_model,
    reach_model,
    require_certified_files,
    require_files_inside,
    require_no_typo,
)
from whet.model.lora.adapter_folder import (
    attach_adapters,
    base_model_of,
    has_4bit_base,
    has_embedding_rows,
    is_adapter_folder,
)
from whet.model.lora.peft_adapters import cast_trained_modules_, embedding_rows, merge_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.quantize import quantize_
from whet.registry.references import local_path, pin_version
from whet.run.data import load_run_tokenizer, require_same_tokenizer
from whet.run.models.model_builder import build_model
from whet.run.models.model_reference import exported_adapter
from whet.run.resume import read_run_config
from whet.training.checkpoints import require_same_base
from whet.training.precision import PrecisionPolicy, choose_precision

LoadMode = Literal["auto", "4bit", "spread"]
"""As saved, on one device; linear layers quantized to 4 bits; layers distributed over all visible GPUs."""
NO_ADAPTER = "none"
"""The name of the base model without adapters."""


# The model of a run, restored from a checkpoint.


def find_run(reference: str) -> tuple[Path, str] | None:
    """(run folder, step) of RUN, RUN@STEP, RUN@best or RUN@latest; None if the reference is not a run."""
    path, step = parse_run_reference(reference)
    return (path, step) if (path / "config.yaml").exists() else None


def load_checkpoint_model(
    config: Config, step: int, ranks: Ranks, precision: PrecisionPolicy | None = None
) -> nn.Module:
    """The model of a run as the checkpoint of `step` has it, unsharded, on the device of `ranks`."""
    precision = precision or choose_precision(config, ranks.device, trains=False)
    model = build_model(config, precision, ranks.device, 0)
    restore_checkpoint_(model, config, step, ranks)
    return model


def restore_checkpoint_(model: nn.Module, config: Config, step: int, ranks: Ranks) -> None:
    """Load the weights of a run's checkpoint into its model, after a check that the base model is the same."""
    folder = config.folder / "checkpoints" / directory.checkpoint_name(step)
    manifest = load_checkpoint(folder, LossModel(unwrap_peft(model)), None, ranks)
    require_same_base(config, manifest, ranks)


def _load_run(path: Path, step: str, load: LoadMode) -> tuple[Config, nn.Module, Renderer]:
    """The configuration, the model (a PeftModel if it has an adapter) and the renderer of a run."""
    if load != "auto":
        raise WhetError(
            f"--load {load}: {path} is a run, and only exported models support it. Export the run first: whet export "
            f"{path}, then: whet chat {path}/exports/merged --load {load}"
        )
    config = read_run_config(path)
    require_same_tokenizer(config, path / "ledger.json")
    number = directory.resolve_step(path / "checkpoints", step)
    info(f"loading {path} (step {number})")
    model = load_checkpoint_model(config, number, init_distributed())
    cast_trained_modules_(model)
    return config, model, Renderer(load_run_tokenizer(config), "assistant", system=config.data.system)


# Models by reference.


def load_inference_model(reference: str, load: LoadMode = "auto") -> InferenceModel:
    """The model of a run (RUN, RUN@STEP, RUN@best, RUN@latest), an adapter folder, a model folder, a hub id,
    builtin:NAME or models:NAME."""
    silence_libraries()
    reference = pin_version(reference)
    if run := find_run(reference):
        config, trained, renderer = _load_run(*run, load)
        # a merged adapter is a little faster, but merging into a 4-bit base would need memory for the full weights
        model = unwrap_peft(trained) if config.quantize else merge_adapter(trained)
        attention.use_native_attention(model)
        return _inference_model(model, renderer, config.model, reference)
    if is_adapter_folder(folder := local_path(reference)):
        return _load_adapter_and_base(reference, base_model_of(folder), load)[0]
    config_ = _model_config(reference)
    return _inference_model(_load_base_model(config_, load), _renderer(config_), config_, reference)


def load_model_pair(reference: str, against: str, load: LoadMode = "auto") -> tuple[InferenceModel, InferenceModel]:
    """Two models to compare; if the first is an adapter of the second, they share weights."""
    reference, against = pin_version(reference), pin_version(against)
    folder, run = local_path(reference), find_run(reference)
    if is_adapter_folder(folder) and is_same_model(base_model_of(folder), against):
        return _load_adapter_and_base(reference, against, load)
    if run is not None and _is_adapter_run_of(run[0], against):
        silence_libraries()
        config, trained, renderer = _load_run(*run, load)
        model = unwrap_peft(trained)
        attention.use_native_attention(model)
        base = _model_config(against)
        base_name = f"{against} in 4 bits" if config.quantize else against
        disable_adapter: Any = trained.disable_adapter
        return (
            _inference_model(model, renderer, config.model, reference),
            _inference_model(model, _renderer(base), base, base_name, disable_adapter),
        )
    return load_inference_model(reference, load), load_inference_model(against, load)


def load_adapter_models(base: str, adapters: dict[str, Path], load: LoadMode = "auto") -> dict[str, InferenceModel]:
    """A model with several adapters by name, and under `none` without them; all share the base weights."""
    silence_libraries()
    base = pin_version(base)
    config = _model_config(base)
    base_tokenizer = load_tokenizer(config)
    tokenizers = {}
    for name, folder in adapters.items():
        has_own = (folder / "tokenizer_config.json").exists()  # an export includes the tokenizer of its training
        tokenizers[name] = load_tokenizer(ModelConfig(path=base, tokenizer=str(folder))) if has_own else base_tokenizer
    base_model = _load_base_model(config, load)
    for name, folder in adapters.items():
        if has_embedding_rows(folder, len(tokenizers[name])):
            resize_embeddings_(base_model, len(tokenizers[name]))
        if load != "4bit" and has_4bit_base(folder):
            warn(f"{folder}: trained on {base} in 4 bits, which is loaded in full precision here: answers may differ "
                 "from those of the trained model. Add --load 4bit")  # fmt: skip
    adapted = attach_adapters(base_model, base, adapters)
    model = unwrap_peft(adapted)

    @contextlib.contextmanager
    def active(name: str) -> Iterator[None]:
        adapted.set_adapter(name)
        yield

    models = {
        NO_ADAPTER: _inference_model(
            model, Renderer(base_tokenizer, "assistant"), config, base, adapted.disable_adapter
        )
    }
    for name, tokenizer in tokenizers.items():
        renderer = Renderer(tokenizer, "assistant")
        models[name] = _inference_model(model, renderer, config, name, lambda name=name: active(name))  # type: ignore[misc]
    return models


def load_chat_models(
    model: str, sampling: Sampling, against: str | None = None, adapters: dict[str, Path] | None = None,
    load: LoadMode = "auto", calculator: bool = False, system: str | None = None,
) -> ChatModels:  # fmt: skip
    """The models of a `whet chat`. Those that differ only in their adapter share weights."""

    def with_settings(loaded: InferenceModel) -> InferenceModel:
        wanted = calculator or calls_inline(loaded.renderer)
        return replace(loaded, sampling=sampling, tool=make_calculator(loaded.renderer) if wanted else None)

    def load_another(reference: str) -> InferenceModel:
        return with_settings(load_inference_model(reference, load))

    if adapters:
        by_name = {name: with_settings(each) for name, each in load_adapter_models(model, adapters, load).items()}
        first = by_name[next(iter(adapters))]
        if against in (model, NO_ADAPTER):
            return ChatModels(first, by_name[NO_ADAPTER], by_name, load_another, system)
        return ChatModels(first, None if against is None else load_another(against), by_name, load_another, system)
    if against is None:
        return ChatModels(load_another(model), None, {}, load_another, system)
    one, other = load_model_pair(model, against, load)
    return ChatModels(with_settings(one), with_settings(other), {}, load_another, system)


def _load_adapter_and_base(reference: str, base: str, load: LoadMode) -> tuple[InferenceModel, InferenceModel]:
    """The adapter in a folder, and its base."""
    both = load_adapter_models(
        base, {"tuned": local_path(reference)}, load
    )  # peft's adapter names must not contain a dot
    return replace(both["tuned"], name=reference), both[NO_ADAPTER]


def _inference_model(
    model: nn.Module, renderer: Renderer, config: ModelConfig, name: str,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> InferenceModel:  # fmt: skip
    tokens, rows = len(renderer.tokenizer), embedding_rows(model)
    if tokens > rows:
        raise WhetError(
            f"{name}: the tokenizer has {tokens:,} tokens and the model only {rows:,}, so they do not belong together. "
            "Use the model's own tokenizer, or the base model that the adapter was trained on"
        )
    return InferenceModel(model.eval(), renderer, stop_token_ids(renderer, config), name, context)


def _renderer(config: ModelConfig) -> Renderer:
    return Renderer(load_tokenizer(config), "assistant")


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
    place = reach_model(config.path)
    require_files_inside(place)
    require_certified_files(Path(place))
    try:
        with show_loading(config):
            loaded: nn.Module = load_with_transformers(
                place, revision=config.revision, trust_remote_code=config.trust_remote_code,
                dtype="auto", device_map="auto",
            )  # fmt: skip
        return loaded
    except torch.OutOfMemoryError:
        raise  # nothing is wrong with the files
    except Exception as error:  # a damaged or forged file can raise almost anything
        raise load_error(config.path, "model", error) from None


def _model_config(reference: str) -> ModelConfig:
    require_no_typo(reference)
    return ModelConfig(path=reference)


def _is_adapter_run_of(run: Path, base: str) -> bool:
    """Whether a run trained an adapter of the model `base`."""
    config = read_run_config(run)
    return config.adapter is not None and is_same_model(config.model.path, base)


def is_same_model(one: str, other: str) -> bool:
    """Whether two references are the same files."""
    try:
        located = [locate_model(path) for path in (one, other)]
    except WhetError:
        return False
    first, second = map(Path, located)
    return located[0] == located[1] or (first.is_dir() and second.is_dir() and first.samefile(second))


# What `whet serve` loads: one model, or several adapters of one base.


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Models by the name that requests use, the adapter of each, and how the engine chooses adapters."""

    models: dict[str, tuple[InferenceModel, str | None]]
    adapters: Adapters


def load_models_to_serve(references: Sequence[str], load: LoadMode = "auto") -> LoadedModels:
    """One model of any kind; or adapters (folders, or runs that trained one) of one base, which is loaded once. The
    base itself is served if it is the first of them."""
    names = model_names(references)
    references = [pin_version(reference) for reference in references]
    if len(references) == 1:
        model = load_inference_model(references[0], load)
        is_plain = model.context is contextlib.nullcontext
        adapters = NO_ADAPTERS if is_plain else Adapters(lambda _: model.context(), mixed=False)
        return LoadedModels({names[0]: (model, None)}, adapters)
    folders = [_adapter_folder(reference) for reference in references]
    is_base_served = folders[0] is None
    base = references[0] if folders[0] is None else base_model_of(folders[0])
    for reference, folder in zip(references[is_base_served:], folders[is_base_served:], strict=True):
        if folder is None:
            raise WhetError(
                f"{reference}: not an adapter. Several models share a server only as adapters of one base; start "
                f"another one for this: whet serve {reference} --port PORT"
            )
        if not is_same_model(base_model_of(folder), base):
            raise WhetError(
                f"{reference}: an adapter of {base_model_of(folder)}, not of {base}. Start another server for it: whet "
                f"serve {reference} --port PORT"
            )
    numbered = {f"adapter{number}": folder for number, folder in enumerate(folders) if folder is not None}
    loaded = load_adapter_models(base, numbered, load)
    keys = ([NO_ADAPTER] if is_base_served else []) + list(numbered)
    models = {name: (loaded[key], None if key == NO_ADAPTER else key) for name, key in zip(names, keys, strict=True)}
    mix = mix_adapters(loaded[NO_ADAPTER].model)
    if mix is not None:
        return LoadedModels(models, Adapters(mix, mixed=True))

    def use(chosen: Sequence[str | None]) -> AbstractContextManager[Any]:
        return loaded[chosen[0] or NO_ADAPTER].context()

    return LoadedModels(models, Adapters(use, mixed=False))


def model_names(references: Sequence[str]) -> list[str]:
    """The names for requests: of a path its last part, where that is unique; else the reference itself."""
    short = [_last_part(reference) for reference in references]
    names = [part if short.count(part) == 1 else reference for part, reference in zip(short, references, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise WhetError(f"{twice}: given twice; give each model once")
    return names


def _last_part(reference: str) -> str:
    path = Path(reference)
    is_path = find_run(reference) is not None or local_path(reference).exists()
    return path.name or path.resolve().name if is_path and ":" not in reference else reference


def _adapter_folder(reference: str) -> Path | None:
    """The folder of an adapter, exported from its run if need be; None for a model that is none."""
    if run := find_run(reference):
        if read_run_config(run[0]).adapter is None:
            return None
        return exported_adapter(*run)
    folder = local_path(reference)
    return folder if is_adapter_folder(folder) else None
