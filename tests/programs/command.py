"""`python -m penstock`, for a process that has imported it already. The workers that it launches are forks too. It
enters the network of the file in ENTERED_NETWORK, if there is one."""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from penstock.__main__ import main
from penstock.workers import child

CLONE_NEWNET = 0x40000000  # of setns(2)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """The workers that this process launches are forks."""
    starter: Any = sys.modules["starter"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (server := os.fork()) == 0:  # now, while this process has one thread
        ours.close()
        if (request := starter.serve(theirs)) is not None:
            starter.become(request)
            child.run_child(request.kept[0])
        os._exit(0)
    theirs.close()

    def launch(_: object, *, pass_fds: list[int], stdin: int, start_new_session: bool) -> Any:
        return starter.Child([__file__], pass_fds=pass_fds, stdin=stdin)

    vars(child)["subprocess"] = SimpleNamespace(Popen=launch, PIPE=subprocess.PIPE)
    try:
        with ours, starter.using(ours):
            yield
    finally:
        os.waitpid(server, 0)


if __name__ == "__main__":
    if "ENTERED_NETWORK" in os.environ:
        network = os.open(os.environ["ENTERED_NETWORK"], os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(network)
    sys.path[0] = os.getcwd()
    with forking():
        sys.exit(main())
