"""The preflight: proves, before any money is spent, that what will be trained on is what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from whet.config import Config
from whet.core.errors import WhetError
from whet.recipe.check_data import Finding, check_accounts, check_copies, check_ids, check_steps, check_template
from whet.recipe.data import Data, prepare_data, tokenizer_of


def check(config: Config, tell: Callable[[Finding], None]) -> list[Finding]:
    """Every check in turn; each finding is told as soon as it is known."""
    findings = []
    for finding in _all(config):
        tell(finding)
        findings.append(finding)
    return findings


def _all(config: Config) -> Iterator[Finding]:
    data = None
    for found in _prepare(config):
        if isinstance(found, Finding):
            yield found
        else:
            data = found
    if data is not None:
        yield from check_accounts(data)
        yield from check_copies(data)
        yield from check_ids(config, data)
        yield from check_template(data)
        yield from check_steps(config, data)
    yield from _model(config, data)


def _prepare(config: Config) -> Iterator[Finding | Data]:
    """The data as the configuration has it; if a line stops it, all such lines are counted."""
    try:
        yield prepare_data(config)
        return
    except WhetError as error:
        first = str(error)
    if config.data.on_bad == "skip":
        yield Finding("data", "fault", first)
        return
    yield Finding("bad lines", "fault", first)
    try:
        yield prepare_data(config.model_copy(update={"data": config.data.model_copy(update={"on_bad": "skip"})}))
    except WhetError as error:
        if str(error) != first:
            yield Finding("data", "fault", str(error))


def _model(config: Config, data: Data | None) -> Iterator[Finding]:
    """The real model: does it fit its tokenizer, and do packed conversations see each other?"""
    from whet.core.ranks import start_ranks
    from whet.model.lora import language_model
    from whet.model.loss import LossModel
    from whet.recipe.parts import build_model, choose_arithmetic

    try:
        tokenizer = tokenizer_of(config) if data is None else data.tokenizer
        device = start_ranks().device
        arithmetic = choose_arithmetic(config, device)
        model = build_model(config, arithmetic, device, len(tokenizer))
    except WhetError as error:
        yield Finding("model", "fault", str(error))
        return
    rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    yield Finding("vocabulary", "ok", f"the tokenizer knows {len(tokenizer):,} tokens, the model {rows:,}")
    try:
        with arithmetic.context(device):
            LossModel(language_model(model)).check(len(tokenizer))
        yield Finding("leak", "ok", "another conversation in the row changes no logit of this model, bit by bit")
    except WhetError as error:
        yield Finding("leak", "fault", str(error))
    if data is None:
        return
    longest = int(data.train.store.lengths.max(initial=0))
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and longest > room:
        text = (
            f"the longest conversation has {longest:,} tokens, the model was made for {room:,}: lower data.max_length"
        )
        yield Finding("positions", "fault", text)
    else:
        yield Finding("positions", "ok", f"the longest conversation has {longest:,} tokens, the model takes {room}")
