"""Models ready to answer: from a folder, a hub, a run, or an adapter beside its base."""

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

from whet.config import read_config
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.run import split_reference
from whet.data.render import Renderer
from whet.model import attention
from whet.model.added_tokens import make_room_
from whet.model.config import ModelConfig
from whet.model.load import load_model
from whet.model.lora import in_one_type_, language_model, merge, vocabulary_of
from whet.model.quantize import quantize_
from whet.model.tokenizer import cannot_load, load_tokenizer, locate
from whet.recipe.adapters import add_named, base_of, brings_rows, in_4_bits, is_adapter
from whet.recipe.data import hush_libraries, tokenizer_of
from whet.recipe.measure import answer_stops
from whet.recipe.use import load_run

Load = Literal["auto", "4bit", "spread"]
"""Onto one device as it is saved; its linear layers in 4 bits; divided over all GPUs that can be seen."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A model that can answer."""

    model: nn.Module
    renderer: Renderer
    stops: list[int]
    name: str = ""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered while it answers: models that share weights switch their adapters there."""


def load_ready(reference: str, load: Load = "auto") -> Ready:
    """A model folder, a hub id, a built-in model, an adapter's folder, or a run (RUN, RUN@STEP, RUN@best, RUN@latest),
    ready to answer."""
    hush_libraries()
    path, step = split_reference(reference)
    if (path / "config.yaml").exists():
        _refuse_for_run(path, load)
        run = load_run(path, step)
        in_one_type_(run.model)
        # merged it would answer a little faster, but a model in 4 bits may be too large for that
        model = language_model(run.model) if run.config.quantize else merge(run.model)
        attention.leave(model)
        return _ready(model.to(run.ranks.device), Renderer(tokenizer_of(run.config), "assistant"), run.config.model,
                      reference)  # fmt: skip
    if is_adapter(path):
        return _with_adapter(reference, base_of(path), load)[0]
    config = _config_of(reference)
    renderer = Renderer(load_tokenizer(config), "assistant")
    return _ready(_loaded(config, load), renderer, config, reference)


def load_beside(reference: str, against: str, load: Load = "auto") -> tuple[Ready, Ready]:
    """Two models to compare; where the first is an adapter over the second, they share weights."""
    path, step = split_reference(reference)
    if is_adapter(path) and _same(base_of(path), against):
        return _with_adapter(reference, against, load)
    if _trains_adapter_of(path, against):
        _refuse_for_run(path, load)
        hush_libraries()
        run = load_run(path, step)
        in_one_type_(run.model)
        model = language_model(run.model)
        attention.leave(model)
        own, base = Renderer(tokenizer_of(run.config), "assistant"), _config_of(against)
        off: Any = run.model.disable_adapter
        name = f"{against} in 4 bits" if run.config.quantize else against
        return (
            _ready(model, own, run.config.model, reference),
            _ready(model, Renderer(load_tokenizer(base), "assistant"), base, name, off),
        )
    return load_ready(reference, load), load_ready(against, load)


BASE = "none"
"""What the model without any adapter is called."""


def load_adapters(base: str, adapters: dict[str, Path], load: Load = "auto") -> dict[str, Ready]:
    """One model with several adapters by name, and under `none` the model without them; all share its weights."""
    hush_libraries()
    config = _config_of(base)
    plain = load_tokenizer(config)
    tokenizers = {}
    for name, folder in adapters.items():
        own = (folder / "tokenizer_config.json").exists()  # an export brings the tokenizer it was trained with
        tokenizers[name] = load_tokenizer(ModelConfig(path=base, tokenizer=str(folder))) if own else plain
    bare = _loaded(config, load)
    for name, folder in adapters.items():
        if brings_rows(folder, len(tokenizers[name])):
            make_room_(bare, len(tokenizers[name]))
        if load != "4bit" and in_4_bits(folder):
            warn(f"{folder}: trained beside {base} in 4 bits, and that is loaded whole here: it may say something else "
                 "than what was trained. Add --load 4bit")  # fmt: skip
    adapted = add_named(bare, base, adapters)
    model = language_model(adapted)
    found = {BASE: _ready(model, Renderer(plain, "assistant"), config, base, adapted.disable_adapter)}
    for name, tokenizer in tokenizers.items():
        renderer = Renderer(tokenizer, "assistant")
        found[name] = _ready(model, renderer, config, name, lambda name=name: _speaking_as(adapted, name))  # type: ignore[misc]
    return found


def _with_adapter(reference: str, base: str, load: Load) -> tuple[Ready, Ready]:
    """The adapter in a folder, and its base; a path has dots, which a name must not have."""
    both = load_adapters(base, {"tuned": Path(reference)}, load)
    return replace(both["tuned"], name=reference), both[BASE]


@contextlib.contextmanager
def _speaking_as(adapted: Any, name: str) -> Any:
    adapted.set_adapter(name)
    yield


def _ready(
    model: nn.Module, renderer: Renderer, config: ModelConfig, name: str,
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Ready:  # fmt: skip
    known, room = len(renderer.tokenizer), vocabulary_of(model)
    if known > room:
        raise WhetError(
            f"{name}: the tokenizer knows {known:,} tokens and the model only {room:,}. They do not belong together: "
            "use the tokenizer that came with the model, or the base that the adapter was trained beside"
        )
    return Ready(model.eval(), renderer, answer_stops(renderer, config), name, within)


def _loaded(config: ModelConfig, load: Load) -> nn.Module:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if load == "spread":
        return _spread(config)
    if load == "4bit":
        model = load_model(config, "auto", torch.device("cpu")).requires_grad_(False)
        quantize_(model, device)
        return model.to(device)
    return load_model(config, "auto", device).to(device)


def _spread(config: ModelConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            locate(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code, dtype="auto",
            device_map="auto",
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise cannot_load(config.path, "model", error) from None


def _refuse_for_run(path: Path, load: Load) -> None:
    if load != "auto":
        raise WhetError(
            f"--load: {load} is for models, and {path} is a run. Export it first: whet export {path}, then "
            f"whet chat {path}/exports/merged --load {load}"
        )


def _config_of(reference: str) -> ModelConfig:
    """A mistyped path must not become a question to a hub: what begins with a folder that is here is a path."""
    path = Path(reference).expanduser()
    if ":" not in reference and not path.exists() and len(path.parts) > 1 and path.parent.is_dir():
        there = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
        near = difflib.get_close_matches(path.name.partition("@")[0], there, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
        raise WhetError(f"{reference}: no such folder (looked in {Path.cwd()}).{hint}")
    return ModelConfig(path=reference)


def _trains_adapter_of(path: Path, base: str) -> bool:
    """Whether `path` is a run that trained an adapter beside the model `base`."""
    if not (path / "config.yaml").exists():
        return False
    config = read_config(path / "config.yaml")
    return config.adapter is not None and _same(config.model.path, base)


def _same(one: str, other: str) -> bool:
    try:
        places = [locate(path) for path in (one, other)]
    except WhetError:
        return False
    first, second = map(Path, places)
    return places[0] == places[1] or (first.is_dir() and second.is_dir() and first.samefile(second))
