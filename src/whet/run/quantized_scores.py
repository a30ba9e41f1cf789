"""Task scores of a quantized export beside those of the trained model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from whet.config import Config
from whet.core.distributed import Ranks
from whet.exporting.gguf_file import GGUFWeights
from whet.exporting.spec import ExportSpec
from whet.inference.tasks.load_tasks import loaded_tasks
from whet.inference.tasks.scoring import score_tasks
from whet.run.load_models import load_inference_model


def score_quantized(config: Config, spec: ExportSpec, file: Path, ranks: Ranks) -> dict[str, dict[str, float]]:
    """For each task of the run: the score of the trained model and that of the weights in the file.

    Both are computed by whet, in batches and on the run's device: llama.cpp would take an hour for a large model. What
    llama.cpp computes is compared in `kl`.
    """
    trained = load_inference_model(f"{config.folder}@{spec.step}")
    tasks = loaded_tasks(config.eval)
    before = score_tasks(tasks, trained, ranks, minutes=config.eval.minutes)
    model = trained.model
    if config.quantize is not None:  # 4-bit weights cannot hold others
        from transformers import AutoModelForCausalLM

        dtype = spec.model.adapter_dtype
        model = AutoModelForCausalLM.from_config(spec.model.language_model.config, dtype=dtype).to(ranks.device).eval()
    _load_weights_(model, GGUFWeights(file, spec.model))
    quantized = dataclasses.replace(trained, model=model)
    after = score_tasks(tasks, quantized, ranks, minutes=config.eval.minutes)
    return {
        each.task: {"trained": was.score, "export": each.score, "examples": len(each.samples)}
        for was, each in zip(before, after, strict=True)
    }


@torch.no_grad()
def _load_weights_(model: nn.Module, weights: GGUFWeights) -> None:
    for name, parameter in model.named_parameters():
        value = weights.joined(name)
        if value is not None:  # parts of an image encoder are not in the file
            parameter.copy_(value)
