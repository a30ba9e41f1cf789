"""`whet export`: transformers, `whet chat EXPORT` and `whet chat RUN` give the same answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

PROMPTS = ["Please send two red mugs to Anna in Riga by Mon.", "Hello"]


def answer_of_transformers(folder: Path, prompt: str) -> str:
    """As the documentation of transformers shows, without whet."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["tiny_run", "lora_run"])
def test_export_run_and_transformers_give_the_same_answer(kind: str, whet: Any, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(kind)
    folder = run / "exports" / "merged"
    assert json.loads((folder / "certificate.json").read_text())["verified"] is True
    for prompt in PROMPTS:
        answers = [
            json.loads(whet("chat", model, "--prompt", prompt, "--max-new-tokens", 24, "--json").out)["answer"]
            for model in (folder, run, f"{run}@latest")
        ]
        assert answers == [answer_of_transformers(folder, prompt)] * 3
        assert answers[0]


def test_an_adapter_export_loads_in_peft_with_the_logits_of_the_merged_one(
    whet: Any, lora_run: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    from whet.model.lora.adapter_folder import is_trained_on

    run = shutil.copytree(lora_run, tmp_path / "run")
    ended = whet("export", run, "--to", "adapter", "--json")
    assert ended.code == 0, ended.err
    folder = Path(json.loads(ended.out)["export"])
    assert json.loads(ended.out)["certificate"]["verified"] is True
    assert is_trained_on(folder, "builtin:tiny") is True
    assert is_trained_on(folder, str(run / "exports" / "merged")) is False
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        adapted = AutoPeftModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "exports" / "merged")(input_ids=ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)


def test_a_whole_model_has_no_adapter_to_export(whet: Any, tiny_run: Path) -> None:
    ended = whet("export", tiny_run, "--to", "adapter")
    assert ended.code == 1
    assert "--to merged" in ended.err
    assert not (tiny_run / "exports" / "adapter").exists()


def test_a_failed_verification_exits_with_3_and_the_run_can_be_resumed(
    whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weight * 0.5 if "embed" in name else weight for name, weight in tensors.items()}

    folder = tmp_path / "run"
    arguments = ["train", recipe, f"run.dir={folder}", "train.steps=2", "adapter.rank=2", "export.at_end=merged"]
    with monkeypatch.context() as patch:
        patch.setattr("whet.exporting.hf_folder.join_checkpoint_tensors", tampered)
        ended = whet(*arguments)
    assert ended.code == 3
    assert "does not match the trained one" in " ".join(ended.err.split())
    assert list((folder / "exports").iterdir()) == []
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 3
    assert whet(*arguments, "--resume").code == 0
    assert (folder / "exports" / "merged" / "certificate.json").exists()


def test_training_continues_from_an_export(whet: Any, recipe: str, lora_run: Path, tmp_path: Path) -> None:
    export = lora_run / "exports" / "merged"
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=1", f"model.path={export}")
    assert ended.code == 0, ended.err
    first, *_ = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    *_, last = (json.loads(line) for line in (lora_run / "metrics.jsonl").read_text().splitlines())
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-4)


def exported(whet: Any, run: Path, *options: Any) -> tuple[Path, dict[str, Any]]:
    ended = whet("export", run, *options, "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    return Path(result["export"]), result["certificate"]


def test_an_f32_export_has_the_same_predictions(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    folder, certificate = exported(whet, lora_run, "--to", "hf", "--dtype", "f32", "--out", tmp_path / "out")
    assert folder == tmp_path / "out"
    assert certificate["kind"] == "merged"
    assert certificate["same_next_token"] == 1
    assert certificate["same_ids"] is certificate["stops"] is True
    assert certificate["kl"] < 1e-6


@pytest.mark.parametrize("kind", ["tiny_run", "lora_run"])
def test_a_gguf_file_holds_the_weights_of_the_merged_folder(
    kind: str, whet: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("gguf")
    run: Path = request.getfixturevalue(kind)
    folder, certificate = exported(whet, run, "--to", "gguf", "--dtype", "f32", "--out", tmp_path / "gguf")
    (name,) = certificate["files"]
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(run / "exports" / "merged").float()
    torch.testing.assert_close(dict(read.named_parameters()), dict(merged.named_parameters()), rtol=0, atol=0)


def test_the_dtype_is_in_the_folder_name_and_in_the_certificate(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    run = shutil.copytree(lora_run, tmp_path / "run")
    folder, certificate = exported(whet, run, "--to", "gguf", "--dtype", "q8_0")
    assert (folder, certificate["dtype"]) == (run / "exports/gguf-q8_0", "q8_0")
    folder, certificate = exported(whet, run, "--to", "megatron", "--tensor-parallel", 2)
    weights = [name for name in certificate["files"] if name.endswith(".pt")]
    assert (folder, len(weights)) == (run / "exports/megatron", 2)
    ended = whet("export", run, "--to", "merged", "--dtype", "q8_0")
    assert ended.code == 1
    assert (
        "--dtype: q8_0 does not exist for --to merged (--to gguf has it). Use one of f64, f32, bf16, f16" in ended.err
    )


def test_a_bf16_run_exports_bf16(whet: Any, recipe: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = tmp_path / "run"
    ended = whet("train", recipe, f"run.dir={run}", "train.steps=1", "train.precision=bf16", "export.at_end=merged")
    assert ended.code == 0, ended.err
    weights = load_file(run / "exports/merged/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((run / "exports/merged/certificate.json").read_text())["dtype"] == "bf16"
    folder, certificate = exported(whet, run, "--dtype", "f32")
    assert (folder.name, certificate["max_logit_difference"]) == ("merged-f32", 0)


def test_a_run_can_end_in_a_gguf_file(whet: Any, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    arguments = ["train", recipe, f"run.dir={tmp_path / 'mine'}", "train.steps=1", "eval.at_start=false"]
    ended = whet(*arguments, "export.at_end=gguf")
    assert ended.code == 0, ended.err
    assert [path.name for path in (tmp_path / "mine/exports").iterdir()] == ["gguf"]
    assert len(list((tmp_path / "mine/exports/gguf").glob("mine-*.gguf"))) == 1


def test_check_finds_a_changed_template(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(lora_run / "exports" / "merged", tmp_path / "mine")
    ended = whet("export", lora_run, "--check", folder, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["certificate"]["verified"] is True
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_end|> "))
    ended = whet("export", lora_run, "--check", folder)
    assert ended.code == 1
    assert "its chat template is not the one used in training" in " ".join(ended.err.split())
    assert json.loads((folder / "certificate.json").read_text())["verified"] is False
    (folder / "certificate.json").unlink()
    assert "no such file" in whet("export", lora_run, "--check", folder).err


@pytest.mark.parametrize("is_export", [False, True])
def test_files_of_others_are_not_replaced(whet: Any, lora_run: Path, tmp_path: Path, is_export: bool) -> None:
    folder = tmp_path / "out"
    if is_export:  # an earlier one, into which somebody has put a file since
        shutil.copytree(lora_run / "exports" / "merged", folder)
    folder.mkdir(exist_ok=True)
    (folder / "letter.txt").write_text("dear")
    ended = whet("export", lora_run, "--out", folder)
    assert ended.code == 1
    assert "would replace files that do not belong to an export (letter.txt)" in ended.err
    assert (folder / "letter.txt").read_text() == "dear"
    if is_export:
        (folder / "letter.txt").unlink()
        exported(whet, lora_run, "--out", folder)


def test_a_link_that_leads_nowhere_is_not_replaced(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "gone")
    ended = whet("export", lora_run, "--out", link)
    assert (ended.code, "would replace files that do not belong to an export (out)" in ended.err) == (1, True)
    assert link.is_symlink()


def test_a_folder_whose_name_is_not_utf_8_is_refused(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    ended = whet("export", lora_run, "--out", tmp_path / "\udcff")
    assert (ended.code, "the name is not valid UTF-8. Give another folder: --out FOLDER" in ended.err) == (1, True)
    assert not list(tmp_path.iterdir())


def test_a_missing_checkpoint_is_refused(whet: Any, lora_run: Path) -> None:
    ended = whet("export", f"{lora_run}@77", "--to", "gguf")
    assert ended.code == 1
    assert "no such checkpoint. Use one of" in ended.err


def test_an_earlier_state_than_the_end_of_the_run_is_named(whet: Any, tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step-000012")
    ended = whet("export", run, "--out", tmp_path / "export")
    assert ended.code == 0, ended.err
    assert "the run finished with step 12, but its newest checkpoint is of step 8" in " ".join(ended.err.split())


def test_an_adapter_on_a_changed_base_is_refused(whet: Any, recipe: str, tmp_path: Path) -> None:
    from whet.model.load.weight_files import locate_model

    base, run = shutil.copytree(locate_model("builtin:tiny"), tmp_path / "base"), tmp_path / "run"
    options = ["train.steps=1", "adapter.rank=2", f"model.path={base}", "eval.at_start=false", "export.at_end=none"]
    assert whet("train", recipe, f"run.dir={run}", *options).code == 0
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    ended = whet("export", run, "--to", "adapter")
    assert ended.code == 1
    assert "not those that this run's adapter was trained on" in " ".join(ended.err.split())


_WITHOUT_WHET = """
import sys
sys.modules["whet"] = None  # importing it fails
sys.path += {paths!r}
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
outputs = []
for model in (AutoModelForCausalLM.from_pretrained({merged!r}), AutoPeftModelForCausalLM.from_pretrained({adapter!r})):
    tokenizer = AutoTokenizer.from_pretrained({adapter!r})
    ids = tokenizer.apply_chat_template(
        [{{"role": "user", "content": "Hello"}}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    outputs.append(model.generate(**ids, max_new_tokens=12, do_sample=False)[0].tolist())
assert outputs[0] == outputs[1], outputs
print(len(outputs[0]))
"""


def test_exports_load_without_whet(whet: Any, lora_run: Path, tmp_path: Path) -> None:
    import subprocess
    import sys
    import sysconfig

    adapter, _ = exported(whet, lora_run, "--to", "adapter", "--out", tmp_path / "adapter")
    paths = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    text = _WITHOUT_WHET.format(paths=paths, merged=str(lora_run / "exports/merged"), adapter=str(adapter))
    # -S ignores .pth files of editable installs, -E ignores PYTHONPATH
    done = subprocess.run([sys.executable, "-S", "-E", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4


def test_a_changed_template_is_refused(whet: Any, recipe: str, tmp_path: Path) -> None:
    """Otherwise it would be exported and certified as the trained one."""
    template, run = tmp_path / "own.jinja", tmp_path / "run"
    own = (
        "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    )
    template.write_text(own)
    ended = whet(
        "train", recipe, f"run.dir={run}", f"data.template={template}", "train.steps=2", "export.at_end=merged"
    )
    assert ended.code == 0, ended.err
    template.write_text(own.replace("<|im_start|>{{", "<|im_start|>The {{"))
    for command in (
        ("export", run, "--to", "merged"), ("export", run, "--check", run / "exports/merged"),
        ("chat", run, "--prompt", "Hi"), ("eval", run, "--tasks", "orders"),
    ):  # fmt: skip
        ended = whet(*command)
        assert ended.code == 1
        assert "own.jinja has changed since" in " ".join(ended.err.split())
    template.write_text(own)
    assert whet("export", run, "--check", run / "exports/merged").code == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"eos_token_id": [2, 40]}, "stops at 'F', which does not end an answer"),
        ({"suppress_tokens": [10, 11]}, "suppress_tokens = [10, 11]"),
        (None, "model.safetensors changed since the export"),
    ],
)
def test_check_finds_changes_that_logits_do_not_show(
    settings: dict[str, Any] | None, reason: str, whet: Any, tiny_run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_run / "exports" / "merged", tmp_path / "merged")
    if settings is None:
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] += 1e-6
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    for _ in range(2):
        ended = whet("export", tiny_run, "--check", folder)
        assert ended.code == 1
        assert reason in " ".join(ended.err.split())
