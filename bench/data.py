"""How fast data is prepared, beside the tokenizer alone and beside TRL, on the same file and the same cores.

    python bench/data.py [FILE.jsonl] [MODEL] [--no-trl]     default: 8 000 generated sums, builtin:smollm2

- encode: the tokenizers library's `encode_batch` on the texts as the model sees them: what any tool needs at least
- whet:   `prepare`: reading, parsing, rendering, masks, hashes, ledger and store included, into an empty cache
- trl:    what SFTTrainer does with the same conversations before training, on as many processes

They are run in turns, three times, each in a process of its own with the tokenizer loaded before the clock starts, and
the best time of each counts. The last line is a JSON object with the ratios, the peak of memory (of all processes
together, shared pages counted once), and what `bench/plan.py` found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.config import Config
from whet.core.config import validate_config
from whet.core.console import set_quiet
from whet.core.yaml import parse_yaml
from whet.data.config import Source
from whet.data.conversation import Conversation
from whet.data.prepare.build import prepare_store
from whet.data.read.sources import read_source
from whet.run.data import make_conversation_tokenizer

RECIPE = """
model: {path: "%s"}
data: {sources: [{path: "%s"}], max_length: 4096}
"""
TIMES = 3
CORES = len(os.sched_getaffinity(0))


def memory_mib() -> float:
    """Of this process and its children, shared pages counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = int(process.name) == os.getpid() or f"PPid:\t{os.getpid()}\n" in (process / "status").read_text()
            rollup = (process / "smaps_rollup").read_text() if mine else ""
        except (OSError, PermissionError):
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 1024


class Peak:
    """The most memory while something runs."""

    def __enter__(self) -> Peak:
        self.mib, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            self.mib = max(self.mib, memory_mib())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def config_for(model: str, file: Path) -> Config:
    return validate_config(Config, parse_yaml(RECIPE % (model, file), "bench"))


def prepare_fresh(config: Config, conversation_tokenizer: Any, scratch: Path) -> tuple[float, int]:
    """(seconds, tokens) of a preparation into an empty folder; the tokenizer is loaded before, as for the others."""
    with tempfile.TemporaryDirectory(dir=scratch) as store:
        data = config.data.model_copy(update={"store": store})
        seconds, made = timed(lambda: prepare_store(data, data.sources, "train", conversation_tokenizer))
        return seconds, int(made.store.lengths.sum())


def trl_dataset(conversations: list[Conversation]) -> Any:
    from datasets import Dataset, disable_caching, disable_progress_bars

    disable_caching()
    disable_progress_bars()
    rows = []
    for conversation in conversations:
        turns = [{"role": message.role, "content": message.content} for message in conversation.messages]
        rows.append({"prompt": turns[:-1], "completion": turns[-1:]})
    return Dataset.from_list(rows)


def trl_prepare(dataset: Any, model: Any, tokenizer: Any, scratch: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(scratch / "trl"), max_length=4096, dataset_num_proc=CORES, report_to=[], use_cpu=True
    )
    SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    set_quiet()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if words[:1] and words[0] in ONE:
            print(json.dumps(ONE[words[0]](config_for(words[2], Path(words[1])), scratch)))  # noqa: T201
            return
        model = words[1] if len(words) > 1 else "builtin:smollm2"
        file = Path(words[0]).resolve() if words else _generated(scratch / "sums.jsonl")
        print(json.dumps(compare(file, model, "--no-trl" not in sys.argv)))  # noqa: T201


def encode_alone(config: Config, scratch: Path) -> dict[str, float]:
    conversation_tokenizer, items = make_conversation_tokenizer(config), _items(config)
    renderer, backend = (
        conversation_tokenizer.make_renderer(cached=True),
        conversation_tokenizer.tokenizer.backend_tokenizer,
    )
    texts = [renderer.layout(item).text for item in items]  # type: ignore[union-attr]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return {"seconds": timed(lambda: backend.encode_batch(texts, add_special_tokens=False))[0]}


def whet_alone(config: Config, scratch: Path) -> dict[str, float]:
    conversation_tokenizer = make_conversation_tokenizer(config)
    assert conversation_tokenizer.tokenizer
    seconds, tokens = prepare_fresh(config, conversation_tokenizer, scratch)
    return {"seconds": seconds, "tokens": tokens}


def memory_alone(config: Config, scratch: Path) -> dict[str, float]:
    """Watched, which takes time, so that it is not timed."""
    conversation_tokenizer = make_conversation_tokenizer(config)
    with Peak() as used:
        prepare_fresh(config, conversation_tokenizer, scratch)
    return {"mib": used.mib}


def trl_alone(config: Config, scratch: Path) -> dict[str, float]:
    tokenizer, dataset = make_conversation_tokenizer(config).tokenizer, trl_dataset(_items(config))
    return {"seconds": timed(lambda: trl_prepare(dataset, _tiny(), tokenizer, scratch))[0]}


ONE = {"encode": encode_alone, "whet": whet_alone, "trl": trl_alone, "memory": memory_alone}


def _items(config: Config) -> list[Conversation]:
    return [item for item in read_source(config.data.sources[0]) if isinstance(item, Conversation)]


def _generated(file: Path) -> Path:
    items = read_source(Source(path="builtin:arithmetic", max_samples=8000))
    with file.open("w") as out:
        for item in items:
            assert isinstance(item, Conversation)
            out.write(json.dumps({"messages": [message.as_dict() for message in item.messages]}) + "\n")
    return file


def _alone(name: str, file: Path, model: str) -> dict[str, float]:
    command = [sys.executable, __file__, name, str(file), model]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(found.splitlines()[-1])
    return result


def compare(file: Path, model: str, with_trl: bool) -> dict[str, Any]:
    names = ["encode", "whet", "trl"] if with_trl else ["encode", "whet"]
    best: dict[str, float] = {}
    tokens = 0.0
    for _ in range(TIMES):
        for name in names:
            found = _alone(name, file, model)
            best[name] = min(found["seconds"], best.get(name, found["seconds"]))
            tokens = found.get("tokens", tokens)
            print(name, round(found["seconds"], 2), flush=True)  # noqa: T201
    result: dict[str, Any] = {
        "file": file.name, "conversations": len(_items(config_for(model, file))), "tokens": tokens, "cores": CORES,
        "seconds": {name: round(found, 3) for name, found in best.items()},
        "whet_tokens_per_s": round(tokens / best["whet"]),
        "whet_over_encode": round(best["encode"] / best["whet"], 3),
        "peak_mib": round(_alone("memory", file, model)["mib"]),
    }  # fmt: skip
    if with_trl:
        result["whet_over_trl"] = round(best["trl"] / best["whet"], 2)
    plans = subprocess.run([sys.executable, Path(__file__).with_name("plan.py")], capture_output=True, text=True)
    result["plans"] = json.loads(plans.stdout.splitlines()[-1])["plans"]
    return result


def _tiny() -> Any:
    """TRL prepares data inside its trainer, which wants a model: the smallest there is."""
    from whet.model.load.builtin_models import builtin_folder

    return str(builtin_folder("builtin:tiny"))


if __name__ == "__main__":
    main()
