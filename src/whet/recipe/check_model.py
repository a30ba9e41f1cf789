"""Checks of the real model: does it fit its tokenizer and the data, and do packed conversations see each other?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.config import Config
from whet.core.errors import WhetError
from whet.recipe.data import Data, tokenizer_of
from whet.recipe.finding import Finding

if TYPE_CHECKING:
    from torch import nn

_UNUSED = 0.1
"""Models have some rows more than their tokenizer has tokens, for speed; more than this part is strange."""


def check_model(config: Config, data: Data | None) -> Iterator[Finding]:
    """Load it as training does and run it on two packed documents."""
    from whet.core.ranks import start_ranks
    from whet.model.fp8 import EightBitError
    from whet.recipe.parts import VocabularyError, build_model, choose_arithmetic, make_root

    try:
        tokens = len(tokenizer_of(config) if data is None else data.tokenizer)
        device = start_ranks().device
        arithmetic = choose_arithmetic(config, device)
        model = build_model(config, arithmetic, device, tokens, typical=0 if data is None else data.typical)
    except VocabularyError as error:
        yield Finding("vocabulary", "fault", str(error))
        return
    except WhetError as error:
        yield Finding("model", "fault", str(error))
        return
    except (RuntimeError, ImportError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        yield Finding("model", "fault", _broken(config, "cannot be made", error))
        return
    if config.quantize is not None:
        yield _quantized(model, config.quantize)
    if config.parallel.tensor > 1:
        yield _tensor(model, config.parallel.tensor)
    yield _vocabulary(tokens, model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    try:
        longest = config.data.max_length if data is None else data.longest
        root = make_root(config, model, arithmetic, device, tokens, longest)
        known = "packed conversations would see each other in this model; unpacked, as here, it is trained right"
        packed = "another conversation in the row changes no logit of this model"
        yield Finding("leak", "ok", known if root.alone else packed)
    except EightBitError as error:
        yield Finding("model", "fault", str(error))
    except WhetError as error:
        yield Finding("leak", "fault", str(error))
    except (RuntimeError, ImportError, ArithmeticError, LookupError) as error:
        yield Finding("leak", "fault", _broken(config, "fails on two packed conversations", error))
    if data is not None:
        own = model.config.get_text_config()  # type: ignore[union-attr, operator]
        yield _positions(data, getattr(own, "max_position_embeddings", None))


def _broken(config: Config, what: str, error: Exception) -> str:
    """A model is a program of someone else's: it can fail in any way."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"model.path: {config.model.path}: the model {what} ({type(error).__name__}: {first}). Try another one"


def _quantized(model: nn.Module, kind: str) -> Finding:
    from whet.model.quantize import MOST, packed_bytes, plain_bytes, quantized_part

    part, taken, plain = quantized_part(model), packed_bytes(model) / 2**20, plain_bytes(model) / 2**20
    text = f"{part:.0%} of the weights are in {kind}; all of them take {taken:,.1f} MiB instead of {plain:,.1f}"
    if part < MOST:
        return Finding("quantize", "warning", f"{text}. Embeddings, and experts fused into one weight, cannot be in it")
    return Finding("quantize", "ok", text)


def _tensor(model: nn.Module, processes: int) -> Finding:
    from whet.parallel.tensor_plan import read_plan

    try:
        plan = read_plan(model, processes)
    except WhetError as error:
        return Finding("tensor", "fault", str(error))
    layers = len(plan.colwise) + len(plan.rowwise)
    return Finding("tensor", "ok", f"{layers} linear layers of this model divide by {processes}")


def _vocabulary(tokens: int, rows: int) -> Finding:
    text = f"the tokenizer knows {tokens:,} tokens, the model {rows:,}"
    if tokens < (1 - _UNUSED) * rows:
        return Finding("vocabulary", "warning", f"{text}. If they belong together, so many would be unused: compare")
    return Finding("vocabulary", "ok", text)


def _positions(data: Data, room: int | None) -> Finding:
    longest = data.longest
    text = f"the longest conversation has {longest:,} tokens"
    if room is None:
        return Finding("positions", "ok", f"{text}; the model names no limit")
    if longest > room:
        return Finding("positions", "fault", f"{text}, the model was made for {room:,}. Lower data.max_length to that")
    return Finding("positions", "ok", f"{text}, the model takes {room:,}")
