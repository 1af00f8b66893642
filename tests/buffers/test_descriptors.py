"""InheritedFd: owns one descriptor, crosses to a child while it is being started, and then only."""

from __future__ import annotations

import os
import pickle
from multiprocessing import reduction, resource_sharer

import pytest

from penstock.buffers.descriptors import InheritedFd


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


@pytest.mark.parametrize("dumps", [pickle.dumps, reduction.ForkingPickler.dumps])
def test_pickling_fails_unless_a_process_is_being_started(dumps: object) -> None:
    owner = InheritedFd(os.memfd_create("test"))
    try:
        with pytest.raises(Exception, match=r"start|spawn|inherit"):
            dumps(owner)  # type: ignore[operator]
    finally:
        owner.close()
        resource_sharer.stop(timeout=10)  # pickling must not have started the standard library's server of descriptors


def test_a_dropped_owner_closes_its_descriptor() -> None:
    fd = os.memfd_create("test")
    InheritedFd(fd)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
