"""The files of a GPT-NeoX checkpoint: every tensor of a layer, from every tensor-parallel rank.

Two layouts, as gpt-neox's tools/ckpts/convert_neox_to_hf.py describes them: with a pipeline, a file for each layer and
rank (`layer_05-model_01-model_states.pt`); without one, a file for each rank (`mp_rank_01_model_states.pt`) whose
`module` names tensors `sequential.5.…`. Layer 0 is the embedding, 1 nothing, then L transformer layers, nothing, the
last norm (L + 3) and the output (L + 4).
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.checkpoint.convert.pickled import naming, read_pt
from whet.core.errors import WhetError

UP, DOWN = ("mlp.linear1", "mlp.dense_h_to_4h"), ("mlp.linear2", "mlp.dense_4h_to_h", "mlp.w2")
"""The MLP's matrices by their newer and older names."""
COMPUTED = "attention.rotary_emb.inv_freq"
"""Kept by some versions, and no weight."""
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SEQUENTIAL = re.compile(r"(?:.*\.)?sequential\.(\d+)\.(.+)")


class NeoXFiles:
    """By layer and name, the tensors of all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = _newest(folder)
        layers = _numbered(self.folder, _LAYER)
        self._by_layer = bool(layers)
        if layers:
            self.ranks = 1 + max(rank for _, rank in layers)
            self._paths = {layer: self._of_ranks(layers, layer) for layer in sorted({layer for layer, _ in layers})}
            self.files = [path for paths in self._paths.values() for path in paths]
        else:
            ranks = {(0, rank): path for (rank,), path in _numbered(self.folder, _RANK).items()}
            if not ranks:
                raise WhetError(
                    f"{folder}: no files layer_XX-model_YY-model_states.pt or mp_rank_XX_model_states.pt there: it is "
                    "no checkpoint of GPT-NeoX. Give the folder global_stepN, or the one above it with the file latest"
                )
            self.ranks = 1 + max(rank for _, rank in ranks)
            self.files = self._of_ranks(ranks, 0)
        self._open = lru_cache(maxsize=self.ranks if self._by_layer else None)(self._read)
        self.keys = self._all_keys()

    def _of_ranks(self, found: dict[Any, Path], layer: int) -> list[Path]:
        missing = [rank for rank in range(self.ranks) if (layer, rank) not in found]
        if missing:
            name = f"layer_{layer:02d}-model_{missing[0]:02d}-" if self._by_layer else f"mp_rank_{missing[0]:02d}_"
            raise WhetError(
                f"{self.folder}/{name}model_states.pt: missing, though there are files of rank {self.ranks - 1}. Copy "
                "the files of all ranks"
            )
        return [found[layer, rank] for rank in range(self.ranks)]

    def _read(self, path: Path) -> dict[tuple[int, str], Tensor]:
        """(layer, name) → tensor; mapped, so this costs no memory."""
        content = read_pt(path)
        with naming(path, "the dictionary of tensors"):
            if self._by_layer:
                layer = int(_LAYER.fullmatch(path.name)[1])  # type: ignore[index]
                return {(layer, name): value for name, value in content.items() if isinstance(value, Tensor)}
            found = {}
            for name, value in content["module"].items():
                match = _SEQUENTIAL.fullmatch(name)
                if match is None:
                    raise WhetError(f"{path}: the tensor {name} has no place in GPT-NeoX's sequence of layers")
                if isinstance(value, Tensor):
                    found[int(match[1]), match[2]] = value
            return found

    def _all_keys(self) -> dict[int, set[str]]:
        keys: dict[int, set[str]] = {}
        for path in self.files:
            for layer, name in self._open(path):
                keys.setdefault(layer, set()).add(name)
        return keys

    def paths(self, layer: int) -> list[Path]:
        return self._paths[layer] if self._by_layer else self.files

    def tensors(self, layer: int, name: str) -> list[Tensor]:
        """Of each rank."""
        found = []
        for path in self.paths(layer):
            tensor = self._open(path).get((layer, name))
            if tensor is None:
                raise WhetError(
                    f"{path}: the tensor {name} of layer {layer} is missing there, though other ranks have it"
                )
            found.append(tensor)
        shapes = {tuple(tensor.shape) for tensor in found}
        if len(shapes) > 1:
            raise WhetError(f"{self.folder}: {name} of layer {layer} has other shapes on other ranks: {sorted(shapes)}")
        return found

    def describe(self, layer: int, name: str) -> tuple[str, ...]:
        return tuple(
            f"{path.name}:{name if self._by_layer else f'sequential.{layer}.{name}'}" for path in self.paths(layer)
        )


def _newest(folder: Path) -> Path:
    """A step's folder, or the one that `latest` names."""
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    latest = folder / "latest"
    if latest.is_file():
        inner = folder / latest.read_text(errors="replace").strip()
        if not inner.is_dir():
            raise WhetError(f"{latest}: it names {inner.name}, which is not there. Give the folder of a step that is")
        return inner
    return folder


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, ...], Path]:
    found = ((pattern.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {tuple(map(int, match.groups())): path for match, path in found if match}
