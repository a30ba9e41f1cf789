"""Writing an export, loading it back, and calling it done only if it is what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whet.checkpoint.export.adapter import Adapter
from whet.checkpoint.export.certificate import Certificate, Findings, NotTheSameError, compare_logits
from whet.checkpoint.export.gguf_file import Gguf
from whet.checkpoint.export.megatron import Megatron
from whet.checkpoint.export.merged import Merged
from whet.checkpoint.export.numbers import KNOWN, Numbers, of
from whet.checkpoint.export.order import Kind, Order
from whet.core.errors import disk_error
from whet.core.files import atomic_dir, hash_file, need_space, write_json

KINDS: dict[str, Kind] = {"merged": Merged(), "adapter": Adapter(), "gguf": Gguf(), "megatron": Megatron()}
_WEIGHTS = ("*.safetensors", "*.gguf", "**/*.pt")


def export(order: Order, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Write the trained model as `kind` to `folder`, which appears only if it passes.

    `probes` are conversations as ids; the exported model must give the logits of the trained one on them.
    """
    form = KINDS[kind]
    try:
        need_space(folder, form.size(order), "the export")
        with atomic_dir(folder) as temporary:
            form.write(order, temporary)
            certificate = check(order, kind, temporary, probes)
            write_json(temporary / "certificate.json", certificate.as_dict())
            if not certificate.verified:
                raise NotTheSameError(
                    f"{folder}: the exported model is not the trained one: {'; '.join(certificate.reasons)}. Nothing "
                    "was exported; the checkpoints are untouched"
                )
    except Exception as error:
        raise disk_error(error, "exporting", folder) or error from None
    return certificate


def check(order: Order, kind: str, folder: Path, probes: Sequence[Sequence[int]]) -> Certificate:
    """Load an export back and compare it; what is wrong with it is in the certificate."""
    form, findings = KINDS[kind], Findings()
    wanted = order.trained.logits(probes)
    found = form.look(order, folder, probes, findings)
    if found is not None:
        compare_logits(found, wanted, _roughest(order), findings)
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    return Certificate(
        kind=kind, step=order.step, verified=not findings.reasons, reasons=findings.reasons, dtype=order.numbers.name,
        loaded_by=form.loaded_by, conversations=len(probes), tokens=len(wanted),
        max_logit_difference=findings.difference, kl=findings.kl, same_next_token=findings.agreement,
        same_ids=findings.same_ids, stops=findings.stops,
        files={str(file.relative_to(folder)): hash_file(file) for file in files},
        quantize="nf4" if order.trained.is_packed else None,
    )  # fmt: skip


def _roughest(order: Order) -> Numbers:
    """Both sides round: the export by the type it is written in, the trained model by the one it is kept in."""
    return max((order.numbers, of(order.trained.kept_in)), key=lambda numbers: KNOWN[numbers.name].difference)
