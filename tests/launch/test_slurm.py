"""`whet launch --on slurm`: the script, and runs on a real Slurm of two nodes on this machine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_options import OPTIONS
from slurm_cluster import Cluster

from whet.launch.slurm import follow_run
from whet.launch.slurm_script import time_limit_seconds

SITE = (
    "launch.nodes=192", "launch.gpus=8", "launch.slurm.account=465001281", "launch.slurm.partition=standard-g",
    "launch.slurm.exclusive=user", "launch.slurm.gpu_type=mi250", "launch.slurm.cpus=7", "launch.slurm.memory=0",
    "launch.slurm.time=20:00:00", "launch.slurm.hint=nomultithread", "launch.slurm.modules=[LUMI]",
    "launch.slurm.container=/scratch/rocm.sif", "launch.slurm.binds=[/scratch, /project]", "launch.env.HF_TOKEN=hidden",
    "launch.slurm.setup=['source misc/purge.sh']", "train.batch={rows: 1536}",
)  # fmt: skip


def script_of(whet: Any, recipe: str, *options: str) -> str:
    ended = whet("launch", recipe, "--on", "slurm", "--dry-run", "run.dir=/runs/x", *options)
    assert ended.code == 0, ended.err
    done = subprocess.run(["bash", "-n"], input=ended.out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(ended.out).replace(" \\\n    ", " ")  # long lines are wrapped


def test_the_script_has_what_the_site_wants_and_no_secret(whet: Any, recipe: str) -> None:
    lines = script_of(whet, recipe, *SITE).splitlines()
    for option in (
        "--account=465001281", "--partition=standard-g", "--exclusive=user", "--nodes=192", "--gpus-per-node=mi250:8",
        "--ntasks-per-node=1", "--cpus-per-task=56", "--mem=0", "--time=20:00:00", "--hint=nomultithread",
        "--signal=B:USR1@300", "--requeue", "--output=/runs/x/slurm/%j.out",
    ):  # fmt: skip
        assert f"#SBATCH {option}" in lines
    [srun] = [line for line in lines if line.startswith("srun ") and "--ntasks=" not in line]
    assert "exec --bind=/scratch,/project /scratch/rocm.sif python -m whet launch /runs/x/slurm/recipe.yaml" in srun
    assert lines.index("module load LUMI") < lines.index("source misc/purge.sh") < lines.index(srun)
    assert not any("hidden" in line for line in lines)


def test_one_task_per_gpu(whet: Any, recipe: str) -> None:
    script = script_of(whet, recipe, *SITE, "launch.slurm.tasks=gpu")
    assert "#SBATCH --ntasks-per-node=8" in script
    assert "#SBATCH --cpus-per-task=7" in script
    task = "bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' task"
    assert f"srun --kill-on-bad-exit=1 --cpus-per-task=7 {task} " in script


def test_a_range_of_nodes_leaves_the_tasks_to_srun(whet: Any, recipe: str) -> None:
    """--ntasks-per-node=1 would make Slurm take a single node of a range that begins at 1."""
    script = script_of(whet, recipe, *SITE, "launch.nodes=1-4")
    assert "#SBATCH --nodes=1-4\n" in script
    assert "#SBATCH --ntasks" not in script
    assert "srun --ntasks-per-node=1 " in script
    script = script_of(whet, recipe, *SITE, "launch.nodes=1-4", "launch.slurm.tasks=gpu")
    assert "#SBATCH --mincpus=56" in script
    assert "srun --ntasks-per-node=8 --kill-on-bad-exit=1" in script


RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_script_of_lumi_says_what_the_site_wants(whet: Any) -> None:
    """Also what the manual script of the site has: CPU masks, hint, caches, bind mounts."""
    script = script_of(whet, str(RECIPES / "lumi.yaml"))
    for line in (
        "#SBATCH --account=project_465001281", "#SBATCH --partition=standard-g", "#SBATCH --exclusive=user",
        "#SBATCH --nodes=192", "#SBATCH --gpus-per-node=mi250:8", "#SBATCH --ntasks-per-node=8",
        "#SBATCH --cpus-per-task=7", "#SBATCH --mem=0", "#SBATCH --time=20:00:00", "#SBATCH --hint=nomultithread",
        "export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen-$SLURM_JOB_ID",
        "export WORLD_SIZE=$((SLURM_JOB_NUM_NODES * 8)) LOCAL_WORLD_SIZE=8",
    ):  # fmt: skip
        assert line in script.splitlines()
    [srun] = [line for line in script.splitlines() if line.startswith("srun ") and "--ntasks=" not in line]
    masks = srun.partition("--cpu-bind=mask_cpu:")[2].split()[0].split(",")
    cores = [{core for core in range(64) if int(mask, 16) >> core & 1} for mask in masks]
    assert [len(each) for each in cores] == [7] * 8
    assert len(set.union(*cores)) == 56, "no core serves two processes"
    assert min(core % 8 for each in cores for core in each) == 1, "the first core of each group is the system's"
    image = "/opt/cray,/usr/lib64/libcxi.so.1 /scratch/project_465001281/containers/rocm603_flash.sif "
    assert f"{image}/scratch/project_465001281/venvs/whet/bin/python -m whet train " in srun


def test_the_batch_of_lumi_is_counted(whet: Any) -> None:
    """192 nodes × 8 GCDs ÷ 8 (tensor) × 3 rows = 576; the seed's 192 rows are refused."""
    ended = whet("launch", RECIPES / "lumi.yaml", "--on", "slurm", "--dry-run", "train.batch.rows=192")
    assert ended.code == 1
    assert "fewer than 576: 192 nodes × 8 devices ÷ 8 (parallel.tensor) = 192 data-parallel ranks" in ended.err
    eight = ("launch.nodes=8", "train.batch.rows=24", "train.steps=10")  # as its first lines propose
    assert whet("launch", RECIPES / "lumi.yaml", "--on", "slurm", "--dry-run", *eight).code == 0


def test_the_script_of_a_small_cluster_is_short(whet: Any) -> None:
    script = script_of(whet, str(RECIPES / "slurm-small.yaml"))
    assert len(script.splitlines()) < 35
    assert "module load cuda/12.8" in script
    assert "srun --cpus-per-task=32 /shared/venvs/whet/bin/python -m whet launch " in script


@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_time_limits_in_every_notation(days: int, hours: int, minutes: int, seconds: int) -> None:
    clock = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert time_limit_seconds(f"{days}-{hours}:{minutes:02}:{seconds:02}") == clock
    assert time_limit_seconds(f"{days * 24 + hours}:{minutes:02}:{seconds:02}") == clock
    assert time_limit_seconds(f"{days}-{hours}:{minutes:02}") == clock - seconds
    assert time_limit_seconds(f"{days}-{hours}") == (days * 24 + hours) * 3600
    assert time_limit_seconds(f"{minutes}:{seconds:02}") == minutes * 60 + seconds
    assert time_limit_seconds(f"{minutes}") == minutes * 60


def test_a_variable_that_is_not_set_is_named_before_the_queue(whet: Any, recipe: str, tmp_path: Path) -> None:
    ended = whet("launch", recipe, "--on", "slurm", f"run.dir={tmp_path / 'run'}", "launch.env=[WHET_NOT_SET]")
    assert ended.code == 1
    assert "launch.env: the environment variable WHET_NOT_SET is not set" in ended.err
    assert not (tmp_path / "run").exists()


def test_another_run_is_refused_before_the_queue(whet: Any, recipe: str, tmp_path: Path) -> None:
    options = [recipe, f"run.dir={tmp_path / 'run'}", "export.at_end=none"]
    assert whet("train", *options, "train.steps=4", "--until", 1).code == 0
    ended = whet("launch", *options, "train.steps=5", "--on", "slurm", "--resume")
    assert ended.code == 1
    assert "train.steps: 4 then, 5 now" in ended.err
    assert "whet runs resume" in ended.err
    assert "--until STEP" in ended.err
    assert not (tmp_path / "run" / "slurm").exists()


def test_the_script_can_be_submitted_from_elsewhere(whet: Any, recipe: str) -> None:
    script = whet("launch", recipe, "run.dir=runs/mine", "--on", "slurm", "--dry-run").out
    assert f"#SBATCH --chdir={Path.cwd()}\n" in script
    assert "#SBATCH --output=runs/mine/slurm/%j.out\n" in script


def test_where_there_is_no_slurm(whet: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = whet("launch", recipe, "--on", "slurm", f"run.dir={tmp_path / 'run'}")
    assert ended.code == 1
    assert "is not installed here. Run this on a login node" in ended.err
    assert whet("launch", recipe, "--wait").code == 2


# On a real Slurm.


@pytest.fixture
def submit(whet: Any, recipe: str, cluster: Cluster, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Submit a run of few steps; returns what --json prints."""

    def run(*options: str, code: int = 0) -> dict[str, Any]:
        ended = whet(
            "launch", recipe, "--on", "slurm", f"run.dir={tmp_path / 'run'}", *OPTIONS, "launch.slurm.time=10",
            "launch.processes=1", "--json", *options,
        )  # fmt: skip
        assert ended.code == code, ended.err
        return dict(json.loads(ended.out))

    return run


@pytest.mark.parametrize(
    ("option", "key"),
    [("launch.slurm.partition=none", "launch.slurm.partition"), ("launch.nodes=3", "launch.nodes"),
     ("launch.slurm.constraint=x", "launch.slurm.constraint"),
     ("launch.slurm={partition: short, time: 100}", "launch.slurm.time"),
     ("launch.slurm={partition: closed, account: chemistry}", "launch.slurm.account")],
)  # fmt: skip
def test_what_slurm_refuses_is_named(submit: Any, option: str, key: str, tmp_path: Path) -> None:
    error = submit(option, code=1)["error"]
    assert key in error
    assert "Slurm refused the job" in error
    assert not (tmp_path / "run/config.yaml").exists()


def test_a_second_chain_into_one_folder_is_refused_while_one_is_queued(
    submit: Any, cluster: Cluster, tmp_path: Path
) -> None:
    held = "launch.slurm.options=[--hold]"
    jobs = submit(held, "--chain", "2")["jobs"]
    error = submit(held, "--chain", "2", code=1)["error"]
    assert f"job {jobs[0]}, {jobs[1]} of this run is queued or running. Wait for it, or cancel it" in error
    cluster.run("scancel", *map(str, jobs))
    again = submit(held)
    code, reason = cancel_and_follow(cluster, tmp_path / "run", again["jobs"])
    assert code == 3
    assert f"job {again['job']}: it was cancelled before it began. Submit it again" in reason


def cancel_and_follow(cluster: Cluster, run: Path, jobs: list[int]) -> tuple[int, str]:
    cluster.run("scancel", *map(str, jobs))
    return follow_run(run, jobs)


def test_a_script_that_was_edited_stays(submit: Any, tmp_path: Path) -> None:
    submit("launch.slurm.partition=none", code=1)
    script = tmp_path / "run/slurm/job.sh"
    script.write_text(script.read_text() + "# mine\n")
    assert f"{script} was edited" in submit(code=1)["error"]
    assert script.read_text().endswith("# mine\n")


@pytest.mark.parametrize("tasks", ["gpu", pytest.param("node", marks=pytest.mark.slow)])
def test_a_run_on_two_nodes_is_that_of_one_process(
    tasks: str, submit: Any, whole: Path, tmp_path: Path, assert_same: Any, whet: Any, recipe: str
) -> None:
    site = (f"launch.slurm.tasks={tasks}", "launch.slurm.cpus=1", "launch.env={WHET_TEST: given}")
    found = submit("launch.nodes=2", *site, "--wait")
    assert found["exit_code"] == 0, found
    assert_same(tmp_path / "run", whole)
    ended = whet("launch", recipe, "--on", "slurm", f"run.dir={tmp_path / 'run'}")
    assert "holds a run already" in ended.err


@pytest.mark.slow
def test_a_warned_job_saves_is_queued_again_and_ends_the_same(
    submit: Any, cluster: Cluster, whole: Path, tmp_path: Path, assert_same: Any
) -> None:
    job = submit("launch.nodes=2", "--then", "eval {run} --no-base --json")
    wait_for_step(cluster, job["job"], tmp_path / "run", 3)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job["job"]))  # what Slurm sends before the time limit
    text = cluster.wait_for_state(job["job"], "COMPLETED")
    assert "Restarts=1" in text
    assert_same(tmp_path / "run", whole)
    cluster.wait_for_state(job["then"], "COMPLETED")
    assert '"val_loss"' in cluster.output(tmp_path / "run", job["then"])


@pytest.mark.slow
def test_a_chain_continues_and_its_rest_ends_at_once(
    submit: Any, cluster: Cluster, whole: Path, tmp_path: Path, assert_same: Any
) -> None:
    jobs = submit("launch.slurm.max_requeues=0", "--chain", "3")["jobs"]
    wait_for_step(cluster, jobs[0], tmp_path / "run", 3)
    cluster.run("scancel", "--batch", "--signal=USR1", str(jobs[0]))
    assert "ExitCode=75:0" in cluster.wait_for_state(jobs[0], "FAILED")
    cluster.wait_for_state(jobs[2], "COMPLETED")
    assert "nothing to do" in cluster.output(tmp_path / "run", jobs[2])
    assert_same(tmp_path / "run", whole)


@pytest.mark.slow
def test_one_task_per_process_is_the_same_run(
    submit: Any, whole: Path, tmp_path: Path, assert_same: Any, cluster: Cluster
) -> None:
    found = submit("launch.slurm.tasks=gpu", "launch.processes=2", "--wait")
    assert found["exit_code"] == 0, cluster.output(tmp_path / "run", found["job"])
    assert_same(tmp_path / "run", whole)


def wait_for_step(cluster: Cluster, job: int, run: Path, step: int) -> None:
    metrics, until = run / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or f'"step": {step}' not in metrics.read_text():
        assert time.monotonic() < until, cluster.output(run, job)
        time.sleep(0.05)
