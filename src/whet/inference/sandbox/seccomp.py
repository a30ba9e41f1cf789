"""The system calls that generated code may make, as a seccomp filter: a program in classic BPF that the kernel runs at
each call. bubblewrap installs it (`--seccomp`), and without bubblewrap the sandbox itself.

The filter lists what Python and its standard library use. Any other call does not exist for the program (ENOSYS), those
of future kernels included: no mounts and namespaces, no keys, no shared memory beside the counted address space (memfd,
SysV), no tracing of processes, no io_uring, bpf or perf. Calls of another ABI (32-bit, x32) kill it.
"""

from __future__ import annotations

import errno
import socket
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name: (number on x86_64, number on aarch64, which lacks the calls that have a successor).
_ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None),
    "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172),
    "sendfile": (40, 71), "connect": (42, 203), "accept": (43, 202), "sendto": (44, 206), "recvfrom": (45, 207),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210), "bind": (49, 200), "listen": (50, 201),
    "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "exit": (60, 93), "wait4": (61, 260),
    "kill": (62, 129), "uname": (63, 160), "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None),
    "creat": (85, None), "link": (86, None), "unlink": (87, None), "symlink": (88, None), "readlink": (89, None),
    "chmod": (90, None), "fchmod": (91, 52), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "setpgid": (109, 154), "getppid": (110, 173), "getpgrp": (111, None), "setsid": (112, 157),
    "getgroups": (115, 158), "setgroups": (116, 159), "setresuid": (117, 147), "getresuid": (118, 148),
    "setresgid": (119, 149), "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "utime": (132, None), "mknod": (133, None), "statfs": (137, 43), "fstatfs": (138, 44), "getpriority": (140, 141),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "prctl": (157, 167), "arch_prctl": (158, None), "setrlimit": (160, 164),
    "gettid": (186, 178), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "tkill": (200, 130), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "epoll_create": (213, None), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "tgkill": (234, 131), "utimes": (235, None), "waitid": (247, 95), "openat": (257, 56),
    "mkdirat": (258, 34), "mknodat": (259, 33), "fchownat": (260, 54), "futimesat": (261, None),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37), "symlinkat": (266, 36),
    "readlinkat": (267, 78), "fchmodat": (268, 53), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "utimensat": (280, 88), "epoll_pwait": (281, 22), "eventfd": (284, None),
    "fallocate": (285, 47), "accept4": (288, 242), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70), "recvmmsg": (299, 243),
    "sendmmsg": (307, 269), "getcpu": (309, 168), "renameat2": (316, 276), "getrandom": (318, 278),
    "membarrier": (324, 283), "copy_file_range": (326, 285), "preadv2": (327, 286), "pwritev2": (328, 287),
    "statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436), "faccessat2": (439, 439),
    "epoll_pwait2": (441, 441),
}  # fmt: skip

# Calls whose arguments decide.
_CHECKED = {
    "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "keyctl": (250, 219),
    "prlimit64": (302, 261),
}  # fmt: skip
_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
JOIN_SESSION_KEYRING = 1

# Operations of classic BPF, offsets in struct seccomp_data, and results of a filter (linux/filter.h, linux/seccomp.h).
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, (16, 24)
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000  # set in the call numbers of the x32 ABI

_Instruction = tuple[int, int, int, int]
"""Operation, how many instructions to skip if it is true and if it is false, operand."""


def seccomp_filter(machine: str) -> bytes | None:
    """The filter as an array of `struct sock_filter`; None for a machine that it has no call numbers for."""
    if machine not in _AUDIT_ARCH:
        return None
    column = list(_AUDIT_ARCH).index(machine)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, check in _argument_checks().items():
        program += [(_JUMP_EQUAL, 0, len(check), _CHECKED[name][column]), *check]
    program.append((_RETURN, 0, 0, _FAIL | errno.ENOSYS))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _argument_checks() -> dict[str, list[_Instruction]]:
    """What follows when a call has been recognized. The kernel uses 32 bits of these arguments, but for pointers."""
    first, second = _ARGUMENTS
    return {
        "ioctl": _allow_values(second, _IOCTLS, errno.ENOTTY),
        "socket": _allow_values(first, (socket.AF_UNIX,), errno.EAFNOSUPPORT),
        "socketpair": _allow_values(first, (socket.AF_UNIX,), errno.EAFNOSUPPORT),
        "prlimit64": _allow_values(first, (0,), errno.EPERM),  # of this process
        "clone": [
            (_LOAD, 0, 0, first),
            (_JUMP_SET, 1, 0, _NAMESPACE_FLAGS),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
        ],
        "keyctl": [  # a new, empty session keyring: the name is NULL
            (_LOAD, 0, 0, first),
            (_JUMP_EQUAL, 0, 5, JOIN_SESSION_KEYRING),
            (_LOAD, 0, 0, second),
            (_JUMP_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, second + 4),
            (_JUMP_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        ],
    }


def _allow_values(argument: int, values: tuple[int, ...], error: int) -> list[_Instruction]:
    check: list[_Instruction] = [(_LOAD, 0, 0, argument)]
    for value in values:
        check += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*check, (_RETURN, 0, 0, _FAIL | error)]
