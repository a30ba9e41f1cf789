"""Writes a transformers model as a GPT-NeoX checkpoint: a file per layer or per rank, for any number of ranks.

The inverse of the import, written independently: it splits matrices rank by rank instead of joining them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

Layers = dict[int, dict[str, Tensor]]


def rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks)[rank].clone()


def columns(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks, dim=1)[rank].clone()


def llama_layers(model: Any, rank: int, ranks: int, old: bool) -> Layers:
    """Layer number → the tensors of one rank."""
    config, held = model.config, model.state_dict()
    width = config.hidden_size // config.num_attention_heads
    found: Layers = {0: {"word_embeddings.weight": rows(held["model.embed_tokens.weight"], rank, ranks)}}
    for number in range(config.num_hidden_layers):
        own = {name.removeprefix(f"model.layers.{number}."): t for name, t in held.items() if f".{number}." in name}
        layer: dict[str, Tensor] = {}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in own:
                q, k, v = (rows(own[f"self_attn.{side}_proj.{kind}"], rank, ranks) for side in "qkv")
                if config.num_key_value_heads == config.num_attention_heads:  # per head: q, k, v
                    parts = [part for trio in zip(*(s.split(width) for s in (q, k, v)), strict=True) for part in trio]
                    layer[f"attention.query_key_value.{kind}"] = torch.cat(parts)
                else:
                    layer[f"attention.query_key_value.{kind}"] = torch.cat([q, k, v])
            if f"mlp.up_proj.{kind}" in own and not old:
                halves = [rows(own[f"mlp.{name}_proj.{kind}"], rank, ranks) for name in ("up", "gate")]
                layer[f"mlp.linear1.{kind}"] = torch.cat(halves)
        if old:
            layer["mlp.w1.weight"] = rows(own["mlp.gate_proj.weight"], rank, ranks)
            layer["mlp.w3.weight"] = rows(own["mlp.up_proj.weight"], rank, ranks)
        layer["mlp.w2.weight" if old else "mlp.linear2.weight"] = columns(own["mlp.down_proj.weight"], rank, ranks)
        layer["attention.dense.weight"] = columns(own["self_attn.o_proj.weight"], rank, ranks)
        for to, name in (("attention.dense.bias", "self_attn.o_proj.bias"), ("mlp.linear2.bias", "mlp.down_proj.bias")):
            if name in own:
                layer[to] = own[name].clone()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer[f"{norm}.scale"] = own[f"{norm}.weight"].clone()
        rates = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        layer["attention.rotary_emb.inv_freq"] = rates.half()
        found[number + 2] = layer
    last = config.num_hidden_layers + 3
    found[last] = {"norm.scale": held["model.norm.weight"].clone()}
    if not config.tie_word_embeddings:
        found[last + 1] = {"final_linear.weight": rows(held["lm_head.weight"], rank, ranks)}
    else:
        found[last + 1] = {"word_embeddings.weight": found[0]["word_embeddings.weight"].clone()}
    return found


def neox_layers(model: Any, rank: int, ranks: int, old: bool) -> Layers:
    config, held = model.config, model.state_dict()
    up, down = ("dense_h_to_4h", "dense_4h_to_h") if old else ("linear1", "linear2")
    found: Layers = {0: {"word_embeddings.weight": rows(held["gpt_neox.embed_in.weight"], rank, ranks)}}
    for number in range(config.num_hidden_layers):
        own = {name.removeprefix(f"gpt_neox.layers.{number}."): t for name, t in held.items() if f"s.{number}." in name}
        layer: dict[str, Tensor] = {}
        for kind in ("weight", "bias"):
            layer[f"attention.query_key_value.{kind}"] = rows(own[f"attention.query_key_value.{kind}"], rank, ranks)
            layer[f"mlp.{up}.{kind}"] = rows(own[f"mlp.dense_h_to_4h.{kind}"], rank, ranks)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                layer[f"{norm}.{kind}"] = own[f"{norm}.{kind}"].clone()
        layer["attention.dense.weight"] = columns(own["attention.dense.weight"], rank, ranks)
        layer[f"mlp.{down}.weight"] = columns(own["mlp.dense_4h_to_h.weight"], rank, ranks)
        for to, name in (
            ("attention.dense.bias", "attention.dense.bias"),
            (f"mlp.{down}.bias", "mlp.dense_4h_to_h.bias"),
        ):
            layer[to] = own[name] / ranks if config.use_parallel_residual else own[name].clone()
        found[number + 2] = layer
    last = config.num_hidden_layers + 3
    found[last] = {f"norm.{kind}": held[f"gpt_neox.final_layer_norm.{kind}"].clone() for kind in ("weight", "bias")}
    head = model.get_output_embeddings().weight.detach()
    found[last + 1] = {"final_linear.weight": rows(head, rank, ranks)}
    return found


def write(
    model: Any, folder: Path, ranks: int = 1, by_layer: bool = True, old: bool = False,
    change: Callable[[int, Layers], None] = lambda rank, layers: None, **settings: Any,
) -> Path:  # fmt: skip
    """Write `folder`/global_step7 with its settings, and `folder`/latest. `change` may modify the tensors of a rank."""
    step = folder / "global_step7"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    config = model.config
    split = llama_layers if config.model_type == "llama" else neox_layers
    for rank in range(ranks):
        layers = split(model, rank, ranks, old)
        change(rank, layers)
        if by_layer:
            for number, tensors in layers.items():
                torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        module = {f"sequential.{number}.{name}": t for number, tensors in layers.items() for name, t in tensors.items()}
        beside = {"optimizer": None, "global_steps": 7, "np_rng_state": _random_state(), "args": {"seq_length": 64}}
        torch.save({"module": None if by_layer else module, **beside}, step / f"mp_rank_{rank:02d}_model_states.pt")
    written = {
        "num-layers": config.num_hidden_layers, "num-attention-heads": config.num_attention_heads, "pos-emb": "rotary",
        "max-position-embeddings": 64, "model-parallel-size": ranks,
        "rotary-emb-base": config.rope_parameters["rope_theta"], "no-weight-tying": not config.tie_word_embeddings,
    }  # fmt: skip
    if config.model_type == "llama":
        keys = config.num_key_value_heads
        written |= {"norm": "rmsnorm", "rms_norm_epsilon": config.rms_norm_eps, "activation": "swiglu"}
        written |= {} if keys == config.num_attention_heads else {"num_kv_heads": keys}
    else:
        written |= {"rotary_pct": config.rope_parameters["partial_rotary_factor"], "activation": "gelu"}
        written |= {"gpt_j_residual": config.use_parallel_residual, "layernorm-epsilon": config.layer_norm_eps}
        written |= {"bias_gelu_fusion": config.hidden_act == "gelu_pytorch_tanh"}
    (step / "configs" / "run.yml").write_text(yaml.safe_dump(written | settings))
    return folder


def _random_state() -> Any:
    import numpy as np

    return np.random.RandomState(0).get_state()
