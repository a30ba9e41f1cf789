"""Run under torchrun by test_tensor_parallel.py: models with tensor parallelism of two, compared with whole ones.

python tensor_parallel_worker.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from whet.compat.torch_compiler import compiled_graph_count
from whet.core.distributed import init_distributed
from whet.core.errors import WhetError
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.parallel.config import ParallelConfig
from whet.parallel.dtensor import _gather_on_host, local_tensor, unsharded
from whet.parallel.fsdp import apply_fsdp
from whet.parallel.mesh import Mesh, build_mesh
from whet.parallel.tensor_parallel import sync_replicated_gradients, verify_tensor_parallel

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"head_dim": 8, "sliding_window": 5},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 5},
    "Phi": {"qk_layernorm": True},
    "Olmo": {"clip_qkv": 0.5},
    "Granite": {},
    "Cohere": {},
    "Starcoder2": {},
    "Exaone4": {"head_dim": 8, "sliding_window": 5},
    "Arcee": {},
}


def batch() -> SimpleNamespace:
    tokens = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1)
    labels[[9, 23]] = -100
    return SimpleNamespace(
        tokens=tokens, labels=labels, positions=torch.cat([torch.arange(10), torch.arange(14)]), max_seqlen=24,
        cu_seqlens=torch.tensor([0, 10, 24], dtype=torch.int32), cu_seqlens_host=(0, 10, 24),
        supervised_at=torch.nonzero(labels >= 0)[:, 0],
    )  # fmt: skip


def make(family: str, **settings: Any) -> LossModel:
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn(weight.shape)  # biases and norms too
    attention.install_backend(model, "eager")
    return LossModel(model)


def gradients(root: LossModel) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        result = root(batch())
    result.objective.backward()
    sync_replicated_gradients(root)
    found = {"": result.loss}
    for name, weight in root.named_parameters():
        grad = weight.grad
        assert grad is not None, name
        found[name] = unsharded(grad)
        if isinstance(grad, DTensor):
            assert torch.equal(_gather_on_host(grad), found[name])  # the way that CUDA shards take over Gloo
    return found


def differs(family: str, mesh: Mesh) -> str | float:
    """The largest relative difference of a gradient, or the error."""
    wanted = gradients(make(family, **FAMILIES[family]))
    root = make(family, **FAMILIES[family])
    try:
        apply_fsdp(root, mesh, torch.float64)
        verify_tensor_parallel(root)
    except WhetError as error:
        return str(error)
    found = gradients(root)
    return max(((found[name] - grad).norm() / grad.norm().clamp(min=1e-6)).item() for name, grad in wanted.items())


def graphs(mesh: Mesh | None) -> int:
    """Graphs compiled for one step."""
    root, before = make("Llama"), compiled_graph_count()
    if mesh is not None:
        apply_fsdp(root, mesh, torch.float64)
    transform_layers(root.language_model, ParallelConfig(), compile=True, backend="aot_eager")
    gradients(root)
    torch.compiler.reset()
    return compiled_graph_count() - before


def all_reduces(mesh: Mesh) -> int:
    """All-reduces per layer, forward and backward."""
    root = make("Llama")
    apply_fsdp(root, mesh, torch.float64)
    with CountAllReduces() as count, KeepFloat64():
        root(batch()).objective.backward()
    return count.calls // SHAPE["num_hidden_layers"]


def kept_inputs(mesh: Mesh) -> list[str]:
    """Regions that still hold their input after the backward pass: torch stops a recomputation at the last tensor it
    needs, in the middle of a layer."""
    found = []
    for kind in ("none", "selective", "full"):
        root = make("Llama")
        transform_layers(root.language_model, ParallelConfig(recompute=kind), compile=False)  # type: ignore[arg-type]
        apply_fsdp(root, mesh, torch.float64)
        gradients(root)
        regions = {name: getattr(module, "region", None) for name, module in root.named_modules()}
        found += [f"{kind}: {name}" for name, region in regions.items() if getattr(region, "_inside", None) is not None]
    return found


class CountAllReduces(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops._c10d_functional.all_reduce.default
        return func(*args, **kwargs or {})


def refusal(mesh: Mesh) -> str:
    """The error for a model whose code relies on the width of its layers."""
    root = make("Llama")
    first: Any = root.language_model.get_submodule("model.layers.0.mlp.up_proj")
    first.register_forward_hook(lambda module, inputs, output: output.view(-1, SHAPE["intermediate_size"]))
    apply_fsdp(root, mesh, torch.float64)
    try:
        verify_tensor_parallel(root)
    except WhetError as error:
        return str(error)
    return ""


def held(mesh: Mesh) -> list[float]:
    """The share of each linear layer's weight that this process holds."""
    root = make("Llama")
    whole = {name: weight.numel() for name, weight in root.named_parameters()}
    apply_fsdp(root, mesh, torch.float64)
    names = [f"{name}.weight" for name, module in root.named_modules() if isinstance(module, nn.Linear)]
    return sorted(
        {local_tensor(root.get_parameter(name)).numel() / whole[name] for name in names if "head" not in name}
    )


def main(folder: Path) -> None:
    ranks = init_distributed()
    mesh = build_mesh(ParallelConfig(tensor=2), ranks)
    found = {
        "differs": {family: differs(family, mesh) for family in FAMILIES},
        "graphs": [graphs(None), graphs(mesh)],
        "all_reduces": all_reduces(mesh),
        "refusal": refusal(mesh),
        "kept_inputs": kept_inputs(mesh),
        "held": held(mesh),
    }
    if ranks.is_main:
        (folder / "found.json").write_text(json.dumps(found))
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
