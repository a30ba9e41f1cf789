"""Which of the packages named on the command line this Python has: a JSON object of name to version."""

import importlib.metadata
import json
import sys


def versions(names: list[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(versions(sys.argv[1:])))
