"""EleutherAI's lm-eval on a model folder or on a run's merged export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import directory
from whet.config import Config
from whet.core.config import load_config
from whet.core.console import silence_libraries
from whet.core.errors import WhetError
from whet.core.files import read_json
from whet.core.run_folder import parse_run_reference
from whet.model.config import ModelConfig
from whet.model.load.builtin_models import builtin_folder
from whet.model.load.tokenizer import load_tokenizer
from whet.run.export_run import ExportRequest, export_run


def run_lm_eval(reference: str, tasks: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The results of `tasks` (names with commas between them, or YAML files of tasks); eval.examples bounds them where
    it is given."""
    silence_libraries()
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise WhetError("--lm-eval needs a package that is not installed: pip install 'whet[lm-eval]'") from None
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    given = load_config(Config, None, ["model.path=x", "data.sources=[{path: x}]", *overrides]).eval
    files = [Path(name).expanduser() for name in names if name.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(file.resolve().parent) for file in files}) or None)
    wanted = [_task_name_in(name) if name.endswith((".yaml", ".yml")) else name for name in names]
    unknown = [name for name in wanted if name not in manager.all_tasks]
    if unknown:
        raise WhetError(f"--lm-eval: lm-eval knows no task '{unknown[0]}'; `lm-eval ls tasks` lists them")
    folder = _model_folder(reference)
    device = torch.accelerator.current_accelerator(check_available=True)
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": folder, "dtype": "auto"}, tasks=wanted, task_manager=manager,
        apply_chat_template=True, device=str(device or "cpu"), batch_size=8,
        limit=given.examples if any(each.startswith("eval.examples") for each in overrides) else None,
    )  # fmt: skip
    results = {name: _metric_values(each) for name, each in (found or {}).get("results", {}).items()}
    return {"model": reference, "folder": folder, "lm_eval": results}


def _task_name_in(file: str) -> str:
    from whet.core.yaml import read_yaml

    name = read_yaml(Path(file).expanduser()).plain().get("task")
    if not isinstance(name, str):
        raise WhetError(f"--lm-eval: {file}: there is no task: NAME in it")
    return name


def _model_folder(reference: str) -> str:
    """A plain model: of a run its merged export, which is made where it is not there yet."""
    if reference.startswith("builtin:"):
        return str(builtin_folder(reference))
    path, step = parse_run_reference(reference)
    if not (path / "config.yaml").exists():
        load_tokenizer(ModelConfig(path=reference))  # what is no model is told in whet's words
        return reference
    there = path / "exports" / "merged"
    if (
        step == "latest"
        and (there / "certificate.json").exists()
        and (said := read_json(there / "certificate.json")).get("verified")
        and said.get("step")
        == directory.resolve_step(path / "checkpoints", step)  # a run that went on since has another
    ):
        return str(there)
    return str(export_run(reference, ExportRequest())[0])


def _metric_values(result: dict[str, Any]) -> dict[str, float]:
    """lm-eval writes `acc,none`: the measure and how answers were filtered."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    }
