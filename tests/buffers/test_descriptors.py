"""InheritedFd: owns one descriptor, which `dumps` lists for a child, and nothing else pickles."""

from __future__ import annotations

import os
import pickle
import socket
from multiprocessing import reduction, resource_sharer

import pytest

from penstock.buffers.descriptors import InheritedFd, dumps, loads, receive, send


def test_close_closes_the_descriptor_once() -> None:
    fd = os.memfd_create("test")
    owner = InheritedFd(fd)
    assert owner.fileno() == fd
    owner.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other = os.memfd_create("test")  # takes the number that was freed
    try:
        owner.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_a_closed_owner_has_no_finalizer_in_which_python_would_drop_a_ctrl_c() -> None:
    owner = InheritedFd(os.memfd_create("test"))
    assert hasattr(owner, "__del__")
    owner.close()
    assert not hasattr(owner, "__del__")


@pytest.mark.parametrize("dumps", [pickle.dumps, reduction.ForkingPickler.dumps])
def test_pickling_fails_unless_a_process_is_being_started(dumps: object) -> None:
    owner = InheritedFd(os.memfd_create("test"))
    try:
        with pytest.raises(Exception, match=r"start|spawn|inherit"):
            dumps(owner)  # type: ignore[operator]
    finally:
        owner.close()
        resource_sharer.stop(timeout=10)  # pickling must not have started the standard library's server of descriptors


def test_dumps_lists_the_descriptors_and_loads_puts_others_in_their_places() -> None:
    first, second = (InheritedFd(os.memfd_create("test")) for _ in range(2))
    data, fds = dumps({"two": [second, second], "one": first})
    assert fds == [second.fd, first.fd]
    with pytest.raises(TypeError, match="being started"):  # outside of it, as before
        pickle.dumps(first)
    duplicates = [os.dup(fd) for fd in fds]
    twin = loads(data, duplicates)
    assert twin["two"][0] is twin["two"][1]
    assert [twin["two"][0].fd, twin["one"].fd] == duplicates


def test_an_object_that_cannot_be_pickled_leaves_no_list() -> None:
    with pytest.raises(Exception, match="pickle"):
        dumps([InheritedFd(os.memfd_create("test")), lambda: 0])
    with pytest.raises(TypeError, match="being started"):
        pickle.dumps(InheritedFd(os.memfd_create("test")))


@pytest.mark.parametrize("n", [0, 1, 100, 101, 350])
def test_any_number_of_descriptors_goes_through_a_socket(n: int) -> None:
    """One message can have 253 at most."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        owners = [InheritedFd(os.memfd_create("test")) for _ in range(n)]
        send(sender, [owner.fd for owner in owners])
        received = [InheritedFd(fd) for fd in receive(receiver, n)]
        assert [os.fstat(fd.fd).st_ino for fd in received] == [os.fstat(fd.fd).st_ino for fd in owners]


def test_descriptors_that_have_not_arrived_are_counted() -> None:
    receiver, sender = socket.socketpair()
    with receiver, sender:
        send(sender, [sender.fileno()] * 3)
        sender.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=r"received 3 of 4 descriptors: .* too many open files"):
            receive(receiver, 4)
