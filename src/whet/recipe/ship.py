"""Shipping the model of a run: exported from a checkpoint, loaded back, compared with what was trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whet.checkpoint import place
from whet.checkpoint.export.certificate import Certificate, NotTheSameError
from whet.checkpoint.export.make import check, export
from whet.checkpoint.export.numbers import choose
from whet.checkpoint.export.order import Order, Speech
from whet.checkpoint.export.saved import Saved
from whet.checkpoint.export.trained import Trained
from whet.checkpoint.load import verify
from whet.config import Config
from whet.core.console import say
from whet.core.errors import WhetError
from whet.core.files import read_json, write_json
from whet.core.ranks import Ranks, start_ranks
from whet.core.run import read_status, split_reference
from whet.data.render import Renderer
from whet.model.hollow import Source, is_hollow, load_hollow
from whet.model.lora import in_one_type_, language_model
from whet.model.tokenizer import generation_settings
from whet.recipe.about import require_base
from whet.recipe.data import Data, hush_libraries, recorded_data, require_speech
from whet.recipe.measure import answer_stops
from whet.recipe.parts import Arithmetic, arithmetic_of, build_model
from whet.recipe.use import model_after, run_config

_PROBES = 4  # conversations that an export is compared on
ALIASES = {"hf": "merged"}
"""Other names of the same thing: without adapters there is nothing to merge, and it is a Hugging Face folder all the
same."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a user may say about an export."""

    kind: str = "merged"
    dtype: str | None = None
    out: Path | None = None
    shard_size: int = 5 * 10**9
    tensor_parallel: int = 1


def export_model(
    config: Config, data: Data, wish: Wish, step: int, ranks: Ranks, is_final: bool
) -> tuple[Path, Certificate]:
    """Ship a run's model after `step` and compare it on a few of its own conversations. Only a finished run's last
    state is called plainly by its kind."""
    kind = ALIASES.get(wish.kind, wish.kind)
    order = _order(config, data, wish, kind, step, ranks)
    name = kind if wish.dtype is None else f"{kind}-{wish.dtype}"
    folder = wish.out or config.folder / "exports" / (name if is_final else f"{name}-{place.name_of(step)}")
    if wish.out is not None:
        _require_free(wish.out)
    certificate = export(order, kind, folder, _probes(data))
    say(
        f"exported to {folder} in {certificate.dtype}: loaded back by {certificate.loaded_by} and compared on "
        f"{certificate.conversations} conversations, largest difference of a logit "
        f"{certificate.max_logit_difference:.1e}, the same next token in {certificate.same_next_token:.1%} of places"
    )
    return folder, certificate


def export_run(reference: str, wish: Wish) -> tuple[Path, Certificate]:
    """Export a run's newest, or a named, checkpoint."""
    hush_libraries()
    path, which = split_reference(reference)
    config = run_config(path)
    step = place.find(path / "checkpoints", which)
    require_speech(config, path / "ledger.json")
    data = recorded_data(config, path / "ledger.json")
    is_final = step == read_status(path).get("steps")
    return export_model(config, data, wish, step, start_ranks(), is_final)


def check_export(reference: str, folder: Path) -> Certificate:
    """Load an export of a run back and compare it again, as when it was made; its certificate is written anew."""
    hush_libraries()
    path, _ = split_reference(reference)
    config = run_config(path)
    said = read_json(folder / "certificate.json")
    missing = [key for key in ("kind", "step", "dtype", "files") if key not in said]
    if missing:
        raise WhetError(f"{folder / 'certificate.json'}: it has no {missing[0]}; export again: whet export {reference}")
    step = place.find(path / "checkpoints", str(said["step"]))
    require_speech(config, path / "ledger.json")
    data = recorded_data(config, path / "ledger.json")
    dtype = None if said["kind"] == "adapter" else said["dtype"]
    order = _order(config, data, Wish(said["kind"], dtype), said["kind"], step, start_ranks())
    certificate = check(order, said["kind"], folder, _probes(data))
    changed = sorted(name for name, digest in said["files"].items() if certificate.files.get(name) != digest)
    more = f" ({', '.join(changed)} changed since it was exported)" if changed and not certificate.verified else ""
    if changed:  # a few conversations do not see every weight; and the next look must find it changed again
        reasons = certificate.reasons or [f"{', '.join(changed)} changed since it was exported"]
        certificate = dataclasses.replace(certificate, verified=False, reasons=reasons, files=said["files"])
    write_json(folder / "certificate.json", certificate.as_dict())
    if not certificate.verified:
        raise NotTheSameError(
            f"{folder}: this export is not what {path} trained: {'; '.join(certificate.reasons)}{more}. Export again: "
            f"whet export {path}@{step} --to {said['kind']}"
        )
    say(f"{folder}: it is what {path} trained, after step {step}")
    return certificate


def _probes(data: Data) -> list[list[int]]:
    """Held-out conversations, or trained ones if there are no others."""
    store, documents = data.train.store, data.train_documents
    if data.validation is not None:
        store, documents = data.validation, data.validation_documents
    return [store.ids(int(document)).tolist() for document in documents[:_PROBES]]


def _order(config: Config, data: Data, wish: Wish, kind: str, step: int, ranks: Ranks) -> Order:
    arithmetic = arithmetic_of(_as_trained(config), ranks.device, trains=False)
    trained = _trained_after(config, arithmetic, step, ranks, wish.shard_size)
    renderer = Renderer(data.tokenizer, config.data.train_on)
    speech = Speech(
        data.tokenizer, answer_stops(renderer, config.model), renderer.end_of_turn(), generation_settings(config.model)
    )
    computed_in = trained.adapter_in if kind == "adapter" else arithmetic.compute
    numbers = choose(kind, wish.dtype, computed_in, trained.learned_in)
    return Order(
        trained, speech, numbers, step, wish.shard_size, wish.tensor_parallel,
        config.model.trust_remote_code, config.folder.resolve().name,
    )  # fmt: skip


def _as_trained(config: Config) -> Config:
    """With the precision that `auto` meant where it was trained: an export of the same run on another machine is the
    same."""
    plan = config.folder / "plan.json"
    precision = read_json(plan).get("precision") if plan.exists() else None
    if config.train.precision != "auto" or precision is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def _trained_after(config: Config, arithmetic: Arithmetic, step: int, ranks: Ranks, room: int) -> Trained:
    """Without memory for its weights, which are read while they are needed; whole, if its base is in 4 bits or its
    adapter is one that begins as a function of the weights."""
    alone = Ranks(0, 1, ranks.device)
    if config.quantize is not None or config.model.trust_remote_code or config.adapter_needs_weights:
        whole = model_after(config, step, alone, arithmetic)
        in_one_type_(whole)
        return Trained(whole, room=room)
    path = config.folder / "checkpoints" / place.name_of(step)
    require_base(config, verify(path, ["model"], alone), alone)
    bare, source = load_hollow(config.model, arithmetic.weights)
    model = build_model(config, arithmetic, ranks.device, 0, lambda: bare)
    inner = language_model(model)
    learned = {name: weight for name, weight in inner.named_parameters() if weight.requires_grad}
    saved = Saved(path)
    saved.require({name: weight.detach() for name, weight in learned.items()})
    held = {name: weight.detach() for name, weight in learned.items() if not is_hollow(weight)}
    if held:
        saved.fill(held)
    return Trained(model, _Reader(saved, source), room)


class _Reader:
    """Trained weights from the checkpoint, frozen ones from the files of the base."""

    def __init__(self, saved: Saved, source: Source) -> None:
        self._saved, self._source = saved, source

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._saved:
            return self._saved.read(name, dtype)
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        return self._source.rows(plain, 0, 2**62).to(dtype)


def _require_free(folder: Path) -> None:
    """Replace an older export, but nobody's own files."""
    if (
        folder.exists()
        and (not folder.is_dir() or any(folder.iterdir()))
        and not (folder / "certificate.json").exists()
    ):
        raise WhetError(f"--out: {folder} holds something else than an export. Give a folder that is new or empty")
