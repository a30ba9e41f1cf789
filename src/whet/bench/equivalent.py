"""The terms of a comparison in the words of the other tools: the configuration that their users would write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.bench.contenders import Contender
from whet.bench.terms import LEARNING_RATE, LORA, Terms

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_HEADS = {
    "trl": "# The keys of `trl sft --config`. The model's weights are random numbers of this shape.",
    "unsloth": "# The arguments of FastLanguageModel.from_pretrained and get_peft_model, and of trl's SFTConfig.",
}


def reads_weights(peer: Contender, terms: Terms) -> bool:
    """Whether it can only load a model from files, and not be given one that was made in memory."""
    return peer.name == "unsloth" or terms.mode == "qlora"


def equivalent(peer: Contender, terms: Terms, model: Path, conversations: Path, scratch: Path) -> dict[str, Any]:
    """The peer's configuration for these terms; what it has installed decides about kernels, to its best."""
    make = {"trl": _trl, "unsloth": _unsloth}[peer.name]
    return make(peer, terms, model, conversations, _sft(terms, scratch))


def heading(peer: Contender) -> str:
    """A comment that says what the keys are."""
    return _HEADS[peer.name]


def notes(peer: Contender, terms: Terms) -> list[str]:
    """What a reader must know of how the peer ran."""
    found = []
    if peer.name == "trl" and terms.device == "cuda":
        missing = [name for name in ("flash-attn", "liger-kernel") if name not in peer.versions]
        found += [f"{name} is not installed, which it would use" for name in missing]
    if terms.precision == "fp8":
        found.append("it ran in bf16: it has no fp8 setting of its own")
    return found


def _sft(terms: Terms, scratch: Path) -> dict[str, Any]:
    """What both take: trl's SFTConfig."""
    full = terms.recompute == "full"
    return {
        "output_dir": str(scratch),
        "max_steps": terms.steps,
        "per_device_train_batch_size": terms.rows,
        "gradient_accumulation_steps": 1,
        "packing": True,
        "packing_strategy": "bfd",
        "max_length": terms.length,
        "bf16": terms.weights == "bf16",
        "gradient_checkpointing": full,
        "optim": "adamw_torch_fused",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": terms.steps,
        **({"use_cpu": True} if terms.device == "cpu" else {"dataloader_num_workers": 4}),
    }


def _trl(peer: Contender, terms: Terms, model: Path, conversations: Path, sft: dict[str, Any]) -> dict[str, Any]:
    on_gpu = terms.device == "cuda"
    config: dict[str, Any] = {
        "model_name_or_path": str(model),
        "dtype": _DTYPES[terms.weights],
        "attn_implementation": "flash_attention_2" if on_gpu and "flash-attn" in peer.versions else "sdpa",
        "datasets": [{"path": "json", "data_files": str(conversations), "columns": ["input_ids"]}],
        **sft,
    }
    if on_gpu and "liger-kernel" in peer.versions:
        config["use_liger_kernel"] = True
    if terms.is_adapter:
        config |= {
            "use_peft": True, "lora_r": LORA["rank"], "lora_alpha": LORA["alpha"], "lora_dropout": 0.0,
            "lora_target_modules": "all-linear",
        }  # fmt: skip
    if terms.mode == "qlora":
        config |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    return config


def _unsloth(peer: Contender, terms: Terms, model: Path, conversations: Path, sft: dict[str, Any]) -> dict[str, Any]:
    recompute: str | bool = "unsloth" if terms.recompute == "full" else False
    config: dict[str, Any] = {
        "from_pretrained": {
            "model_name": str(model),
            "max_seq_length": terms.length,
            "load_in_4bit": terms.mode == "qlora",
            "full_finetuning": terms.mode == "full",
            "use_gradient_checkpointing": recompute,
        },
        "SFTConfig": sft | {"dataset_text_field": "text", "dataset_num_proc": 1, "dataloader_num_workers": 0},
    }
    if terms.is_adapter:
        config["get_peft_model"] = {
            "r": LORA["rank"], "lora_alpha": LORA["alpha"], "lora_dropout": 0, "bias": "none",
            "target_modules": _LINEARS, "use_gradient_checkpointing": recompute,
        }  # fmt: skip
    return config
