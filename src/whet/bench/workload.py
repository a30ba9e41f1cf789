"""The workload: settings, whet's recipe for them, and the model shape and conversations that all contenders get."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.bench.results import TokenFlops, attention_flops_per_token
from whet.config import Config
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.files import atomic_write, resolve_path, user_path
from whet.model.load.random_models import RANDOM_PREFIX, random_model_config, resolve_random_path
from whet.run.data import RunData, make_plan, prepare_data

LORA = {"rank": 16, "alpha": 32}
LEARNING_RATE = 1e-5
_MIN_TOKENS_PER_ORDER = 64  # decides how many conversations to generate


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings of a benchmark, the same for every contender; `terms` in bench.json."""

    model: str
    """The name of a model shape, or a folder or file with a config."""
    mode: str
    """full, lora or qlora."""
    data: str | None
    """A data source; None: builtin:orders."""
    rows: int
    length: int
    steps: int
    warm: int
    """Warm-up steps, which are not counted: kernels are compiled and memory is allocated."""
    precision: str
    """bf16, fp8 or fp32."""
    recompute: str
    """none or full."""
    tokenizer: str | None
    device: str
    """cpu, or the type of the accelerator."""

    def __post_init__(self) -> None:
        if self.steps <= self.warm:
            raise WhetError(
                f"--steps {self.steps}: the first {self.warm} (--warm) are not counted, so no step would be measured. "
                f"Use more than {self.warm}"
            )
        if self.mode == "qlora" and self.precision != "bf16":
            raise WhetError(f"--mode qlora: computes in bf16, not in --precision {self.precision}. Remove --precision")

    @property
    def is_adapter(self) -> bool:
        return self.mode in ("lora", "qlora")

    @property
    def weights(self) -> str:
        """The dtype of the model's weights, for every tool."""
        return "fp32" if self.precision == "fp32" else "bf16"

    def recipe(self, run: Path) -> dict[str, Any]:
        """whet's recipe for a run in this folder."""
        source: dict[str, Any] = {"path": self.data or "builtin:orders"}
        if self.data is None:
            source["max_samples"] = max(1000, self.rows * self.length * self.steps // _MIN_TOKENS_PER_ORDER)
        elif user_path(self.data).exists():
            source["path"] = str(resolve_path(user_path(self.data)))
        is_bf16 = self.mode == "full" and self.weights == "bf16"
        model = {
            "path": resolve_random_path(RANDOM_PREFIX + self.model),
            "tokenizer": self.tokenizer,
            "dtype": "bf16" if is_bf16 else None,
        }
        parts: dict[str, Any] = {
            "run": {"name": "whet", "dir": str(run)},
            "model": {key: value for key, value in model.items() if value is not None},
            "adapter": LORA if self.is_adapter else None,
            "quantize": "nf4" if self.mode == "qlora" else None,
            "data": {"sources": [source], "max_length": self.length},
            "train": {
                "steps": self.steps,
                "batch": {"rows": self.rows},
                "micro_rows": self.rows,
                "precision": self.precision,
                # like the peers' fused AdamW, whose states have the dtype of the weights
                "optimizer": {"name": "adamw16bit" if is_bf16 else "adamw", "lr": LEARNING_RATE},
                "schedule": {"name": "constant", "warmup": 0},
            },
            "parallel": {"recompute": self.recompute},
            "eval": {"at_start": False},
            "export": {"at_end": "none"},
            "track": [],
        }
        return {key: value for key, value in parts.items() if value is not None}


_SPARE_DATA_FACTOR = 1.25
"""Peers get more data than whet needs, because they may pack less tightly or drop the last batch."""

_MAX_DROPPED_SHARE = 0.05
"""A larger share of dropped conversations gives a warning."""


@dataclass(frozen=True, slots=True)
class BenchInputs:
    """The files that all contenders get, and their size."""

    model: Path
    conversations: Path
    flops: TokenFlops
    count: int
    tokens: int
    dropped: int
    """Conversations that no contender gets, because they are longer than a row or invalid."""


def prepare_inputs(config: Config, settings: BenchSettings, out: Path) -> BenchInputs:
    """Prepare the data as whet's recipe does, and write what whet will train on to files for the peers."""
    shape = random_model_config(config.model.path, config.model.trust_remote_code)
    data = prepare_data(config)
    tokens, rows = len(data.tokenizer), shape.get_text_config().vocab_size
    if tokens > rows:
        raise WhetError(
            f"--model {settings.model}: its vocabulary has {rows:,} tokens, but the tokenizer {tokens:,}. Use a "
            "smaller tokenizer: --tokenizer FOLDER"
        )
    model = out / "model"
    model.mkdir(exist_ok=True)
    shape.save_pretrained(model)
    data.tokenizer.save_pretrained(model)
    accounts = [account["conversations"] for account in data.ledger()["sources"]]
    found, dropped = (sum(account[key] for account in accounts) for key in ("in", "dropped"))
    if dropped > _MAX_DROPPED_SHARE * found:
        warn(
            f"{dropped:,} of {found:,} conversations are dropped, most likely because they are longer than --length "
            f"{settings.length}; only shorter ones are measured"
        )
    lines = _tokenized_conversations(config, data)
    conversations = out / "conversations.jsonl"
    atomic_write(conversations, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    lengths = [len(line["input_ids"]) for line in lines]
    return BenchInputs(model, conversations, token_flops(shape, settings, lengths), len(lines), sum(lengths), dropped)


def _tokenized_conversations(config: Config, data: RunData) -> list[dict[str, Any]]:
    """The conversations of whet's steps in order, and of some more steps."""
    longer = config.train.model_copy(update={"steps": int(_SPARE_DATA_FACTOR * (config.train.steps or 1)) + 2})
    plan = make_plan(config.model_copy(update={"train": longer}), data)
    found = []
    for document in plan.documents:
        ids = [int(token) for token in data.train.store.ids(int(document))]
        text = data.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        found.append({"text": text, "input_ids": ids})
    return found


def token_flops(shape: Any, settings: BenchSettings, lengths: list[int]) -> TokenFlops:
    """The FLOPs of a token in a model of this shape, over conversations of these lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    from whet.model.flops import matrix_costs

    with torch.device("meta"):  # without allocating memory
        model = AutoModelForCausalLM.from_config(shape)
    weights = sum(parameter.numel() for parameter in model.parameters())
    inactive = sum(matrix.size * (1 - matrix.active_share) for matrix in matrix_costs(model))
    text = shape.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    attention = attention_flops_per_token(text.num_hidden_layers, heads, width, lengths)
    return TokenFlops(weights, weights - round(inactive), attention, settings.is_adapter)


# Random weights as files, for tools that need files: `python -m whet.bench.workload FOLDER DTYPE`.
#
# Runs in its own process, so that no contender's time or memory includes it.

_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")


def write_random_weights(folder: Path, dtype: str) -> None:
    """Write weights for the config.json in `folder`, next to it."""
    import torch

    from whet.model.config import ModelConfig
    from whet.model.load.pretrained import load_model
    from whet.model.load.random_models import RANDOM_PREFIX

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    weights_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = load_model(ModelConfig(path=f"{RANDOM_PREFIX}{folder}"), weights_dtype, accelerator)
    model.save_pretrained(folder)  # type: ignore[operator]


def delete_weights(folder: Path) -> None:
    """Delete the weights: 16 GB for an 8B model, and easily created again."""
    for pattern in _WEIGHT_PATTERNS:
        for file in folder.glob(pattern):
            file.unlink()


if __name__ == "__main__":
    write_random_weights(Path(sys.argv[1]), sys.argv[2])
