"""A process that starts the trials of this machine as forks of itself: it has torch and whet imported.

`python -m whet train` spends four fifths of a short run on imports; a fork has none. Arguments are further modules to
import. It reads JSON lines on stdin and answers on stdout:

    → {"start": 3, "argv": ["python", "-m", "whet", "train", …], "env": {…}, "log": "FILE"}
    → {"start": 4, "argv": ["python", "sft.py", …], "env": {…}, "log": "FILE", "stop": "FILE"}
    → {"signal": 15}                       to all trials
    ← {"ready": true, "device": "cuda", "devices": 8}
    ← {"ended": 3, "code": 0}

When stdin ends, because the search was killed, every trial saves a checkpoint and ends. A machine with an
accelerator gets new interpreters instead of forks: a device that an import has initialized does not survive a fork.
A script of the user's, which has a file `stop`, is a new process in a session of its own. SIGTERM would reach a
launcher or the workers of a data loader instead of the process that trains; that file stops it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.core.signals import child_pids, terminate_with_parent

_PRELOADED = (
    "whet.cli.app", "whet.run.lifecycle", "whet.run.trial", "whet.run.models.model_reference",
    "whet.report.html_report", "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard",
    "safetensors.torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
)  # fmt: skip
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def serve() -> Callable[[], None] | None:
    """Start trials until stdin ends. Returns None then, and in each fork the work to do there."""
    for number in _SIGNALS:  # the search decides; it closes stdin when it ends
        signal.signal(number, signal.SIG_IGN)
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what an import prints is no answer
    device, devices = _preload()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    _answer(answers, {"ready": True, "device": device, "devices": devices})
    trials: dict[int, dict[str, Any]] = {}
    unread, is_open = b"", True
    while is_open or trials:
        ready = [key.fd for key, _ in selector.select()]
        if wake in ready:
            os.read(wake, 4096)
        if requests in ready:
            received = os.read(requests, 1 << 16)
            *lines, unread = (unread + received).split(b"\n")
            if not received:
                is_open = False
                selector.unregister(requests)
                _signal_all(trials, signal.SIGTERM)
            for request in map(json.loads, lines):
                if "signal" in request:
                    _signal_all(trials, request["signal"])
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for descriptor in (requests, answers, wake, woken):
                        os.close(descriptor)
                    return lambda: _run(request, starts_anew=devices > 0)
                trials[pid] = request
        for pid in list(trials):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _answer(answers, {"ended": trials.pop(pid)["start"], "code": os.waitstatus_to_exitcode(status)})
    return None


def _preload() -> tuple[str, int]:
    """Import what a trial needs, start no thread; returns the kind and number of this machine's devices."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    devices = 0 if found is None else torch.accelerator.device_count()
    for name in () if devices else (*_PRELOADED, *sys.argv[1:]):
        with contextlib.suppress(ImportError):  # of an extra
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return "cpu" if found is None else found.type, devices


def _answer(to: int, answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(to, json.dumps(answer).encode() + b"\n")


def _signal_all(trials: dict[int, dict[str, Any]], number: int) -> None:
    """To the workers of a trial with several processes: torchrun would kill those that are still saving after 30 s."""
    for pid, request in trials.items():
        if "stop" in request and number != signal.SIGKILL:
            stop = Path(request["stop"])
            stop.parent.mkdir(parents=True, exist_ok=True)
            stop.touch()
            continue
        for target in [-pid] if "stop" in request else child_pids(pid) or [pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)


def _run(request: dict[str, Any], starts_anew: bool) -> None:
    """In the fork: become the process of a trial."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    terminate_with_parent()  # a server that is killed
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.environ.update(request["env"])
    argv: list[str] = request["argv"]
    if "stop" in request:
        os.setsid()
    if "stop" in request or starts_anew:
        os.execvp(argv[0], argv)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    )  # fmt: skip
    _, _, module, *arguments = argv
    sys.argv = [module, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _work = serve()
    if _work is not None:
        _work()
