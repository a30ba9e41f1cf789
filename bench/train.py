"""How fast a training step is, beside a plain loop: the same model, adapters, conversations and optimizer.

The plain loop is what one writes by hand: conversations padded to the longest of the batch, the model's own attention
and its own loss over all positions. Both take all conversations of a step at once, are warmed up and then timed in
turns in this one process; the last line is a JSON object.

    python bench/train.py [MODEL] [STEPS]      default: builtin:smollm2 5
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from whet.config import Config
from whet.core.config import validate_config
from whet.core.console import silence_libraries
from whet.core.distributed import init_distributed
from whet.core.yaml import parse_yaml
from whet.model import attention
from whet.run.data import make_plan, prepare_data
from whet.run.loader import make_loader
from whet.run.models.model_builder import build_loss_model, build_model
from whet.training.optimizers.factory import build_optimizer
from whet.training.precision import choose_precision
from whet.training.step import ForwardPasses, train_step

RECIPE = """
run: {seed: 1}
model: {path: "%s"}
adapter: {rank: 16}
data: {sources: [{path: "builtin:orders", max_samples: 400}], max_length: 512}
train: {steps: %d, batch: {conversations: 8}, micro_rows: 8, optimizer: {lr: 1e-4}}
"""
WARM = 2


def main(path: str = "builtin:smollm2", steps: str = "5") -> None:
    silence_libraries()
    config = validate_config(Config, parse_yaml(RECIPE % (path, int(steps) + WARM), "bench"))
    ranks = init_distributed()
    data = prepare_data(config)
    plan = make_plan(config, data)
    precision = choose_precision(config, ranks.device)
    model = build_model(config, precision, ranks.device, len(data.tokenizer))
    root = build_loss_model(config, model, precision, ranks.device, len(data.tokenizer), data.max_document_length)
    optimizer = build_optimizer(root, config.train.optimizer, config.run.seed)
    loader = make_loader(config, data.train.store, plan, ranks, root)
    context = precision.autocast(ranks.device)

    def ours(step: int) -> None:
        forward = ForwardPasses(root, loader, step, device=ranks.device, seed=1, autocast=context, loss_scale=1.0)
        train_step(forward, optimizer, ranks=ranks, clip_norm=1.0).wait()

    def plain(step: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        documents = [int(document) for document in plan.documents_of(step)]
        ids = [torch.from_numpy(data.train.store.ids(document)) for document in documents]
        labels = [
            torch.where(torch.from_numpy(data.train.store.loss(document)), tokens, -100)
            for document, tokens in zip(documents, ids, strict=True)
        ]
        tokens = pad_sequence(ids, batch_first=True).to(ranks.device)
        mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True).to(ranks.device)
        wanted = pad_sequence(labels, batch_first=True, padding_value=-100).to(ranks.device)
        with context:
            loss = root.language_model(input_ids=tokens, attention_mask=mask, labels=wanted, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in root.parameters() if p.requires_grad], 1.0)
        optimizer.step()

    backend = attention.choose_backend("auto", ranks.device, precision.compute)
    seconds = {ours: 0.0, plain: 0.0}
    for number in range(len(plan)):
        for step in seconds:
            root.language_model.set_attn_implementation(attention.registered_name(backend) if step is ours else "sdpa")
            taken = _time(step, number)
            seconds[step] += taken if number >= WARM else 0.0
    tokens = sum(loader.totals(number).tokens for number in range(WARM, len(plan)))
    whet_rate, plain_rate = tokens / seconds[ours], tokens / seconds[plain]
    print(  # noqa: T201
        json.dumps(
            {
                "model": path, "device": ranks.device.type, "precision": precision.name, "attention": backend,
                "torch": torch.__version__, "transformers": transformers.__version__,
                "whet_tokens_per_s": round(whet_rate, 1), "plain_tokens_per_s": round(plain_rate, 1),
                "ratio": round(whet_rate / plain_rate, 3),
            }
        )
    )  # fmt: skip


def _time(step: Callable[[int], None], number: int) -> float:
    _wait()
    began = time.perf_counter()
    step(number)
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
