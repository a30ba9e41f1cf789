"""`whet bench --end-to-end`: whole runs of a recipe, from the command to the exported model, by whet and TRL's script.

Both read the same weights and conversations. Each runs with empty caches, then again with what that run left.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import whet
from whet.bench import runner
from whet.bench.contenders import Contender, whet_contender
from whet.bench.runner import ContenderError, exit_code, json_error, open_output_folder, require_success
from whet.config import Config, read_config
from whet.core.checksums import read_hashed_json
from whet.core.console import info
from whet.core.errors import WhetError
from whet.core.files import atomic_write, read_json, write_json
from whet.core.json_lines import read_json_lines
from whet.core.yaml import dump_yaml
from whet.data.config import Source
from whet.data.conversation import Conversation, MarkedText, PlainText, TokenizedDocument
from whet.data.read.sources import read_source
from whet.model.load.weight_files import locate_model
from whet.run.data import make_plan, prepare_data

ROUNDS = ("cold", "warm")
_STAGES = ("start", "data", "model", "worst batch", "first validation", "first step", "training", "validation",
           "export", "exit")  # fmt: skip
_STARTUP_STAGES = {"import_s": "start", "prepare_s": "data", "load_s": "model", "fit_s": "worst batch",
                   "measure_s": "first validation", "step_s": "first step"}  # fmt: skip
STAGE_NOTES = (
    "start: until everything is imported; whet also reads the recipe.",
    "data: conversations are read and tokenized; whet loads the model at the same time.",
    "model: weights are read, and the model is built.",
    "worst batch: whet measures the memory of the largest batch before the first step.",
    "first step: compiling included. training: the other steps, with the checkpoints saved meanwhile.",
    "export: the model's folder is written; whet also loads it back and compares it with the trained model. exit: the "
    "report, if there is one, and the end of the process.",
    "validation loss: before and after training. whet's is the mean over all supervised tokens, TRL's over batches.",
    "cold: with empty caches (tokenized data, compiled kernels). warm: the same command again. In both, the operating "
    "system has read the files before.",
)
"""The meaning of the rows, printed below the table."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One run of a tool."""

    ends: Sequence[tuple[str, float]]
    """When each stage ended, in order, in Unix time."""
    steps: int
    val_loss: Sequence[float]


def run_end_to_end(
    recipe: Path, overrides: Sequence[str], peers: Sequence[Contender], out: Path, device: str, rounds: int = 2
) -> dict[str, Any]:
    """Run whet and its peers on a recipe, each with empty caches, then again; returns the content of bench.json."""
    if others := [peer.name for peer in peers if peer.name != "trl"]:
        raise WhetError(f"--peers {others[0]}: whole runs are compared with trl only. Leave it out")
    config = read_config(recipe, overrides)
    if peers:
        require_translatable(config)
    device = device if config.run.device == "auto" else config.run.device
    open_output_folder(out)
    result: dict[str, Any] = {
        "finished": False, "recipe": str(recipe), "overrides": list(overrides), "device": device, "contenders": [],
    }  # fmt: skip
    write_json(out / "bench.json", result)
    info("preparing the conversations")
    model = locate_model(config.model.path)
    atomic_write(out / "whet.yaml", dump_yaml(_whet_recipe(config, model, out)))
    data = prepare_data(config)
    steps = len(make_plan(config, data))
    settings: dict[str, Any] = {}
    if peers:
        settings = trl_config(config, model, out, device, peers[0], steps, _write_conversations(config, out))
        atomic_write(out / "trl.yaml", f"# trl sft --config {out / 'trl.yaml'}\n{dump_yaml(settings)}")
    result["notes"] = _data_notes(data.ledger())
    for contender in [whet_contender(), *peers]:
        result["contenders"].append(entry := _new_entry(contender))
        if entry["state"] == "not installed":
            info(f"{contender.title} is not installed in {contender.python}; left out")
            continue
        shutil.rmtree(out / f"{contender.name}-cache", ignore_errors=True)
        for name in ROUNDS[:rounds]:
            info(f"{contender.title} {entry['version']}, {name} caches: running")
            began = time.time()
            try:
                found = _run_once(contender, out, device)
            except ContenderError as error:
                info(f"{contender.title}: failed after {time.time() - began:.0f} s: {error}", style="yellow")
                entry |= {"state": "failed", "error": str(error), "log": f"{contender.name}.log"}
                break
            entry["rounds"][name] = found
            entry["state"] = "measured"
            info(f"{contender.title}: {found['whole_s']:.1f} s, the first step after {found['first_step_s']:.1f} s")
            write_json(out / "bench.json", result)
    result |= {"finished": True, "exit_code": exit_code(result["contenders"][0])}
    atomic_write(out / "bench.md", stages_markdown(result))
    write_json(out / "bench.json", result)
    return result


def _new_entry(contender: Contender) -> dict[str, Any]:
    version = whet.__version__ if contender.name == "whet" else contender.versions.get(contender.name)
    return {
        "tool": contender.name, "title": contender.title, "version": version or "", "versions": contender.versions,
        "state": "failed" if version else "not installed", "rounds": {},
    }  # fmt: skip


def _run_once(contender: Contender, out: Path, device: str) -> dict[str, Any]:
    """One run, as an entry of `rounds` in bench.json."""
    environment = contender.environment() | _cache_variables(out / f"{contender.name}-cache")
    run = _run_whet if contender.name == "whet" else _run_trl
    ended, found = run(contender, out, environment, device)
    stages = stage_seconds(ended.began, [*found.ends, ("exit", ended.began + ended.seconds)])
    return {
        "whole_s": ended.seconds,
        "first_step_s": max(moment for stage, moment in found.ends if stage == "first step") - ended.began,
        "stages": stages,
        "steps": found.steps,
        "step_ms": 1000 * stages["training"] / max(1, found.steps - 1),
        "val_loss": list(found.val_loss),
    }


def _cache_variables(folder: Path) -> dict[str, str]:
    """Every cache of a tool in a folder of its own; the model is read from where it is."""
    kernels = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    caches = {"WHET_CACHE": "whet", "HF_DATASETS_CACHE": "datasets", **kernels}
    return {variable: str(folder / name) for variable, name in caches.items()}


def stage_seconds(began: float, ends: Sequence[tuple[str, float]]) -> dict[str, float]:
    """The seconds of each stage; a stage may end several times, between others."""
    seconds = dict.fromkeys(_STAGES, 0.0)
    for stage, moment in ends:
        seconds[stage] += moment - began
        began = moment
    return seconds


_Ended = tuple[runner.ProcessResult, _Round]


def _run_whet(contender: Contender, out: Path, environment: Mapping[str, str], device: str) -> _Ended:
    """`whet train`; its stages are in status.json and metrics.jsonl."""
    shutil.rmtree(out / "whet", ignore_errors=True)
    command = [contender.python, "-m", "whet", "train", str(out / "whet.yaml"), "--json"]
    ended = runner.run_process(command, out / "whet.log", environment)
    require_success(ended, out / "whet.log", json_error(ended.out))
    status = read_hashed_json(out / "whet" / "status.json")
    lines = read_json_lines(out / "whet" / "metrics.jsonl")[0]
    return ended, _Round(
        list(whet_stage_ends(ended.began, status, lines)),
        status["steps"],
        [line["val_loss"] for line in lines if "val_loss" in line],
    )


def whet_stage_ends(
    began: float, status: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, float]]:
    """When each stage of a run ended, from its status and the lines of its metrics."""
    for key, stage in _STARTUP_STAGES.items():
        began += status["first_step"][key]
        yield stage, began
    for line in lines:
        if line["step"] > 1 or (line["step"] == 1 and "step_s" not in line):
            yield ("training" if "step_s" in line else "validation"), line["time"]
    yield "export", status["heartbeat"]


def _run_trl(contender: Contender, out: Path, environment: Mapping[str, str], device: str) -> _Ended:
    """`trl sft` with a clock in its trainer."""
    shutil.rmtree(out / "trl", ignore_errors=True)
    result, settings = out / "trl.result.json", out / "trl.json"
    result.unlink(missing_ok=True)
    write_json(settings, {"config_file": str(out / "trl.yaml"), "result": str(result), "device": device})
    if device == "cuda":  # with several, Trainer would wrap the model in DataParallel; whet trains on the first
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment = {**environment, "CUDA_VISIBLE_DEVICES": first}
    command = [contender.python, str(contender.script.with_name("trl_end_to_end.py")), str(settings)]
    ended = runner.run_process(command, out / "trl.log", environment)
    found: dict[str, Any] = read_json(result) if result.exists() else {}
    require_success(ended, out / "trl.log", found.get("error"))
    return ended, _Round(found["ends"], found["steps"], found["val_loss"])


# The recipe, and what `trl sft` gets for the same.

_LEFT_TO_THE_TOOL = (
    "run", "track", "model.compile", "model.attention", "data.packing", "data.bins", "data.store", "data.too_long",
    "data.on_bad", "train.micro_rows", "train.on_spike", "train.on_nonfinite", "eval.prompts", "export.at_end",
    "launch",
)  # fmt: skip
"""Settings that change nothing that is learned, or that TRL's script has no choice in."""
_TRANSLATED = (
    "model.path", "model.dtype", "adapter.method", "adapter.rank", "adapter.alpha", "adapter.dropout",
    "adapter.targets", "data.sources", "data.validation.sources", "data.train_on", "data.max_length", "data.system",
    "train.steps", "train.epochs", "train.batch.conversations", "train.optimizer.name", "train.optimizer.lr",
    "train.optimizer.betas", "train.optimizer.eps", "train.optimizer.weight_decay", "train.schedule.name",
    "train.schedule.warmup", "train.precision", "train.clip_norm", "parallel.recompute", "eval.every",
    "eval.at_start", "checkpoint.every", "checkpoint.keep_last",
)  # fmt: skip
_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def require_translatable(config: Config) -> None:
    """Raise a WhetError for a setting that `trl sft` does not have, so that both would do different work."""
    known = (*_LEFT_TO_THE_TOOL, *_TRANSLATED)
    for key, value in _leaves(config.model_dump(exclude_unset=True, exclude_none=True, mode="json")):
        if not any(key == each or key.startswith(f"{each}.") for each in known):
            raise WhetError(f"{key}: {value}: TRL's script has no such setting, so the runs would differ. Remove it")
    schedule, batch = config.train.schedule.name, config.train.batch.conversations
    if schedule not in _SCHEDULES:
        raise WhetError(
            f"train.schedule.name: {schedule}: TRL has no such schedule. Use one of {', '.join(_SCHEDULES)}"
        )
    if config.train.precision in ("fp64", "fp8"):
        raise WhetError(
            f"train.precision: {config.train.precision}: TRL's script does not support this precision. Use another one"
        )
    if batch is None or config.train.optimizer.name != "adamw":
        raise WhetError("--end-to-end compares runs with train.batch.conversations and the optimizer adamw. Set them")
    for source in (*config.data.sources, *_validation_sources(config)):
        if source.weight is not None or source.epochs is not None:
            raise WhetError(
                f"data.sources: {source.path}: TRL cannot mix sources by weight or epochs. Remove these keys"
            )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _validation_sources(config: Config) -> Sequence[Source]:
    return (config.data.validation.sources or []) if config.data.validation else []


def _whet_recipe(config: Config, model: str, out: Path) -> dict[str, Any]:
    """The recipe with the model's folder, and without what TRL's script does not do: samples of answers, trackers."""
    tree = config.resolved()
    tree["run"] |= {"name": "whet", "dir": str(out / "whet")}
    tree["model"]["path"] = model
    tree["eval"]["prompts"] = []
    return tree | {"track": []}


def _write_conversations(config: Config, out: Path) -> bool:
    """Write the conversations in the format of TRL's datasets; returns whether they are prompts with completions, of
    which TRL trains on the completions."""
    folder = out / "conversations"
    folder.mkdir(exist_ok=True)
    by_split = {"train": config.data.sources, "test": _validation_sources(config)}
    read = {split: list(_conversations(sources)) for split, sources in by_split.items()}
    is_pair = config.data.train_on != "all" and all(
        [message.role for message in each.messages].index("assistant") == len(each.messages) - 1
        for each in [*read["train"], *read["test"]]
    )
    for split, conversations in read.items():
        lines = (json.dumps(_trl_record(each, is_pair), ensure_ascii=False) + "\n" for each in conversations)
        if conversations:
            atomic_write(folder / f"{split}.jsonl", "".join(lines))
    return is_pair


def _conversations(sources: Sequence[Source]) -> Iterator[Conversation]:
    for source in sources:
        for record in read_source(source):
            if isinstance(record, Conversation):
                yield record
            elif isinstance(record, PlainText | MarkedText | TokenizedDocument):
                raise WhetError(
                    f"{record.origin}: TRL's script needs conversations, and this record is not one. Use another file"
                )


def _trl_record(conversation: Conversation, is_pair: bool) -> dict[str, Any]:
    messages = [message.as_dict() for message in conversation.messages]
    return {"prompt": messages[:-1], "completion": messages[-1:]} if is_pair else {"messages": messages}


def trl_config(
    config: Config, model: str, out: Path, device: str, peer: Contender, steps: int, is_pair: bool
) -> dict[str, Any]:
    """The keys of `trl sft --config` for a recipe, with the fastest kernels that TRL has installed."""
    import torch

    from whet.training.precision import resolve_precision

    train, optimizer, batch = config.train, config.train.optimizer, config.train.batch.conversations
    precision = resolve_precision(config, torch.device(device))
    on_gpu = device != "cpu"
    has_flash = on_gpu and "flash-attn" in peer.versions
    warmup = train.schedule.warmup
    settings: dict[str, Any] = {
        "model_name_or_path": model,
        "dtype": str(precision.weights).removeprefix("torch."),
        "attn_implementation": "flash_attention_2" if has_flash else "sdpa",
        "dataset_name": str(out / "conversations"),
        "assistant_only_loss": config.data.train_on != "all" and not is_pair,
        "max_length": None if has_flash else config.data.max_length,
        "padding_free": has_flash,
        "output_dir": str(out / "trl"),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_torch_fused",
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": train.clip_norm,
        "lr_scheduler_type": _SCHEDULES[train.schedule.name],
        "warmup_steps": warmup if isinstance(warmup, int) else round(warmup * steps),
        "bf16": precision.name == "bf16",
        "fp16": precision.name == "fp16",
        "gradient_checkpointing": config.parallel.recompute == "full",
        "save_strategy": "steps",
        "save_steps": config.checkpoint.every or max(1, steps // 10),
        "save_total_limit": config.checkpoint.keep_last,
        "logging_steps": 50,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.run.seed,
    }
    if _validation_sources(config):
        settings |= {
            "eval_strategy": "steps", "eval_steps": config.eval.every or steps, "eval_on_start": config.eval.at_start
        }  # fmt: skip
    settings |= {"dataloader_num_workers": 4} if on_gpu else {"use_cpu": True}
    if on_gpu and "liger-kernel" in peer.versions:
        settings["use_liger_kernel"] = True
    if adapter := config.adapter:
        settings |= {
            "use_peft": True, "lora_r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout,
            "lora_target_modules": [adapter.targets] if isinstance(adapter.targets, str) else adapter.targets,
            "use_rslora": adapter.method == "rslora", "use_dora": adapter.method == "dora",
        }  # fmt: skip
    return settings


# The table.


def stages_markdown(result: Mapping[str, Any]) -> str:
    """The seconds of each stage, a column for each run."""
    runs = [
        (f"{entry['title']} {entry['version']}, {name}", found)
        for entry in result["contenders"]
        for name, found in entry["rounds"].items()
    ]
    rows = [
        [stage, *(f"{found['stages'][stage]:.1f}" if found["stages"][stage] else "–" for _, found in runs)]
        for stage in _STAGES
    ]
    rows += [
        ["**whole run**", *(f"**{found['whole_s']:.1f}**" for _, found in runs)],
        ["first step after", *(f"{found['first_step_s']:.1f}" for _, found in runs)],
        ["steps", *(f"{found['steps']:,}" for _, found in runs)],
        ["ms per step", *(f"{found['step_ms']:.1f}" for _, found in runs)],
        ["validation loss", *(" → ".join(f"{loss:.3f}" for loss in found["val_loss"]) or "–" for _, found in runs)],
    ]
    lines = [
        f"## {result['recipe']}, on {result['device']}, in seconds",
        "",
        f"| stage | {' | '.join(title for title, _ in runs)} |",
        f"|---|{'---:|' * len(runs)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(f"- {note}" for note in [*result["notes"], *_failures(result["contenders"]), *STAGE_NOTES]),
    ]
    return "\n".join(lines) + "\n"


def _failures(contenders: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in contenders:
        if entry["state"] == "not installed":
            yield f"{entry['title']} is not installed and left out."
        elif entry["state"] == "failed":
            yield f"{entry['title']} failed: {entry['error']} ({entry['log']})."


def _data_notes(ledger: Mapping[str, Any]) -> list[str]:
    dropped = sum(source["conversations"]["dropped"] for source in ledger["sources"])
    return [f"whet drops {dropped:,} conversations (ledger.json), TRL does not."] if dropped else []
