"""The conversations behind a point of a curve: which ones a step had, their text, mask and losses."""

from __future__ import annotations

from collections.abc import Iterable
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

_MAX_TOKENS = 4000
"""Of a conversation that are shown."""
_MAX_CONVERSATIONS = 256


class RunData:
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


def describe_document(data: RunData, document: int) -> dict[str, Any]:
    """The text of a document in segments with and without loss."""
    ids, loss = data.store.ids(document)[:_MAX_TOKENS].tolist(), data.store.loss(document)[:_MAX_TOKENS]
    length = int(data.store.lengths[document])
    origin = data.store.origin(document)
    return {
        "document": document, "source": mask_secrets(origin.source), "line": origin.line, "tokens": length,
        "supervised": int(data.store.targets[document]), "shown": len(ids),
        "segments": supervised_segments(ids, loss.tolist(), data.decoder),
    }  # fmt: skip


def conversations_of_step(folders: RunsFolder, run: Path, step: int) -> dict[str, Any]:
    """The conversations of a step, counted from 1, in the order of the plan."""
    plan = Plan.load(folders.require_inside(run / "plan"))
    if not 1 <= step <= len(plan):
        raise NotFoundError(f"{run.name}: there is no step {step}; the plan has {len(plan)}")
    documents = [int(document) for document in np.asarray(plan.documents_of(step - 1))]
    data = RunData(folders, run)
    if any(document >= len(data.store) for document in documents):
        raise WhetError(f"{run.name}: its plan and its data do not belong together. Was the store prepared again?")
    return {"step": step, "of": len(documents), "conversations": describe_documents(data, documents)}


def describe_documents(data: RunData, documents: Iterable[int]) -> list[dict[str, Any]]:
    """The first of many."""
    return [describe_document(data, document) for document in list(documents)[:_MAX_CONVERSATIONS]]
