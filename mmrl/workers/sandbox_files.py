"""What a strict process sees of the file system: Landlock's rules and a mount namespace.

Run by path in the process that becomes the strict one: the standard library alone, Linux.
"""

from __future__ import annotations

import ctypes
import os
import struct

LANDLOCK_NEEDED = 3
"""Landlock's version from which it sees every way to change a file's content (Linux 6.2)."""
SCOPED_VERSION, NETWORK_VERSION, DEVICE_VERSION = 6, 4, 5
READ_RIGHTS, FILE_RIGHTS, WRITE_RIGHTS = 0b1101, 0b111 | 1 << 14 | 1 << 15, (1 << 15) - 1
"""Execute, read and list; those that a single file has; everything but device control."""
CREATE_RULES, ADD_RULE, RESTRICT = 444, 445, 446
MOUNT_SETATTR = 442
O_PATH = getattr(os, "O_PATH", 0o10000000)

READABLE = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/sys/devices/system"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/etc/fonts", "/etc/mime.types", "/etc/locale.alias"),
)
"""Programs, libraries and what they look up; no home, no data, no secrets of services."""
DEVICES = ("null", "zero", "full", "random", "urandom")

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    *(1, 2, 4, 8, 32, 4096, 16384),
    1 << 18,
)
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID = 1, 2


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without it."""
    return max(0, _libc().syscall(CREATE_RULES, None, 0, 1))


def allow_only(folder: str, readable: list[str]) -> None:
    """Leave this process, and all that it starts, a folder to write in and what programs need to read."""
    version = landlock_version()
    handled = (1 << 15) - 1 | (1 << 15 if version >= DEVICE_VERSION else 0)
    handled &= ~(1 << 14) if version < LANDLOCK_NEEDED else ~0
    handled &= ~(1 << 13) if version < 2 else ~0
    network = 0b11 if version >= NETWORK_VERSION else 0
    scoped = 0b11 if version >= SCOPED_VERSION else 0
    attributes = struct.pack("=QQQ", handled, network, scoped)
    size = 24 if version >= SCOPED_VERSION else 16 if version >= NETWORK_VERSION else 8
    rules = _call(CREATE_RULES, attributes, ctypes.c_size_t(size), 0)
    for path in (*READABLE, *readable):
        _allow(rules, path, READ_RIGHTS & handled)
    for device in DEVICES:
        _allow(rules, f"/dev/{device}", 0b110 & handled)
    _allow(rules, folder, WRITE_RIGHTS & handled)
    _call(RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    """Add a rule for a path, where it exists."""
    try:
        handle = os.open(path, O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= FILE_RIGHTS
    try:
        _call(ADD_RULE, rules, 1, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def private_mounts(folder: str, folder_bytes: int) -> None:
    """In a mount namespace: make everything read-only but a folder in memory; own devices and processes."""
    carried = _contents(folder)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={folder_bytes},mode=700")
    stage = os.path.join(folder, "dev")
    os.mkdir(stage)
    _mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NOEXEC, "size=64k,mode=755")
    for device in DEVICES:
        with open(os.path.join(stage, device), "x"):
            pass
        _mount(f"/dev/{device}", os.path.join(stage, device), None, MS_BIND)
    _mount(stage, "/dev", None, MS_BIND | MS_REC)
    attributes = struct.pack("=QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    _call(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={folder_bytes},mode=700")
    for name, data in carried.items():
        with open(os.path.join(folder, name), "xb") as file:
            file.write(data)
    _own_processes()


def _own_processes() -> None:
    try:
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:  # parts of /proc are hidden from this container, then it may not be shown anew
        _mount("tmpfs", "/proc", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k")


def _contents(folder: str) -> dict[str, bytes]:
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    code = _libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {source or kind or 'flags'} on {target}: {os.strerror(number)}")


def _call(number: int, *arguments: object) -> int:
    found = int(_libc().syscall(number, *arguments))
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"system call {number}: {os.strerror(error)}")
    return found


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
