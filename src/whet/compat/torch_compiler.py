"""Private APIs of torch.compile (dynamo, functorch, inductor), seen in torch 2.11 and 2.13."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import dump_compile_times
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

RecompileLimitError = FailOnRecompileLimitHit
"""`torch._dynamo.exc.FailOnRecompileLimitHit`: raised after `set_recompile_limit` instead of running eagerly."""

default_inductor_cache = default_cache_dir
"""`torch._inductor.runtime.cache_dir_utils.default_cache_dir`: a folder in /tmp, which torch also writes to
TORCHINDUCTOR_CACHE_DIR by itself."""


if not logging.getLogger("torch._dynamo").isEnabledFor(logging.INFO):
    # at exit it imports tabulate and wcwidth for a table of compile times that is not logged: 0.05 s
    atexit.unregister(dump_compile_times)


def compiled_graph_count() -> int:
    """`torch._dynamo.utils.counters`: graphs compiled so far. Does not import dynamo: without it nothing was."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def set_activation_budget(budget: float) -> None:
    """`torch._functorch.config.activation_memory_budget`: 0 saves the inputs of a compiled region only, 1 what the
    partitioner likes. It may recompute what the backward pass has to write to memory again
    (`ban_recompute_materialized_backward`): saves 20 % of memory for 1 % of time."""
    torch._functorch.config.activation_memory_budget = budget
    torch._functorch.config.ban_recompute_materialized_backward = False


def set_recompile_limit(limit: int) -> None:
    """`torch._dynamo.config.recompile_limit` and `fail_on_recompile_limit_hit`: an error instead of a silent
    fallback to eager execution."""
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def enable_graph_cache() -> None:
    """`torch._inductor.config.fx_graph_cache`: keep compiled graphs on disk."""
    torch._inductor.config.fx_graph_cache = True


def enable_autograd_cache() -> None:
    """`torch._functorch.config.enable_autograd_cache`: keep joint forward and backward graphs on disk. Those with
    `autograd.Function`s, as in layers with adapters, too (`autograd_cache_allow_custom_autograd_functions`): the
    cache's key contains both of their passes. It does not contain the backward passes of operators: `set_cache_tag`."""
    torch._functorch.config.enable_autograd_cache = True
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def set_cache_tag(tag: str) -> None:
    """`torch.compiler.config.cache_key_tag`: a part of every cache key, after a tag that the user has set. torch's key
    has the names of operators, not their code, but a cached graph contains what `register_autograd` traced: without
    the tag, a backward pass that was corrected would live on in the cache."""
    given = torch.compiler.config.cache_key_tag
    if not given.endswith(tag):
        torch.compiler.config.cache_key_tag = given + tag


@functools.cache
def import_inductor() -> None:
    """`torch._inductor.compile_fx`: what the first compilation would import, which takes a second or two."""
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.async_compile import shutdown_compile_workers

    atexit.unregister(shutdown_compile_workers)
    atexit.register(_end_compile_workers)


def hash_compilers() -> None:
    """`torch._inductor.codecache.torch_key` and `triton.runtime.cache.triton_key`: hashes of torch's and Triton's own
    files, which the keys of all cached code contain. They take 0.2 and 0.4 s, the first compilation would wait for
    them, and both are kept."""
    from torch._inductor.codecache import torch_key

    torch_key()
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def _end_compile_workers() -> None:
    """`torch._inductor.async_compile.shutdown_compile_workers` asks the process with the workers to end and waits for
    it, which takes 0.7 s; it has nothing to lose."""
    from torch._inductor import async_compile

    for pool in async_compile._pool_set:
        process = getattr(pool, "process", None)
        if process is None:  # another kind of pool
            pool.shutdown()
            continue
        pool.running = False  # type: ignore[union-attr]
        process.kill()
        process.wait()


@functools.cache
def concatenate_in_place() -> None:
    """`torch._inductor.lowering.lowerings`: of a concatenation that only matrix products read, each part is computed
    into its place (`ir.ConcatKernel`). Inductor would write all of it with one kernel that computes every part for
    every element: 25 µs instead of 9 for the gradients of queries, keys and values of 3,700 tokens of SmolLM2."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    cat = torch.ops.aten.cat.default
    lower = lowerings[cat]

    def lower_cat(inputs: Any, dim: int = 0) -> Any:
        is_mixed = len({(each.get_dtype(), each.get_device().type, len(each.get_size())) for each in inputs}) > 1
        if len(inputs) == 1 or is_mixed or inputs[0].get_device().type == "cpu" or not _feeds_products(V.current_node):
            return lower(inputs, dim)
        rank = len(inputs[0].get_size())
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim % rank))

    lowerings[cat] = lower_cat


def _feeds_products(node: torch.fx.Node) -> bool:
    """Whether only matrix products read this node, or views of it."""
    aten = torch.ops.aten
    views = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.t.default)
    return bool(node.users) and all(
        user.target in (aten.mm.default, aten.addmm.default) or (user.target in views and _feeds_products(user))
        for user in node.users
    )


def compile_with_inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """`torch._inductor.compile_fx.compile_fx`: what `backend="inductor"` calls."""
    import_inductor()
    concatenate_in_place()
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(module, inputs)
    return compiled


def traced_value(node: Any) -> torch.Tensor:
    """`node.meta["example_value"]`: the fake tensor that dynamo has computed for a node of its graph."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def trace_passes(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], static: Sequence[int], budget: float
) -> tuple[torch.fx.Graph, torch.fx.Graph, int]:
    """`torch._functorch.aot_autograd.aot_function` with `min_cut_rematerialization_partition`: the forward and the
    backward graph that torch.compile would make of a function of fake tensors, and the number of the function's
    outputs. The forward graph returns those first, then what it saves for the backward pass. `static`: the inputs that
    stay in memory anyway, such as weights, so that nothing is gained by saving something smaller instead. `budget`: as
    for `set_activation_budget`."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[tuple[torch.fx.Graph, torch.fx.Graph, int]] = []

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(static),
        )  # fmt: skip
        found.append((forward.graph, backward.graph, num_fwd_outputs))
        return forward, backward

    def keep(gm: Any, example_inputs: Any) -> Any:
        return gm

    traced = aot_function(
        function, fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
    )
    with torch._functorch.config.patch(activation_memory_budget=budget, ban_recompute_materialized_backward=False):
        traced(*inputs)
    return found[0]


@atexit.register
def drop_cache_lock() -> None:
    """`torch._inductor.runtime.caching.memoizers.should_pad_memoizer` holds a file lock for as long as the process
    lives. Its finalizer fails, with "Exception ignored in BaseFileLock", if the interpreter clears filelock first."""
    memoizers = sys.modules.get("torch._inductor.runtime.caching.memoizers")
    with contextlib.suppress(AttributeError):  # another version of torch may have no such lock
        del memoizers.should_pad_memoizer._disk_cache._flock  # type: ignore[union-attr]
