"""A checkpoint in the layout of Megatron-Core: one file for each process of a tensor-parallel group."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.checkpoint.export.certificate import Findings
from whet.checkpoint.export.megatron_layout import Shape, divide, entries, join
from whet.checkpoint.export.merged import look_at_speech, write_settings
from whet.checkpoint.export.order import Order
from whet.checkpoint.export.trained import logits_of
from whet.core.errors import WhetError

_KNOWN = ("llama", "mistral", "qwen2", "qwen3")


class Megatron:
    """`release/mp_rank_XX/model_optim_rng.pt`, and in `huggingface` the settings and tokenizer that belong to it."""

    loaded_by = "whet's reader of Megatron-Core's layout"

    def size(self, order: Order) -> int:
        settings: Any = order.trained.language_model.config
        if settings.model_type not in _KNOWN or getattr(settings, "attention_bias", False) is True:
            raise WhetError(
                f"--to megatron: whet does not know where Megatron keeps the weights of this {settings.model_type} "
                f"model; it knows {', '.join(_KNOWN)} without further biases. Use --to merged"
            )
        shape = Shape.of(settings, order.tensor_parallel)
        for what, count in (("key-value heads", shape.groups), ("feed-forward rows", settings.intermediate_size)):
            if count % shape.parallel:
                raise WhetError(
                    f"--tensor-parallel: {shape.parallel} processes cannot share this model's {count} {what} evenly; "
                    "give a divisor of it"
                )
        return int(order.trained.numbers * order.numbers.bytes_each) + 2**24

    def write(self, order: Order, folder: Path) -> None:
        """Each process's file is in memory while it is written."""
        settings: Any = order.trained.language_model.config
        shape = Shape.of(settings, order.tensor_parallel)
        readers = {weight.name: weight.read for weight in order.trained.weights()}
        (folder / "latest_checkpointed_iteration.txt").write_text("release")
        for rank in range(shape.parallel):
            kept: dict[str, Tensor] = {}
            for entry in entries(shape):
                ours = [readers[name]() for name in entry.ours]
                kept[entry.name] = join(entry, ours, shape, rank).to(order.numbers.dtype).clone()
            content = {
                "args": _arguments(settings, shape, order), "checkpoint_version": 3.0, "iteration": 0, "model": kept
            }  # fmt: skip
            file = _file(folder, rank)
            file.parent.mkdir(parents=True)
            torch.save(content, file)
        (folder / "huggingface").mkdir()
        write_settings(order, folder / "huggingface")

    def look(self, order: Order, folder: Path, probes: Sequence[Sequence[int]], findings: Findings) -> Tensor | None:
        """Megatron is not asked: the files are put together again and computed by transformers."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            weights = read_megatron(folder)
            settings = AutoConfig.from_pretrained(folder / "huggingface")
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(settings, dtype=order.numbers.dtype)
            model = model.to_empty(device="cpu")
            model.load_state_dict(weights, strict=not settings.tie_word_embeddings, assign=True)
            model.tie_weights()
            _fill_positions(model, settings)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
            findings.blame(f"it cannot be read back: {first}")
            return None
        others = sorted({str(tensor.dtype) for tensor in weights.values() if tensor.dtype != order.numbers.dtype})
        if others:
            findings.blame(f"it has weights in {', '.join(others)} instead of {order.numbers.dtype}")
            model = model.to(order.numbers.dtype)
        look_at_speech(order.speech, folder / "huggingface", None, probes, findings)
        return logits_of(model, probes)


def read_megatron(folder: Path) -> dict[str, Tensor]:
    """All weights of such a checkpoint, by transformers' names."""
    parts = []
    with torch.serialization.safe_globals([argparse.Namespace]):
        for file in sorted((folder / "release").glob("mp_rank_*/model_optim_rng.pt")):
            parts.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))  # noqa: PERF401
    if not parts:
        raise ValueError("there is no release/mp_rank_XX/model_optim_rng.pt")
    said = parts[0]["args"]
    shape = Shape(
        said.num_layers, said.num_attention_heads, said.num_query_groups, said.kv_channels, said.vocab_size,
        not said.untie_embeddings_and_output_weights, said.add_qkv_bias, said.qk_layernorm, len(parts),
    )  # fmt: skip
    found: dict[str, Tensor] = {}
    for entry in entries(shape):
        ours = divide(entry, [part["model"][entry.name] for part in parts], shape)
        found |= dict(zip(entry.ours, ours, strict=True))
    return found


def _file(folder: Path, rank: int) -> Path:
    return folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


def _fill_positions(model: Any, settings: Any) -> None:
    """What is computed from the settings, and was left out when the model was made on no device."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=settings)


def _arguments(settings: Any, shape: Shape, order: Order) -> argparse.Namespace:
    """By the names of Megatron's own arguments, which it reads with --use-checkpoint-args."""
    rope = settings.rope_parameters or {}
    return argparse.Namespace(
        num_layers=shape.layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.intermediate_size,
        num_attention_heads=shape.heads,
        group_query_attention=shape.groups != shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_size,
        max_position_embeddings=settings.max_position_embeddings,
        seq_length=settings.max_position_embeddings,
        vocab_size=shape.rows,
        padded_vocab_size=shape.padded_rows,
        make_vocab_size_divisible_by=128,
        untie_embeddings_and_output_weights=not shape.tied,
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta", 10000.0),
        use_rotary_position_embeddings=True,
        normalization="RMSNorm",
        norm_epsilon=settings.rms_norm_eps,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=shape.biased,
        qk_layernorm=shape.norms_heads,
        tensor_model_parallel_size=shape.parallel,
        pipeline_model_parallel_size=1,
        transformer_impl="transformer_engine",
        tokenizer_type="HuggingFaceTokenizer",
        params_dtype=order.numbers.dtype,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
