"""What ships is what was trained: transformers, `whet chat EXPORT` and `whet chat RUN` give the same answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPTS = ["Please send two red mugs to Anna in Riga by Mon.", "Hello"]


def answer_of_transformers(folder: Path, prompt: str) -> str:
    """As the documentation of transformers says it is done, without whet."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["tiny_run", "lora_run"])
def test_the_export_the_run_and_transformers_answer_alike(kind: str, whet: Any, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(kind)
    folder = run / "exports" / "merged"
    assert json.loads((folder / "certificate.json").read_text())["verified"] is True
    for prompt in PROMPTS:
        said = [
            json.loads(whet("chat", model, "--prompt", prompt, "--max-new-tokens", 24, "--json").out)["answer"]
            for model in (folder, run, f"{run}@latest")
        ]
        assert said == [answer_of_transformers(folder, prompt)] * 3
        assert said[0]


def test_an_adapter_export_is_loaded_by_peft_and_answers_like_the_run(
    whet: Any, lora_run: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    run = shutil.copytree(lora_run, tmp_path / "run")
    ended = whet("export", run, "--to", "adapter", "--json")
    assert ended.code == 0, ended.err
    folder = Path(json.loads(ended.out)["export"])
    assert json.loads(ended.out)["certificate"]["verified"] is True
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


def test_a_tampered_merge_ends_the_run_with_3_and_can_be_mended(
    whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(model: Any) -> Any:
        merged = model.merge_and_unload()
        merged.model.embed_tokens.weight.data[:, ::2] = 0
        return merged

    folder = tmp_path / "run"
    arguments = ["train", recipe, f"run.dir={folder}", "train.steps=2", "adapter.rank=2"]
    with monkeypatch.context() as patch:
        patch.setattr("whet.checkpoint.export.merge", tampered)
        ended = whet(*arguments)
    assert ended.code == 3
    assert "is not the trained one" in ended.err
    assert list((folder / "exports").iterdir()) == []
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 3
    assert whet(*arguments, "--resume").code == 0
    assert (folder / "exports" / "merged" / "certificate.json").exists()


def test_a_model_trained_further_starts_from_the_run(whet: Any, recipe: str, lora_run: Path, tmp_path: Path) -> None:
    export = lora_run / "exports" / "merged"
    ended = whet("train", recipe, f"run.dir={tmp_path / 'run'}", "train.steps=1", f"model.path={export}")
    assert ended.code == 0, ended.err
    first, *_ = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    *_, last = (json.loads(line) for line in (lora_run / "metrics.jsonl").read_text().splitlines())
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-4)
