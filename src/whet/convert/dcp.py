"""torch.distributed.checkpoint folders of a transformers model, written by any number of ranks.

MindSpeed-LLM's FSDP2 trainer (mindspeed_llm/fsdp2/checkpoint of Ascend/MindSpeed-LLM) saves {"model": …, "optimizer":
…} to `global_step_N/`, so a weight is called `model.` plus its name in transformers; many other trainers do the same.
Tensors are read one by one, each assembled from the shards of the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from whet.checkpoint.dcp_storage import CheckpointReadError, SafeStorageReader, load_tensors
from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, expected_shapes, read_hf_config
from whet.core.errors import WhetError

_KNOWN_PREFIXES = (
    "model.",
    "",
    "module.",
    "model.module.",
    "app.model.",
    "model.language_model.",
    "state_dict.",
    "model_state.",
)
_NON_WEIGHT_KEYS = re.compile(
    r"(optim|optimizer|app\.optim|lr_scheduler|scheduler|dataloader|train_state|rng|extra_state|step)\w*(\.|$)"
)


class _CachedMetadataReader(SafeStorageReader):
    """Reads the metadata once instead of once per tensor."""

    metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            self.metadata = super().read_metadata(*args, **kwargs)
        return self.metadata


class DcpCheckpoint:
    """A folder with `.metadata` and `.distcp` files."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        self.folder, self.notes = _newest_step_folder(folder), ConversionNotes()
        file = config or next((f for f in (self.folder / "config.json", folder / "config.json") if f.is_file()), None)
        if file is None:
            raise WhetError(f"{folder}: config.json is missing. Give the model's: --config FILE")
        self.config: Any = read_hf_config(file)
        self._reader = _CachedMetadataReader(self.folder)
        metadata = self._reader.read_metadata()
        self._entries = {n: e for n, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
        self.files = self._require_all_files(metadata)
        self._names = self._match_names(expected_shapes(self.config))
        self.dtype = torch.bfloat16
        dtypes = {self._entries[name].properties.dtype for name in self._names.values()}
        if dtypes == {torch.float16}:
            self.dtype = torch.float16
        for dtype in dtypes:
            self.dtype = torch.promote_types(self.dtype, dtype)

    def _require_all_files(self, metadata: Any) -> list[Path]:
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise WhetError(f"{path}: listed in .metadata but missing. Copy the files of all ranks")
            if path.stat().st_size < end:
                raise WhetError(f"{path}: truncated, {path.stat().st_size:,} of {end:,} bytes. Copy it again")
        return [self.folder / ".metadata", *(self.folder / name for name in sorted(ends))]

    def _match_names(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
        """Name in transformers → name in the checkpoint, with the prefix that matches most tensors."""
        best = max(_KNOWN_PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in self._entries for name in shapes))
        names = {name: f"{best}{name}" for name in shapes if f"{best}{name}" in self._entries}
        if not names:
            shown = ", ".join(sorted(self._entries)[:3]) or "no tensors"
            raise WhetError(
                f"{self.folder}: no tensor is called {next(iter(shapes))}, with or without a known prefix; it has "
                f"{shown}. Give the configuration of this checkpoint: --config FILE"
            )
        is_tied = bool(getattr(self.config.get_text_config(), "tie_word_embeddings", False))
        tied = {name for name in ("lm_head.weight", "embed_out.weight") if is_tied and name not in shapes}
        for name in sorted(set(self._entries) - set(names.values())):
            if name.removeprefix(best) in tied:
                self.notes.left_out[name] = "tied to the embedding"
            elif _NON_WEIGHT_KEYS.match(name) or name.startswith("optimizer."):
                self.notes.left_out.setdefault(f"{name.partition('.')[0]}.*", "not weights")
            else:
                raise WhetError(
                    f"{self.folder}: the configured model has no tensor {name}, and no tensor may be dropped. Give the "
                    "configuration of this checkpoint: --config FILE"
                )
        return names

    def targets(self) -> list[TargetTensor]:
        return [TargetTensor(name, (own,), lambda own=own: self._read(own)) for name, own in self._names.items()]  # type: ignore[misc]

    def _read(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load_tensors({name: tensor}, self._reader)
        except CheckpointReadError as error:
            raise WhetError(f"{self.folder}: cannot read {name} ({error}). A file is damaged: copy it again") from None
        return tensor

    def logits(self, ids: Sequence[int]) -> None:
        """None: tensors are stored as transformers has them and compared directly."""
        return


def _newest_step_folder(folder: Path) -> Path:
    """The folder itself, or its newest `global_step_N`."""
    if not folder.is_dir():
        raise WhetError(f"{folder}: no such folder")
    if (folder / ".metadata").is_file():
        return folder
    found = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := re.fullmatch(r"(?:global_)?step[_-](\d+)", path.name))
    ]
    complete = [(step, path) for step, path in found if (path / ".metadata").is_file()]
    if not complete:
        raise WhetError(
            f"{folder}: not a complete torch.distributed.checkpoint, .metadata is missing here and in global_step_N "
            "folders"
        )
    return max(complete)[1]
