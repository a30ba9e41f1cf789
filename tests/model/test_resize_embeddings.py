"""Added tokens: one id each, with rows that start as the mean of the split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from whet.core.errors import WhetError
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.placeholder import load_placeholder_model
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer, tokenizer_hashes

NEW = ["<|tool|>", " lampshade"]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """builtin:tiny with a head of its own, and with so many rows more than tokens."""

    def make(tied: bool, spare: int) -> Path:
        folder = tmp_path_factory.mktemp("model")
        model: Any = AutoModelForCausalLM.from_pretrained(builtin_folder("builtin:tiny"))
        load_tokenizer(ModelConfig(path="builtin:tiny")).save_pretrained(folder)
        config = model.config
        config.tie_word_embeddings, config.vocab_size = tied, config.vocab_size + spare
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("spare", [0, 1, 7])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_rows_start_as_the_mean_of_the_split(tied: bool, spare: int, make_folder: Callable[..., Path]) -> None:
    folder = str(make_folder(tied, spare))
    before: Any = load_model(ModelConfig(path=folder), torch.float64)
    config = ModelConfig(path=folder, add_tokens=NEW)
    model: Any = load_model(config, torch.float64)
    old, new = load_tokenizer(ModelConfig(path=folder)), load_tokenizer(config)
    assert len(new) == len(old) + 2
    rows = max(len(new), len(old) + spare)
    assert model.config.vocab_size == rows
    for end in ("get_input_embeddings", "get_output_embeddings"):
        was, is_ = getattr(before, end)().weight, getattr(model, end)().weight
        assert len(is_) == rows
        assert torch.equal(is_[: len(old)], was[: len(old)])
        for number, text in enumerate(NEW, len(old)):
            pieces = old.encode(text)
            assert len(pieces) > 1
            torch.testing.assert_close(is_[number], was[pieces].mean(dim=0), rtol=1e-6, atol=1e-7)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_a_text_of_unknown_tokens_starts_as_the_mean_of_all_rows(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A tokenizer of whole words does not know the new one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "red": 1, "lamp": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    folder = str(make_folder(True, 0))
    before: Any = load_model(ModelConfig(path=folder), torch.float64)
    model: Any = load_model(ModelConfig(path=folder, tokenizer=str(tmp_path), add_tokens=["blue"]), torch.float64)
    mean = before.get_input_embeddings().weight[:3].mean(dim=0)
    torch.testing.assert_close(model.get_input_embeddings().weight[3], mean, rtol=1e-6, atol=1e-7)


def test_an_added_token_is_one_id_anywhere_and_decodes() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny", add_tokens=NEW))
    text = "a lampshade<|tool|>and more"
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.get_vocab()["<|tool|>"]) == ids.count(tokenizer.get_vocab()[" lampshade"]) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_address_of_prepared_data_follows_the_tokens() -> None:
    plain, one, two = (
        tokenizer_hashes(ModelConfig(path="builtin:tiny", add_tokens=tokens)) for tokens in ([], NEW[:1], NEW[::-1])
    )
    assert len({str(plain), str(one), str(two)}) == 3
    assert plain is not None
    assert "add_tokens" not in plain  # data that was prepared before they existed is still found


def test_sharded_weights_have_rows_for_added_tokens() -> None:
    config = ModelConfig(path="builtin:tiny", add_tokens=NEW)
    whole: Any = load_model(config, torch.float32)
    placeholder, source = load_placeholder_model(config, torch.float32)
    name = "model.embed_tokens.weight"
    rows = len(whole.get_input_embeddings().weight)
    assert dict(placeholder.named_parameters())[name].shape[0] == rows
    assert torch.equal(source.read_rows(name, rows - 2, rows), whole.get_input_embeddings().weight[-2:])


def test_adding_an_existing_token_is_an_error() -> None:
    with pytest.raises(
        WhetError, match=r"model\.add_tokens: '<\|endoftext\|>' is a token already, number 0.*adapter\.tokens"
    ):
        load_tokenizer(ModelConfig(path="builtin:tiny", add_tokens=["<|endoftext|>"]))
