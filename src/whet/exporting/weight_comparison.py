"""Compare every trained weight in an export with the trained model and with the weight before training.

Logits of a few conversations do not show an adapter that is missing in some expert. So each weight is computed here
once more, without peft's merge, rounded as the export is, and compared with what the export holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from whet.compat.transformers_private import join_checkpoint_tensors, to_checkpoint_tensors
from whet.core.console import progress
from whet.exporting.dtypes import ExportDtype
from whet.exporting.spec import ExportFindings
from whet.exporting.trained_model import TrainedModel
from whet.model.lora.trained_weights import TrainedWeight, trained_weights
from whet.model.weight_effect import WeightEffect, listed, relative_change

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_CPU_CHUNK, _CUDA_CHUNK = 2**18, 2**24
"""Elements that are compared at a time: on a CPU their squares in fp64 and differences take 10 MiB, and stay in the
cache."""
_MAX_DEVIATION = 0.1
"""Of the export from the trained weight, relative to what training changed, beyond rounding."""


class ExportedWeights(Protocol):
    """The weights of a reloaded export."""

    def tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """A weight of the model, by the names under which the export holds it or its parts."""

    def read(self, name: str) -> Tensor | None:
        """A weight of the export; None if it does not have it."""


class SafetensorsWeights:
    """The weights in the files of a model folder, where experts may be separate."""

    def __init__(self, folder: Path, trained: TrainedModel) -> None:
        files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        self._file_of: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self._language_model, self._joined = trained.language_model, trained.joined_weights()
        self._shapes = {weight.name: weight.shape for weight in trained.weights() if weight.name in self._joined}

    def tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        return {name: value} if name in self._joined else to_checkpoint_tensors(self._language_model, name, value)

    def read(self, name: str) -> Tensor | None:
        if name in self._joined:
            return self._read_part(name)
        return self._file_of[name].get_tensor(name) if name in self._file_of else None

    def _read_part(self, name: str) -> Tensor | None:
        """A weight that is a part of one tensor: the places of its elements there are those of their numbers."""
        numbers = {part: torch.full(self._shapes[part], -1) for part in self._joined[name]}
        numbers[name] = torch.arange(numbers[name].numel()).view(self._shapes[name])
        ((held, places),) = join_checkpoint_tensors(self._language_model, numbers).items()
        if held not in self._file_of or (found := self._file_of[held].get_tensor(held)).shape != places.shape:
            return None
        is_part = places >= 0
        value = found.new_empty(int(is_part.sum()))
        value[places[is_part]] = found[is_part]
        return value.view(self._shapes[name])


class LoadedWeights:
    """The weights of a model in memory, plain or with its adapter."""

    def __init__(self, language_model: nn.Module) -> None:
        self._adapted = {weight.name: weight for weight in trained_weights(language_model) if weight.base is not None}
        self._plain = dict(language_model.named_parameters())

    def tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        return {name: value}

    def read(self, name: str) -> Tensor | None:
        if name in self._adapted:
            weight = self._adapted[name]
            return weight.after(weight.before(Tensor.detach), Tensor.detach)
        found = self._plain.get(name)
        return None if found is None else found.detach()


@torch.no_grad()
def compare_weights(
    trained: TrainedModel, exported: ExportedWeights, dtype: ExportDtype, findings: ExportFindings
) -> None:
    """Sets findings.effect; a trained weight that the export does not have becomes a reason."""
    weights = trained_weights(trained.language_model)
    unchanged: list[str] = []
    wrong: list[str] = []
    with progress("comparing weights", len(weights), ends_with_line=False) as bar:
        for weight in weights:
            effect, equal_to_base = _compare_weight(weight, trained, exported, dtype)
            findings.effect.append(effect)
            if equal_to_base:
                experts = f" ({len(equal_to_base)} of {weight.experts} experts)" if weight.experts else ""
                unchanged.append(f"{weight.name}{experts}")
            elif effect.exported is False:
                wrong.append(weight.name)
            trained.trim_heap(4 * math.prod(weight.shape))
            bar.advance(1)
    if unchanged:
        findings.reasons.append(f"weights that were trained equal those of the base: {listed(unchanged)}")
    if wrong:
        findings.reasons.append(f"weights are not those that were trained: {listed(wrong)}")


def _compare_weight(
    weight: TrainedWeight, trained: TrainedModel, exported: ExportedWeights, dtype: ExportDtype
) -> tuple[WeightEffect, list[int]]:
    """The effect on one weight, and the experts (0 for a weight without) that equal the base though they should not."""
    device = trained.device if trained.device.type == "cuda" else torch.device("cpu")  # others may lack fp64
    before = trained.before(weight, device)
    after = weight.after(before, trained.value).to(device)
    is_known = before is not None
    before = after if before is None else before.to(device)
    units = weight.experts or 1
    counts = _Counts(units, device)
    parts = exported.tensors(weight.name, before).items(), exported.tensors(weight.name, after).items()
    for (name, old), (_, new) in zip(*parts, strict=True):
        found = exported.read(name)
        if found is None or found.numel() != new.numel():
            counts.is_missing = True
            continue
        found = found.to(device)
        named = _EXPERT.search(name) if weight.experts else None
        first, rows = (0, units) if named is None else (int(named[1]), 1)
        for unit in range(rows):
            stacked = rows > 1
            old_, new_, found_ = (each[unit] if stacked else each for each in (old, new, found.view(new.shape)))
            counts.add(first + unit, old_, new_, found_, dtype)
    is_exported = not counts.is_missing and counts.deviation_beyond(dtype) <= _MAX_DEVIATION
    if not is_known:
        return WeightEffect(weight.name, weight.shape, None, None, exported=is_exported), []
    change = relative_change(counts.squares.sum().item(), counts.base_squares.sum().item())
    untouched = (counts.updates == 0).nonzero().flatten().tolist()
    equal_to_base = ((counts.visible > 0) & (counts.differing == 0)).nonzero().flatten().tolist()
    effect = WeightEffect(
        weight.name, weight.shape, change, len(untouched) < units,
        exported=is_exported and not equal_to_base,
        updates=int(counts.updates.sum()), lost=int((counts.updates - counts.visible).sum()),
        experts=weight.experts, untouched_experts=untouched if weight.experts else [],
    )  # fmt: skip
    return effect, equal_to_base


class _Counts:
    """What the comparison of a weight adds up, for each expert or for the whole."""

    def __init__(self, units: int, device: torch.device) -> None:
        self.updates, self.visible, self.differing = torch.zeros(3, units, dtype=torch.int64, device=device)
        """Elements that training changed; that changed still after rounding; that differ from the base in the export"""
        sums = torch.zeros(5, units, dtype=torch.float64, device=device)
        self.squares, self.base_squares, self.deviations, self.norms, self.elements = sums
        """Squared norms of the update, the base, the export's deviation from the trained weight, and the latter."""
        self.is_missing = False

    def add(self, unit: int, old: Tensor, new: Tensor, found: Tensor, dtype: ExportDtype) -> None:
        """Add a part of one expert's weight before training, now, and in the export."""
        for before, after, exported in _chunks(old, new, found):
            rounded, rounded_before = after.to(dtype.torch_dtype), before.to(dtype.torch_dtype)
            self.elements[unit] += after.numel()
            self.updates[unit] += (after != before).sum()
            self.visible[unit] += (rounded != rounded_before).sum()
            self.differing[unit] += (exported != rounded_before.to(exported.dtype)).sum()
            self.squares[unit] += _square(after - before)
            self.base_squares[unit] += _square(before)
            self.norms[unit] += _square(after)
            self.deviations[unit] += _square(exported.to(after.dtype) - after)

    def deviation_beyond(self, dtype: ExportDtype) -> float:
        """The largest distance of an expert in the export from the trained one that rounding does not explain, relative
        to what training changed."""
        limits = torch.finfo(dtype.torch_dtype)
        relative = limits.eps if dtype.rounding is None else dtype.rounding
        rounding = relative * self.norms.sqrt() + limits.eps * limits.tiny * self.elements.sqrt()  # subnormal numbers
        beyond = (self.deviations.sqrt() - rounding).clamp(min=0)
        return float((beyond / self.squares.sqrt().clamp(min=torch.finfo().tiny)).nan_to_num(torch.inf).max())


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    chunk = _CUDA_CHUNK if tensors[0].is_cuda else _CPU_CHUNK
    return zip(*(tensor.reshape(-1).split(chunk) for tensor in tensors), strict=True)


def _square(values: Tensor) -> Tensor:
    """The squared norm of a vector. `values.double().square().sum()` takes ten times as long: it writes the squares."""
    values = values.double()
    return torch.dot(values, values)
