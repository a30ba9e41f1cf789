"""The tools that are compared: where they are installed, and their configuration for a workload."""

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

# Who takes part: which other tools, found where.

PEERS = {"trl": "TRL", "unsloth": "Unsloth"}
"""By the name of their package."""
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
    """A tool, and the Python that runs it."""

    name: str
    python: str = field(default_factory=lambda: sys.executable)
    folders: str = ""
    """Put in front of PYTHONPATH, joined as there."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that it would use; only those that are installed."""

    @property
    def title(self) -> str:
        return PEERS.get(self.name, self.name)

    @property
    def script(self) -> Path:
        return _PEER_SCRIPTS / f"{self.name}_peer.py"

    def environment(self) -> dict[str, str]:
        """This process's own, with the folders in front; the hub is not asked by anyone."""
        ours = os.environ | {"HF_HUB_OFFLINE": "1"}
        path = [part for part in (self.folders, os.environ.get("PYTHONPATH", "")) if part]
        return ours | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})


def whet_contender() -> Contender:
    """whet, as it is installed here."""
    return _with_versions(Contender("whet"))


def parse_peers(text: str) -> list[Contender]:
    """From `trl,unsloth=/opt/unsloth/bin/python`: after = stands an interpreter, or folders joined by colons."""
    found: list[Contender] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, where = part.partition("=")
        if name not in PEERS:
            raise WhetError(f"--peers {part}: {name} is not known; known are: {', '.join(PEERS)}")
        if name in (peer.name for peer in found):
            raise WhetError(f"--peers {text}: {name} is named twice")
        found.append(_with_versions(_contender_at(name, where)))
    return found


def _contender_at(name: str, where: str) -> Contender:
    places = [Path(place).expanduser().absolute() for place in where.split(os.pathsep) if place]
    if not places:
        return Contender(name)
    if len(places) == 1 and os.access(places[0], os.X_OK) and places[0].is_file():
        return Contender(name, python=str(places[0]))
    for place in places:
        if not place.is_dir():
            raise WhetError(
                f"--peers {name}={where}: {place} is neither a folder of packages nor a Python that can be run"
            )
    return Contender(name, folders=os.pathsep.join(map(str, places)))


def _with_versions(contender: Contender) -> Contender:
    """Ask its own Python what it has, without importing any of it."""
    try:
        done = subprocess.run(
            [contender.python, str(_PEER_SCRIPTS / "installed.py"), *_REPORTED_PACKAGES], env=contender.environment(),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise WhetError(f"--peers {contender.name}={contender.python}: this is no Python that works: {error}") from None
    return Contender(contender.name, contender.python, contender.folders, versions)


# The terms of a comparison in the words of the other tools: the configuration that their users would write.

_TORCH_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_LINEAR_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_CONFIG_COMMENTS = {
    "trl": "# The keys of `trl sft --config`. The model's weights are random numbers of this shape.",
    "unsloth": "# The arguments of FastLanguageModel.from_pretrained and get_peft_model, and of trl's SFTConfig.",
}


def needs_weight_files(peer: Contender, terms: BenchSettings) -> bool:
    """Whether it can only load a model from files, and not be given one that was made in memory."""
    return peer.name == "unsloth" or terms.mode == "qlora"


def peer_config(
    peer: Contender, terms: BenchSettings, model: Path, conversations: Path, scratch: Path
) -> dict[str, Any]:
    """The peer's configuration for these terms; what it has installed decides about kernels, to its best."""
    make = {"trl": _trl_config, "unsloth": _unsloth_config}[peer.name]
    return make(peer, terms, model, conversations, _sft_config(terms, scratch))


def peer_config_comment(peer: Contender) -> str:
    """A comment that says what the keys are."""
    return _CONFIG_COMMENTS[peer.name]


def peer_notes(peer: Contender, terms: BenchSettings) -> list[str]:
    """What a reader must know of how the peer ran."""
    found = []
    if peer.name == "trl" and terms.device == "cuda":
        missing = [name for name in ("flash-attn", "liger-kernel") if name not in peer.versions]
        found += [f"{name} is not installed, which it would use" for name in missing]
    if terms.precision == "fp8":
        found.append("it ran in bf16: it has no fp8 setting of its own")
    return found


def _sft_config(terms: BenchSettings, scratch: Path) -> dict[str, Any]:
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


def _trl_config(
    peer: Contender, terms: BenchSettings, model: Path, conversations: Path, sft: dict[str, Any]
) -> dict[str, Any]:
    on_gpu = terms.device == "cuda"
    config: dict[str, Any] = {
        "model_name_or_path": str(model),
        "dtype": _TORCH_DTYPES[terms.weights],
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


def _unsloth_config(
    peer: Contender, terms: BenchSettings, model: Path, conversations: Path, sft: dict[str, Any]
) -> dict[str, Any]:
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
            "target_modules": _LINEAR_MODULES, "use_gradient_checkpointing": recompute,
        }  # fmt: skip
    return config
