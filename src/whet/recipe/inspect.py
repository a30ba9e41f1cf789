"""Looking at documents and packed rows as the model will see them."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from whet.config import Config, read_config
from whet.core.console import progress, say
from whet.core.errors import WhetError
from whet.core.files import atomic_write
from whet.data.conversation import Origin
from whet.data.decode_ids import Decoder, open_decoder, runs
from whet.data.external import TokenFile
from whet.data.plan import Plan
from whet.data.store import MANIFEST, Store
from whet.recipe.data import Data, prepare_data, recorded_data
from whet.recipe.plan import make_plan
from whet.recipe.start import from_run

_LEARNED, _GIVEN = "bold green", "dim"
_WIDTH = 100  # characters of a row that is drawn


class Documents(Protocol):
    """Documents by number, of a store or of a .bin file."""

    def __len__(self) -> int: ...

    def ids(self, document: int) -> Any: ...

    def loss(self, document: int) -> Any: ...

    def origin(self, document: int) -> Origin: ...


@dataclass(frozen=True, slots=True)
class Target:
    """What is looked at; the plan is there if it is a configuration or a run."""

    name: str
    documents: Documents
    numbers: Sequence[int]
    """Which of the documents."""
    decoder: Decoder | None
    config: Config | None = None
    data: Data | None = None


def open_target(what: Path, overrides: Sequence[str], tokenizer: Path | None, validation: bool) -> Target:
    """A store, a configuration (its data is prepared if need be), a run, or a .bin file."""
    if what.suffix in (".bin", ".idx") or Path(f"{what}.idx").exists():
        file = TokenFile(what)
        return Target(str(what), file, range(len(file)), open_decoder(tokenizer) if tokenizer else None)
    if (what / MANIFEST).exists():
        store = Store(what)
        return Target(str(what), store, range(len(store)), open_decoder(tokenizer or what))
    if (what / "config.yaml").exists():
        what = what / "config.yaml"
    if what.is_dir():
        raise WhetError(f"{what}: neither a store ({MANIFEST}) nor a run (config.yaml)")
    config = from_run(read_config(what, overrides))
    ledger = what.parent / "ledger.json"
    data = recorded_data(config, ledger) if ledger.exists() and not overrides else prepare_data(config)
    used, numbers = data.train.store, data.train_documents
    if validation:
        if data.validation is None:
            raise WhetError(f"{what}: the configuration has no validation data (data.validation)")
        used, numbers = data.validation, data.validation_documents
    return Target(str(what), used, numbers.tolist(), open_decoder(tokenizer or used.folder), config, data)


def show_documents(target: Target, start: int, limit: int, pieces: bool, silent: bool) -> dict[str, Any]:
    """Print some documents with what is learned marked, and return them."""
    total = len(target.numbers)
    if start >= total and limit:
        raise WhetError(f"{target.name}: there is no document {start}; there are {total}, counted from 0")
    console = Console(highlight=False, soft_wrap=True)
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
        console.print(_title(f"document {number} of {total} · {origin} · {len(ids)} tokens, {sum(loss[1:])} learned"))
        if target.decoder is None:
            console.print(_ids(ids, loss, console.is_terminal))
        elif pieces:
            console.print(_pieces(ids, loss, target.decoder))
        else:
            console.print(_marked(runs(ids, loss, target.decoder), console.is_terminal))
    return {"documents": shown}


def _marked(parts: Sequence[tuple[str, bool]], in_colour: bool) -> Text:
    out = Text()
    for text, learned in parts:
        out.append(text if in_colour or not learned else f"⟦{text}⟧", style=_LEARNED if learned else _GIVEN)
    return out


def _ids(ids: Sequence[int], loss: Sequence[int], in_colour: bool) -> Text:
    parts = [
        (" ".join(str(number) for number, _ in run) + " ", bool(learned))
        for learned, run in itertools.groupby(zip(ids, loss, strict=True), key=lambda pair: pair[1])
    ]
    return _marked(parts, in_colour)


def _title(text: str) -> Text:
    return Text(f"── {text} ──", style="bold")


def _pieces(ids: Sequence[int], loss: Sequence[int], decoder: Decoder) -> Text:
    out = Text()
    for place, (number, learned) in enumerate(zip(ids, loss, strict=True)):
        line = f"{place:6}  {number:7}  {'learned' if learned else '       '}  {decoder.piece(number)}\n"
        out.append(line, style=_LEARNED if learned else _GIVEN)
    return out


def write_counts(target: Target, path: Path) -> dict[str, Any]:
    """One line a document: where it came from, its tokens, how many are learned."""
    if not path.absolute().parent.is_dir():
        raise WhetError(f"--count {path}: there is no folder {path.absolute().parent}; make it first")
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["document", "source", "line", "tokens", "supervised"])
    tokens = supervised = 0
    with progress("counting", len(target.numbers)) as bar:
        for number in target.numbers:
            origin, loss = target.documents.origin(number), target.documents.loss(number)
            learned = int(loss[1:].sum())
            writer.writerow([number, origin.source, origin.line, len(loss), learned])
            tokens, supervised = tokens + len(loss), supervised + learned
            bar.advance()
    atomic_write(path, text.getvalue())
    say(f"{path}: {len(target.numbers):,} documents, {tokens:,} tokens, {supervised:,} learned")
    return {
        "file": str(path), "documents": len(target.numbers), "tokens": tokens, "supervised_tokens": supervised,
    }  # fmt: skip


def show_batch(target: Target, step: int, silent: bool) -> dict[str, Any]:
    """Draw the rows of a step, document by document, and return them."""
    if target.config is None or target.data is None:
        raise WhetError(f"{target.name}: --batch needs a configuration or a run; a store alone has no steps")
    plan, row_length = make_plan(target.config, target.data), target.config.row_length
    if step > len(plan):
        raise WhetError(f"--batch {step}: the run has {len(plan)} steps")
    rows = [_row(target.data.train.store, documents.tolist()) for documents in plan.rows_of(step - 1)]
    if not silent:
        _draw(rows, step, plan, row_length)
    return {"step": step, "steps": len(plan), "row_length": row_length, "rows": rows}


def _row(store: Store, documents: Iterable[int]) -> dict[str, Any]:
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


def _draw(rows: Sequence[dict[str, Any]], step: int, plan: Plan, row_length: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(_title(f"step {step} of {len(plan)} · {len(rows)} rows of {row_length} tokens"))
    for number, row in enumerate(rows):
        bar = Text(f"{number:4} ")
        for i, document in enumerate(row["documents"]):
            cells = _cells(document["end"], row_length) - _cells(document["start"], row_length)
            learned = round(cells * document["supervised"] / max(1, document["end"] - document["start"]))
            style = ("cyan", "yellow")[i % 2]
            bar.append("│" + "░" * max(0, cells - learned - 1) + "█" * learned, style=style)
        bar.append("│" + "·" * (_WIDTH - _cells(row["tokens"], row_length)), style="dim")
        bar.append(f" {row['tokens']}/{row_length}, {len(row['documents'])} documents")
        console.print(bar)
    console.print("█ learned, ░ given, · padding; each │ is the border of a document", style="dim")


def _cells(tokens: int, row_length: int) -> int:
    return round(tokens * _WIDTH / row_length)
