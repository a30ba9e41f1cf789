"""The auxiliary loss of routers, against transformers' own on one padded batch and a naive loop, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_architectures import VOCABULARY, tiny_model
from whet.compat.transformers_private import router_logit_outputs
from whet.core.distributed import Ranks
from whet.core.errors import WhetError
from whet.data.batch import BatchShape
from whet.data.loader import ReplayLoader, SavedDocument
from whet.execution.transform import transform_layers
from whet.model import attention
from whet.model.config import AdapterConfig
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.parallel.config import ParallelConfig
from whet.training.step import ForwardPasses, StepResult, train_step

ALONE = Ranks(0, 1, torch.device("cpu"))
COEFFICIENT = 0.3
LENGTHS = (5, 11, 3, 8)


def documents() -> list[SavedDocument]:
    drawn = np.random.default_rng(0)
    return [
        SavedDocument(drawn.integers(3, VOCABULARY, length), np.array([0] + [1] * (length - 1), dtype=np.uint8))
        for length in LENGTHS
    ]


def step_of(root: LossModel, layout: list[tuple[int, list[int]]], shapes: tuple[BatchShape, ...] = ()) -> StepResult:
    loader = ReplayLoader(documents(), layout, max(LENGTHS), shapes)
    forward = ForwardPasses(root, loader, 0, device=ALONE.device, seed=0, autocast=KeepFloat64(), loss_scale=1.0)
    return train_step(forward, None, ranks=ALONE, clip_norm=1e9).wait()


def naive_loss(logits: list[Tensor], top_k: int) -> Tensor:
    """E · Σ_e f_e · P_e over [tokens, experts] of each layer, token by token."""
    experts, chosen, probable, rows = logits[0].shape[-1], 0, 0, 0
    for layer in logits:
        for token in layer:
            p = token.softmax(-1)
            chosen = chosen + F.one_hot(p.topk(top_k).indices, experts).sum(0).double()
            probable, rows = probable + p, rows + 1
    return experts * (chosen / rows * probable / rows).sum()


def padded_batch() -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents()):
        ids[row, : len(document.ids)] = torch.from_numpy(document.ids)
        mask[row, : len(document.ids)] = 1
    return ids, mask


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of mean loss + coefficient · auxiliary loss over one padded batch, and the auxiliary loss."""
    ids, mask = padded_batch()
    with KeepFloat64():
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        logits = [layer.reshape(-1, layer.shape[-1])[mask.flatten() == 1] for layer in output.router_logits]
        auxiliary = naive_loss(logits, model.num_experts_per_tok)
        labels = ids.masked_fill(mask == 0, -100)[:, 1:]
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.aux_loss.double(), auxiliary, rtol=1e-6, atol=0)  # transformers sums in fp32
    (loss + COEFFICIENT * auxiliary).backward()
    return gradients_of(model), auxiliary.detach()


def make(kind: str) -> Any:
    torch.manual_seed(0)
    model = tiny_model(kind).train()
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and weight.shape[0] == getattr(model, "num_experts", -1):  # choices that are no ties
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    return model


LAYOUTS = {
    "one micro-batch": ([(0, [0, 1, 2, 3])], ()),
    "one document each": ([(0, [0]), (1, [1]), (2, [2]), (3, [3])], ()),
    "padded": ([(0, [3, 0]), (1, [1, 2])], (BatchShape(40, 4),)),
    "a batch of padding": ([(0, [2, 0, 1]), (1, [3]), (2, [])], (BatchShape(24, 4),)),
}


@pytest.mark.parametrize(
    "kind",
    [
        "gpt_oss",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe", "mixtral", "olmoe", "granitemoe")),
    ],
)
def test_every_layout_of_a_step_has_the_gradients_of_one_padded_batch(kind: str) -> None:
    model = make(kind)
    if not router_logit_outputs(model):  # Granite in transformers 5.17
        with pytest.raises(WhetError, match="does not return its router logits"):
            LossModel(model, router_aux_loss=COEFFICIENT)
        return
    attention.use_native_attention(model)
    wanted, auxiliary = expected(model)
    attention.install_backend(model, "sdpa")
    root = LossModel(model, router_aux_loss=COEFFICIENT)
    for layout, shapes in LAYOUTS.values():
        result = step_of(root, layout, shapes)
        assert result.router_aux_loss == pytest.approx(auxiliary.item(), rel=1e-12)
        found = gradients_of(model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_recomputed_layers_count_once(recompute: str) -> None:
    layout = LAYOUTS["padded"]
    found = []
    for kind in ("none", recompute):
        root = LossModel(make("mixtral"), router_aux_loss=COEFFICIENT)
        attention.install_backend(root.language_model, "sdpa")
        transform_layers(root.language_model, ParallelConfig(recompute=kind), compile=False)
        found.append((step_of(root, *layout), gradients_of(root)))
    (plain, own), (again, recomputed) = found
    assert again.router_aux_loss == plain.router_aux_loss
    torch.testing.assert_close(recomputed, own, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradients() -> None:
    found = []
    for compiles in (False, True):
        root = LossModel(make("qwen3_moe"), router_aux_loss=COEFFICIENT)
        attention.install_backend(root.language_model, "sdpa")
        transform_layers(root.language_model, ParallelConfig(), compiles, backend="aot_eager")
        found.append(([step_of(root, *LAYOUTS["padded"]).router_aux_loss for _ in range(2)], gradients_of(root)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-9, atol=1e-12)


def test_adapters_below_a_frozen_router_feel_it() -> None:
    norms = []
    for coefficient in (0.0, COEFFICIENT):
        adapted = add_adapter(make("qwen3_moe"), AdapterConfig(rank=2, targets=["o_proj"]), seed=0).double()
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
        root = LossModel(unwrap_peft(adapted), router_aux_loss=coefficient)
        attention.install_backend(root.language_model, "sdpa")
        norms.append(step_of(root, *LAYOUTS["padded"]).grad_norm)
    assert abs(norms[0] - norms[1]) > 1e-3 * norms[0]


def test_evaluation_neither_counts_nor_pulls() -> None:
    root = LossModel(make("mixtral"), router_aux_loss=COEFFICIENT)
    attention.install_backend(root.language_model, "sdpa")
    first = step_of(root, *LAYOUTS["padded"])
    loader = ReplayLoader(documents(), [(0, [0, 1])], max(LENGTHS), ())
    with torch.no_grad():
        for _, batch in loader.micro_batches(0):
            root.eval()(batch)
    assert step_of(root.train(), *LAYOUTS["padded"]).router_aux_loss == first.router_aux_loss


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_models_without_such_a_loss_are_refused(kind: str) -> None:
    with pytest.raises(WhetError, match=r"train\.router_aux_loss: 0\.3, but .* balances its experts in another way"):
        LossModel(tiny_model(kind), router_aux_loss=COEFFICIENT)
