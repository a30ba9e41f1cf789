"""The seccomp filter, run by an interpreter of classic BPF: on both architectures, whatever this machine is."""

from __future__ import annotations

import errno
import re
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.inference.sandbox.seccomp import _ALLOWED, _CHECKED, seccomp_filter

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS
# What no program may do, as numbers on (x86_64, aarch64).
FORBIDDEN = {
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "userfaultfd": (323, 282),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273), "open_tree": (428, 428),
    "fsopen": (430, 430), "fsmount": (432, 432), "move_mount": (429, 429), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "sync": (162, 81), "personality": (135, 92),
    "seccomp": (317, 277),
}  # fmt: skip


def run_filter(program: bytes, number: int, arch: int, arguments: tuple[int, ...] = (0,) * 6) -> int:
    """What the kernel does with a call: the filter's result."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    instructions = list(struct.iter_unpack("<HBBI", program))
    position = accumulator = 0
    while True:
        operation, if_true, if_false, operand = instructions[position]
        position += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, operand)
            case 0x15:
                position += if_true if accumulator == operand else if_false
            case 0x35:
                position += if_true if accumulator >= operand else if_false
            case 0x45:
                position += if_true if accumulator & operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"unknown operation {operation}")


def _filter(machine: str) -> bytes:
    program = seccomp_filter(machine)
    assert program
    return program


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_listed_calls_are_allowed_and_no_others(machine: str) -> None:
    program, column = _filter(machine), list(ARCHITECTURES).index(machine)
    allowed = {numbers[column] for numbers in _ALLOWED.values()}
    checked = {numbers[column] for numbers in _CHECKED.values()}
    for number in {*range(1200), 2**31, 2**32 - 1} - checked:
        expected = ALLOW if number in allowed else KILL if number >= 2**30 else NO_SUCH_CALL
        assert run_filter(program, number, ARCHITECTURES[machine]) == expected
    for name, numbers in FORBIDDEN.items():
        assert run_filter(program, numbers[column], ARCHITECTURES[machine]) == NO_SUCH_CALL, name


@pytest.mark.parametrize("machine", ARCHITECTURES)
@given(number=st.integers(0, 2**32 - 1), arch=st.integers(0, 2**32 - 1) | st.sampled_from([0x40000003, 0x40000028]))
def test_calls_of_another_architecture_kill(machine: str, number: int, arch: int) -> None:
    if arch != ARCHITECTURES[machine]:
        assert run_filter(_filter(machine), number, arch) == KILL
    assert run_filter(_filter(machine), number | 2**30, ARCHITECTURES[machine]) == KILL  # x32


@pytest.mark.parametrize("machine", ARCHITECTURES)
@given(first=st.integers(0, 2**64 - 1) | st.integers(0, 50), second=st.integers(0, 2**64 - 1) | st.integers(0, 0x6000))
def test_arguments_decide(machine: str, first: int, second: int) -> None:
    """Against the rule in Python. The kernel takes families, flags, requests and ids as 32 bits."""
    column, low = list(ARCHITECTURES).index(machine), first & 0xFFFFFFFF
    namespaces = low & 0x7E020000
    requests = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
    rules = {
        "socket": 0 if low == socket.AF_UNIX else errno.EAFNOSUPPORT,
        "socketpair": 0 if low == socket.AF_UNIX else errno.EAFNOSUPPORT,
        "clone": errno.EPERM if namespaces else 0,
        "ioctl": 0 if second & 0xFFFFFFFF in requests else errno.ENOTTY,
        "prlimit64": 0 if low == 0 else errno.EPERM,
        "keyctl": 0 if (low, second) == (1, 0) else errno.ENOSYS,
    }
    for name, error in rules.items():
        number = _CHECKED[name][column]
        found = run_filter(_filter(machine), number, ARCHITECTURES[machine], (first, second, 0, 0, 0, 0))
        assert found == (0x00050000 | error if error else ALLOW), name


def test_a_machine_without_call_numbers_has_no_filter() -> None:
    assert seccomp_filter("riscv64") is None


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_call_numbers_are_those_of_the_kernels_headers(column: int, header: str) -> None:
    """aarch64 has the numbers of asm-generic."""
    if not Path(header).is_file():
        pytest.skip(f"{header} is not installed")
    text = Path(header).read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    for name, pair in {**_ALLOWED, **_CHECKED, **FORBIDDEN}.items():
        if name in ("memfd_secret", "fadvise64", "newfstatat") and name not in numbers:
            continue
        assert pair[column] == numbers.get(name), name
