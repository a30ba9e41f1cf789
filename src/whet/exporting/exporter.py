"""Write an export, load it back, and publish it only if it matches the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whet.core.errors import disk_error
from whet.core.files import atomic_dir, hash_file, require_disk_space, write_json
from whet.exporting.gguf_file import GGUFFormat
from whet.exporting.hf_folder import HFFolderFormat
from whet.exporting.megatron import MegatronFormat
from whet.exporting.peft_adapter import PeftAdapterFormat
from whet.exporting.spec import (
    EXPORT_DTYPES,
    Certificate,
    ExportDtype,
    ExportFindings,
    ExportFormat,
    ExportMismatchError,
    ExportSpec,
    compare_logits,
    export_dtype_of,
)

EXPORT_FORMATS: dict[str, ExportFormat] = {
    "merged": HFFolderFormat(),
    "adapter": PeftAdapterFormat(),
    "gguf": GGUFFormat(),
    "megatron": MegatronFormat(),
}
_WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "**/*.pt")


def write_export(order: ExportSpec, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Write the trained model as `kind` to `folder`, which appears only if it passes.

    `probes` are conversations as ids; the exported model must give the logits of the trained one on them.
    """
    form = EXPORT_FORMATS[kind]
    try:
        require_disk_space(folder, form.size(order), "the export")
        with atomic_dir(folder) as temporary:
            form.write(order, temporary)
            certificate = verify_export(order, kind, temporary, probes)
            write_json(temporary / "certificate.json", certificate.as_dict())
            if not certificate.verified:
                raise ExportMismatchError(
                    f"{folder}: the exported model is not the trained one: {'; '.join(certificate.reasons)}. Nothing "
                    "was exported; the checkpoints are untouched"
                )
    except Exception as error:
        raise disk_error(error, "exporting", folder) or error from None
    return certificate


def verify_export(order: ExportSpec, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Load an export back and compare it; what is wrong with it is in the certificate."""
    form, findings = EXPORT_FORMATS[kind], ExportFindings()
    wanted = order.trained.logits(probes)
    found = form.look(order, folder, probes, findings)
    if found is not None:
        compare_logits(found, wanted, _coarser_dtype(order), findings)
    files = sorted({file for pattern in _WEIGHT_PATTERNS for file in folder.glob(pattern)})
    return Certificate(
        kind=kind, step=order.step, verified=not findings.reasons, reasons=findings.reasons, dtype=order.numbers.name,
        loaded_by=form.loaded_by, conversations=len(probes), tokens=len(wanted),
        max_logit_difference=findings.difference, kl=findings.kl, same_next_token=findings.agreement,
        same_ids=findings.same_ids, stops=findings.stops,
        files={str(file.relative_to(folder)): hash_file(file) for file in files},
        quantize="nf4" if order.trained.is_packed else None,
    )  # fmt: skip


def _coarser_dtype(order: ExportSpec) -> ExportDtype:
    """Both sides round: the export by the type it is written in, the trained model by the one it is kept in."""
    return max(
        (order.numbers, export_dtype_of(order.trained.kept_in)),
        key=lambda numbers: EXPORT_DTYPES[numbers.name].difference,
    )
