"""`whet check`: all checks in turn, those of the data and those of the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from whet.config import Config
from whet.core.errors import ExitCode, WhetError, describe_error
from whet.data.prepare.tokenize import BadLineError
from whet.preflight.data_checks import (
    Finding,
    check_duplicates,
    check_ledger,
    check_step_count,
    check_store,
    check_template,
)
from whet.run.data import RunData, load_run_tokenizer, make_conversation_tokenizer, prepare_data

# Checks of the real model: does it fit its tokenizer and the data, and do packed conversations see each other?

if TYPE_CHECKING:
    from torch import nn

_MAX_UNUSED_ROWS = 0.1
"""Models have some rows more than their tokenizer has tokens, for speed; more than this part is strange."""


def check_model(config: Config, data: RunData | None) -> Iterator[Finding]:
    """Load it as training does and run it on two packed documents."""
    from whet.core.distributed import init_distributed
    from whet.model.fp8.conversion import FP8Error
    from whet.model.lora.peft_adapters import embedding_rows
    from whet.run.assemble import VocabularyError, build_loss_model, build_model
    from whet.training.precision import choose_precision

    try:
        tokens = len(load_run_tokenizer(config) if data is None else data.tokenizer)
        device = init_distributed().device
        precision = choose_precision(config, device)
        model = build_model(config, precision, device, tokens, typical=0 if data is None else data.typical_length)
    except VocabularyError as error:
        yield Finding("vocabulary", "fault", str(error))
        return
    except WhetError as error:
        yield Finding("model", "fault", str(error))
        return
    except (RuntimeError, ImportError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        yield Finding("model", "fault", _model_error_text(config, "cannot be made", error))
        return
    if config.quantize is not None:
        yield _quantization_finding(model, config.quantize)
    if config.parallel.tensor > 1:
        yield _tensor_parallel_finding(model, config.parallel.tensor)
    yield _vocabulary_finding(tokens, embedding_rows(model))
    try:
        longest = config.data.max_length if data is None else data.max_document_length
        root = build_loss_model(config, model, precision, device, tokens, longest)
        known = "packed conversations would see each other in this model; unpacked, as here, it is trained right"
        packed = "another conversation in the row changes no logit of this model"
        yield Finding("leak", "ok", known if root.unpacked else packed)
    except FP8Error as error:
        yield Finding("model", "fault", str(error))
    except WhetError as error:
        yield Finding("leak", "fault", str(error))
    except (RuntimeError, ImportError, ArithmeticError, LookupError) as error:
        yield Finding("leak", "fault", _model_error_text(config, "fails on two packed conversations", error))
    if data is not None:
        own = model.config.get_text_config()  # type: ignore[union-attr, operator]
        yield _position_finding(data, getattr(own, "max_position_embeddings", None))


def _model_error_text(config: Config, what: str, error: Exception) -> str:
    """A model is a program of someone else's: it can fail in any way."""
    return f"model.path: {config.model.path}: the model {what} ({describe_error(error)}). Try another one"


def _quantization_finding(model: nn.Module, kind: str) -> Finding:
    from whet.model.quantize import MIN_QUANTIZED_SHARE, dequantized_bytes, quantized_share, weight_bytes

    part, taken, plain = quantized_share(model), weight_bytes(model) / 2**20, dequantized_bytes(model) / 2**20
    text = f"{part:.0%} of the weights are in {kind}; all of them take {taken:,.1f} MiB instead of {plain:,.1f}"
    if part < MIN_QUANTIZED_SHARE:
        return Finding("quantize", "warning", f"{text}. Embeddings, and experts fused into one weight, cannot be in it")
    return Finding("quantize", "ok", text)


def _tensor_parallel_finding(model: nn.Module, processes: int) -> Finding:
    from whet.parallel.tensor_parallel import read_tensor_parallel_plan

    try:
        plan = read_tensor_parallel_plan(model, processes)
    except WhetError as error:
        return Finding("tensor", "fault", str(error))
    layers = len(plan.colwise) + len(plan.rowwise)
    return Finding("tensor", "ok", f"{layers} linear layers of this model divide by {processes}")


def _vocabulary_finding(tokens: int, rows: int) -> Finding:
    text = f"the tokenizer knows {tokens:,} tokens, the model {rows:,}"
    if tokens < (1 - _MAX_UNUSED_ROWS) * rows:
        return Finding("vocabulary", "warning", f"{text}. If they belong together, so many would be unused: compare")
    return Finding("vocabulary", "ok", text)


def _position_finding(data: RunData, room: int | None) -> Finding:
    longest = data.max_document_length
    text = f"the longest conversation has {longest:,} tokens"
    if room is None:
        return Finding("positions", "ok", f"{text}; the model names no limit")
    if longest > room:
        return Finding("positions", "fault", f"{text}, the model was made for {room:,}. Lower data.max_length to that")
    return Finding("positions", "ok", f"{text}, the model takes {room:,}")


# The preflight: proves, before any money is spent, that what will be trained on is what was meant.


def run_checks(config: Config, tell: Callable[[Finding], None]) -> list[Finding]:
    """Every check in turn; each finding is told as soon as it is known, and once."""
    findings: list[Finding] = []
    for finding in _all_findings(config):
        if finding not in findings:
            tell(finding)
            findings.append(finding)
    return findings


def _all_findings(config: Config) -> Iterator[Finding]:
    data, findings = _prepare_for_check(config)
    yield from findings
    if data is not None:
        accounts = data.ledger()["sources"]
        yield from check_ledger(config, accounts)
        yield from check_duplicates(data, accounts)
        yield from check_store(config, data)
    yield from _template_findings(config, data)
    if data is not None:
        yield from check_step_count(config, data)
    yield from check_model(config, data)


def _prepare_for_check(config: Config) -> tuple[RunData | None, list[Finding]]:
    """The data as the configuration has it. If a line stops it, the others are looked at all the same, in the cache:
    a folder that data.store names is for the data that will be trained on."""
    findings = []
    try:
        try:
            return prepare_data(config), []
        except BadLineError as error:
            findings.append(Finding("bad lines", "fault", str(error)))
            rest = config.data.model_copy(update={"on_bad": "skip", "store": None})
            return prepare_data(config.model_copy(update={"data": rest})), findings
    except WhetError as error:
        if error.exit_code != ExitCode.INPUT:  # a process was killed, for example
            raise
        check = "model" if str(error).startswith("model.") else "data"
        return None, [*findings, Finding(check, "fault", str(error))]


def _template_findings(config: Config, data: RunData | None) -> Iterator[Finding]:
    try:
        yield from check_template(
            data.conversation_tokenizer if data is not None else make_conversation_tokenizer(config), data
        )
    except WhetError as error:
        if data is not None:
            yield Finding("template", "fault", str(error))  # without data it was told with them
