"""`whet check`: runs all checks of the data and of the real model, before training."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config import Config
from whet.core.errors import ExitCode, WhetError
from whet.core.resources import device_count
from whet.data.prepare.tokenize import BadLineError
from whet.preflight.data_checks import (
    Finding,
    Level,
    check_answers,
    check_duplicates,
    check_ledger,
    check_near_copies,
    check_step_count,
    check_store,
    check_template,
)
from whet.preflight.model_checks import check_model
from whet.run.data import RunData, make_conversation_tokenizer, make_plan, prepare_data
from whet.run.step_rows import describe_shortage, find_shortage, most_rows, step_layout, typical_rows


def run_checks(config: Config) -> Iterator[Finding]:
    """Run every check; each distinct finding as soon as it is known."""
    findings: list[Finding] = []
    for finding in _all_findings(config):
        if finding not in findings:
            findings.append(finding)
            yield finding


def _all_findings(config: Config) -> Iterator[Finding]:
    data, findings = _prepare_for_check(config)
    yield from findings
    if data is not None:
        accounts = data.ledger()["sources"]
        yield from check_ledger(config, accounts)
        for store in data.stores().values():
            if (hint := store.describe_ledger_lines()) is not None:
                yield Finding("ledger", "ok", hint)
        yield from check_duplicates(data, accounts)
        yield from check_near_copies(config, data)
        yield from check_answers(config, data)
        yield from check_store(config, data)
    yield from _template_findings(config, data)
    if data is not None:
        yield from check_step_count(config, data)
    unpacked = False
    for finding in check_model(config, data):
        unpacked = unpacked or (finding.check, finding.level) == ("leak", "warning")
        yield finding
    yield from check_batch(config, data, unpacked)


def _prepare_for_check(config: Config) -> tuple[RunData | None, list[Finding]]:
    """Prepare the data. If a bad line stops that, prepare the rest without it, in the cache: data.store is for the data
    that will be trained on."""
    findings = []
    try:
        try:
            return prepare_data(config), []
        except BadLineError as error:
            findings.append(Finding("bad lines", "fault", str(error)))
            rest = config.data.model_copy(update={"on_bad": "skip", "store": None})
            return prepare_data(config.model_copy(update={"data": rest})), findings
    except WhetError as error:
        if error.exit_code != ExitCode.INPUT:  # a process was killed, for example
            raise
        check = "model" if str(error).startswith("model.") else "data"
        return None, [*findings, Finding(check, "fault", str(error))]


def _template_findings(config: Config, data: RunData | None) -> Iterator[Finding]:
    try:
        yield from check_template(
            data.conversation_tokenizer if data is not None else make_conversation_tokenizer(config), data
        )
    except WhetError as error:
        if data is not None:
            yield Finding("template", "fault", str(error))  # without data, preparing has reported it


def check_batch(config: Config, data: RunData | None, unpacked: bool) -> Iterator[Finding]:
    """Whether a step has rows for every device of `whet launch`; nothing for a single one. `unpacked`: each
    conversation is a row."""
    launch = config.launch
    given, nodes = launch.gpus or launch.processes, launch.node_range()[1]
    level, text = _batch_finding(config, data, nodes, given or 1, unpacked)
    if level == "ok" and given is None and nodes == 1:  # `whet launch` would use all of this machine's
        level, text = _batch_finding(config, data, 1, device_count(), unpacked)
        level, text = ("warning", f"{text}. `whet train` uses one device") if level == "fault" else (level, text)
    if text:
        yield Finding("batch", level, text)


def _batch_finding(config: Config, data: RunData | None, nodes: int, devices: int, unpacked: bool) -> tuple[Level, str]:
    layout = step_layout(config, most_rows(config), nodes, devices, unpacked)
    try:
        if config.launch.gpus or config.launch.processes:
            config.parallel.replicas(nodes * devices)
    except WhetError as error:
        return "fault", str(error)
    if layout.ranks == 1:
        return "ok", ""
    if data is None:
        return ("ok", "") if layout.fits else ("fault", describe_shortage(config, layout))
    plan = make_plan(config, data)
    plan = plan.unpacked(data.train.store.lengths) if unpacked else plan
    shortage = find_shortage(config, data, plan, nodes, devices, unpacked)
    if shortage is not None:
        return "fault", shortage
    rows = typical_rows(plan)
    return "ok", f"a step has {rows:,} rows for {layout.ranks:,} data-parallel ranks, {rows / layout.ranks:.3g} each"
