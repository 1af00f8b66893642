"""The system-wide reservation of a port: a name in the kernel's abstract namespace of unix sockets (Linux).

Lock files keep one user's processes apart, and only those that see the same folder. Such a name is seen by
every user, in every container that shares the network, hence the ports; it can be held by one socket at a
time, and the kernel frees it when that is closed, however its process ends. There is nothing to clean up.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys

from penstock.errors import PortLeaseError

__all__ = ["holder_of_name", "reserve_name"]

_HAS_NAMES = sys.platform == "linux"
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_BACKLOG = 4  # only those who ask for the holder connect, and are never answered


def _name(port: int) -> str:
    return f"\0penstock-port-{port}"


def reserve_name(port: int) -> socket.socket | None:
    """A socket that reserves `port` among penstock's processes until it is closed; None if it is reserved.

    Where the system has no such names, a socket that reserves nothing. Raises `PortLeaseError` where it has
    them and refuses one.
    """
    try:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise PortLeaseError(f"port {port} cannot be reserved: {error}") from error
    if not _HAS_NAMES:
        return name
    try:
        name.bind(_name(port))
        name.listen(_BACKLOG)  # what makes the kernel note the holder's pid and user
    except OSError as error:
        name.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise PortLeaseError(
            f"port {port} cannot be reserved for all users of this machine: binding the abstract unix socket "
            f"@{_name(port)[1:]} gave {error}. Is there a sandbox that forbids it?"
        ) from error
    return name


def holder_of_name(port: int) -> tuple[int, int] | None:
    """Process id and user id of who has reserved `port`; None if nobody has, or the system does not say.

    The process id is 0 if it cannot be seen from here, as from another container.
    """
    if not _HAS_NAMES:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_name(port))
        except (ConnectionRefusedError, BlockingIOError):  # free or not yet listening; or asked too often
            return None
        pid, uid, _ = _CREDENTIALS.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return pid, uid
