"""`whet export`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command, require_existing


class ExportKind(StrEnum):
    """The format of the export."""

    MERGED = "merged"
    HF = "hf"
    ADAPTER = "adapter"
    GGUF = "gguf"
    MEGATRON = "megatron"
    NEOX = "neox"
    NANOCHAT = "nanochat"


@cli_command
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, RUN@STEP, RUN@best or models:NAME.")],
    to: Annotated[
        ExportKind,
        typer.Option(
            "--to",
            case_sensitive=False,
            help="merged (also called hf): a plain model folder; adapter: only the adapter; gguf: a file for "
            "llama.cpp; megatron, neox, nanochat: a checkpoint for Megatron-Core, GPT-NeoX or nanochat.",
        ),
    ] = ExportKind.MERGED,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="f32, bf16, f16 or f64; exact: as stored; for gguf also q8_0, q6_k, q5_k_m, q4_k_m and the other "
            "types of llama.cpp. Default: that of the training computation.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Output folder; default: RUN/exports/KIND.")] = None,
    shard_size: Annotated[
        float,
        typer.Option("--shard-size", min=1e-6, help="GB per weight file; exporting needs about this much memory."),
    ] = 5.0,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", min=1, help="For megatron and neox: the tensor-parallel size.")
    ] = 1,
    check: Annotated[
        Path | None, typer.Option("--check", help="Write nothing; compare this export with the run again.")
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Export a run's model for other tools, load the export back and compare it with the trained model."""
    require_existing(run)
    from whet.run.export_run import ExportRequest, check_export, export_run

    if check is not None:
        return {"export": str(check), "certificate": check_export(run, check).as_dict()}
    request = ExportRequest(to.value, dtype, out, int(shard_size * 1e9), tensor_parallel)
    folder, certificate = export_run(run, request)
    return {"export": str(folder), "certificate": certificate.as_dict()}
