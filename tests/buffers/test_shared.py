"""Shared memory and descriptors: what one process writes the other sees, nothing is copied, nothing is left behind."""

from __future__ import annotations

import errno
import gc
import math
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import reduction, resource_sharer
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock import system
from penstock.buffers import ArraySpec, NamedArrays, NamedMemory
from penstock.buffers.descriptors import InheritedFd, dumps, loads, receive, send
from penstock.buffers.shared import shared_mappings
from penstock.errors import ConfigError
from penstock.workers.supervisor import SupervisedProcess, Supervisor

from .. import children
from ..children import exit_code_of_fork
from ..scale import examples, methods
from ..support import leave_memory

MIB = 2**20


def specs_of(*shapes: tuple[int, ...], dtype: Any = np.float64) -> NamedArrays:
    return NamedArrays({f"a{i}": ArraySpec(shape, np.dtype(dtype)) for i, shape in enumerate(shapes)})


def descriptors() -> dict[int, str]:
    gc.collect()
    return children.descriptors()


def link(fd: int) -> str:
    """What Linux says of an open descriptor."""
    return os.readlink(f"/proc/self/fd/{fd}")


@contextmanager
def opened(memory: Any) -> Iterator[Any]:
    try:
        yield memory
    finally:
        memory.close()


# ---- across processes --------------------------------------------------------------------------

#: What the child does. `exec` is found by every child, whereas a function of a test module is not.
CHILD = """
cells, word = memory.arrays.cells, memory.arrays.nested.word
import os
os.write(theirs.fd, bytes([cells[0]]))    # written before the process was started
os.read(theirs.fd, 1)
cells[2] = cells[1]         # written while it ran
word[...] = 7
"""


def check_sharing(method: str, memory: NamedMemory) -> None:
    cells, word = memory.arrays.cells, memory.arrays.nested.word
    ours, given = socket.socketpair()
    theirs = InheritedFd(given.detach())
    cells[0] = 11
    child = SupervisedProcess("child", exec, CHILD, {"memory": memory, "theirs": theirs}, spawns=method == "spawn")
    with closing(Supervisor(is_fork=method == "fork")) as supervisor, closing(child), ours:
        child.start(supervisor)
        theirs.close()
        ours.settimeout(60)
        assert ours.recv(1) == b"\x0b"
        cells[1] = 22
        ours.send(b".")
        child.join(60)
        assert child.exitcode == 0
    assert cells.tolist() == [11, 22, 22, 0]
    assert word == 7


SPECS = NamedArrays(
    cells=ArraySpec((4,), np.dtype(np.int64)), nested=NamedArrays(word=ArraySpec((), np.dtype(np.float32)))
)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Pythons that warn wherever threads run
@pytest.mark.parametrize("has_memfd", [pytest.param(True, marks=pytest.mark.linux("memfd_create")), False])
@methods("fork", "spawn")
def test_parent_and_child_write_and_see_the_same_cells(
    monkeypatch: pytest.MonkeyPatch, start_method: str, has_memfd: bool
) -> None:
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = descriptors()
    with opened(NamedMemory(SPECS, shared=True, purpose="a test")) as memory:
        assert not has_memfd or any("memfd" in link(fd) for fd in descriptors().keys() - before)
        assert not memory.arrays.cells.any()
        check_sharing(start_method, memory)


def sent(memory: NamedMemory) -> NamedMemory:
    """What a worker that is started with `memory` gets."""
    data, fds = dumps(memory)
    assert len(data) < 2000
    twin: NamedMemory = loads(data, [os.dup(fd) for fd in fds])
    return twin


def test_a_worker_keeps_one_descriptor_for_its_mapping() -> None:
    """A fork of the worker needs it, to make the mapping private."""
    with opened(NamedMemory(specs_of((4,)), shared=True, purpose="a test")) as memory:
        before = descriptors()
        twin = sent(memory)
        # Before Python 3.13, a mapping keeps a duplicate too.
        assert len(descriptors()) - len(before) == 1 + (sys.version_info < (3, 13))
        assert twin.arrays.a0.tolist() == [0] * 4


def test_memory_of_this_process_alone_refuses_to_travel() -> None:
    memory = NamedMemory(specs_of((4,)), shared=False, purpose="a test")
    with pytest.raises(TypeError, match="allocate them with shared=True"):
        pickle.dumps(memory)


# ---- layout ------------------------------------------------------------------------------------

array_specs = st.builds(
    ArraySpec,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    st.sampled_from([np.bool_, np.uint8, np.int64, np.float16, np.float32, [("t", "i8"), ("x", "u1")]]).map(np.dtype),
)
spec_trees = st.dictionaries(
    st.sampled_from("abcdef"),
    st.one_of(array_specs, st.dictionaries(st.sampled_from("uvw"), array_specs, min_size=1).map(NamedArrays)),
).map(NamedArrays)


@examples(30, 90)
@given(spec_trees, st.booleans())
@example(NamedArrays(), False)
@example(NamedArrays(), True)
def test_arrays_are_zeroed_apart_and_as_specified(specs: NamedArrays, shared: bool) -> None:
    with opened(NamedMemory(specs, shared=shared, purpose="a test")) as memory:
        arrays = [array for _, array in memory.arrays.leaves()]
        assert [name for name, _ in memory.arrays.leaves()] == [name for name, _ in specs.leaves()]
        assert [(a.shape, a.dtype) for a in arrays] == [(spec.shape, spec.dtype) for _, spec in specs.leaves()]
        assert all(not array.view(np.uint8).any() for array in map(np.atleast_1d, arrays) if array.size)
        for number, array in enumerate(arrays, 1):
            array[...] = np.full(array.nbytes, number, np.uint8).view(array.dtype).reshape(array.shape)
        for number, array in enumerate(arrays, 1):
            assert set(array.tobytes()) <= {number}
        assert memory.nbytes >= sum(array.nbytes for array in arrays)
        assert memory.nbytes == 0 or arrays
        if shared:
            assert all(array.ctypes.data % 64 == 0 for array in arrays if array.size), "no two share a cache line"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(1.5, np.float64), ([True, False], np.bool_), (np.uint8(3), np.uint8), (np.zeros((4, 0, 2), "f2"), np.float16)],
)
@pytest.mark.parametrize("leading", [(), (3,), (5, 2)])
def test_a_spec_is_taken_from_anything_like_an_array_behind_leading_dimensions(
    given: Any, dtype: Any, leading: tuple[int, ...]
) -> None:
    spec = ArraySpec.like(given, *leading)
    assert spec == ArraySpec((*leading, *np.shape(given)), np.dtype(dtype))
    assert spec.nbytes == math.prod(leading) * np.asarray(given).nbytes


# ---- allocation --------------------------------------------------------------------------------


@pytest.mark.linux("memfd_create and posix_fallocate")
def test_a_block_is_anonymous_and_its_pages_are_taken_at_once() -> None:
    before = descriptors()
    with opened(NamedMemory(specs_of((3 * MIB,), dtype=np.uint8), shared=True, purpose="a test")):
        assert (new := descriptors().keys() - before)
        assert all(link(fd).startswith("/memfd:penstock") for fd in new)
        assert all(os.fstat(fd).st_blocks * 512 >= 3 * MIB for fd in new)
        assert not any(os.get_inheritable(fd) for fd in new)


def test_too_large_a_block_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_memory(monkeypatch, MIB)
    monkeypatch.setattr(system, "anonymous_memory", None)
    with pytest.raises(ConfigError, match=r"a large buffer needs 3\.00 MiB .* 1\.00 MiB are free"):
        NamedMemory(specs_of((3 * MIB,), dtype=np.uint8), shared=True, purpose="a large buffer")


def test_memory_that_runs_out_all_the_same_is_a_clear_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(system, "reserve", full)
    before = descriptors()
    with pytest.raises(ConfigError, match=r"a large buffer needs 1,048,576 bytes .* No space left") as caught:
        NamedMemory(specs_of((MIB,), dtype=np.uint8), shared=True, purpose="a large buffer")
    assert isinstance(caught.value.__cause__, OSError)
    assert descriptors() == before


def test_a_time_limit_of_the_user_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may raise TimeoutError at any moment. It is an OSError, but not the system's."""

    def handler(*_: Any) -> None:
        raise TimeoutError("my time is up")

    monkeypatch.setattr(system, "reserve", handler)
    before = descriptors()
    with pytest.raises(TimeoutError, match="my time is up"):
        NamedMemory(specs_of((4,), dtype=np.uint8), shared=True, purpose="a buffer")
    assert descriptors() == before


# ---- the end -----------------------------------------------------------------------------------


def test_views_outlive_closing_and_keep_the_contents() -> None:
    memory = NamedMemory(specs_of((4,)), shared=True, purpose="a test")
    memory.arrays.a0[1] = 3
    memory.close()
    memory.arrays.a0[2] = 4
    assert memory.arrays.a0.tolist() == [0, 3, 4, 0]


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_dropping_the_views_gives_every_descriptor_back_closed_or_not(closes: bool) -> None:
    before = descriptors()
    memories = [NamedMemory(specs_of((100,), (3, 3)), shared=True, purpose="a test") for _ in range(5)]
    n_open = len(descriptors())
    assert n_open > len(before)
    if closes:
        memories[0].close()
        assert len(descriptors()) < n_open, "at once"
    del memories
    left = {fd: link for fd, link in descriptors().items() if fd not in before}
    for fd in left:
        os.close(fd)
    assert left == {}


def test_a_private_mapping_keeps_its_values_and_sends_none() -> None:
    with opened(NamedMemory(specs_of((4,), (0,)), shared=True, purpose="a test")) as memory:
        array = memory.arrays.a0
        array[:] = 7

        def in_fork() -> None:
            for mapping in list(shared_mappings):
                mapping.make_private()
            assert array.tolist() == [7] * 4
            array[:] = 8
            assert array.tolist() == [8] * 4

        assert exit_code_of_fork(in_fork) == 0
        assert array.tolist() == [7] * 4


def test_close_closes_the_descriptor_once() -> None:
    fd = system.anonymous_file("test")
    owner = InheritedFd(fd)
    assert owner.fileno() == fd
    owner.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other = system.anonymous_file("test")  # takes the number that was freed
    try:
        owner.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_a_closed_owner_has_no_finalizer_in_which_python_would_drop_a_ctrl_c() -> None:
    owner = InheritedFd(system.anonymous_file("test"))
    assert hasattr(owner, "__del__")
    owner.close()
    assert not hasattr(owner, "__del__")


@pytest.mark.parametrize("dumps", [pickle.dumps, reduction.ForkingPickler.dumps])
def test_pickling_fails_unless_a_process_is_being_started(dumps: object) -> None:
    owner = InheritedFd(system.anonymous_file("test"))
    try:
        with pytest.raises(Exception, match=r"start|spawn|inherit"):
            dumps(owner)  # type: ignore[operator]
    finally:
        owner.close()
        resource_sharer.stop(timeout=10)  # pickling must not have started the standard library's server of descriptors


def test_dumps_lists_the_descriptors_and_loads_puts_others_in_their_places() -> None:
    first, second = (InheritedFd(system.anonymous_file("test")) for _ in range(2))
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
        dumps([InheritedFd(system.anonymous_file("test")), lambda: 0])
    with pytest.raises(TypeError, match="being started"):
        pickle.dumps(InheritedFd(system.anonymous_file("test")))


@pytest.mark.parametrize("n", [0, 1, 100, 101, 350])
def test_any_number_of_descriptors_goes_through_a_socket(n: int) -> None:
    """One message can have 253 at most."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        owners = [InheritedFd(system.anonymous_file("test")) for _ in range(n)]
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
