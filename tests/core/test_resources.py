"""Free memory: the machine's, or what the limits of control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.core.resources import available_memory, cores_per_process, multiplies_bf16

NO_LIMIT = 9223372036854771712  # what version 1 says where there is none


def system(root: Path, groups: str, **files: object) -> Path:
    """A machine with 8 MB available; `groups` is /proc/self/cgroup, `files` are under /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 16000 kB\nMemAvailable: 8000 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, value in files.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    return root


def test_without_control_groups_the_machines_memory_counts(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, "")) == 8_192_000


def test_memory_is_unknown_where_the_system_does_not_report_it(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(("limit", "free"), [("max", 8_192_000), ("5000000", 4_000_000), ("90000000", 8_192_000)])
def test_cgroup_version_2(tmp_path: Path, limit: str, free: int) -> None:
    files = {"memory.max": limit, "memory.current": 1_000_000}
    assert available_memory(system(tmp_path, "0::/\n", **files)) == free


def test_cached_file_pages_count_as_free(tmp_path: Path) -> None:
    stat = "anon 1\ninactive_file 300\nactive_file 50\nshmem 9000"
    files = {"memory.max": 1000, "memory.current": 900, "memory.stat": stat}
    assert available_memory(system(tmp_path, "0::/\n", **files)) == 450


def test_the_limit_of_an_outer_group_holds(tmp_path: Path) -> None:
    files = {
        "job__step__memory.max": "max", "job__step__memory.current": 700,
        "job__memory.max": 2000, "job__memory.current": 1700,
    }  # fmt: skip
    assert available_memory(system(tmp_path, "0::/job/step\n", **files)) == 300


def test_a_group_over_its_limit_has_no_free_memory(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, "0::/\n", **{"memory.max": 10, "memory.current": 11})) == 0


@pytest.mark.parametrize("path", ["/", "/slurm/job", "/docker/not-seen-from-inside"])
def test_cgroup_version_1_also_with_the_hosts_path(tmp_path: Path, path: str) -> None:
    files = {
        "memory__memory.limit_in_bytes": 4000, "memory__memory.usage_in_bytes": 3000,
        "memory__memory.stat": "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 5",
        "memory__slurm__job__memory.limit_in_bytes": NO_LIMIT, "memory__slurm__job__memory.usage_in_bytes": 9,
    }  # fmt: skip
    groups = f"5:cpu,cpuacct:/\n4:memory:{path}\n0::/\n"
    assert available_memory(system(tmp_path, groups, **files)) == 1205


def test_this_machine_has_free_memory() -> None:
    free = available_memory()
    assert free is None or free > 0


@pytest.mark.parametrize(
    ("tasks", "cpus", "cores"),
    [("8(x192)", "5", 5), ("8(x192)", "99", 56), ("8(x192)", "", 7), ("1(x192)", "56", 7), ("", "9", 7)],
    ids=["a task each", "more than the mask allows", "none given", "a task for all", "no Slurm"],
)
def test_the_cores_of_a_process(monkeypatch: pytest.MonkeyPatch, tasks: str, cpus: str, cores: int) -> None:
    """Where Slurm binds a task to its cores, they are not divided again; where it binds none, it has said how many."""
    variables = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "SLURM_LOCALID": "3" if tasks else ""}
    for name, value in {**variables, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_CPUS_PER_TASK": cpus}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(56)))
    assert cores_per_process() == cores


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx512_bf16 sse", True), ("amx_tile amx_bf16", True), ("avx512f avx512_fp16", False), (None, False)],
)
def test_a_cpu_says_whether_it_multiplies_bf16(tmp_path: Path, flags: str | None, expected: bool) -> None:
    (tmp_path / "proc").mkdir()
    if flags is not None:
        (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
    assert multiplies_bf16(tmp_path) is expected
