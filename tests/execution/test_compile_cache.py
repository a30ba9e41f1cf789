"""Compiled code is cached in whet's cache directory: a second process loads it and computes the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.execution import compile

COMPILE = """
import json, os, torch
from torch._dynamo.utils import counters
from whet.execution.compile import compile_forward

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x, documents):
        return x + self.down(torch.nn.functional.silu(self.up(x))) * documents

torch.manual_seed(0)
layer = Layer()
layer.forward = compile_forward(layer.forward)
out = layer(torch.randn(4, 8), documents=torch.ones(4, 1))
out.sum().backward()
numbers = [out, *(parameter.grad for parameter in layer.parameters())]
print(json.dumps({
    "bits": [number.detach().numpy().tobytes().hex() for number in numbers],
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"],
}))
"""
"""A layer, forward and backward, in inductor's C++."""

BACKWARD = """
import json, os, torch
from torch._dynamo.utils import counters
from whet.execution import compile

compile._hash_compiled_sources = lambda: os.environ["SOURCES"]
of_operator, of_function = float(os.environ["OPERATOR"]), float(os.environ["FUNCTION"])

@torch.library.custom_op("whet_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: of_operator * grad)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return of_function * grad

def forward(x, documents):
    return double(Function.apply(x)) + documents

x = torch.ones(4, requires_grad=True)
compile.compile_forward(forward)(x, documents=torch.ones(4)).sum().backward()
print(json.dumps({"grad": x.grad[0].item(), "hits": counters["aot_autograd"]["autograd_cache_hit"]}))
"""
"""An operator and a function with backward passes that can be changed."""

DECIDE = """
import json, os, torch._inductor.codecache
from whet.execution.compile import use_compile_cache

for _ in range(2):
    use_compile_cache()
print(json.dumps({name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}))
assert torch.compiler.config.cache_key_tag.startswith("whet-")
"""


def start(script: str, **environment: str) -> tuple[dict[str, Any], str]:
    """The JSON that a process prints, and its stderr."""
    ours = {key: value for key, value in os.environ.items() if "CACHE_DIR" not in key}
    done = subprocess.run(
        [sys.executable, "-c", script], env=ours | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.system("g++")
def test_a_second_process_loads_the_compiled_code(tmp_path: Path) -> None:
    first, _ = start(COMPILE, WHET_CACHE=str(tmp_path))
    assert first["misses"] > 0
    assert first["hits"] == 0
    second, _ = start(COMPILE, WHET_CACHE=str(tmp_path))
    assert second["misses"] == 0
    assert second["hits"] > 0
    assert second["bits"] == first["bits"]
    assert [path.name for path in tmp_path.iterdir()] == ["compiled"]


@pytest.mark.slow
@pytest.mark.system("g++")
def test_a_changed_backward_pass_is_compiled_again(tmp_path: Path) -> None:
    def run(operator: int, function: int, sources: str) -> dict[str, Any]:
        given = {"OPERATOR": str(operator), "FUNCTION": str(function), "SOURCES": sources}
        return start(BACKWARD, WHET_CACHE=str(tmp_path), **given)[0]

    assert run(2, 1, "a") == {"grad": 2, "hits": 0}
    assert run(2, 1, "a") == {"grad": 2, "hits": 1}
    assert run(2, 3, "a") == {"grad": 6, "hits": 0}
    assert run(5, 3, "b") == {"grad": 15, "hits": 0}


def test_the_cache_key_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "execution" / "compile.py"))
    file = tmp_path / "model" / "operators.py"
    file.write_text("factor = 2")
    before = compile._hash_compiled_sources()
    assert compile._hash_compiled_sources() == before
    file.write_text("factor = 3")
    assert compile._hash_compiled_sources() != before


def test_the_cache_is_beside_the_stores(tmp_path: Path) -> None:
    found, err = start(DECIDE, WHET_CACHE=str(tmp_path))
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        "TRITON_CACHE_DIR": str(tmp_path / "compiled" / "triton"),
    }
    assert not err


def test_an_unwritable_cache_is_reported_once_and_torch_uses_its_default(tmp_path: Path) -> None:
    (tmp_path / "compiled").write_text("in the way")
    found, err = start(DECIDE, WHET_CACHE=str(tmp_path))
    assert err.count("compiled code is not cached") == 1
    assert not str(found["TORCHINDUCTOR_CACHE_DIR"]).startswith(str(tmp_path))


def test_a_cache_set_by_the_user_is_kept(tmp_path: Path) -> None:
    mine = str(tmp_path / "mine")
    found, _ = start(DECIDE, WHET_CACHE=str(tmp_path / "whet"), TORCHINDUCTOR_CACHE_DIR=mine)
    assert found == {"TORCHINDUCTOR_CACHE_DIR": mine, "TRITON_CACHE_DIR": None}
    assert not (tmp_path / "whet").exists()
