"""`whet merge`: merge weighted LoRA adapters into their base and write a plain model folder.

`cat` adds Σ weight · scale · B·A, whatever the ranks are. `linear` averages the matrices A and B themselves, as peft
does: the product then mixes B of one adapter with A of another, which is not the sum of what the adapters do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from whet.checkpoint.directory import list_steps
from whet.compat.peft_private import is_lora_layer
from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.console import info, silence_libraries, warn
from whet.core.errors import RunFailedError, WhetError, os_error
from whet.core.files import atomic_dir, hash_file, read_json, require_disk_space, resolve_path, user_path, write_json
from whet.exporting.dtypes import export_dtype_of
from whet.exporting.hf_folder import write_weights
from whet.exporting.spec import ExportFindings
from whet.exporting.trained_model import TrainedModel, compute_logits
from whet.exporting.verification import compare_logits
from whet.exporting.weight_comparison import SafetensorsWeights, compare_weights
from whet.model.config import ModelConfig
from whet.model.load.pretrained import load_model, load_with_transformers
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import hash_model_folder, locate_model, require_certified_files, weights_hash
from whet.model.lora.adapter_folder import is_trained_on
from whet.model.lora.peft_adapters import cast_trained_modules_, embedding_rows, unwrap_peft
from whet.model.weight_effect import describe_effect, effect_certificate
from whet.registry.references import local_path, pin_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CombinationType = Literal["cat", "linear"]
_CONFIG, _WEIGHTS, _CERTIFICATE = "adapter_config.json", "adapter_model.safetensors", "certificate.json"
_GENERATION_CONFIG = "generation_config.json"
_MAX_RELATIVE_ERROR = 1e-4
"""Largest part of an adapter's update that rounding may change when adapters are combined."""
_MIN_SAME_NEXT_TOKEN = 0.95
_PROBE_TEXTS = (
    "The model that ships is the model that was trained: one way to see that is to ask it.",
    'Please send three red lamps to Anna in Riga by Friday. {"item": "lamp", "amount": 3}',
)


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter folder and its weight in the sum."""

    folder: Path
    weight: float = 1.0

    @property
    def config(self) -> dict[str, Any]:
        return dict(read_json(self.folder / _CONFIG))


def merge_adapter_folders(base: str, adapters: Sequence[str], how: CombinationType, out: Path) -> dict[str, Any]:
    """Merge adapters, each FOLDER or FOLDER=WEIGHT, into `base` and write a model folder."""
    silence_libraries()
    if (out / "config.json").exists() or (out.exists() and any(out.iterdir())):
        raise WhetError(f"--out {out}: this folder is not empty. Choose another one")
    parts = [_parse_adapter(text) for text in adapters]
    require_mergeable(parts)
    config = ModelConfig(path=pin_version(base))
    for part in parts:
        _require_same_base(config, part)
    model = load_model(config, "auto")
    tokenizer = _common_tokenizer(config, parts, embedding_rows(model))
    probes = [tokenizer.encode(text) for text in _PROBE_TEXTS]
    certificate = merge_adapters(model, parts, probes, tokenizer, how, out)
    info(
        f"merged to {out}: loaded back and verified, largest logit difference {certificate['max_logit_difference']:.1e}"
    )
    info(describe_effect(certificate["effect"]))
    return {"merged": str(out), "certificate": certificate}


def _parse_adapter(text: str) -> WeightedAdapter:
    folder, equals, weight = text.rpartition("=")
    if not equals or user_path(text).is_dir():
        return WeightedAdapter(_adapter_folder(local_path(text)))
    try:
        number = float(weight)
    except ValueError:
        raise WhetError(f"--adapter {text}: {weight!r} is not a number. Write FOLDER or FOLDER=WEIGHT") from None
    if not abs(number) < 1e6 or number == 0:
        raise WhetError(f"--adapter {text}: the weight {weight} is not usable. Use a finite number other than 0")
    return WeightedAdapter(_adapter_folder(local_path(folder)), number)


def _adapter_folder(folder: Path) -> Path:
    """The adapter export of a run folder; any other folder as it is."""
    exported = folder / "exports" / "adapter"
    if not ((folder / "config.yaml").is_file() and exported.is_dir()):
        return folder
    certificate = exported / _CERTIFICATE
    step = read_hashed_json(certificate).get("step") if certificate.is_file() else None
    steps = list_steps(folder / "checkpoints")
    if steps and step is not None and step != steps[-1]:
        raise WhetError(
            f"--adapter {folder}: {exported} has the adapter after step {step}, but the run has trained to step "
            f"{steps[-1]}. Export it again: whet export {folder} --to adapter. For the earlier one give {exported}"
        )
    return exported


def require_mergeable(parts: Sequence[WeightedAdapter]) -> None:
    """Raise before anything is loaded if a folder is not a LoRA adapter, or cannot be weighted or summed."""
    for part in parts:
        missing = [name for name in (_CONFIG, _WEIGHTS) if not (part.folder / name).is_file()]
        if missing:
            raise WhetError(
                f"--adapter {part.folder}: not an adapter folder, {missing[0]} is missing. Give a folder that peft "
                "wrote; for a run: whet export RUN --to adapter, then RUN/exports/adapter"
            )
        require_certified_files(part.folder)
        config = part.config
        if config.get("peft_type") != "LORA":
            raise WhetError(
                f"--adapter {part.folder}: peft_type {config.get('peft_type')}, but only LORA can be merged"
            )
        features = {
            "DoRA": config.get("use_dora"),
            "modules_to_save": config.get("modules_to_save"),
            "trainable_token_indices": config.get("trainable_token_indices"),
            "adapters of experts": config.get("target_parameters"),  # peft would mix the ranks of different experts
        }
        unweightable = next((name for name, value in features.items() if value), None)
        if unweightable and (len(parts) > 1 or part.weight != 1):
            raise WhetError(
                f"--adapter {part.folder}: it has {unweightable}, which can be neither added to another adapter nor "
                "weighted. Merge it alone, and train the other adapter on the result"
            )


def _require_same_base(base: ModelConfig, part: WeightedAdapter) -> None:
    """Raise if the adapter was trained on other weights, wherever they are stored now."""
    certificate = part.folder / _CERTIFICATE
    if certificate.is_file() and read_hashed_json(certificate).get("quantize"):
        warn(
            f"--adapter {part.folder}: trained on a base in 4 bits, but merged into the unquantized one: answers may "
            "differ from those of the run. `whet export RUN --to merged` merges into the quantized base"
        )
    trained_on = str(part.config.get("base_model_name_or_path") or "")
    certified = is_trained_on(part.folder, base.path)
    if certified is False:
        raise WhetError(
            f"--adapter {part.folder}: trained on {trained_on}, with other weights than those that {base.path} has "
            "now. Give the model that it was trained on as BASE; if its files were changed, bring the old ones back"
        )
    if certified:
        return
    folder = locate_model(base.path)
    is_same_path = Path(trained_on).is_dir() and resolve_path(Path(trained_on)) == resolve_path(Path(folder))
    if trained_on in (folder, base.path) or is_same_path:
        return
    try:
        then, now = weights_hash(ModelConfig(path=trained_on)), weights_hash(base)
    except (WhetError, OSError, ValueError):  # a deleted folder, or a hub that cannot be reached
        then = now = None
    if then is None or now is None:
        name = trained_on or "an unnamed model"
        warn(f"--adapter {part.folder}: cannot check that {base.path} is its base: it was trained on {name}")
    elif then != now:
        raise WhetError(
            f"--adapter {part.folder}: trained on {trained_on}, whose weights differ from those of {base.path}. Give "
            "that as BASE"
        )


def _common_tokenizer(base: ModelConfig, parts: Sequence[WeightedAdapter], rows: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the base, or the extended one that all adapters with a tokenizer of their own share. `rows` is
    the size of the model's embedding."""
    own = load_tokenizer(base)
    chosen, owner = own, base.path
    for part in parts:
        trained = part.config.get("trainable_token_indices") or []
        per_module = trained.values() if isinstance(trained, dict) else [trained]
        highest = max((i for ids in per_module for i in ids), default=0)
        if not (part.folder / "tokenizer_config.json").exists():
            if highest >= max(rows, len(chosen)):
                raise WhetError(
                    f"--adapter {part.folder}: it trained token {highest}, the model has {rows} tokens, and the folder "
                    "has no tokenizer. Copy the tokenizer of its training there"
                )
            continue
        brought = load_tokenizer(ModelConfig(path=base.path, tokenizer=str(part.folder)))
        vocabulary = brought.get_vocab()
        if vocabulary == chosen.get_vocab():
            chosen = brought if chosen is own else chosen  # for the chat template of its training
            continue
        if chosen is not own or not own.get_vocab().items() <= vocabulary.items():
            raise WhetError(
                f"--adapter {part.folder}: its vocabulary of {len(vocabulary):,} tokens differs from that of {owner} "
                f"({len(chosen):,}), so token ids mean different texts. Merge only adapters of one vocabulary"
            )
        chosen, owner = brought, str(part.folder)
    return chosen


def merge_adapters(
    base: nn.Module,
    parts: Sequence[WeightedAdapter],
    probes: Sequence[Sequence[int]],
    tokenizer: Any,
    how: CombinationType,
    folder: Path,
) -> dict[str, Any]:
    """Write the merged model to `folder`, after comparing it on `probes` with the base and its adapters. Returns the
    certificate."""
    if len(tokenizer) > embedding_rows(base):
        base.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    dtype = next(base.parameters()).dtype
    dtypes = {name: weight.dtype for name, weight in (*base.named_parameters(), *base.named_buffers())}
    model = _attach_adapters(base, parts)
    relative_error = _combine_adapters(model, parts, how)
    cast_trained_modules_(model)
    trained, findings = TrainedModel(model), ExportFindings()
    try:
        require_disk_space(folder, sum(dtype.itemsize * weight.numel() for weight in base.parameters()), "the model")
        with atomic_dir(folder) as temporary:
            expected = trained.logits(probes)
            _write_configs(trained.language_model, temporary)
            write_weights(trained, temporary, lambda name: dtypes.get(name, dtype))
            tokenizer.save_pretrained(temporary)
            _write_stop_tokens(temporary, parts)
            found = compute_logits(_load_back(temporary, dtype), probes)
            compare_logits(found, expected, export_dtype_of(dtype), findings, _MIN_SAME_NEXT_TOKEN)
            exported = SafetensorsWeights(temporary, trained)
            compare_weights(trained, exported, export_dtype_of(dtype), findings)
            certificate = {
                "kind": "merged-adapters",
                "how": how,
                "adapters": [
                    {"folder": str(part.folder), "weight": part.weight, "hash": hash_file(part.folder / _WEIGHTS)}
                    for part in parts
                ],
                "part_lost": relative_error,
                "verified": not findings.reasons,
                "tokens": len(expected),
                "max_logit_difference": findings.max_logit_difference,
                "same_next_token": findings.same_next_token,
                "effect": effect_certificate(findings.effect),
                "files": hash_model_folder(temporary),
            }
            if findings.reasons:
                raise RunFailedError(
                    f"{folder}: the merged model does not match the base with its adapters: "
                    f"{'; '.join(findings.reasons)}. Nothing was written"
                )
            write_hashed_json(temporary / _CERTIFICATE, certificate)
    except Exception as error:
        raise os_error(error, "merging", folder) or error from None
    return certificate


def _write_configs(language_model: Any, folder: Path) -> None:
    """The base's configuration and generation config. A tied head stays as it was under an adapter of the embedding, so
    that it has its own weight."""
    config, head = language_model.config, language_model.get_output_embeddings()
    embedding = language_model.get_input_embeddings()
    if is_lora_layer(embedding) and head.weight is embedding.get_base_layer().weight:
        config.tie_word_embeddings = False
    config.architectures = [type(language_model).__name__]
    config.save_pretrained(folder)
    if language_model.can_generate():
        language_model.generation_config.to_json_file(folder / _GENERATION_CONFIG)


def _write_stop_tokens(folder: Path, parts: Sequence[WeightedAdapter]) -> None:
    """Set eos_token_id of the generation config to the stop tokens of the base and of all adapters."""
    file = folder / _GENERATION_CONFIG
    config = dict(read_json(file)) if file.exists() else {}
    paths = [part.folder / _GENERATION_CONFIG for part in parts]
    brought = [read_json(path) for path in paths if path.exists()]
    ends = [each.get("eos_token_id") for each in (config, *brought)]
    stop_ids = {stop for end in ends if end is not None for stop in (end if isinstance(end, list) else [end])}
    if brought and stop_ids:
        write_json(file, {**config, "eos_token_id": sorted(stop_ids)})


def _load_back(folder: Path, dtype: torch.dtype) -> nn.Module:
    loaded: nn.Module = load_with_transformers(folder, dtype=dtype, trust_remote_code=False)
    return loaded


def _attach_adapters(base: nn.Module, parts: Sequence[WeightedAdapter]) -> Any:
    """The base with all adapters attached, named "0", "1", …"""
    from peft import PeftModel

    model: Any = None
    for number, part in enumerate(parts):
        try:
            if model is None:
                model = PeftModel.from_pretrained(base, part.folder, adapter_name="0")
            else:
                model.load_adapter(part.folder, adapter_name=str(number))
        except Exception as error:  # a damaged or forged file can raise almost anything
            reason = next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), str(error))
            raise WhetError(
                f"--adapter {part.folder}: it does not fit the base ({reason}). It was trained on "
                f"{part.config.get('base_model_name_or_path')}"
            ) from None
    return model.eval()


def _combine_adapters(model: Any, parts: Sequence[WeightedAdapter], how: CombinationType) -> float:
    """Combine all adapters into one. Returns the largest relative error of a layer's update; `cat` is exact but for
    rounding."""
    if len(parts) == 1 and parts[0].weight == 1:
        return 0.0
    names = [str(number) for number in range(len(parts))]
    try:
        model.add_weighted_adapter(names, [part.weight for part in parts], "all", combination_type=how)
    except ValueError as error:
        raise WhetError(f"--how {how}: peft cannot combine these adapters: {error}. Use --how cat") from None
    model.set_adapter("all")
    if how == "linear" and len(parts) > 1:
        return 0.0
    worst = 0.0
    layers: list[Any] = list(unwrap_peft(model).modules())
    for layer in layers:
        if hasattr(layer, "get_delta_weight") and "all" in getattr(layer, "lora_A", {}):
            present = [number for number, name in enumerate(names) if name in layer.lora_A]
            updates = [parts[i].weight * layer.get_delta_weight(names[i]).float() for i in present]
            expected = torch.stack(updates).sum(dim=0)
            found = layer.get_delta_weight("all").float()
            worst = max(worst, ((found - expected).norm() / expected.norm().clamp_min(torch.finfo().tiny)).item())
    if worst > _MAX_RELATIVE_ERROR:
        raise RunFailedError(f"--how {how}: peft's sum of these adapters is off by {worst:.2%}. Please report this")
    return worst
