"""Determined's `searcher` and the hyperparameters that it searches → the section `search`, and ranges in the recipe.

What a searched hyperparameter means in whet is found by importing the file with several of its values: where exactly
one setting follows it, a range stands there. So a batch size per device becomes a range of rows per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whet.convert.configs.draft import Draft, convert
from whet.core.errors import WhetError
from whet.core.yaml import Node

RANGES = ("const", "int", "double", "log", "categorical")
Path = tuple[str, ...]
_MICRO_ROWS = "train.micro_rows"
_MAX_CHOICES = 100

_METHODS = {
    "adaptive_asha": "asha", "async_halving": "asha", "asha": "asha", "random": "random", "grid": "grid",
    "single": "single",
}  # fmt: skip
_SMALLER_IS_BETTER = {"val_loss": True, "val_bpb": True, "val_accuracy": False}
_METRICS = {
    "val_loss": "val_loss validation_loss eval_loss loss test_loss perplexity eval_perplexity validation_perplexity",
    "val_accuracy": "val_accuracy validation_accuracy eval_accuracy accuracy eval_mean_token_accuracy",
    "val_bpb": "val_bpb eval_bpb bits_per_byte",
}
_NO_PLACE = {
    "source_trial_id": "starting from another trial: model.path names a run",
    "source_checkpoint_uuid": "starting from a checkpoint: model.path names a run",
    "bracket_rungs": "brackets by hand: search.mode chooses them",
    "stop_once": "whet's rungs always stop trials once",
    "train_stragglers": "whet's rungs stop trials that fall behind",
    "time_metric": "rungs are in steps or tokens of the plan",
    "budget": "a budget for all trials: search.max_trials limits them",
}


# Hyperparameters


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A leaf of `hyperparameters`, whose sections may be nested."""

    path: Path
    """Below hyperparameters."""
    node: Node
    kind: str
    """const, or what is searched."""

    @property
    def key(self) -> str:
        return ".".join(("hyperparameters", *self.path))

    @property
    def name(self) -> str:
        return self.path[-1]


def hyperparameters(node: Node, path: Path = ()) -> Iterator[Hyperparameter]:
    """All of them. A mapping is a range if its `type` is one of Determined's, else a section; an argument that is a
    mapping stays whole."""
    assert isinstance(node.value, dict)
    for name, inner in node.value.items():
        kind = inner.value["type"].value if isinstance(inner.value, dict) and "type" in inner.value else None
        if isinstance(inner.value, dict) and kind not in RANGES and inner.value and path != ("training_arguments",):
            yield from hyperparameters(inner, (*path, str(name)))
        else:
            yield Hyperparameter((*path, str(name)), inner, kind if kind in RANGES else "const")


def values_of(parameter: Hyperparameter) -> list[Node]:
    """The constant; all values of a choice; the lowest, a middle and the highest value of a range."""
    node = parameter.node
    if not isinstance(node.value, dict) or node.value.get("type", node).value not in RANGES:
        return [node]
    if parameter.kind == "const":
        return [_required(parameter, "val")]
    if parameter.kind == "categorical":
        values = _required(parameter, "vals").value
        if not isinstance(values, list) or not values:
            raise WhetError(f"{node.place}: {parameter.key}.vals: give a list of values")
        return values
    low, high = (_bound(parameter, key) for key in ("minval", "maxval"))
    if parameter.kind == "log":
        base = convert(node.value["base"], f"{parameter.key}.base", "number") if "base" in node.value else 10
        numbers: list[float] = [_power(parameter, base, exponent) for exponent in (low, (low + high) / 2, high)]
    elif parameter.kind == "int":
        numbers = [int(low), round((low + high) / 2), int(high)]
    else:
        numbers = [float(low), (low + high) / 2, float(high)]
    return [Node(number, node.place) for number in numbers]


def _required(parameter: Hyperparameter, key: str) -> Node:
    assert isinstance(parameter.node.value, dict)
    if key not in parameter.node.value:
        raise WhetError(f"{parameter.node.place}: {parameter.key}: {key} is missing, which type {parameter.kind} needs")
    return parameter.node.value[key]


def _bound(parameter: Hyperparameter, key: str) -> float:
    type = "integer" if parameter.kind == "int" else "number"
    number: float = convert(_required(parameter, key), f"{parameter.key}.{key}", type)
    return number


def _power(parameter: Hyperparameter, base: float, exponent: float) -> float:
    try:
        found = float(base) ** float(exponent)
    except (OverflowError, ZeroDivisionError):
        found = math.inf
    if isinstance(found, complex) or not 0 < found < math.inf:
        raise WhetError(
            f"{parameter.node.place}: {parameter.key}: {base:g} to the power of {exponent:g} is not a positive number. "
            "minval and maxval of type log are exponents of base"
        )
    return float(f"{found:.12g}")


# Ranges


Import = Callable[[Path, Node], Draft]
"""The file with another value for the hyperparameter at a path."""


def put_ranges(draft: Draft, searched: Mapping[str, Hyperparameter], import_with: Import, is_grid: bool) -> int:
    """Write a range wherever one setting follows a searched hyperparameter; returns how many. `searched`: by the name
    of the script's argument."""
    written = 0
    for argument, parameter in searched.items():
        points = values_of(parameter)
        if all(point.plain() == points[0].plain() for point in points):
            continue
        drafts = [import_with(parameter.path, value) for value in points]
        found = [{to: node.plain() for to, node in other.settings.items()} for other in drafts]
        known = {(note.key, note.text) for note in drafts[0].notes}  # its first value is the one that was imported
        draft.notes += [
            note for other in drafts[1:] for note in other.notes
            if note.category in ("decide", "different", "no equivalent") and (note.key, note.text) not in known
        ]  # fmt: skip
        keys = {key for each in found for key in each if any(other.get(key) != each[key] for other in found)}
        if _MICRO_ROWS in keys and len(keys) > 1:  # memory alone: enough for every trial
            keys.remove(_MICRO_ROWS)
            draft.put(_MICRO_ROWS, min(each[_MICRO_ROWS] for each in found), argument, why="the smallest")
        range_, [to, *others] = None, [*sorted(keys), ""]
        if len(keys) == 1:
            range_ = _range(parameter, points, [each.get(to) for each in found], is_grid)
        if range_ is not None:
            draft.put(to, range_, *dict.fromkeys((*draft.origins(to), argument)), why="searched")
            written += 1
            continue
        shown = repr(parameter.node.plain(named=True))
        if not keys:
            text = f"{parameter.key}: {shown}: no setting of whet corresponds to it"
        elif others != [""]:
            text = (
                f"{parameter.key}: {shown}: several settings depend on it ({', '.join(sorted(keys))}); whet "
                "searches one"
            )
        else:
            text = f"{parameter.key}: {shown}: {to} depends on it, but not in proportion"
        draft.note("decide", "hyperparameters", f"{text}. Its first value is written")
    return written


def _range(parameter: Hyperparameter, points: list[Node], values: list[Any], is_grid: bool) -> dict[str, Any] | None:
    """The range of a setting that has these `values` at the `points` of a hyperparameter."""
    if parameter.kind == "categorical":
        different = [value for index, value in enumerate(values) if value not in values[:index]]
        return None if None in values else {"search": "choice", "values": different}
    given: list[Any] = [point.value for point in points]
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
    if not numbers or any(not math.isclose(a * given[-1], b * values[-1]) for a, b in zip(values, given, strict=True)):
        return None
    count = None
    if isinstance(parameter.node.value, dict) and "count" in parameter.node.value:
        count = convert(parameter.node.value["count"], f"{parameter.key}.count", "integer")
    low, high = values[0], values[-1]
    if parameter.kind == "int":
        last = given[-1] if is_grid else max(given[0], given[-1] - 1)  # Determined draws integers below maxval
        ratio = high / given[-1] if given[-1] else 1
        high = last
        if ratio != 1 or not isinstance(low, int):  # multiples, which a range does not have
            integers = range(given[0], last + 1)
            convert_back = type(low)
            return None if len(integers) > _MAX_CHOICES else {
                "search": "choice", "values": [convert_back(ratio * integer) for integer in integers],
            }  # fmt: skip
    if low == high:
        return {"search": "choice", "values": [low]}
    kind = {"int": "int", "double": "float", "log": "log"}[parameter.kind]
    found: dict[str, Any] = {"search": kind, "low": min(low, high), "high": max(low, high)}
    return found if count is None else {**found, "count": count}


# Searcher


def put_searcher(draft: Draft, searched: int) -> None:
    """The section `search` and the length of a trial. `searched`: the number of ranges in the recipe."""
    given = draft.entries["searcher"].node
    if not isinstance(given.value, dict):
        raise draft.fail("searcher", "is not a mapping")
    inside = dict(given.value)
    name = str(inside.pop("name").value) if "name" in inside else "single"
    _put_length(draft, inside)
    if name not in _METHODS:
        text = f"{name}: a searcher that whet does not have: set search.method to asha, tpe, random or grid"
        draft.note("decide", "searcher", text)
    elif name != "single" or searched:
        draft.put("search.method", _METHODS[name], "searcher", why=f"name: {name}")
    _put_metric(draft, inside, name)
    for key, to, type in (
        ("max_trials", "search.max_trials", "integer"), ("divisor", "search.divisor", "number"),
        ("max_rungs", "search.max_rungs", "integer"), ("num_rungs", "search.max_rungs", "integer"),
        ("mode", "search.mode", "text"), ("max_concurrent_trials", "search.concurrent", "integer"),
    ):  # fmt: skip
        if key in inside:
            value = convert(inside.pop(key), f"searcher.{key}", type)
            if name == "single" or (value == 0 and key == "max_concurrent_trials"):
                draft.note("not needed", "searcher", f"{key}: {value}")
            else:
                draft.put(to, int(value) if isinstance(value, float) and value == int(value) else value, "searcher",
                          why=key)  # fmt: skip
    if name in ("async_halving", "asha"):
        draft.put("search.mode", "aggressive", "searcher", why=f"{name} has one bracket")
    elif name == "adaptive_asha" and "search.concurrent" not in draft.settings:
        draft.note("different", "searcher", "max_concurrent_trials: Determined runs 16 trials at a time unless set "
                   "otherwise, whet as many as there are devices (search.concurrent)")  # fmt: skip
    for key, node in inside.items():
        reason = _NO_PLACE.get(key)
        shown = f"{key}: {node.plain(named=True)!r}: "
        if reason is None:
            draft.note("unknown", "searcher", f"{shown}is not a key of Determined's searchers; it was left out")
        else:
            draft.note("no equivalent", "searcher", f"{shown}{reason}")
    if name not in ("single", *([] if name in _METHODS else [name])) and not searched:
        draft.note("decide", "searcher", f"{name}, but no range is left to search: `whet search` needs one, such as "
                   "train.optimizer.lr: {search: log, low: 1e-6, high: 1e-4}")  # fmt: skip
    draft.use("searcher")


def _put_metric(draft: Draft, inside: dict[str, Node], name: str) -> None:
    smaller = convert(inside.pop("smaller_is_better"), "searcher.smaller_is_better", "flag") if (
        "smaller_is_better" in inside) else True  # fmt: skip
    if "metric" not in inside:
        return
    given = str(inside.pop("metric").plain())
    if name == "single":
        draft.note("not needed", "searcher", f"metric: {given}")
        return
    metric = next((ours for ours, theirs in _METRICS.items() if given in theirs.split()), None)
    if metric is None:
        metric = "val_loss"
        text = f"metric: {given!r}, which the script measures: {metric} takes its place. whet has {', '.join(_METRICS)}"
        draft.note("decide", "searcher", f"{text} and task/NAME")
    elif _SMALLER_IS_BETTER[metric] != smaller:
        draft.note("decide", "searcher", f"smaller_is_better: {str(smaller).lower()} for {given}: whet takes a "
                   f"{'lower' if _SMALLER_IS_BETTER[metric] else 'higher'} {metric} for better")  # fmt: skip
    draft.put("search.metric", metric, "searcher", why=f"metric: {given}")
    if not any(to.startswith("data.validation") for to in draft.settings):
        draft.note("decide", "searcher", f"{metric} needs data.validation, which is not in the file")


def _put_length(draft: Draft, inside: dict[str, Node]) -> None:
    """max_length in batches, epochs or records; max_time is in the unit that time_metric names."""
    unit, key = "batches", next((key for key in ("max_length", "max_time") if key in inside), None)
    if key is None:
        return
    length = inside.pop(key)
    if key == "max_time" and "time_metric" in inside:
        unit = str(inside.pop("time_metric").plain())
    if isinstance(length.value, dict):
        if len(length.value) != 1:
            raise WhetError(f"{length.place}: searcher.{key}: give one of batches, epochs, records")
        [(unit, length)] = length.value.items()
    unit = {"batch": "batches", "epoch": "epochs", "record": "records"}.get(unit, unit)
    number = convert(length, f"searcher.{key}.{unit}", "integer")
    if draft.has("max_steps", "num_train_epochs"):
        draft.note("different", "searcher", f"{key}: {number} {unit}: the script's own arguments give the length")
    elif number <= 0:
        raise WhetError(f"{length.place}: searcher.{key}: {number} is not a positive length")
    elif unit == "batches":
        draft.settings.pop("train.epochs", None)  # the Trainer's default
        draft.put("train.steps", number, "searcher", why=f"{key} in batches")
    elif unit == "epochs":
        draft.put("train.epochs", float(number), "searcher", why=f"{key} in epochs")
    elif unit == "records" and (rows := _rows_per_step(draft)) is not None:
        draft.settings.pop("train.epochs", None)
        draft.put("train.steps", max(1, number // rows), "searcher", why=f"{key}: {number} records of {rows} a step")
    else:
        draft.note("decide", "searcher", f"{key}: {number} {unit}: set train.steps, train.epochs or train.tokens")


def _rows_per_step(draft: Draft) -> int | None:
    for to in ("train.batch.rows", "train.batch.conversations"):
        node = draft.settings.get(to)
        if node is not None and isinstance(node.value, int):
            return node.value
    return None
