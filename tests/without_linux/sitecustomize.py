"""Takes from Python what macOS lacks, in each process with this folder in PYTHONPATH. It needs PENSTOCK_PORTABLE=1."""

import os
import resource
import select
import signal
import socket

MISSING = {
    os: "memfd_create eventfd eventfd_read eventfd_write pidfd_open sched_getaffinity sched_setaffinity waitid pipe2 "
    "posix_fallocate sched_yield MFD_CLOEXEC MFD_ALLOW_SEALING EFD_CLOEXEC EFD_NONBLOCK",
    resource: "prlimit",
    select: "epoll",
    signal: "SIGRTMAX SIGRTMIN pidfd_send_signal",
    socket: "SOCK_SEQPACKET MSG_CMSG_CLOEXEC SO_PEERCRED",
}
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):  # an older Python has fewer of them
            delattr(module, name)
