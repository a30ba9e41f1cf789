"""`whet check` on models, tokenizers, stores and batches with planted faults; without them each passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

STATEFUL: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {
        "head_dim": 16, "num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def make_model(architecture: str, folder: Path, **settings: Any) -> None:
    """A random model of another architecture in place of the tiny one, with the same tokenizer."""
    import torch
    import transformers

    shape = {
        "vocab_size": 416, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    config = getattr(transformers, f"{architecture}Config")(**{**shape, **settings})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # so that the tokenizer's files are those of other models


def test_another_model_with_the_same_tokenizer_files_has_a_store_of_its_own(
    check: Any, write: Any, tiny_model: Path
) -> None:
    """transformers cuts words by the kind of the model: Qwen2 makes other ids of the same tokenizer.json."""
    write()
    make_model("Mistral", tiny_model)
    check(f"model.path={tiny_model}").passed()
    make_model("Qwen2", tiny_model)
    check(f"model.path={tiny_model}").passed()


def test_the_auxiliary_loss_of_routers_is_announced(check: Any, write: Any, tiny_model: Path) -> None:
    write()
    make_model("Mixtral", tiny_model, num_local_experts=4, router_aux_loss_coef=0.02)
    own = check(f"model.path={tiny_model}").texts("router loss", "ok")
    assert own.endswith("whet does not add it to the loss. To balance the experts: train.router_aux_loss=0.02")
    change(tiny_model, output_router_logits=True)
    check(f"model.path={tiny_model}").warning("router loss", "output_router_logits turns that auxiliary loss on")
    added = check(f"model.path={tiny_model}", "train.router_aux_loss=0.01").texts("router loss", "ok")
    assert added.startswith("0.01 times the routers' auxiliary loss is added")


@pytest.mark.parametrize("architecture", STATEFUL)
def test_a_model_with_state_is_packed(check: Any, write: Any, tiny_model: Path, architecture: str) -> None:
    write()
    make_model(architecture, tiny_model, **STATEFUL[architecture])
    found = check(f"model.path={tiny_model}")
    found.passed()
    assert "starts anew with each" in found.texts("leak", "ok")


def test_random_numbers_in_training_are_announced(check: Any, write: Any, tiny_model: Path) -> None:
    write()
    make_model("SeedOss", tiny_model, head_dim=8)  # functional dropout of 0.1 by default
    check(f"model.path={tiny_model}").warning(
        "random", "draws random numbers", "train.micro_rows", "attention_dropout=0.1", "does not apply"
    )


def test_a_tokenizer_of_a_larger_model(check: Any, write: Any, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    write()
    check(f"model.tokenizer={tiny_model}").passed()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(100)])
    tokenizer.save_pretrained(tiny_model)
    found = check(f"model.tokenizer={tiny_model}")
    found.fault(
        "vocabulary", "the tokenizer knows 516 tokens and the model only 416", "builtin:tiny", "use the tokenizer"
    )


def test_a_tokenizer_of_a_smaller_model(check: Any, write: Any, tiny_model: Path) -> None:
    write()
    make_model("Qwen2", tiny_model, vocab_size=440)
    check(f"model.path={tiny_model}").passed()
    make_model("Qwen2", tiny_model, vocab_size=1000)
    check(f"model.path={tiny_model}").warning("vocabulary", "the tokenizer has 416 tokens, the model 1,000")


def test_conversations_beyond_the_positions_of_the_model(check: Any, write: Any, talk: Any, tiny_model: Path) -> None:
    write(talk(0, answer="word " * 80), good=range(1, 41))
    check(f"model.path={tiny_model}").passed()
    change(tiny_model, max_position_embeddings=100)
    found = check(f"model.path={tiny_model}")
    found.fault("positions", "tokens, the model supports 100", "data.max_length")
    check(f"model.path={tiny_model}", "data.max_length=100", "data.on_bad=skip").warning(
        "too long", "1 of 41 conversations"
    )


def test_packing_that_leaves_few_steps(check: Any, write: Any) -> None:
    write()
    check("train.batch={conversations: 1}").passed()
    found = check("train.batch={rows: 1}")
    found.warning("steps", "optimizer steps, each of 1 row", "; unpacked, with 1 conversations a step, it would be 40")
    check("train.batch={rows: 1}", "data.packing=none").passed()
    check("train.batch={rows: 1}", "train.steps=30").passed()
    check("train.batch={rows: 1}", "train.epochs=20").passed()


def test_packing_with_batches_in_tokens(check: Any, write: Any) -> None:
    write()
    found = check("train.batch={tokens: 1100}")
    found.warning("steps", "each of 2 rows of 512 tokens, together ", "with 2 conversations a step, it would be 20")


@pytest.mark.parametrize(("file", "check_name"), [("tokens.bin", "ids"), ("loss.bin", "mask")])
@pytest.mark.parametrize("use", ["train", "validation"])
def test_a_modified_store(check: Any, write: Any, tmp_path: Path, file: str, check_name: str, use: str) -> None:
    source = write()
    held = write(good=range(50, 60), name="held.jsonl")
    settings = (f"data.store={tmp_path / 'store'}", f"data.validation={{sources: [{{path: {held}}}]}}")
    check(*settings).passed()
    broken = tmp_path / "store" / use / file
    content = bytearray(broken.read_bytes())
    content[-2] ^= 1  # of the last conversation
    broken.write_bytes(content)
    place = f"{source}:40" if use == "train" else f"{held}:10"
    found = check(*settings)
    found.fault(
        "store", f"1 of {40 if use == 'train' else 10} conversations", place, f"Delete the folder {broken.parent}"
    )
    found.fault(check_name, f"1 of {40 if use == 'train' else 10} conversations", place)
    content[-2] ^= 1
    broken.write_bytes(content)
    check(*settings).passed()


def test_damage_outside_the_sample_that_is_rendered_again(check: Any, write: Any, tmp_path: Path) -> None:
    file = write(good=range(1000))
    setting = f"data.store={tmp_path / 'store'}"
    check(setting).passed()
    loss = tmp_path / "store/train/loss.bin"
    content = bytearray(loss.read_bytes())
    content[-2] ^= 1
    loss.write_bytes(content)
    found = check(setting)
    found.fault("store", "1 of 1,000 conversations", f"{file}:1000")
    assert "200 conversations" in found.texts("ids", "ok")


def test_a_truncated_store(check: Any, write: Any, tmp_path: Path) -> None:
    write()
    setting = f"data.store={tmp_path / 'store'}"
    check(setting).passed()
    tokens = tmp_path / "store/train/tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-20])
    check(setting).fault("data", str(tmp_path / "store/train"), "Delete the folder")


def test_weights_that_cannot_be_loaded(check: Any, write: Any, tiny_model: Path) -> None:
    write()
    check(f"model.path={tiny_model}").passed()
    weights = tiny_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    found = check(f"model.path={tiny_model}")
    found.fault("model", f"model.path: the model of {tiny_model} cannot be loaded")
    assert "40 of 40 conversations kept" in found.texts("kept", "ok")
    found.texts("ids", "ok")


def test_a_broken_tokenizer(check: Any, write: Any, tiny_model: Path) -> None:
    write()
    (tiny_model / "tokenizer.json").write_text('{"version": "1.0"}')
    found = check(f"model.path={tiny_model}")
    found.fault("model", "model.path", str(tiny_model), "tokenizer")
    assert len(found.checks) == 1  # reported once


@pytest.mark.parametrize("path", ["/no/such/model", "nobody/no-such-model", "builtin:huge"])
def test_a_model_that_does_not_exist(check: Any, write: Any, path: str) -> None:
    write()
    found = check(f"model.path={path}")
    found.fault("model", path)
    assert len(found.checks) == 1


def test_a_model_that_fails_in_its_forward_pass(check: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaModel

    def forward(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\nat line 7")

    write()
    check().passed()
    monkeypatch.setattr(LlamaModel, "forward", forward)
    found = check()
    found.fault("leak", "LlamaForCausalLM", "RuntimeError: mat1 and mat2 shapes cannot be multiplied)")
    found.texts("positions", "ok")


def test_ids_that_differ_from_transformers(check: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers is the reference if it disagrees with whet's rendering."""
    from whet.data.render.template_text import TemplateText

    file = write()
    check().passed()
    monkeypatch.setattr(TemplateText, "reference_ids", lambda *_: [1, 2, 3])
    found = check()
    found.fault(
        "ids", "40 of 40 conversations have ids that differ from those of transformers", f"first {file}:1", "Delete"
    )
    found.texts("store", "ok")


def test_an_adapter_of_attention_alone_in_a_mixture_of_experts(check: Any, write: Any, tmp_path: Path) -> None:
    from tiny_architectures import save_tiny_model

    write()
    found = check(save_tiny_model("gpt_oss", tmp_path / "gpt_oss"), "adapter.targets=[q_proj, k_proj, v_proj, o_proj]")
    found.warning("adapter", "reaches 14.2%", "Not reached: ", "GptOssExperts", "adapter.targets")
    [adapter] = [each for each in found.checks if each["check"] == "adapter"]
    modules = {each["module"]: each for each in adapter["modules"]}  # type: ignore[attr-defined, index]
    assert modules["GptOssExperts"]["reached"] == 0 < modules["GptOssExperts"]["parameters"]
    assert all("modules" not in each for each in found.checks if each["check"] != "adapter")
