"""Export as a Hugging Face model folder: safetensors, config, tokenizer, generation config, model card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from whet.compat.transformers_private import join_checkpoint_tensors, save_custom_code, to_checkpoint_tensors
from whet.core.errors import first_line
from whet.exporting.dtypes import ExportDtype
from whet.exporting.safetensors_writer import FLOAT_DTYPE_NAMES, StreamingSafetensorsWriter
from whet.exporting.spec import ExportFindings, ExportSpec, GenerationSettings
from whet.exporting.trained_model import TrainedModel, compute_logits
from whet.exporting.verification import check_generation_stops, compare_stop_tokens, compare_tokenizers
from whet.exporting.weight_comparison import SafetensorsWeights, compare_weights
from whet.model.load.pretrained import load_with_transformers, prepare_float64_
from whet.model.modules import other_modalities

_ADAPTER_CARD = """
## Trained over a base in 4 bits

The base model was quantized to NF4 (bitsandbytes, double quantization) while this adapter was trained. For the measured
quality, load the base in the same way:

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

Over the unquantized base the adapter works too; its answers differ by the quantization error.
"""
_MERGED_CARD = """
## Trained over a base in 4 bits

The base model was quantized to NF4 (bitsandbytes, double quantization) during training. These weights are the quantized
ones, dequantized to {dtype}, with the adapter merged in. They differ from the original model's by the quantization
error, too.
"""


class HFFolderFormat:
    """A folder for `from_pretrained` of transformers' auto classes."""

    loaded_by = "transformers"

    def require_supported(self, spec: ExportSpec) -> None:
        """Every model is."""

    def estimate_bytes(self, spec: ExportSpec) -> int:
        return int(spec.model.num_parameters * spec.dtype.bytes_per_weight)

    def write(self, spec: ExportSpec, folder: Path) -> None:
        write_configs(spec, folder)
        copy_processor_files(spec, folder)
        copied = open_untouched_weights(spec)
        write_weights(spec.model, folder, lambda _: spec.dtype.torch_dtype, spec.shard_size, copied)
        if spec.model.is_quantized:
            add_quantization_note(folder, "merged", spec.dtype.torch_name)

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        _verify_weights(folder, spec.dtype, open_untouched_weights(spec), findings)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                model = _load_back(folder, spec, self.estimate_bytes(spec), scratch)
            except Exception as error:  # a damaged or forged file can raise almost anything
                findings.reasons.append(f"transformers cannot load it: {first_line(error)}")
                return None
            if model.dtype != spec.dtype.torch_dtype:
                findings.reasons.append(
                    f"config.json makes transformers load it in {model.dtype} instead of {spec.dtype.torch_dtype}"
                )
            verify_tokenizer_and_stops(spec.generation, folder, model, probes, findings)
            logits = compute_logits(model, probes, spec.compares_in_fp32)
        del model
        compare_weights(spec.model, SafetensorsWeights(folder, spec.model), spec.dtype, findings)
        return logits


def write_weights(
    model: TrainedModel, folder: Path, dtype_of: Callable[[str], torch.dtype], shard_size: int = 5 * 10**9,
    copied: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write the merged weights as safetensors files, each in the dtype for its name; `copied` as they are."""
    writer = StreamingSafetensorsWriter(folder, shard_size)
    for name, read in copied.items():
        writer.add(name, read())
    joined, read_parts = model.joined_weights(), dict[str, Tensor]()
    for weight in model.weights():
        parts = {weight.name: weight.read()}
        if weight.name in joined:  # written with the last part
            read_parts |= parts
            if not read_parts.keys() >= set(joined[weight.name]):
                continue
            parts = {name: read_parts.pop(name) for name in joined[weight.name]}
        for name, tensor in join_checkpoint_tensors(model.language_model, parts).items():
            if name not in copied:
                writer.add(name, tensor.to(dtype_of(weight.name)) if tensor.is_floating_point() else tensor)
        model.trim_heap(sum(value.nbytes for value in parts.values()))
    writer.close()


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def copy_processor_files(spec: ExportSpec, folder: Path) -> None:
    """What turns images into inputs of an image-text checkpoint, byte for byte."""
    for name in _PROCESSOR_FILES if spec.base_folder is not None else ():
        if spec.base_folder is not None and (spec.base_folder / name).is_file():
            shutil.copyfile(spec.base_folder / name, folder / name)


def open_untouched_weights(spec: ExportSpec) -> dict[str, Callable[[], Tensor]]:
    """By name in its files: how to read each weight of an image-text checkpoint that text does not reach. They are
    exported as they were, in their own dtypes."""
    if spec.base_folder is None:
        return {}
    model = spec.model.language_model
    prefixes = tuple(f"{name}." for name in other_modalities(model))
    untouched = {
        name
        for weight, tensor in model.state_dict().items()
        if weight.startswith(prefixes)
        for name in to_checkpoint_tensors(model, weight, tensor)
    }
    found: dict[str, Callable[[], Tensor]] = {}
    for file in sorted(spec.base_folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            held = untouched & set(opened.keys())
        found |= {name: partial(_read_tensor, file, name) for name in held}
    return found


def _read_tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def add_quantization_note(folder: Path, kind: str, dtype: str) -> None:
    """Append to the model card that the base was quantized. peft writes a card for adapters."""
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else ""
    note = (_ADAPTER_CARD if kind == "adapter" else _MERGED_CARD).format(dtype=dtype)
    card.write_text(f"{before.rstrip()}\n{note}".lstrip(), encoding="utf-8")


def write_configs(spec: ExportSpec, folder: Path) -> None:
    """Write everything but the weights: config.json, generation config, tokenizer, custom code."""
    model = spec.model.language_model
    config: Any = model.config
    before = config.dtype, config.architectures
    config.dtype, config.architectures = spec.dtype.torch_dtype, [type(model).__name__]
    save_custom_code(model, folder, config)
    config.save_pretrained(folder)
    config.dtype, config.architectures = before
    write_generation_config(spec.generation, folder)
    spec.generation.tokenizer.save_pretrained(folder)


def write_generation_config(settings: GenerationSettings, folder: Path) -> None:
    """The base's generation config with the trained stop tokens. save_pretrained would refuse the configs that some
    models are published with."""
    from transformers import GenerationConfig

    config = GenerationConfig(**settings.base_config)
    config.eos_token_id = list(settings.stop_ids)
    config.to_json_file(folder / "generation_config.json")


def verify_tokenizer_and_stops(
    settings: GenerationSettings, folder: Path, model: Any, probes: Sequence[Sequence[int]], findings: ExportFindings
) -> None:
    """Compare tokenizer, chat template and stop tokens of a folder, as transformers loads them."""
    from transformers import AutoTokenizer, GenerationConfig

    texts = [settings.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]
    try:
        compare_tokenizers(settings, AutoTokenizer.from_pretrained(folder, trust_remote_code=False), texts, findings)
        config = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises Exception itself
        findings.reasons.append(f"transformers cannot load its tokenizer or generation config: {first_line(error)}")
        return
    count = len(findings.reasons)
    compare_stop_tokens(settings, config, findings)
    can_generate = model is not None and model.device.type != "meta"  # an offloaded model cannot
    if probes and can_generate and len(findings.reasons) == count:
        check_generation_stops(settings, model, probes[0][:16], findings)
    findings.stops = len(findings.reasons) == count


def _load_back(folder: Path, spec: ExportSpec, size: int, scratch: str) -> Any:
    """Load as any user would, in the dtype of config.json. A model larger than a shard stays mostly on disk."""
    options: dict[str, Any] = {"dtype": "auto", "trust_remote_code": spec.trust_remote_code}
    if size > spec.shard_size:
        options |= {"device_map": "auto", "max_memory": _max_memory(spec.shard_size), "offload_folder": scratch}
    model, loading_info = load_with_transformers(folder, output_loading_info=True, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading_info[problem]:
            raise ValueError(f"{problem.replace('_keys', '')} weights: {sorted(map(str, loading_info[problem]))[:3]}")
    loaded = prepare_float64_(model, spec.dtype.torch_dtype)
    return loaded if size > spec.shard_size else to_gpu_if_it_fits(loaded)


def _max_memory(shard_size: int) -> dict[int | str, int]:
    """accelerate's max_memory: half a shard of host memory, because activations and logits need some, too."""
    memory: dict[int | str, int] = {"cpu": shard_size // 2}
    if torch.cuda.is_available():
        memory[torch.cuda.current_device()] = int(0.7 * torch.cuda.mem_get_info()[0])
    return memory


def to_gpu_if_it_fits(model: nn.Module) -> nn.Module:
    """Move the model to the current GPU if there is one with enough free memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if sum(parameter.nbytes for parameter in model.parameters()) < 0.8 * free:
            return model.to(torch.device("cuda", torch.cuda.current_device()))
    return model


def _verify_weights(
    folder: Path, dtype: ExportDtype, copied: Mapping[str, Callable[[], Tensor]], findings: ExportFindings
) -> None:
    """Weights are in the dtype of the export, and those that were copied are what they were."""
    expected = FLOAT_DTYPE_NAMES[dtype.torch_dtype]
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                found = {opened.get_slice(name).get_dtype() for name in names - copied.keys()}
                both = sorted(names & copied.keys())
                changed = [name for name in both if not _is_same(opened.get_tensor(name), copied[name]())]
        except SafetensorError as error:
            findings.reasons.append(f"{file.name} is damaged: {first_line(error)}")
            continue
        others = sorted(name for name in found if name in FLOAT_DTYPE_NAMES.values() and name != expected)
        if others:
            findings.reasons.append(f"{file.name} has weights in {', '.join(others)} instead of {expected}")
        if changed:
            findings.reasons.append(f"{file.name}: {changed[0]} is not as in the base model, and was not trained")


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal byte for byte."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_as_bytes(one), _as_bytes(other))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
