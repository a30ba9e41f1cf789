"""Recurrent layers compute each document of a packed row by itself: how documents are grouped, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_architectures import VOCABULARY, tiny_model
from whet.core.errors import WhetError
from whet.model import attention, packing_check
from whet.model.attention import recurrent
from whet.model.attention.recurrent import group_documents, recurrent_layers
from whet.model.loss.loss_model import LossModel
from whet.model.modules import eval_mode
from whet.model.packing_check import choose_packing


@given(lengths=st.lists(st.integers(0, 400), max_size=60).filter(any), multiple=st.sampled_from([1, 64]))
def test_every_token_is_in_one_group_in_order(lengths: list[int], multiple: int) -> None:
    edges = [0, *itertools.accumulate(lengths)]
    groups, inverse = group_documents(edges, multiple)
    flat = np.concatenate([np.empty(0, np.int64), *(group.flatten() for group in groups)])
    assert (flat[inverse] == np.arange(edges[-1])).all()
    documents = [row for group in groups for row in group]
    assert sorted(int(row[0]) for row in documents) == sorted(
        start for start, length in zip(edges, lengths, strict=False) if length
    )
    for row in documents:
        start = int(row[0])
        length = next(n for place, n in zip(edges, lengths, strict=False) if place == start and n)
        assert (row == start + np.minimum(np.arange(len(row)), length - 1)).all()
        assert len(row) % multiple == 0
    real, padded = sum(lengths), flat.size
    assert padded - real <= len(groups) * 1024 + 0.25 * padded + len(documents) * multiple


def test_documents_of_like_length_share_a_group() -> None:
    edges = [0, *itertools.accumulate([3000, *[200 + number for number in range(40)], 2500])]
    groups, _ = group_documents(edges)
    assert [group.shape for group in groups] == [(2, 3000), (40, 239)]


@pytest.fixture
def root() -> LossModel:
    model = tiny_model("lfm2", torch.float32)
    attention.install_backend(model, "sdpa")
    return LossModel(model)


def test_documents_of_200_and_73_tokens_are_compared_with_each_alone(
    root: LossModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    original = packing_check._difference
    monkeypatch.setattr(
        packing_check, "_difference", lambda found, expected: compared.append(len(found)) or original(found, expected)
    )
    choose_packing(root, VOCABULARY, 4096)
    assert root.unpacked == ""
    assert compared == [273] * 4  # hidden states and gradients, with each alone and with rounding
    assert len(recurrent_layers(root.language_model)) == 1


@pytest.mark.parametrize("kind", ["lfm2", "zaya"])
def test_packed_documents_of_any_order_are_those_alone(kind: str) -> None:
    """Zaya's attention has a convolution in it: only that part is reset, because attention takes the packed row."""
    model = tiny_model(kind, torch.float64)
    documents = [torch.randint(3, VOCABULARY, (length,)) for length in (7, 2, 23, 12)]
    with eval_mode(model), torch.no_grad():
        alone = [model.model(input_ids=document[None], use_cache=False).last_hidden_state[0] for document in documents]
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    choose_packing(root, VOCABULARY, 23)
    assert root.unpacked == ""
    with eval_mode(model), torch.no_grad():
        packed = packing_check.hidden_of_documents(root, documents)
    assert torch.allclose(packed, torch.cat(alone), rtol=0, atol=1e-12)


class _LeakBackwards(torch.autograd.Function):
    """The identity, with a gradient that is wrong across documents."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-3 * gradient.mean(1, keepdim=True)


@pytest.mark.parametrize("fault", ["one token late", "gradient", "no reset"])
def test_a_reset_that_is_wrong_is_undone_and_the_model_is_padded(
    root: LossModel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    before = [type(module) for module in root.modules()]
    if fault == "gradient":
        own = recurrent._join
        monkeypatch.setattr(recurrent, "_join", lambda *args: _LeakBackwards.apply(own(*args)))
    elif fault == "no reset":
        monkeypatch.setattr(recurrent, "current_documents", lambda: None)
    else:
        right = recurrent.group_documents
        monkeypatch.setattr(recurrent, "group_documents", lambda *args: (right(*args)[0], np.roll(right(*args)[1], 1)))
    choose_packing(root, VOCABULARY, 300)
    assert "influence each other" in root.unpacked
    assert "resetting their state between conversations does not help: " in root.unpacked
    assert root.pads
    assert [type(module) for module in root.modules()] == before


class _FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this kernel needs Triton 3.7")


def test_a_kernel_without_a_backward_pass_here_is_an_error_before_training(
    root: LossModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-linear-attention 0.6 raises in the backward pass, on Hopper with Triton before 3.7.1."""
    kind: Any = next(type(module) for module in root.modules() if type(module).__name__ == "Lfm2ShortConv")
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: _FailsBackwards.apply(own(*args, **kwargs)))
    with pytest.raises(WhetError, match=r"Lfm2ForCausalLM cannot be trained.*this kernel needs Triton 3\.7"):
        choose_packing(root, VOCABULARY, 300)


def test_generation_is_the_models_own(root: LossModel) -> None:
    """Outside of a packed pass, recurrent layers are what they were: with a cache, and in batches."""
    tokens = torch.arange(3, 11)[None]
    model: Any = root.language_model
    with attention.native_attention(model):
        expected = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    choose_packing(root, VOCABULARY, 64)
    with attention.native_attention(model):
        assert model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0).equal(expected)
