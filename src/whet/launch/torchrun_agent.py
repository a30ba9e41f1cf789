"""torchrun with the same arguments that writes a failure report for `whet launch` instead of printing a traceback.

`python -m whet.launch.torchrun_agent` is the parent of a run's processes on this machine and a child of `whet launch`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from whet.core.display import escape_controls, mask_secrets
from whet.core.errors import ExitCode, describe_error
from whet.core.signals import exit_process, terminate_with_parent

REPORT_VARIABLE = "WHET_LAUNCH_REPORT"
"""Environment variable with the path of the report."""


def main(arguments: list[str]) -> int:
    """Run all workers to their end; 0 if none failed."""
    terminate_with_parent()  # if whet launch is killed, the run saves and stops
    _import_torch_quietly()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from whet.core.rendezvous import RendezvousError

    _silence_torch_loggers()
    try:
        _store, arguments = _join_machines(arguments)  # kept: this process may host it
        torchrun(arguments)
    except RendezvousError as error:
        if error.exit_code == ExitCode.INPUT:  # `whet launch` reports others
            sys.stderr.write(f"error: {escape_controls(mask_secrets(str(error)))}\n")
        _write_report([{"rank": None, "exit_code": error.exit_code, "message": str(error), "time": 0, "final": True}])
        return 1
    except ChildFailedError as error:
        _write_report([_failure_record(rank, failure) for rank, failure in error.failures.items()])
        return 1
    except (SignalException, KeyboardInterrupt):
        return 1
    except Exception as error:
        message = mask_secrets(f"torchrun: {describe_error(error)}")
        sys.stderr.write(f"error: {escape_controls(message)}\n")
        _write_report([{"rank": None, "exit_code": 1, "message": message, "time": 0}])
        return 1
    return 0


def _join_machines(arguments: list[str]) -> tuple[Any, list[str]]:
    """Wait for the other machines, if there are any. Returns the store and the arguments, with who hosts it."""
    given = dict(reversed(list(itertools.pairwise(arguments))))  # the first wins: what follows is the run's command
    if "--rdzv-endpoint" not in given:
        return None, arguments
    from whet.core.rendezvous import StartBarrier, join_rendezvous

    host, _, port = given["--rdzv-endpoint"].rpartition(":")
    barrier = StartBarrier(host.strip("[]"), int(port), given["--rdzv-id"], int(given["--nnodes"]))
    store, is_host = join_rendezvous(barrier, given["--rdzv-conf"] == "is_host=true")
    return store, arguments if is_host else [word.replace("is_host=true", "is_host=false") for word in arguments]


def _failure_record(rank: int, failure: Any) -> dict[str, Any]:
    """torch's record of a failed worker as JSON; without an error report the message is empty."""
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    elif failure.exitcode < 0:
        message = f"killed by {failure.signal_name()}"
    else:
        message = ""
    return {"rank": rank, "exit_code": failure.exitcode, "message": message, "time": failure.timestamp}


def _write_report(failures: list[dict[str, Any]]) -> None:
    if REPORT_VARIABLE in os.environ:
        with contextlib.suppress(OSError):
            Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(failures))


def _import_torch_quietly() -> None:
    """Without C++ stack traces for every attempt to connect. Workers keep their messages."""
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "FATAL"
    import torch.distributed  # noqa: F401

    if level is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]


def _silence_torch_loggers() -> None:
    """`whet launch` prints one line instead of what torchrun logs about failed workers."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))  # a thread may still wait for a program that is no store
