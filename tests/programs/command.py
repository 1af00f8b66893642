"""`python -m penstock`, for a process that has imported it already. It enters the network of the file in
ENTERED_NETWORK, if there is one."""

import ctypes
import os
import sys

from penstock.__main__ import main
from penstock.workers import launcher

CLONE_NEWNET = 0x40000000  # of setns(2)


if __name__ == "__main__":
    if "ENTERED_NETWORK" in os.environ:
        network = os.open(os.environ["ENTERED_NETWORK"], os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(network)
    sys.path[0] = os.getcwd()
    launcher.shared_supervisor([])  # it is a fork: so now, while this process has one thread
    sys.exit(main())
