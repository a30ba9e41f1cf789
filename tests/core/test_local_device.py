"""Which device a process uses, and over which backend processes communicate."""

from __future__ import annotations

import pytest
import torch

from whet.core import distributed
from whet.core.distributed import get_local_device
from whet.core.errors import WhetError


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a single GPU, as far as torch tells."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    return monkeypatch


def test_a_process_without_a_gpu_of_its_own_is_refused_and_told_of_the_setting(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setenv("LOCAL_RANK", "1")
    with pytest.raises(WhetError) as refused:
        get_local_device()
    assert str(refused.value) == (
        "this machine has 1 cuda device, and process 2 needs one of its own. Start fewer processes (launch.gpus=1; "
        "torchrun: --nproc-per-node 1), or let processes share one, for tests: launch.share_gpu=true"
    )


@pytest.mark.parametrize(("rank", "devices", "device"), [(0, 1, 0), (3, 1, 0), (1, 2, 1), (3, 2, 1)])
def test_processes_may_share_gpus(one_gpu: pytest.MonkeyPatch, rank: int, devices: int, device: int) -> None:
    one_gpu.setattr(torch.accelerator, "device_count", lambda: devices)
    one_gpu.setenv("LOCAL_RANK", str(rank))
    assert get_local_device(share_gpu=True) == torch.device("cuda", device)


def test_run_device_selects_a_kind_or_is_refused(one_gpu: pytest.MonkeyPatch) -> None:
    assert get_local_device(kind="cuda") == get_local_device() == torch.device("cuda", 0)
    assert get_local_device(kind="cpu") == torch.device("cpu")
    with pytest.raises(WhetError, match=r"run\.device: mps: torch .* finds no such device here, only cuda\..*=auto"):
        get_local_device(kind="mps")
    one_gpu.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(WhetError, match=r"run\.device: cuda: torch .* finds no such device here, only cpu"):
        get_local_device(kind="cuda")


def test_a_task_that_slurm_bound_to_its_own_gpu_uses_it(one_gpu: pytest.MonkeyPatch) -> None:
    """Each of the four tasks of a node sees one GPU."""
    for name, value in {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "SLURM_GPUS_ON_NODE": "4"}.items():
        one_gpu.setenv(name, value)
    assert get_local_device() == torch.device("cuda", 0)
    one_gpu.setenv("SLURM_GPUS_ON_NODE", "1")
    with pytest.raises(WhetError, match="process 4 needs one of its own"):
        get_local_device()


def test_shared_gpus_communicate_over_gloo_and_whet_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = torch.device("cuda", 0)
    assert distributed._backend_for(gpu, share_gpu=False) == "cpu:gloo,cuda:nccl"
    assert capsys.readouterr().err == ""
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert distributed._backend_for(gpu, share_gpu=True) == "gloo"
    assert capsys.readouterr().err.count("for tests") == 1
    assert distributed._backend_for(torch.device("cpu"), share_gpu=True) == "gloo"
    assert capsys.readouterr().err == ""
