"""`whet doctor`"""

from __future__ import annotations

from typing import Any

from whet.cli.common import JsonOption, QuietOption, cli_command

_SIGNS = {"ok": ("✓", "green"), "missing": ("·", "dim"), "warning": ("!", "yellow")}


@cli_command
def doctor(quiet: QuietOption = False, as_json: JsonOption = False) -> dict[str, Any]:
    """Show this machine's hardware and libraries, the back-ends whet will use, and how to install what is missing."""
    from whet.core.console import info_item
    from whet.preflight.doctor import examine_machine

    facts = []
    for fact in examine_machine():
        facts.append(fact)
        info_item(_SIGNS[fact.level][0], fact.subject, fact.text, _SIGNS[fact.level][1])
    return {"facts": [fact._asdict() for fact in facts]}
