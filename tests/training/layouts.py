"""One training run in many layouts, and the plainest loop there is to compare them with.

Started under torchrun (`python layouts.py FOLDER`), it runs the layouts that are meant for several processes.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from whet.core.distributed import Ranks, init_distributed
from whet.data.config import DataConfig, Source
from whet.data.loader import Loader
from whet.data.plan.mixture import single_source_mixture
from whet.data.plan.planner import Plan, RunLength, plan_by_conversations
from whet.data.prepare.build import prepare_store
from whet.data.prepare.store import Store
from whet.data.render.chat_tokenizer import ChatTokenizer
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.experts.install import install_experts
from whet.model.load.pretrained import load_model, prepare_float64_
from whet.model.load.tokenizer import load_tokenizer
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss import linear_cross_entropy
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.parallel.config import ParallelConfig
from whet.parallel.dtensor import local_tensor, shard_index, unsharded
from whet.parallel.fsdp import apply_fsdp
from whet.parallel.mesh import build_mesh
from whet.parallel.ulysses import apply_ulysses
from whet.training.config import OptimizerConfig
from whet.training.optimizers.factory import build_optimizer
from whet.training.step import ForwardPasses, StepResult, train_step

ALONE = Ranks(0, 1, torch.device("cpu"))
TINY = ModelConfig(path="builtin:tiny")
LANGUAGE = ChatTokenizer({"tokenizer": TINY.path, "today": None}, lambda: load_tokenizer(TINY), list, "assistant")
ROW = 300
BATCH = 5
STEPS = 30
ALL = os.environ.get("WHET_TEST_ALL") == "1"
FEW_STEPS = STEPS if ALL else 3
"""Of most layouts of one process; one of each kind takes all steps."""
DIVIDED_STEPS = STEPS if ALL else 2
CLIP = 0.5
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a run that must not matter."""

    packing: str = "none"
    micro_rows: int = 1
    padded: bool = False
    attention: str = "sdpa"
    recompute: str = "none"
    chunk_rows: int = 10**6
    """Supervised positions that the head takes at a time."""
    shard: int | None = None
    context: int = 1
    tensor: int = 1
    expert: int = 1
    optimizer: str = "adamw"
    family: str = "tiny"
    steps: int = STEPS
    offload: str = "none"
    adapter: str = "none"
    """peft: computed by it; fused: together with its layer."""
    router_aux_loss: float = 0.0

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    def optimizer_settings(self) -> dict[str, str]:
        name, _, flavour = self.optimizer.partition("-")
        return {"name": name, **({"flavour": flavour} if flavour else {})}


CHOICES: dict[str, Sequence[Any]] = {
    "packing": ("none", "best-fit", "k-bin"),
    "micro_rows": (1, 2, 5),
    "padded": (False, True),
    "attention": ("sdpa", "eager"),
    "recompute": ("none", "selective", "full"),
    "chunk_rows": (10**6, 4, 37),
}
"""Of one process."""


def in_pairs(choices: dict[str, Sequence[Any]]) -> list[Layout]:
    """Few layouts in which any two choices meet at least once."""
    names = list(choices)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in choices[a] for y in choices[b]
    }  # fmt: skip
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*(choices[n] for n in names))]
    chosen = []
    while missing:
        best = max(every, key=lambda one: len(_pairs(one) & missing))
        missing -= _pairs(best)
        chosen.append(Layout(**best))
    return chosen


def _pairs(one: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(one.items(), 2))


@dataclass(frozen=True, slots=True)
class Trace:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    apart: tuple[str, ...] = ()
    """Weights of which some processes hold the same part, and not the same numbers."""
    conversations: tuple[float, ...] = ()
    """The loss of each conversation, step by step, in the order of their numbers."""


def make_store() -> Store:
    """Thirteen orders."""
    config = DataConfig(sources=[Source(path="builtin:orders", max_samples=13)])
    return prepare_store(config, config.sources, "train", LANGUAGE).store


def model_of(family: str) -> nn.Module:
    """A model with weights that take no part in any step, in a layer and beside the layers: torch's AdamW leaves these
    alone, and so must every layout."""
    model: Any = used_model(family)
    torch.manual_seed(1)
    for module in (model.model, model.model.layers[0]):
        module.unused = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    return model


def used_model(family: str) -> nn.Module:
    """`tiny` has tied embeddings and two key heads; `llama` neither, and biases everywhere; `qwen3` norms of heads;
    `mixtral` experts."""
    if family == "tiny":
        return load_model(TINY, torch.float64)
    shape: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "attention_bias": True,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "llama":
        config: Any = LlamaConfig(**shape, mlp_bias=True, tie_word_embeddings=False)
    elif family == "mixtral":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24, "initializer_range": 0.2}
        config = MixtralConfig(**shape | experts)
    else:
        config = Qwen3Config(**shape | {"num_key_value_heads": 2}, tie_word_embeddings=True)
    model = prepare_float64_(AutoModelForCausalLM.from_config(config, dtype=torch.float64), torch.float64)
    for name, weight in model.named_parameters():  # transformers starts biases at 0 and norms at 1
        if weight.ndim == 1:
            weight.data += 0.1 * torch.randn(weight.shape) * (1 if "norm" in name else 0.2)
    return model.eval()


def plan_of(store: Store, packing: str, steps: int = STEPS) -> Plan:
    """Thirty batches of five, the last of which has three."""
    mixture = single_source_mixture(np.arange(len(store)))
    length = RunLength(epochs=(BATCH * steps - 2) / 13)
    return plan_by_conversations(store.lengths, mixture, BATCH, length, ROW, packing, 16, seed=3)


def take(root: LossModel, optimizer: torch.optim.Optimizer, loader: Loader, step: int, **changed: Any) -> StepResult:
    """One step as training takes it."""
    ranks = changed.pop("ranks", ALONE)
    given: dict[str, Any] = {"seed": 0, "autocast": KeepFloat64(), "loss_scale": 1.0}
    how = {name: changed.pop(name, usual) for name, usual in given.items()}
    forward = ForwardPasses(root, loader, step, device=ranks.device, **how)
    return train_step(forward, optimizer, ranks=ranks, **{"clip_norm": CLIP} | changed).wait()


def run_steps(store: Store, layout: Layout, **changed: Any) -> Trace:
    """The run in a layout, by this process or by all of a group."""
    config = ParallelConfig(
        recompute=layout.recompute,
        shard=layout.shard,
        context=layout.context,
        tensor=layout.tensor,
        expert=layout.expert,
        offload=layout.offload,
    )
    mesh = build_mesh(config, changed.pop("ranks", ALONE))
    ranks = mesh.ranks
    plan = plan_of(store, layout.packing, layout.steps)
    model = model_of(layout.family)
    if layout.adapter != "none":
        model = unwrap_peft(add_adapter(model, AdapterConfig(rank=4), seed=0).to(torch.float64))
    model.to(ranks.device)
    install_experts(model)
    attention.install_backend(model, layout.attention)
    root = LossModel(model, router_aux_loss=layout.router_aux_loss)
    apply_ulysses(root, mesh)
    transform_layers(model, config, compile=False)
    if mesh.fsdp_mesh is not None:
        apply_fsdp(root, mesh, torch.float64, on_host=layout.offload == "weights")
    optimizer = build_optimizer(root, OPTIMIZER.model_copy(update=layout.optimizer_settings()), 0)
    loader = Loader(
        store, plan, layout.micro_rows, ranks.data_rank, ranks.data_size, layout.padded,
        part=(ranks.context_rank, ranks.context_size),
    )  # fmt: skip
    if layout.adapter == "fused":
        measure(root, loader, ranks.device)
        assert fuse_lora_(root) == 3 * model.config.num_hidden_layers  # q k v, o, and the MLP
    measure(root, loader, ranks.device)  # a forward pass without a backward pass must not change what follows
    before, linear_cross_entropy._CHUNK_BYTES_CPU = (
        linear_cross_entropy._CHUNK_BYTES_CPU,
        layout.chunk_rows * model.config.vocab_size * 8,
    )
    try:
        results = [take(root, optimizer, loader, step, ranks=ranks, **changed) for step in range(len(plan))]
    finally:
        linear_cross_entropy._CHUNK_BYTES_CPU = before
        loader.close()
    weights = {name: unsharded(weight).cpu() for name, weight in model.state_dict().items()}
    conversations = [
        float(loss)
        for step, result in enumerate(results)
        for _, loss in sorted(zip(plan.documents_of(step).tolist(), result.conversation_losses, strict=True))
    ]
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    return Trace(losses, norms, weights, apart(model, ranks), tuple(conversations))


def apart(model: nn.Module, ranks: Ranks) -> tuple[str, ...]:
    """See `Trace`; to the last bit."""
    mine = [
        (name, shard_index(weight), local_tensor(weight).detach().double().cpu().numpy().tobytes())
        for name, weight in model.named_parameters()
    ]
    found: dict[tuple[str, int], set[bytes]] = {}
    for name, part, numbers in ranks.all_gather(mine):
        found.setdefault((name, part), set()).add(numbers)
    return tuple(sorted({name for (name, _), copies in found.items() if len(copies) > 1}))


@torch.no_grad()
def measure(root: LossModel, loader: Loader, device: torch.device) -> None:
    for _, batch in loader.micro_batches(0):
        root(batch.to(device))


def run_naively(
    store: Store, family: str = "tiny", steps: int = STEPS, router_aux_loss: float = 0.0,
    device: torch.device = ALONE.device,
) -> Trace:  # fmt: skip
    """One conversation at a time, the model's own logits, torch's loss, no accumulation, nothing packed."""
    plan = plan_of(store, "none", steps)
    model: Any = model_of(family).to(device)
    decay = {True: OPTIMIZER.weight_decay, False: 0.0}
    groups = [{"params": [p], "weight_decay": decay[p.ndim > 1]} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    losses, norms, conversations = [], [], []
    for step in range(len(plan)):
        parts = []
        total, count, routers = torch.zeros((), dtype=torch.float64, device=device), 0, []
        for document in plan.documents_of(step):
            ids = torch.from_numpy(store.ids(int(document))).to(device)
            labels = ids.masked_fill(~torch.from_numpy(store.loss(int(document))).to(device), -100)
            with KeepFloat64():
                output = model(input_ids=ids[None], **{"output_router_logits": True} if router_aux_loss else {})
            logits = output.logits[0]
            routers += list(output.router_logits) if router_aux_loss else []
            loss = F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            parts.append((int(document), loss.item()))
            total = total + loss
            count += int((labels[1:] != -100).sum())
        objective = total / count
        if router_aux_loss:
            objective = objective + router_aux_loss * load_balancing_loss(torch.cat(routers), model.num_experts_per_tok)
        optimizer.zero_grad()
        objective.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(total.item() / count)
        conversations += [loss for _, loss in sorted(parts)]
        optimizer.step()
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    return Trace(losses, norms, weights, (), tuple(conversations))


def load_balancing_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """E · Σ_e f_e · P_e of [tokens and layers, E]."""
    probabilities, experts = logits.softmax(-1), logits.shape[-1]
    chosen = F.one_hot(probabilities.topk(top_k).indices, experts).sum(1).double()
    return experts * (chosen.mean(0) * probabilities.mean(0)).sum()


TOGETHER = (
    Layout("none", 1, padded=False),
    Layout("best-fit", 1, padded=True, recompute="full"),
    Layout("k-bin", 2, padded=False, attention="eager", chunk_rows=37),
)
"""What several processes run. With four of them, best-fit leaves ranks without rows."""

DIVIDED = {
    2: (
        Layout("none", 2, shard=2, steps=DIVIDED_STEPS),
        Layout("best-fit", 1, padded=True, recompute="full", shard=2, steps=DIVIDED_STEPS),
        Layout("none", 2, context=2, steps=DIVIDED_STEPS),
        Layout("k-bin", 1, recompute="full", context=2, shard=1, steps=DIVIDED_STEPS),
        Layout("none", 2, tensor=2, steps=DIVIDED_STEPS),
        Layout("best-fit", 1, padded=True, recompute="full", tensor=2, family="qwen3", steps=DIVIDED_STEPS),
        Layout("k-bin", 1, attention="eager", tensor=2, shard=1, family="llama", steps=DIVIDED_STEPS),
        Layout("best-fit", 1, padded=True, expert=2, family="mixtral", router_aux_loss=0.5, steps=DIVIDED_STEPS),
        Layout("none", 1, family="mixtral", router_aux_loss=0.5, steps=DIVIDED_STEPS),
        Layout("none", 1, recompute="full", expert=2, family="mixtral", adapter="peft", steps=DIVIDED_STEPS),
        Layout("none", 2, shard=2, family="mixtral", router_aux_loss=0.5, steps=DIVIDED_STEPS),
    ),
    4: (
        Layout("none", 1, shard=2, steps=DIVIDED_STEPS),
        Layout("best-fit", 2, shard=4, chunk_rows=37, steps=DIVIDED_STEPS),
        Layout("best-fit", 1, padded=True, context=4, steps=DIVIDED_STEPS),
        Layout("none", 1, shard=2, context=2, attention="eager", steps=DIVIDED_STEPS),
        Layout("none", 1, shard=2, tensor=2, family="qwen3", steps=DIVIDED_STEPS),
        Layout("best-fit", 2, tensor=4, family="llama", chunk_rows=37, steps=DIVIDED_STEPS),
        Layout("none", 1, tensor=2, recompute="selective", steps=DIVIDED_STEPS),
        Layout("none", 1, shard=2, tensor=2, optimizer="muon", steps=DIVIDED_STEPS),
        Layout("none", 1, family="mixtral", router_aux_loss=0.5, context=2, steps=DIVIDED_STEPS),
        Layout("best-fit", 1, recompute="full", shard=2, family="mixtral", router_aux_loss=0.5, steps=DIVIDED_STEPS),
        Layout("none", 1, expert=2, family="mixtral", router_aux_loss=0.5, steps=DIVIDED_STEPS),
        Layout("best-fit", 1, padded=True, expert=2, shard=2, family="mixtral", steps=DIVIDED_STEPS),
        Layout("none", 1, expert=2, shard=2, optimizer="muon", family="mixtral", steps=DIVIDED_STEPS),
        Layout("none", 1, expert=2, shard=2, optimizer="muon-nanochat", family="mixtral", steps=DIVIDED_STEPS),
        Layout("none", 1, expert=4, family="mixtral", adapter="peft", steps=DIVIDED_STEPS),
    ),
}
"""What so many processes run with weights or rows divided."""
RULES = (
    Layout("none", 2, shard=2, optimizer="muon-nanochat", steps=DIVIDED_STEPS),
    Layout("none", 2, shard=2, optimizer="adamw8bit", steps=DIVIDED_STEPS),
    Layout("best-fit", 2, shard=2, offload="weights", steps=DIVIDED_STEPS),
    Layout("best-fit", 2, recompute="full", shard=2, adapter="fused", steps=DIVIDED_STEPS),
    Layout("none", 1, shard=2, offload="weights", adapter="fused", steps=DIVIDED_STEPS),
)
"""The same for optimizers that look at more than one number at a time, for weights that wait in the host's memory and
for adapters, by two processes."""


def end_of_each_rank(store: Store, ranks: Ranks) -> list[list[float]]:
    """Where bf16 weights are on every rank after six steps of random rounding: each draws it for itself."""
    model = load_model(TINY, torch.bfloat16).to(ranks.device)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    optimizer = build_optimizer(root, OptimizerConfig(name="adamw16bit", lr=3e-3), seed=1)
    loader = Loader(store, plan_of(store, "none"), 1, ranks.rank, ranks.world_size)
    for step in range(6):
        take(root, optimizer, loader, step, ranks=ranks, autocast=torch.autocast(ranks.device.type, torch.bfloat16))
    loader.close()
    return ranks.all_gather([[weight.double().sum().item() for weight in model.parameters()]])


def copies_under_noise(store: Store, ranks: Ranks) -> tuple[str, ...]:
    """What comes apart where kernels add in no fixed order, on each process in another one, so that gradients differ
    from process to process, and where bf16 weights are rounded at random."""
    mesh = build_mesh(ParallelConfig(tensor=ranks.world_size), ranks)
    model = model_of("llama").bfloat16().to(ranks.device)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    apply_fsdp(root, mesh, torch.bfloat16)

    def unsettle(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * (1 + 0.05 * ranks.rank))

    model.model.norm.register_forward_hook(unsettle)  # type: ignore[union-attr]
    optimizer = build_optimizer(root, OptimizerConfig(name="adamw16bit", lr=3e-3), seed=1)
    loader = Loader(store, plan_of(store, "none", 2), 2, mesh.ranks.data_rank, mesh.ranks.data_size)
    for step in range(2):
        take(root, optimizer, loader, step, ranks=mesh.ranks, autocast=nullcontext())
    loader.close()
    return apart(model, mesh.ranks)


def layouts_of(world: int) -> list[Layout]:
    """What so many processes run: all of it on CPUs, only what is divided on a GPU."""
    if torch.cuda.is_available():
        return list(DIVIDED[world])
    if world == 2:
        few = (FEW_STEPS, DIVIDED_STEPS, DIVIDED_STEPS)
        replicated = [replace(layout, steps=steps) for layout, steps in zip(TOGETHER, few, strict=True)]
        divided = [*DIVIDED[2], *RULES]
        return [*replicated, *(divided if ALL else divided[1::2])]  # every second: one of each kind
    return [*(replace(layout, steps=DIVIDED_STEPS) for layout in TOGETHER), *DIVIDED[world]]


def main(folder: Path) -> None:
    ranks = init_distributed(share_gpu=True)
    store = make_store()
    for number, layout in enumerate(layouts_of(ranks.world_size)):
        trace = run_steps(store, layout, ranks=ranks)
        if ranks.is_main:
            torch.save(trace.weights, folder / f"{number}.pt")
            found = {"losses": trace.losses, "norms": trace.norms, "apart": trace.apart}
            found["conversations"] = trace.conversations
            (folder / f"{number}.json").write_text(json.dumps(found))
    ends = end_of_each_rank(store, ranks)
    noisy = copies_under_noise(store, ranks)
    if ranks.is_main:
        (folder / "ends.json").write_text(json.dumps(ends))
        (folder / "noisy.json").write_text(json.dumps(noisy))
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
