"""Prints which files the Python that runs this script consists of: a script for the interpreter behind a virtual
environment. A JSON object: `files` maps files and folders to their places in the sandbox, `empty` are folders of other
packages inside them, which stay empty there."""

from __future__ import annotations

import ctypes
import json
import sys
import sysconfig
from pathlib import Path

_HOME = "/python"  # the home of Python in the sandbox, wherever it is on this machine
_OTHER_PACKAGES = ("site-packages", "dist-packages")
_UNUSABLE = ("_tkinter", "nis")  # without a display and a network


def shared_libraries(extension_folders: list[Path]) -> list[str]:
    """The paths of the libraries that the interpreter and the extension modules of its standard library load."""
    for folder in extension_folders:
        for module in folder.glob("*.so"):
            if not module.name.startswith(_UNUSABLE):
                _load(str(module))
    _load("libgcc_s.so.1")  # glibc loads it when a thread ends
    names: list[str] = []

    class Info(ctypes.Structure):
        _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
    def add(info, size, data):  # type: ignore[no-untyped-def]
        names.append(info.contents.name.decode())
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(add, None)
    return [name for name in names if name.startswith("/") and Path(name).parent not in extension_folders]


def _load(library: str) -> None:
    try:
        ctypes.CDLL(library)
    except OSError:
        return  # a module that cannot be imported here cannot be imported in the sandbox


def main() -> None:
    """Print the files."""
    folders = {}
    for name, prefix in (("stdlib", sys.base_prefix), ("platstdlib", sys.base_exec_prefix)):
        folder = Path(sysconfig.get_path(name))
        folders[str(folder)] = f"{_HOME}/{folder.relative_to(prefix)}"
    files = {**folders, sys.executable: f"{_HOME}/bin/{Path(sys.executable).name}"}
    for library in shared_libraries([Path(folder) / "lib-dynload" for folder in folders]):
        is_loader = Path(library).name.startswith(("ld-linux", "ld-musl"))  # programs name it by its path
        files[library] = library if is_loader else f"{_HOME}/lib/{Path(library).name}"
    empty = [f"{inside}/{name}" for outside, inside in folders.items() for name in _OTHER_PACKAGES
             if (Path(outside) / name).is_dir()]  # fmt: skip
    if Path("/usr/share/zoneinfo").is_dir():
        files["/usr/share/zoneinfo"] = "/usr/share/zoneinfo"
    sys.stdout.write(json.dumps({"files": files, "empty": empty}))


if __name__ == "__main__":
    main()
