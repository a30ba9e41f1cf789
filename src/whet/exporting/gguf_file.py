"""Export as one GGUF file for llama.cpp: weights, tokenizer, chat template."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whet.compat.transformers_private import rope_frequencies
from whet.core.errors import WhetError, first_line
from whet.exporting.effect import LoadedWeights, compare_weights
from whet.exporting.spec import ExportFindings, ExportSpec, GenerationSettings
from whet.exporting.trained_model import compute_logits
from whet.exporting.verification import compare_tokenizers
from whet.model.load.builtin_models import set_gguf_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Tokenizer. llama.cpp has a hard-coded list of pre-tokenizers (the regular expressions that split text before BPE
# merges), and the file names one of them in `tokenizer.ggml.pre`. Under a wrong name, digits or capitals are split
# differently while most prompts look right, so tokenizers without a known name are refused.

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
_WORD_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_SPLIT_PATTERNS = {_WORD_PATTERN % r"\p{N}{1,3}": "llama-bpe", _WORD_PATTERN % r"\p{N}": "qwen2"}
PRE_TOKENIZER_NAMES = ("gpt-2", "smollm", *_SPLIT_PATTERNS.values())


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerFast) -> str:
    """llama.cpp's name for the pre-tokenizer of this tokenizer."""
    serialized = json.loads(tokenizer.backend_tokenizer.to_str())
    if serialized["model"]["type"] != "BPE" or serialized["model"].get("byte_fallback"):
        raise WhetError(
            "--to gguf: this model's tokenizer is not byte-level BPE (it may be SentencePiece), and whet writes only "
            f"byte-level BPE with the pre-tokenizers {', '.join(PRE_TOKENIZER_NAMES)}. Use --to merged, and "
            "llama.cpp's own converter"
        )
    outer = serialized["pre_tokenizer"] or {}
    steps = outer.get("pretokenizers", [outer])
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if types == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if types == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        known = _SPLIT_PATTERNS.get(steps[0]["pattern"].get("Regex"))
        if known is not None and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
            return known
    raise WhetError(
        f"--to gguf: whet knows no GGUF name for the pre-tokenizer of this model ({types}), only for "
        f"{', '.join(PRE_TOKENIZER_NAMES)}. Use --to merged, and llama.cpp's own converter"
    )


def set_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Give a tokenizer llama.cpp's pre-tokenizer of this name. transformers ignores the name when it loads a GGUF."""
    from tokenizers import Regex, pre_tokenizers

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("gpt-2", "smollm"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
        steps = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        pattern = next(regex for regex, known in _SPLIT_PATTERNS.items() if known == name)
        steps = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])
    tokenizer.backend_tokenizer.pre_tokenizer = steps
    if name == "llama-bpe":
        tokenizer.backend_tokenizer.model.ignore_merges = True


def gguf_vocabulary(tokenizer: PreTrainedTokenizerFast, rows: int) -> tuple[list[str], list[int], list[str]]:
    """(tokens, their types, merges). Embedding rows without a token get the name of an unused one."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        raise WhetError(
            f"--to gguf: the tokenizer has {max(vocabulary.values()) + 1:,} tokens, but the model has only {rows:,} "
            "embedding rows. Use the tokenizer that came with the model"
        )
    tokens, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for token, number in vocabulary.items():
        tokens[number], types[number] = token, NORMAL
    for number, added in tokenizer.added_tokens_decoder.items():
        tokens[number], types[number] = added.content, CONTROL if added.special else USER_DEFINED
    merges: list[Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return tokens, types, [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


# Weights and hyperparameters.

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type of transformers → architecture of llama.cpp. Mistral without a sliding window is a Llama."""
_MATRIX_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_Q8_0_BLOCK = 32


class GGUFFormat:
    """One file, written weight by weight. Vectors are always in fp32."""

    loaded_by = "transformers (gguf_file)"

    def require_supported(self, spec: ExportSpec) -> None:
        if find_spec("gguf") is None:
            raise WhetError("--to gguf: the package gguf is not installed. pip install 'whet[export]'")
        _require_architecture(spec.model.language_model.config)
        pre_tokenizer_name(spec.generation.tokenizer)

    def estimate_bytes(self, spec: ExportSpec) -> int:
        return int(spec.model.num_parameters * spec.dtype.bytes_per_weight) + 2**24

    def write(self, spec: ExportSpec, folder: Path) -> None:
        from gguf import GGUFWriter

        config: Any = spec.model.language_model.config
        architecture = _require_architecture(config)
        writer = GGUFWriter(folder / f"{spec.name}-{spec.dtype.name}.gguf", architecture)
        _add_hyperparameters(writer, spec, config, architecture)
        _add_tokenizer(writer, spec.generation, config.vocab_size)
        for name, shape, kind, _ in _tensors(spec, config, architecture):
            _add_tensor_info(writer, name, shape, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, kind, read in _tensors(spec, config, architecture):
            writer.write_tensor_data(_quantize(read(), kind))
        writer.close()

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """transformers dequantizes all weights to fp32, so the whole model is in memory."""
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM

        (file,) = folder.glob("*.gguf")
        source = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name}
        try:
            config, rope = AutoConfig.from_pretrained(**source), _rope_parameters(spec.model.language_model.config)
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
            _verify_tokenizer(spec.generation, source, fields, probes, findings)
        except Exception as error:  # a damaged or forged file can raise almost anything
            findings.reasons.append(f"transformers cannot load it: {first_line(error)}")
            return None
        compare_weights(spec.model, LoadedWeights(model), spec.dtype, findings)
        return compute_logits(model, probes)


def _require_architecture(config: Any) -> str:
    known = _ARCHITECTURES.get(config.model_type)
    if known is None:
        raise WhetError(
            f"--to gguf: whet cannot write {config.model_type} models as GGUF, only {', '.join(_ARCHITECTURES)}. Use "
            "--to merged, and llama.cpp's own converter on that folder"
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None:
        raise WhetError(
            f"--to gguf: this {config.model_type} model has a sliding window of {window} tokens, which GGUF does not "
            f"support for the architecture {known}. Use --to merged"
        )
    biased = next((name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)), None)
    if known != "qwen2" and biased is not None:
        raise WhetError(
            f"--to gguf: this {config.model_type} model has biases ({biased}), which transformers ignores when it "
            "loads a GGUF, so the file could not be verified. Use --to merged, and llama.cpp's own converter on that "
            "folder"
        )
    rope = _rope_parameters(config)["rope_type"]
    if rope not in ("default", "linear", "llama3"):
        raise WhetError(
            f"--to gguf: this model has the RoPE type {rope}, and whet writes default, linear and llama3. Use --to "
            "merged, and llama.cpp's own converter on that folder"
        )
    return known


def _rope_parameters(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", **(config.rope_parameters or {})}


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_hyperparameters(writer: Any, spec: ExportSpec, config: Any, architecture: str) -> None:
    from gguf import RopeScalingType

    rope, head = _rope_parameters(config), _head_dim(config)
    writer.add_type("model")
    writer.add_name(spec.name)
    writer.add_file_type(_FILE_TYPES[spec.dtype.name])
    writer.add_quantization_version(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(head)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _add_tokenizer(writer: Any, settings: GenerationSettings, rows: int) -> None:
    tokenizer = settings.tokenizer
    tokens, types, merges = gguf_vocabulary(tokenizer, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ends = (tokenizer.eos_token_id, settings.end_of_turn_id, *settings.stop_ids)
    eos = next((number for number in ends if number is not None), None)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if settings.end_of_turn_id is not None:
        writer.add_eot_token_id(settings.end_of_turn_id)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(spec: ExportSpec, config: Any, architecture: str) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """(name, shape, type, function that reads it) in the order of the file; nothing is read yet."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key in MODEL_ARCH if MODEL_ARCH_NAMES[key] == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    if _rope_parameters(config)["rope_type"] == "llama3":
        factors = _rope_factors(config)
        yield "rope_freqs.weight", factors.shape, "F32", lambda: torch.from_numpy(factors)
    for weight in spec.model.weights():
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise WhetError(f"--to gguf: GGUF has no name for this model's weight {weight.name}. Use --to merged")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        permuted = heads.get(weight.name.split(".")[-2]) if architecture == "llama" else None
        yield name, weight.shape, _tensor_type(weight.shape, spec.dtype.name), _permuted_reader(weight.read, permuted)


def _permuted_reader(read: Any, heads: int | None) -> Any:
    return read if heads is None else lambda: _permute_rope(read(), heads)


def _permute_rope(weight: Tensor, heads: int) -> Tensor:
    """For a Llama, llama.cpp rotates adjacent elements of queries and keys, transformers elements half a head apart."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(config: Any) -> np.ndarray[Any, Any]:
    """Llama 3.1's divisor of each RoPE frequency."""
    scaled = rope_frequencies(config, "llama3")
    head, theta = _head_dim(config), _rope_parameters(config)["rope_theta"]
    plain = 1.0 / (theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head))
    return np.asarray((plain / scaled).to(torch.float32).numpy())


def _tensor_type(shape: tuple[int, ...], dtype: str) -> str:
    if len(shape) < 2:
        return "F32"
    return "F16" if dtype == "q8_0" and shape[-1] % _Q8_0_BLOCK else _MATRIX_TYPES[dtype]


def _add_tensor_info(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    packed = kind in ("BF16", "Q8_0")
    stored = quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind]) if packed else shape
    dtype = np.dtype(np.uint8) if packed else np.dtype(np.float16 if kind == "F16" else np.float32)
    size = int(np.prod(stored)) * dtype.itemsize
    writer.add_tensor_info(name, stored, dtype, size, GGMLQuantizationType[kind] if packed else None)


def _quantize(weight: Tensor, kind: str) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return np.asarray(quantize(weight.to(torch.float32).contiguous().numpy(), GGMLQuantizationType[kind]))


def _verify_tokenizer(
    settings: GenerationSettings,
    source: dict[str, str],
    fields: Any,
    probes: Sequence[Sequence[int]],
    findings: ExportFindings,
) -> None:
    """transformers loads tokens, merges and template; pre-tokenizer and special tokens are read from the file's
    fields."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(**source)
    set_pre_tokenizer(loaded, str(fields["tokenizer.ggml.pre"].contents()))
    set_gguf_special_tokens(loaded, fields)
    texts = [settings.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]
    compare_tokenizers(settings, loaded, texts, findings)
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    end = settings.end_of_answer_id
    findings.stops = end is None or end in [fields[key].contents() for key in keys if key in fields]
    if not findings.stops:
        findings.reasons.append(f"it does not stop at {settings.tokenizer.convert_ids_to_tokens(end)!r}")
