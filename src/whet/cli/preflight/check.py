"""`whet check`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, RecipeArgument, cli_command

if TYPE_CHECKING:
    from whet.preflight.data_checks import Finding

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "fault": ("✗", "bold red")}


@cli_command
def check(
    recipe: RecipeArgument, overrides: OverridesArgument = None, quiet: QuietOption = False, as_json: JsonOption = False
) -> dict[str, Any]:
    """Check data, chat template, masks and model before you train.

    Verifies token ids and loss masks, end-of-turn tokens, truncation, duplicates, the tokenizer, and that packed
    conversations do not attend to each other in the real model. Exits with 1 on errors, with 0 on warnings.
    """
    from whet.config import read_config
    from whet.core.console import info_item
    from whet.core.errors import ExitCode
    from whet.preflight.run_checks import run_checks
    from whet.run.models.model_reference import resolve_model_reference

    def report(finding: Finding) -> None:
        sign, style = _SIGNS[finding.level]
        info_item(sign, finding.check, finding.text, style, always=finding.level == "fault")

    findings = run_checks(resolve_model_reference(read_config(recipe, overrides or [])), report)
    faults, warnings = (sum(f.level == level for f in findings) for level in ("fault", "warning"))
    counts = f"{_pluralise(faults, 'fault')}, {_pluralise(warnings, 'warning')}, {len(findings)} checks"
    info_item("→", "not ready to train" if faults else "ready to train", counts, "bold", always=faults > 0)
    return {
        "verdict": "fault" if faults else "pass",
        "faults": faults,
        "warnings": warnings,
        "checks": [finding.as_dict() for finding in findings],
        "exit_code": ExitCode.INPUT if faults else ExitCode.DONE,
    }


def _pluralise(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
