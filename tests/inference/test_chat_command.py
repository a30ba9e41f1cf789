"""`whet chat` in a terminal and in scripts."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.pretrained import load_model
from whet.run.models.load_models import load_adapter_models, load_inference_model, load_model_pair

FEW = ("--max-new-tokens", 4)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of builtin:tiny, saved by peft, that change its answers."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for seed, name in enumerate(("loud", "shy")):
        base = load_model(ModelConfig(path="builtin:tiny"), torch.float32)
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
        torch.manual_seed(seed)
        for parameter_name, parameter in adapted.named_parameters():
            if "lora" in parameter_name:
                torch.nn.init.normal_(parameter)
        found[name] = tmp_path_factory.mktemp("adapters") / f"{name}-v1.0"
        adapted.save_pretrained(found[name])
    return found


def answer(whet: Any, *arguments: Any) -> Any:
    ended = whet("chat", *arguments, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_two_models_answer_in_one_object(whet: Any, tiny_run: Path) -> None:
    found = answer(whet, tiny_run, "--against", "builtin:tiny", "--prompt", "Hello", *FEW)
    assert found["prompt"] == "Hello"
    assert (found["model"], found["against"]["model"]) == (str(tiny_run), "builtin:tiny")
    alone = answer(whet, tiny_run, "--prompt", "Hello", *FEW)
    assert alone["answer"] == found["answer"] != found["against"]["answer"]
    assert alone["stopped"] in ("end", "length")
    shown = whet("chat", tiny_run, "--against", "builtin:tiny", "--prompt", "Hello", *FEW)
    assert shown.out == f"{tiny_run} › {found['answer']}\nbuiltin:tiny › {found['against']['answer']}\n"


def test_a_truncated_answer_is_reported(whet: Any) -> None:
    found = answer(whet, "builtin:tiny", "--prompt", "Hello", *FEW)
    assert (found["stopped"], found["tokens"]) == ("length", 4)
    ended = whet("chat", "builtin:tiny", "--prompt", "Hello", *FEW)
    assert ended.out == found["answer"] + "\n"
    assert "truncated after 4 tokens" in ended.err


def test_prompts_of_a_file_get_the_answers_of_single_prompts(whet: Any, tmp_path: Path, tiny_run: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\nWhat is going on here today?\n")
    found = answer(whet, tiny_run, "--prompts", file, "--system", "Be brief.", *FEW)["answers"]
    for each in found:
        alone = answer(whet, tiny_run, "--prompt", each["prompt"], "--system", "Be brief.", *FEW)
        assert each == alone
    shown = whet("chat", tiny_run, "--prompts", file, "--system", "Be brief.", *FEW).out
    assert shown.startswith(f"you › Hello\nmodel › {found[0]['answer']}\nyou › What is")


def test_unconditional_text_with_probabilities(whet: Any) -> None:
    found = answer(whet, "builtin:tiny", "--unconditional", "--explain", "--temperature", 2, "--top-p", 0.9, *FEW)
    assert found["prompt"] is None
    assert len(found["explain"]) == found["tokens"] == 4
    for token in found["explain"]:
        assert 0 < token["probability"] <= token["likeliest"][0]["probability"] <= 1
        assert len(token["likeliest"]) == 5
    assert found == answer(
        whet, "builtin:tiny", "--unconditional", "--explain", "--temperature", 2, "--top-p", 0.9, *FEW
    )


def test_an_adapter_folder_shares_the_weights_of_its_base(whet: Any, adapters: dict[str, Path]) -> None:
    plain, tuned = (answer(whet, model, "-p", "Hello", *FEW) for model in ("builtin:tiny", adapters["loud"]))
    assert plain["answer"] != tuned["answer"]
    both = answer(whet, adapters["loud"], "--against", "builtin:tiny", "-p", "Hello", *FEW)
    assert (both["answer"], both["against"]["answer"]) == (tuned["answer"], plain["answer"])
    first, second = load_model_pair(str(adapters["loud"]), "builtin:tiny")
    assert first.model is second.model


def test_a_run_with_an_adapter_shares_the_weights_of_its_base(whet: Any, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = whet(
        "train", recipe, f"run.dir={folder}", "adapter.rank=4", "train.steps=3", "train.epochs=null", "eval.tasks=[]",
        "train.optimizer.lr=0.05", "--quiet",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    first, second = load_model_pair(str(folder), "builtin:tiny")
    assert first.model is second.model
    both = answer(whet, folder, "--against", "builtin:tiny", "-p", "Hello", *FEW)
    assert both["against"]["answer"] == answer(whet, "builtin:tiny", "-p", "Hello", *FEW)["answer"]
    assert both["answer"] == answer(whet, folder, "-p", "Hello", *FEW)["answer"]
    assert both["answer"] != both["against"]["answer"]


def test_several_adapters_are_chosen_by_name(whet: Any, adapters: dict[str, Path]) -> None:
    given = [part for name, folder in adapters.items() for part in ("--adapter", f"{name}={folder}")]
    assert answer(whet, "builtin:tiny", *given, "-p", "Hello", *FEW)["model"] == "loud"
    by_name = load_adapter_models("builtin:tiny", adapters)
    assert list(by_name) == ["none", "loud", "shy"]
    tokens = torch.tensor([[5, 6, 7]])
    logits = []
    for name in ("loud", "shy", "none", "loud"):
        with by_name[name].context(), torch.no_grad():
            logits.append(by_name[name].model(input_ids=tokens).logits)
    assert torch.equal(logits[0], logits[3])
    assert not torch.equal(logits[0], logits[1])
    plain: Any = load_inference_model("builtin:tiny").model
    with torch.no_grad():
        assert torch.equal(logits[2], plain(input_ids=tokens).logits)


def test_a_wrong_or_missing_base_is_an_error(whet: Any, adapters: dict[str, Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = tmp_path / "other"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ).save_pretrained(other)
    load_inference_model("builtin:tiny").renderer.tokenizer.save_pretrained(other)
    ended = whet("chat", other, "--adapter", f"loud={adapters['loud']}", "-p", "Hi")
    assert ended.code == 1
    assert f"{adapters['loud']}: this adapter does not fit {other}" in " ".join(ended.err.split("\n"))
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/away"}))
    ended = whet("chat", lost, "-p", "Hi")
    assert ended.code == 1
    assert "its base model /gone/away (adapter_config.json) does not exist here. Give the model" in ended.err
    for given, words in (("loud", "NAME=DIR"), ("none=x", "invalid name"), (f"a={tmp_path}", "not an adapter folder")):
        assert words in whet("chat", "builtin:tiny", "--adapter", given, "-p", "Hi").err


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_error(whet: Any, adapters: dict[str, Path]) -> None:
    tokenizer = load_inference_model("builtin:tiny").renderer.tokenizer
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(adapters["shy"])
    try:
        ended = whet("chat", adapters["shy"], "-p", "Hi")
    finally:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (adapters["shy"] / name).unlink()
    assert ended.code == 1
    assert "the tokenizer has 417 tokens and the model only 416" in " ".join(ended.err.split())


def test_a_mistyped_path_is_not_a_hub_id(whet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    ended = whet("chat", "runs/demmo", "-p", "Hi")
    assert ended.code == 1
    assert "runs/demmo: no such folder" in ended.err
    assert "Did you mean runs/demo?" in " ".join(ended.err.split())


def test_invalid_prompts_and_options(whet: Any, tmp_path: Path, tiny_run: Path) -> None:
    for arguments, words in (
        (("builtin:tiny", "-p", "word " * 4000), "the model's context is 4,096"),
        (("builtin:tiny", "-p", "Hi", "--unconditional"), "--prompt and --unconditional are alternatives"),
        (("builtin:tiny", "-p", "Hi", "--top-p", "0"), "top_p: 0.0 is out of range"),
        (("builtin:tiny", "--prompts", tmp_path / "none.txt"), "cannot be read"),
        (("builtin:tiny", "-p", "caf\udce9"), "the user message contains a lone surrogate"),
        (("builtin:tiny", "-p", "Hi", "--system", "caf\udce9"), "the system message contains a lone surrogate"),
        (("builtin:tiny", "-p", "Hi", "--stop", "\udce9"), "stop: '\\udce9' contains NUL or a character that is not"),
        ((tiny_run, "-p", "Hi", "--load", "4bit"), "Export the run first"),
        (("builtin:tiny", "-p", "Hi", "--calculator"), "chat template"),
    ):
        ended = whet("chat", *arguments)
        assert ended.code == 1
        assert words in " ".join(ended.err.split())


def test_large_models_are_loaded_in_4_bits_or_spread(whet: Any) -> None:
    pytest.importorskip("bitsandbytes")
    folder = builtin_folder("builtin:tiny")
    for load in ("4bit", "spread"):
        found = answer(whet, folder, "-p", "Hello", "--load", load, *FEW)
        assert found["tokens"] == 4
    assert any("4bit" in type(module).__name__ for module in load_inference_model(str(folder), "4bit").model.modules())


class Terminal:
    """A real terminal with `whet chat` in it."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "whet", "chat", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, close_fds=True
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Read until `text` appears after the text of the last call."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._master, 65536).decode(errors="replace")
                except OSError:
                    break
        assert text in self.shown, self.shown
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def leave(self, seconds: float = 60) -> int | None:
        """Press Ctrl-D until the process exits: one typed while the terminal changes its mode is lost."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.type("\x04")
            time.sleep(0.5)
        return self.process.poll()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


def test_a_conversation_in_a_real_terminal(tmp_path: Path) -> None:
    """Ctrl-C stops a reply, not the session; Ctrl-D quits."""
    terminal = Terminal("builtin:tiny", "--max-new-tokens", "3000")
    try:
        terminal.wait_for("you ›")
        terminal.type("Hello\n")
        terminal.wait_for("model ›")
        time.sleep(1)
        os.killpg(terminal.process.pid, signal.SIGINT)  # what a terminal does for Ctrl-C
        terminal.wait_for("(stopped)")
        terminal.wait_for("you ›")
        terminal.type(f"/save {tmp_path / 'saved.jsonl'}\n")
        terminal.wait_for("(appended to")
        terminal.wait_for("you ›")
        terminal.type("/reset\n")
        terminal.wait_for("(new conversation)")
        terminal.wait_for("you ›")
        assert terminal.leave() == 0
    finally:
        terminal.close()
    saved = json.loads((tmp_path / "saved.jsonl").read_text())
    assert saved["messages"][0] == {"role": "user", "content": "Hello"}
    assert saved["messages"][1]["content"]
