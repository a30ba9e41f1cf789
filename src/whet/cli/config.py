"""`whet config`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, cli_command


@cli_command
def config(
    prefix: Annotated[
        str, typer.Argument(metavar="[KEY]", help="Only settings whose key starts with this, such as train.")
    ] = "",
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """List every setting with its type, default and meaning."""
    from rich.table import Table

    from whet.config import Config
    from whet.core.config import list_settings
    from whet.core.console import SafeConsole
    from whet.core.errors import WhetError

    found = [setting for setting in list_settings(Config) if setting.key.startswith(prefix)]
    if not found:
        raise WhetError(f"no setting starts with '{prefix}'. `whet config` lists them all")
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
