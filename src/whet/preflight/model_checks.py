"""Checks of `whet check` on the real model, loaded as training does: whether packed conversations leak, the vocabulary,
what adapters and quantization reach, positions, and the time on a CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from whet.config import Config
from whet.core.costs import format_estimate
from whet.core.errors import WhetError, describe_error
from whet.preflight.data_checks import Finding, Level
from whet.run.data import RunData, load_run_tokenizer, make_plan

if TYPE_CHECKING:
    from torch import nn

    from whet.core.distributed import Ranks
    from whet.model.loss.loss_model import LossModel
    from whet.training.precision import PrecisionPolicy

_MAX_UNUSED_ROWS = 0.1
"""Embeddings are often padded for speed; a larger share of unused rows is suspicious."""
_VOCABULARY_MULTIPLE = 128
"""To which GPT-NeoX and Megatron pad the rows of a model."""


def check_model(config: Config, data: RunData | None) -> Iterator[Finding]:
    """Load the model as training does and run it on two packed documents."""
    from whet.core.distributed import init_distributed
    from whet.model.attention.recurrent import recurrent_layers
    from whet.model.fp8.conversion import FP8Error
    from whet.model.lora.peft_adapters import embedding_rows
    from whet.run.models.model_builder import VocabularyError, build_loss_model, build_model
    from whet.run.plan_summary import outputs_router_logits, randomness_remarks, router_aux_loss_remark
    from whet.training.precision import choose_precision

    try:
        tokens = len(load_run_tokenizer(config) if data is None else data.tokenizer)
        ranks = init_distributed(kind=config.run.device)
        device = ranks.device
        precision = choose_precision(config, device)
        model = build_model(config, precision, device, tokens, typical=0 if data is None else data.typical_length)
    except VocabularyError as error:
        yield Finding("vocabulary", "fault", str(error))
        return
    except WhetError as error:
        yield Finding("model", "fault", str(error))
        return
    except (RuntimeError, ImportError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        yield Finding("model", "fault", _model_error_text(config, "cannot be built", error))
        return
    if config.quantize is not None:
        yield _quantization_finding(model, config.quantize)
    if config.adapter is not None:
        yield _adapter_finding(model, config.adapter.targets)
    if config.parallel.tensor > 1:
        yield _tensor_parallel_finding(model, config.parallel.tensor)
    if config.parallel.expert > 1:
        yield _expert_parallel_finding(model, config.parallel.expert)
    yield _vocabulary_finding(tokens, embedding_rows(model))
    try:
        longest = config.data.max_length if data is None else data.max_document_length
        root = build_loss_model(config, model, precision, device, tokens, longest)
        if root.unpacked:
            how = "in padded batches" if root.pads else "one conversation at a time"
            text = f"this model is trained unpacked, {how}, which is slower: {root.unpacked}"
            yield Finding("leak", "warning", text)
        else:
            kinds = " and ".join(sorted({type(layer).__name__ for layer in recurrent_layers(root.language_model)}))
            text = "another conversation in the row changes no logit of this model"
            yield Finding("leak", "ok", text + (f"; the state of {kinds} starts anew with each" if kinds else ""))
        for remark in randomness_remarks(root):
            yield Finding("random", "warning", remark)
        if (router_remark := router_aux_loss_remark(config, root)) is not None:
            is_missing = config.train.router_aux_loss == 0 and outputs_router_logits(root)
            yield Finding("router loss", "warning" if is_missing else "ok", router_remark)
    except FP8Error as error:
        yield Finding("model", "fault", str(error))
    except WhetError as error:
        yield Finding("leak", "fault", str(error))
    except (RuntimeError, ImportError, ArithmeticError, LookupError) as error:
        yield Finding("leak", "fault", _model_error_text(config, "fails on two packed conversations", error))
    else:
        if data is not None and device.type == "cpu" and config.launch.nodes == 1:  # else this is not where it runs
            yield _time_finding(config, data, root, ranks, precision)
    if data is not None:
        own = model.config.get_text_config()  # type: ignore[union-attr, operator]
        yield _position_finding(data, getattr(own, "max_position_embeddings", None))


def _time_finding(config: Config, data: RunData, root: LossModel, ranks: Ranks, precision: PrecisionPolicy) -> Finding:
    """From one micro-batch: on a CPU, a training that takes days is easily started."""
    from whet.run.loader import make_loader

    plan = make_plan(config, data)
    plan = plan.unpacked(data.train.store.lengths) if root.unpacked else plan
    with contextlib.closing(make_loader(config, data.train.store, plan, ranks, root)) as loader:
        _, batch = next(loader.micro_batches(plan.last_step - len(plan)))
    root.train()
    passed = 0.0
    for _ in range(2):  # the first of a small model takes longer than later ones
        if passed > 1:
            break
        began = time.monotonic()
        try:
            with precision.autocast(ranks.device):
                loss = root(batch, 1 / max(1, len(batch.supervised_at)))
            loss.objective.backward()
        except (RuntimeError, ArithmeticError, LookupError) as error:
            return Finding("time", "fault", _model_error_text(config, "fails on the first batch", error))
        passed = time.monotonic() - began
    seconds = passed / len(batch.tokens) * plan.stats.tokens
    text = f"about {format_estimate(seconds)} of training on this CPU, for {len(plan):,} steps, without evaluations"
    length = next(key for key in ("steps", "tokens", "epochs") if key == "epochs" or getattr(config.train, key))
    return Finding("time", "ok", f"{text}. Shorter: train.{length}, or a smaller model")


def _model_error_text(config: Config, what: str, error: Exception) -> str:
    """A model's code can fail in any way."""
    return f"model.path: {config.model.path}: the model {what} ({describe_error(error)}). Try another model"


def _quantization_finding(model: nn.Module, kind: str) -> Finding:
    from whet.model.quantize import MIN_QUANTIZED_SHARE, dequantized_bytes, quantized_share, weight_bytes

    part, taken, plain = quantized_share(model), weight_bytes(model) / 2**20, dequantized_bytes(model) / 2**20
    text = f"{part:.0%} of the weights are in {kind}; the model takes {taken:,.1f} MiB instead of {plain:,.1f}"
    if part < MIN_QUANTIZED_SHARE:
        return Finding("quantize", "warning", f"{text}. Embeddings stay in 16 bits")
    return Finding("quantize", "ok", text)


def _adapter_finding(model: nn.Module, targets: Sequence[str]) -> Finding:
    from whet.model.lora.coverage import MIN_COVERAGE, adapter_coverage, covered_share, describe_coverage
    from whet.model.lora.peft_adapters import unwrap_peft

    coverage = adapter_coverage(unwrap_peft(model))
    level: Level = "warning" if covered_share(coverage) < MIN_COVERAGE else "ok"
    return Finding("adapter", level, describe_coverage(coverage, targets), [each.as_dict() for each in coverage])


def _tensor_parallel_finding(model: nn.Module, processes: int) -> Finding:
    from whet.parallel.tensor_parallel import read_tensor_parallel_plan

    try:
        plan = read_tensor_parallel_plan(model, processes)
    except WhetError as error:
        return Finding("tensor", "fault", str(error))
    layers = len(plan.colwise) + len(plan.rowwise)
    return Finding("tensor", "ok", f"{layers} linear layers are sharded over {processes} processes")


def _expert_parallel_finding(model: nn.Module, processes: int) -> Finding:
    from whet.model.lora.peft_adapters import unwrap_peft
    from whet.parallel.expert_parallel import require_divisible_experts

    try:
        count = require_divisible_experts(unwrap_peft(model), processes)
    except WhetError as error:
        return Finding("expert", "fault", str(error))
    return Finding(
        "expert", "ok", f"of {count} experts in a layer, each of {processes} processes holds {count // processes}"
    )


def _vocabulary_finding(tokens: int, rows: int) -> Finding:
    text = f"the tokenizer has {tokens:,} tokens, the model {rows:,}"
    is_padded = rows == -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if tokens < (1 - _MAX_UNUSED_ROWS) * rows and not is_padded:
        return Finding(
            "vocabulary", "warning", f"{text}. Check that they belong together: so many unused rows are unusual"
        )
    return Finding("vocabulary", "ok", text)


def _position_finding(data: RunData, room: int | None) -> Finding:
    longest = data.max_document_length
    text = f"the longest conversation has {longest:,} tokens"
    if room is None:
        return Finding("positions", "ok", f"{text}; the model has no limit")
    if longest > room:
        return Finding("positions", "fault", f"{text}, the model supports {room:,}. Lower data.max_length to that")
    return Finding("positions", "ok", f"{text}, the model supports {room:,}")
