"""An export needs memory for one model, not for two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_EXPORT = """
import resource, sys
from whet.recipe.use import export_run
export_run(sys.argv[1], "merged")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_of_export(run: Path) -> int:
    done = subprocess.run([sys.executable, "-c", _EXPORT, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["adapter.rank=2"]], ids=["full", "adapter"])
def test_the_whole_model_is_in_memory_once(
    options: list[str], whet: Any, recipe: str, tmp_path: Path, tiny_run: Path
) -> None:
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    from whet.model.tokenizer import locate

    base = tmp_path / "base"
    shutil.copytree(locate("builtin:tiny"), base)
    shape = AutoConfig.from_pretrained(base)
    shape.update({
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128,
    })  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(base)
    del model
    assert size > 4e8
    run = tmp_path / "run"
    ended = whet(
        "train", recipe, f"model.path={base}", f"run.dir={run}", "train.steps=1", "train.batch={conversations: 1}",
        "eval.at_start=false", "export.at_end=none", "train.precision=fp32", *options,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    nothing = peak_of_export(tiny_run)
    assert peak_of_export(run) - nothing < 1.5 * size
    certificate = json.loads((run / "exports/merged/certificate.json").read_text())
    assert certificate["verified"]
