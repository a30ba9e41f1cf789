"""`whet bench`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command


class BenchMode(StrEnum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class BenchPrecision(StrEnum):
    """What is computed in."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP32 = "fp32"


class BenchRecompute(StrEnum):
    """What is computed again in the backward pass."""

    NONE = "none"
    FULL = "full"


@cli_command
def bench(
    overrides: OverridesArgument = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="SHAPE", help="Its shape: llama-1b, llama-8b, qwen3-8b, smollm-135m, or a folder or config.json."
        ),
    ] = "smollm-135m",
    mode: Annotated[
        BenchMode, typer.Option(help="Train every weight, or LoRA (r 16) beside frozen or 4-bit ones.")
    ] = BenchMode.FULL,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Among trl, unsloth; NAME=PYTHON or NAME=FOLDER:FOLDER says where one is installed. Absent: none.",
        ),
    ] = "",
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Conversations; absent: the generator builtin:orders.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Packed rows in a step.")] = 2,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a row.")] = 4096,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps in all; absent: 24, on a CPU 12.", show_default=False)
    ] = None,
    warm: Annotated[
        int | None,
        typer.Option(min=1, help="Steps at the start that are not counted; absent: a third of them, at most 8."),
    ] = None,
    precision: Annotated[
        BenchPrecision | None, typer.Option(help="Absent: bf16 on an accelerator, fp32 on a CPU.", show_default=False)
    ] = None,
    recompute: Annotated[
        BenchRecompute, typer.Option(help="Save memory by computing layers again.")
    ] = BenchRecompute.NONE,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A tokenizer with a chat template; absent: SmolLM2's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where all of it goes; absent: bench/MODEL-MODE.")
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Measure speed and memory on this machine, beside other tools.

    The same model shape with random weights, the same conversations, precision and optimizer for all, each in a process
    of its own. KEY=VALUE changes whet's own recipe, such as model.compile=false. Exit code 3 if whet's own run fails.
    """
    import torch

    from whet.bench.contenders import parse_peers
    from whet.bench.results import results_markdown
    from whet.bench.runner import run_benchmark as measure
    from whet.bench.workload import BenchSettings
    from whet.core.console import silence_libraries

    silence_libraries()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator else "cpu"
    count = steps or (24 if accelerator else 12)
    terms = BenchSettings(
        model=model, mode=mode.value, data=data, rows=rows, length=length, steps=count,
        warm=warm or max(1, min(8, count // 3)),
        precision=(precision or (BenchPrecision.BF16 if accelerator else BenchPrecision.FP32)).value,
        recompute=recompute.value, tokenizer=tokenizer, device=device,
    )  # fmt: skip
    folder = out or Path("bench") / f"{Path(model).stem}-{mode.value}"
    result = measure(terms, parse_peers(peers), folder.expanduser().absolute(), overrides or [])
    if not as_json:
        typer.echo(results_markdown(result), nl=False)
    return result
