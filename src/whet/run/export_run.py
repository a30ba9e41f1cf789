"""Export the model of a run from a checkpoint, verify an existing export again, score a quantized one."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.checkpoint import directory
from whet.checkpoint.load import CheckpointWeights, verify_checkpoint
from whet.config import Config
from whet.convert.neox_export import NeoXFormat
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, silence_libraries, warn
from whet.core.display import is_valid_text
from whet.core.distributed import Ranks, init_distributed
from whet.core.errors import WhetError
from whet.core.files import resolve_path
from whet.core.run_folder import parse_run_reference, read_status
from whet.data.render.renderer import Renderer
from whet.exporting.dtypes import assess_quantization, choose_dtype, dtype_name
from whet.exporting.exporter import EXPORT_FORMATS, verify_export, write_export
from whet.exporting.gguf.gguf_file import GGUFWeights, gguf_file
from whet.exporting.spec import Certificate, ExportMismatchError, ExportSpec, GenerationSettings
from whet.exporting.trained_model import TrainedModel
from whet.inference.inference_model import stop_token_ids
from whet.inference.tasks.load_tasks import loaded_tasks
from whet.inference.tasks.scoring import score_tasks
from whet.model.load.placeholder import is_placeholder, load_placeholder_model
from whet.model.load.tokenizer import load_generation_settings
from whet.model.load.weight_files import snapshot_folder, uncertified_files
from whet.model.lora.peft_adapters import cast_trained_modules_, unwrap_peft
from whet.model.modules import is_multimodal
from whet.model.weight_effect import EFFECT_FILE, describe_effect
from whet.run.data import RunData, load_ledger_data, require_same_tokenizer
from whet.run.models.load_models import load_checkpoint_model, load_inference_model
from whet.run.models.model_builder import build_model
from whet.run.models.register_model import run_reference
from whet.run.resume import read_run_config
from whet.training.checkpoints import require_same_base
from whet.training.precision import PrecisionPolicy, resolve_precision

_PROBE_COUNT = 4  # conversations on which an export is compared with the trained model
_CALIBRATION_TOKENS = 4_096
_MUCH_ROUNDED = 0.5
"""Of the elements that training changed: a larger share lost to the export's dtype is printed."""
KIND_ALIASES = {"hf": "merged"}
EXPORT_FORMATS["neox"] = NeoXFormat()


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The options of `whet export`."""

    kind: str = "merged"
    dtype: str | None = None
    out: Path | None = None
    shard_size: int = 5 * 10**9
    tensor_parallel: int = 1


def export_model(
    config: Config, data: RunData, request: ExportRequest, step: int, ranks: Ranks, is_final: bool
) -> tuple[Path, Certificate]:
    """Export the checkpoint of `step`, verified on a few conversations of the run. Unless it is the last one of a
    finished run, the name of the folder ends with the step."""
    kind = KIND_ALIASES.get(request.kind, request.kind)
    if kind not in EXPORT_FORMATS:
        raise WhetError(f"to: {kind!r} is not a kind of export. Use one of {', '.join(EXPORT_FORMATS)}")
    name = kind if request.dtype is None else f"{kind}-{dtype_name(request.dtype)}"
    name = name if is_final else f"{name}-{directory.checkpoint_name(step)}"
    folder = request.out or config.folder / "exports" / name
    _require_replaceable(folder)
    spec = _build_spec(config, data, request, kind, step, ranks)
    certificate = write_export(spec, kind, folder, _probe_conversations(data))
    text = (
        f"exported to {folder} in {certificate.dtype}: loaded back by {certificate.loaded_by} and verified on "
        f"{certificate.conversations} conversations"
    )
    changed = 1 - (certificate.same_next_token or 0.0)
    if not spec.dtype.is_quantized and changed < 0.0005:  # of quantized ones, an assessment follows
        text += f", largest logit difference {certificate.max_logit_difference:.1e}"
    elif not spec.dtype.is_quantized:
        text += f"; rounding to {certificate.dtype} changes the next token at {changed:.1%} of positions"
    info(text)
    effect = dict(certificate.effect)
    if spec.dtype.is_quantized:  # blocks of weights share scales: what rounding does to single ones means nothing
        effect.pop("lost_to_rounding", None)
    if not _is_complete(effect):
        info(describe_effect(effect))
    if kind == "gguf":
        certificate = _report_gguf(config, spec, folder, certificate, ranks)
    return folder, certificate


def _is_complete(effect: dict[str, Any]) -> bool:
    """Whether every trained weight has moved and is in the export, and rounding kept most of what has changed."""
    count = effect["weights"]
    is_whole = effect["moved"] == count == effect.get("exported", count) and not effect.get("untouched_experts")
    return is_whole and effect.get("lost_to_rounding", 0.0) < _MUCH_ROUNDED


def _report_gguf(config: Config, spec: ExportSpec, folder: Path, certificate: Certificate, ranks: Ranks) -> Certificate:
    """Print what a user needs to know of a GGUF file; of a quantized one, score the run's tasks, too."""
    file = gguf_file(folder)
    if because := certificate.details.get("fell_back_because"):
        count, total = (sum(certificate.details[key].values()) for key in ("fell_back", "tensors"))
        info(f"{count} of {total} tensors have a different type from {certificate.dtype}'s: {because}")
    for note in certificate.details.get("notes", ()):
        info(note)
    if spec.dtype.is_quantized and certificate.same_next_token is not None and certificate.kl is not None:
        info(assess_quantization(spec.dtype, certificate.same_next_token, certificate.kl))
        if config.eval.tasks:
            scores = score_quantized(config, spec, file, ranks)
            certificate = dataclasses.replace(certificate, details=certificate.details | {"scores": scores})
            write_hashed_json(folder / "certificate.json", certificate.as_dict())
            for task, found in scores.items():
                info(f"{task}: {found['export']:.3f} in {certificate.dtype}, {found['trained']:.3f} as trained")
    info(
        f"llama.cpp:  llama-server -m {file}\nOllama:     ollama create {spec.name} -f {folder / 'Modelfile'}\n"
        f"LM Studio:  lms import {file}"
    )
    return certificate


def export_run(reference: str, request: ExportRequest) -> tuple[Path, Certificate]:
    """Export a checkpoint of a run: RUN, RUN@STEP, RUN@best or RUN@latest."""
    silence_libraries()
    path, which = parse_run_reference(run_reference(reference))
    config = read_run_config(path)
    step = directory.resolve_step(path / "checkpoints", which)
    require_same_tokenizer(config, path / "ledger.json")
    data = load_ledger_data(config, path / "ledger.json")
    status = read_status(path)
    is_final = step == status.get("steps")
    if which == "latest" and status.get("state") == "finished" and not is_final:
        warn(
            f"{path}: the run finished with step {status.get('steps')}, but its newest checkpoint is of step {step}: "
            "that one is exported"
        )
    with data.check():
        return export_model(config, data, request, step, init_distributed(), is_final)


def check_export(reference: str, folder: Path) -> Certificate:
    """Load an existing export, compare it with the run again, and rewrite its certificate."""
    silence_libraries()
    path, _ = parse_run_reference(run_reference(reference))
    config = read_run_config(path)
    recorded = read_hashed_json(folder / "certificate.json", f"Export again: whet export {reference}")
    missing = [key for key in ("kind", "step", "dtype", "files") if key not in recorded]
    if missing:
        raise WhetError(
            f"{folder / 'certificate.json'}: the key {missing[0]} is missing. Export again: whet export {reference}"
        )
    kind = recorded["kind"]
    if kind not in EXPORT_FORMATS or not isinstance(recorded["files"], dict):
        raise WhetError(f"{folder / 'certificate.json'}: not the certificate of an export. Export again")
    step = directory.resolve_step(path / "checkpoints", str(recorded["step"]))
    require_same_tokenizer(config, path / "ledger.json")
    data = load_ledger_data(config, path / "ledger.json")
    request = ExportRequest(kind, None if kind == "adapter" else recorded["dtype"])
    with data.check():
        spec = _build_spec(config, data, request, kind, step, init_distributed())
        certificate = verify_export(spec, kind, folder, _probe_conversations(data))
    changed = sorted(name for name, digest in recorded["files"].items() if certificate.files.get(name) != digest)
    kept = {key: recorded[key] for key in ("importance_matrix", "scores") if key in recorded}  # a check has neither
    details = kept | certificate.details
    certificate = dataclasses.replace(certificate, files=recorded["files"], details=details)  # it finds changes again
    if changed:  # a few conversations do not exercise every weight
        reasons = [*certificate.reasons, f"{', '.join(changed)} changed since the export"]
        certificate = dataclasses.replace(certificate, verified=False, reasons=reasons)
    write_hashed_json(folder / "certificate.json", certificate.as_dict())
    if not certificate.verified:
        raise ExportMismatchError(
            f"{folder}: this export does not match {path}: {'; '.join(certificate.reasons)}. Export again: whet export "
            f"{path}@{step} --to {kind}"
        )
    info(f"{folder}: matches {path} after step {step}")
    return certificate


def _probe_conversations(data: RunData) -> list[list[int]]:
    """Token ids of validation conversations, or of training conversations if there are none."""
    store, documents = data.train.store, data.train_documents
    if data.validation is not None:
        store, documents = data.validation, data.validation_documents
    return [store.ids(int(document)).tolist() for document in documents[:_PROBE_COUNT]]


def _calibration_conversations(data: RunData) -> list[list[int]]:
    """Token ids of training conversations, for the importance matrix."""
    store, found, tokens = data.train.store, list[list[int]](), 0
    for document in data.train_documents:
        ids = store.ids(int(document)).tolist()[: _CALIBRATION_TOKENS - tokens]
        if len(ids) < 2:
            break
        found.append(ids)
        tokens += len(ids)
    return found


def _build_spec(
    config: Config, data: RunData, request: ExportRequest, kind: str, step: int, ranks: Ranks
) -> ExportSpec:
    precision = resolve_precision(_with_recorded_precision(config), ranks.device, trains=False)
    trained = _open_trained_model(config, precision, step, ranks, request.shard_size)
    renderer = Renderer(data.tokenizer, config.data.train_on, system=config.data.system)
    generation = GenerationSettings(
        data.tokenizer,
        stop_token_ids(renderer, config.model),
        renderer.end_of_turn(),
        load_generation_settings(config.model),
    )
    compute = trained.adapter_dtype if kind == "adapter" else precision.compute
    dtype = choose_dtype(kind, request.dtype, compute, trained.lossless_dtype)
    return ExportSpec(
        trained, generation, dtype, step, request.shard_size, request.tensor_parallel, config.model.trust_remote_code,
        resolve_path(config.folder).name, _read_effect(config.folder, step),
        snapshot_folder(config.model) if is_multimodal(trained.language_model) else None,
        _calibration_conversations(data) if dtype.llama_ftype is not None else (),
    )  # fmt: skip


def _read_effect(folder: Path, step: int) -> dict[str, Any]:
    """What effect.json of the run says of each weight after this step; nothing if it is of another step or damaged."""
    try:
        found = read_hashed_json(folder / EFFECT_FILE)
        return {each["module"]: each for each in found["modules"]} if found["step"] == step else {}
    except (WhetError, OSError, KeyError, TypeError):
        return {}


def _with_recorded_precision(config: Config) -> Config:
    """Replace train.precision = auto by its value in training, so that an export is the same on any machine."""
    plan = config.folder / "plan.json"
    if config.train.precision != "auto" or not plan.exists():
        return config
    remedy = f"Delete it and give the precision of the run: train.precision in {config.folder / 'config.yaml'}"
    precision = read_hashed_json(plan, remedy, precision=str)["precision"]
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def _open_trained_model(
    config: Config, precision: PrecisionPolicy, step: int, ranks: Ranks, max_bytes: int
) -> TrainedModel:
    """The model of a checkpoint with placeholder weights, which are read when needed. It is loaded whole if its base is
    quantized, if it has code of its own, or if its adapter is initialised from the weights."""
    alone = Ranks(0, 1, ranks.device)
    if config.quantize is not None or config.model.trust_remote_code or config.adapter_needs_weights:
        model = load_checkpoint_model(config, step, alone, precision)
        cast_trained_modules_(model)
        return TrainedModel(model, max_bytes=max_bytes)
    path = config.folder / "checkpoints" / directory.checkpoint_name(step)
    require_same_base(config, verify_checkpoint(path, ["model"], alone), alone)
    bare, base_weights = load_placeholder_model(config.model, precision.weights)
    model = build_model(config, precision, ranks.device, 0, lambda: bare)
    trained_weights = CheckpointWeights(path)
    trainable = {name: weight for name, weight in unwrap_peft(model).named_parameters() if weight.requires_grad}
    trained_weights.require_fit({name: weight.detach() for name, weight in trainable.items()})
    in_memory = {name: weight.detach() for name, weight in trainable.items() if not is_placeholder(weight)}
    if in_memory:
        trained_weights.load_into(in_memory)

    def read(name: str, dtype: torch.dtype) -> Tensor:
        """Trained weights come from the checkpoint, frozen ones from the files of the base."""
        if name in trained_weights:
            return trained_weights.read(name, dtype)
        base_name = name.replace(".base_layer", "").replace(".original_module.", ".")
        return base_weights.read_rows(base_name, 0, 2**62).to(dtype)

    return TrainedModel(model, read, max_bytes, lambda name: base_weights.read_rows(name, 0, 2**62))


def _require_replaceable(folder: Path) -> None:
    """Raise if a folder holds anything but an earlier export, which the new one replaces, or has a name that
    libraries cannot write to."""
    if not is_valid_text(str(folder)):
        raise WhetError(f"{folder}: the name is not valid UTF-8. Give another folder: --out FOLDER")
    others = uncertified_files(folder) if folder.is_dir() else [folder.name] if os.path.lexists(folder) else []
    if others:
        raise WhetError(
            f"{folder}: the export would replace files that do not belong to an export ({', '.join(others[:3])}). Move "
            "them away, or give a new or empty folder: --out FOLDER"
        )


# Task scores of a quantized export, compared with those of the trained model.


def score_quantized(config: Config, spec: ExportSpec, file: Path, ranks: Ranks) -> dict[str, dict[str, float]]:
    """For each task of the run: the score of the trained model and that of the weights in the file.

    Both are computed by whet, in batches and on the run's device: llama.cpp would take an hour for a large model. What
    llama.cpp computes is compared in `kl`.
    """
    trained = load_inference_model(f"{config.folder}@{spec.step}")
    tasks = loaded_tasks(config.eval)
    before = score_tasks(tasks, trained, ranks, minutes=config.eval.minutes)
    model = trained.model
    if config.quantize is not None:  # 4-bit weights cannot hold others
        from transformers import AutoModelForCausalLM

        dtype = spec.model.adapter_dtype
        model = AutoModelForCausalLM.from_config(spec.model.language_model.config, dtype=dtype).to(ranks.device).eval()
    _load_weights_(model, GGUFWeights(file, spec.model))
    quantized = dataclasses.replace(trained, model=model)
    after = score_tasks(tasks, quantized, ranks, minutes=config.eval.minutes)
    return {
        each.task: {"trained": was.score, "export": each.score, "examples": len(each.samples)}
        for was, each in zip(before, after, strict=True)
    }


@torch.no_grad()
def _load_weights_(model: nn.Module, weights: GGUFWeights) -> None:
    for name, parameter in model.named_parameters():
        value = weights.joined(name)
        if value is not None:  # parts of an image encoder are not in the file
            parameter.copy_(value)
