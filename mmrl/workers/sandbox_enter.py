"""Inside bubblewrap: sets limits and a filter of system calls, then becomes the given program.

    python -I -S sandbox_enter.py '{"limits": {...}, ...}' program argument ...

Run by path with the standard library and libseccomp alone. A step that fails ends it with code 71 and one line on
standard error before the program starts: no promise is silently missing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import sys
from typing import Any

FAILED = 71
FORBIDDEN = """
    socket ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_open pidfd_getfd pidfd_send_signal
    move_pages migrate_pages setpriority ioprio_set perf_event_open bpf userfaultfd keyctl add_key request_key
    fanotify_init reboot kexec_load kexec_file_load init_module finit_module delete_module acct quotactl quotactl_fd
    swapon swapoff syslog vhangup settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname iopl
    ioperm modify_ldt uselib mount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsconfig fsmount
    fspick mount_setattr open_by_handle_at name_to_handle_at memfd_create memfd_secret shmget msgget semget mq_open
"""
"""System calls that reach the network, other processes, the machine, another view of the file system, or memory not
covered by any limit. Connected pairs of sockets, which pools use, remain possible."""
ABSENT = "clone3 io_uring_setup io_uring_enter io_uring_register"
"""System calls treated as if the kernel did not have them: their arguments are in memory, which a filter cannot
read."""
CLONE_THREAD = 0x10000
NEW_NAMESPACES = (1 << bit for bit in (7, 17, 25, 26, 27, 28, 29, 30))
TERMINAL_WRITES = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX and TIOCSETD, which type into a terminal or change its behaviour."""
ALLOW, ERROR, MASKED_EQUAL = 0x7FFF0000, 0x00050000, 7


class _Comparison(ctypes.Structure):
    """libseccomp's scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def main(settings: dict[str, Any], command: list[str]) -> None:
    """Enter the sandbox and become the command."""
    for name, (soft, hard) in settings["limits"].items():
        kind = getattr(resource, name)
        # A limit may be lowered but not raised above that of the parent.
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
    forbid_calls(settings["forks"])
    if settings["report_to"] >= 0:
        os.write(settings["report_to"], b"entered")
        os.close(settings["report_to"])
    # This process becomes the program: nothing of the sandbox's set-up stays in between.
    os.execv(command[0], command)


def forbid_calls(forks: bool) -> None:
    """Install the filter for this process and all its children; libseccomp provides the numbers of the calls."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    # Everything is allowed but what is listed: a list of what programs need would break with every library.
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))

    def refuse(names: str, code: int, *comparisons: tuple[int, int, int]) -> None:
        rules = (_Comparison * len(comparisons))(*(_Comparison(a, MASKED_EQUAL, m, v) for a, m, v in comparisons))
        for name in names.split():
            number = library.seccomp_syscall_resolve_name(name.encode())
            action = ctypes.c_uint32(ERROR | code)
            # Negative: a call that this machine's kernel does not have, and cannot be made.
            if number >= 0 and library.seccomp_rule_add_array(context, action, number, len(rules), rules) != 0:
                raise OSError(0, f"libseccomp does not accept a rule for {name}")

    refuse(FORBIDDEN, errno.EPERM)
    refuse(ABSENT, errno.ENOSYS)
    for flag in NEW_NAMESPACES:
        # By flag: clone starts threads too, and only new namespaces are refused.
        refuse("clone", errno.EPERM, (0, flag, flag))
    for write in TERMINAL_WRITES:
        refuse("ioctl", errno.EPERM, (1, 0xFFFFFFFF, write))
    if not forks:
        refuse("fork vfork", errno.EPERM)
        # Threads have CLONE_THREAD; without it, clone starts a process.
        refuse("clone", errno.EPERM, (0, CLONE_THREAD, 0))
    if library.seccomp_load(context) != 0:
        raise OSError(0, "the kernel does not accept a filter of system calls")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]), sys.argv[2:])
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(FAILED)
