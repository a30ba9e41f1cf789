"""The conversations behind a point of a curve: which ones a step had, their text, mask and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from whet.core.checksums import read_hashed_json
from whet.core.display import mask_secrets
from whet.core.errors import WhetError
from whet.core.files import cache_dir, resolve_path
from whet.dash.runs_folder import NotFoundError, RunsFolder
from whet.data.plan.planner import Plan
from whet.data.prepare.store import MANIFEST, Store
from whet.data.render.detokenize import Decoder, open_decoder, supervised_segments
from whet.evaluation.training_losses import LOSS_PATTERNS, LossPattern, losses_of_step, read_training_losses
from whet.report.charts import downsample
from whet.report.formatting import finite_number
from whet.run.loss_histories import ConversationHistories, ConversationLoss

MAX_TOKENS = 4000
"""Of a conversation that are shown."""
MAX_CONVERSATIONS = 256


class RunStore:
    """A store of a run, with its tokenizer."""

    def __init__(self, folders: RunsFolder, run: Path, use: str = "train") -> None:
        ledger = run / "ledger.json"
        if not ledger.is_file():
            raise NotFoundError(f"{run.name}: it has no ledger.json yet, so its data is not known")
        stores = read_hashed_json(ledger).get("stores")
        place = stores.get(use) if isinstance(stores, dict) else None
        if not isinstance(place, str):
            raise NotFoundError(f"{run.name}: its ledger names no store of {use} data")
        self.store = open_store(folders, Path(place))
        self.decoder: Decoder = open_decoder(self.store.folder)


def open_store(folders: RunsFolder, place: Path) -> Store:
    """A store in whet's cache or in the folder of runs."""
    folder = resolve_path(place)
    is_known = folders.contains(folder) or folder.is_relative_to(resolve_path(cache_dir() / "stores"))
    if not is_known:
        raise NotFoundError(
            f"{place}: this store is neither in whet's cache ({cache_dir() / 'stores'}) nor in {folders.root}, so the "
            "page does not open it. Use: whet inspect RUN"
        )
    if not (folder / MANIFEST).exists():
        raise NotFoundError(f"{place}: the prepared data is gone. `whet prepare {'RUN/config.yaml'}` makes it again")
    return Store(folder)


def describe_document(data: RunStore, document: int) -> dict[str, Any]:
    """The text of a document in segments with and without loss."""
    ids, loss = data.store.ids(document)[:MAX_TOKENS].tolist(), data.store.loss(document)[:MAX_TOKENS]
    length = int(data.store.lengths[document])
    origin = data.store.origin(document)
    return {
        "document": document, "source": mask_secrets(origin.source), "line": origin.line, "tokens": length,
        "supervised": int(data.store.targets[document]), "shown": len(ids),
        "segments": supervised_segments(ids, loss.tolist(), data.decoder),
    }  # fmt: skip


def conversations_of_step(folders: RunsFolder, run: Path, step: int) -> dict[str, Any]:
    """The conversations of a step, counted from 1, the highest loss first, where losses are recorded."""
    plan = Plan.load(folders.require_inside(run / "plan"))
    if not plan.step_offset < step <= plan.last_step:
        known = f"{plan.step_offset + 1:,} to {plan.last_step:,}"
        raise NotFoundError(f"{run.name}: there is no step {step}; the plan has steps {known}")
    documents = [int(document) for document in np.asarray(plan.documents_of(step - 1))]
    data = RunStore(folders, run)
    if any(document >= len(data.store) for document in documents):
        raise WhetError(f"{run.name}: its plan and its data do not belong together. Was the store prepared again?")
    recorded = losses_of_step(read_training_losses(run), step)
    losses = dict(zip(recorded["document"].tolist(), recorded["loss"].tolist(), strict=True))
    worst_first = np.argsort([-_rank(losses.get(document)) for document in documents], kind="stable").tolist()
    found = [
        describe_document(data, document) | {"loss": finite_number(losses.get(document))}
        for document in (documents[place] for place in worst_first[:MAX_CONVERSATIONS])
    ]
    return {"step": step, "of": len(documents), "recorded": bool(losses), "conversations": found}


def _rank(loss: float | None) -> float:
    """A loss that is not finite is the worst; one that was not recorded comes last."""
    return -1.0 if loss is None else 1e300 if loss != loss else loss


# Losses over the run.

_SORTS = ("last", "first", "lowest", "score", "visits", "tokens")
_MAX_VISITS = 60


def loss_histories(
    folders: RunsFolder, run: Path, pattern: LossPattern | None, by: str, ascending: bool, start: int, limit: int
) -> dict[str, Any]:
    """The conversations of a run, with their losses whenever they were seen; a page of those that show a pattern."""
    if by not in _SORTS:
        raise WhetError(f"sort: {by!r} is not one of {', '.join(_SORTS)}")
    try:
        RunStore(folders, run)  # the store is one that the page may read
        found = ConversationHistories.read(run)
    except WhetError as error:  # a run of an earlier version, or a damaged one: the other parts of its page are there
        return {"total": 0, "seen": 0, "problem": mask_secrets(str(error))}
    histories = found.histories
    rows = np.arange(len(histories)) if pattern is None else histories.rows(pattern)
    keys = getattr(histories, by)[rows]
    if by != "score" or pattern is None:  # those of a pattern come with the worst first
        rows = rows[np.argsort(keys if ascending else -keys, kind="stable")]
    counts = {each: len(histories.rows(each)) for each in LOSS_PATTERNS}
    shown = [_history_json(found.conversation(int(row))) for row in rows[start : start + limit]]
    return {"total": found.total, "seen": len(histories), "patterns": counts, "matching": len(rows), "rows": shown}


def _history_json(each: ConversationLoss) -> dict[str, Any]:
    kept = downsample(np.array(each.losses), _MAX_VISITS)
    return {
        "document": each.document, "source": mask_secrets(each.source), "line": each.line, "tokens": each.tokens,
        "visits": len(each.steps), "score": round(each.score, 2), "first": finite_number(each.losses[0]),
        "last": finite_number(each.losses[-1]), "steps": [each.steps[i] for i in kept],
        "losses": [finite_number(each.losses[i]) for i in kept],
    }  # fmt: skip


def one_document(folders: RunsFolder, run: Path, use: str, document: int) -> dict[str, Any]:
    """A conversation by its number in a store."""
    data = RunStore(folders, run, use)
    if not 0 <= document < len(data.store):
        raise NotFoundError(f"{run.name}: there is no conversation {document}; the store has {len(data.store):,}")
    return describe_document(data, document)
