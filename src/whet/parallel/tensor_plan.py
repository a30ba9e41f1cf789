"""What a model's own plan says of computing its layers by several processes together, as far as whet can follow it.

transformers' models carry such a plan: `colwise` divides the rows of a linear layer's weight, and with them what it
gives; the layer behind it is `rowwise`, divides its columns, takes what the process has, and the results are summed.
Between the two, each process has some of the heads, or a part of the feed-forward width. Embedding and head stay whole:
the loss is computed on supervised positions only, by a head that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from whet.core.errors import WhetError

_COLWISE, _ROWWISE, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_LEAVE_OUT = "Leave parallel.tensor out; parallel.shard divides any model"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Names of modules."""

    colwise: list[str]
    """Linear layers of which each process computes a part of the results."""
    rowwise: list[str]
    """Linear layers of which each process has a part of what goes in."""
    summed: list[str]
    """What every process has whole, between the two: it sees some of the heads, so its gradients are to be summed."""


def read_plan(model: nn.Module, processes: int) -> TensorPlan:
    """The plan of a transformers model, for so many processes; what cannot be computed so is refused."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    styles = dict(_found(model, plan))
    if _COLWISE not in styles.values() or _ROWWISE not in styles.values():
        raise _refused(processes, f"this model ({type(model).__name__}) has no plan for it. {_LEAVE_OUT}")
    for name, style in styles.items():
        if style not in (_COLWISE, _ROWWISE, _SUMMED):
            raise _refused(processes, f"this model's plan wants {style} for {name}, which whet cannot do. {_LEAVE_OUT}")
    divided = [name for name, style in styles.items() if style != _SUMMED]
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, style in styles.items():
        layer = modules.get(name)
        if layer is None or (style != _SUMMED and type(layer).forward is not nn.Linear.forward):
            kind = "weight" if layer is None else type(layer).__name__  # such as attention sinks
            raise _refused(processes, f"{name} is a {kind}, not a plain linear layer. {_LEAVE_OUT}")
    _need_heads(model, processes)
    for name in divided:
        _need_size(model, name, styles[name], processes)
    between = dict.fromkeys(name.rpartition(".")[0] for name in divided if styles[name] == _COLWISE)
    summed = dict.fromkeys(name for name, style in styles.items() if style == _SUMMED)
    for parent in between:
        summed |= dict.fromkeys(_beside(model, parent, styles, processes))
    return TensorPlan(
        [name for name in divided if styles[name] == _COLWISE],
        [name for name in divided if styles[name] == _ROWWISE],
        list(summed),
    )


def _found(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, style) of all modules and weights that a plan is about, embedding and head excepted."""
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # type: ignore[operator]
    modules = [name for name, module in model.named_modules() if id(module) not in ends]
    kept = {f"{name}.weight" for name, module in model.named_modules() if id(module) in ends}
    weights = [name for name, _ in model.named_parameters() if name not in kept]
    for name in (*modules, *weights):
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in plan:
            yield name, plan[pattern]


def _need_heads(model: nn.Module, processes: int) -> None:
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    for key in _HEADS:
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % processes:
            what = "key/value heads" if key == _HEADS[1] else "heads"
            raise _refused(
                processes, f"this model has {heads} {what}, which do not divide by it. Lower it to a divisor of {heads}"
            )


def _need_size(model: nn.Module, name: str, style: str, processes: int) -> None:
    layer: Any = model.get_submodule(name)
    size = layer.out_features if style == _COLWISE else layer.in_features
    if size % processes:
        reason = f"{name} is {size} wide, which does not divide by it. Lower it to a divisor of {size}"
        raise _refused(processes, reason)


def _beside(model: nn.Module, parent: str, styles: dict[str, str], processes: int) -> Iterator[str]:
    """Modules between divided layers that the plan does not name and that see single heads, as norms of queries do.
    Other weights there would have to be divided in a way that nobody says."""
    inside = model.get_submodule(parent)
    width = getattr(inside, "head_dim", None)
    for name, weight in inside.named_parameters():
        owner = f"{parent}.{name}".rpartition(".")[0]
        if owner in styles:
            continue
        if owner == parent or weight.shape != (width,):
            reason = "stands beside divided layers, and this model's plan does not say how it is to be divided"
            raise _refused(processes, f"{parent}.{name} {reason}. {_LEAVE_OUT}")
        yield owner


def _refused(processes: int, reason: str) -> WhetError:
    return WhetError(f"parallel.tensor: {processes}, but {reason}")
