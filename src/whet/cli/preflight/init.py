"""`whet init`"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, QuietOption, cli_command
from whet.core.errors import UsageError, WhetError


@cli_command
def init(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA", help="A data file, a folder, or a dataset such as hub:OWNER/NAME.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A model folder, a hub id, a run, or a name from --list.")
    ] = "builtin:smollm2",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write it; default: NAME.yaml here.")
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="List common models by name.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an existing file aside.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Write a recipe for your data: format, lengths, batches, LoRA or not, each with the reason."""
    if list_models:
        return _list_models()
    if data is None:
        raise UsageError("DATA is missing: give a file, such as `whet init my.csv`, or --list")
    from whet.core.console import info
    from whet.core.files import move_aside, require_file_place, write_named_file
    from whet.core.yaml import dump_yaml_inline
    from whet.preflight.recipe_proposal import nest_settings, propose_recipe, recipe_name, render_recipe

    file = out or Path(f"{recipe_name(data)}.yaml")
    require_file_place("--out", file)
    if file.exists() and not fresh:
        raise WhetError(f"{file}: it exists. Give another name (--out FILE), or --fresh, which moves it aside")
    settings = propose_recipe(data, model)
    text = render_recipe(
        settings, f"Written by `whet init {data}`. Change what you like; `whet config` explains every setting."
    )
    if file.exists():
        info(f"{file} is now {move_aside(file)}")
    write_named_file("--out", file, text)
    for section, values in nest_settings(settings).items():
        info(f"  {section}: {dump_yaml_inline(values)}")
    quoted = shlex.quote(str(file))
    info(f"written to {file}, with the reason for each setting. Next: whet check {quoted}, then whet train {quoted}")
    return {"recipe": str(file), "settings": {each.key: each.value for each in settings},
            "reasons": {each.key: each.reason for each in settings if each.reason}}  # fmt: skip


def _list_models() -> dict[str, Any]:
    from rich.table import Table

    from whet.core.console import info
    from whet.preflight.recipe_proposal import KNOWN_MODELS

    table = Table("name", "model.path", "parameters", box=None, pad_edge=False)
    for each in KNOWN_MODELS:
        table.add_row(each.name, each.path, f"{each.billions:g} B" + (" (experts)" if each.experts else ""))
    info(table)
    info("any other model works too: `whet init DATA --model FOLDER`, or OWNER/NAME on the hub")
    return {"models": [each._asdict() for each in KNOWN_MODELS]}
