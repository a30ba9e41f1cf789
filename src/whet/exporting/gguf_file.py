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
from whet.exporting.spec import ExportFindings, ExportSpec, GenerationSettings
from whet.exporting.trained_model import compute_logits
from whet.exporting.verification import compare_tokenizers

# A tokenizer as GGUF has it: pieces, merges, and the name of the rule that cuts text before merging.
#
# llama.cpp does not read regular expressions from the file; it knows them by name (`tokenizer.ggml.pre`). Under a wrong
# name digits or capitals are cut differently while many a prompt looks right, so a rule that has no name here is refused.

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_WORD_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_SPLIT_PATTERNS = {_WORD_PATTERN % r"\p{N}{1,3}": "llama-bpe", _WORD_PATTERN % r"\p{N}": "qwen2"}
PRE_TOKENIZER_NAMES = ("gpt-2", "smollm", *_SPLIT_PATTERNS.values())


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerFast) -> str:
    """The name that llama.cpp has for the way this tokenizer cuts text."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    if written["model"]["type"] != "BPE" or written["model"].get("byte_fallback"):
        raise WhetError(
            "--to gguf: this model's tokenizer is not byte-level BPE (it may be SentencePiece), which whet cannot "
            f"write as GGUF. It can: byte-level BPE that cuts text like {', '.join(PRE_TOKENIZER_NAMES)}. Use --to merged"
        )
    before = written["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    shape = [step.get("type") for step in steps]
    if shape == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if shape == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if shape == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        known = _SPLIT_PATTERNS.get(steps[0]["pattern"].get("Regex"))
        if known is not None and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
            return known
    raise WhetError(
        f"--to gguf: this model's tokenizer cuts text in a way that whet has no GGUF name for ({shape}). It knows "
        f"{', '.join(PRE_TOKENIZER_NAMES)}. Use --to merged, and llama.cpp's own converter"
    )


def set_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Cut text as a program that goes by this name does: transformers does not look at it when it reads a GGUF."""
    from tokenizers import Regex, pre_tokenizers

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("gpt-2", "smollm"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
        cut = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        pattern = next(regex for regex, known in _SPLIT_PATTERNS.items() if known == name)
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])
    tokenizer.backend_tokenizer.pre_tokenizer = cut
    if name == "llama-bpe":
        tokenizer.backend_tokenizer.model.ignore_merges = True


def gguf_vocabulary(tokenizer: PreTrainedTokenizerFast, rows: int) -> tuple[list[str], list[int], list[str]]:
    """(pieces, their types, merges); rows of the embedding without a piece get a name that no text is cut into."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if max(vocabulary.values()) >= rows:
        raise WhetError(
            f"--to gguf: the tokenizer knows {max(vocabulary.values()) + 1:,} tokens and the model only {rows:,}. They "
            "do not belong together: use the tokenizer that came with the model"
        )
    pieces, types = [f"[PAD{number}]" for number in range(rows)], [UNUSED] * rows
    for piece, number in vocabulary.items():
        pieces[number], types[number] = piece, NORMAL
    for number, token in tokenizer.added_tokens_decoder.items():
        pieces[number], types[number] = token.content, CONTROL if token.special else USER_DEFINED
    merges: list[Any] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return pieces, types, [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


# One GGUF file, which llama.cpp and what is built on it load: weights, tokenizer and chat template.

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By transformers' model_type. llama.cpp has no mistral: without its window it is a Llama."""
_MATRIX_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_Q8_0_BLOCK = 32


class GGUFFormat:
    """A file that is written weight by weight. Vectors are always in fp32."""

    loaded_by = "transformers (gguf_file)"

    def size(self, order: ExportSpec) -> int:
        if find_spec("gguf") is None:
            raise WhetError("--to gguf needs the package gguf, which is not installed: pip install 'whet[export]'")
        _require_architecture(order.trained.language_model.config)
        pre_tokenizer_name(order.speech.tokenizer)
        return int(order.trained.numbers * order.numbers.bytes_each) + 2**24

    def write(self, order: ExportSpec, folder: Path) -> None:
        from gguf import GGUFWriter

        settings: Any = order.trained.language_model.config
        architecture = _require_architecture(settings)
        writer = GGUFWriter(folder / f"{order.name}-{order.numbers.name}.gguf", architecture)
        _add_hyperparameters(writer, order, settings, architecture)
        _add_tokenizer(writer, order.speech, settings.vocab_size)
        for name, shape, kind, _ in _tensors(order, settings, architecture):
            _add_tensor_info(writer, name, shape, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, kind, read in _tensors(order, settings, architecture):
            writer.write_tensor_data(_quantize(read(), kind))
        writer.close()

    def look(
        self, order: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """transformers turns all weights into fp32: the whole model is in memory for it."""
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM

        (file,) = folder.glob("*.gguf")
        where = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name}
        try:
            settings, own = AutoConfig.from_pretrained(**where), _rope_parameters(order.trained.language_model.config)
            said = GGUFReader(file).fields
            if own["rope_type"] != "default":  # llama.cpp has a tensor or keys for these; transformers overlooks them
                settings.rope_parameters = own
            settings.head_dim = said[f"{said['general.architecture'].contents()}.attention.key_length"].contents()
            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of the library's own
                model, found = AutoModelForCausalLM.from_pretrained(
                    **where, config=settings, dtype=torch.float32, output_loading_info=True
                )
            missing = sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]}))
            if missing:
                raise ValueError(f"missing weights: {missing[:3]}")
            _verify_tokenizer(order.speech, where, file, probes, findings)
        except (OSError, ValueError, KeyError, RuntimeError, StopIteration, UnicodeDecodeError) as error:
            first = first_line(error)
            findings.blame(f"transformers cannot load it: {first}")
            return None
        return compute_logits(model, probes)


def _require_architecture(settings: Any) -> str:
    known = _ARCHITECTURES.get(settings.model_type)
    if known is None:
        raise WhetError(
            f"--to gguf: whet cannot write {settings.model_type} models as GGUF; it knows "
            f"{', '.join(_ARCHITECTURES)}. Use --to merged, and llama.cpp's own converter on that folder"
        )
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    if window is not None:
        raise WhetError(
            f"--to gguf: this {settings.model_type} model attends within a window of {window} tokens, which GGUF "
            f"cannot say of a {known} model. Use --to merged"
        )
    biased = next((name for name in ("attention_bias", "mlp_bias") if getattr(settings, name, False)), None)
    if known != "qwen2" and biased is not None:
        raise WhetError(
            f"--to gguf: this {settings.model_type} model has biases ({biased}), which transformers passes over when "
            "it reads a GGUF, so the file could not be compared. Use --to merged, and llama.cpp's own converter on "
            "that folder"
        )
    rope = _rope_parameters(settings)["rope_type"]
    if rope not in ("default", "linear", "llama3"):
        raise WhetError(
            f"--to gguf: this model scales its positions by {rope}, and whet can write default, linear and llama3. "
            "Use --to merged, and llama.cpp's own converter on that folder"
        )
    return known


def _rope_parameters(settings: Any) -> dict[str, Any]:
    return {"rope_type": "default", **(settings.rope_parameters or {})}


def _head_dim(settings: Any) -> int:
    return getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads


def _add_hyperparameters(writer: Any, order: ExportSpec, settings: Any, architecture: str) -> None:
    from gguf import RopeScalingType

    rope, head = _rope_parameters(settings), _head_dim(settings)
    writer.add_type("model")
    writer.add_name(order.name)
    writer.add_file_type(_FILE_TYPES[order.numbers.name])
    writer.add_quantization_version(2)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_vocab_size(settings.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(head)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _add_tokenizer(writer: Any, speech: GenerationSettings, rows: int) -> None:
    tokenizer = speech.tokenizer
    pieces, types, merges = gguf_vocabulary(tokenizer, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ends = [number for number in (tokenizer.eos_token_id, speech.end_of_turn, *speech.stops) if number is not None]
    if ends:
        writer.add_eos_token_id(ends[0])
    if speech.end_of_turn is not None:
        writer.add_eot_token_id(speech.end_of_turn)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    begun = tokenizer("a", add_special_tokens=True)["input_ids"]
    writer.add_add_bos_token(bool(begun) and begun[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(order: ExportSpec, settings: Any, architecture: str) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """(name, shape, kind, how to read it) in the order of the file; nothing is read yet."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key in MODEL_ARCH if MODEL_ARCH_NAMES[key] == architecture)
    names = get_tensor_name_map(arch, settings.num_hidden_layers)
    if _rope_parameters(settings)["rope_type"] == "llama3":
        factors = _rope_factors(settings)
        yield "rope_freqs.weight", factors.shape, "F32", lambda: torch.from_numpy(factors)
    for weight in order.trained.weights():
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise WhetError(f"--to gguf: GGUF has no name for this model's weight {weight.name}. Use --to merged")
        heads = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}
        turned = heads.get(weight.name.split(".")[-2]) if architecture == "llama" else None
        yield name, weight.shape, _tensor_type(weight.shape, order.numbers.name), _permuted_reader(weight.read, turned)


def _permuted_reader(read: Any, heads: int | None) -> Any:
    return read if heads is None else lambda: _permute_rope(read(), heads)


def _permute_rope(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp turns neighbouring numbers of a Llama's queries and keys, transformers numbers half a head apart."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(settings: Any) -> np.ndarray[Any, Any]:
    """By what each frequency of Llama 3.1's positions is divided."""
    slowed = rope_frequencies(settings, "llama3")
    head, theta = _head_dim(settings), _rope_parameters(settings)["rope_theta"]
    plain = 1.0 / (theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head))
    return np.asarray((plain / slowed).to(torch.float32).numpy())


def _tensor_type(shape: tuple[int, ...], numbers: str) -> str:
    if len(shape) < 2:
        return "F32"
    return "F16" if numbers == "q8_0" and shape[-1] % _Q8_0_BLOCK else _MATRIX_TYPES[numbers]


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
    speech: GenerationSettings,
    where: dict[str, str],
    file: Path,
    probes: Sequence[Sequence[int]],
    findings: ExportFindings,
) -> None:
    """transformers reads pieces, merges and template; how text is cut, and where answers end, stand in the file."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    said = GGUFReader(file).fields
    loaded = AutoTokenizer.from_pretrained(**where)
    set_pre_tokenizer(loaded, str(said["tokenizer.ggml.pre"].contents()))
    for kind in ("bos", "eos"):  # transformers 5.17 takes each for the other
        number = said.get(f"tokenizer.ggml.{kind}_token_id")
        setattr(loaded, f"{kind}_token", loaded.convert_ids_to_tokens(number.contents()) if number else None)
    texts = [speech.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]
    compare_tokenizers(speech, loaded, texts, findings)
    ends = [
        said[key].contents() for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in said
    ]
    end = speech.end_of_turn if speech.end_of_turn is not None else next(iter(speech.stops), None)
    findings.stops = end is None or end in ends
    if not findings.stops:
        findings.blame(f"it does not stop at {speech.tokenizer.convert_ids_to_tokens(end)!r}, which ends an answer")
