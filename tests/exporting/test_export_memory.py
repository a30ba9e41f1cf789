"""An export needs memory for one shard, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARD = 120_000_000
# Memory-mapped files can be evicted at any time, so anonymous memory is what counts.
_EXPORT = """
import sys, threading, time
from pathlib import Path
from whet.run.export_run import ExportRequest, export_run

peak = 0
def watch():
    global peak
    while True:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024)
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
export_run(sys.argv[1], ExportRequest(sys.argv[2], "f32", Path(sys.argv[3]), shard_size=int(sys.argv[4])))
print(peak)
"""


def peak_bytes_of_export(run: Path, kind: str, out: Path, shard: int) -> int:
    command = [sys.executable, "-c", _EXPORT, str(run), kind, str(out), str(shard)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["adapter.rank=2"]], ids=["full", "adapter"])
def test_one_shard_is_in_memory_at_a_time(
    options: list[str], whet: Any, recipe: str, tmp_path: Path, tiny_run: Path
) -> None:
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    from whet.model.load.weight_files import locate_model

    base = tmp_path / "base"
    shutil.copytree(locate_model("builtin:tiny"), base)
    shape = AutoConfig.from_pretrained(base)
    shape.update({
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128,
    })  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(base)
    del model
    assert size > 4 * SHARD
    run = tmp_path / "run"
    ended = whet(
        "train", recipe, f"model.path={base}", f"run.dir={run}", "train.steps=1", "train.batch={conversations: 1}",
        "eval.at_start=false", "export.at_end=none", "train.precision=fp32", *options,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    overhead = peak_bytes_of_export(tiny_run, "merged", tmp_path / "tiny", 10**9)
    needed = peak_bytes_of_export(run, "merged", tmp_path / "merged", SHARD) - overhead
    certificate = json.loads((tmp_path / "merged/certificate.json").read_text())
    assert certificate["verified"]
    files = [
        (tmp_path / "merged" / name).stat().st_size for name in certificate["files"] if name.endswith(".safetensors")
    ]
    assert len(files) > 4
    assert needed < 1.3 * max(files)
