"""`whet check`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, cli_command

if TYPE_CHECKING:
    from whet.preflight.data_checks import Finding

_SHOWN = ("kept", "empty lines", "ledger", "system", "steps", "batch", "time")
"""Checks of a recipe that tell something where nothing is wrong. Of the others, their names do."""
_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "fault": ("✗", "bold red")}


@cli_command
def check(
    what: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|RUN", help="A recipe, or the folder of a run.", show_default=False),
    ],
    overrides: OverridesArgument = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print what every check of a recipe found.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Check data, chat template, masks and model before you train, or verify a run that has trained.

    For a recipe: verifies token ids and loss masks, end-of-turn tokens, truncation, duplicates, the tokenizer, and that
    packed conversations do not attend to each other in the real model. For a run: computes a step again, from a
    checkpoint and in other layouts, and writes the result to check.json in its folder. Exits with 1 on faults
    and with 0 on warnings.
    """
    from whet.core.console import info_item
    from whet.core.errors import ExitCode

    is_run = (what / "config.yaml").is_file()
    if is_run:
        from whet.preflight.run_folder_checks import check_run_folder

        found = check_run_folder(what, overrides or [])
    else:
        from whet.config import read_config
        from whet.preflight.run_checks import run_checks
        from whet.run.models.model_reference import resolve_model_reference

        found = run_checks(resolve_model_reference(read_config(what, overrides or [])))
    findings: list[Finding] = []
    passed: dict[str, None] = {}
    for finding in found:
        findings.append(finding)
        if finding.level == "ok" and not (is_run or show_all or finding.check in _SHOWN):
            passed[finding.check] = None
            continue
        sign, style = _SIGNS[finding.level]
        info_item(sign, finding.check, finding.text, style, always=finding.level == "fault")
    failed = {finding.check for finding in findings if finding.level != "ok"}
    if names := ", ".join(name for name in passed if name not in failed):
        info_item("✓", "passed", f"{names} (--all prints what they found)", "green")
    faults, warnings = (sum(f.level == level for f in findings) for level in ("fault", "warning"))
    counts = f"{_pluralise(faults, 'fault')}, {_pluralise(warnings, 'warning')}, {len(findings)} checks"
    verdict = (
        ("the run is not as promised", "the run is as promised") if is_run else ("not ready to train", "ready to train")
    )
    info_item("→", verdict[not faults], counts, "bold", always=faults > 0)
    return {
        "verdict": "fault" if faults else "pass",
        "faults": faults,
        "warnings": warnings,
        "checks": [finding.as_dict() for finding in findings],
        "exit_code": ExitCode.INPUT if faults else ExitCode.DONE,
    }


def _pluralise(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
