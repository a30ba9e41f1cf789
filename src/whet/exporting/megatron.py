"""Export as a Megatron-Core checkpoint: one file per tensor-parallel rank."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from whet.core.errors import WhetError, first_line
from whet.exporting.hf_folder import verify_tokenizer_and_stops, write_configs
from whet.exporting.spec import ExportFindings, ExportSpec
from whet.exporting.trained_model import compute_logits

# Where Megatron-Core keeps the weights of a Llama: which of ours make one of its, and which part each process has.
#
# Queries, keys and values are one matrix in which each group has its queries, then its key, then its value; gate and up
# are one matrix, each process's gate over its up. Norms stand inside the matrix that follows them (Transformer Engine).

Sharding = Literal["whole", "rows", "columns", "vocabulary", "groups", "halves"]
_VOCAB_MULTIPLE = 128  # Megatron's make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True)
class MegatronShape:
    """What of a model's configuration decides the layout."""

    layers: int
    heads: int
    groups: int
    head_size: int
    rows: int
    tied: bool
    biased: bool
    norms_heads: bool
    parallel: int

    @classmethod
    def of(cls, settings: Any, parallel: int) -> MegatronShape:
        head = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        return cls(
            settings.num_hidden_layers, settings.num_attention_heads, settings.num_key_value_heads, head,
            settings.vocab_size, bool(settings.tie_word_embeddings), settings.model_type == "qwen2",
            settings.model_type == "qwen3", parallel,
        )  # fmt: skip

    @property
    def padded_rows(self) -> int:
        unit = _VOCAB_MULTIPLE * self.parallel
        return -(-self.rows // unit) * unit


@dataclass(frozen=True, slots=True)
class MegatronWeight:
    """One of Megatron's weights: its name, ours that it consists of, and how it is divided."""

    name: str
    ours: tuple[str, ...]
    part: Sharding


def megatron_weights(shape: MegatronShape) -> list[MegatronWeight]:
    found = [MegatronWeight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")]
    for number in range(shape.layers):
        to, ours = f"decoder.layers.{number}", f"model.layers.{number}"
        attention, mlp = f"{ours}.self_attn", f"{ours}.mlp"
        qkv = tuple(f"{attention}.{which}_proj" for which in "qkv")
        found += [
            MegatronWeight(
                f"{to}.self_attention.linear_qkv.layer_norm_weight", (f"{ours}.input_layernorm.weight",), "whole"
            ),
            MegatronWeight(f"{to}.self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), "groups"),
            MegatronWeight(f"{to}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), "columns"),
            MegatronWeight(
                f"{to}.mlp.linear_fc1.layer_norm_weight", (f"{ours}.post_attention_layernorm.weight",), "whole"
            ),
            MegatronWeight(
                f"{to}.mlp.linear_fc1.weight", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), "halves"
            ),
            MegatronWeight(f"{to}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), "columns"),
        ]
        if shape.biased:
            name = f"{to}.self_attention.linear_qkv.bias"
            found.append(MegatronWeight(name, tuple(f"{one}.bias" for one in qkv), "groups"))
        if shape.norms_heads:
            for which in "qk":
                name = f"{to}.self_attention.{which}_layernorm.weight"
                found.append(MegatronWeight(name, (f"{attention}.{which}_norm.weight",), "whole"))
    found.append(MegatronWeight("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"))
    if not shape.tied:
        found.append(MegatronWeight("output_layer.weight", ("lm_head.weight",), "vocabulary"))
    return found


def shard_weights(entry: MegatronWeight, ours: Sequence[Tensor], shape: MegatronShape, rank: int) -> Tensor:
    """The part of process `rank`."""
    if entry.part == "whole":
        return ours[0]
    if entry.part == "vocabulary":
        padding = ours[0].new_zeros(shape.padded_rows - shape.rows, ours[0].shape[1])
        return _rank_chunk(torch.cat([ours[0], padding]), shape, rank)
    if entry.part == "columns":
        return _rank_chunk(ours[0], shape, rank, dim=1)
    if entry.part == "halves":
        return torch.cat([_rank_chunk(half, shape, rank) for half in ours])
    grouped = [one.reshape(shape.groups, -1, *one.shape[1:]) for one in ours]
    joined = torch.cat(grouped, dim=1)
    return _rank_chunk(joined.reshape(-1, *joined.shape[2:]), shape, rank)


def unshard_weights(entry: MegatronWeight, parts: Sequence[Tensor], shape: MegatronShape) -> list[Tensor]:
    """`join` undone: ours, from the parts of all processes."""
    if entry.part == "whole":
        return [parts[0]]
    if entry.part == "vocabulary":
        return [torch.cat(list(parts))[: shape.rows]]
    if entry.part == "columns":
        return [torch.cat(list(parts), dim=1)]
    if entry.part == "halves":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[which] for half in halves]) for which in (0, 1)]
    whole = torch.cat(list(parts))
    grouped = whole.reshape(shape.groups, -1, *whole.shape[1:])
    queries = shape.heads // shape.groups * shape.head_size
    pieces = grouped.split([queries, shape.head_size, shape.head_size], dim=1)
    return [piece.reshape(-1, *piece.shape[2:]) for piece in pieces]


def _rank_chunk(whole: Tensor, shape: MegatronShape, rank: int, dim: int = 0) -> Tensor:
    return whole.chunk(shape.parallel, dim=dim)[rank]


# A checkpoint in the layout of Megatron-Core: one file for each process of a tensor-parallel group.

_SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class MegatronFormat:
    """`release/mp_rank_XX/model_optim_rng.pt`, and in `huggingface` the settings and tokenizer that belong to it."""

    loaded_by = "whet's reader of Megatron-Core's layout"

    def size(self, order: ExportSpec) -> int:
        settings: Any = order.trained.language_model.config
        if settings.model_type not in _SUPPORTED_MODEL_TYPES or getattr(settings, "attention_bias", False) is True:
            raise WhetError(
                f"--to megatron: whet does not know where Megatron keeps the weights of this {settings.model_type} "
                f"model; it knows {', '.join(_SUPPORTED_MODEL_TYPES)} without further biases. Use --to merged"
            )
        shape = MegatronShape.of(settings, order.tensor_parallel)
        for what, count in (("key-value heads", shape.groups), ("feed-forward rows", settings.intermediate_size)):
            if count % shape.parallel:
                raise WhetError(
                    f"--tensor-parallel: {shape.parallel} processes cannot share this model's {count} {what} evenly; "
                    "give a divisor of it"
                )
        return int(order.trained.numbers * order.numbers.bytes_each) + 2**24

    def write(self, order: ExportSpec, folder: Path) -> None:
        """Each process's file is in memory while it is written."""
        settings: Any = order.trained.language_model.config
        shape = MegatronShape.of(settings, order.tensor_parallel)
        readers = {weight.name: weight.read for weight in order.trained.weights()}
        (folder / "latest_checkpointed_iteration.txt").write_text("release")
        for rank in range(shape.parallel):
            kept: dict[str, Tensor] = {}
            for entry in megatron_weights(shape):
                ours = [readers[name]() for name in entry.ours]
                kept[entry.name] = shard_weights(entry, ours, shape, rank).to(order.numbers.dtype).clone()
            content = {
                "args": _megatron_args(settings, shape, order), "checkpoint_version": 3.0, "iteration": 0, "model": kept
            }  # fmt: skip
            file = _rank_file(folder, rank)
            file.parent.mkdir(parents=True)
            torch.save(content, file)
        (folder / "huggingface").mkdir()
        write_configs(order, folder / "huggingface")

    def look(
        self, order: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
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
            _init_rotary_embedding(model, settings)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = first_line(error)
            findings.blame(f"it cannot be read back: {first}")
            return None
        others = sorted({str(tensor.dtype) for tensor in weights.values() if tensor.dtype != order.numbers.dtype})
        if others:
            findings.blame(f"it has weights in {', '.join(others)} instead of {order.numbers.dtype}")
            model = model.to(order.numbers.dtype)
        verify_tokenizer_and_stops(order.speech, folder / "huggingface", None, probes, findings)
        return compute_logits(model, probes)


def read_megatron(folder: Path) -> dict[str, Tensor]:
    """All weights of such a checkpoint, by transformers' names."""
    parts = []
    with torch.serialization.safe_globals([argparse.Namespace]):
        for file in sorted((folder / "release").glob("mp_rank_*/model_optim_rng.pt")):
            parts.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))  # noqa: PERF401
    if not parts:
        raise ValueError("there is no release/mp_rank_XX/model_optim_rng.pt")
    said = parts[0]["args"]
    shape = MegatronShape(
        said.num_layers, said.num_attention_heads, said.num_query_groups, said.kv_channels, said.vocab_size,
        not said.untie_embeddings_and_output_weights, said.add_qkv_bias, said.qk_layernorm, len(parts),
    )  # fmt: skip
    found: dict[str, Tensor] = {}
    for entry in megatron_weights(shape):
        ours = unshard_weights(entry, [part["model"][entry.name] for part in parts], shape)
        found |= dict(zip(entry.ours, ours, strict=True))
    return found


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


def _init_rotary_embedding(model: Any, settings: Any) -> None:
    """What is computed from the settings, and was left out when the model was made on no device."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=settings)


def _megatron_args(settings: Any, shape: MegatronShape, order: ExportSpec) -> argparse.Namespace:
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
