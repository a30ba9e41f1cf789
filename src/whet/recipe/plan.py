"""The plan of a run, from its configuration."""

from __future__ import annotations

from whet.config import Config
from whet.data.mixture import mix
from whet.data.plan import Plan
from whet.data.planner import Length, plan_by_conversations, plan_by_rows
from whet.recipe.data import Data


def make_plan(config: Config, data: Data) -> Plan:
    """Which conversations make which step."""
    train = config.train
    length = Length(train.steps, train.epochs, train.tokens)
    if (train.steps, train.epochs, train.tokens) == (None, None, None):
        length = Length(epochs=1.0)
    store, numbers = data.train.store, data.train_documents
    mixture = mix(numbers, store.sources[numbers], config.data.sources)
    common = (length, config.row_length, config.data.packing, config.data.bins, config.run.seed)
    if train.batch.conversations is not None:
        return plan_by_conversations(store.lengths, mixture, train.batch.conversations, *common)
    rows = train.batch.rows or (train.batch.tokens or 0) // config.row_length
    return plan_by_rows(store.lengths, mixture, rows, *common)
