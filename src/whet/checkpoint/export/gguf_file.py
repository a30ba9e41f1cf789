"""One GGUF file, which llama.cpp and what is built on it load: weights, tokenizer and chat template."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.checkpoint.export.certificate import Findings
from whet.checkpoint.export.gguf_tokenizer import cut_of, pieces_of, set_cut
from whet.checkpoint.export.order import Order, Speech
from whet.checkpoint.export.speech import compare_speech
from whet.checkpoint.export.trained import logits_of
from whet.core.errors import WhetError

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By transformers' model_type. llama.cpp has no mistral: without its window it is a Llama."""
_MATRICES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_BLOCK = 32


class Gguf:
    """A file that is written weight by weight. Vectors are always in fp32."""

    loaded_by = "transformers (gguf_file)"

    def size(self, order: Order) -> int:
        if find_spec("gguf") is None:
            raise WhetError("--to gguf needs the package gguf, which is not installed: pip install 'whet[export]'")
        _architecture(order.trained.language_model.config)
        cut_of(order.speech.tokenizer)
        return int(order.trained.numbers * order.numbers.bytes_each) + 2**24

    def write(self, order: Order, folder: Path) -> None:
        from gguf import GGUFWriter

        settings: Any = order.trained.language_model.config
        architecture = _architecture(settings)
        writer = GGUFWriter(folder / f"{order.name}-{order.numbers.name}.gguf", architecture)
        _describe(writer, order, settings, architecture)
        _add_tokenizer(writer, order.speech, settings.vocab_size)
        for name, shape, kind, _ in _tensors(order, settings, architecture):
            _announce(writer, name, shape, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, _, kind, read in _tensors(order, settings, architecture):
            writer.write_tensor_data(_as_kind(read(), kind))
        writer.close()

    def look(self, order: Order, folder: Path, probes: Sequence[Sequence[int]], findings: Findings) -> Tensor | None:
        """transformers turns all weights into fp32: the whole model is in memory for it."""
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM

        (file,) = folder.glob("*.gguf")
        where = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name}
        try:
            settings, own = AutoConfig.from_pretrained(**where), _rope(order.trained.language_model.config)
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
            _look_at_speech(order.speech, where, file, probes, findings)
        except (OSError, ValueError, KeyError, RuntimeError, StopIteration, UnicodeDecodeError) as error:
            first = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
            findings.blame(f"transformers cannot load it: {first}")
            return None
        return logits_of(model, probes)


def _architecture(settings: Any) -> str:
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
    rope = _rope(settings)["rope_type"]
    if rope not in ("default", "linear", "llama3"):
        raise WhetError(
            f"--to gguf: this model scales its positions by {rope}, and whet can write default, linear and llama3. "
            "Use --to merged, and llama.cpp's own converter on that folder"
        )
    return known


def _rope(settings: Any) -> dict[str, Any]:
    return {"rope_type": "default", **(settings.rope_parameters or {})}


def _head_size(settings: Any) -> int:
    return getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads


def _describe(writer: Any, order: Order, settings: Any, architecture: str) -> None:
    from gguf import RopeScalingType

    rope, head = _rope(settings), _head_size(settings)
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


def _add_tokenizer(writer: Any, speech: Speech, rows: int) -> None:
    tokenizer = speech.tokenizer
    pieces, types, merges = pieces_of(tokenizer, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut_of(tokenizer))
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


def _tensors(order: Order, settings: Any, architecture: str) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """(name, shape, kind, how to read it) in the order of the file; nothing is read yet."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key in MODEL_ARCH if MODEL_ARCH_NAMES[key] == architecture)
    names = get_tensor_name_map(arch, settings.num_hidden_layers)
    if _rope(settings)["rope_type"] == "llama3":
        factors = _rope_factors(settings)
        yield "rope_freqs.weight", factors.shape, "F32", lambda: torch.from_numpy(factors)
    for weight in order.trained.weights():
        name = names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise WhetError(f"--to gguf: GGUF has no name for this model's weight {weight.name}. Use --to merged")
        heads = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}
        turned = heads.get(weight.name.split(".")[-2]) if architecture == "llama" else None
        yield name, weight.shape, _kind_of(weight.shape, order.numbers.name), _reading(weight.read, turned)


def _reading(read: Any, heads: int | None) -> Any:
    return read if heads is None else lambda: _interleaved(read(), heads)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp turns neighbouring numbers of a Llama's queries and keys, transformers numbers half a head apart."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(settings: Any) -> np.ndarray[Any, Any]:
    """By what each frequency of Llama 3.1's positions is divided."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](settings, torch.device("cpu"))
    head, theta = _head_size(settings), _rope(settings)["rope_theta"]
    plain = 1.0 / (theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head))
    return np.asarray((plain / slowed).to(torch.float32).numpy())


def _kind_of(shape: tuple[int, ...], numbers: str) -> str:
    if len(shape) < 2:
        return "F32"
    return "F16" if numbers == "q8_0" and shape[-1] % _BLOCK else _MATRICES[numbers]


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    packed = kind in ("BF16", "Q8_0")
    stored = quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind]) if packed else shape
    dtype = np.dtype(np.uint8) if packed else np.dtype(np.float16 if kind == "F16" else np.float32)
    size = int(np.prod(stored)) * dtype.itemsize
    writer.add_tensor_info(name, stored, dtype, size, GGMLQuantizationType[kind] if packed else None)


def _as_kind(weight: Tensor, kind: str) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return np.asarray(quantize(weight.to(torch.float32).contiguous().numpy(), GGMLQuantizationType[kind]))


def _look_at_speech(
    speech: Speech, where: dict[str, str], file: Path, probes: Sequence[Sequence[int]], findings: Findings
) -> None:
    """transformers reads pieces, merges and template; how text is cut, and where answers end, stand in the file."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    said = GGUFReader(file).fields
    loaded = AutoTokenizer.from_pretrained(**where)
    set_cut(loaded, str(said["tokenizer.ggml.pre"].contents()))
    for kind in ("bos", "eos"):  # transformers 5.17 takes each for the other
        number = said.get(f"tokenizer.ggml.{kind}_token_id")
        setattr(loaded, f"{kind}_token", loaded.convert_ids_to_tokens(number.contents()) if number else None)
    texts = [speech.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in probes]
    compare_speech(speech, loaded, texts, findings)
    ends = [
        said[key].contents() for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in said
    ]
    end = speech.end_of_turn if speech.end_of_turn is not None else next(iter(speech.stops), None)
    findings.stops = end is None or end in ends
    if not findings.stops:
        findings.blame(f"it does not stop at {speech.tokenizer.convert_ids_to_tokens(end)!r}, which ends an answer")
