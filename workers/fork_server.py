"""What the fork server imports first. If it exits after the main process, it removes its socket and that folder.

Usually the main process does this itself. If it is killed, the guardian does it, as long as there is a sampler.
Before each fork, the fork server excludes all its objects from garbage collection, and lets linear algebra use one
thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import time
from multiprocessing import forkserver
from typing import Any

from penstock.workers.affinity import limit_blas

_PARENT_SECONDS = 1.0  # the end of its pipe comes a moment before the end of the main process
_POLL_SECONDS = 0.01


def _remove_socket(pid: int, parent: int) -> None:
    server: Any = forkserver._forkserver
    address = server._forkserver_address
    if os.getpid() != pid or not isinstance(address, str) or address.startswith("\0"):
        return
    if hasattr(sys, "last_value"):  # an exception ends the fork server, and the main process lives
        return
    deadline = time.monotonic() + _PARENT_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if os.getppid() != parent:
        with contextlib.suppress(OSError):
            os.unlink(address)
        with contextlib.suppress(OSError):  # another socket may be in it
            os.rmdir(os.path.dirname(address))


def _before_fork(pid: int) -> None:
    if os.getpid() == pid:  # not in forks of the workers: garbage that is frozen there would stay for ever
        limit_blas()
        gc.freeze()


atexit.register(_remove_socket, os.getpid(), os.getppid())
# Otherwise garbage collection in each worker searches the imported modules, which also copies their memory.
os.register_at_fork(before=functools.partial(_before_fork, os.getpid()))
