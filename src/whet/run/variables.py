"""The environment variables of a run: config.yaml names them, variables.json finds out whether a value has changed.

Values may be secrets, so they are kept as salted hashes, slow ones: a short password cannot be guessed in a moment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.core.checksums import read_hashed_json, write_hashed_json
from whet.core.errors import WhetError
from whet.core.run_folder import VARIABLES_FILE


class VariableHashes:
    """The salted hashes of a run's settings that come from environment variables, by key."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / VARIABLES_FILE
        found: dict[str, Any] = {"salt": secrets.token_hex(16), "hashes": {}}
        remedy = "Bring it back, or start a new run: run.dir=FOLDER"
        if self._file.exists():
            found = read_hashed_json(self._file, remedy)
        try:
            self._salt, self._hashes = bytes.fromhex(found["salt"]), dict(found["hashes"])
        except (KeyError, TypeError, ValueError):
            raise WhetError(f"{self._file}: damaged. {remedy}") from None

    def has(self, key: str) -> bool:
        return key in self._hashes

    def matches(self, key: str, value: Any) -> bool:
        """Whether the setting had this value."""
        if key not in self._hashes:
            raise WhetError(
                f"{self._file}: the hash of {key} is gone, so it cannot be known whether its environment variable is "
                "still the same. Bring the file back, or start a new run: run.dir=FOLDER"
            )
        return bool(self._hashes[key] == _hash(self._salt, value))

    def write(self, values: Mapping[str, Any]) -> None:
        """Add the hashes of these settings. Those of others stay: config.yaml is replaced after this file."""
        hashes = self._hashes | {key: _hash(self._salt, value) for key, value in values.items()}
        if hashes:
            write_hashed_json(self._file, {"salt": self._salt.hex(), "hashes": hashes})


def _hash(salt: bytes, value: Any) -> str:
    return _slow_hash(salt, json.dumps(value, sort_keys=True))


@functools.cache
def _slow_hash(salt: bytes, text: str) -> str:
    return hashlib.scrypt(text.encode(), salt=salt, n=2**12, r=8, p=1, dklen=32).hex()  # 10 ms
