"""`whet inspect`: documents and packed rows as the model sees them; of a run, what a step was trained on."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from whet.config import Config, read_config
from whet.core.console import info, progress, result_console
from whet.core.display import escape_controls
from whet.core.errors import WhetError
from whet.core.files import require_file_place, write_named_file
from whet.data.conversation import Origin
from whet.data.plan.planner import Plan
from whet.data.prepare.store import MANIFEST, Store, StoreCheck
from whet.data.read.containers.token_files import TokenFile
from whet.data.render.detokenize import Decoder, open_decoder, supervised_segments
from whet.evaluation.training_losses import LOSS_PATTERNS, LossPattern
from whet.run.data import RunData, load_ledger_data, make_plan, prepare_data
from whet.run.loss_histories import ConversationHistories
from whet.run.models.model_reference import resolve_model_reference

_SUPERVISED_STYLE, _CONTEXT_STYLE = "bold green", "dim"
_WIDTH = 100  # characters of a drawn row


class DocumentSource(Protocol):
    """Documents by index: a store or a .bin file."""

    def __len__(self) -> int: ...

    def ids(self, document: int) -> Any: ...

    def loss(self, document: int) -> Any: ...

    def origin(self, document: int) -> Origin: ...


@dataclass(frozen=True, slots=True)
class InspectionTarget:
    """What to show; `config` and `data` exist for a configuration or a run, which have a plan."""

    name: str
    documents: DocumentSource
    numbers: Sequence[int]
    """Indices of the documents that are used."""
    decoder: Decoder | None
    config: Config | None = None
    data: RunData | None = None

    def check(self) -> StoreCheck:
        """Explains an error that comes from a damaged store."""
        return StoreCheck([self.documents] if isinstance(self.documents, Store) else [])


def open_target(what: Path, overrides: Sequence[str], tokenizer: Path | None, validation: bool) -> InspectionTarget:
    """Open a store, a configuration (prepares its data if needed), a run, or a .bin file."""
    if what.suffix in (".bin", ".idx") or Path(f"{what}.idx").exists():
        file = TokenFile(str(what), what)
        info("this file has no loss mask, so every token is shown as supervised; `mask` of a recipe's source sets one")
        return InspectionTarget(str(what), file, range(len(file)), open_decoder(tokenizer) if tokenizer else None)
    if (what / MANIFEST).exists():
        store = Store(what)
        return InspectionTarget(str(what), store, range(len(store)), open_decoder(tokenizer or what))
    if (what / "config.yaml").exists():
        what = what / "config.yaml"
    if what.is_dir():
        raise WhetError(f"{what}: neither a store ({MANIFEST}) nor a run (config.yaml)")
    is_run = what.name == "config.yaml"
    config = resolve_model_reference(read_config(what, overrides, expand="set" if is_run else "all"))
    ledger = what.parent / "ledger.json"
    data = load_ledger_data(config, ledger) if ledger.exists() and not overrides else prepare_data(config)
    used, numbers = data.train.store, data.train_documents
    if validation:
        if data.validation is None:
            raise WhetError(f"{what}: the configuration has no validation data (data.validation)")
        used, numbers = data.validation, data.validation_documents
    return InspectionTarget(str(what), used, numbers.tolist(), open_decoder(tokenizer or used.folder), config, data)


def show_documents(target: InspectionTarget, start: int, limit: int, pieces: bool, silent: bool) -> dict[str, Any]:
    """Print documents with supervised tokens marked, and return them."""
    total = len(target.numbers)
    if start >= total and limit:
        raise WhetError(f"{target.name}: no document {start}; there are {total}, counted from 0")
    console = result_console()
    shown = []
    for number in target.numbers[start : start + limit]:
        ids, loss = target.documents.ids(number).tolist(), [int(x) for x in target.documents.loss(number)]
        origin = target.documents.origin(number)
        text = target.decoder.text(ids) if target.decoder else None
        shown.append(
            {"id": number, "source": origin.source, "line": origin.line, "ids": ids, "loss": loss, "text": text}
        )
        if silent:
            continue
        console.print(
            _render_title(f"document {number} of {total} · {origin} · {len(ids)} tokens, {sum(loss[1:])} supervised")
        )
        if target.decoder is None:
            console.print(_render_ids(ids, loss, console.is_terminal))
        elif pieces:
            console.print(_render_tokens(ids, loss, target.decoder))
        else:
            console.print(_highlight(supervised_segments(ids, loss, target.decoder), console.is_terminal))
    return {"documents": shown}


def _highlight(parts: Sequence[tuple[str, bool]], in_colour: bool) -> Text:
    out = Text()
    for text, supervised in parts:
        shown = escape_controls(text)
        out.append(
            shown if in_colour or not supervised else f"⟦{shown}⟧",
            style=_SUPERVISED_STYLE if supervised else _CONTEXT_STYLE,
        )
    return out


def _render_ids(ids: Sequence[int], loss: Sequence[int], in_colour: bool) -> Text:
    parts = [
        (" ".join(str(number) for number, _ in run) + " ", bool(supervised))
        for supervised, run in itertools.groupby(zip(ids, loss, strict=True), key=lambda pair: pair[1])
    ]
    return _highlight(parts, in_colour)


def _render_title(text: str) -> Text:
    return Text(f"── {escape_controls(text)} ──", style="bold")


def _render_tokens(ids: Sequence[int], loss: Sequence[int], decoder: Decoder) -> Text:
    out = Text()
    for position, (number, supervised) in enumerate(zip(ids, loss, strict=True)):
        mark = "supervised" if supervised else " " * len("supervised")
        line = f"{position:6}  {number:7}  {mark}  {escape_controls(decoder.piece(number))}\n"
        out.append(line, style=_SUPERVISED_STYLE if supervised else _CONTEXT_STYLE)
    return out


def write_counts(target: InspectionTarget, path: Path) -> dict[str, Any]:
    """Write a CSV line per document: source, line, tokens, supervised tokens."""
    require_file_place("--count", path)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["document", "source", "line", "tokens", "supervised"])
    tokens = supervised = 0
    with progress("counting", len(target.numbers)) as bar:
        for number in target.numbers:
            origin, loss = target.documents.origin(number), target.documents.loss(number)
            targets = int(loss[1:].sum())
            writer.writerow([number, origin.source, origin.line, len(loss), targets])
            tokens, supervised = tokens + len(loss), supervised + targets
            bar.advance()
    write_named_file("--count", path, text.getvalue())
    info(f"{path}: {len(target.numbers):,} documents, {tokens:,} tokens, {supervised:,} supervised")
    return {
        "file": str(path), "documents": len(target.numbers), "tokens": tokens, "supervised_tokens": supervised,
    }  # fmt: skip


def show_batch(target: InspectionTarget, step: int, silent: bool) -> dict[str, Any]:
    """Draw the packed rows of a step, and return them."""
    if target.config is None or target.data is None:
        raise WhetError(f"{target.name}: --batch needs a configuration or a run; a store alone has no steps")
    plan, row_length = make_plan(target.config, target.data), target.config.row_length
    if not plan.step_offset < step <= plan.last_step:
        raise WhetError(f"--batch {step}: the run has the steps {plan.step_offset + 1} to {plan.last_step}")
    rows = [_row_layout(target.data.train.store, documents.tolist()) for documents in plan.rows_of(step - 1)]
    if not silent:
        _draw_rows(rows, step, plan, row_length)
    return {"step": step, "steps": plan.last_step, "row_length": row_length, "rows": rows}


def _row_layout(store: Store, documents: Iterable[int]) -> dict[str, Any]:
    at, found = 0, []
    for document in documents:
        end = at + int(store.lengths[document])
        found.append(
            {
                "id": document,
                "origin": str(store.origin(document)),
                "start": at,
                "end": end,
                "supervised": int(store.targets[document]),
            }
        )
        at = end
    return {"tokens": at, "documents": found}


def _draw_rows(rows: Sequence[dict[str, Any]], step: int, plan: Plan, row_length: int) -> None:
    console = result_console()
    tokens = sum(row["tokens"] for row in rows)
    title = f"step {step} of {plan.last_step} · {len(rows)} rows of {row_length} tokens · together {tokens:,} tokens"
    console.print(_render_title(title))
    for number, row in enumerate(rows):
        bar = Text(f"{number:4} ")
        for i, document in enumerate(row["documents"]):
            cells = _bar_cells(document["end"], row_length) - _bar_cells(document["start"], row_length)
            full = round(cells * document["supervised"] / max(1, document["end"] - document["start"]))
            style = ("cyan", "yellow")[i % 2]
            bar.append("│" + "░" * max(0, cells - full - 1) + "█" * full, style=style)
        bar.append("│" + "·" * (_WIDTH - _bar_cells(row["tokens"], row_length)), style="dim")
        bar.append(f" {row['tokens']}/{row_length}, {len(row['documents'])} documents")
        console.print(bar)
    console.print("█ supervised, ░ context, · padding, │ document boundary", style="dim")


def _bar_cells(tokens: int, row_length: int) -> int:
    return round(tokens * _WIDTH / row_length)


# Of a run (`--step N`, `--losses`): what a step was trained on, and which conversations are hard to learn.

_HIGH, _VERY_HIGH = 1.0, 3.0
"""−log p: a probability below 37 %, and below 5 %."""
_TITLES: dict[LossPattern, str] = {
    "never-learned": "never learned: the loss has hardly fallen since the conversation was first seen",
    "forgotten": "forgotten: the loss was lower before",
    "suspicious": "suspicious labels: the loss is far above that of others at the same time",
}


def show_step(run: Path, step: int, limit: int, pieces: bool, silent: bool) -> dict[str, Any]:
    """Print the conversations of a step with the loss of each token, the highest loss first, and return all of them."""
    from whet.run.step_losses import step_conversations

    require_run(run)
    found = step_conversations(run, step)
    if silent:
        return found.as_dict()
    console = result_console()
    if not found.exact:
        after = f"after step {found.weights}" if found.weights else "before the first step"
        info(
            f"the losses are those of the weights {after}, the nearest checkpoint"
            + (f": a replay would take {found.replay_s:.0f} s" if found.replay_s is not None else "")
        )
    ranked = sorted(found.conversations, key=lambda each: -(each.loss if each.loss is not None else -1.0))
    for each in ranked[:limit]:
        place = f"{each.source}:{each.line}"
        title = f"step {step} · {place} · {sum(each.supervised)} supervised tokens · loss {_number(each.loss)}"
        console.print(_render_title(title))
        shown = Text()
        for position, (text, loss) in enumerate(zip(each.texts, each.losses, strict=True)):
            if pieces:
                line = (
                    f"{position:6}  {each.ids[position]:7}  {_number(loss):>7}  {escape_controls(repr(text)[1:-1])}\n"
                )
                shown.append(line, style=_style(loss))
            else:
                note = "" if loss is None or loss < _HIGH else f"⟨{loss:.1f}⟩"
                shown.append(escape_controls(text) + note, style=_style(loss))
        console.print(shown)
    if limit < len(ranked):
        info(f"{limit} of {len(ranked)} conversations, those with the highest loss; --limit shows more")
    return found.as_dict()


def show_losses(run: Path, limit: int, silent: bool) -> dict[str, Any]:
    """Print the conversations that were never learned, forgotten, or look mislabelled, and return them."""
    require_run(run)
    found = ConversationHistories.read(run)
    if silent:
        return found.as_dict(limit)
    console = result_console()
    seen = len(found.histories)
    console.print(f"{seen:,} of {found.total:,} conversations seen")
    if seen and found.histories.visits.max() < 2:
        info("no conversation has been seen twice yet, so none counts as never learned or forgotten")
    for pattern in LOSS_PATTERNS:
        rows = found.histories.rows(pattern)
        console.print(Text(f"{_TITLES[pattern]} ({len(rows):,})", style="bold"))
        if not len(rows):
            continue
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("place", overflow="fold")
        for title in ("tokens", "losses, by step"):
            table.add_column(title, justify="right" if title == "tokens" else "left")
        for each in found.showing(pattern, limit):
            losses = "  ".join(f"{step}: {loss:.3g}" for step, loss in zip(each.steps, each.losses, strict=True))
            table.add_row(Text(escape_controls(f"{each.source}:{each.line}")), str(each.tokens), losses)
        console.print(table)
    return found.as_dict(limit)


def require_run(run: Path) -> None:
    """Refuse what has no steps."""
    if not (run / "config.yaml").exists():
        raise WhetError(f"{run}: not a run: it has no config.yaml. --step and --losses need the folder of a run")


def _style(loss: float | None) -> str:
    if loss is None:
        return "dim"
    return "bold red" if loss >= _VERY_HIGH else "yellow" if loss >= _HIGH else "green"


def _number(loss: float | None) -> str:
    return "—" if loss is None else f"{loss:.3f}"
