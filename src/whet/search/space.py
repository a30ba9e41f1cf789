"""The search space of a recipe: ranges that stand where values would.

    lr: {search: log, low: 1e-6, high: 1e-4}               a number, evenly on a logarithmic scale
    weight_decay: {search: float, low: 0, high: 0.1}       a number
    rank: {search: int, low: 4, high: 64}                  an integer, both ends included
    name: {search: choice, values: [adamw, muon]}          one of these; a value may be a list or a section
    momentum: {search: float, low: 0.8, high: 0.99, when: {train.optimizer.name: muon}}

With `when`, a range is part of a trial only if the settings it names have one of the values given; otherwise its key is
absent. `count` is the number of points that method grid takes from low to high.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.config import Config
from whet.core.config import ConfigPath, is_search_range, validate_config
from whet.core.errors import WhetError
from whet.core.yaml import Node, dump_yaml_inline
from whet.search.script import ScriptConfig, TrialConfig

_KEYS = {
    "log": ("low", "high", "count", "when"),
    "float": ("low", "high", "count", "when"),
    "int": ("low", "high", "count", "when"),
    "choice": ("values", "when"),
}
_EXAMPLES = {
    "log": "{search: log, low: 1e-6, high: 1e-4}",
    "float": "{search: float, low: 0.0, high: 0.1}",
    "int": "{search: int, low: 4, high: 64}",
    "choice": "{search: choice, values: [adamw, muon]}",
}
_MAX_COUNT = 10_000
_TRIES = 32
"""Random combinations among which a value must have a valid one."""

Value = str | int | float | bool | None
"""What Optuna stores. A choice that is a list or a section is its YAML on one line."""
Assignment = dict[str, Value]
"""The value of every parameter of a trial, by name; parameters that do not apply are absent."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A range, and where it stands."""

    path: ConfigPath
    place: str
    """File and line."""
    kind: str
    low: float = 0
    high: float = 0
    count: int | None = None
    choices: tuple[tuple[Value, Node], ...] = ()
    """Each value as Optuna stores it and as it stands in the recipe."""
    when: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    """Settings, and the values of each with which this parameter applies."""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def values(self) -> list[Value]:
        """The values of a choice."""
        return [value for value, _ in self.choices]

    def node(self, value: Value) -> Node:
        """A value as it stands in a trial's recipe."""
        chosen = next((node for label, node in self.choices if label == value and type(label) is type(value)), None)
        return chosen or Node(value, self.place)

    def draw(self, randomness: random.Random) -> Value:
        """A random value."""
        if self.kind == "choice":
            return randomness.choice(self.values)
        if self.kind == "int":
            return randomness.randint(int(self.low), int(self.high))
        if self.kind == "log":
            return min(self.high, max(self.low, math.exp(randomness.uniform(math.log(self.low), math.log(self.high)))))
        return randomness.uniform(self.low, self.high)

    def points(self) -> list[Value]:
        """The values that a grid takes."""
        if self.kind == "choice":
            return self.values
        if self.kind == "int" and (self.count is None or self.count > self.high - self.low):
            return list(range(int(self.low), int(self.high) + 1))
        if self.count is None:
            raise WhetError(
                f"{self.place}: {self.name}: count is missing: method grid takes that many values from "
                f"{self.low:g} to {self.high:g}. Add it, such as count: 4, or use another search.method"
            )
        shares = [0.5] if self.count == 1 else [index / (self.count - 1) for index in range(self.count)]
        if self.kind == "log":
            ratio = self.high / self.low
            numbers = [self.high if share == 1 else self.low * ratio**share for share in shares]
        else:
            numbers = [self.low + (self.high - self.low) * share for share in shares]
        return [round(number) for number in numbers] if self.kind == "int" else [float(number) for number in numbers]

    def integers_or_choices(self) -> Sequence[Value]:
        """All values of a choice or a range of integers."""
        return self.values if self.kind == "choice" else range(int(self.low), int(self.high) + 1)

    def ends(self) -> list[Value]:
        """The values that must all be possible: those of a choice, or both ends of a range."""
        if self.kind == "choice":
            return self.values
        return [int(self.low), int(self.high)] if self.kind == "int" else [self.low, self.high]


@dataclass(frozen=True, slots=True)
class Space:
    """A recipe with ranges in it."""

    tree: Node
    parameters: tuple[Parameter, ...]
    """In an order in which each comes after those that it depends on."""
    kind: type[TrialConfig] = Config

    def assign(self, choose: Callable[[Parameter], Value]) -> Assignment:
        """Choose a value for every parameter that applies."""
        chosen: Assignment = {}
        for parameter in self.parameters:
            if self._applies(parameter, chosen):
                chosen[parameter.name] = choose(parameter)
        return chosen

    def grid(self) -> Iterator[Assignment]:
        """Every combination of the points of all parameters, the first parameter slowest."""
        return self._combine(lambda parameter: parameter.points())

    def combinations(self, most: int) -> list[Assignment] | None:
        """Every combination, where there are at most so many; None: there are more, or a range is continuous."""
        if any(parameter.kind in ("log", "float") for parameter in self.parameters):
            return None
        found = list(itertools.islice(self._combine(lambda parameter: parameter.integers_or_choices()), most + 1))
        return found if len(found) <= most else None

    def _combine(
        self, values: Callable[[Parameter], Sequence[Value]], index: int = 0, chosen: Assignment | None = None
    ) -> Iterator[Assignment]:
        chosen = chosen or {}
        if index == len(self.parameters):
            yield chosen
            return
        parameter = self.parameters[index]
        if not self._applies(parameter, chosen):
            yield from self._combine(values, index + 1, chosen)
            return
        for value in values(parameter):
            yield from self._combine(values, index + 1, {**chosen, parameter.name: value})

    def _applies(self, parameter: Parameter, chosen: Mapping[str, Value]) -> bool:
        for key, allowed in parameter.when:
            is_searched = any(other.name == key for other in self.parameters)
            if is_searched and key not in chosen:
                return False
            value = chosen[key] if is_searched else self.tree.at(parse_key(key)).value
            if not any(_is_same(value, each) for each in allowed):
                return False
        return True

    def recipe(self, assignment: Assignment) -> Node:
        """The recipe of a trial: values instead of ranges."""
        by_path = {parameter.path: parameter for parameter in self.parameters}

        def filled(items: Iterator[tuple[Any, Node]], path: ConfigPath) -> Iterator[tuple[Any, Node]]:
            for key, node in items:
                parameter = by_path.get((*path, key))
                if parameter is None:
                    yield key, fill(node, (*path, key))
                elif parameter.name in assignment:
                    yield key, parameter.node(assignment[parameter.name])

        def fill(node: Node, path: ConfigPath) -> Node:
            if isinstance(node.value, dict):
                return Node(dict(filled(iter(node.value.items()), path)), node.place)
            if isinstance(node.value, list):
                return Node([item for _, item in filled(enumerate(node.value), path)], node.place)
            return node

        return fill(self.tree, ())

    def config(self, assignment: Assignment) -> TrialConfig:
        """The configuration of a trial, or a WhetError if the combination is invalid."""
        return validate_config(self.kind, self.recipe(assignment))


def read_space(tree: Node) -> Space:
    """Find the ranges of a recipe, or of a script's arguments, and check that each of their values is part of a valid
    trial."""
    found = [_parse_range(node, path) for path, node in _find_ranges(tree, ())]
    is_script = isinstance(tree.value, dict) and "script" in tree.value
    space = Space(tree, tuple(_in_order_of_dependence(found, tree)), ScriptConfig if is_script else Config)
    _require_valid_trials(space)
    return space


def parse_key(key: str) -> ConfigPath:
    """The path of a key such as train.optimizer.lr or data.sources.0.weight."""
    return tuple(int(part) if part.isdecimal() and part.isascii() else part for part in key.split("."))


def _find_ranges(node: Node, path: ConfigPath) -> Iterator[tuple[ConfigPath, Node]]:
    if is_search_range(node):
        if not path:
            assert isinstance(node.value, dict)
            raise WhetError(
                f"{node.value['search'].place}: search: {node.plain()['search']!r} is not valid: expected a section "
                "with method, metric, max_trials, concurrent"
            )
        yield path, node
    elif isinstance(node.value, dict | list):
        if _lacks_kind(node):
            name, kind = ".".join(map(str, path)), "choice" if "values" in node.value else "log"
            raise WhetError(f"{node.place}: {name}.search: missing. Write the range as {_EXAMPLES[kind]}")
        inside = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, inner in inside:
            yield from _find_ranges(inner, (*path, key))


def _lacks_kind(node: Node) -> bool:
    """Whether this would be a range if it said which."""
    keys = node.value.keys() if isinstance(node.value, dict) else set()
    return keys <= {"low", "high", "count", "values", "when"} and ("values" in keys or {"low", "high"} <= keys)


def _parse_range(node: Node, path: ConfigPath) -> Parameter:
    given = node.value
    assert isinstance(given, dict)
    name = ".".join(map(str, path))

    def fail(key: str, reason: str) -> WhetError:
        place = given[key].place if key in given else node.place
        return WhetError(f"{place}: {name}.{key}: {reason}")

    kind = given["search"].value
    if not isinstance(kind, str) or kind not in _KEYS:
        raise fail("search", f"{kind!r} is not valid: expected log, float, int or choice, such as {_EXAMPLES['log']}")
    if path[0] == "search":
        raise fail("search", "the settings of the search itself cannot be searched. Give a value")
    for key in given:
        if key != "search" and key not in _KEYS[kind]:
            close = difflib.get_close_matches(key, _KEYS[kind], n=1, cutoff=0.6)
            hint = f"Did you mean {close[0]}?" if close else f"Known here: {', '.join(_KEYS[kind])}"
            raise fail(key, f"unknown key (value {given[key].plain(named=True)!r}). {hint}")
    required = [key for key in _KEYS[kind] if key not in ("count", "when", *given)]
    if required:
        raise fail(required[0], f"missing. Write the range as {_EXAMPLES[kind]}")
    when = tuple(_parse_condition(given["when"], name)) if "when" in given else ()
    if when and isinstance(path[-1], int):
        raise fail("when", "an item of a list is always there. Search the whole list with choice, or remove when")
    if kind == "choice":
        return Parameter(path, node.place, kind, choices=_parse_choices(given["values"], name), when=when)
    low, high = (_number(given[key], f"{name}.{key}", kind) for key in ("low", "high"))
    if low >= high:
        raise fail("high", f"{high:g} is not above low = {low:g}. Exchange them, or give one value instead of a range")
    if kind == "log" and low <= 0:
        raise fail("low", f"{low:g} has no logarithm. Give a number above 0, or use search: float")
    count = given["count"].value if "count" in given else None
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_COUNT):
        raise fail("count", f"{count!r} is not valid: expected an integer from 1 to {_MAX_COUNT}")
    return Parameter(path, node.place, kind, low, high, count, when=when)


def _number(node: Node, key: str, kind: str) -> float:
    value = node.value
    types = int if kind == "int" else int | float
    if isinstance(value, bool) or not isinstance(value, types) or not math.isfinite(value) or abs(value) >= 2**63:
        expected = "an integer" if kind == "int" else "a number"
        raise WhetError(f"{node.place}: {key}: {node.plain(named=True)!r} is not valid: expected {expected}")
    return int(value) if kind == "int" else float(value)


def _parse_choices(node: Node, name: str) -> tuple[tuple[Value, Node], ...]:
    if not isinstance(node.value, list) or not node.value:
        raise WhetError(
            f"{node.place}: {name}.values: {node.plain(named=True)!r} is not valid: expected a list of values"
        )
    if any(True for item in node.value for _ in _find_ranges(item, ("values",))):
        raise WhetError(
            f"{node.place}: {name}.values: a range inside a choice. Write it where its value would stand, with when: "
            f"{{{name}: VALUE}}"
        )
    labels: list[Value] = []
    for item in node.value:
        label = dump_yaml_inline(item.plain()) if isinstance(item.value, dict | list) else item.value
        if label in labels:  # as Optuna compares them: 1 is 1.0 and true
            raise WhetError(f"{item.place}: {name}.values: {item.plain(named=True)!r} is given twice. Remove one")
        labels.append(label)
    return tuple(zip(labels, node.value, strict=True))


def _parse_condition(node: Node, name: str) -> Iterator[tuple[str, tuple[Value, ...]]]:
    if not isinstance(node.value, dict) or not node.value:
        raise WhetError(
            f"{node.place}: {name}.when: {node.plain(named=True)!r} is not valid: expected settings and their values, "
            "such as {train.optimizer.name: muon}"
        )
    for key, given in node.value.items():
        values = given.value if isinstance(given.value, list) else [given]
        if not values or any(isinstance(each.value, dict | list) for each in values):
            raise WhetError(
                f"{given.place}: {name}.when.{key}: {given.plain(named=True)!r} is not valid: expected a value, or a "
                "list of values"
            )
        yield key, tuple(each.value for each in values)  # type: ignore[misc]


def _in_order_of_dependence(parameters: list[Parameter], tree: Node) -> Iterator[Parameter]:
    """Each parameter after those that its `when` names, otherwise as in the recipe."""
    by_name, done = {parameter.name: parameter for parameter in parameters}, set[str]()

    def visit(parameter: Parameter, above: tuple[str, ...]) -> Iterator[Parameter]:
        if parameter.name in above:
            raise WhetError(f"{parameter.place}: {parameter.name}.when: depends on itself: {' → '.join(above)}")
        if parameter.name in done:
            return
        for key, allowed in parameter.when:
            if key in by_name:
                yield from visit(by_name[key], (*above, parameter.name))
            _require_possible(parameter, key, allowed, by_name.get(key), tree)
        done.add(parameter.name)
        yield parameter

    for parameter in parameters:
        yield from visit(parameter, ())


def _require_possible(
    parameter: Parameter, key: str, allowed: tuple[Value, ...], other: Parameter | None, tree: Node
) -> None:
    """Refuse a condition that never holds."""
    where = f"{parameter.place}: {parameter.name}.when.{key}"
    path = parse_key(key)
    if other is None:
        node = tree.at(path)
        if node is tree.at(path[:-1]) or isinstance(node.value, dict | list):
            raise WhetError(
                f"{where}: the recipe neither searches {key} nor gives it a value. Write it out, or remove it"
            )
        possible: list[Value] = [node.value]
    elif other.kind == "choice":
        possible = other.values
    else:
        possible = [value for value in allowed if _is_number(value) and other.low <= value <= other.high]  # type: ignore[operator]
    for value in allowed:
        if not any(_is_same(value, each) for each in possible):
            known = (
                ", ".join(map(str, possible)) if other is None or other.kind == "choice" else "a number in its range"
            )
            raise WhetError(f"{where}: {value!r} is not among its values ({known}). Correct it, or remove it")


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _require_valid_trials(space: Space) -> None:
    """Raise the error of the recipe, or of a value that no combination makes valid: it would waste trials."""
    randomness = random.Random(0)
    _first_valid(space, {}, randomness)
    for parameter in space.parameters:
        for value in parameter.ends():
            _first_valid(space, {**_conditions(space, parameter), parameter.name: value}, randomness)


def _conditions(space: Space, parameter: Parameter) -> Assignment:
    """Values with which a parameter applies."""
    found: Assignment = {}
    for key, allowed in parameter.when:
        for other in space.parameters:
            if other.name == key:
                found |= {**_conditions(space, other), key: allowed[0]}
    return found


def _first_valid(space: Space, fixed: Assignment, randomness: random.Random) -> TrialConfig:
    """The first valid one of some random combinations with fixed values, or the error of the first."""
    first: WhetError | None = None
    for _ in range(_TRIES):
        try:
            return space.config(space.assign(lambda p: fixed[p.name] if p.name in fixed else p.draw(randomness)))
        except WhetError as error:
            first = first or error
    assert first is not None
    raise first
