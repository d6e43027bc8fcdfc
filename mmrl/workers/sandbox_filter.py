"""A seccomp filter: which system calls a strict process may not make.

Run by path in the process that becomes the strict one: the standard library alone, Linux on x86-64 or 64-bit Arm.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FORBIDDEN: dict[str, tuple[int, int | None]] = {
    # The network: no socket can be made, nor a ring that makes one; pairs of connected ones, which pools use, can.
    "socket": (41, 198),
    # Other processes, and the machine.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "fanotify_init": (300, 262),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    # Another view of the file system.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # Memory that no limit of the process counts, or that outlives it.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
UNKNOWN_TO_CALLER: dict[str, tuple[int, int | None]] = {
    "clone3": (435, 435),  # its flags cannot be looked at; the C library then uses clone
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
METADATA: dict[str, tuple[int, int | None]] = {
    # What Landlock does not see: rights, owners and times of files that are not the process's own to change.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    # A group of its own, in which the end of the process would not find a child.
    "setsid": (112, 157),
    "setpgid": (109, 154),
}
OWN_PROCESS_ONLY: dict[str, tuple[int, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
FORKS: dict[str, tuple[int, int | None]] = {"fork": (57, None), "vfork": (58, None)}
CLONE, IOCTL = (56, 220), (16, 29)
NEWEST_CALL = 462
"""Calls beyond this number are too new to have been judged; they are answered as a kernel without them would."""
CLONE_NEW, CLONE_THREAD = 0x7E020080, 0x10000
TERMINAL_WRITES = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX and TIOCSETD, which type into a terminal or change what it does."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16


def supported() -> bool:
    """Whether the filter knows this machine's calls."""
    return os.uname().machine in ARCHITECTURES


def new_privileges_off() -> None:
    """Give up what programs with special rights would grant; a filter needs it."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def forbid_calls(own_namespaces: bool, forks: bool) -> None:
    """Install the filter for this process and all that it starts."""
    program = b"".join(_program(own_namespaces, forks, os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))

    class Header(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    header = Header(len(program) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))


def _program(own_namespaces: bool, forks: bool, pid: int) -> list[bytes]:
    machine = os.uname().machine
    column = 0 if machine == "x86_64" else 1
    program = [
        _step(LOAD, ARCHITECTURE_AT),
        _step(EQUAL, ARCHITECTURES[machine], 1, 0),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER_AT),
        _step(AT_LEAST, NEWEST_CALL + 1, 0, 1),  # those of x86's other table lie there too
        _error(errno.ENOSYS),
    ]
    forbidden = {**FORBIDDEN, **({} if own_namespaces else METADATA), **({} if forks else FORKS)}
    for table, code in ((forbidden, errno.EPERM), (UNKNOWN_TO_CALLER, errno.ENOSYS)):
        for numbers in table.values():
            program += _when(numbers[column], [_error(code)])
    program += _when(CLONE[column], _clone(forks))
    program += _when(IOCTL[column], _unless_argument(1, TERMINAL_WRITES, allow=False))
    if not own_namespaces:
        for numbers in OWN_PROCESS_ONLY.values():
            program += _when(numbers[column], _unless_argument(0, (0, pid), allow=True))
    return [*program, _step(RETURN, ALLOW)]


def _when(number: int | None, steps: list[bytes]) -> list[bytes]:
    """Steps for one call, the last of which decides."""
    return [] if number is None else [_step(EQUAL, number, 0, len(steps)), *steps]


def _clone(forks: bool) -> list[bytes]:
    steps = [_step(LOAD, ARGUMENTS_AT), _step(ANY_BIT, CLONE_NEW, 0, 1), _error(errno.EPERM)]
    if not forks:
        steps += [_step(ANY_BIT, CLONE_THREAD, 1, 0), _error(errno.EPERM)]
    return [*steps, _step(RETURN, ALLOW)]


def _unless_argument(place: int, values: tuple[int, ...], allow: bool) -> list[bytes]:
    """Allow, or forbid, a call of which an argument's lower half is one of the values."""
    matched, otherwise = _step(RETURN, ALLOW), _error(errno.EPERM)
    if not allow:
        matched, otherwise = otherwise, matched
    steps = [_step(LOAD, ARGUMENTS_AT + 8 * place)]
    for value in values:
        steps += [_step(EQUAL, value, 0, 1), matched]
    return [*steps, otherwise]


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _error(number: int) -> bytes:
    return _step(RETURN, ERROR | number)


def _prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, *[0] * (4 - len(arguments)))]
    if ctypes.CDLL(None, use_errno=True).prctl(ctypes.c_int(option), *values) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
