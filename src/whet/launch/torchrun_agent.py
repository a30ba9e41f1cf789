"""torchrun with the same arguments that writes a failure report for `whet launch` instead of printing a traceback.

`python -m whet.launch.torchrun_agent` is the parent of a run's processes on this machine and a child of `whet launch`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from whet.core.display import escape_controls, mask_secrets
from whet.core.errors import describe_error
from whet.core.signals import terminate_with_parent

REPORT_VARIABLE = "WHET_LAUNCH_REPORT"
"""Environment variable with the path of the report."""


def main(arguments: list[str]) -> int:
    """Run all workers to their end; 0 if none failed."""
    terminate_with_parent()  # if whet launch is killed, the run saves and stops
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import main as torchrun

    _silence_torch_loggers()
    try:
        try:
            torchrun(arguments)
        except RendezvousConnectionError:  # another agent on this machine may host the store
            torchrun([word.replace("is_host=true", "is_host=false") for word in arguments])
    except ChildFailedError as error:
        _write_report([_failure_record(rank, failure) for rank, failure in error.failures.items()])
        return 1
    except SignalException:
        return 1
    except Exception as error:
        message = mask_secrets(f"torchrun: {describe_error(error)}")
        sys.stderr.write(f"error: {escape_controls(message)}\n")
        _write_report([{"rank": None, "exit_code": 1, "message": message, "time": 0}])
        return 1
    return 0


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


def _silence_torch_loggers() -> None:
    """`whet launch` prints one line instead of what torchrun logs about failed workers."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
