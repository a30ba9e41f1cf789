"""Export as one GGUF file for llama.cpp: weights, tokenizer, chat template."""

from __future__ import annotations

import contextlib
import io
import math
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.core.errors import WhetError, first_line
from whet.exporting.dtypes import EXPORT_DTYPES, ExportDtype, export_dtype_of
from whet.exporting.gguf import llama_cpp
from whet.exporting.gguf.families import (
    GGUFLayout,
    add_hyperparameters,
    context_length,
    family_notes,
    require_family,
    rope_parameters,
    rope_tensors,
    text_config,
)
from whet.exporting.gguf.gguf_tokenizer import (
    add_tokenizer,
    default_template,
    read_templates,
    set_pre_tokenizer,
    tokenizer_rules,
)
from whet.exporting.gguf.llama_cpp import write_importance_matrix
from whet.exporting.gguf.ollama import write_modelfile
from whet.exporting.spec import ExportFindings, ExportSpec, GenerationSettings
from whet.exporting.trained_model import MAX_POSITIONS, TrainedModel, compute_logits
from whet.exporting.verification import HARD_TEXT, compare_tokenizers, rendered_prompts
from whet.exporting.weight_comparison import compare_weights
from whet.model.load.builtin_models import set_gguf_special_tokens

_MATRIX_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_Q8_0_BLOCK, _K_BLOCK = 32, 256
_UNQUANTIZED_PARTS = ("_norm.weight", "ffn_gate_inp", ".bias", "attn_sinks", "rope_f")
"""Small tensors that stay in fp32, as llama.cpp expects."""


class GGUFFormat:
    """One file, written weight by weight. Vectors are always in fp32."""

    @property
    def loaded_by(self) -> str:
        return "llama.cpp" if llama_cpp.is_installed() else "transformers (gguf_file)"

    def require_supported(self, spec: ExportSpec) -> None:
        if find_spec("gguf") is None:
            raise WhetError(f"--to gguf: the package gguf is not installed. {llama_cpp.INSTALL}")
        if spec.dtype.llama_ftype is not None:
            llama_cpp.require_quantizer(spec.dtype)
        require_family(text_config(spec.model.language_model.config), llama_cpp.is_installed())
        if tokenizer_rules(spec.generation.tokenizer).model != "gpt2" and not llama_cpp.is_installed():
            raise WhetError(
                "--to gguf: a SentencePiece tokenizer is verified with llama.cpp, and the package cyllama is not "
                f"installed. {llama_cpp.INSTALL}"
            )

    def estimate_bytes(self, spec: ExportSpec) -> int:
        dtypes = {spec.dtype, unquantized_dtype(spec)}
        return int(spec.model.num_parameters * sum(dtype.bytes_per_weight for dtype in dtypes)) + 2**24

    def write(self, spec: ExportSpec, folder: Path) -> None:
        from gguf import GGUFWriter

        config, architecture, layout = _parts(spec.model)
        writer = GGUFWriter(folder / f"{spec.name}-{spec.dtype.name}.gguf", architecture)
        writer.add_type("model")
        writer.add_name(spec.name)
        writer.add_file_type(_FILE_TYPES[spec.dtype.name])
        writer.add_quantization_version(2)
        add_hyperparameters(writer, config, architecture)
        add_tokenizer(writer, spec.generation, config.vocab_size)
        for weight in spec.model.weights():
            for name, part in layout.split(weight.name, torch.empty(weight.shape, device="meta")).items():
                _add_tensor_info(writer, name, tuple(part.shape), _tensor_type(name, part, spec.dtype))
        extra = rope_tensors(config)
        for name, value in extra.items():
            _add_tensor_info(writer, name, tuple(value.shape), "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in spec.model.weights():
            shape = torch.empty(weight.shape, device="meta")
            if layout.split(weight.name, shape):
                for name, part in layout.split(weight.name, weight.read()).items():
                    writer.write_tensor_data(_quantize(part, _tensor_type(name, part, spec.dtype)))
        for value in extra.values():
            writer.write_tensor_data(_quantize(value, "F32"))
        writer.close()
        write_modelfile(folder, gguf_file(folder).name, spec.generation)

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        file = gguf_file(folder)
        try:
            if llama_cpp.is_installed():
                logits = _read_with_llama_cpp(spec, file, probes, findings)
            else:
                logits = _read_with_transformers(spec, file, probes, findings)
            compare_weights(spec.model, GGUFWeights(file, spec.model), spec.dtype, findings)
            findings.details |= _describe_tensors(file, spec.dtype)
            if notes := family_notes(*_parts(spec.model)[:2]):
                findings.details["notes"] = notes
        except Exception as error:  # a damaged or forged file can raise almost anything
            findings.reasons.append(f"{self.loaded_by.split()[0]} cannot load it: {first_line(error)}")
            return None
        return logits


def gguf_file(folder: Path) -> Path:
    """The file of an export."""
    return next(folder.glob("*.gguf"))


def unquantized_dtype(spec: ExportSpec) -> ExportDtype:
    """What is written first: the dtype itself, or, of quantized types, the smallest one that loses nothing."""
    if not spec.dtype.is_quantized:
        return spec.dtype
    lossless = export_dtype_of(spec.model.lossless_dtype)
    return EXPORT_DTYPES["f32"] if spec.model.has_adapter or lossless.name == "f64" else lossless


def max_positions(spec: ExportSpec) -> int:
    """Positions at which llama.cpp must compute what the trained model does."""
    config, architecture, _ = _parts(spec.model)
    return context_length(config, architecture)


def quantize_export(spec: ExportSpec, folder: Path) -> dict[str, Any]:
    """Replace the unquantized file of an export by a quantized one. Returns what the certificate says of the importance
    matrix."""
    from gguf import GGUFReader

    source, matrix = gguf_file(folder), folder / "importance-matrix.tmp"
    if spec.dtype.llama_ftype is None:  # q8_0
        source.unlink()
        GGUFFormat().write(spec, folder)
        return {}
    about: dict[str, int] | None = None
    target = folder / f"{spec.name}-{spec.dtype.name}.gguf"
    if spec.calibration:
        about = write_importance_matrix(spec.model, _parts(spec.model)[2], spec.calibration, matrix)
    try:
        tensors = len(GGUFReader(source).tensors)
        llama_cpp.quantize_file(source, target, spec.dtype, matrix if spec.calibration else None, tensors)
    except llama_cpp.LlamaCppError as error:
        raise WhetError(
            f"--dtype: llama.cpp cannot quantize this model to {spec.dtype.name}: {error}. Use another type, such as "
            "q8_0, or --to merged"
        ) from None
    source.unlink()
    matrix.unlink(missing_ok=True)
    write_modelfile(folder, target.name, spec.generation)
    return {"importance_matrix": about}


class GGUFWeights:
    """The weights in a GGUF file, dequantized; for `compare_weights`, and to compute with."""

    def __init__(self, file: Path, model: TrainedModel) -> None:
        from gguf import GGUFReader

        _, _, self.layout = _parts(model)
        self._tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}

    def tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        return self.layout.split(name, value)

    def read(self, name: str) -> Tensor | None:
        from gguf.quants import dequantize

        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        return values.view(*reversed(tensor.shape.tolist()))

    def joined(self, name: str) -> Tensor | None:
        """A weight of the model, from its parts in the file; None if they are not there."""

        def read(part: str) -> Tensor:
            found = self.read(part)
            if found is None:
                raise KeyError(part)
            return found

        with contextlib.suppress(KeyError):
            return self.layout.join(name, read)
        return None


def _parts(model: TrainedModel) -> tuple[Any, str, GGUFLayout]:
    """(config of the language model, architecture, layout)."""
    config = text_config(model.language_model.config)
    architecture = require_family(config, llama_cpp.is_installed())
    return config, architecture, GGUFLayout(config, architecture)


def _tensor_type(name: str, part: Tensor, dtype: ExportDtype) -> str:
    if part.dim() < 2 or any(words in name for words in _UNQUANTIZED_PARTS):
        return "F32"
    return "F16" if dtype.name == "q8_0" and part.shape[-1] % _Q8_0_BLOCK else _MATRIX_TYPES[dtype.name]


def _add_tensor_info(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    packed = kind in ("BF16", "Q8_0")
    stored = quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind]) if packed else shape
    dtype = np.dtype(np.uint8) if packed else np.dtype(np.float16 if kind == "F16" else np.float32)
    size = math.prod(stored) * dtype.itemsize
    writer.add_tensor_info(name, stored, dtype, size, GGMLQuantizationType[kind] if packed else None)


def _quantize(weight: Tensor, kind: str) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return np.asarray(quantize(weight.to(torch.float32).contiguous().numpy(), GGMLQuantizationType[kind]))


def _describe_tensors(file: Path, dtype: ExportDtype) -> dict[str, Any]:
    """How many tensors have which type, and which of them could not have the requested one."""
    from gguf import GGUFReader

    types, fallbacks, widths = Counter[str](), Counter[str](), set[int]()
    for tensor in GGUFReader(file).tensors:
        kind, width = tensor.tensor_type.name, int(tensor.shape[0])
        types[kind.lower()] += 1
        is_block_32 = kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16")
        if dtype.uses_blocks_of_256 and width % _K_BLOCK and is_block_32:
            fallbacks[kind.lower()] += 1
            widths.add(width)
    found: dict[str, Any] = {"tensors": dict(types)}
    if fallbacks:
        found["fell_back"] = dict(fallbacks)
        found["fell_back_because"] = (
            f"rows of {', '.join(map(str, sorted(widths)))} weights are not a multiple of the {_K_BLOCK} that "
            f"{dtype.name} groups, which is usual for models of this size"
        )
    return found


def _read_with_llama_cpp(
    spec: ExportSpec, file: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
) -> Tensor:
    settings = spec.generation
    tokenizer, end = settings.tokenizer, settings.end_of_answer_id
    rules = tokenizer_rules(tokenizer)
    plain = [] if rules.first_text_only else [*_texts(settings, probes), HARD_TEXT]
    if rules.space_prefix:  # before a space, some tokenizers add none
        plain = [text.lstrip(" ") for text in plain]
    texts = [*plain, *rendered_prompts(settings, _texts(settings, probes))]
    positions = max(1, MAX_POSITIONS // max(1, len(probes)))
    read = llama_cpp.read_file(file, texts, probes, positions, [] if end is None else [end])
    count = len(findings.reasons)
    for text, ids in zip(texts, read.ids, strict=True):
        if ids != tokenizer.encode(text, add_special_tokens=False):
            findings.reasons.append(f"its tokenizer splits {text[:60]!r} differently")
            break
    findings.same_ids = len(findings.reasons) == count
    findings.same_template = (read.template or None) == (default_template(tokenizer) or None)
    if not findings.same_template:
        findings.reasons.append("its chat template is not the one used in training")
    _check_end(settings, read.ends, findings)
    return read.logits


def _read_with_transformers(
    spec: ExportSpec, file: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
) -> Tensor:
    """transformers dequantizes all weights to fp32, so the whole model is in memory. It ignores RoPE scaling and the
    rules of the tokenizer, which are read from the file's fields."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config, rope = AutoConfig.from_pretrained(**source), rope_parameters(spec.model.language_model.config)
    fields = GGUFReader(file).fields
    if rope["rope_type"] != "default":  # stored as a tensor or as keys, which transformers ignores
        config.rope_parameters = rope
    config.head_dim = fields[f"{fields['general.architecture'].contents()}.attention.key_length"].contents()
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of transformers
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            **source, config=config, dtype=torch.float32, output_loading_info=True
        )
    missing = sorted(map(str, {*loading_info["missing_keys"], *loading_info["mismatched_keys"]}))
    if missing:
        raise ValueError(f"missing weights: {missing[:3]}")
    loaded = AutoTokenizer.from_pretrained(**source)
    set_pre_tokenizer(loaded, str(fields["tokenizer.ggml.pre"].contents()))
    set_gguf_special_tokens(loaded, fields)
    loaded.chat_template = read_templates(fields)
    compare_tokenizers(spec.generation, loaded, _texts(spec.generation, probes), findings)
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    _check_end(spec.generation, [fields[key].contents() for key in keys if key in fields], findings)
    return compute_logits(model, probes)


def _texts(settings: GenerationSettings, probes: Sequence[Sequence[int]]) -> list[str]:
    return [settings.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]


def _check_end(settings: GenerationSettings, ends: Sequence[int], findings: ExportFindings) -> None:
    end = settings.end_of_answer_id
    findings.stops = end is None or end in ends
    if not findings.stops:
        findings.reasons.append(f"it does not stop at {settings.tokenizer.convert_ids_to_tokens(end)!r}")
