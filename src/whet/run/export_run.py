"""Export the model of a run from a checkpoint, and verify an existing export again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whet.checkpoint import directory
from whet.checkpoint.load import CheckpointWeights, verify_checkpoint
from whet.config import Config
from whet.core.console import info, silence_libraries
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.files import read_json, write_json
from whet.core.run_folder import parse_run_reference, read_status
from whet.data.render.renderer import Renderer
from whet.exporting.exporter import verify_export, write_export
from whet.exporting.spec import Certificate, ExportMismatchError, ExportSpec, GenerationSettings, choose_dtype
from whet.exporting.trained_model import TrainedModel
from whet.inference.inference_model import stop_token_ids
from whet.model.load.placeholder import WeightSource, is_placeholder, load_placeholder_model
from whet.model.load.tokenizer import load_generation_settings
from whet.model.lora.peft_adapters import cast_trained_modules_, unwrap_peft
from whet.run.assemble import build_model
from whet.run.data import RunData, load_recorded_data, require_same_tokenizer
from whet.run.load_models import load_checkpoint_model, read_run_config
from whet.run.resume import require_same_base
from whet.training.precision import PrecisionPolicy, resolve_precision

_PROBE_COUNT = 4  # conversations that an export is compared on
KIND_ALIASES = {"hf": "merged"}
"""Other names of the same thing: without adapters there is nothing to merge, and it is a Hugging Face folder all the
same."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a user may say about an export."""

    kind: str = "merged"
    dtype: str | None = None
    out: Path | None = None
    shard_size: int = 5 * 10**9
    tensor_parallel: int = 1


def export_model(
    config: Config, data: RunData, wish: ExportRequest, step: int, ranks: Ranks, is_final: bool
) -> tuple[Path, Certificate]:
    """Ship a run's model after `step` and compare it on a few of its own conversations. Only a finished run's last
    state is called plainly by its kind."""
    kind = KIND_ALIASES.get(wish.kind, wish.kind)
    order = _build_spec(config, data, wish, kind, step, ranks)
    name = kind if wish.dtype is None else f"{kind}-{wish.dtype}"
    folder = wish.out or config.folder / "exports" / (name if is_final else f"{name}-{directory.checkpoint_name(step)}")
    if wish.out is not None:
        _require_replaceable(wish.out)
    certificate = write_export(order, kind, folder, _probe_conversations(data))
    info(
        f"exported to {folder} in {certificate.dtype}: loaded back by {certificate.loaded_by} and compared on "
        f"{certificate.conversations} conversations, largest difference of a logit "
        f"{certificate.max_logit_difference:.1e}, the same next token in {certificate.same_next_token:.1%} of places"
    )
    return folder, certificate


def export_run(reference: str, wish: ExportRequest) -> tuple[Path, Certificate]:
    """Export a run's newest, or a named, checkpoint."""
    silence_libraries()
    path, which = parse_run_reference(reference)
    config = read_run_config(path)
    step = directory.resolve_step(path / "checkpoints", which)
    require_same_tokenizer(config, path / "ledger.json")
    data = load_recorded_data(config, path / "ledger.json")
    is_final = step == read_status(path).get("steps")
    return export_model(config, data, wish, step, init_distributed(), is_final)


def check_export(reference: str, folder: Path) -> Certificate:
    """Load an export of a run back and compare it again, as when it was made; its certificate is written anew."""
    silence_libraries()
    path, _ = parse_run_reference(reference)
    config = read_run_config(path)
    said = read_json(folder / "certificate.json")
    missing = [key for key in ("kind", "step", "dtype", "files") if key not in said]
    if missing:
        raise WhetError(f"{folder / 'certificate.json'}: it has no {missing[0]}; export again: whet export {reference}")
    step = directory.resolve_step(path / "checkpoints", str(said["step"]))
    require_same_tokenizer(config, path / "ledger.json")
    data = load_recorded_data(config, path / "ledger.json")
    dtype = None if said["kind"] == "adapter" else said["dtype"]
    order = _build_spec(config, data, ExportRequest(said["kind"], dtype), said["kind"], step, init_distributed())
    certificate = verify_export(order, said["kind"], folder, _probe_conversations(data))
    changed = sorted(name for name, digest in said["files"].items() if certificate.files.get(name) != digest)
    more = f" ({', '.join(changed)} changed since it was exported)" if changed and not certificate.verified else ""
    if changed:  # a few conversations do not see every weight; and the next look must find it changed again
        reasons = certificate.reasons or [f"{', '.join(changed)} changed since it was exported"]
        certificate = dataclasses.replace(certificate, verified=False, reasons=reasons, files=said["files"])
    write_json(folder / "certificate.json", certificate.as_dict())
    if not certificate.verified:
        raise ExportMismatchError(
            f"{folder}: this export is not what {path} trained: {'; '.join(certificate.reasons)}{more}. Export again: "
            f"whet export {path}@{step} --to {said['kind']}"
        )
    info(f"{folder}: it is what {path} trained, after step {step}")
    return certificate


def _probe_conversations(data: RunData) -> list[list[int]]:
    """Held-out conversations, or trained ones if there are no others."""
    store, documents = data.train.store, data.train_documents
    if data.validation is not None:
        store, documents = data.validation, data.validation_documents
    return [store.ids(int(document)).tolist() for document in documents[:_PROBE_COUNT]]


def _build_spec(config: Config, data: RunData, wish: ExportRequest, kind: str, step: int, ranks: Ranks) -> ExportSpec:
    precision = resolve_precision(_with_recorded_precision(config), ranks.device, trains=False)
    trained = _open_trained_model(config, precision, step, ranks, wish.shard_size)
    renderer = Renderer(data.tokenizer, config.data.train_on)
    speech = GenerationSettings(
        data.tokenizer,
        stop_token_ids(renderer, config.model),
        renderer.end_of_turn(),
        load_generation_settings(config.model),
    )
    computed_in = trained.adapter_in if kind == "adapter" else precision.compute
    numbers = choose_dtype(kind, wish.dtype, computed_in, trained.learned_in)
    return ExportSpec(
        trained, speech, numbers, step, wish.shard_size, wish.tensor_parallel,
        config.model.trust_remote_code, config.folder.resolve().name,
    )  # fmt: skip


def _with_recorded_precision(config: Config) -> Config:
    """With the precision that `auto` meant where it was trained: an export of the same run on another machine is the
    same."""
    plan = config.folder / "plan.json"
    precision = read_json(plan).get("precision") if plan.exists() else None
    if config.train.precision != "auto" or precision is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def _open_trained_model(config: Config, precision: PrecisionPolicy, step: int, ranks: Ranks, room: int) -> TrainedModel:
    """Without memory for its weights, which are read while they are needed; whole, if its base is in 4 bits or its
    adapter is one that begins as a function of the weights."""
    alone = Ranks(0, 1, ranks.device)
    if config.quantize is not None or config.model.trust_remote_code or config.adapter_needs_weights:
        whole = load_checkpoint_model(config, step, alone, precision)
        cast_trained_modules_(whole)
        return TrainedModel(whole, room=room)
    path = config.folder / "checkpoints" / directory.checkpoint_name(step)
    require_same_base(config, verify_checkpoint(path, ["model"], alone), alone)
    bare, source = load_placeholder_model(config.model, precision.weights)
    model = build_model(config, precision, ranks.device, 0, lambda: bare)
    inner = unwrap_peft(model)
    learned = {name: weight for name, weight in inner.named_parameters() if weight.requires_grad}
    saved = CheckpointWeights(path)
    saved.require_fit({name: weight.detach() for name, weight in learned.items()})
    held = {name: weight.detach() for name, weight in learned.items() if not is_placeholder(weight)}
    if held:
        saved.load_into(held)
    return TrainedModel(model, _WeightReader(saved, source), room)


class _WeightReader:
    """Trained weights from the checkpoint, frozen ones from the files of the base."""

    def __init__(self, saved: CheckpointWeights, source: WeightSource) -> None:
        self._saved, self._source = saved, source

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._saved:
            return self._saved.read(name, dtype)
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        return self._source.read_rows(plain, 0, 2**62).to(dtype)


def _require_replaceable(folder: Path) -> None:
    """Replace an older export, but nobody's own files."""
    if (
        folder.exists()
        and (not folder.is_dir() or any(folder.iterdir()))
        and not (folder / "certificate.json").exists()
    ):
        raise WhetError(f"--out: {folder} holds something else than an export. Give a folder that is new or empty")
