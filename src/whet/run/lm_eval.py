"""`whet eval --lm-eval`: EleutherAI's lm-eval on a model folder, or on a run's merged export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from whet.checkpoint import directory
from whet.config import Config
from whet.core.checksums import read_hashed_json
from whet.core.config import load_config
from whet.core.console import silence_libraries
from whet.core.errors import WhetError
from whet.core.files import resolve_path, user_path
from whet.core.yaml import read_yaml
from whet.model.config import ModelConfig
from whet.model.load.tokenizer import load_tokenizer
from whet.model.load.weight_files import locate_model, require_certified_files
from whet.registry.registry import PREFIX
from whet.run.export_run import ExportRequest, export_run
from whet.run.models.load_models import find_run


def run_lm_eval(reference: str, tasks: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The metrics of lm-eval `tasks`: names or YAML task files, separated by commas. An override of eval.examples
    limits their number of examples."""
    silence_libraries()
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise WhetError("--lm-eval: lm-eval is not installed. Install it with: pip install 'whet[lm-eval]'") from None
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    config = load_config(Config, None, ["model.path=x", "data.sources=[{path: x}]", *overrides])
    files = [user_path(name) for name in names if name.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_path=sorted({str(resolve_path(file).parent) for file in files}) or None)
    task_names = [_task_name_in(name) if name.endswith((".yaml", ".yml")) else name for name in names]
    unknown = [name for name in task_names if name not in manager.all_tasks]
    if unknown:
        raise WhetError(f"--lm-eval: lm-eval has no task '{unknown[0]}'; `lm-eval ls tasks` lists its tasks")
    folder = _model_folder(reference)
    device = torch.accelerator.current_accelerator(check_available=True)
    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": folder, "dtype": "auto"}, tasks=task_names, task_manager=manager,
        apply_chat_template=True, device=str(device or "cpu"), batch_size=8,
        limit=config.eval.examples if any(each.startswith("eval.examples") for each in overrides) else None,
    )  # fmt: skip
    results = {name: _metric_values(each) for name, each in (found or {}).get("results", {}).items()}
    return {"model": reference, "folder": folder, "lm_eval": results}


def _task_name_in(file: str) -> str:
    name = read_yaml(user_path(file)).plain().get("task")
    if not isinstance(name, str):
        raise WhetError(f"--lm-eval: {file}: the key `task: NAME` is missing")
    return name


def _model_folder(reference: str) -> str:
    """The folder of a model; for a run its merged export, which is created if there is none of the current step."""
    if reference.startswith(("builtin:", PREFIX)):
        folder = locate_model(reference)
        require_certified_files(Path(folder))
        return folder
    run = find_run(reference)
    if run is None:
        load_tokenizer(ModelConfig(path=reference))  # raises whet's own error for what is not a model
        return reference
    path, step = run
    export = path / "exports" / "merged"
    if step == "latest" and (export / "certificate.json").exists():
        certificate = read_hashed_json(export / "certificate.json")
        newest = directory.resolve_step(path / "checkpoints", step)
        if certificate.get("verified") and certificate.get("step") == newest:
            require_certified_files(export)
            return str(export)
    return str(export_run(reference, ExportRequest())[0])


def _metric_values(result: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result, whose keys lm-eval writes as METRIC,FILTER, such as `acc,none`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in result.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    }
