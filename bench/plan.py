"""How long planning takes and how much memory: ten million conversations, each plan in a process of its own.

    python bench/plan.py [CONVERSATIONS]      default: 10000000

The lengths are log-normal with a mean of 216 tokens, in rows of 4096; the last line is a JSON object.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import numpy as np

from whet.data.plan.mixture import single_source_mixture
from whet.data.plan.planner import RunLength, packing_efficiency, plan_by_conversations, plan_by_rows

PLANNERS = {"conversations": plan_by_conversations, "rows": plan_by_rows}
CASES = [
    ("conversations", 16, "best-fit"), ("conversations", 64, "best-fit"), ("conversations", 512, "best-fit"),
    ("rows", 8, "best-fit"), ("conversations", 16, "none"), ("conversations", 16, "k-bin"), ("rows", 8, "k-bin"),
]  # fmt: skip


def peak_mib() -> int:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def one(count: int, kind: str, batch: int, packing: str) -> dict[str, object]:
    """Plan an epoch here and now."""
    lengths = np.random.default_rng(0).lognormal(5.2, 0.6, count).astype(np.int32).clip(8, 4096)
    mixture = single_source_mixture(np.arange(count))
    began = time.perf_counter()
    plan = PLANNERS[kind](lengths, mixture, batch, RunLength(epochs=1), 4096, packing, 16, 0)
    seconds = round(time.perf_counter() - began, 2)
    filled = round(packing_efficiency(plan, 4096), 4)
    return {"batch": f"{batch} {kind}", "packing": packing, "s": seconds, "peak_mib": peak_mib(), "efficiency": filled}


def main() -> None:
    count, *case = sys.argv[1:] or ["10000000"]
    if case:
        print(json.dumps(one(int(count), case[0], int(case[1]), case[2])))  # noqa: T201
        return
    found = []
    for kind, batch, packing in CASES:
        command = [sys.executable, __file__, count, kind, str(batch), packing]
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(line, end="", flush=True)  # noqa: T201
        found.append(json.loads(line))
    print(json.dumps({"conversations": int(count), "plans": found}))  # noqa: T201


if __name__ == "__main__":
    main()
