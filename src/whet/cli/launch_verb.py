"""`whet launch … -- WORDS`: a verb of whet or a program of the user's, on this machine or as a Slurm job."""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.cli.preflight.prepare import parse_shard
from whet.core.display import is_valid_text
from whet.core.errors import ExitCode, UsageError, WhetError

if TYPE_CHECKING:
    from whet.config import Config
    from whet.launch.config import LaunchConfig
    from whet.launch.slurm_script import SlurmJob


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of `whet launch` that hold for verbs and programs, too."""

    before: Sequence[str]
    """What stands before `--`: CONFIG, for its launch section, and launch.…=VALUE."""
    on_slurm: bool
    interactive: bool
    dry_run: bool
    wait: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class VerbCall:
    """A verb with its arguments, as its own command line parses them."""

    words: Sequence[str]
    values: Mapping[str, Any]
    arguments: Sequence[str]
    """Positional ones, without overrides."""

    @property
    def overrides(self) -> list[str]:
        return list(self.values.get("overrides") or [])

    @property
    def recipe(self) -> Path | None:
        return self.values.get("recipe")


def launch_verb_or_program(root: Any, words: Sequence[str], options: LaunchOptions) -> dict[str, Any]:
    """Launch what follows `--`. `root`: the context of `whet` itself, which knows the verbs."""
    verbs: Mapping[str, Any] = root.command.commands
    if not words:
        raise UsageError(
            "nothing follows --. Name a verb, such as `-- eval runs/my`, or a program, such as "
            "`-- python my_trainer.py`"
        )
    if words[0] == "launch":
        raise UsageError("-- launch: whet launch cannot launch itself. Leave out the second `launch`")
    if options.on_slurm and (wrong := next((word for word in words if not is_valid_text(word)), None)) is not None:
        raise WhetError(
            f"-- {wrong!a}: a Slurm script cannot contain this word, which is not valid UTF-8. Rename the file"
        )
    if words[0] in verbs:
        return _launch_verb(parse_verb(root, verbs[words[0]], words), options)
    return _launch_program(words, tuple(verbs), options)


def parse_verb(root: Any, command: Any, words: Sequence[str]) -> VerbCall:
    """Parse the arguments of a verb now: otherwise a mistake in them would show when the job starts."""
    name, *rest = words
    try:
        context = command.make_context(name, rest, parent=root)
        while hasattr(command, "commands") and rest:  # `whet import` and others have commands of their own
            inner = next((i for i, word in enumerate(rest) if not word.startswith("-")), len(rest) - 1)
            name, command, rest = f"{name} {rest[inner]}", command.commands.get(rest[inner]), rest[inner + 1 :]
            if command is None:
                raise UsageError(f"-- {name}: no such command. `whet {words[0]} --help` lists them")
            context = command.make_context(name, rest, parent=root)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"-- {name}: {error.format_message() or 'its command is missing'}") from None
    names = [each.name for each in command.params if each.param_type_name == "argument" and each.name != "overrides"]
    values = (context.params.get(name) for name in names)
    return VerbCall(words, context.params, [str(value) for value in values if isinstance(value, str | Path)])


def _launch_verb(call: VerbCall, options: LaunchOptions) -> dict[str, Any]:
    from whet.config import read_config
    from whet.launch.slurm_script import SlurmJob
    from whet.launch.slurm_verbs import job_folder, plain_name, shard_jobs, without_gpus
    from whet.run.data import choose_data_shards

    verb = call.words[0]
    shard = parse_shard(call.values["shard"], call.values["merge"]) if verb == "prepare" else None
    if not options.on_slurm:
        raise UsageError(
            f"-- {verb}: add --on slurm for a Slurm job. On this machine, run it without launch: "
            f"whet {shlex.join(call.words)}"
        )
    config = None if call.recipe is None else read_config(call.recipe, call.overrides)
    launch = _launch_config(options.before, call, config)
    if verb == "prepare":
        launch = without_gpus(launch)
    name = plain_name(verb, config.run.name or "" if config else Path(*call.arguments[:1]).name)
    folder = job_folder(name)
    if options.interactive:
        if shard == "auto":
            raise UsageError("--shard auto is an array of jobs, which has no terminal: remove --interactive")
        return _run_in_terminal(SlurmJob(name, folder, call.words, launch, kind="verb"), options)
    words = call.words if config is None else _with_recipe_copy(call, config, folder, options.dry_run)
    if shard != "auto":
        return _submit([SlurmJob(name, folder, words, launch, kind="verb")], options)
    assert config is not None
    count = choose_data_shards(config, launch.slurm.cpus or 1)
    at = next(i for i, word in enumerate(words) if word in ("--shard", "--shard=auto"))
    words = [*words[:at], *words[at + (2 if words[at] == "--shard" else 1) :]]
    if call.values["date"] is None:  # the jobs may start on different days
        words += ["--date", datetime.date.today().isoformat()]
    return _submit(shard_jobs(name, words, launch, count), options)


def _with_recipe_copy(call: VerbCall, config: Config, folder: Path, dry_run: bool) -> list[str]:
    """The verb with a copy of its recipe, overrides included: the job may start after the recipe was edited."""
    from whet.core.files import atomic_write, hash_bytes

    text = config.dump(absolute_paths=False).encode()
    copy = folder / f"recipe-{hash_bytes(text)[:8]}.yaml"
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(copy, text)
    at = next(i for i, word in enumerate(call.words) if i and Path(word) == call.recipe)
    rest = list(call.words[at + 1 :])
    for override in call.overrides:
        rest.remove(override)
    return [*call.words[:at], str(copy), *rest]


def _launch_program(words: Sequence[str], verbs: Sequence[str], options: LaunchOptions) -> dict[str, Any]:
    from whet.core.console import info, print_error, print_result
    from whet.launch.local import format_command, make_launch_job, program_name, resolve_program
    from whet.launch.slurm_script import SlurmJob
    from whet.launch.slurm_verbs import job_folder, plain_name
    from whet.launch.supervise import supervise

    launch = _launch_config(options.before)
    name, slurm = plain_name(program_name(words)), launch.slurm
    if options.on_slurm:
        python = slurm.python or ("python" if slurm.container else sys.executable)
        is_here = not (slurm.container or slurm.modules or slurm.setup)
        program = resolve_program(words, python, verbs, is_here)
        if options.interactive:  # once, in this terminal
            alone = launch.model_copy(update={"nodes": 1, "slurm": slurm.model_copy(update={"tasks": "node"})})
            return _run_in_terminal(SlurmJob(name, job_folder(name), program, alone, kind="program"), options)
        return _submit([SlurmJob(name, job_folder(name), program, launch, kind="program")], options)
    if options.wait:
        raise UsageError("--wait is for Slurm: add --on slurm")
    job = make_launch_job(resolve_program(words, sys.executable, verbs), None, name, launch)
    if options.dry_run:
        line = format_command(job, resume=False)
        if not options.as_json:
            print_result(line)
        return {"command": line, "processes": job.nodes * job.processes}
    outcome = supervise(job, stdout=sys.stderr.fileno() if options.as_json else None)
    kind = outcome.attempts[-1].kind
    if kind == "crashed" or (kind == "input" and outcome.exit_code != ExitCode.INPUT):  # which torchrun has reported
        print_error(f"error: {outcome.reason}")
    elif kind == "stopped":
        info(outcome.reason)
    return outcome.as_dict()


def _launch_config(before: Sequence[str], call: VerbCall | None = None, config: Config | None = None) -> LaunchConfig:
    """The launch section of CONFIG before `--`, else of the verb's recipe or run; with launch.…=VALUE over it."""
    from whet.config import read_config
    from whet.core.config import load_config
    from whet.core.yaml import read_yaml
    from whet.launch.config import LaunchSettings

    has_recipe = bool(before) and ("=" not in before[0] or Path(before[0]).exists())
    recipe, overrides = (Path(before[0]), before[1:]) if has_recipe else (None, before)
    for each in overrides:
        if not _is_launch_setting(each):
            raise UsageError(f"{each}: only launch.…=VALUE may be given before --. Put the settings of a verb after it")
    if recipe is not None and read_yaml(recipe).plain().keys() <= {"launch"}:
        return load_config(LaunchSettings, recipe, overrides).launch
    if recipe is None and config is not None and call is not None:
        recipe, overrides = call.recipe, [*call.overrides, *overrides]
    elif recipe is None and call is not None:
        overrides = [*filter(_is_launch_setting, call.overrides), *overrides]
        for argument in call.arguments[:1]:  # a run has a configuration, too; variables of its data need not be set
            run = Path(argument.partition("@")[0]) / "config.yaml"
            if run.is_file():
                return read_config(run, overrides, expand="set").launch
    return read_config(recipe, overrides).launch if recipe else load_config(LaunchSettings, None, overrides).launch


def _is_launch_setting(override: str) -> bool:
    return override.partition("=")[0].partition(".")[0].strip() == "launch"


def _submit(jobs: Sequence[SlurmJob], options: LaunchOptions) -> dict[str, Any]:
    from whet.core.console import info, print_result
    from whet.launch.slurm_script import render_script
    from whet.launch.slurm_verbs import follow_jobs, script_name, submit_jobs

    if options.dry_run:
        scripts = [render_script(job) for job in jobs]
        if not options.as_json:
            print_result("\n".join(scripts).rstrip("\n"))
        return {"script": scripts[0], **({"merge": scripts[1]} if len(scripts) > 1 else {})}
    folder, numbers = jobs[0].folder, submit_jobs(jobs)
    shown = ", ".join(map(str, numbers))
    info(f"job {shown}: {folder / script_name(jobs[0])}; output in {folder}")
    result: dict[str, Any] = {
        "job": numbers[0],
        "jobs": numbers,
        "tasks": jobs[0].array or 1,
        "script": str(folder / script_name(jobs[0])),
        "folder": str(folder),
    }
    if options.wait:
        code, reason = follow_jobs(numbers, folder)
        info(reason)
        result |= {"exit_code": int(code), "reason": reason}
    return result


def _run_in_terminal(job: SlurmJob, options: LaunchOptions) -> dict[str, Any]:
    """Become srun: the terminal, its signals and the exit code are its own."""
    from whet.core.console import print_result
    from whet.launch.slurm_script import srun_command

    command = srun_command(job)
    if options.dry_run:
        if not options.as_json:
            print_result(shlex.join(command))
        return {"command": shlex.join(command)}
    if options.wait or options.as_json:
        raise UsageError("--interactive already waits for the end and prints the verb's output: remove --wait, --json")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise WhetError(
            "--interactive needs a terminal, and stdin or stdout is not one. Without --interactive, whet submits a job"
        )
    if shutil.which("srun") is None:
        raise WhetError("--interactive: srun is not installed here. Run this on a login node of the cluster")
    sys.stderr.flush()
    return os.execvpe(command[0], command, {**os.environ, **job.launch.required_variables()})


def launch_notebook(options: LaunchOptions) -> dict[str, Any]:
    """Start Jupyter in a job, wait until it runs, and print how to reach it."""
    from whet.core.console import info, print_result
    from whet.launch.notebook import IDLE_S, LOCAL_PORT, jupyter_command, wait_for_notebook
    from whet.launch.slurm_script import SlurmJob, render_script
    from whet.launch.slurm_verbs import follow_jobs, job_folder, submit_jobs

    launch, folder = _launch_config(options.before), job_folder("notebook")
    job = SlurmJob("notebook", folder, ("whet.launch.notebook", str(folder)), launch, kind="module")
    if options.dry_run:
        if not options.as_json:
            print_result(render_script(job).rstrip("\n"))
        return {"script": render_script(job)}
    slurm = launch.slurm
    if not (slurm.container or slurm.python or slurm.modules or slurm.setup):  # else only the job can tell
        jupyter_command()
    [number] = submit_jobs([job])
    notebook = wait_for_notebook(number, folder)
    info(f"job {number} runs Jupyter on {notebook.host}. On your own machine, start the tunnel:")
    if not options.as_json:
        print_result(notebook.tunnel)
    info(f"and open http://127.0.0.1:{LOCAL_PORT}/lab. It asks for the token: cat {notebook.token_file}")
    info(f"It ends after {IDLE_S // 60} minutes without activity, or with scancel {number}")
    result: dict[str, Any] = {
        "job": number,
        "host": notebook.host,
        "port": notebook.port,
        "tunnel": notebook.tunnel,
        "url": f"http://127.0.0.1:{LOCAL_PORT}/lab",
        "token_file": str(notebook.token_file),
    }
    if options.wait:
        code, reason = follow_jobs([number], folder)
        info(reason)
        result |= {"exit_code": int(code), "reason": reason}
    return result
