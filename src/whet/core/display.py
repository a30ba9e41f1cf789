"""Text for people: control characters escaped, secrets masked; what counts as text; curves as text. No torch.

`escape_controls` is for everything that is shown, whatever its origin: data, answers, file names, messages.
`mask_secrets` is for messages, logs and reports, never for data or answers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from types import TracebackType
from typing import Any

_CONTROLS = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1: terminal escapes
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional marks, embeddings, overrides and isolates
    "\u2028\u2029\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # breaks lines or hides text
    "\ud800-\udfff"  # half of a surrogate pair, which UTF-8 cannot encode
    "]"
)


def escape_controls(text: str) -> str:
    r"""`text` with control, bidirectional and invisible characters as \x1b or \u202e; newline and tab stay."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_json_controls(text: str) -> str:
    """The same for a JSON text, which stays the same JSON value."""
    return _CONTROLS.sub(lambda match: json.dumps(match[0])[1:-1], text)


_MASK = "***"
_SECRETS = re.compile(
    r"""
    (?P<prefix>
        (?: hf_ | gh[pousr]_ | npm_ | gsk_ | r8_ | [rs]k_(?:live|test)_ | dop_v1_ )(?=[A-Za-z0-9]{16})
      | (?: (?<![A-Za-z0-9])sk- | github_pat_ | glpat- | xox[a-z]- | xapp- | pypi- | nvapi- | wandb_v1_ | ya29\. | AIza
        )(?=[\w-]{16})
      | A[KS]IA(?=[A-Z0-9]{16})
      | eyJ(?=[\w-]{8,400}\.eyJ[\w-]{8,4000}\.)  # a JSON web token
    )[\w-]+(?:\.[\w-]+)*
    | (?P<bearer>\b[Bb]earer\s+)(?=\S*[0-9]|\S{16})[\w.~+/=-]{8,}
    | (?P<header>(?i:\bauthorization)["']?\s*[:=]\s*["']?(?:(?i:basic|bearer|digest|token)\s+|(?=\S{16})))[^\s"',]+
    | (?P<user>\b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@]{0,99}:)[^\s/]+(?=@)
    | (?P<query>[?&](?i:[\w-]*token|api_?key|key|password|secret|sig|[\w-]*signature)=)[^\s&\#"']+
    | (?P<assigned>\b(?:[A-Z0-9]+_)*(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY)=["']?)(?!["']?\$)[^\s"']{8,}
    | (?P<pem>-----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----)(?:.|\n)*?(?:-----END\ [A-Z\ ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.ASCII,
)
"""Tokens of hubs, clouds and code hosts by their prefix; HTTP authorization; passwords in URLs; private keys."""
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)\Z")
_MIN_SECRET = 8


def mask_secrets(text: str) -> str:
    """`text` with known kinds of tokens cut to their prefix, and the value of HF_TOKEN and the like as ${HF_TOKEN}."""
    for name, value in _secret_variables():
        text = text.replace(value, f"${{{name}}}")
    return _SECRETS.sub(lambda match: f"{match[match.lastgroup or 0]}{_MASK}", text)


def mask_settings(settings: Any) -> Any:
    """`mask_secrets` of every text in a tree of settings."""
    if isinstance(settings, dict):
        return {key: mask_settings(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [mask_settings(value) for value in settings]
    return mask_secrets(settings) if isinstance(settings, str) else settings


def holds_secret(text: str) -> bool:
    """Whether `text` contains a known kind of token."""
    return _SECRETS.search(text) is not None


def _secret_variables() -> Iterator[tuple[str, str]]:
    """Environment variables whose name says that they hold a secret; a short value could be any word."""
    for name in os.environ:
        if _is_secret_name(name) and len(value := os.environ.get(name, "")) >= _MIN_SECRET:
            yield name, value


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


# What libraries and Python itself print


def filter_library_output() -> None:
    """Escape and mask what does not go through whet's console: log records, warnings, uncaught exceptions."""
    logging.setLogRecordFactory(_FilteredLogRecord)
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *warned: _filter(format_warning(*warned))
    sys.excepthook = _print_exception
    threading.excepthook = lambda raised: _print_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)


class _FilteredLogRecord(logging.LogRecord):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = _filter("".join(traceback.format_exception(*self.exc_info)).rstrip())

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        return _filter(super().getMessage())


def _print_exception(kind: type[BaseException], error: BaseException | None, place: TracebackType | None) -> None:
    sys.stderr.write(_filter("".join(traceback.format_exception(kind, error, place))))


def _filter(text: str) -> str:
    return escape_controls(mask_secrets(text))


def is_valid_text(text: str) -> bool:
    """False for NUL and for lone surrogates (`\\ud800` in JSON), which break tokenizers."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def sparkline(values: list[float | None], width: int, ascii_only: bool = False) -> str:
    """The values as one line of at most `width` characters, each the mean of its part; a gap where none is finite."""
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means: list[float | None] = []
    for start, end in pairwise(edges):
        known = [value for value in values[start:end] if value is not None and math.isfinite(value)]
        means.append(sum(value / len(known) for value in known) if known else None)  # a sum could overflow
    finite = [mean for mean in means if mean is not None]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) / 2 - low / 2  # halves, because the difference of two floats may be infinite
    bars = _ASCII_BARS if ascii_only else _BARS

    def bar(mean: float | None) -> str:
        if mean is None:
            return " "
        share = (mean / 2 - low / 2) / span if span > 0 else 0.0
        return bars[min(len(bars) - 1, int(share * len(bars)))]

    return "".join(map(bar, means))
