"""GGUF where llama.cpp is not installed and transformers loads it: the same weights and the same tokens, or no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.core.errors import WhetError
from whet.exporting.exporter import write_export
from whet.exporting.gguf import families, gguf_tokenizer, llama_cpp
from whet.exporting.gguf.gguf_tokenizer import pre_tokenizer_name, set_pre_tokenizer
from whet.exporting.spec import ExportMismatchError
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)


PROBES = [list(range(3, 60)), list(range(100, 120))]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one head of keys": ("llama", {"num_key_value_heads": 1}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_f32_file_bit_for_bit(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    kind, settings = FAMILIES[family]
    model = random_model(kind, **settings)
    certificate = write_export(export_spec_of(model), "gguf", tmp_path / "gguf", PROBES)
    assert (certificate.max_logit_difference, certificate.same_next_token, certificate.kl) == (0, 1, 0)
    (name,) = certificate.files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file=name, dtype=torch.float32)
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "most"), [("f16", 0.51), ("bf16", 0.51), ("q8_0", 0.28)])
def test_smaller_dtypes_are_smaller_and_close(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, dtype: str, most: float
) -> None:
    from gguf import GGUFReader

    certificate = write_export(export_spec_of(random_model("llama"), dtype), "gguf", tmp_path / "gguf", PROBES)
    assert 0 < certificate.max_logit_difference < 0.05
    assert certificate.dtype == dtype
    tensors = GGUFReader(tmp_path / "gguf" / next(iter(certificate.files))).tensors
    assert sum(tensor.n_bytes for tensor in tensors) < most * 4 * sum(tensor.n_elements for tensor in tensors)


def test_the_file_has_the_fields_that_llama_cpp_reads(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path
) -> None:
    from gguf import GGUFReader

    spec = export_spec_of(random_model("llama", rope_parameters=LLAMA3), name="mine")
    write_export(spec, "gguf", tmp_path / "gguf", PROBES)
    read = GGUFReader(tmp_path / "gguf" / "mine-f32.gguf")
    fields = {key: field.contents() for key, field in read.fields.items()}
    tokenizer = spec.generation.tokenizer
    assert fields["general.architecture"] == "llama"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.chat_template"] == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"] == fields["tokenizer.ggml.eot_token_id"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == spec.model.language_model.config.vocab_size
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 3]
    assert fields["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert fields["tokenizer.ggml.merges"]
    factors = next(tensor for tensor in read.tensors if tensor.name == "rope_freqs.weight").data
    assert factors.min() == 1  # high frequencies are unchanged
    assert factors.max() == pytest.approx(8)  # low frequencies are divided by the factor


def test_several_templates_are_kept_by_name(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path
) -> None:
    from gguf import GGUFReader

    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    own = tokenizer.chat_template
    tokenizer.chat_template = {"default": own, "tool_use": f"{{{{ tools | tojson }}}}{own}"}
    certificate = write_export(export_spec_of(random_model("llama"), tokenizer=tokenizer), "gguf", tmp_path, PROBES)
    fields = GGUFReader(tmp_path / next(iter(certificate.files))).fields
    assert fields["tokenizer.chat_template"].contents() == own
    assert gguf_tokenizer.read_templates(fields) == tokenizer.chat_template


def tokenizer_of_numbers() -> Any:
    """A tokenizer with tokens of up to three digits, like Llama 3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tiny = load_tokenizer(ModelConfig(path="builtin:tiny"))
    backend = Tokenizer(models.BPE())
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    set_pre_tokenizer(made, "llama-bpe")
    backend.pre_tokenizer, backend.decoder = made.backend_tokenizer.pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["1234567 123456 123 234 567"] * 50, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=tiny.chat_template,
    )  # fmt: skip


@pytest.mark.parametrize("what", ["rope permutation", "pre-tokenizer", "template", "end of turn"])
def test_a_wrong_file_is_refused(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, what: str,
) -> None:  # fmt: skip
    from gguf import GGUFWriter

    reason = {
        "rope permutation": "its logits differ", "pre-tokenizer": "its tokenizer splits",
        "template": "its chat template", "end of turn": "does not stop at",
    }[what]  # fmt: skip
    tokenizer = None
    if what == "rope permutation":
        monkeypatch.setattr(families, "permute_rope", lambda weight, heads: weight)
    elif what == "pre-tokenizer":
        tokenizer = tokenizer_of_numbers()
        assert pre_tokenizer_name(tokenizer) == "llama-bpe"
        monkeypatch.setattr(gguf_tokenizer, "pre_tokenizer_name", lambda tokenizer: "qwen2")
    elif what == "template":
        monkeypatch.setattr(GGUFWriter, "add_chat_template", lambda self, text: None)
    else:
        monkeypatch.setattr(GGUFWriter, "add_eot_token_id", lambda self, number: None)
        write = GGUFWriter.add_eos_token_id
        monkeypatch.setattr(GGUFWriter, "add_eos_token_id", lambda self, number: write(self, 5))
    with pytest.raises(ExportMismatchError, match=reason):
        write_export(export_spec_of(random_model("llama"), tokenizer=tokenizer), "gguf", tmp_path / "gguf", PROBES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("gemma", {}, "cannot write gemma models as GGUF, only llama, mistral, qwen2, qwen3"),
        ("phi3", {"pad_token_id": None}, "verified with llama.cpp, and the package cyllama is not installed"),
        ("llama", {"attention_bias": True}, "has biases"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "the RoPE type dynamic",
        ),
        ("llama", {"vocab_size": 100}, "the model has only 100 embedding rows"),
    ],
)
def test_unsupported_models_are_refused(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, kind: str,
    settings: dict[str, Any], words: str,
) -> None:  # fmt: skip
    with pytest.raises(WhetError, match=words):
        write_export(export_spec_of(random_model(kind, **settings)), "gguf", tmp_path / "gguf", [[3, 4, 5]])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_pre_tokenizer_is_refused(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path
) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(WhetError, match=r"no GGUF name for .*only for gpt-2, smollm, llama-bpe, qwen2"):
        write_export(export_spec_of(random_model("llama"), tokenizer=tokenizer), "gguf", tmp_path / "gguf", PROBES)


@pytest.mark.parametrize("name", gguf_tokenizer.PRE_TOKENIZER_NAMES)
def test_the_name_of_a_pre_tokenizer_and_its_rule_match(name: str) -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    set_pre_tokenizer(tokenizer, name)
    if name == "gpt-2":
        tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    assert pre_tokenizer_name(tokenizer) == name
