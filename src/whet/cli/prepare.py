"""`whet prepare`"""

from __future__ import annotations

import time
from typing import Any

from whet.cli.common import Json, Overrides, Quiet, Recipe, verb


@verb
def prepare(recipe: Recipe, overrides: Overrides = None, quiet: Quiet = False, as_json: Json = False) -> dict[str, Any]:
    """Turn raw data into tokens with loss masks, and account for every conversation.

    `whet train` does this by itself; here it can be looked at, or done ahead on another machine.
    """
    from whet.config import read_config
    from whet.core.console import say
    from whet.recipe.data import prepare_data

    config = read_config(recipe, overrides or [])
    began = time.perf_counter()
    data = prepare_data(config)
    seconds = time.perf_counter() - began
    result = summarise(data.ledger()["sources"])
    result |= {
        "store": str(data.train.store.folder),
        "tokens_per_s": None if data.train.reused else result["tokens"] / seconds,
        "reused": data.train.reused,
    }
    counts = result["conversations"]
    say(
        f"{counts['kept']} of {counts['in']} conversations kept, {counts['dropped']} dropped, {counts['truncated']} "
        f"truncated; {result['tokens']:,} tokens, {result['supervised_tokens']:,} of them supervised"
    )
    for reason, places in result["first"].items():
        say(f"  {reason}: {result['reasons'].get(reason, counts['truncated'])}, first {', '.join(places[:3])}")
    say(f"store: {result['store']}" + (" (was there already)" if data.train.reused else ""))
    return result


def summarise(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    """The accounts of all sources in one."""
    reasons: dict[str, int] = {}
    first: dict[str, list[str]] = {}
    for account in accounts:
        for reason, places in account["first"].items():
            first.setdefault(reason, []).extend(places)
        for reason, number in account["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + number
    keys = ("in", "kept", "dropped", "truncated")
    return {
        "conversations": {key: sum(account["conversations"][key] for account in accounts) for key in keys},
        "reasons": reasons,
        "first": first,
        "tokens": sum(account["tokens"] for account in accounts),
        "supervised_tokens": sum(account["supervised_tokens"] for account in accounts),
    }
