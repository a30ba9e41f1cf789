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
from whet.exporting.weight_comparison import LoadedWeights, compare_weights

# Layout. linear_qkv holds, for each query group, its queries, then its key, then its value. linear_fc1 holds on each
# rank its part of gate above its part of up. Norms belong to the linear layer that follows them (Transformer Engine).

Sharding = Literal["replicated", "columns", "vocabulary", "qkv", "gate_up"]
_VOCAB_MULTIPLE = 128  # --make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True)
class MegatronShape:
    """The values of a model's config that decide the layout."""

    layers: int
    heads: int
    query_groups: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_layernorm: bool
    tensor_parallel: int

    @classmethod
    def of(cls, config: Any, tensor_parallel: int) -> MegatronShape:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim,
            config.vocab_size, bool(config.tie_word_embeddings), config.model_type == "qwen2",
            config.model_type == "qwen3", tensor_parallel,
        )  # fmt: skip

    @property
    def padded_vocab_size(self) -> int:
        unit = _VOCAB_MULTIPLE * self.tensor_parallel
        return -(-self.vocab_size // unit) * unit


@dataclass(frozen=True, slots=True)
class MegatronWeight:
    """A weight of Megatron: its name, the weights of transformers that it consists of, and how ranks share it."""

    name: str
    hf_names: tuple[str, ...]
    sharding: Sharding


def megatron_weights(shape: MegatronShape) -> list[MegatronWeight]:
    found = [MegatronWeight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")]
    for number in range(shape.layers):
        to, layer = f"decoder.layers.{number}", f"model.layers.{number}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        qkv = tuple(f"{attention}.{which}_proj" for which in "qkv")
        found += [
            MegatronWeight(
                f"{to}.self_attention.linear_qkv.layer_norm_weight", (f"{layer}.input_layernorm.weight",), "replicated"
            ),
            MegatronWeight(f"{to}.self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in qkv), "qkv"),
            MegatronWeight(f"{to}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), "columns"),
            MegatronWeight(
                f"{to}.mlp.linear_fc1.layer_norm_weight", (f"{layer}.post_attention_layernorm.weight",), "replicated"
            ),
            MegatronWeight(
                f"{to}.mlp.linear_fc1.weight", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), "gate_up"
            ),
            MegatronWeight(f"{to}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), "columns"),
        ]
        if shape.qkv_bias:
            name = f"{to}.self_attention.linear_qkv.bias"
            found.append(MegatronWeight(name, tuple(f"{one}.bias" for one in qkv), "qkv"))
        if shape.qk_layernorm:
            for which in "qk":
                name = f"{to}.self_attention.{which}_layernorm.weight"
                found.append(MegatronWeight(name, (f"{attention}.{which}_norm.weight",), "replicated"))
    found.append(MegatronWeight("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"))
    if not shape.tied:
        found.append(MegatronWeight("output_layer.weight", ("lm_head.weight",), "vocabulary"))
    return found


def shard_weights(weight: MegatronWeight, tensors: Sequence[Tensor], shape: MegatronShape, rank: int) -> Tensor:
    """The shard of `rank`, from tensors of transformers."""
    if weight.sharding == "replicated":
        return tensors[0]
    if weight.sharding == "vocabulary":
        padding = tensors[0].new_zeros(shape.padded_vocab_size - shape.vocab_size, tensors[0].shape[1])
        return _rank_chunk(torch.cat([tensors[0], padding]), shape, rank)
    if weight.sharding == "columns":
        return _rank_chunk(tensors[0], shape, rank, dim=1)
    if weight.sharding == "gate_up":
        return torch.cat([_rank_chunk(half, shape, rank) for half in tensors])
    grouped = [one.reshape(shape.query_groups, -1, *one.shape[1:]) for one in tensors]
    joined = torch.cat(grouped, dim=1)
    return _rank_chunk(joined.reshape(-1, *joined.shape[2:]), shape, rank)


def unshard_weights(weight: MegatronWeight, shards: Sequence[Tensor], shape: MegatronShape) -> list[Tensor]:
    """The inverse of shard_weights: tensors of transformers, from the shards of all ranks."""
    if weight.sharding == "replicated":
        return [shards[0]]
    if weight.sharding == "vocabulary":
        return [torch.cat(list(shards))[: shape.vocab_size]]
    if weight.sharding == "columns":
        return [torch.cat(list(shards), dim=1)]
    if weight.sharding == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[which] for half in halves]) for which in (0, 1)]
    joined = torch.cat(list(shards))
    grouped = joined.reshape(shape.query_groups, -1, *joined.shape[1:])
    queries = shape.heads // shape.query_groups * shape.head_dim
    return [
        part.reshape(-1, *part.shape[2:]) for part in grouped.split([queries, shape.head_dim, shape.head_dim], dim=1)
    ]


def _rank_chunk(tensor: Tensor, shape: MegatronShape, rank: int, dim: int = 0) -> Tensor:
    return tensor.chunk(shape.tensor_parallel, dim=dim)[rank]


# The format.

_SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class MegatronFormat:
    """`release/mp_rank_XX/model_optim_rng.pt`, and config and tokenizer of transformers in `huggingface`."""

    loaded_by = "whet's reader of Megatron-Core's layout"

    def require_supported(self, spec: ExportSpec) -> None:
        config: Any = spec.model.language_model.config
        if config.model_type not in _SUPPORTED_MODEL_TYPES or getattr(config, "attention_bias", False) is True:
            raise WhetError(
                f"--to megatron: whet does not know the Megatron layout of this {config.model_type} model, only that "
                f"of {', '.join(_SUPPORTED_MODEL_TYPES)} without attention_bias. Use --to merged"
            )
        shape = MegatronShape.of(config, spec.tensor_parallel)
        for what, count in (("key-value heads", shape.query_groups), ("MLP rows", config.intermediate_size)):
            if count % shape.tensor_parallel:
                raise WhetError(
                    f"--tensor-parallel: {shape.tensor_parallel} ranks cannot evenly share this model's {count} "
                    f"{what}. Use a divisor of {count}"
                )

    def estimate_bytes(self, spec: ExportSpec) -> int:
        return int(spec.model.num_parameters * spec.dtype.bytes_per_weight) + 2**24

    def write(self, spec: ExportSpec, folder: Path) -> None:
        """Holds the file of one rank in memory at a time."""
        config: Any = spec.model.language_model.config
        shape = MegatronShape.of(config, spec.tensor_parallel)
        readers = {weight.name: weight.read for weight in spec.model.weights()}
        (folder / "latest_checkpointed_iteration.txt").write_text("release")
        for rank in range(shape.tensor_parallel):
            state: dict[str, Tensor] = {}
            for weight in megatron_weights(shape):
                tensors = [readers[name]() for name in weight.hf_names]
                state[weight.name] = shard_weights(weight, tensors, shape, rank).to(spec.dtype.torch_dtype).clone()
            content = {
                "args": _megatron_args(config, shape, spec), "checkpoint_version": 3.0, "iteration": 0, "model": state
            }  # fmt: skip
            file = folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            torch.save(content, file)
        (folder / "huggingface").mkdir()
        write_configs(spec, folder / "huggingface")

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """Without Megatron: the shards are joined again and loaded by transformers."""
        from transformers import AutoConfig, AutoModelForCausalLM

        dtype = spec.dtype.torch_dtype
        try:
            weights = read_megatron(folder)
            config = AutoConfig.from_pretrained(folder / "huggingface", trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model = model.to_empty(device="cpu")
            model.load_state_dict(weights, strict=not config.tie_word_embeddings, assign=True)
            model.tie_weights()
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers are in no file
        except Exception as error:  # a damaged or forged file can raise almost anything
            findings.reasons.append(f"it cannot be read back: {first_line(error)}")
            return None
        others = sorted({str(tensor.dtype) for tensor in weights.values() if tensor.dtype != dtype})
        if others:
            findings.reasons.append(f"it has weights in {', '.join(others)} instead of {dtype}")
            model = model.to(dtype)
        compare_weights(spec.model, LoadedWeights(model), spec.dtype, findings)
        verify_tokenizer_and_stops(spec.generation, folder / "huggingface", None, probes, findings)
        return compute_logits(model, probes, spec.compares_in_fp32)


def read_megatron(folder: Path) -> dict[str, Tensor]:
    """All weights of a Megatron checkpoint, by their names in transformers."""
    parts = []
    with torch.serialization.safe_globals([argparse.Namespace]):
        for file in sorted((folder / "release").glob("mp_rank_*/model_optim_rng.pt")):
            parts.append(torch.load(file, map_location="cpu", weights_only=True, mmap=True))  # noqa: PERF401
    if not parts:
        raise ValueError("no file release/mp_rank_XX/model_optim_rng.pt")
    args = parts[0]["args"]
    shape = MegatronShape(
        args.num_layers, args.num_attention_heads, args.num_query_groups, args.kv_channels, args.vocab_size,
        not args.untie_embeddings_and_output_weights, args.add_qkv_bias, args.qk_layernorm, len(parts),
    )  # fmt: skip
    found: dict[str, Tensor] = {}
    for weight in megatron_weights(shape):
        tensors = unshard_weights(weight, [part["model"][weight.name] for part in parts], shape)
        found |= dict(zip(weight.hf_names, tensors, strict=True))
    return found


def _megatron_args(config: Any, shape: MegatronShape, spec: ExportSpec) -> argparse.Namespace:
    """Megatron's command-line arguments, which it reads with --use-checkpoint-args."""
    rope = config.rope_parameters or {}
    return argparse.Namespace(
        num_layers=shape.layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=shape.heads,
        group_query_attention=shape.query_groups != shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=config.max_position_embeddings,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.padded_vocab_size,
        make_vocab_size_divisible_by=_VOCAB_MULTIPLE,
        untie_embeddings_and_output_weights=not shape.tied,
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta", 10000.0),
        use_rotary_position_embeddings=True,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        tensor_model_parallel_size=shape.tensor_parallel,
        pipeline_model_parallel_size=1,
        transformer_impl="transformer_engine",
        tokenizer_type="HuggingFaceTokenizer",
        params_dtype=spec.dtype.torch_dtype,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
