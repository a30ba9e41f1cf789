"""llama.cpp's quantized types: their names, the quantizer, the importance matrix, and what Ollama gets."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whet.core.errors import WhetError
from whet.core.signals import is_alive
from whet.data.conversation import Message
from whet.data.render.renderer import Renderer
from whet.exporting.dtypes import EXPORT_DTYPES, QUANTIZER_TYPES, assess_quantization, choose_dtype
from whet.exporting.exporter import write_export
from whet.exporting.gguf import llama_cpp
from whet.exporting.gguf.families import GGUFLayout
from whet.exporting.gguf.llama_cpp import write_importance_matrix
from whet.exporting.gguf.llama_cpp_child import read_importance_matrix
from whet.exporting.gguf.ollama import find_turn_texts, ollama_template
from whet.exporting.spec import ExportFindings, GenerationSettings
from whet.exporting.trained_model import TrainedModel
from whet.exporting.verification import compare_logits
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.tokenizer.named_templates import NAMED_TEMPLATES

pytest.importorskip("gguf")

PROBES = [list(range(3, 60)), list(range(100, 120))]
F32 = torch.float32


def test_the_names_of_train_precision_are_dtypes() -> None:
    for kind, asked, meant in (("gguf", "fp16", "f16"), ("merged", "FP32", "f32"), ("merged", "fp64", "f64")):
        assert choose_dtype(kind, asked, torch.float64, torch.float64).name == meant


@pytest.mark.parametrize("asked", ["q4_k_m", "Q4_K_M", "q4_k"])
def test_types_have_the_names_of_llama_quantize(asked: str) -> None:
    dtype = choose_dtype("gguf", asked, F32, F32)
    assert (dtype.name, dtype.llama_ftype) == ("q4_k_m", 15)


def test_the_numbers_of_the_types_are_those_of_gguf() -> None:
    from gguf import LlamaFileType

    for name in QUANTIZER_TYPES:
        assert EXPORT_DTYPES[name].llama_ftype == LlamaFileType[f"MOSTLY_{name.upper()}"]


def test_an_unknown_type_lists_what_there_is() -> None:
    with pytest.raises(WhetError, match=r"--dtype: q4_k_x does not exist for --to gguf\. Use one of f32, .*q4_k_m"):
        choose_dtype("gguf", "q4_k_x", F32, F32)
    with pytest.raises(WhetError, match=r"q4_k_m does not exist for --to merged \(--to gguf has it\)"):
        choose_dtype("merged", "q4_k_m", F32, F32)


@pytest.mark.parametrize(("dtype", "is_judged"), [("f16", True), ("bf16", True), ("q8_0", False), ("q4_k_m", False)])
def test_single_logits_are_judged_before_quantizing_only(dtype: str, is_judged: bool) -> None:
    """A small model in 8 bits moved one by 9.4 of 42, with the same answers."""
    trained, findings = torch.linspace(-42, 42, 600).reshape(3, 200), ExportFindings()
    exported = trained.clone()
    exported[1, 3] += 9.4
    compare_logits(exported, trained, EXPORT_DTYPES[dtype], findings)
    assert bool(findings.reasons) == is_judged


def test_the_assessment_compares_with_what_is_usual() -> None:
    assert assess_quantization(EXPORT_DTYPES["q8_0"], 0.98, 0.01) == "98% same next token: as expected of q8_0"
    assert "normal for a small model in q8_0" in assess_quantization(EXPORT_DTYPES["q8_0"], 0.94, 0.05)
    assert "below the usual" in assess_quantization(EXPORT_DTYPES["q4_k_m"], 0.7, 0.2)
    assert "little is left of the model" in assess_quantization(EXPORT_DTYPES["iq1_s"], 0.2, 4.0)


def test_without_a_quantizer_the_line_that_installs_it_is_named(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = export_spec_of(random_model("llama"), "q4_k_m")
    with pytest.raises(WhetError, match=r"neither the package cyllama nor .* is here\. pip install 'whet\[export\]'"):
        write_export(spec, "gguf", tmp_path / "gguf", PROBES)
    assert list(tmp_path.iterdir()) == []


def install_quantizer(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama-quantize on the PATH, where cyllama is not installed."""
    folder.mkdir()
    program = folder / "llama-quantize"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize("script", ["echo 'main: failed to quantize: no fallback'; exit 1", "kill -9 $$", "exit 0"])
def test_a_quantizer_that_fails_leaves_nothing_behind(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, script: str,
) -> None:  # fmt: skip
    install_quantizer(tmp_path / "bin", script, monkeypatch)
    spec = export_spec_of(random_model("llama"), "q4_k_m", calibration=[[3, 4, 5, 6]])
    words = "no fallback" if "echo" in script else "it ended with code"
    with pytest.raises(WhetError, match=f"llama.cpp cannot quantize this model to q4_k_m: .*{words}"):
        write_export(spec, "gguf", tmp_path / "out" / "gguf", PROBES)
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_ends_the_quantizer_and_leaves_nothing_behind(
    random_model: Callable[..., Any], export_spec_of: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install_quantizer(
        tmp_path / "bin", f"echo $$ > {tmp_path / 'pid'}; sleep 0.3; kill -INT $PPID; exec sleep 60", monkeypatch
    )
    with pytest.raises(KeyboardInterrupt):
        write_export(export_spec_of(random_model("llama"), "q4_k_m"), "gguf", tmp_path / "out" / "gguf", PROBES)
    assert list((tmp_path / "out").iterdir()) == []
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_the_importance_matrix_is_the_mean_square_of_each_input(
    random_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = random_model("llama")
    seen: list[torch.Tensor] = []
    layer = model.model.layers[1].mlp.down_proj
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().flatten(0, 1)))
    layout = GGUFLayout(model.config, "llama")
    about = write_importance_matrix(TrainedModel(model), layout, PROBES, tmp_path / "matrix")
    hook.remove()
    matrix = read_importance_matrix(str(tmp_path / "matrix"))
    assert about == {"conversations": 2, "tokens": 77, "tensors": len(matrix)}
    assert len(matrix) == 2 * 7 + 1  # linear layers of two decoder layers, and the head
    expected = torch.cat(seen).double().square().mean(0).numpy()
    np.testing.assert_allclose(matrix["blk.1.ffn_down.weight"], expected, rtol=1e-4)


CONVERSATIONS = [
    [Message("user", "a  b")],
    [Message("user", "a\n"), Message("assistant", "b"), Message("user", "{{ c }}")],
    [Message("system", "s"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")],
]
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' "
    "}}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "template", ["own", SMOLLM2, NAMED_TEMPLATES["chatml"].source("")], ids=["own", "default", "chatml"]
)
def test_the_turns_of_a_modelfile_are_those_of_the_template(template: str) -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    if template != "own":
        tokenizer.chat_template = template
    turns = find_turn_texts(GenerationSettings(tokenizer, [2], 2, {}))
    assert turns is not None
    renderer = Renderer(tokenizer, "assistant")
    for messages in CONVERSATIONS:
        assert turns.compose(messages) == renderer.text.apply(messages, prompt=True)
    assert '{{ if eq .Role "user" }}{{ "<|im_start|>user\\n" }}{{ .Content }}' in ollama_template(turns)


def test_a_template_that_is_more_than_turns_is_left_to_ollama() -> None:
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.index|string + m['role'] + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'x' }}{% endif %}"
    )
    assert find_turn_texts(GenerationSettings(tokenizer, [2], 2, {})) is None
