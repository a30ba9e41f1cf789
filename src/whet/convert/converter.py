"""`whet import checkpoint`: write a checkpoint of another trainer as a Hugging Face folder, load it back and
compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.convert.dcp import DcpCheckpoint
from whet.convert.foreign_checkpoint import ForeignCheckpoint, TargetTensor, expected_shapes
from whet.convert.nanochat import NanochatCheckpoint, find_tokenizer_pickle, load_nanochat_tokenizer
from whet.convert.neox import NeoXCheckpoint
from whet.core.checksums import write_hashed_json
from whet.core.console import info, silence_libraries, warn
from whet.core.errors import RunFailedError, WhetError, first_line, os_error
from whet.core.files import atomic_dir, hash_file, require_disk_space, user_path
from whet.exporting.dtypes import export_dtype_of
from whet.exporting.safetensors_writer import StreamingSafetensorsWriter
from whet.exporting.spec import ExportFindings
from whet.exporting.trained_model import compute_logits
from whet.exporting.verification import compare_logits
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import hash_model_folder

_PROBE_COUNT, _PROBE_LENGTH = 2, 24
_MIN_SAME_NEXT_TOKEN = 0.95
_SAVED_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""model_type → names in files of tensors that newer versions of transformers renamed in memory; all versions read
these."""


def import_checkpoint(
    kind: str, folder: Path, out: Path, config: Path | None, tokenizer: Path | None, average_norms: bool,
    step: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the model folder `out` from a checkpoint of `kind`: neox, nanochat, mindspeed or dcp."""
    silence_libraries()
    folder, out = user_path(folder), user_path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WhetError(f"--out {out}: not an empty folder. Choose another one")
    if config is not None and not config.is_file():
        raise WhetError(f"--config {config}: no such file")
    if average_norms and kind != "neox":
        raise WhetError(f"--average-norms: only neox checkpoints have norms per rank, not {kind}. Leave it out")
    if step is not None and kind != "nanochat":
        raise WhetError(f"--step: only nanochat keeps several steps in one folder, not {kind}. Give the step's folder")
    loaded: Any = None
    if kind == "nanochat" and (pickled := find_tokenizer_pickle(folder, tokenizer)) is not None:
        loaded = load_nanochat_tokenizer(pickled)
        info(f"tokenizer: {pickled}")
    elif tokenizer is not None:
        loaded = load_tokenizer(ModelConfig(path=str(tokenizer), tokenizer=str(tokenizer)))
    checkpoint: ForeignCheckpoint
    if kind == "neox":
        checkpoint = NeoXCheckpoint(folder, config, average_norms)
    elif kind == "nanochat":
        checkpoint = NanochatCheckpoint(folder, config, step)
    else:
        checkpoint = DcpCheckpoint(folder, config)
    if loaded is not None:
        rows = checkpoint.config.get_text_config().vocab_size
        if len(loaded) > rows:
            raise WhetError(
                f"--tokenizer {tokenizer}: it has {len(loaded):,} tokens, but the checkpoint has only {rows:,} "
                "embedding rows. Give the tokenizer that the model was trained with"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(loaded, name) is not None:
                setattr(checkpoint.config, name, getattr(loaded, name))
    certificate = convert_checkpoint(kind, folder, checkpoint, loaded, out)
    if certificate["averaged"]:
        worst = max(certificate["averaged"].values())
        warn(f"{len(certificate['averaged'])} norms differed between ranks by up to {worst:.3g} and were averaged")
    if loaded is None:
        warn("no --tokenizer was given, so the folder has no tokenizer: set model.tokenizer to train")
    outcome = (
        f"largest logit difference {certificate['max_logit_difference']:.1e}"
        if certificate["compared"] == "logits"
        else f"{certificate['tensors']} tensors are bit-identical"
    )
    info(f"imported to {out}: {len(certificate['mapped'])} tensors, loaded back and verified: {outcome}")
    return {"imported": str(out), "certificate": certificate}


def convert_checkpoint(
    kind: str, source: Path, checkpoint: ForeignCheckpoint, tokenizer: Any | None, out: Path
) -> dict[str, Any]:
    """Write the model folder `out` and return its certificate. Writes nothing if a tensor is missing, left over or
    misshapen."""
    targets = {target.name: target for target in checkpoint.targets()}
    shapes = expected_shapes(checkpoint.config)
    _require_all_tensors(source, targets, shapes)
    dtype = checkpoint.dtype
    try:
        size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        require_disk_space(out, size, "the imported model")
        with atomic_dir(out) as folder:
            saved_names = _SAVED_NAMES.get(checkpoint.config.model_type, {})
            writer = StreamingSafetensorsWriter(folder)
            for target in targets.values():
                tensor = _build_tensor(source, target, shapes[target.name])
                writer.add(saved_names.get(target.name, target.name), tensor.detach().to("cpu", dtype))
                del tensor  # before the next one is built
            writer.close()
            checkpoint.config.dtype = dtype
            checkpoint.config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            certificate = {
                "kind": kind,
                "source": str(source),
                **_verify_folder(source, folder, checkpoint, targets),
                "dtype": str(dtype).removeprefix("torch."),
                "mapped": {target.name: list(target.sources) for target in targets.values()},
                "left_out": checkpoint.notes.left_out,
                "averaged": checkpoint.notes.averaged,
                "assumed": checkpoint.notes.assumed,
                "sources": {str(file.relative_to(source)): hash_file(file, sha256=True) for file in checkpoint.files},
                "files": hash_model_folder(folder),
            }
            write_hashed_json(folder / "certificate.json", certificate)
    except Exception as error:
        raise os_error(error, "importing", out) or error from None
    return certificate


def _require_all_tensors(source: Path, targets: dict[str, TargetTensor], shapes: dict[str, tuple[int, ...]]) -> None:
    missing, extra = [name for name in shapes if name not in targets], [name for name in targets if name not in shapes]
    if extra:
        raise WhetError(
            f"{source}: {_describe_sources(targets[extra[0]])} maps to {extra[0]}, which the configured model does not "
            f"have ({len(extra)} such tensors). Give the configuration of this checkpoint: --config FILE"
        )
    if missing:
        raise WhetError(
            f"{source}: no tensor maps to {missing[0]} ({len(missing)} of {len(shapes)} are missing). Copy the whole "
            "checkpoint, and give its own configuration: --config FILE"
        )


def _build_tensor(source: Path, target: TargetTensor, shape: tuple[int, ...]) -> Tensor:
    try:
        tensor = target.build()
    except (RuntimeError, ValueError) as error:
        raise WhetError(
            f"{source}: cannot build {target.name} from {_describe_sources(target)} ({first_line(error)})"
        ) from None
    if tuple(tensor.shape) != shape:
        raise WhetError(
            f"{source}: {_describe_sources(target)} gives {target.name} the shape {list(tensor.shape)}, but the "
            f"configuration has {list(shape)}. Give the configuration of this checkpoint: --config FILE"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise WhetError(
            f"{source}: {_describe_sources(target)} has values that are not finite: the training had diverged. Import "
            "an earlier checkpoint"
        )
    return tensor


def _describe_sources(target: TargetTensor) -> str:
    return target.sources[0] if len(target.sources) == 1 else f"{target.sources[0]} and {len(target.sources) - 1} more"


def _verify_folder(
    source: Path, folder: Path, checkpoint: ForeignCheckpoint, targets: dict[str, TargetTensor]
) -> dict[str, Any]:
    """Load the folder with transformers in fp32 and compare logits with the checkpoint's own, or else all tensors."""
    from transformers import AutoModelForCausalLM

    model, loading_info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    problems = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = sorted(str(key) for problem in problems for key in loading_info[problem])
    if wrong:
        raise RunFailedError(f"{source}: transformers does not load the tensor {wrong[0]}. Nothing was written")
    vocabulary = int(checkpoint.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    probes: list[list[int]] = torch.randint(vocabulary, (_PROBE_COUNT, _PROBE_LENGTH), generator=generator).tolist()
    reference = [logits for ids in probes if (logits := checkpoint.logits(ids)) is not None]
    if len(reference) == len(probes):
        expected, findings = torch.cat(reference), ExportFindings()
        dtype = export_dtype_of(torch.float32)
        compare_logits(compute_logits(model, probes), expected, dtype, findings, _MIN_SAME_NEXT_TOKEN)
        if findings.reasons:
            raise RunFailedError(
                f"{source}: the imported model does not match the checkpoint: {findings.reasons[0]}. Check that "
                "the configuration belongs to it (--config FILE). Nothing was written"
            )
        return {
            "compared": "logits",
            "verified": True,
            "tokens": len(expected),
            "max_logit_difference": findings.max_logit_difference,
            "same_next_token": findings.same_next_token,
        }
    loaded = dict(model.named_parameters()) | dict(model.named_buffers())
    compared = [target for target in targets.values() if target.name in loaded]
    for target in compared:
        if not torch.equal(loaded[target.name].detach(), target.build().float()):
            raise RunFailedError(
                f"{source}: {target.name} differs from {_describe_sources(target)} after loading. Nothing was written"
            )
    if not compared:
        raise RunFailedError(f"{source}: transformers loads no tensor of the checkpoint. Nothing was written")
    return {"compared": "tensors", "verified": True, "tensors": len(compared), "max_logit_difference": 0.0}
