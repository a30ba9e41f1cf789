"""What all contenders get: the shape of the model with its tokenizer, and the conversations as tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.bench.speed import Load, attention_cost
from whet.bench.terms import Terms
from whet.config import Config
from whet.core.console import warn
from whet.core.errors import WhetError
from whet.core.files import atomic_write
from whet.model.shapes import shape_of
from whet.recipe.data import Data, prepare_data
from whet.recipe.plan import make_plan

_SPARE = 1.25
"""Others pack less well, or drop what is left of a batch: they get so much more than whet needs."""

_FEW = 0.05
"""If more than this part of the data is left out, it is said."""


@dataclass(frozen=True, slots=True)
class Material:
    """Where it is, and what it weighs."""

    model: Path
    conversations: Path
    load: Load
    count: int
    tokens: int
    dropped: int
    """Conversations of the data that nobody gets, because they are longer than a row or cannot be used."""


def lay_out(config: Config, terms: Terms, out: Path) -> Material:
    """Prepare the data as whet's recipe says, and write down for the others what whet will see."""
    shape = shape_of(config.model.path, config.model.trust_remote_code)
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
    if dropped > _FEW * found:
        warn(
            f"{dropped:,} of {found:,} conversations are left out, most likely because they are longer than --length "
            f"{terms.length}: what is measured are short ones"
        )
    lines = _conversations(config, data)
    conversations = out / "conversations.jsonl"
    atomic_write(conversations, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    lengths = [len(line["input_ids"]) for line in lines]
    return Material(model, conversations, _load(shape, terms, lengths), len(lines), sum(lengths), dropped)


def _conversations(config: Config, data: Data) -> list[dict[str, Any]]:
    """Those of the steps that whet will take, in their order, and of some steps more."""
    longer = config.train.model_copy(update={"steps": int(_SPARE * (config.train.steps or 1)) + 2})
    plan = make_plan(config.model_copy(update={"train": longer}), data)
    found = []
    for document in plan.documents:
        ids = [int(token) for token in data.train.store.ids(int(document))]
        text = data.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        found.append({"text": text, "input_ids": ids})
    return found


def _load(shape: Any, terms: Terms, lengths: list[int]) -> Load:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # counted without any memory
        model = AutoModelForCausalLM.from_config(shape)
    weights = sum(parameter.numel() for parameter in model.parameters())
    text = shape.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Load(weights, attention_cost(text.num_hidden_layers, heads, width, lengths), terms.is_adapter)
