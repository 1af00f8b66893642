"""Takes from Python what macOS lacks, in each process with this folder in PYTHONPATH. It needs PENSTOCK_PORTABLE=1.

Code of penstock that opens a file below /proc or /sys gets an error. That of other libraries may: they know macOS.
"""

import os
import resource
import select
import signal
import socket
import sys

MISSING = {
    os: "memfd_create eventfd eventfd_read eventfd_write pidfd_open sched_getaffinity sched_setaffinity waitid pipe2 "
    "posix_fallocate posix_fadvise sched_yield fdatasync copy_file_range splice MFD_CLOEXEC MFD_ALLOW_SEALING "
    "EFD_CLOEXEC EFD_NONBLOCK",
    resource: "prlimit",
    select: "epoll",
    signal: "SIGRTMAX SIGRTMIN pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "SOCK_SEQPACKET MSG_CMSG_CLOEXEC SO_PEERCRED",
}
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):  # an older Python has fewer of them
            delattr(module, name)

#: Modules that open files for others.
BETWEEN = ("os", "glob", "shutil", "tempfile", "pathlib", "pathlib._local")


def refuse_proc(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    if f"{os.fsdecode(arguments[0])}/".startswith(("/proc/", "/sys/")):
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in BETWEEN:
            frame = frame.f_back
        if (name := str(frame.f_globals.get("__name__"))).partition(".")[0] == "penstock":
            raise RuntimeError(f"{name} opens {arguments[0]!r}, which macOS does not have")


sys.addaudithook(refuse_proc)
