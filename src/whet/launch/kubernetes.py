"""Kubernetes objects of a run: a Job of core Kubernetes, a JobSet, or a TrainJob of Kubeflow Trainer.

Each pod is one machine of `whet launch`, with a process per GPU. The recipe is in a ConfigMap; data, runs and caches
are on a volume. The objects are printed for kubectl: whet does not talk to a cluster.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from whet.config import Config
from whet.core.errors import WhetError
from whet.core.yaml import dump_yaml

_PORT = 29400
_RECIPE_FOLDER = "/etc/whet"
_SAVE_SECONDS = 300
"""How long a pod that has to go may take to save, before Kubernetes kills it."""
_MAX_NAME = 40  # pods append indices, and a host name has at most 63 characters

Object = dict[str, Any]


def render_objects(config: Config) -> list[Object]:
    """What `kubectl apply` takes, in this order."""
    kubernetes, nodes = config.launch.kubernetes, _nodes(config)
    if kubernetes.image is None:
        raise WhetError(
            "launch.kubernetes.image is missing: the container image in which pods run. Give one whose `python` has "
            "whet: launch.kubernetes.image=REGISTRY/IMAGE:TAG"
        )
    if config.launch.gpus is None and config.launch.processes is None:
        raise WhetError(
            "launch.gpus is missing: Kubernetes gives a pod the GPUs that it requests. Set it to the number of each "
            "node, such as launch.gpus=8; without GPUs, launch.processes=1"
        )
    objects = [_config_map(config)]
    if kubernetes.claim is None:
        objects.append(_claim(config, nodes))
    if kubernetes.kind == "trainjob":
        return [*objects, _train_job(config, nodes)]
    if kubernetes.kind == "jobset":
        return [*objects, _job_set(config, nodes)]
    return [*objects, *([_service(config)] if nodes > 1 else []), _job(config, nodes)]


def dump_objects(objects: list[Object]) -> str:
    """The objects as YAML documents."""
    return yaml.dump_all(objects, Dumper=_BlockDumper, sort_keys=False, explicit_start=True, width=120)


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and repeats what occurs twice instead of naming it by an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def object_name(config: Config) -> str:
    """The run's name as Kubernetes allows it: lower-case letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", (config.run.name or "").lower())[:_MAX_NAME].strip("-")
    if not name or not name[0].isalpha():
        name = f"whet-{name}".strip("-")
    return name


def _nodes(config: Config) -> int:
    least, most = config.launch.node_range()
    if least != most:
        raise WhetError(
            f"launch.nodes: {config.launch.nodes} is a range, which needs --on slurm. Give the number of nodes"
        )
    return least


def _metadata(config: Config) -> Object:
    labels = {"app.kubernetes.io/name": "whet", "app.kubernetes.io/instance": object_name(config)}
    return {"name": object_name(config), "labels": labels}


# Core objects.


def _config_map(config: Config) -> Object:
    recipe = dump_yaml(config.portable())
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(config), "data": {"recipe.yaml": recipe}}


def _claim(config: Config, nodes: int) -> Object:
    spec = {
        "accessModes": ["ReadWriteMany" if nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": config.launch.kubernetes.storage}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(config), "spec": spec}


def _service(config: Config) -> Object:
    """Gives the pods host names, under which they find the first one."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/instance": object_name(config)},
        "ports": [{"name": "rendezvous", "port": _PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(config), "spec": spec}


def _job(config: Config, nodes: int) -> Object:
    name = object_name(config)
    spec = _job_spec(config, nodes, f"{name}-0.{name}", config.launch.max_restarts)
    if nodes > 1:
        spec["template"]["spec"]["subdomain"] = name
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(config), "spec": spec}


def _job_spec(config: Config, nodes: int, host: str, backoff_limit: int) -> Object:
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {
            "rules": [
                # a pod that was evicted or preempted has saved: another one continues
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # wrong input (1, 2), and a run that someone stopped (75), would end in the same way again
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "node", "operator": "In", "values": [1, 2, 75]},
                },
            ]
        },
        "template": {
            "metadata": {"labels": _metadata(config)["labels"]},
            "spec": _pod_spec(config, _arguments(nodes, f"{host}:{_PORT}")),
        },
    }


def _arguments(nodes: int, rendezvous: str) -> list[str]:
    several = [f"launch.nodes={nodes}", f"launch.rendezvous={rendezvous}"] if nodes > 1 else []
    return ["python", "-m", "whet", "launch", f"{_RECIPE_FOLDER}/recipe.yaml", "--resume", *several]


def _pod_spec(config: Config, command: list[str]) -> Object:
    kubernetes = config.launch.kubernetes
    container = {
        "name": "node",
        "image": kubernetes.image,
        "command": command,
        "workingDir": kubernetes.mount,
        "env": _environment(config),
        "resources": _resources(config),
        "volumeMounts": _volume_mounts(config),
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SAVE_SECONDS,
        "containers": [container],
        "volumes": _volumes(config),
    }
    return spec | ({"nodeSelector": dict(kubernetes.node_selector)} if kubernetes.node_selector else {})


def _environment(config: Config) -> list[Object]:
    """Values are never written: variables that the configuration names come from a Secret."""
    mount, secret = config.launch.kubernetes.mount, f"{object_name(config)}-env"
    named = config.variable_names()
    folders = {"WHET_CACHE": f"{mount}/cache", "WHET_MODELS": f"{mount}/models", "HF_HOME": f"{mount}/huggingface"}
    return [
        *({"name": name, "value": value} for name, value in folders.items() if name not in named),
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for name in named),
    ]


def _resources(config: Config) -> Object:
    launch, kubernetes = config.launch, config.launch.kubernetes
    limits = {
        kubernetes.gpu_resource: None if launch.gpus is None else str(launch.gpus),
        "cpu": None if kubernetes.cpus is None else str(kubernetes.cpus),
        "memory": kubernetes.memory,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return {"requests": dict(given), "limits": given} if given else {}


def _volumes(config: Config) -> list[Object]:
    name = object_name(config)
    return [
        {"name": "recipe", "configMap": {"name": name}},
        {"name": "storage", "persistentVolumeClaim": {"claimName": config.launch.kubernetes.claim or name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # containers have 64 MiB, too little for NCCL
    ]


def _volume_mounts(config: Config) -> list[Object]:
    return [
        {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True},
        {"name": "storage", "mountPath": config.launch.kubernetes.mount},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


# Custom kinds.


def _job_set(config: Config, nodes: int) -> Object:
    """jobset.x-k8s.io/v1alpha2: if a pod is lost, all of them start again, and the run continues."""
    name = object_name(config)
    job = _job_spec(config, nodes, f"{name}-node-0-0.{name}", 0)
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": config.launch.max_restarts,
            "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(config), "spec": spec}


def _train_job(config: Config, nodes: int) -> Object:
    """trainer.kubeflow.org/v1alpha1, for the runtime torch-distributed, whose torch plugin names the first pod."""
    launch, pod = config.launch, _pod_spec(config, [])
    command = shlex.join(_arguments(nodes, "HOST:PORT")).replace("HOST:PORT", "$PET_MASTER_ADDR:$PET_MASTER_PORT")
    trainer = {
        "image": launch.kubernetes.image,
        "command": ["/bin/sh", "-c", f"cd {shlex.quote(launch.kubernetes.mount)} && exec {command}"],
        "env": _environment(config),
        "numNodes": nodes,
        "numProcPerNode": launch.gpus or launch.processes,
        "resourcesPerNode": _resources(config),
    }
    patch: Object = {key: pod[key] for key in ("volumes", "nodeSelector") if key in pod}
    patch["containers"] = [{"name": "node", "volumeMounts": _volume_mounts(config)}]
    pods = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed",
        },
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "whet", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [pods]}}}}
        ],
    }  # fmt: skip
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(config),
        "spec": spec,
    }
