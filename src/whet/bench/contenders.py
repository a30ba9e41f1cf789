"""The tools that are compared: where they are installed, and their configuration for the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.bench.workload import LEARNING_RATE, LORA, BenchSettings
from whet.core.errors import WhetError
from whet.core.files import user_path

PEERS = {"trl": "TRL", "unsloth": "Unsloth"}
"""Titles of other tools by package name."""
_PEER_SCRIPTS = Path(__file__).parent / "peers"
_REPORTED_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "unsloth",
    "flash-attn",
    "liger-kernel",
    "bitsandbytes",
    "accelerate",
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A tool and the Python interpreter that runs it."""

    name: str
    python: str = field(default_factory=lambda: sys.executable)
    python_path: str = ""
    """Prepended to PYTHONPATH."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the installed packages among those it can use."""

    @property
    def title(self) -> str:
        return PEERS.get(self.name, self.name)

    @property
    def script(self) -> Path:
        return _PEER_SCRIPTS / f"{self.name}_peer.py"

    def environment(self) -> dict[str, str]:
        """This process's environment, offline and with the contender's PYTHONPATH."""
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        path = [part for part in (self.python_path, os.environ.get("PYTHONPATH", "")) if part]
        return offline | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def whet_contender() -> Contender:
    """This installation of whet."""
    return _with_versions(Contender("whet"))


def parse_peers(text: str) -> list[Contender]:
    """From `trl,unsloth=/opt/unsloth/bin/python`; after = an interpreter, or folders separated by colons."""
    found: list[Contender] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, where = part.partition("=")
        if name not in PEERS:
            raise WhetError(f"--peers {part}: unknown tool {name}; supported are: {', '.join(PEERS)}")
        if name in (peer.name for peer in found):
            raise WhetError(f"--peers {text}: {name} is given twice")
        found.append(_with_versions(_contender_at(name, where)))
    return found


def _contender_at(name: str, where: str) -> Contender:
    places = [user_path(place).absolute() for place in where.split(os.pathsep) if place]
    if not places:
        return Contender(name)
    if len(places) == 1 and os.access(places[0], os.X_OK) and places[0].is_file():
        return Contender(name, python=str(places[0]))
    for place in places:
        if not place.is_dir():
            raise WhetError(f"--peers {name}={where}: {place} is neither a folder of packages nor an executable Python")
    return Contender(name, python_path=os.pathsep.join(map(str, places)))


def _with_versions(contender: Contender) -> Contender:
    """Read package versions with the contender's own Python, without importing the packages."""
    try:
        done = subprocess.run(
            [contender.python, str(_PEER_SCRIPTS / "package_versions.py"), *_REPORTED_PACKAGES],
            env=contender.environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise WhetError(f"--peers {contender.name}={contender.python}: this Python does not work: {error}") from None
    return Contender(contender.name, contender.python, contender.python_path, versions)


# The configuration of other tools for the same settings, as their users would write it.

_TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_LINEAR_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_CONFIG_COMMENTS = {
    "trl": "# The keys of `trl sft --config`. The model's weights are random numbers of this shape.",
    "unsloth": "# The arguments of FastLanguageModel.from_pretrained and get_peft_model, and of trl's SFTConfig.",
}


def needs_weight_files(peer: Contender, settings: BenchSettings) -> bool:
    """Whether the peer must load its weights from files: it cannot use a model created in memory."""
    return peer.name == "unsloth" or settings.mode == "qlora"


def peer_config(
    peer: Contender, settings: BenchSettings, model: Path, conversations: Path, scratch: Path
) -> dict[str, Any]:
    """The peer's configuration for these settings, with the fastest kernels that it has installed."""
    make = {"trl": _trl_config, "unsloth": _unsloth_config}[peer.name]
    return make(peer, settings, model, conversations, _sft_config(settings, scratch))


def peer_config_comment(peer: Contender) -> str:
    """A comment that explains the keys."""
    return _CONFIG_COMMENTS[peer.name]


def peer_notes(peer: Contender, settings: BenchSettings) -> list[str]:
    """Notes on how the peer ran, for the result table."""
    found = []
    if peer.name == "trl" and settings.device == "cuda":
        missing = [name for name in ("flash-attn", "liger-kernel") if name not in peer.versions]
        found += [f"{name} is not installed; with it the peer would be faster" for name in missing]
    if settings.precision == "fp8":
        found.append("runs in bf16: it has no fp8 setting")
    return found


def _sft_config(settings: BenchSettings, scratch: Path) -> dict[str, Any]:
    """trl's SFTConfig, which both peers use."""
    full = settings.recompute == "full"
    return {
        "output_dir": str(scratch),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.rows,
        "gradient_accumulation_steps": 1,
        "packing": True,
        "packing_strategy": "bfd",
        "max_length": settings.length,
        "bf16": settings.weights == "bf16",
        "gradient_checkpointing": full,
        "optim": "adamw_torch_fused",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": settings.steps,
        **({"use_cpu": True} if settings.device == "cpu" else {"dataloader_num_workers": 4}),
    }


def _trl_config(
    peer: Contender, settings: BenchSettings, model: Path, conversations: Path, sft: dict[str, Any]
) -> dict[str, Any]:
    on_gpu = settings.device == "cuda"
    config: dict[str, Any] = {
        "model_name_or_path": str(model),
        "dtype": _TORCH_DTYPES[settings.weights],
        "attn_implementation": "flash_attention_2" if on_gpu and "flash-attn" in peer.versions else "sdpa",
        "datasets": [{"path": "json", "data_files": str(conversations), "columns": ["input_ids"]}],
        **sft,
    }
    if on_gpu and "liger-kernel" in peer.versions:
        config["use_liger_kernel"] = True
    if settings.is_adapter:
        config |= {
            "use_peft": True, "lora_r": LORA["rank"], "lora_alpha": LORA["alpha"], "lora_dropout": 0.0,
            "lora_target_modules": "all-linear",
        }  # fmt: skip
    if settings.mode == "qlora":
        config |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    return config


def _unsloth_config(
    peer: Contender, settings: BenchSettings, model: Path, conversations: Path, sft: dict[str, Any]
) -> dict[str, Any]:
    recompute: str | bool = "unsloth" if settings.recompute == "full" else False
    config: dict[str, Any] = {
        "from_pretrained": {
            "model_name": str(model),
            "max_seq_length": settings.length,
            "load_in_4bit": settings.mode == "qlora",
            "full_finetuning": settings.mode == "full",
            "use_gradient_checkpointing": recompute,
        },
        "SFTConfig": sft | {"dataset_text_field": "text", "dataset_num_proc": 1, "dataloader_num_workers": 0},
    }
    if settings.is_adapter:
        config["get_peft_model"] = {
            "r": LORA["rank"], "lora_alpha": LORA["alpha"], "lora_dropout": 0, "bias": "none",
            "target_modules": _LINEAR_MODULES, "use_gradient_checkpointing": recompute,
        }  # fmt: skip
    return config
