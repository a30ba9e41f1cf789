"""A plain model folder: safetensors, tokenizer, chat template, generation settings, as transformers writes them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whet.checkpoint.card import note_quantized
from whet.checkpoint.export.certificate import Findings
from whet.checkpoint.export.numbers import Numbers
from whet.checkpoint.export.order import Order, Speech
from whet.checkpoint.export.shards import Shards
from whet.checkpoint.export.speech import compare_speech, compare_stops, try_to_stop
from whet.checkpoint.export.trained import as_in_files, logits_of
from whet.checkpoint.export.trim import trim
from whet.model.load import with_experts_in

_IN_FILES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Merged:
    """What `from_pretrained` of transformers loads."""

    loaded_by = "transformers"

    def size(self, order: Order) -> int:
        return int(order.trained.numbers * order.numbers.bytes_each)

    def write(self, order: Order, folder: Path) -> None:
        write_settings(order, folder)
        shards = Shards(folder, order.shard_size)
        for weight in order.trained.weights():
            for name, tensor in as_in_files(order.trained.language_model, weight.name, weight.read()).items():
                shards.add(name, tensor.to(order.numbers.dtype) if tensor.is_floating_point() else tensor)
            trim()
        shards.close()
        if order.trained.is_packed:
            note_quantized(folder, "merged", order.numbers.torch_name)

    def look(self, order: Order, folder: Path, probes: Sequence[Sequence[int]], findings: Findings) -> Tensor | None:
        _look_at_types(folder, order.numbers, findings)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                model = _load(folder, order, self.size(order), scratch)
            except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
                findings.blame(f"transformers cannot load it: {_first_line(error)}")
                return None
            if model.dtype != order.numbers.dtype:
                findings.blame(f"config.json makes transformers load it in {model.dtype}, not {order.numbers.dtype}")
            look_at_speech(order.speech, folder, model, probes, findings)
            return logits_of(model, probes)


def write_settings(order: Order, folder: Path) -> None:
    """All but the weights."""
    from transformers.dynamic_module_utils import custom_object_save

    model, speech = order.trained.language_model, order.speech
    settings: Any = model.config
    kept = settings.dtype, settings.architectures
    settings.dtype, settings.architectures = order.numbers.dtype, [type(model).__name__]
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=settings)
    settings.save_pretrained(folder)
    settings.dtype, settings.architectures = kept
    write_generation(speech, folder)
    speech.tokenizer.save_pretrained(folder)


def write_generation(speech: Speech, folder: Path) -> None:
    """The base's settings with the right stops; not by save_pretrained, which refuses what some models come with."""
    from transformers import GenerationConfig

    generation = GenerationConfig(**speech.generation)
    generation.eos_token_id = list(speech.stops)
    generation.to_json_file(folder / "generation_config.json")


def look_at_speech(
    speech: Speech, folder: Path, model: Any, probes: Sequence[Sequence[int]], findings: Findings
) -> None:
    """Tokenizer, template and stops of a folder, as transformers reads them."""
    from transformers import AutoTokenizer, GenerationConfig

    texts = [speech.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]
    try:
        compare_speech(speech, AutoTokenizer.from_pretrained(folder), texts, findings)
        settings = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        findings.blame(f"transformers cannot load its tokenizer or generation settings: {_first_line(error)}")
        return
    before = len(findings.reasons)
    compare_stops(speech, settings, findings)
    generates = model is not None and model.device.type != "meta"  # what lies on the disk cannot; its settings speak
    if probes and generates and len(findings.reasons) == before:
        try_to_stop(speech, model, probes[0][:16], findings)
    findings.stops = len(findings.reasons) == before


def _load(folder: Path, order: Order, size: int, scratch: str) -> Any:
    """As any user would, in the type that config.json says; what is too large for memory stays in its files."""
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"dtype": "auto", "trust_remote_code": order.trust_remote_code, "output_loading_info": True}
    if size > order.shard_size:
        how |= {"device_map": "auto", "max_memory": _room(order.shard_size), "offload_folder": scratch}
    model, found = AutoModelForCausalLM.from_pretrained(folder, **how)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[what]:
            raise ValueError(f"{what.replace('_keys', '')} weights: {sorted(map(str, found[what]))[:3]}")
    loaded = with_experts_in(model, order.numbers.dtype)
    return loaded if size > order.shard_size else placed(loaded)


def _room(share: int) -> dict[int | str, int]:
    """What accelerate may put where; the rest stays on the disk. Only a part: activations and logits need some too."""
    room: dict[int | str, int] = {"cpu": share // 2}
    if torch.cuda.is_available():
        room[torch.cuda.current_device()] = int(0.7 * torch.cuda.mem_get_info()[0])
    return room


def placed(model: nn.Module) -> nn.Module:
    """On a GPU if there is room for it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if sum(parameter.nbytes for parameter in model.parameters()) < 0.8 * free:
            return model.to(torch.device("cuda", torch.cuda.current_device()))
    return model


def _look_at_types(folder: Path, numbers: Numbers, findings: Findings) -> None:
    wanted = _IN_FILES[numbers.torch_name]
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found = {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            findings.blame(f"{file.name} is damaged: {_first_line(error)}")
            continue
        others = sorted(dtype for dtype in found if dtype in _IN_FILES.values() and dtype != wanted)
        if others:
            findings.blame(f"{file.name} has weights in {', '.join(others)} instead of {wanted}")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
