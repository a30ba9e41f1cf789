"""llama.cpp loads an exported GGUF: same tokens, same logits; its server: same prompt, same greedy answers.

It runs with an fp32 cache and without flash attention, otherwise rounding changes the answers.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import smollm2_folder
from whet.exporting.dtypes import QUANTIZER_TYPES
from whet.exporting.exporter import write_export
from whet.exporting.gguf import families
from whet.exporting.spec import ExportMismatchError
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.pretrained import load_model
from whet.model.load.tokenizer import load_tokenizer
from whet.model.lora.peft_adapters import add_adapter

QUESTIONS = ["Please send 12 red mugs to Anna in Riga by Mon.", "What is 1234567 + 89?", "Name three colours."]
TEXTS = [
    "Größe: 1234567,89 €\n\n\tThe 2nd line's   gap; <b>tag</b> 漢字 🙂 don't WE'LL x=3.14",
    "in 2026 there were 100000 of them, 3 of which  \n\n\n   were lost...\r\n",
    "<|im_start|>user\nHi<|im_end|>\n",
]


PROBES = [list(range(3, 60)), list(range(100, 120))]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": True, "pad_token_id": None}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + i / 20 for i in range(8)],
    "long_factor": [2.0] * 8, "original_max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral with a window": ("mistral", {"sliding_window": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "phi3": ("phi3", {"pad_token_id": None}),
    "phi3, partial": ("phi3", {"pad_token_id": None, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}}),
    "phi3, long": ("phi3", {"pad_token_id": None, "max_position_embeddings": 2048, "rope_parameters": LONG_ROPE}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3 with windows only": ("gemma3_text", GEMMA),
    "gpt_oss": ("gpt_oss", {**EXPERTS, "sliding_window": 16, "pad_token_id": None, "rope_parameters": PLAIN_ROPE}),
    "gpt_oss, yarn": ("gpt_oss", {**EXPERTS, "sliding_window": 16, "pad_token_id": None}),
}


def test_a_quantized_file_is_verified_before_and_after(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("cyllama")
    model = random_model("llama", hidden_size=256, num_hidden_layers=1, head_dim=64)
    spec = export_spec_of(model, "iq2_xxs", calibration=PROBES)  # llama.cpp refuses it without importance matrix
    certificate = write_export(spec, "gguf", tmp_path / "gguf", PROBES).as_dict()
    assert certificate["loaded_by"] == "llama.cpp"
    assert all(certificate[key] for key in ("verified", "same_ids", "same_template", "stops"))
    assert 0 < certificate["kl"] < 1
    assert certificate["tensors"]["iq2_xxs"] == 5
    assert certificate["fell_back"] == {"iq4_nl": 1}  # ffn_down has rows of 96
    assert certificate["importance_matrix"] == {"conversations": 2, "tokens": 77, "tensors": 8}
    assert sorted(file.name for file in (tmp_path / "gguf").iterdir()) == [
        "Modelfile", "certificate.json", "whet-iq2_xxs.gguf",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_logits(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, family: str, dtype: str
) -> None:
    pytest.importorskip("cyllama")
    kind, settings = FAMILIES[family]
    certificate = write_export(export_spec_of(random_model(kind, **settings), dtype), "gguf", tmp_path / "gguf", PROBES)
    assert certificate.same_ids
    assert certificate.kl < (1e-7 if dtype == "f32" else 1e-2)
    if dtype == "f32":  # a 4-bit weight moves single logits, of Gemma by 0.7
        assert certificate.max_logit_difference < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", QUANTIZER_TYPES)
def test_every_type_is_written_and_read(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path, dtype: str
) -> None:
    pytest.importorskip("cyllama")
    model = random_model("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    spec = export_spec_of(model, dtype, calibration=PROBES)
    assert write_export(spec, "gguf", tmp_path / "gguf", PROBES).verified


@pytest.mark.parametrize("dtype", ["q8_0", pytest.param("q2_k", marks=pytest.mark.slow)])
def test_a_fault_before_quantizing_is_found(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, dtype: str,
) -> None:  # fmt: skip
    pytest.importorskip("cyllama")
    monkeypatch.setattr(families, "permute_rope", lambda weight, heads: weight)
    with pytest.raises(ExportMismatchError, match="its logits differ"):
        write_export(export_spec_of(random_model("llama"), dtype), "gguf", tmp_path / "gguf", PROBES)
    assert list(tmp_path.iterdir()) == []


class LlamaCpp:
    """llama.cpp's server, running in this process."""

    def __init__(self, file: Path) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path, settings.n_ctx, settings.warmup = str(file), 1024, False
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(settings)

    def request(self, path: str, **body: Any) -> Any:
        address = f"{self._server.listening_address}/{path}"
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["builtin:tiny", "builtin:smollm2"])
def test_llama_cpp_gives_the_same_answers(path: str, export_spec_of: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    if path == "builtin:smollm2":
        smollm2_folder()
    config = ModelConfig(path=path)
    tokenizer = load_tokenizer(config)
    model = add_adapter(load_model(config, torch.float32), AdapterConfig(rank=4), seed=0).eval()
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.002)
    certificate = write_export(
        export_spec_of(model, tokenizer=tokenizer), "gguf", tmp_path / "gguf", [tokenizer.encode(TEXTS[0])]
    )
    merged = model.merge_and_unload()
    llama = LlamaCpp(tmp_path / "gguf" / next(iter(certificate.files)))
    for text in TEXTS:
        found = llama.request("tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert found == tokenizer.encode(text, add_special_tokens=False)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert llama.request("apply-template", messages=messages)["prompt"] == prompt
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer = llama.request("completion", prompt=ids, n_predict=24, temperature=0, top_k=1, return_tokens=True)
        with torch.inference_mode():
            expected = merged.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=2)
        assert [number for number in answer["tokens"] if number != 2] == [
            number for number in expected[0, len(ids) :].tolist() if number != 2
        ]
