"""Write an export, load it back, and publish it only if it matches the trained model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.core.checksums import write_hashed_json
from whet.core.errors import os_error
from whet.core.files import atomic_dir, require_disk_space
from whet.exporting.dtypes import export_dtype_of
from whet.exporting.gguf.gguf_file import GGUFFormat, max_positions, quantize_export, unquantized_dtype
from whet.exporting.hf_folder import HFFolderFormat
from whet.exporting.megatron import MegatronFormat
from whet.exporting.nanochat import NanochatFormat
from whet.exporting.peft_adapter import PeftAdapterFormat
from whet.exporting.spec import Certificate, ExportFindings, ExportFormat, ExportMismatchError, ExportSpec
from whet.exporting.verification import compare_logits
from whet.model.load.weight_files import hash_model_folder
from whet.model.weight_effect import effect_certificate

EXPORT_FORMATS: dict[str, ExportFormat] = {
    "merged": HFFolderFormat(),
    "adapter": PeftAdapterFormat(),
    "gguf": GGUFFormat(),
    "megatron": MegatronFormat(),
    "nanochat": NanochatFormat(),
}
"""run/export_run.py adds neox, which the importer reads back: package convert stands on this one."""


def write_export(spec: ExportSpec, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Export the trained model as `kind` to `folder`, which is created only if verification succeeds.

    `probes` are token ids of conversations on which the logits of both models are compared.
    """
    export_format = EXPORT_FORMATS[kind]
    try:
        export_format.require_supported(spec)
        require_disk_space(folder, export_format.estimate_bytes(spec), "the export")
        with atomic_dir(folder) as temporary:
            certificate = _write_verified(spec, kind, temporary, probes)
            write_hashed_json(temporary / "certificate.json", certificate.as_dict())
            if not certificate.verified:
                raise ExportMismatchError(
                    f"{folder}: the exported model does not match the trained one: {'; '.join(certificate.reasons)}. "
                    "Nothing was exported; the checkpoints are untouched"
                )
    except Exception as error:
        raise os_error(error, "exporting", folder) or error from None
    return certificate


def _write_verified(spec: ExportSpec, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Write and verify. A quantized export is verified before it is quantized, too: after it, small faults would hide
    among the rounding errors."""
    first = dataclasses.replace(spec, dtype=unquantized_dtype(spec)) if spec.dtype.is_quantized else spec
    EXPORT_FORMATS[kind].write(first, folder)
    certificate = verify_export(first, kind, folder, probes)
    if not spec.dtype.is_quantized or not certificate.verified:
        return certificate
    about = quantize_export(spec, folder)
    quantized = verify_export(spec, kind, folder, probes)
    return dataclasses.replace(quantized, effect=certificate.effect, details=about | quantized.details)


def verify_export(spec: ExportSpec, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Load an export and compare it with the trained model; the certificate lists the mismatches."""
    if kind == "gguf":
        probes = [ids[: max_positions(spec)] for ids in probes]
    with ThreadPoolExecutor(1) as pool:
        hashes = pool.submit(hash_model_folder, folder)  # while it is compared
        findings, tokens = _compare(spec, kind, folder, probes)
        if findings.reasons and 2 in (spec.model.weight_dtype.itemsize, spec.dtype.torch_dtype.itemsize):
            # Activations in 16 bits round, too, which says nothing about the export. What cannot be computed in fp32,
            # for lack of memory or because kernels exist for 16 bits only, keeps its result.
            with contextlib.suppress(RuntimeError):
                findings, tokens = _compare(dataclasses.replace(spec, compares_in_fp32=True), kind, folder, probes)
    for effect in findings.effect:
        recorded = spec.run_effect.get(effect.module, {})
        effect.gradient = recorded.get("gradient")
        if effect.experts is not None:  # weight decay changes experts without a token, too
            effect.untouched_experts = recorded.get("untouched_experts", effect.untouched_experts)
    return Certificate(
        kind=kind, step=spec.step, verified=not findings.reasons, reasons=findings.reasons, dtype=spec.dtype.name,
        loaded_by=EXPORT_FORMATS[kind].loaded_by, conversations=len(probes), tokens=tokens,
        max_logit_difference=findings.max_logit_difference, kl=findings.kl, same_next_token=findings.same_next_token,
        same_ids=findings.same_ids, same_template=findings.same_template, stops=findings.stops, files=hashes.result(),
        quantize="nf4" if spec.model.is_quantized else None,
        effect=effect_certificate(findings.effect),
        details=findings.details,
    )  # fmt: skip


def _compare(spec: ExportSpec, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> tuple[ExportFindings, int]:
    """What differs between an export and the trained model, and at how many positions logits were compared."""
    findings = ExportFindings()
    trained = spec.model.logits(probes, spec.compares_in_fp32)
    exported = EXPORT_FORMATS[kind].load_and_verify(spec, folder, probes, findings)
    if exported is not None:
        # Both sides round: the export to its dtype, the trained model to that of its weights. The coarser one counts.
        dtypes = (spec.dtype, export_dtype_of(spec.model.weight_dtype))
        compare_logits(exported, trained, max(dtypes, key=lambda dtype: dtype.max_logit_difference), findings)
    return findings, len(trained)
