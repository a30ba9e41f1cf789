"""`whet prepare`"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, RecipeArgument, cli_command


@cli_command
def prepare(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Make part I of N (from 0), on one of N machines.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join the parts that the machines have made.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Turn raw data into tokens with loss masks, and account for every conversation.

    `whet train` does this by itself; here it can be looked at, or done ahead: with --shard on many machines that share
    a folder (data.store, or the environment variable WHET_CACHE), then once with --merge.
    """
    from whet.config import read_config
    from whet.core.console import info
    from whet.core.errors import WhetError
    from whet.run.data import prepare_data, prepare_data_shard, require_data_shards
    from whet.run.model_reference import resolve_model_reference

    config = resolve_model_reference(read_config(recipe, overrides or []))
    if shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", shard)
        if match is None or int(match[1]) >= int(match[2]) or merge:
            raise WhetError(f"--shard {shard}: write I/N with I from 0 to N − 1, such as 0/4, and without --merge")
        folders = prepare_data_shard(config, int(match[1]), int(match[2]))
        info(f"part {shard} is made. When all are, run the same with --merge")
        return {"shard": shard, "stores": folders}
    if merge:
        require_data_shards(config)
    began = time.perf_counter()
    data = prepare_data(config)
    seconds = time.perf_counter() - began
    ledger = data.ledger()
    result = sum_ledger(ledger["sources"])
    result |= {
        "store": str(data.train.store.folder),
        "stores": ledger["stores"],
        "overlap": ledger["overlap"],
        "tokens_per_s": None if data.train.reused else result["tokens"] / seconds,
        "reused": data.train.reused,
        "ledger": ledger["sources"],
    }
    _print_summary(result, info)
    return result


def _print_summary(result: dict[str, Any], say: Any) -> None:
    counts = result["conversations"]
    say(
        f"{counts['kept']:,} of {counts['in']:,} conversations kept, {counts['dropped']:,} dropped, "
        f"{counts['truncated']:,} truncated, {counts['split']:,} split; {result['tokens']:,} tokens, "
        f"{result['supervised_tokens']:,} of them supervised"
    )
    numbers = result["reasons"] | result["notes"] | {"truncated": counts["truncated"]}
    for reason, places in result["first"].items():
        known = numbers.get(reason, result["duplicates"] if reason == "duplicate" else len(places))
        say(f"  {reason}: {known:,}, first {', '.join(places[:3])}")
    if result["overlap"]["conversations"]:
        say(
            f"  in validation and training alike: {result['overlap']['conversations']:,}, first "
            f"{', '.join(result['overlap']['first'][:3])}"
        )
    say(f"store: {result['store']}" + (" (was there already)" if result["reused"] else ""))


def sum_ledger(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    """The accounts of all sources in one."""
    reasons: dict[str, int] = {}
    notes: dict[str, int] = {}
    first: dict[str, list[str]] = {}
    for account in accounts:
        for reason, places in account["first"].items():
            first.setdefault(reason, []).extend(places)
        for sums, own in ((reasons, account["reasons"]), (notes, account["notes"])):
            for reason, number in own.items():
                sums[reason] = sums.get(reason, 0) + number
    keys = ("in", "kept", "dropped", "truncated", "split")
    return {
        "conversations": {key: sum(account["conversations"][key] for account in accounts) for key in keys},
        "reasons": reasons,
        "notes": notes,
        "duplicates": sum(account["duplicates"] for account in accounts),
        "first": first,
        "tokens": sum(account["tokens"] for account in accounts),
        "supervised_tokens": sum(account["supervised_tokens"] for account in accounts),
    }
