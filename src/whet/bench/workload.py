"""What is measured: the settings, whet's recipe for them, and the model shape and conversations that every contender gets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.bench.results import TokenFlops, attention_flops_per_token
from whet.config import Config
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.files import atomic_write
from whet.model.load.random_models import RANDOM_PREFIX, random_model_config, resolve_random_path
from whet.run.data import RunData, make_plan, prepare_data

# The terms of a comparison, the same for all who take part, and whet's recipe for them.

LORA = {"rank": 16, "alpha": 32}
LEARNING_RATE = 1e-5
_MIN_TOKENS_PER_ORDER = 64
"""At least: how many conversations to ask the generator for."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is measured."""

    model: str
    """The name of a shape, or the folder or file that has one."""
    mode: str
    """full, lora or qlora."""
    data: str | None
    """A source of conversations; None: the generator of orders."""
    rows: int
    length: int
    steps: int
    warm: int
    """Steps that are not counted: kernels are compiled and memory is found in them."""
    precision: str
    """bf16, fp8 or fp32."""
    recompute: str
    """none or full."""
    tokenizer: str | None
    device: str
    """cpu, or the kind of accelerator."""

    def __post_init__(self) -> None:
        if self.steps <= self.warm:
            raise WhetError(
                f"--steps {self.steps}: the first {self.warm} (--warm) are not counted, so nothing would be measured. "
                f"Give more than {self.warm}"
            )
        if self.mode == "qlora" and self.precision != "bf16":
            raise WhetError(
                f"--mode qlora: 4-bit weights are computed with in bf16, not in --precision {self.precision}"
            )

    @property
    def is_adapter(self) -> bool:
        return self.mode in ("lora", "qlora")

    @property
    def weights(self) -> str:
        """What the model's weights are in, for every tool."""
        return "fp32" if self.precision == "fp32" else "bf16"

    def recipe(self, run: Path) -> dict[str, Any]:
        """whet's own, for a run in this folder."""
        source: dict[str, Any] = {"path": self.data or "builtin:orders"}
        if self.data is None:
            source["max_samples"] = max(1000, self.rows * self.length * self.steps // _MIN_TOKENS_PER_ORDER)
        elif Path(self.data).expanduser().exists():
            source["path"] = str(Path(self.data).expanduser().resolve())
        halved = self.mode == "full" and self.weights == "bf16"
        model = {
            "path": resolve_random_path(RANDOM_PREFIX + self.model),
            "tokenizer": self.tokenizer,
            "dtype": "bf16" if halved else None,
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
                # As the others' fused AdamW has it: the states are in the type of the weights.
                "optimizer": {"name": "adamw16bit" if halved else "adamw", "lr": LEARNING_RATE},
                "schedule": {"name": "constant", "warmup": 0},
            },
            "parallel": {"recompute": self.recompute},
            "eval": {"at_start": False},
            "export": {"at_end": "none"},
            "track": [],
        }
        return {key: value for key, value in parts.items() if value is not None}


# What all contenders get: the shape of the model with its tokenizer, and the conversations as tokens.

_SPARE_DATA_FACTOR = 1.25
"""Others pack less well, or drop what is left of a batch: they get so much more than whet needs."""

_MAX_DROPPED_SHARE = 0.05
"""If more than this part of the data is left out, it is said."""


@dataclass(frozen=True, slots=True)
class BenchInputs:
    """Where it is, and what it weighs."""

    model: Path
    conversations: Path
    load: TokenFlops
    count: int
    tokens: int
    dropped: int
    """Conversations of the data that nobody gets, because they are longer than a row or cannot be used."""


def prepare_inputs(config: Config, terms: BenchSettings, out: Path) -> BenchInputs:
    """Prepare the data as whet's recipe says, and write down for the others what whet will see."""
    shape = random_model_config(config.model.path, config.model.trust_remote_code)
    data = prepare_data(config)
    known, room = len(data.tokenizer), shape.get_text_config().vocab_size
    if known > room:
        raise WhetError(
            f"--model {terms.model}: it has room for {room:,} tokens, and the tokenizer knows {known:,}. Give a "
            "smaller one: --tokenizer FOLDER"
        )
    model = out / "model"
    model.mkdir(exist_ok=True)
    shape.save_pretrained(model)
    data.tokenizer.save_pretrained(model)
    accounts = [account["conversations"] for account in data.ledger()["sources"]]
    found, dropped = (sum(account[key] for account in accounts) for key in ("in", "dropped"))
    if dropped > _MAX_DROPPED_SHARE * found:
        warn(
            f"{dropped:,} of {found:,} conversations are left out, most likely because they are longer than --length "
            f"{terms.length}: what is measured are short ones"
        )
    lines = _tokenized_conversations(config, data)
    conversations = out / "conversations.jsonl"
    atomic_write(conversations, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    lengths = [len(line["input_ids"]) for line in lines]
    return BenchInputs(model, conversations, _token_flops(shape, terms, lengths), len(lines), sum(lengths), dropped)


def _tokenized_conversations(config: Config, data: RunData) -> list[dict[str, Any]]:
    """Those of the steps that whet will take, in their order, and of some steps more."""
    longer = config.train.model_copy(update={"steps": int(_SPARE_DATA_FACTOR * (config.train.steps or 1)) + 2})
    plan = make_plan(config.model_copy(update={"train": longer}), data)
    found = []
    for document in plan.documents:
        ids = [int(token) for token in data.train.store.ids(int(document))]
        text = data.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        found.append({"text": text, "input_ids": ids})
    return found


def _token_flops(shape: Any, terms: BenchSettings, lengths: list[int]) -> TokenFlops:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # counted without any memory
        model = AutoModelForCausalLM.from_config(shape)
    weights = sum(parameter.numel() for parameter in model.parameters())
    text = shape.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return TokenFlops(
        weights, attention_flops_per_token(text.num_hidden_layers, heads, width, lengths), terms.is_adapter
    )
