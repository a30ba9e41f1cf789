"""`whet bench`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command
from whet.core.errors import UsageError
from whet.core.files import user_path


class BenchMode(StrEnum):
    """Which weights are trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class BenchPrecision(StrEnum):
    """The precision of the computation."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP32 = "fp32"


class BenchRecompute(StrEnum):
    """Which activations are recomputed in the backward pass."""

    NONE = "none"
    FULL = "full"


@cli_command
def bench(
    overrides: OverridesArgument = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="SHAPE",
            help="Architecture and size, such as llama-8b, llama-70b, qwen3-30b-a3b, gpt-oss-20b, smollm-135m; a model "
            "folder; a config.json.",
        ),
    ] = "smollm-135m",
    mode: Annotated[
        BenchMode, typer.Option(help="Train every weight, or a rank-16 LoRA on frozen (lora) or 4-bit (qlora) weights.")
    ] = BenchMode.FULL,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Compare with trl, unsloth. NAME=PYTHON or NAME=FOLDER:FOLDER sets where one is installed.",
        ),
    ] = "",
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="Conversations to train on; default: builtin:orders.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Packed rows per step.")] = 2,
    length: Annotated[int, typer.Option(min=16, help="Tokens per row.")] = 4096,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps, including warm-up; default: 24, on a CPU 12.", show_default=False)
    ] = None,
    warm: Annotated[
        int | None,
        typer.Option(min=1, help="Warm-up steps that are not measured; default: a third of the steps, at most 8."),
    ] = None,
    precision: Annotated[
        BenchPrecision | None, typer.Option(help="Default: bf16 on an accelerator, fp32 on a CPU.", show_default=False)
    ] = None,
    recompute: Annotated[
        BenchRecompute, typer.Option(help="Recompute layers in the backward pass to save memory.")
    ] = BenchRecompute.NONE,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A tokenizer with a chat template; default: SmolLM2's.")
    ] = None,
    end_to_end: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE",
            help="Compare whole runs of a recipe instead, from the command to the exported model, stage by stage; "
            "with --peers trl, also those of TRL's own script. Each tool runs twice: with empty caches, then again.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=2, help="With --end-to-end: 1 runs each tool with empty caches only.")
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder; default: bench/MODEL-MODE, or bench/RECIPE.")
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Measure training speed and memory on this machine, of whet and other tools.

    All tools train the same architecture with random weights, on the same conversations, with the same precision and
    optimizer, each in its own process. KEY=VALUE overrides whet's recipe, such as model.compile=false. Exit code 3 if
    whet's own run fails.
    """
    import torch

    from whet.bench.contenders import parse_peers
    from whet.bench.end_to_end import run_end_to_end, stages_markdown
    from whet.bench.results import results_markdown
    from whet.bench.runner import run_benchmark
    from whet.bench.workload import BenchSettings
    from whet.core.console import print_result, silence_libraries

    silence_libraries()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator else "cpu"
    if end_to_end is not None:
        if any(option is not None for option in (data, steps, warm, precision, tokenizer)):
            raise UsageError("--end-to-end takes everything from its recipe: change it there, or with KEY=VALUE")
        folder = out or Path("bench") / end_to_end.stem
        result = run_end_to_end(
            end_to_end, overrides or [], parse_peers(peers), user_path(folder).absolute(), device, rounds
        )
        if not as_json:
            print_result(stages_markdown(result), end="")
        return result
    count = steps or (24 if accelerator else 12)
    settings = BenchSettings(
        model=model, mode=mode.value, data=data, rows=rows, length=length, steps=count,
        warm=warm or max(1, min(8, count // 3)),
        precision=(precision or (BenchPrecision.BF16 if accelerator else BenchPrecision.FP32)).value,
        recompute=recompute.value, tokenizer=tokenizer, device=device,
    )  # fmt: skip
    folder = out or Path("bench") / f"{Path(model).stem}-{mode.value}"
    result = run_benchmark(settings, parse_peers(peers), user_path(folder).absolute(), overrides or [])
    if not as_json:
        print_result(results_markdown(result), end="")
    return result
