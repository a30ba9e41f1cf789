"""Ask the hub for a model or dataset before a library does: one short, visible attempt after another, not minutes of
silence for every file."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import Literal

from whet.core.console import info, warn
from whet.core.errors import WhetError, first_line

_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
_TIMEOUT_S, _WAITS_S = 5.0, (1.0, 2.0, 4.0)
"""Of one attempt, and between two: at most 27 s in all."""


def is_hub_name(name: str) -> bool:
    """Whether a name has the form OWNER/NAME."""
    return _NAME.fullmatch(name) is not None


def reach_hub(name: str, kind: Literal["models", "datasets"] = "models") -> None:
    """Raise a WhetError if the hub has no such model or dataset, or cannot be reached and its cache has no copy; with a
    copy, the hub's libraries do not ask it again. Once for each name."""
    problem = _find_problem(name, kind)
    if problem is not None:
        raise WhetError(problem)


@functools.cache
def _find_problem(name: str, kind: str) -> str | None:
    """What is wrong; None: nothing."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    host = constants.ENDPOINT.partition("://")[2]
    info(f"{name}: asking {host}")
    answer = _request(f"{constants.ENDPOINT}/api/{kind}/{name}", host)
    if isinstance(answer, str):
        if _is_cached(name, kind):
            warn(f"{host} cannot be reached ({answer}): the copy of {name} in the cache is used")
            constants.HF_HUB_OFFLINE = True  # the libraries would try again for each file
            return None
        return (
            f"{name}: there is no such folder here, and {host} cannot be reached ({answer}). Check the name and the "
            "network; on a machine without one, give the folder of a downloaded copy"
        )
    if answer in (401, 403, 404):
        what = kind.removesuffix("s")
        return (
            f"{name}: {host} has no such {what}, or it needs your login (HTTP {answer}). Check the name; for a private "
            "or gated one accept its terms on its page, then: hf auth login"
        )
    if not _is_cached(name, kind):
        info(f"{name}: downloading; the next time it is read from {constants.HF_HUB_CACHE}")
    return None


def _request(url: str, host: str) -> int | str:
    """The HTTP status, or why there was none."""
    from huggingface_hub import get_session, get_token

    token, last = get_token(), ""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for number, wait in enumerate((*_WAITS_S, None), 1):
        try:
            status = int(get_session().get(url, headers=headers, timeout=_TIMEOUT_S).status_code)
            if status < 500 and status != 429:
                return status
            last = f"HTTP {status}"
        except Exception as error:  # of the HTTP library, which changes with the version of huggingface_hub
            last = first_line(error)
        if wait is not None:
            info(f"{host}: {last}; trying again in {wait:.0f} s (attempt {number} of {len(_WAITS_S) + 1})")
            time.sleep(wait)
    return last


def _is_cached(name: str, kind: str) -> bool:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())
