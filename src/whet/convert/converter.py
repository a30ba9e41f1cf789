"""Write a foreign checkpoint as a Hugging Face folder, load it back and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.convert.foreign_checkpoint import ForeignCheckpoint, TargetTensor, expected_shapes
from whet.core.errors import RunFailedError, WhetError, disk_error, first_line
from whet.core.files import atomic_dir, hash_file, require_disk_space, write_json
from whet.exporting.safetensors_writer import PreallocatedSafetensorsWriter
from whet.exporting.verification import compare_to_reference, compute_all_logits, hash_safetensors

_PROBE_COUNT, _PROBE_LENGTH = 2, 24
_SAVED_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""What files call a tensor that newer models of transformers call otherwise; all versions read it by that name."""


def convert_checkpoint(
    kind: str, source: Path, checkpoint: ForeignCheckpoint, tokenizer: Any | None, out: Path
) -> dict[str, Any]:
    """Write `out` and give its certificate. Nothing is left there if a tensor is missing, left over or wrong."""
    targets = {target.name: target for target in checkpoint.targets()}
    shapes = expected_shapes(checkpoint.config)
    _require_all_tensors(source, targets, shapes)
    dtype = checkpoint.dtype
    try:
        require_disk_space(
            out, sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize, "the imported model"
        )
        with atomic_dir(out) as folder:
            _write_weights(folder, source, targets, shapes, dtype, _SAVED_NAMES.get(checkpoint.config.model_type, {}))
            checkpoint.config.dtype = dtype
            checkpoint.config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            certificate = {
                "kind": kind,
                "source": str(source),
                **_verify_folder(folder, checkpoint, targets),
                "dtype": str(dtype).removeprefix("torch."),
                "mapped": {target.name: list(target.sources) for target in targets.values()},
                "left_out": checkpoint.notes.left_out,
                "averaged": checkpoint.notes.averaged,
                "assumed": checkpoint.notes.assumed,
                "sources": {str(file.relative_to(source)): hash_file(file, sha256=True) for file in checkpoint.files},
                "files": hash_safetensors(folder),
            }
            if not certificate["verified"]:
                raise RunFailedError(
                    f"{source}: the imported model does not compute what the checkpoint does: logits differ by "
                    f"{certificate['max_logit_difference']:.3g}. Does the configuration belong to it? Nothing was "
                    "written"
                )
            write_json(folder / "certificate.json", certificate)
    except Exception as error:
        raise disk_error(error, "importing", out) or error from None
    return certificate


def _require_all_tensors(source: Path, targets: dict[str, TargetTensor], shapes: dict[str, tuple[int, ...]]) -> None:
    missing, over = [n for n in shapes if n not in targets], [n for n in targets if n not in shapes]
    if over:
        raise WhetError(
            f"{source}: {_describe_sources(targets[over[0]])} would be {over[0]}, which a model of this configuration does not have "
            f"({len(over)} such tensors). Give the configuration that belongs to the checkpoint: --config FILE"
        )
    if missing:
        raise WhetError(
            f"{source}: nothing there gives {missing[0]} ({len(missing)} of {len(shapes)} tensors are missing). Is the "
            "checkpoint complete, and does the configuration belong to it (--config FILE)?"
        )


def _write_weights(
    folder: Path, source: Path, targets: dict[str, TargetTensor], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype,
    called: dict[str, str],
) -> None:  # fmt: skip
    shards = PreallocatedSafetensorsWriter(folder, {called.get(name, name): shapes[name] for name in targets}, dtype)
    for target in targets.values():
        tensor = _make_tensor(source, target)
        if tuple(tensor.shape) != shapes[target.name]:
            raise WhetError(
                f"{source}: {_describe_sources(target)} gives {target.name} of the shape {list(tensor.shape)}, and the configuration "
                f"asks for {list(shapes[target.name])}. Give the one that belongs to the checkpoint: --config FILE"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WhetError(
                f"{source}: {_describe_sources(target)} holds numbers that are not finite: the training had failed by then"
            )
        shards.write(called.get(target.name, target.name), tensor)
        del tensor  # or it would be there beside the next


def _make_tensor(source: Path, target: TargetTensor) -> Tensor:
    try:
        return target.make()
    except (RuntimeError, ValueError) as error:
        first = first_line(error)
        raise WhetError(
            f"{source}: {_describe_sources(target)} does not fit ({first}), so {target.name} cannot be made"
        ) from None


def _describe_sources(target: TargetTensor) -> str:
    return target.sources[0] if len(target.sources) == 1 else f"{target.sources[0]} with {len(target.sources) - 1} more"


def _verify_folder(folder: Path, checkpoint: ForeignCheckpoint, targets: dict[str, TargetTensor]) -> dict[str, Any]:
    """Loaded back by transformers in fp32, with nothing missing; the same logits, or the same tensors bit by bit."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = sorted(str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in found[kind])
    if wrong:
        raise RunFailedError(
            f"{folder.name}: transformers does not load what was written: {wrong[0]}. Nothing was written"
        )
    probes = _random_probes(int(checkpoint.config.get_text_config().vocab_size))
    own = [checkpoint.logits(ids) for ids in probes]
    if all(rows is not None for rows in own):
        wanted = torch.cat([rows for rows in own if rows is not None])
        return {"compared": "logits", **compare_to_reference(wanted, compute_all_logits(model, probes), torch.float32)}
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    equal = all(
        torch.equal(held[target.name].detach(), target.make().float())
        for target in targets.values()
        if target.name in held
    )
    known = [name for name in targets if name in held]
    return {
        "compared": "tensors",
        "verified": equal and bool(known),
        "tensors": len(known),
        "max_logit_difference": 0.0,
    }


def _random_probes(vocabulary: int) -> list[list[int]]:
    drawn = torch.randint(vocabulary, (_PROBE_COUNT, _PROBE_LENGTH), generator=torch.Generator().manual_seed(0))
    return [list(map(int, row)) for row in drawn]
