# SPDX-License-Identifier: Apache-2.0
"""A seccomp filter: the system calls that a scoring process may not make.

Refused calls return an error, so that a scorer sees an ordinary ``PermissionError``. A list of what
is refused, rather than of what is allowed, since the second depends on the C library's version;
what it must cover is anything that reaches beyond the process: the network, other processes, the
file system's names and attributes, the machine's settings, and ways around the filter itself.
Numbers are those of the kernel's ``unistd.h`` for each architecture.
"""

import ctypes
import errno
import os
import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000  # the other numbering of x86_64

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]
_NR_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16
# linux/bpf_common.h: load a word, jump if equal / at least / any of these bits, return.
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _TSYNC = 1, 1

# name: (x86_64, aarch64); None where the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network, and any socket that could reach another process
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # new processes and threads
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220),
    "execve": (59, 221), "execveat": (322, 281),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "setpgid": (109, 154), "setsid": (112, 157),
    # names and attributes of files; what opens or makes them is in _WRITING_FLAGS or in Landlock
    "truncate": (76, 45), "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "open_by_handle_at": (304, 265),
    # memory that outlives the process or that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "quotactl": (179, 60),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "iopl": (172, None),
    "ioperm": (173, None), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "fanotify_init": (300, 262),
}  # fmt: skip
# Refused as if the kernel had none, so that the C library takes the older call, which is refused by
# its arguments: those of these lie in memory, where a filter cannot look. io_uring would make calls
# that no filter sees.
_MISSING: dict[str, tuple[int, int]] = {
    "clone3": (435, 435), "openat2": (437, 437), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip
# Allowed towards the process itself only: call, argument that names it, whether 0 is itself.
_SELF_ONLY: tuple[tuple[tuple[int, int], int, bool], ...] = (
    ((62, 129), 0, False),  # kill; 0 would be the group
    ((200, 130), 0, False),  # tkill
    ((234, 131), 0, False),  # tgkill
    ((302, 261), 0, True),  # prlimit64
)
# Refused with these values of an argument: call, argument, values.
_REFUSED_ARGUMENTS: tuple[tuple[tuple[int, int], int, tuple[int, ...]], ...] = (
    # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel signal another process
    ((72, 25), 1, (8, 10, 15)),
    # ioctl FIOSETOWN, SIOCSPGRP: the same; TIOCSTI: type into a terminal
    ((16, 29), 1, (0x8901, 0x8902, 0x5412)),
    # prctl PR_SET_PDEATHSIG: outlive the parent
    ((157, 167), 0, (1,)),
)
# open and openat: the argument that holds the flags.
_OPENING: tuple[tuple[tuple[int | None, int | None], int], ...] = (
    ((2, None), 1),
    ((257, 56), 2),
)
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def install(*, refuse_writing: bool) -> None:
    """Refuse the calls above to this process, for good.

    Args:
        refuse_writing: also refuse to open any file for writing, where nothing else does.

    Raises:
        OSError: the kernel or the architecture has no filters.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    code = _program(machine, os.getpid(), refuse_writing)
    libc = ctypes.CDLL(None, use_errno=True)
    forbid_new_privileges(libc)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: u16 len; pointer
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    )
    seccomp = {"x86_64": 317, "aarch64": 277}[machine]
    # TSYNC: threads that libraries have started get the filter as well.
    if libc.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, _TSYNC, program) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refuses a seccomp filter: {os.strerror(number)}")


def forbid_new_privileges(libc: ctypes.CDLL) -> None:
    """Set no_new_privs, which an unprivileged filter or Landlock domain needs.

    Raises:
        OSError: the kernel is too old.
    """
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_NO_NEW_PRIVS")


def _program(machine: str, pid: int, refuse_writing: bool) -> bytes:
    """Return the BPF program; every rule ends in a return or falls through to the next."""
    column = list(_AUDIT_ARCH).index(machine)
    rules = [
        _load(_ARCH_OFFSET),
        _step(_JEQ, _AUDIT_ARCH[machine], 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _load(_NR_OFFSET),
    ]
    if machine == "x86_64":
        rules += [_step(_JGE, _X32_BIT, 0, 1), _refuse(errno.EPERM)]
    for calls, error in ((_REFUSED, errno.EPERM), (_MISSING, errno.ENOSYS)):
        for numbers in calls.values():
            number = numbers[column]
            if number is not None:
                rules += [_step(_JEQ, number, 0, 1), _refuse(error)]
    for self_numbers, argument, zero_too in _SELF_ONLY:
        allowed = (pid, 0) if zero_too else (pid,)
        tests = [_step(_JEQ, value, len(allowed) - i, 0) for i, value in enumerate(allowed)]
        rules += _on_argument(
            self_numbers[column], argument, [*tests, _refuse(errno.EPERM), _step(_RETURN, _ALLOW)]
        )
    for argument_numbers, argument, values in _REFUSED_ARGUMENTS:
        tests = [_step(_JEQ, value, len(values) - i, 0) for i, value in enumerate(values)]
        rules += _on_argument(
            argument_numbers[column],
            argument,
            [*tests, _step(_RETURN, _ALLOW), _refuse(errno.EPERM)],
        )
    if refuse_writing:
        for opening, argument in _OPENING:
            test = _step(_JSET, _WRITING_FLAGS, 1, 0)
            rules += _on_argument(
                opening[column], argument, [test, _step(_RETURN, _ALLOW), _refuse(errno.EACCES)]
            )
    return b"".join([*rules, _step(_RETURN, _ALLOW)])


def _on_argument(number: int | None, argument: int, body: list[bytes]) -> list[bytes]:
    """Run `body` on the low half of an argument of call `number`; it returns in every case."""
    if number is None:
        return []
    # Both architectures are little-endian. The kernel reads ints, so the high half does not count.
    return [_step(_JEQ, number, 0, len(body) + 1), _load(_ARGS_OFFSET + 8 * argument), *body]


def _load(offset: int) -> bytes:
    return _step(_LOAD, offset)


def _refuse(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("@HBBI", code, if_true, if_false, operand)
