"""Export as a Hugging Face model folder: safetensors, config, tokenizer, generation config, model card."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whet.compat.transformers_private import save_custom_code, to_checkpoint_tensors
from whet.core.errors import first_line
from whet.exporting.safetensors_writer import StreamingSafetensorsWriter
from whet.exporting.spec import ExportDtype, ExportFindings, ExportSpec, GenerationSettings
from whet.exporting.trained_model import compute_logits, trim_heap
from whet.exporting.verification import check_generation_stops, compare_stop_tokens, compare_tokenizers
from whet.model.load.pretrained import set_experts_for_dtype

# What whoever loads an export has to know and cannot see in its weights.

_ADAPTER_CARD = """
## Trained over a base in 4 bits

The base model was kept in NF4 (bitsandbytes, double quantisation) while this adapter was trained. It answers as it was
measured on a base that is loaded the same way:

```python
from peft import AutoPeftModelForCausalLM
from transformers import BitsAndBytesConfig

nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype="{dtype}",
)
model = AutoPeftModelForCausalLM.from_pretrained("THIS FOLDER", quantization_config=nf4)
```

On a base that is not in 4 bits it works too; answers then differ by what 4 bits lose.
"""
_MERGED_CARD = """
## Trained over a base in 4 bits

The base model was kept in NF4 (bitsandbytes, double quantisation) during training. These weights are the 4-bit ones
turned back into {dtype}, with the adapter added. So they differ from the original model's by what 4 bits lose, too.
"""


def add_quantization_note(folder: Path, kind: str, dtype: str) -> None:
    """Say in the model card of an export that its base was in 4 bits; peft writes a card for adapters."""
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else ""
    note = (_ADAPTER_CARD if kind == "adapter" else _MERGED_CARD).format(dtype=dtype)
    card.write_text(f"{before.rstrip()}\n{note}".lstrip(), encoding="utf-8")


# A plain model folder: safetensors, tokenizer, chat template, generation settings, as transformers writes them.

_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class HFFolderFormat:
    """What `from_pretrained` of transformers loads."""

    loaded_by = "transformers"

    def size(self, order: ExportSpec) -> int:
        return int(order.trained.numbers * order.numbers.bytes_each)

    def write(self, order: ExportSpec, folder: Path) -> None:
        write_configs(order, folder)
        shards = StreamingSafetensorsWriter(folder, order.shard_size)
        for weight in order.trained.weights():
            for name, tensor in to_checkpoint_tensors(order.trained.language_model, weight.name, weight.read()).items():
                shards.add(name, tensor.to(order.numbers.dtype) if tensor.is_floating_point() else tensor)
            trim_heap()
        shards.close()
        if order.trained.is_packed:
            add_quantization_note(folder, "merged", order.numbers.torch_name)

    def look(
        self, order: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        _verify_dtypes(folder, order.numbers, findings)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                model = _load_back(folder, order, self.size(order), scratch)
            except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
                findings.blame(f"transformers cannot load it: {first_line(error)}")
                return None
            if model.dtype != order.numbers.dtype:
                findings.blame(f"config.json makes transformers load it in {model.dtype}, not {order.numbers.dtype}")
            verify_tokenizer_and_stops(order.speech, folder, model, probes, findings)
            return compute_logits(model, probes)


def write_configs(order: ExportSpec, folder: Path) -> None:
    """All but the weights."""
    model, speech = order.trained.language_model, order.speech
    settings: Any = model.config
    kept = settings.dtype, settings.architectures
    settings.dtype, settings.architectures = order.numbers.dtype, [type(model).__name__]
    save_custom_code(model, folder, settings)
    settings.save_pretrained(folder)
    settings.dtype, settings.architectures = kept
    write_generation_config(speech, folder)
    speech.tokenizer.save_pretrained(folder)


def write_generation_config(speech: GenerationSettings, folder: Path) -> None:
    """The base's settings with the right stops; not by save_pretrained, which refuses what some models come with."""
    from transformers import GenerationConfig

    generation = GenerationConfig(**speech.generation)
    generation.eos_token_id = list(speech.stops)
    generation.to_json_file(folder / "generation_config.json")


def verify_tokenizer_and_stops(
    speech: GenerationSettings, folder: Path, model: Any, probes: Sequence[Sequence[int]], findings: ExportFindings
) -> None:
    """Tokenizer, template and stops of a folder, as transformers reads them."""
    from transformers import AutoTokenizer, GenerationConfig

    texts = [speech.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]
    try:
        compare_tokenizers(speech, AutoTokenizer.from_pretrained(folder), texts, findings)
        settings = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        findings.blame(f"transformers cannot load its tokenizer or generation settings: {first_line(error)}")
        return
    before = len(findings.reasons)
    compare_stop_tokens(speech, settings, findings)
    generates = model is not None and model.device.type != "meta"  # what lies on the disk cannot; its settings speak
    if probes and generates and len(findings.reasons) == before:
        check_generation_stops(speech, model, probes[0][:16], findings)
    findings.stops = len(findings.reasons) == before


def _load_back(folder: Path, order: ExportSpec, size: int, scratch: str) -> Any:
    """As any user would, in the type that config.json says; what is too large for memory stays in its files."""
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {"dtype": "auto", "trust_remote_code": order.trust_remote_code, "output_loading_info": True}
    if size > order.shard_size:
        how |= {"device_map": "auto", "max_memory": _max_memory(order.shard_size), "offload_folder": scratch}
    model, found = AutoModelForCausalLM.from_pretrained(folder, **how)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[what]:
            raise ValueError(f"{what.replace('_keys', '')} weights: {sorted(map(str, found[what]))[:3]}")
    loaded = set_experts_for_dtype(model, order.numbers.dtype)
    return loaded if size > order.shard_size else to_gpu_if_it_fits(loaded)


def _max_memory(share: int) -> dict[int | str, int]:
    """What accelerate may put where; the rest stays on the disk. Only a part: activations and logits need some too."""
    room: dict[int | str, int] = {"cpu": share // 2}
    if torch.cuda.is_available():
        room[torch.cuda.current_device()] = int(0.7 * torch.cuda.mem_get_info()[0])
    return room


def to_gpu_if_it_fits(model: nn.Module) -> nn.Module:
    """On a GPU if there is room for it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if sum(parameter.nbytes for parameter in model.parameters()) < 0.8 * free:
            return model.to(torch.device("cuda", torch.cuda.current_device()))
    return model


def _verify_dtypes(folder: Path, numbers: ExportDtype, findings: ExportFindings) -> None:
    wanted = _SAFETENSORS_DTYPES[numbers.torch_name]
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                found = {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            findings.blame(f"{file.name} is damaged: {first_line(error)}")
            continue
        others = sorted(dtype for dtype in found if dtype in _SAFETENSORS_DTYPES.values() and dtype != wanted)
        if others:
            findings.blame(f"{file.name} has weights in {', '.join(others)} instead of {wanted}")
