"""Private APIs and monkeypatches of torch, transformers, peft and bitsandbytes are in whet.compat alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import whet

SOURCE = Path(whet.__file__).parent
OWN = {"compat", "peers"}
LIBRARIES = {"torch", "transformers", "peft", "bitsandbytes", "accelerate"}
ALIASES = {*LIBRARIES, "dist", "nn", "F"}
MEMBERS = {
    "_attn_implementation", "_supports_sdpa", "_tp_plan", "_auto_class", "_local_tensor", "_spec", "_schema",
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_non_persistent_buffers_set", "_checkpoint_offset",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            parts = [name.split(".") for name in names]
            yield from (".".join(each) for each in parts if each[0] in LIBRARIES and any(map(is_private, each)))
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            assigns = isinstance(node.ctx, ast.Store) and node.attr in ("__class__", "forward") and owner != "self"
            chain = owner.split(".")[0] in ALIASES and is_private(node.attr)
            if assigns or chain or (node.attr in MEMBERS and owner != "self"):
                yield f"{owner}.{node.attr}"


def test_no_private_api_outside_compat() -> None:
    paths = [
        path for path in sorted(SOURCE.rglob("*.py")) if not {"compat", "peers"} & {*path.relative_to(SOURCE).parts}
    ]
    uses = {str(path.relative_to(SOURCE)): list(private_uses(path.read_text())) for path in paths}
    found = {path: names for path, names in uses.items() if names}
    assert found == {}, "move it to a function in src/whet/compat, with a test in tests/compat"


def test_private_uses_are_found() -> None:
    for line in (
        "from torch._utils import x", "import torch._dynamo.config", "from torch.overrides import _x", "torch._C.x()",
        "torch.cuda.memory._dump(1)", "layer.forward = f", "module.__class__ = C", "x = tensor._local_tensor",
    ):  # fmt: skip
        assert list(private_uses(line)), line
    assert list(private_uses("self.forward = f; torch.nn.Linear(1, 1); x._own")) == []
