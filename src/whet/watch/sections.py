"""The parts of the report, each a function from a run to HTML; empty where the run has nothing to say."""

from __future__ import annotations

from typing import Any

from whet.watch.chart import Line, chart
from whet.watch.ledger import Source
from whet.watch.markup import Markup, element, facts, section, table
from whet.watch.readable import DASH, count_text, measured, number_text, seconds_text, share_text, time_text
from whet.watch.run import RunView, Series
from whet.watch.samples import Pair, Sample, pick
from whet.watch.smooth import fitting_beta, smoothed, thinned

_NOTHING = Markup("")
_MOST_POINTS = 4000
_FEW_SAMPLES = 4
_MORE_SAMPLES = 60
_MOST_PLACES = 5
_MOST_FAULTS = 20


def big_numbers(run: RunView) -> Markup:
    """The result and what it cost, large."""
    scores = []
    for score in run.results:
        early = score.after_step is not None and score.after_step != run.steps
        name = f"{score.task}, right answers" + (f" (step {count_text(score.after_step)})" if early else "")
        scores.append(_tile(name, share_text(score.before), element("i", " → "), element("b", share_text(score.after))))
    numbers = [
        _tile("steps" if run.steps in (None, run.step) else f"of {count_text(run.steps)} steps", count_text(run.step)),
        _tile("train time", seconds_text(run.train_seconds)),
        _tile("tokens", count_text(run.tokens)),
        _tile("supervised tokens", count_text(run.supervised_tokens)),
        _tile("tokens a second", count_text(run.tokens_per_s)),
    ]
    return element("section", element("div", *scores, class_="scores"), element("div", *numbers, class_="tiles"))


def _tile(name: str, *value: object) -> Markup:
    return element("div", element("strong", *value), element("span", name), class_="tile")


def curves(run: RunView) -> Markup:
    """Loss, scores, learning rate and gradient norm over the steps."""
    validation = Line("validation", list(run.val_losses), "validation", joined=False)
    small = [chart(f"{task}, share right", [_line(list(points))], small=True) for task, points in run.scores.items()]
    small.append(chart("learning rate", [_line(run.series("lr"))], small=True))
    small.append(chart("gradient norm", _dots_and_average(run.series("grad_norm")), small=True))
    beta = fitting_beta(len(run.step_lines))
    return section(
        "Training",
        Markup(chart("loss by step", [*_dots_and_average(run.series("loss")), validation])),
        element("div", *map(Markup, small), class_="row"),
        note=f"Smoothed lines are exponential averages with β = {beta:.2g}." if beta else None,
    )


def validation(run: RunView) -> Markup:
    """Held-out conversations before and after; a source of its own line where there are several."""
    names = {"val_loss": "loss", "val_bpb": "bits per byte", "val_accuracy": "tokens right"}
    rows = []
    for key, values in run.validation.items():
        source = key.removeprefix("val_loss/")
        name = names.get(key) or (f"loss on {source}" if source != key else None)
        if name is not None:
            show = share_text if key == "val_accuracy" else number_text
            rows.append((name, *map(show, values)))
    part = next((share for _, share in reversed(run.points("val_part"))), None)
    note = None if part is None else f"Measured on {share_text(part)} of the conversations held out (eval.rows)."
    return section("Validation", table(("measure", "before", "after"), rows), note=note) if rows else _NOTHING


def faults(run: RunView) -> Markup:
    """Steps that were not fine: what happened, what was done, and who was to blame."""
    if not run.events:
        return _NOTHING
    became = {"stop": "stopped", "skip": "left out", "rollback": "rolled back", "take": "taken all the same"}
    rows = [
        (
            count_text(event.get("step")),
            str(event.get("reason") or DASH),
            became.get(str(event.get("action")), DASH),
            _blamed(event),
        )
        for event in run.events[:_MOST_FAULTS]
    ]
    left = len(run.events) - len(rows)
    note = "Run one again with: whet train --replay RUN/faults/step-NNNNNN.json"
    shown = table(("step", "what happened", "the step was", "at fault"), rows)
    return section("Faults", shown, note=note + (f" ({left} more in events.jsonl)" if left > 0 else ""))


def _blamed(event: dict[str, Any]) -> str:
    """Places of conversations, or the weights."""
    if event.get("all"):
        return "the weights: every conversation of the step fails"
    places = [f"{each.get('source')}:{each.get('line')}" for each in event.get("conversations") or ()]
    more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
    layer = f" (first bad layer: {event['layer']})" if event.get("layer") else ""
    return (", ".join(places[:_MOST_PLACES]) + more or DASH) + layer


def _line(series: Series) -> Line:
    shown = thinned([value for _, value in series], _MOST_POINTS)
    return Line("measured", [series[i] for i in shown], "main")


def _dots_and_average(series: Series) -> list[Line]:
    """What was measured as dots, and a line through their noise where there are enough of them."""
    values = [value for _, value in series]
    shown = thinned(values, _MOST_POINTS)
    beta = fitting_beta(len(values))
    average = smoothed(values, beta)
    return [
        Line("training", [series[i] for i in shown], "raw", joined=False),
        Line("smoothed", [(series[i][0], average[i]) for i in shown] if beta else [], "main"),
    ]


def samples(run: RunView) -> Markup:
    """The same prompts before and after."""
    if not run.pairs:
        return _NOTHING
    pairs = pick(run.pairs, _FEW_SAMPLES)
    others = [pair for pair in run.pairs if pair not in pairs][:_MORE_SAMPLES]
    more = element("details", element("summary", f"{len(others)} more"), *map(_example, others)) if others else _NOTHING
    wrong = sum(pair.wrong_after for pair in run.pairs)
    judged = sum(bool(pair.after and pair.after.right is not None) for pair in run.pairs)
    note = f"{len(pairs)} of {len(run.pairs)} held-out samples." + (
        f" After training, {wrong} of {judged} answers are wrong, and wrong ones are among those shown."
        if wrong
        else ""
    )
    return section("Before and after", *map(_example, pairs), more, note=note)


def _example(pair: Pair) -> Markup:
    columns = [
        element("div", element("h3", "expected"), element("pre", pair.sample.expected)),
        _answer("before", pair.before),
        _answer("after", pair.after),
    ]
    return element(
        "article", element("pre", pair.sample.prompt, class_="prompt"), element("div", *columns, class_="answers")
    )


def _answer(title: str, sample: Sample | None) -> Markup:
    if sample is None:
        return element("div", element("h3", title), element("pre", DASH))
    verdict = {True: "right", False: "wrong", None: ""}[sample.right]
    heading = element("h3", f"{title}, step {sample.step}" if sample.step else title, _verdict(verdict))
    return element("div", heading, element("pre", sample.answer or "(empty)"), class_=verdict)


def _verdict(verdict: str) -> Markup:
    return element("span", {"right": "✓ right", "wrong": "✗ wrong"}[verdict], class_="verdict") if verdict else _NOTHING


def ledger(run: RunView) -> Markup:
    """Every conversation accounted for."""
    if not run.sources:
        return _NOTHING
    head = ("source", "use", "in", "kept", "truncated", "dropped", "tokens", "supervised", "end supervised")
    rows = [
        (
            element("code", source.name),
            source.use,
            *map(count_text, (source.given, source.kept, source.truncated, source.dropped, source.tokens)),
            _supervised(source),
            share_text(source.eos_supervised),
        )
        for source in run.sources
    ]
    reasons = [_reason(source, reason) for source in run.sources for reason in source.notes]
    listed = element("ul", *reasons, class_="reasons") if reasons else _NOTHING
    return section("Data", table(head, rows), listed, note=_balance(run.sources))


def _balance(sources: tuple[Source, ...]) -> Markup:
    missing = [source.unaccounted for source in sources]
    known = [number for number in missing if number is not None]
    if len(known) < len(missing):
        return element("span", "The ledger lacks counts: whether every conversation is accounted for is not known.")
    if any(known):
        return element("span", f"{count_text(sum(map(abs, known)))} conversations are not accounted for.", class_="bad")
    return element("span", "✓ Every conversation is accounted for: in = kept + dropped.", class_="good")


def _supervised(source: Source) -> str:
    text = count_text(source.supervised_tokens)
    if source.supervised_tokens is None or not source.tokens:
        return text
    return f"{text} ({share_text(source.supervised_tokens / source.tokens)})"


def _reason(source: Source, reason: str) -> Markup:
    places = source.first.get(reason, [])
    first: list[object] = [", first at "] if places else []
    for place in places[:_MOST_PLACES]:
        first += [element("code", place), " "]
    return element("li", f"{count_text(source.notes[reason])} × ", element("b", reason), f" in {source.name}", *first)


def exports(run: RunView) -> Markup:
    """What was shipped, and the proof that it is what was trained."""
    if not run.certificates:
        return _NOTHING
    head = ("export", "verified", "largest logit difference", "same next token", "conversations compared")
    rows = [
        (
            certificate.get("kind"),
            element("span", "✓ verified", class_="good")
            if certificate.get("verified") is True
            else element("span", "✗ not verified", class_="bad"),
            number_text(measured(certificate.get("max_logit_difference"))),
            share_text(measured(certificate.get("same_next_token"))),
            count_text(measured(certificate.get("conversations"))),
        )
        for certificate in run.certificates
    ]
    return section("Exports", table(head, rows), note="An export is loaded back and compared before it is called done.")


def plan(run: RunView) -> Markup:
    """What was decided before step 1, and what it ran on."""
    plan, status = run.plan, run.status

    def number(key: str) -> float | None:
        return measured(plan.get(key))

    trained, all_of_them = number("trainable_parameters"), number("parameters")
    part = f" of {count_text(all_of_them)} ({share_text(trained / all_of_them)})" if trained and all_of_them else ""
    batch = plan.get("batch")
    mfu = [value for _, value in run.points("mfu")]
    values: dict[str, object] = {
        "model": run.setting("model", "path"),
        "trainable parameters": count_text(trained) + part if trained is not None else None,
        "device": plan.get("device_name") or plan.get("device"),
        "processes": count_text(number("world")),
        "precision": plan.get("precision"),
        "attention": plan.get("attention"),
        "packing": plan.get("packing"),
        "packing efficiency": share_text(number("efficiency")),
        "rows": count_text(number("rows")),
        "row length": count_text(number("row_length")),
        "rows in a micro-batch": count_text(number("micro_rows")),
        "batch": ", ".join(f"{n} {unit}" for unit, n in batch.items()) if isinstance(batch, dict) else batch,
        "epochs": number_text(number("epochs")),
        "conversations trained on": count_text(run.conversations),
        "peak memory": f"{run.peak_gib:.2f} GiB" if run.peak_gib is not None else None,
        "model FLOPs": number_text(run.flops),
        "FLOPs utilisation, mean": share_text(sum(mfu) / len(mfu)) if mfu else None,
        "host": status.host,
        "started": time_text(status.started),
        "last heard of": time_text(status.heartbeat),
        "exit code": None if status.exit_code is None else str(status.exit_code),
    }
    return section("Plan and machine", facts(values))


def config(run: RunView) -> Markup:
    """The resolved configuration, folded away."""
    return element(
        "section", element("details", element("summary", "Resolved configuration"), element("pre", run.config_text))
    )
