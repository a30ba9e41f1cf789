"""What other programs combine and whet does not: one of the two is left out, and the recipe says which."""

from __future__ import annotations

from typing import Any

from whet.convert.configs.draft import Draft


def resolve_conflicts(draft: Draft) -> None:
    """Leave out what `whet/config.py` would refuse, with a note; wrong values are left for it to refuse."""

    def value(to: str) -> Any:
        return draft.settings[to].plain() if to in draft.settings else None

    def is_split(to: str) -> bool:
        size = value(to)
        return isinstance(size, int) and size > 1

    adapter, quantized = "adapter.method" in draft.settings, "quantize" in draft.settings
    loads_first = value("adapter.method") == "dora" or (
        adapter and bool(value("adapter.also_train") or value("model.add_tokens"))
    )
    whole_layers = value("train.optimizer.name") == "adamw8bit" or value("train.precision") == "fp8"
    if is_split("parallel.tensor") and (adapter or quantized or whole_layers or is_split("parallel.context")):
        text = "tensor parallelism beside adapters, context parallelism, fp8 or 8-bit optimizers: left out"
        draft.drop("parallel.tensor", "no equivalent", text)
    if is_split("parallel.shard") and loads_first and not quantized:
        text = "sharding beside DoRA, modules that are trained whole, or new tokens: left out"
        draft.drop("parallel.shard", "no equivalent", text)
    if value("parallel.offload") == "weights" and (quantized or "parallel.shard" not in draft.settings):
        draft.drop("parallel.offload", "no equivalent", "offload of 4-bit weights, or of unsharded ones: left out")
    if quantized and "model.dtype" in draft.settings:
        draft.drop("model.dtype", "no equivalent", "a dtype of weights that have 4 bits: left out")
    _drop_trained_validation(draft)


def _drop_trained_validation(draft: Draft) -> None:
    """Validation on the training data: whet refuses it, because it would measure memorization."""
    tests = "data.validation.sources"
    trained = _sources(draft, "data.sources")
    if not any(source in trained for source in _sources(draft, tests)):
        return
    text = "validation on the training data would measure memorization: left out. Set data.validation.fraction"
    draft.drop(f"{tests}.0.path", "decide", text)
    for to in [to for to in draft.settings if to.startswith(f"{tests}.")]:
        del draft.settings[to]


def _sources(draft: Draft, to: str) -> list[tuple[Any, ...]]:
    """What makes a source the same as another, of each."""
    keys = ("path", "split", "subset")
    found, number = [], 0
    while f"{to}.{number}.path" in draft.settings:
        nodes = [draft.settings.get(f"{to}.{number}.{key}") for key in keys]
        found.append(tuple(None if node is None else node.plain() for node in nodes))
        number += 1
    return found
