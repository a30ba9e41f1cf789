"""The preflight: proves, before any money is spent, that what will be trained on is what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from whet.config import Config
from whet.core.errors import INPUT, WhetError
from whet.data.settle import BadLineError
from whet.recipe.check_data import check_accounts, check_copies
from whet.recipe.check_model import check_model
from whet.recipe.check_plan import check_steps
from whet.recipe.check_tokens import check_store, check_template
from whet.recipe.data import Data, language_of, prepare_data
from whet.recipe.finding import Finding


def check(config: Config, tell: Callable[[Finding], None]) -> list[Finding]:
    """Every check in turn; each finding is told as soon as it is known, and once."""
    findings: list[Finding] = []
    for finding in _all(config):
        if finding not in findings:
            tell(finding)
            findings.append(finding)
    return findings


def _all(config: Config) -> Iterator[Finding]:
    data, findings = _prepare(config)
    yield from findings
    if data is not None:
        accounts = data.ledger()["sources"]
        yield from check_accounts(config, accounts)
        yield from check_copies(data, accounts)
        yield from check_store(config, data)
    yield from _template(config, data)
    if data is not None:
        yield from check_steps(config, data)
    yield from check_model(config, data)


def _prepare(config: Config) -> tuple[Data | None, list[Finding]]:
    """The data as the configuration has it. If a line stops it, the others are looked at all the same, in the cache:
    a folder that data.store names is for the data that will be trained on."""
    findings = []
    try:
        try:
            return prepare_data(config), []
        except BadLineError as error:
            findings.append(Finding("bad lines", "fault", str(error)))
            rest = config.data.model_copy(update={"on_bad": "skip", "store": None})
            return prepare_data(config.model_copy(update={"data": rest})), findings
    except WhetError as error:
        if error.exit_code != INPUT:  # a process was killed, for example
            raise
        check = "model" if str(error).startswith("model.") else "data"
        return None, [*findings, Finding(check, "fault", str(error))]


def _template(config: Config, data: Data | None) -> Iterator[Finding]:
    try:
        yield from check_template(data.language if data is not None else language_of(config), data)
    except WhetError as error:
        if data is not None:
            yield Finding("template", "fault", str(error))  # without data it was told with them
