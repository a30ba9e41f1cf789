"""`whet prepare`"""

from __future__ import annotations

import datetime
import re
import time
from typing import Annotated, Any, Literal

import typer

from whet.cli.common import JsonOption, OverridesArgument, QuietOption, RecipeArgument, cli_command
from whet.core.errors import WhetError


@cli_command
def prepare(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Prepare part I of N, counted from 0, on one of N machines. auto, with `whet launch --on slurm`: "
            "whet chooses N by the size of the data, and a last job merges.",
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the parts of all machines into one store.")] = False,
    date: Annotated[
        str | None,
        typer.Option(
            metavar="YYYY-MM-DD", help="The date that chat templates print, if parts are prepared on different days."
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> dict[str, Any]:
    """Turn raw data into tokens with loss masks, and account for every conversation.

    `whet train` does this itself. Run it to inspect the result, or ahead of training on many machines that share a
    folder (data.store, or the environment variable WHET_CACHE): with --shard on each, then once with --merge.
    """
    from whet.config import read_config
    from whet.core.console import info
    from whet.data.prepare.ledger import sum_accounts
    from whet.run.data import prepare_data, prepare_data_shard, require_data_shards
    from whet.run.models.model_reference import resolve_model_reference

    today = None if date is None else _parse_date(date)
    part = parse_shard(shard, merge)
    if part == "auto":
        raise WhetError(
            "--shard auto is for `whet launch --on slurm -- prepare …`, which starts the jobs. Without --shard, all "
            "cores of this machine prepare the data"
        )
    config = resolve_model_reference(read_config(recipe, overrides or []))
    if part is not None:
        folders = prepare_data_shard(config, *part, today)
        info(f"part {shard} is ready. When all parts are, run the same command with --merge")
        return {"shard": shard, "stores": folders}
    if merge:
        require_data_shards(config, today)
    began = time.perf_counter()
    data = prepare_data(config, today)
    seconds = time.perf_counter() - began
    ledger = data.ledger()
    result = sum_accounts(ledger["sources"])
    result |= {
        "store": str(data.train.store.folder),
        "stores": ledger["stores"],
        "overlap": ledger["overlap"],
        "tokens_per_s": None if data.train.reused else result["tokens"] / seconds,
        "reused": data.train.reused,
        "ledger": ledger["sources"],
        "lines": {use: str(store.ledger_lines) for use, store in data.stores().items() if store.ledger_lines},
    }
    _print_summary(result)
    for store in data.stores().values():
        if (hint := store.describe_ledger_lines()) is not None:
            info(hint)
    return result


def parse_shard(shard: str | None, merge: bool) -> tuple[int, int] | Literal["auto"] | None:
    """I and N of --shard I/N."""
    if shard is None:
        return None
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard, re.ASCII)
    if not merge and shard == "auto":
        return "auto"
    if match is None or int(match[1]) >= int(match[2]) or merge:
        raise WhetError(f"--shard {shard}: write I/N with I from 0 to N − 1, such as 0/4, and without --merge")
    return int(match[1]), int(match[2])


def _parse_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise WhetError(f"--date {text}: write a date as YYYY-MM-DD, such as 2026-11-17") from None


def _print_summary(result: dict[str, Any]) -> None:
    from whet.core.console import info

    counts = result["conversations"]
    info(
        f"{counts['kept']:,} of {counts['in']:,} conversations kept, {counts['dropped']:,} dropped, "
        f"{counts['truncated']:,} truncated, {counts['split']:,} split; {result['tokens']:,} tokens, "
        f"{result['supervised_tokens']:,} of them supervised"
    )
    numbers = result["reasons"] | result["notes"] | {"truncated": counts["truncated"]}
    for reason, places in result["first"].items():
        known = numbers.get(reason, result["duplicates"] if reason == "duplicate" else len(places))
        info(f"  {reason}: {known:,}, first {', '.join(places[:3])}")
    if result["overlap"]["conversations"]:
        info(
            f"  in both validation and training: {result['overlap']['conversations']:,}, first "
            f"{', '.join(result['overlap']['first'][:3])}"
        )
    info(f"store: {result['store']}" + (" (reused)" if result["reused"] else ""))
