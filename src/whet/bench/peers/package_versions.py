"""Prints the versions of installed packages among those on the command line, as a JSON object."""

import importlib.metadata
import json
import sys


def versions(names: list[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(versions(sys.argv[1:])))
