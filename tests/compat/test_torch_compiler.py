"""What whet expects of the private APIs of torch.compile."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

MODULE = "torch_compiler"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("torch._functorch.config",
         ["activation_memory_budget", "ban_recompute_materialized_backward", "enable_autograd_cache",
          "autograd_cache_allow_custom_autograd_functions"]),
        ("torch._inductor.config", ["fx_graph_cache"]),
        ("torch.compiler.config", ["cache_key_tag"]),
        ("torch._dynamo.config", ["recompile_limit", "fail_on_recompile_limit_hit"]),
    ],
)  # fmt: skip
def test_settings_exist(private: ModuleType, config: str, names: list[str]) -> None:
    module = importlib.import_module(config)
    assert [name for name in names if not hasattr(module, name)] == []


def test_settings_are_assigned(private: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    functorch, inductor = torch._functorch.config, torch._inductor.config
    with functorch.patch(activation_memory_budget=1.0), inductor.patch(fx_graph_cache=False):
        private.set_activation_budget(0.0)
        private.enable_graph_cache()
        private.enable_autograd_cache()
        assert functorch.activation_memory_budget == 0.0
        assert inductor.fx_graph_cache
        assert functorch.enable_autograd_cache


def test_a_tag_follows_that_of_the_user(private: ModuleType) -> None:
    with torch.compiler.config.patch(cache_key_tag="mine "):
        private.set_cache_tag("whet-1")
        private.set_cache_tag("whet-1")
        assert torch.compiler.config.cache_key_tag == "mine whet-1"


def test_compiled_graphs_are_counted_and_too_many_are_an_error(private: ModuleType) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        private.set_recompile_limit(2)
        before = private.compiled_graph_count()
        add = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)
        add(torch.ones(1), 1)
        add(torch.ones(2), 1)
        assert private.compiled_graph_count() == before + 2
        with pytest.raises(private.RecompileLimitError):
            add(torch.ones(3), 1)
    torch._dynamo.reset()


def test_the_default_cache_is_a_temporary_folder(private: ModuleType) -> None:
    assert os.path.isabs(private.default_inductor_cache())  # noqa: PTH117
    private.import_inductor()


def test_the_lock_of_inductors_cache_is_dropped(private: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.caching import memoizers

    cache = memoizers.should_pad_memoizer._disk_cache
    monkeypatch.setattr(cache, "_flock", cache._flock)  # put back after the test
    private.drop_cache_lock()
    assert not hasattr(cache, "_flock")
    private.drop_cache_lock()


def test_dynamo_makes_no_table_at_exit() -> None:
    """What a process with whet's imports would call at exit, called; then with the function that whet takes away."""
    program = """
import atexit, sys
from torch._dynamo.utils import dump_compile_times
for add in (lambda: None, lambda: atexit.register(dump_compile_times)):
    add()
    sys.modules.pop("tabulate", None)
    atexit._run_exitfuncs()
    print("tabulate" in sys.modules)
"""
    code = f"from whet.compat import torch_compiler\n{program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_compiler_imports_nothing_of_transformers(real_python: str) -> None:
    """It is imported by one thread while another loads a model."""
    program = """
import sys
from whet.compat.torch_compiler import import_inductor
import_inductor()
print({"transformers", "tokenizers", "safetensors", "peft", "accelerate", "huggingface_hub"} & {*sys.modules})
"""
    done = subprocess.run([real_python, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("module", "is_made"),
    [("whet.compat.torch_compiler", "False"), pytest.param("torch._dynamo", "True", marks=pytest.mark.slow)],
)
def test_no_table_of_compile_times_is_made_at_exit(real_python: str, module: str, is_made: str) -> None:
    code = f"import atexit, sys; atexit.register(lambda: print('tabulate' in sys.modules)); import {module}"
    done = subprocess.run([real_python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [is_made]


@pytest.mark.slow
def test_the_processes_that_compile_end_at_once(real_python: str) -> None:
    """A graph of two kernels is compiled by worker processes; none is left, and nothing is printed."""
    program = """
import os, time, torch
torch._inductor.config.compile_threads = 2
from whet.compat import torch_compiler
torch_compiler.import_inductor()
from torch._inductor import async_compile
pool = async_compile.AsyncCompile.process_pool()
assert pool.submit(os.getpid).result() != os.getpid()
print(pool.process.pid, time.time(), flush=True)
"""
    done = subprocess.run([real_python, "-c", program], capture_output=True, text=True, check=True)
    pid, since = done.stdout.split()
    assert time.time() - float(since) < 5
    assert not done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.slow
def test_a_compiled_run_ends_without_a_word_of_filelock(real_python: str, shipped_recipe: str, tmp_path: Path) -> None:
    """Seen with transformers 5.17, under which filelock is imported late; with 5.22 it ends silently in any case."""
    options = ["train", shipped_recipe, f"run.dir={tmp_path}/run", "train.steps=1", "model.compile=true"]
    code = (
        "import sys, torch._inductor.utils; assert 'filelock' not in sys.modules; from whet.cli.app import main; main()"
    )
    command = [real_python, "-c", code, *options, "eval.at_start=false", "export.at_end=none"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_only_a_concatenation_for_matrix_products_is_computed_in_place(private: ModuleType) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    aten = torch.ops.aten
    assert aten.cat.default in lowerings
    assert callable(ir.ConcatKernel.create)
    graph = torch.fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    cat = graph.call_function(aten.cat.default, ([one, other], 1))
    assert not private._feeds_products(cat)
    viewed = graph.call_function(aten.view.default, (cat, [2, 2]))
    graph.call_function(aten.mm.default, (viewed, one))
    graph.call_function(aten.mm.default, (graph.call_function(aten.permute.default, (viewed, [1, 0])), one))
    assert private._feeds_products(cat)
    graph.call_function(aten.sum.dim_IntList, (viewed, [0]))
    assert not private._feeds_products(cat)


@pytest.mark.gpu
def test_the_compilers_hashes_are_kept_for_what_is_compiled(private: ModuleType) -> None:
    from torch._inductor.codecache import torch_key
    from triton.runtime.cache import triton_key

    private.hash_compilers()
    began = time.perf_counter()
    assert torch_key()
    assert triton_key()
    assert time.perf_counter() - began < 0.05
