"""`whet config`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, cli_command


@cli_command
def config(
    part: Annotated[
        str, typer.Argument(metavar="[KEY]", help="Only settings with this in their key, such as train or lr.")
    ] = "",
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """List every setting with its type, default and meaning."""
    from rich.table import Table

    from whet.config import Config
    from whet.core.config import list_settings
    from whet.core.console import SafeConsole
    from whet.core.errors import WhetError

    every, wanted = list(list_settings(Config)), part.lower()
    found = [setting for setting in every if setting.key.startswith(wanted)]
    found = found or [setting for setting in every if wanted in setting.key.lower()]
    found = found or [setting for setting in every if wanted in setting.description.lower()]
    if not found:
        raise WhetError(f"no setting has '{part}' in its key or meaning. `whet config` lists them all")
    if not as_json:
        table = Table(box=None, pad_edge=False, header_style="bold", highlight=False)
        for title in ("key", "type", "default", "meaning"):
            table.add_column(title, overflow="fold")
        for setting in found:
            table.add_row(setting.key, setting.type, setting.default, setting.description)
        SafeConsole(soft_wrap=False).print(table)
    return {
        "settings": [
            {"key": setting.key, "type": setting.type, "default": setting.default, "meaning": setting.description}
            for setting in found
        ]
    }
