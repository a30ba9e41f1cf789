"""Activation recomputation changes memory, and neither loss nor gradients."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from functorch.compile import make_boxed_compiler, make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from whet.execution.recompute import has_dropout
from whet.execution.transform import transform_layers
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.parallel.config import ParallelConfig

Make = Callable[..., Any]
Kind = Literal["none", "selective", "full"]


def gradients(root: LossModel, batch: Any, context: AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(7)
    with context:
        result = root(batch)
    result.objective.backward()
    found = [parameter.grad for parameter in root.parameters() if parameter.requires_grad]
    assert all(gradient is not None for gradient in found)
    return [result.loss, *found]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("dropout", [None, 0.3], ids=["whole", "lora-dropout"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_recompute_keeps_loss_and_gradients(
    make_root: Make, make_batch: Make, kind: Kind, dropout: float | None, backend: str
) -> None:
    """With KeepFloat64: a recomputation outside of it would round to fp32."""
    plain, changed = (make_root(dropout=dropout, backend=backend) for _ in range(2))
    transform_layers(changed.language_model, ParallelConfig(recompute=kind), compile=False)
    batch = make_batch([9, 20, 8])
    ours, theirs = (gradients(root, batch, KeepFloat64()) for root in (changed, plain))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_the_recomputation_uses_autocast_too(make_root: Make, make_batch: Make, kind: Kind) -> None:
    plain, changed = (make_root(dtype=torch.float32, num_hidden_layers=2) for _ in range(2))
    transform_layers(changed.language_model, ParallelConfig(recompute=kind), compile=False)
    batch = make_batch([9, 20, 8])
    ours, theirs = (gradients(root, batch, torch.autocast("cpu", torch.bfloat16)) for root in (changed, plain))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def saved_bytes(root: LossModel, batch: Any) -> int:
    """The memory that a forward pass keeps for its backward pass."""

    def alive() -> int:
        gc.collect()
        plain = (thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))
        tensors = [thing for thing in plain if thing.device.type == "cpu"]  # not what other tests left on other devices
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # autograd holds tensors where Python does not see them
        return tensor

    before = alive()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = root(batch)
    after = alive()
    result.objective.backward()
    return after - before


@pytest.mark.parametrize(("dropout", "part"), [(None, 0.6), (0.0, 0.7)], ids=["whole", "lora"])
def test_selective_saves_less_than_none_and_full_the_least(
    make_root: Make, make_batch: Make, dropout: float | None, part: float
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "dropout": dropout}
    kept: dict[str, int] = {}
    for kind in ("none", "selective", "full"):
        root = make_root(dtype=torch.float32, **sizes)
        transform_layers(root.language_model, ParallelConfig(recompute=kind), compile=False)
        kept[kind] = saved_bytes(root, make_batch([200, 300, 500], total=1024))
    assert kept["selective"] < part * kept["none"]
    assert kept["full"] < 0.3 * kept["selective"]


class CountOperations(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("backend", "device"), [("sdpa", "cpu"), ("varlen", "meta"), ("short", "meta")])
def test_which_operations_are_recomputed(make_root: Make, make_batch: Make, backend: str, device: str) -> None:
    """CUDA kernels on the meta device."""
    again: dict[str, Counter[str]] = {}
    for kind in ("none", "selective", "full"):
        root = make_root(dtype=torch.bfloat16, backend=backend).to(device)
        transform_layers(root.language_model, ParallelConfig(recompute=kind), compile=False)
        batch = make_batch([9, 20, 8])
        moved = [part.to(device) for part in (batch.tokens, batch.positions, batch.cu_seqlens)]
        hidden = root.hidden(*moved, batch.max_seqlen, batch.cu_seqlens_host)
        with CountOperations() as counted:
            hidden.sum().backward()
        again[kind] = counted.runs
    [attention] = [
        name for name in again["full"] if name.endswith(("_varlen_attn", "attention_for_cpu", ":short_attention"))
    ]
    assert again["none"][attention] == again["selective"][attention] == 0
    assert again["full"][attention] == 4 * (4 if backend == "sdpa" else 1)  # layers × documents
    assert again["selective"]["aten::mm"] == again["none"]["aten::mm"]
    assert again["full"]["aten::mm"] == again["none"]["aten::mm"] + 4 * 6  # the seventh product is the layer's last
    assert again["selective"]["aten::silu"] == again["full"]["aten::silu"] == 4 > again["none"]["aten::silu"] == 0


def test_nothing_is_recomputed_without_gradients(make_root: Make, make_batch: Make) -> None:
    root = make_root()
    transform_layers(root.language_model, ParallelConfig(recompute="full"), compile=False)
    with torch.no_grad():
        assert root(make_batch([9, 20])).objective.grad_fn is None


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_run_with_recompute_has_the_same_losses(
    whet: Any, tiny_run: Path, recipe: str, tmp_path: Path, kind: str
) -> None:
    def steps(folder: Path) -> list[float]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line[key] for line in lines if "loss" in line for key in ("loss", "grad_norm")]

    ended = whet(
        "train", recipe, f"run.dir={tmp_path / 'run'}", "train.precision=fp64", f"parallel.recompute={kind}",
        "parallel.offload=both", "eval.at_start=false",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    ours, theirs = steps(tmp_path / "run"), steps(tiny_run)
    assert len(ours) == 24
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("dropout", [None, 0.0, 0.3], ids=["whole", "lora", "dropout"])
def test_compiled_layers_recompute_the_same_gradients(make_root: Make, make_batch: Make, dropout: float | None) -> None:
    """A compiler that recomputes dropout would draw other random numbers, and only gradients would show it."""
    torch._dynamo.reset()
    found = []
    for recompute in ("none", "full"):
        root = make_root(dropout=dropout, backend="eager")
        config = ParallelConfig(recompute=recompute)
        transform_layers(root.language_model, config, True, "aot_eager_decomp_partition")  # partitions as inductor does
        torch.manual_seed(5)
        with KeepFloat64():
            root(make_batch([9, 20, 8])).objective.backward()
        found.append([weight.grad for weight in root.parameters() if weight.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "settings", "drawn"),
    [("Llama", {}, False), ("Llama", {"dropout": 0.1}, True), ("GPT2", {"resid_pdrop": 0.1}, True),
     ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}, False)],
)  # fmt: skip
def test_dropout_is_detected(make_root: Make, architecture: str, settings: dict[str, Any], drawn: bool) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} if architecture == "GPT2" else {}
    assert has_dropout(make_root(architecture, **sizes, **settings).language_model) == drawn


def test_compiled_layers_that_run_eagerly_save_as_little(make_root: Make, make_batch: Make) -> None:
    """As when a non-finite value is diagnosed, in a run that only fits with recomputation."""
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "backend": "eager"}
    kept = []
    for compile in (False, True):
        torch._dynamo.reset()
        root = make_root(dtype=torch.float32, **sizes)
        transform_layers(root.language_model, ParallelConfig(recompute="full"), compile, "aot_eager")
        with torch.compiler.set_stance("force_eager"):
            kept.append(saved_bytes(root, make_batch([40, 30, 50], total=128)))
    assert kept[1] <= 1.1 * kept[0]


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 6)])
def test_a_compiled_layer_recomputes_only_what_its_backward_pass_needs(
    make_root: Make, make_batch: Make, recompute: Any, again: int
) -> None:
    """The seventh matrix product of a layer is its last: only the next layer needs it."""
    products: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    root = make_root(backend="eager", num_hidden_layers=3)
    transform_layers(
        root.language_model, ParallelConfig(recompute=recompute), True,
        aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition),
    )  # fmt: skip
    root(make_batch([9, 20, 8])).objective.backward()
    assert products == [7, 14 + again], "one forward and one backward graph, for all layers"


def test_compiled_layers_save_less_than_by_default_and_full_the_least(make_root: Make, make_batch: Make) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "backend": "eager"}
    kept: dict[str, int] = {}
    for kind in ("default", "none", "full"):
        torch._dynamo.reset()
        root, recompute = make_root(dtype=torch.float32, **sizes), "full" if kind == "full" else "none"
        backend = aot_autograd(
            fw_compiler=make_boxed_compiler(lambda graph, inputs: graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )
        transform_layers(root.language_model, ParallelConfig(recompute=recompute), True, backend)
        with torch._functorch.config.patch(ban_recompute_materialized_backward=kind == "default"):
            kept[kind] = saved_bytes(root, make_batch([40, 30, 50], total=128))
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["none"] < 0.9 * kept["default"]
