"""Models that cannot be packed are trained unpacked; models that whet would train wrongly and damaged folders are
WhetErrors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import tiny_architectures
from tiny_architectures import VOCABULARY, tiny_config, tiny_model
from whet.compat.transformers_private import to_checkpoint_tensors
from whet.core.errors import WhetError
from whet.exporting import peft_adapter
from whet.exporting.trained_model import TrainedModel
from whet.model import attention
from whet.model.config import AdapterConfig, ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model, require_unquantized
from whet.model.load.tokenizer import stop_ids
from whet.model.lora.peft_adapters import add_adapter, unwrap_peft
from whet.model.loss.loss_model import LossModel
from whet.model.modules import KeepFloat64
from whet.model.packing_check import choose_packing

UNPACKED = {
    "bloom": "recurrent layers or custom attention",  # not through transformers' interface
    "mpt": "recurrent layers or custom attention",
    "stablelm": "its code fails on packed conversations",  # keyword arguments do not reach its attention
    "jetmoe": "its code fails on packed conversations",
    "llama4_text": "chunks of 8192 tokens",
    "bart": "different logits from each alone",  # takes no positions
}
"""`model_type` of models that cannot be trained on packed documents, and why."""


@pytest.mark.parametrize("kind", UNPACKED)
def test_a_model_that_cannot_be_packed_is_trained_unpacked_as_a_plain_loop_would(
    kind: str, make_documents: Any, pack: Any
) -> None:
    model, documents = tiny_model(kind), make_documents(11, 3, 17)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    with KeepFloat64():
        choose_packing(root, VOCABULARY, 17)
        assert UNPACKED[kind] in root.unpacked
        assert root.pads
        alone = loss_and_gradients(root, [root(pack([document])).objective for document in documents])
        padded = loss_and_gradients(root, [root(pack(documents)).objective])
        plain = loss_and_gradients(root, [own_loss(model, document) for document in documents])
    for ours in (alone, padded):
        assert ours[0] == pytest.approx(plain[0], rel=1e-12)
        assert (ours[1] - plain[1]).abs().max() <= 1e-11 * plain[1].abs().max()


@pytest.mark.parametrize(("kind", "setting"), [("doge", "keep_window_size"), ("deepseek_v32", "index_topk")])
def test_padding_does_not_decide_which_of_equal_tokens_are_attended_to(
    kind: str, setting: str, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse attention chooses four tokens here, and each document has several copies of every token."""
    monkeypatch.setitem(tiny_architectures._OWN_SETTINGS, kind, {setting: 4})
    model, documents = tiny_model(kind), [torch.randint(4, (length,)) for length in (70, 33, 69, 50)]
    for name, weight in model.named_parameters():
        if name.endswith(".A"):  # at zero, all tokens are equal for Doge, also those of the probe
            nn.init.normal_(weight)
    attention.install_backend(model, "sdpa")
    root = LossModel(model)
    with KeepFloat64():
        choose_packing(root, VOCABULARY, 70)
        ours = loss_and_gradients(root, [root(pack(documents)).objective])
        plain = loss_and_gradients(root, [own_loss(model, document) for document in documents])
    assert ours[0] == pytest.approx(plain[0], rel=1e-12)
    assert (ours[1] - plain[1]).abs().max() <= 1e-11 * plain[1].abs().max()


def own_loss(model: Any, document: Tensor) -> Tensor:
    logits = model(input_ids=document[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], document[1:], reduction="sum")


def loss_and_gradients(root: LossModel, losses: list[Tensor]) -> tuple[float, Tensor]:
    root.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in root.parameters() if p.grad is not None])


def test_a_model_that_sees_the_future_is_an_error() -> None:
    model = tiny_model("xlm")
    attention.install_backend(model, "sdpa")
    with pytest.raises(WhetError, match=r"model\.path: XLMWithLMHeadModel is not a causal model.*Use another model"):
        choose_packing(LossModel(model), VOCABULARY, 16)


def test_a_model_whose_head_is_more_than_a_linear_layer_is_an_error() -> None:
    model = tiny_model("bert")
    attention.install_backend(model, "sdpa")
    with pytest.raises(WhetError, match=r"model\.path.*BertLMHeadModel.*transforms its logits.*Use another model"):
        choose_packing(LossModel(model), VOCABULARY, 16)


@pytest.mark.parametrize(
    ("kind", "room"),
    [("gpt2", 64), ("opt", 64), ("gptj", 64), ("ctrl", 64), ("bert-generation", 64), ("mpt", 64), ("llama", None)],
)
def test_a_document_longer_than_a_table_of_positions_is_an_error(kind: str, room: int | None) -> None:
    model = tiny_model(kind)
    attention.install_backend(model, "sdpa")
    choose_packing(LossModel(model), VOCABULARY, room or 65)  # rotary embeddings have no table
    if room is not None:
        with pytest.raises(WhetError, match=rf"data\.max_length: .* 65 tokens, .* has positions for only {room}"):
            choose_packing(LossModel(model), VOCABULARY, room + 1)


@pytest.mark.parametrize("settings", [{"targets": ["wpe"]}, {"targets": ["c_attn"], "also_train": ["wpe"]}], ids=str)
def test_a_table_of_positions_that_is_trained_is_still_one(settings: dict[str, Any]) -> None:
    model = unwrap_peft(add_adapter(tiny_model("gpt2"), AdapterConfig(rank=2, **settings), seed=0))
    attention.install_backend(model, "sdpa")
    with pytest.raises(WhetError, match=r"data\.max_length: .* 65 tokens, .* has positions for only 64"):
        choose_packing(LossModel(model), VOCABULARY, 65)


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(WhetError, match=r"model\.path: .*a GGUF file.*Give the folder of the model"):
        load_model(ModelConfig(path=str(tmp_path / "model.gguf")), "auto")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin_folder("builtin:tiny"), tmp_path / "model"))


@pytest.mark.parametrize("size", [0, 5000])
def test_a_truncated_weights_file_is_an_error(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WhetError, match=r"model\.path: .*cannot be loaded"):
        load_model(ModelConfig(path=str(folder)), "auto")


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 3}], ids=["other shapes", "missing"])
def test_weights_that_do_not_fit_the_config_are_an_error(folder: Path, change: dict[str, int]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(WhetError, match=r"model\.path"):
        load_model(ModelConfig(path=str(folder)), "auto")


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, **changes: Tensor) -> None:
    weights = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


_LAYER = "model__layers__0__self_attn__q_proj__"
_LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"
DAMAGES: dict[str, tuple[Any, str]] = {
    "a weight of another shape": (
        lambda folder: edit_weights(folder, **{f"{_LAYER}weight": torch.ones(56, 64)}),
        r"layers\.0\.self_attn\.q_proj\.weight has the shape \[56, 64\] in the weight files, but \[64, 64\] according",
    ),
    "a bias that the config denies": (
        lambda folder: edit_weights(folder, **{f"{_LAYER}bias": torch.ones(64)}),
        r"some layers lack weights that the files contain \(model\.layers\.0\.self_attn\.q_proj\.bias\)",
    ),
    "a classifier": (
        lambda folder: edit_config(folder, architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification, which does not predict the next token",
    ),
    "an encoder-decoder": (
        lambda folder: edit_config(
            folder, architectures=["BartForConditionalGeneration"], model_type="bart", is_encoder_decoder=True
        ),
        r"an encoder-decoder model \(BartForConditionalGeneration\)",
    ),
    "a model of images": (
        lambda folder: edit_config(folder, architectures=["ViTModel"], model_type="vit"),
        r"no causal language model of the type vit \(ViTModel\)",
    ),
    "an adapter beside the model": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        r"an adapter next to its weights.*Remove adapter_config\.json",
    ),
    "GPTQ": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"its weights are quantized \(gptq\).*Use the model that they were quantized from",
    ),
    "MLX": (
        lambda folder: edit_config(folder, quantization_config={"group_size": 64, "bits": 4}),
        r"its weights are quantized \(no quant_method in config\.json, as of MLX\)",
    ),
    "a pointer of Git LFS": (
        lambda folder: (folder / "model.safetensors").write_text(_LFS),
        r"model\.safetensors: a pointer of Git LFS.*git lfs pull",
    ),
    "a web page": (
        lambda folder: (folder / "model.safetensors").rename(folder / "old") and (folder / "pytorch_model.bin")
        .write_text("<!DOCTYPE html><html>Not found"),
        r"pytorch_model\.bin: a web page.*Download the file again",
    ),
    "a config of no heads": (
        lambda folder: edit_config(folder, num_attention_heads=0), r"the config\.json of .*integer modulo by zero"
    ),
    "a config of two lines of error": (
        lambda folder: edit_config(folder, num_attention_heads="4"), "num_attention_heads.*expected int, got str"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_would_become_another_model_is_an_error(folder: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    (folder / "certificate.json").unlink(missing_ok=True)
    change(folder)
    with pytest.raises(WhetError, match=rf"model\.path: .*{message}"):
        load_model(ModelConfig(path=str(folder)), "auto")


def test_weights_that_the_model_has_no_place_for_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(folder, num_hidden_layers=1)
    load_model(ModelConfig(path=str(folder)), "auto")
    printed = capsys.readouterr().err
    assert "weights that are not part of LlamaForCausalLM according to config.json, and that are left out:" in printed
    assert printed.endswith(" and 6 more\n")


def test_a_stop_token_that_is_no_number_is_an_error(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(WhetError, match=r"eos_token_id in generation_config\.json is 'x'"):
        stop_ids(ModelConfig(path=str(folder)))


FP8_WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def fp8_folder(tmp_path: Path) -> Path:
    """One weight is in fp8: 2.0 with a scale of 0.25."""
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    scaled = {FP8_WEIGHT: torch.full((128, 128), 2.0).to(torch.float8_e4m3fn)}
    edit_weights(tmp_path, **scaled, **{f"{FP8_WEIGHT}_scale_inv": torch.full((1, 1), 0.25)})
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit_config(tmp_path, quantization_config=method)
    return tmp_path


@pytest.fixture
def fp8_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has kernels for fp8, transformers dequantizes on request only."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_weights_in_fp8_are_dequantized_and_written_without_their_scales(
    has_kernels: bool, fp8_folder: Path, request: pytest.FixtureRequest
) -> None:
    if has_kernels:
        request.getfixturevalue("fp8_kernels")
    model = load_model(ModelConfig(path=str(fp8_folder)), torch.float32, torch.device("cpu"))
    require_unquantized(model, "")
    weight = model.get_parameter(FP8_WEIGHT)
    assert torch.equal(weight, torch.full((128, 128), 0.5))
    assert list(to_checkpoint_tensors(model, FP8_WEIGHT, weight)) == [FP8_WEIGHT]


@pytest.mark.usefixtures("fp8_kernels")
def test_an_exported_adapter_is_verified_over_the_weights_that_it_was_trained_over(
    fp8_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = load_model(ModelConfig(path=str(fp8_folder)), torch.float32)
    model: Any = add_adapter(base, AdapterConfig(rank=2), seed=0)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    loaded = peft_adapter._load_back(folder, TrainedModel(model), trust_remote_code=False)
    name = FP8_WEIGHT.replace("weight", "base_layer.weight")
    assert torch.equal(loaded.get_parameter(name), model.get_base_model().get_parameter(name))


def test_weights_in_mxfp4_get_the_dtype_of_training(tmp_path: Path) -> None:
    """transformers leaves them in bf16, where updates are lost to rounding."""
    config = tiny_config("gpt_oss")
    config.hidden_size = config.intermediate_size = 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.full((experts, outputs, inputs // 32, 16), 0x22, dtype=torch.uint8)  # 1.0
        weights[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 126, dtype=torch.uint8)  # 2 ** -1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    model = load_model(ModelConfig(path=str(tmp_path)), torch.float32)
    weight = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(weight, torch.full_like(weight, 0.5, dtype=torch.float32))


def test_weights_that_stay_quantized_are_an_error() -> None:
    model = SimpleNamespace(hf_quantizer=SimpleNamespace(quantization_config=BitsAndBytesConfig(load_in_4bit=True)))
    with pytest.raises(WhetError, match=r"my-4bit: its weights are quantized \(bitsandbytes\)"):
        require_unquantized(model, "my-4bit")
