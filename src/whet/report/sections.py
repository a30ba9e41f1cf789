"""The sections of the report of one run, each a function of the run; None without data."""

from __future__ import annotations

import re
from typing import Any

from whet.core.costs import counted_costs, predicted_costs
from whet.core.display import mask_secrets
from whet.report.blocks import (
    Answers,
    AnswersOverTime,
    Block,
    Bullets,
    Cell,
    Facts,
    Figure,
    Folded,
    ReportSection,
    Scores,
    SmallFigures,
    Styled,
    Table,
)
from whet.report.charts import ChartLine, downsample, smooth, smoothing_beta
from whet.report.formatting import (
    DASH,
    finite_number,
    format_count,
    format_gib,
    format_number,
    format_seconds,
    format_share,
    format_time,
)
from whet.report.run_view import RunView, Series, SourceCounts, as_dict, as_list
from whet.report.samples import FIXED_PROMPTS, select_pairs

_MAX_POINTS = 4000
_SHOWN_SAMPLES = 4
_MAX_FOLDED_SAMPLES = 60
_MAX_PLACES = 5
_MAX_FAULTS = 20


def run_sections(run: RunView) -> list[ReportSection]:
    """All sections that have something to show."""
    made = (
        damage_section(run), headline_section(run), curves_section(run), events_section(run), validation_section(run),
        samples_section(run), prompts_section(run), ledger_section(run), effect_section(run), exports_section(run),
        plan_section(run), config_section(run),
    )  # fmt: skip
    return [section for section in made if section is not None]


def damage_section(run: RunView) -> ReportSection | None:
    """The files that are damaged: what the report shows of them is incomplete."""
    if not run.damage:
        return None
    listed = Bullets([(Styled(text, "bad"),) for text in run.damage])
    return ReportSection("Damaged files", [listed], "What this page shows of these files is incomplete.")


def headline_section(run: RunView) -> ReportSection:
    """Task scores, and what training them took."""
    scores = []
    for score in run.task_scores:
        early = score.after_step is not None and score.after_step != run.steps
        name = f"{score.task} score" + (f" (step {format_count(score.after_step)})" if early else "")
        scores.append((name, format_share(score.before), format_share(score.after)))
    numbers = [
        ("steps" if run.steps in (None, run.step) else f"of {format_count(run.steps)} steps", format_count(run.step)),
        ("training time", format_seconds(run.train_seconds)),
        ("tokens", format_count(run.tokens)),
        ("supervised tokens", format_count(run.supervised_tokens)),
        ("tokens per second", format_count(run.tokens_per_s)),
    ]
    return ReportSection(None, [Scores(scores, numbers)])


def curves_section(run: RunView) -> ReportSection:
    """Loss, scores, learning rate and gradient norm by step."""
    validation = ChartLine("validation", list(run.val_losses), "validation", joined=False)
    small = [Figure(f"{task} score", [_chart_line(list(points))]) for task, points in run.scores.items()]
    small.append(Figure("learning rate", [_chart_line(run.series("lr"))]))
    small.append(Figure("gradient norm", raw_and_smoothed(run.series("grad_norm"))))
    beta = smoothing_beta(len(run.step_lines))
    return ReportSection(
        "Training",
        [Figure("loss by step", [*raw_and_smoothed(run.series("loss")), validation]), SmallFigures(small)],
        f"Smoothed: a mean of the steps around, weighted by {beta:.2g} to the power of their distance."
        if beta
        else None,
    )


def validation_section(run: RunView) -> ReportSection | None:
    """Metrics on held-out conversations before and after; with several sources, the loss on each."""
    names = {"val_loss": "loss", "val_bpb": "bits per byte", "val_accuracy": "token accuracy"}
    rows = []
    for key, values in run.validation.items():
        source = key.removeprefix("val_loss/")
        name = names.get(key) or (f"loss on {source}" if source != key else None)
        if name is not None:
            show = format_share if key == "val_accuracy" else format_number
            rows.append((name, *map(show, values)))
    part = next((share for _, share in reversed(run.points("val_part"))), None)
    note = None if part is None else f"On {format_share(part)} of the held-out conversations (eval.rows)."
    return ReportSection("Validation", [Table(("metric", "before", "after"), rows)], note) if rows else None


_ACTIONS = {
    "stop": "stopped",
    "skip": "skipped",
    "rollback": "rolled back",
    "take": "applied anyway",
    "repeat": "repeated",
    "end": "ended early",
}


def events_section(run: RunView) -> ReportSection | None:
    """Steps with a fault, and an early end: the reason, the action taken, and the cause."""
    if not run.events:
        return None
    rows = [
        (
            format_count(event.get("step")),
            mask_secrets(str(event.get("reason") or DASH)),
            _ACTIONS.get(str(event.get("action")), DASH),
            _fault_origin(event),
        )
        for event in run.events[:_MAX_FAULTS]
    ]
    left = len(run.events) - len(rows)
    is_fault = any(event.get("kind") != "early-stop" for event in run.events)
    note = "Replay one with: whet train --replay RUN/faults/step-NNNNNN.json" if is_fault else ""
    note += f" ({left} more in events.jsonl)" if left > 0 else ""
    head = ("step", "reason", "action", "cause")
    return ReportSection("Faults" if is_fault else "Events", [Table(head, rows)], note or None)


def _fault_origin(event: dict[str, Any]) -> str:
    """The conversations that caused a fault, or the weights."""
    if event.get("all"):
        return "the weights: every conversation of the step fails"
    places = [f"{each.get('source')}:{each.get('line')}" for each in event.get("conversations") or ()]
    more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
    layer = f" (first non-finite layer: {event['layer']})" if event.get("layer") else ""
    return (", ".join(places[:_MAX_PLACES]) + more or DASH) + layer


def _chart_line(series: Series) -> ChartLine:
    shown = downsample([value for _, value in series], _MAX_POINTS)
    return ChartLine("value", [series[i] for i in shown], "main")


def raw_and_smoothed(series: Series) -> list[ChartLine]:
    """The values as dots and, if there are enough, a smoothed line."""
    values = [value for _, value in series]
    shown = downsample(values, _MAX_POINTS)
    return [
        ChartLine("training", [series[i] for i in shown], "raw", joined=False),
        ChartLine("smoothed", smoothed(series) if smoothing_beta(len(values)) else [], "main"),
    ]


def smoothed(series: Series) -> Series:
    """Averages of the values, with as many points as a chart shows."""
    values = [value for _, value in series]
    means = smooth(values, smoothing_beta(len(values))).tolist()
    return [(series[i][0], finite_number(means[i])) for i in downsample(values, _MAX_POINTS)]


def samples_section(run: RunView) -> ReportSection | None:
    """The same prompts before and after training: those of tasks or, without tasks, of held-out conversations."""
    every = [pair for pair in run.pairs if pair.sample.task != FIXED_PROMPTS]
    if not every:
        return None
    pairs = select_pairs(every, _SHOWN_SAMPLES)
    others = [pair for pair in every if pair not in pairs][:_MAX_FOLDED_SAMPLES]
    wrong = sum(pair.wrong_after for pair in every)
    scored = sum(bool(pair.after and pair.after.right is not None) for pair in every)
    note = f"{len(pairs)} of {len(every)} held-out samples." + (
        f" After training, {wrong} of {scored} answers are wrong; the selection includes wrong ones." if wrong else ""
    )
    return ReportSection("Before and after", [Answers(pairs, others)], note)


def prompts_section(run: RunView) -> ReportSection | None:
    """The answers to eval.prompts at every evaluation."""
    by_prompt: dict[str, list[Any]] = {}
    for sample in run.samples:
        if sample.task == FIXED_PROMPTS:
            by_prompt.setdefault(sample.prompt, []).append(sample)
    blocks = [AnswersOverTime(prompt, answers) for prompt, answers in by_prompt.items()]
    return ReportSection("Prompts over time", blocks, "The most likely answer at every evaluation.") if blocks else None


def ledger_section(run: RunView) -> ReportSection | None:
    """What happened to every conversation."""
    if not run.sources:
        return None
    head = ("source", "use", "in", "kept", "truncated", "dropped", "tokens", "supervised", "EOS supervised")
    rows: list[tuple[Cell, ...]] = [
        (
            Styled(mask_secrets(source.name), "code"),
            source.use,
            *map(format_count, (source.total, source.kept, source.truncated, source.dropped, source.tokens)),
            _supervised_cell(source),
            format_share(source.eos_supervised),
        )
        for source in run.sources
    ]
    reasons = [_reason_item(source, reason) for source in run.sources for reason in source.notes]
    blocks: list[Block] = [Table(head, rows)]
    blocks += [Bullets(reasons)] if reasons else []
    return ReportSection("Data", blocks, _ledger_balance(run.sources))


def _ledger_balance(sources: tuple[SourceCounts, ...]) -> Cell:
    missing = [source.unaccounted for source in sources]
    known = [number for number in missing if number is not None]
    if len(known) < len(missing):
        return "The ledger lacks counts, so it is unknown whether every conversation is accounted for."
    if any(known):
        return Styled(f"{format_count(sum(map(abs, known)))} conversations are not accounted for.", "bad")
    return Styled("✓ Every conversation is accounted for: in = kept + dropped.", "good")


def _supervised_cell(source: SourceCounts) -> str:
    text = format_count(source.supervised_tokens)
    if source.supervised_tokens is None or not source.tokens:
        return text
    return f"{text} ({format_share(source.supervised_tokens / source.tokens)})"


def _reason_item(source: SourceCounts, reason: str) -> list[Cell]:
    places = source.first.get(reason, [])[:_MAX_PLACES]
    first: list[Cell] = [", first at "] if places else []
    for place in places:
        first += [Styled(mask_secrets(place), "code"), " "]
    count, name = format_count(source.notes[reason]), mask_secrets(source.name)
    return [f"{count} × ", Styled(reason, "strong"), f" in {name}", *first]


def exports_section(run: RunView) -> ReportSection | None:
    """The exports and their certificates."""
    if not run.certificates:
        return None
    head = (
        "export", "verified", "largest logit difference", "same next token", "conversations compared",
        "trained weights in it", "lost to rounding",
    )  # fmt: skip
    rows = [
        (
            None if certificate.get("kind") is None else str(certificate["kind"]),
            Styled("✓ verified", "good") if certificate.get("verified") is True else Styled("✗ not verified", "bad"),
            format_number(finite_number(certificate.get("max_logit_difference"))),
            format_share(finite_number(certificate.get("same_next_token"))),
            format_count(finite_number(certificate.get("conversations"))),
            _exported_cell(as_dict(certificate.get("effect"))),
            format_share(finite_number(as_dict(certificate.get("effect")).get("lost_to_rounding"))),
        )
        for certificate in run.certificates
    ]
    return ReportSection(
        "Exports", [Table(head, rows)], "Every export is loaded again and compared with the trained model."
    )


def _exported_cell(effect: dict[str, Any]) -> str:
    exported, weights = (finite_number(effect.get(key)) for key in ("exported", "weights"))
    return DASH if exported is None else f"{format_count(exported)} of {format_count(weights)}"


def effect_section(run: RunView) -> ReportSection | None:
    """What training changed, by kind of weight: those of all layers together."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in map(as_dict, as_list(run.effect.get("modules"))):
        kinds.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", str(each.get("module"))), []).append(each)
    if not kinds:
        return None
    rows: list[list[Cell]] = []
    for name, weights in kinds.items():
        changes = [change for each in weights if (change := finite_number(each.get("change"))) is not None]
        experts = sum(finite_number(each.get("experts")) or 0 for each in weights)
        idle = sum(len(as_list(each.get("untouched_experts"))) for each in weights)
        rows.append(
            [
                name,
                format_count(len(weights)),
                *(_all_of([each.get(key) is True for each in weights]) for key in ("gradient", "moved")),
                f"{min(changes):.2g} to {max(changes):.2g}" if changes else DASH,
                f"{format_count(idle)} of {format_count(experts)}" if experts else DASH,
            ]
        )
    head = ["weight", "number", "got a gradient", "moved", "‖ΔW‖ ÷ ‖W‖", "experts without a token"]
    if all(row[-1] == DASH for row in rows):  # no experts
        head, rows = head[:-1], [row[:-1] for row in rows]
    return ReportSection("Effect", [Table(head, rows)], "What training changed; each weight is in effect.json.")


def _all_of(found: list[bool]) -> Styled:
    return Styled("all" if all(found) else f"{sum(found)} of {len(found)}", "good" if all(found) else "bad")


def plan_section(run: RunView) -> ReportSection:
    """The plan, the machine that it ran on, and what it cost."""
    plan, status = run.plan, run.status

    def number(key: str) -> float | None:
        return finite_number(plan.get(key))

    trainable, total = number("trainable_parameters"), number("parameters")
    part = f" of {format_count(total)} ({format_share(trainable / total)})" if trainable and total else ""
    batch = plan.get("batch")
    mfu = [value for _, value in run.points("mfu")]
    used, predicted = counted_costs(run.folder), predicted_costs(run.folder)
    values: dict[str, object] = {
        "model": mask_secrets(str(run.setting("model", "path"))),
        "trainable parameters": format_count(trainable) + part if trainable is not None else None,
        "device": plan.get("device_name") or plan.get("device"),
        "processes": format_count(number("world")),
        "precision": plan.get("precision"),
        "attention": plan.get("attention"),
        "packing": plan.get("packing"),
        "packing efficiency": format_share(number("efficiency")),
        "rows": format_count(number("rows")),
        "row length": format_count(number("row_length")),
        "rows per micro-batch": format_count(number("micro_rows")),
        "batch": ", ".join(f"{n} {unit}" for unit, n in batch.items()) if isinstance(batch, dict) else batch,
        "epochs": format_number(number("epochs")),
        "conversations seen": run.seen_note,
        "conversations trained on, repetitions included": format_count(run.conversations),
        "peak memory": format_gib(run.peak_gib),
        "memory of the worst batch, before step 1": format_gib(number("worst_batch_gib")),
        "model FLOPs": format_number(run.flops),
        "mean MFU": format_share(sum(mfu) / len(mfu)) if mfu else None,
        "used, all starts together": None if used is None else str(used),
        "predicted": None if predicted is None else str(predicted),
        "host": status.host,
        "started": format_time(status.started),
        "last heartbeat": format_time(status.heartbeat),
        "exit code": None if status.exit_code is None else str(status.exit_code),
    }
    texts: dict[str, Cell] = {name: None if value is None else str(value) for name, value in values.items()}
    return ReportSection("Plan and machine", [Facts(texts)])


def config_section(run: RunView) -> ReportSection:
    """The resolved configuration, folded away."""
    return ReportSection(None, [Folded("Resolved configuration", mask_secrets(run.config_text))])
