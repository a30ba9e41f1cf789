"""rsLoRA, DoRA, patterns, modules trained whole and token rows: peft's results, fused only for plain LoRA."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.core.errors import WhetError
from whet.model.config import AdapterConfig
from whet.model.flops import count_step_flops
from whet.model.lora.fuse import fuse_lora_
from whet.model.lora.peft_adapters import add_adapter, cast_trained_modules_, embedding_rows, merge_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.loss.output_head import read_output_head
from whet.model.modules import KeepFloat64
from whet.model.packing_check import choose_packing

Make = Callable[..., Any]
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"method": "rslora"},
    "dora": {"method": "dora"},
    "ranks by layer": {"ranks": {"q_proj": 2, r"layers\.1\.mlp\.(gate|up)_proj": 6}, "alphas": {"down_proj": 3.5}},
    "embedding and norms": {"also_train": ["embed_tokens", "norm", "input_layernorm"]},
    "embedding and head": {"also_train": ["embed_tokens", "lm_head"], "method": "rslora"},
    "a layer whole": {"also_train": ["down_proj"], "targets": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]},
    "adapter of the embedding": {"targets": ["embed_tokens", "q_proj"]},
    "a pattern": {"targets": r".*\.[01]\.(self_attn\.[qv]_proj|mlp\.down_proj)"},
}


def noisy(model: nn.Module) -> Any:
    """Everything that is trained is somewhere else than at its start."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.data += 0.2 * drawn.to(parameter.dtype)
    return model.train()


def adapted(make_model: Make, tokens: tuple[int, ...] = (), tied: bool = True, **settings: Any) -> Any:
    model = make_model("Llama", tie_word_embeddings=tied)
    model = add_adapter(model, AdapterConfig(**{"rank": 4, "alpha": 6, **settings}), seed=0, tokens=tokens)
    return noisy(model.to(torch.float64))


def peft_learns(model: Any, documents: list[Tensor]) -> list[Tensor]:
    """The loss by peft's own forward pass, one document at a time, and its gradients."""
    total = torch.zeros((), dtype=torch.float64)
    with KeepFloat64():
        for document in documents:
            logits = model(input_ids=document[None]).logits[0]
            total = total + F.cross_entropy(logits[:-1], document[1:], reduction="sum")
    total.backward()
    return [total.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


def whet_learns(model: Any, batch: Any) -> list[Tensor]:
    from whet.model import attention

    plain = unwrap_peft(model)
    attention.install_backend(plain, "eager")
    root = LossModel(plain)
    with KeepFloat64():
        found = root(batch)
    found.objective.backward()
    return [found.objective.detach(), *(weight.grad for weight in root.parameters() if weight.requires_grad)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tokens", [(), (5, 9, 60)], ids=["no tokens", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_pefts_own_forward(
    kind: str, tokens: tuple[int, ...], tied: bool, make_model: Make, make_documents: Make, pack: Make
) -> None:
    if tokens and kind == "adapter of the embedding":
        pytest.skip("refused: test_rows_of_an_adapted_embedding_are_an_error")
    documents = [*make_documents(9, 5), torch.tensor([5, 60, 9, 3, 60])]
    model = adapted(make_model, tokens, tied, **KINDS[kind])
    other = copy.deepcopy(model)
    fuse_lora_(other)
    one, two = peft_learns(model, documents), whet_learns(other, pack(documents))
    assert len(one) == len(two) > 4
    for expected, found in zip(one, two, strict=True):
        assert expected.norm() > 0
        assert (found - expected).norm() <= 1e-11 * expected.norm()


def test_only_plain_lora_is_fused(make_model: Make) -> None:
    def fused(**settings: Any) -> int:
        return fuse_lora_(adapted(make_model, **settings))

    assert fused() == fused(method="rslora") == fused(ranks={"k_proj": 2}) == 2 * 3  # q k v, o, mlp
    assert fused(method="dora") == 0
    assert fused(tokens=(3,), also_train=["norm"]) == 2 * 3
    assert fused(**KINDS["a layer whole"]) == 2 * 3  # q k v, gate, up: no MLP as a whole


def test_rslora_scales_by_the_root_of_the_rank(make_model: Make) -> None:
    layer = adapted(make_model, method="rslora", rank=9).get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ (layer.base_layer.weight + 6 / math.sqrt(9) * b @ a).T)


def test_dora_trains_magnitudes_and_directions(make_model: Make) -> None:
    layer = adapted(make_model, method="dora").get_base_model().model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    changed = layer.base_layer.weight + 6 / 4 * b @ a
    length = layer.lora_magnitude_vector["default"].weight
    x = torch.randn(3, 32, dtype=torch.float64)
    weight = length[:, None] * changed / changed.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer(x), x @ weight.T)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_it_is_loaded_by_peft_and_merged_it_is_plain(
    kind: str, tied: bool, make_model: Make, tmp_path: Path
) -> None:
    from peft import PeftModel

    has_adapted_embedding = kind == "adapter of the embedding"
    model = adapted(make_model, () if has_adapted_embedding else (5, 60), tied, **KINDS[kind]).eval()
    ids = torch.tensor([[1, 5, 60, 4, 9]])
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(make_model("Llama", tie_word_embeddings=tied), tmp_path).eval()
        assert torch.equal(loaded.to(torch.float64)(input_ids=ids).logits, wanted)
        merged = merge_adapter(model)
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-6, atol=1e-6)
    assert not any("lora" in name or "modules_to_save" in name for name, _ in merged.named_parameters())
    same = merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert same == (tied and not has_adapted_embedding) == merged.config.tie_word_embeddings


def test_rows_of_an_adapted_embedding_are_an_error(make_model: Make) -> None:
    with pytest.raises(WhetError, match=r"adapter\.targets: .*embed_tokens.* includes the embedding"):
        adapted(make_model, (5,), targets=["embed_tokens", "q_proj"])


def test_the_rows_of_an_adapted_embedding_are_counted(make_model: Make) -> None:
    assert embedding_rows(adapted(make_model, targets=["embed_tokens", "q_proj"])) == 64


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_only_the_rows_of_the_tokens_change(tied: bool, make_model: Make, make_documents: Make, pack: Make) -> None:
    before = make_model("Llama", tie_word_embeddings=tied)
    rows = {"in": before.get_input_embeddings().weight.clone(), "out": before.get_output_embeddings().weight.clone()}
    model = adapted(make_model, (7, 50), tied)
    assert sum("trainable_tokens" in name for name, _ in model.named_parameters()) == (1 if tied else 2)
    assert embedding_rows(model) == 64
    merged = merge_adapter(model)
    for name, end in (("in", merged.get_input_embeddings()), ("out", merged.get_output_embeddings())):
        changed = (end.weight != rows[name]).any(dim=1).nonzero()[:, 0].tolist()
        assert changed == [7, 50]


def test_a_wrapped_head_gives_the_models_own_logits_on_and_off(make_model: Make) -> None:
    model = adapted(make_model, (7, 50), tied=False).eval()
    hidden = torch.randn(4, 32, dtype=torch.float64)
    inner = unwrap_peft(model)
    torch.testing.assert_close(read_output_head(inner).logits(hidden), inner.get_output_embeddings()(hidden))
    trained = read_output_head(inner).weight
    with model.disable_adapter():
        plain = read_output_head(inner).weight
        torch.testing.assert_close(read_output_head(inner).logits(hidden), inner.get_output_embeddings()(hidden))
    assert (trained != plain).any(dim=1).nonzero()[:, 0].tolist() == [7, 50]


@pytest.mark.parametrize("kind", ["dora", "embedding and norms"])
def test_packed_documents_do_not_influence_each_other(kind: str, make_model: Make) -> None:
    from whet.model import attention

    plain = unwrap_peft(adapted(make_model, (5,), **KINDS[kind]).eval())
    attention.install_backend(plain, "eager")
    root = LossModel(plain)
    choose_packing(root, 64, 16)
    assert root.unpacked == ""


def test_modules_trained_whole_are_fp32_and_exported_in_16_bits(make_model: Make) -> None:
    model = make_model("Llama", tie_word_embeddings=True, dtype=torch.bfloat16)
    model = add_adapter(model, AdapterConfig(method="dora", also_train=["embed_tokens", "norm"]), seed=0, tokens=(5,))
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    noisy(model).eval()
    cast_trained_modules_(model)
    ids = torch.tensor([[1, 5, 60]])
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.bfloat16  # without mixed precision it computes at all
    assert {weight.dtype for weight in merge_adapter(model).parameters()} == {torch.bfloat16}


def test_modules_trained_whole_are_counted_once(make_model: Make) -> None:
    def per_token(**settings: Any) -> int:
        model = make_model("Llama", tie_word_embeddings=False)
        adapter = AdapterConfig(targets=["q_proj"], **settings)
        return count_step_flops(unwrap_peft(add_adapter(model, adapter, seed=0, tokens=()))).per_token

    for settings in ({"also_train": ["lm_head"]}, {"tokens": (3,)}):  # the head's gradient is a product as large as it
        plain = count_step_flops(unwrap_peft(adapted(make_model, tied=False)))
        assert (
            count_step_flops(unwrap_peft(adapted(make_model, tied=False, **settings))).per_target
            == plain.per_target * 3 // 2
        )
    weights = 32 * 48 * 2  # down_proj of both layers
    plain, whole = per_token(also_train=["norm", "embed_tokens"]), per_token(also_train=["down_proj", "embed_tokens"])
    assert whole - plain == 2 * weights  # its own gradient is one product more, and nothing else is


BAD = {
    "adapter.also_train: this model has no module 'nose'": {"also_train": ["nose"]},
    "adapter.ranks: 'nose' matches no layer": {"ranks": {"nose": 3}},
    "adapter.alphas: 'embed_tokens' matches no layer": {"alphas": {"embed_tokens": 3}},
    r"adapter.targets: '\(\[' does not match this model": {"targets": "(["},
    "adapter.targets: 'q_proj' does not match": {"targets": "q_proj"},
}


@pytest.mark.parametrize("message", BAD)
def test_settings_that_match_nothing_are_errors(message: str, make_model: Make) -> None:
    with pytest.raises(WhetError, match=message):
        adapted(make_model, **BAD[message])


def test_token_rows_of_a_head_with_a_bias_are_an_error(make_model: Make) -> None:
    model = make_model("Phi")
    with pytest.raises(WhetError, match=r"has a bias.*adapter\.also_train=\[embed_tokens, lm_head\]"):
        add_adapter(model, AdapterConfig(), seed=0, tokens=(3,))


@pytest.mark.parametrize("settings", [{"method": "dora"}, {"dropout": 0.1}], ids=str)
def test_experts_take_plain_lora_only(settings: dict[str, Any], make_model: Make) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    key = next(iter(settings))
    with pytest.raises(WhetError, match=rf"adapter\.{key}: {settings[key]} does not work on stacked experts") as raised:
        add_adapter(make_model("Qwen3Moe", **moe), AdapterConfig(**settings), seed=0)
    linear = ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert f"adapter.targets=[{', '.join(linear)}]" in str(raised.value)
    add_adapter(make_model("Qwen3Moe", **moe), AdapterConfig(**settings, targets=linear), seed=0)
