"""torch.distributed.checkpoint folders of a transformers model, written by any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from whet.checkpoint.dcp_storage import CheckpointReadError, SafeStorageReader, load_tensors
from whet.convert.foreign_checkpoint import ConversionNotes, TargetTensor, expected_shapes
from whet.convert.neox_files import read_hf_config
from whet.core.errors import WhetError

# torch's distributed checkpoints of a transformers model, written by any number of processes.
#
# MindSpeed-LLM's FSDP2 trainer saves {"model": …, "optimizer": …} to `global_step_N/` (mindspeed_llm/fsdp2/checkpoint of
# Ascend/MindSpeed-LLM), so that weights are called `model.` and their name in transformers; so do many others. Tensors
# are read one by one, each put together from the parts that processes wrote.

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
    """Reads the metadata once, not for every tensor."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


class DcpCheckpoint:
    """A folder with `.metadata` and `.distcp` files."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        self.folder, self.notes = _newest_step_folder(folder), ConversionNotes()
        file = config or next((f for f in (self.folder / "config.json", folder / "config.json") if f.is_file()), None)
        if file is None:
            raise WhetError(f"{folder}: no config.json there. Give that of the model: --config FILE")
        self.config: Any = read_hf_config(file)
        self._reader = _CachedMetadataReader(self.folder)
        metadata = self._reader.read_metadata()
        self._entries = {n: e for n, e in metadata.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
        self.files = self._all_files(metadata)
        self._names = self._matched(expected_shapes(self.config))
        self.dtype = torch.bfloat16
        kinds = {self._entries[name].properties.dtype for name in self._names.values()}
        if kinds == {torch.float16}:
            self.dtype = torch.float16
        for kind in kinds:
            self.dtype = torch.promote_types(self.dtype, kind)

    def _all_files(self, metadata: Any) -> list[Path]:
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if path.resolve().parent != self.folder.resolve() or not path.is_file():
                raise WhetError(f"{path}: named in .metadata and not there. Copy the files of all processes")
            if path.stat().st_size < end:
                raise WhetError(f"{path}: cut off, {path.stat().st_size:,} of {end:,} bytes. Copy it again")
        return [self.folder / ".metadata", *(self.folder / name for name in sorted(ends))]

    def _matched(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
        """For each tensor of the model its name here, by the prefix that finds most of them."""
        best = max(_KNOWN_PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in self._entries for name in shapes))
        names = {name: f"{best}{name}" for name in shapes if f"{best}{name}" in self._entries}
        if not names:
            shown = ", ".join(sorted(self._entries)[:3]) or "no tensors"
            wanted = next(iter(shapes))
            raise WhetError(
                f"{self.folder}: nothing there is called like {wanted} with something before it; it has {shown}"
            )
        for name in sorted(set(self._entries) - set(names.values())):
            tied = name.removeprefix(best) in self._tied(shapes)
            if tied:
                self.notes.left_out[name] = "the embedding once more"
            elif _NON_WEIGHT_KEYS.match(name) or name.startswith("optimizer."):
                self.notes.left_out.setdefault(f"{name.partition('.')[0]}.*", "no weights")
            else:
                raise WhetError(
                    f"{self.folder}: the tensor {name} has no place in a model of this configuration. Nothing may be "
                    "lost on the way: give the configuration that belongs to it (--config FILE)"
                )
        return names

    def _tied(self, shapes: dict[str, tuple[int, ...]]) -> set[str]:
        is_tied = bool(getattr(self.config.get_text_config(), "tie_word_embeddings", False))
        return {name for name in ("lm_head.weight", "embed_out.weight") if is_tied and name not in shapes}

    def targets(self) -> list[TargetTensor]:
        return [TargetTensor(name, (own,), lambda own=own: self._read(own)) for name, own in self._names.items()]  # type: ignore[misc]

    def _read(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            load_tensors({name: tensor}, self._reader)
        except CheckpointReadError as error:
            raise WhetError(
                f"{self.folder}: {name} cannot be read ({error}). A file was damaged: copy it again"
            ) from None
        return tensor

    def logits(self, ids: Sequence[int]) -> None:
        """The tensors are kept as transformers has them: they are compared bit by bit instead."""
        return


def _newest_step_folder(folder: Path) -> Path:
    """Itself, or its newest `global_step_N`."""
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
            f"{folder}: no .metadata there or in a folder global_step_N, so it is no complete checkpoint of torch's"
        )
    return max(complete)[1]
