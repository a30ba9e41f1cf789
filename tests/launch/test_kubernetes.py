"""`whet launch --on kubernetes --dry-run`: objects that Kubernetes accepts, and pods that start the run they should."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.config import read_config
from whet.core.errors import WhetError
from whet.launch.kubernetes import dump_objects, object_name, render_objects

DOCS = Path(__file__).parents[2] / "docs"
IMAGE = "launch.kubernetes.image=registry.example.com/team/whet:1"
EVERYTHING = (
    "launch.gpus=8", "launch.env=[HF_TOKEN]", "launch.kubernetes.cpus=64", "launch.kubernetes.memory=512Gi",
    "launch.kubernetes.node_selector={gpu: h100}", "launch.kubernetes.gpu_resource=amd.com/gpu",
)  # fmt: skip

NODES = pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("launch.processes=1",), id="one", marks=pytest.mark.slow),
        pytest.param(("launch.nodes=4", *EVERYTHING), id="four"),
    ],
)
CONTAINER_FIELDS = {"name", "image", "command", "workingDir", "env", "resources", "volumeMounts"}
JOB_SET = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "labels": dict},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int, "rules": [{"action": str, "onJobFailureReasons": list}]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": dict}}],
    },
}  # fmt: skip
"""jobset.x-k8s.io/v1alpha2, as its reference has it (2026-11)."""
TRAIN_JOB = {
    "apiVersion": str, "kind": str, "metadata": {"name": str, "labels": dict},
    "spec": {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {
            "image": str, "command": list, "env": list, "numNodes": int, "numProcPerNode": int,
            "resourcesPerNode": dict,
        },
        "runtimePatches": [{
            "manager": str,
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [{
                "name": str, "template": {"spec": {"template": {"spec": {
                    "volumes": list, "nodeSelector": dict, "containers": [{"name": str, "volumeMounts": list}],
                }}}},
            }]}}},
        }],
    },
}  # fmt: skip
"""trainer.kubeflow.org/v1alpha1 with runtimePatches, as in Kubeflow Trainer 2.2 and later."""


def validate(found: dict[str, Any]) -> None:
    """Against the schemas of Kubernetes."""
    import kubernetes_validate

    kubernetes_validate.validate(found, "1.37", strict=True)


def require_fields(value: Any, table: Any, place: str = "") -> None:
    """Every field is in the table, with this type."""
    if isinstance(table, type):
        assert type(value) is table, f"{place}: {value!r}"
    elif isinstance(table, list):
        for number, each in enumerate(value):
            require_fields(each, table[0], f"{place}[{number}]")
    else:
        assert set(value) <= set(table), f"{place}: {sorted(set(value) - set(table))}"
        for key, each in value.items():
            require_fields(each, table[key], f"{place}.{key}")


def objects_of(recipe: str, *settings: str) -> list[dict[str, Any]]:
    """As kubectl reads what is printed."""
    printed = dump_objects(render_objects(read_config(Path(recipe), [IMAGE, *settings])))
    return list(yaml.safe_load_all(printed))


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [each for each in objects if each["kind"] == kind]
    return found


@NODES
def test_core_objects_are_valid(settings: tuple[str, ...], recipe: str) -> None:
    objects = objects_of(recipe, *settings)
    kinds = ["ConfigMap", "PersistentVolumeClaim", *(["Service"] if len(settings) > 1 else []), "Job"]
    assert [each["kind"] for each in objects] == kinds
    for each in objects:
        validate(each)
    assert set(of_kind(objects, "Job")["spec"]["template"]["spec"]["containers"][0]) <= CONTAINER_FIELDS


def test_the_validator_finds_a_wrong_field(recipe: str) -> None:
    job = of_kind(objects_of(recipe, "launch.gpus=1"), "Job")
    job["spec"]["template"]["spec"]["containers"][0]["workdir"] = "/"
    with pytest.raises(Exception, match="workdir"):
        validate(job)


@pytest.mark.parametrize(("kind", "table"), [("JobSet", JOB_SET), ("TrainJob", TRAIN_JOB)])
@NODES
def test_custom_kinds_have_known_fields(kind: str, table: Any, settings: tuple[str, ...], recipe: str) -> None:
    objects = objects_of(recipe, f"launch.kubernetes.kind={kind.lower()}", "launch.kubernetes.claim=team", *settings)
    assert [each["kind"] for each in objects] == ["ConfigMap", kind]
    found = of_kind(objects, kind)
    require_fields(found, table)
    if kind == "JobSet":  # the Job in it is one of core Kubernetes
        job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job})
    with pytest.raises(AssertionError, match="podTemplateOverride"):
        require_fields({**found, "spec": {**found["spec"], "podTemplateOverrides": []}}, table)


def test_pods_start_the_run_and_meet_at_the_first(recipe: str) -> None:
    objects = objects_of(recipe, "launch.nodes=4", "run.name=My_Run 7", *EVERYTHING)
    job, service = of_kind(objects, "Job"), of_kind(objects, "Service")
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert container["command"] == [
        "python", "-m", "whet", "launch", "/etc/whet/recipe.yaml", "--resume", "launch.nodes=4",
        "launch.rendezvous=my-run-7-0.my-run-7:29400",
    ]  # fmt: skip
    assert pod["subdomain"] == service["metadata"]["name"] == "my-run-7"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert container["resources"]["limits"] == {"amd.com/gpu": "8", "cpu": "64", "memory": "512Gi"}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    ignored, fatal = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored["action"] == "Ignore", "an evicted pod that has saved (75) is replaced: its rule comes first"
    assert fatal["onExitCodes"]["values"] == [1, 2, 75]


def test_the_recipe_in_the_pods_is_the_same(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths as they were given, variables by name, and never a value of launch.env."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "my.jsonl")
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    (tmp_path / "my.jsonl").write_text("{}\n")
    (tmp_path / "my.yaml").write_text(
        "model: {path: builtin:tiny}\ndata: {sources: [{path: '${DATA}'}], max_length: 64}\n"
        "train: {steps: 3, optimizer: {lr: 1e-6}}\n"
    )
    settings = ("launch.gpus=2", "launch.env={TOKEN: hf_othersecretsecret, HF_TOKEN: x}", "run.dir=runs/here")
    objects = objects_of(str(tmp_path / "my.yaml"), *settings)
    text = dump_objects(objects)
    assert "secretsecret" not in text
    assert str(tmp_path) not in text
    (tmp_path / "recipe.yaml").write_text(of_kind(objects, "ConfigMap")["data"]["recipe.yaml"])
    monkeypatch.setenv("TOKEN", "y")
    here, there = read_config(tmp_path / "my.yaml", [IMAGE, *settings]), read_config(tmp_path / "recipe.yaml")
    ours, theirs = (each.model_dump() for each in (here, there))
    assert theirs["launch"].pop("env") == ["TOKEN", "HF_TOKEN"]
    assert ours["launch"].pop("env") != []
    assert ours == theirs
    environment = of_kind(objects, "Job")["spec"]["template"]["spec"]["containers"][0]["env"]
    secrets = [each["name"] for each in environment if "valueFrom" in each]
    assert secrets == ["TOKEN", "HF_TOKEN", "DATA"]


def test_a_train_job_runs_in_the_volume(recipe: str) -> None:
    objects = objects_of(recipe, "launch.kubernetes.kind=trainjob", "launch.nodes=2", "launch.gpus=1",
                         "launch.kubernetes.mount=/my-data")  # fmt: skip
    shell, flag, line = of_kind(objects, "TrainJob")["spec"]["trainer"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert shlex.split(line)[:4] == ["cd", "/my-data", "&&", "exec"]
    assert line.endswith("launch.nodes=2 launch.rendezvous=$PET_MASTER_ADDR:$PET_MASTER_PORT")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["launch.gpus=1"], "launch.kubernetes.image is missing"),
        ([IMAGE], "launch.gpus is missing"),
        ([IMAGE, "launch.gpus=1", "launch.nodes=1-4"], "launch.nodes: 1-4 is a range"),
        ([IMAGE, "launch.gpus=1", "launch.kubernetes.memory=64 GB"], "launch.kubernetes.memory"),
        ([IMAGE, "launch.gpus=1", "launch.kubernetes.claim=My_Claim"], "launch.kubernetes.claim"),
        ([IMAGE, "launch.gpus=1", "launch.kubernetes.mount=data"], "launch.kubernetes.mount"),
        ([IMAGE, "launch.gpus=1", "launch.kubernetes.knd=job"], "Did you mean launch.kubernetes.kind?"),
    ],
)
def test_bad_settings_are_named(settings: list[str], said: str, whet: Any, recipe: str) -> None:
    ended = whet("launch", recipe, "--on", "kubernetes", "--dry-run", *settings)
    assert ended.code == 1
    assert said in ended.err


@pytest.mark.parametrize("name", ["7", "", "---", "Ä", "x" * 90, "a.b_c", "UPPER"])
def test_any_run_has_a_name_for_kubernetes(name: str, recipe: str) -> None:
    found = object_name(read_config(Path(recipe), [f"run.name={json.dumps(name)}"]))
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", found), found


def test_nothing_is_submitted(whet: Any, recipe: str) -> None:
    ended = whet("launch", recipe, "--on", "kubernetes", IMAGE, "launch.gpus=1")
    assert ended.code == 2
    assert "--on kubernetes --dry-run | kubectl apply -f -" in ended.err
    for words in (["--wait"], ["--chain", "2"], ["--notebook"], ["--", "eval", "runs/my"]):
        ended = whet("launch", recipe, "--on", "kubernetes", "--dry-run", IMAGE, "launch.gpus=1", *words)
        assert ended.code == 2
        assert "takes only a recipe" in ended.err
    printed = whet("launch", recipe, "--on", "kubernetes", "--dry-run", IMAGE, "launch.gpus=1")
    assert printed.code == 0
    as_json = whet("launch", recipe, "--on", "kubernetes", "--dry-run", IMAGE, "launch.gpus=1", "--json")
    assert json.loads(as_json.out)["objects"] == list(yaml.safe_load_all(printed.out))
    with pytest.raises(WhetError):
        render_objects(read_config(Path(recipe)))


def test_examples_in_the_docs_are_yaml() -> None:
    page = (DOCS / "clouds.md").read_text()
    sky, dstack = (yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL))
    assert {"name", "num_nodes", "resources", "setup", "run"} <= sky.keys()
    assert dstack["type"] == "task"
    for command in (sky["run"], dstack["commands"][-1]):
        assert "whet launch my.yaml --resume launch.nodes=" in command
        assert "launch.rendezvous=" in command
