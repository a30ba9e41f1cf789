"""Export as a GPT-NeoX checkpoint: a file for each layer and tensor-parallel rank, read back by the importer.

The layout is described in neox.py and neox_files.py. NeoX loads it with `finetune: true` and `load` set to the folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from whet.convert.converter import convert_checkpoint
from whet.convert.neox import NeoXCheckpoint
from whet.core.errors import WhetError, first_line
from whet.exporting.hf_folder import verify_tokenizer_and_stops, write_configs
from whet.exporting.spec import ExportFindings, ExportSpec
from whet.exporting.trained_model import compute_logits
from whet.exporting.weight_comparison import LoadedWeights, compare_weights

_VOCAB_MULTIPLE = 128  # make_vocab_size_divisible_by
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")

Read = Callable[[str], Tensor]
"""A weight by its name in transformers."""


class NeoXFormat:
    """`global_stepN/layer_XX-model_YY-model_states.pt`, `latest`, NeoX's settings in `configs`, and config and
    tokenizer of transformers in `huggingface`."""

    loaded_by = "whet's importer of GPT-NeoX checkpoints"

    def require_supported(self, spec: ExportSpec) -> None:
        config: Any = spec.model.language_model.config
        reason = _unsupported(config)
        if reason:
            raise WhetError(
                f"--to neox: GPT-NeoX cannot load this {config.model_type} model: {reason}. Use --to merged"
            )
        keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        for what, count in (("key-value heads", keys), ("MLP rows", config.intermediate_size)):
            if count % spec.tensor_parallel:
                raise WhetError(
                    f"--tensor-parallel: {spec.tensor_parallel} ranks cannot evenly share this model's {count} {what}. "
                    f"Use a divisor of {count}"
                )

    def estimate_bytes(self, spec: ExportSpec) -> int:
        """Twice: the import that checks it is written, too."""
        return 2 * int(spec.model.num_parameters * spec.dtype.bytes_per_weight) + 2**24

    def write(self, spec: ExportSpec, folder: Path) -> None:
        """Holds one layer in memory at a time."""
        config: Any = spec.model.language_model.config
        ranks, dtype = spec.tensor_parallel, spec.dtype.torch_dtype
        readers = {weight.name: weight.read for weight in spec.model.weights()}
        step = folder / f"global_step{spec.step}"
        (step / "configs").mkdir(parents=True)
        layers = _llama_layers if config.model_type == "llama" else _neox_layers
        for number, tensors_of_rank in layers(config, ranks, lambda name: readers[name](), set(readers)):
            for rank in range(ranks):
                tensors = {name: tensor.to(dtype).clone() for name, tensor in tensors_of_rank(rank).items()}
                torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        for rank in range(ranks):  # what DeepSpeed reads beside the layers
            beside: dict[str, Any] = {
                "module": None, "optimizer": {}, "dp_world_size": 1, "mp_world_size": ranks,
                "global_steps": spec.step, "skipped_steps": 0, "iteration": spec.step,
            }  # fmt: skip
            torch.save(beside, step / f"mp_rank_{rank:02d}_model_states.pt")
        (step / "configs" / "model.yml").write_text(yaml.safe_dump(_settings(config, ranks), sort_keys=False))
        (folder / "latest").write_text(step.name)
        (folder / "huggingface").mkdir()
        write_configs(spec, folder / "huggingface")

    def load_and_verify(
        self, spec: ExportSpec, folder: Path, probes: Sequence[Sequence[int]], findings: ExportFindings
    ) -> Tensor | None:
        """The checkpoint is imported as any other one, and what comes out of it loaded by transformers."""
        from transformers import AutoModelForCausalLM

        dtype, rows = spec.dtype.torch_dtype, spec.model.language_model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            try:
                checkpoint = NeoXCheckpoint(folder, None, average_norms=False)
                convert_checkpoint("neox", folder, checkpoint, None, Path(scratch) / "imported")
                model = AutoModelForCausalLM.from_pretrained(Path(scratch) / "imported", dtype=checkpoint.dtype)
                model.resize_token_embeddings(rows)  # without NeoX's padding
            except Exception as error:  # a damaged or forged file can raise almost anything
                findings.reasons.append(f"it cannot be read back: {first_line(error)}")
                return None
            if checkpoint.dtype != dtype:
                findings.reasons.append(f"it has weights in {checkpoint.dtype} instead of {dtype}")
            compare_weights(spec.model, LoadedWeights(model), spec.dtype, findings)
            verify_tokenizer_and_stops(spec.generation, folder / "huggingface", None, probes, findings)
            return compute_logits(model, probes, spec.compares_in_fp32)


def _unsupported(config: Any) -> str | None:
    """Why NeoX has no such model."""
    if config.model_type not in ("llama", "gpt_neox"):
        return "only Llama and GPT-NeoX models have its layers"
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        return f"it does not scale rotary positions ({rope['rope_type']})"
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and head_dim * config.num_attention_heads != config.hidden_size:
        return f"its heads have {head_dim} dimensions, not hidden size ÷ heads"
    activations = ("silu",) if config.model_type == "llama" else ("gelu", *_TANH_GELU)
    return None if config.hidden_act in activations else f"its activation is {config.hidden_act}"


Layer = tuple[int, Callable[[int], dict[str, Tensor]]]
"""A layer's number, and its tensors on a rank."""


def _llama_layers(config: Any, ranks: int, read: Read, known: set[str]) -> list[Layer]:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads

    def query_key_value(layer: str, kind: str, rank: int) -> Tensor:
        parts = [_rows(read(f"{layer}.self_attn.{side}_proj.{kind}"), rank, ranks) for side in "qkv"]
        if heads != keys:
            return torch.cat(parts)
        by_head = torch.stack([part.view(-1, width, *part.shape[1:]) for part in parts], dim=1)  # [heads, 3, width, …]
        return by_head.flatten(0, 2)

    def layer(to: str) -> Callable[[int], dict[str, Tensor]]:
        def tensors(rank: int) -> dict[str, Tensor]:
            found = {f"{norm}.scale": read(f"{to}.{norm}.weight") for norm in _NORMS}
            for kind in ("weight", "bias"):
                if f"{to}.self_attn.q_proj.{kind}" in known:
                    found[f"attention.query_key_value.{kind}"] = query_key_value(to, kind, rank)
                if f"{to}.mlp.up_proj.{kind}" in known:
                    halves = [_rows(read(f"{to}.mlp.{side}_proj.{kind}"), rank, ranks) for side in ("up", "gate")]
                    found[f"mlp.linear1.{kind}"] = torch.cat(halves)
            for name, own in (("attention.dense", "self_attn.o_proj"), ("mlp.linear2", "mlp.down_proj")):
                found[f"{name}.weight"] = _columns(read(f"{to}.{own}.weight"), rank, ranks)
                if f"{to}.{own}.bias" in known:
                    found[f"{name}.bias"] = read(f"{to}.{own}.bias")  # added once, after the ranks' sum
            return found

        return tensors

    last = config.num_hidden_layers + 3
    return [
        (0, lambda rank: {"word_embeddings.weight": _vocabulary_rows(read("model.embed_tokens.weight"), rank, ranks)}),
        *((number + 2, layer(f"model.layers.{number}")) for number in range(config.num_hidden_layers)),
        (last, lambda rank: {"norm.scale": read("model.norm.weight")}),
        (last + 1, lambda rank: _head(config, rank, ranks, read, "model.embed_tokens.weight", known)),
    ]


def _neox_layers(config: Any, ranks: int, read: Read, known: set[str]) -> list[Layer]:
    def layer(to: str) -> Callable[[int], dict[str, Tensor]]:
        def tensors(rank: int) -> dict[str, Tensor]:
            found = {f"{norm}.{kind}": read(f"{to}.{norm}.{kind}") for norm in _NORMS for kind in ("weight", "bias")}
            for kind in ("weight", "bias"):
                for name, own in (("attention.query_key_value",) * 2, ("mlp.linear1", "mlp.dense_h_to_4h")):
                    if f"{to}.{own}.{kind}" in known:
                        found[f"{name}.{kind}"] = _rows(read(f"{to}.{own}.{kind}"), rank, ranks)
            for name, own in (("attention.dense",) * 2, ("mlp.linear2", "mlp.dense_4h_to_h")):
                found[f"{name}.weight"] = _columns(read(f"{to}.{own}.weight"), rank, ranks)
                if f"{to}.{own}.bias" in known:  # with gpt_j_residual, ranks add their biases before the sum
                    share = ranks if config.use_parallel_residual else 1
                    found[f"{name}.bias"] = read(f"{to}.{own}.bias") / share
            return found

        return tensors

    last, norm = config.num_hidden_layers + 3, "gpt_neox.final_layer_norm"
    return [
        (0, lambda rank: {"word_embeddings.weight": _vocabulary_rows(read("gpt_neox.embed_in.weight"), rank, ranks)}),
        *((number + 2, layer(f"gpt_neox.layers.{number}")) for number in range(config.num_hidden_layers)),
        (last, lambda rank: {f"norm.{kind}": read(f"{norm}.{kind}") for kind in ("weight", "bias")}),
        (last + 1, lambda rank: _head(config, rank, ranks, read, "gpt_neox.embed_in.weight", known)),
    ]


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _head(config: Any, rank: int, ranks: int, read: Read, embedding: str, known: set[str]) -> dict[str, Tensor]:
    """The output layer; tied to the embedding, a copy of it."""
    if config.tie_word_embeddings:
        return {"word_embeddings.weight": _vocabulary_rows(read(embedding), rank, ranks)}
    name = "lm_head.weight" if "lm_head.weight" in known else "embed_out.weight"  # as transformers has it in memory
    return {"final_linear.weight": _vocabulary_rows(read(name), rank, ranks)}


def _rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks)[rank]


def _columns(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks, dim=1)[rank]


def _vocabulary_rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """With rows of zeros up to the multiple that NeoX pads the vocabulary to."""
    padding = tensor.new_zeros(-len(tensor) % (_VOCAB_MULTIPLE * ranks), tensor.shape[1])
    return _rows(torch.cat([tensor, padding]), rank, ranks)


def _settings(config: Any, ranks: int) -> dict[str, Any]:
    """NeoX's settings of the model."""
    rope = config.rope_parameters or {}
    found = {
        "pipe_parallel_size": 1, "model_parallel_size": ranks, "make_vocab_size_divisible_by": _VOCAB_MULTIPLE,
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads, "seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings, "pos_emb": "rotary",
        "rotary_emb_base": rope.get("rope_theta", 10000.0), "no_weight_tying": not config.tie_word_embeddings,
        "output_layer_parallelism": "column",
    }  # fmt: skip
    if config.model_type == "llama":
        # of a gated MLP, NeoX takes a third: int(intermediate_size × 2 / 3) // 2
        found |= {
            "norm": "rmsnorm", "rms_norm_epsilon": config.rms_norm_eps, "activation": "swiglu", "mlp_multiple_of": 1,
            "intermediate_size": 3 * config.intermediate_size, "rotary_pct": 1, "gpt_j_residual": False,
            "use_bias_in_norms": False, "use_bias_in_attn_linear": config.attention_bias,
            "use_bias_in_mlp": config.mlp_bias,
        }  # fmt: skip
        if config.num_key_value_heads != config.num_attention_heads:
            found["num_kv_heads"] = config.num_key_value_heads
        return found
    return found | {
        "norm": "layernorm", "layernorm_epsilon": config.layer_norm_eps, "activation": "gelu",
        "bias_gelu_fusion": config.hidden_act in _TANH_GELU, "intermediate_size": config.intermediate_size,
        "rotary_pct": rope.get("partial_rotary_factor", 1.0), "gpt_j_residual": config.use_parallel_residual,
        "use_bias_in_attn_linear": config.attention_bias,
    }  # fmt: skip
