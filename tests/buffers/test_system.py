"""system.py: what macOS does and Linux does not, which the twins must handle."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import system
from penstock.buffers import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory


@pytest.fixture(autouse=True)
def _portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "PORTABLE", True)


def test_descriptors_that_did_not_fit_are_lost_and_the_message_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """XNU raises EMSGSIZE then, and keeps the data."""
    ours, theirs = system.connection()
    with ours, theirs:
        system.send(theirs, b"fork 3")

        def refuse(*_: object) -> Any:
            raise OSError(errno.EMSGSIZE, "Message too long")

        with monkeypatch.context() as patch:
            patch.setattr(socket, "recv_fds", refuse)
            assert system.receive(ours, 2) == (b"fork 3", [])
        system.send(theirs, b"ended 1")
        assert system.receive(ours, 2) == (b"ended 1", [])


def test_a_name_of_shared_memory_is_short_enough_for_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """PSHMNAMLEN of XNU is 31."""
    import _posixshmem

    names, shm_open = [], _posixshmem.shm_open
    monkeypatch.setattr(_posixshmem, "shm_open", lambda path, *how: names.append(path) or shm_open(path, *how))
    NamedMemory(NamedArrays({"a": ArraySpec.like(0.0, 3)}), shared=True, purpose="a test").close()
    assert [len(name) <= 31 for name in names] == [True]


def test_the_open_descriptors_are_all_but_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = system.open_descriptors()
    memory = NamedMemory(NamedArrays({"a": ArraySpec.like(0.0, 3)}), shared=True, purpose="a test")
    with contextlib.closing(memory), open(tmp_path / "file", "w") as file, socket.socket() as connection:
        more = {fd: what for fd, what in system.open_descriptors().items() if before.get(fd) != what}
        assert more == {
            file.fileno(): str(tmp_path / "file"),
            connection.fileno(): f"srwxrwxrwx, inode {os.fstat(connection.fileno()).st_ino}",
        }
        # On macOS, shared memory has no kind, and nothing but a file has a link.
        real = os.fstat
        own = real(memory._descriptor.fd).st_ino if memory._descriptor else 0

        def fstat(fd: int) -> Any:
            status = real(fd)
            mode = stat.S_IMODE(status.st_mode) if status.st_ino == own else status.st_mode
            links = status.st_nlink if stat.S_ISREG(mode) else 0
            return SimpleNamespace(st_mode=mode, st_nlink=links, st_ino=status.st_ino)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", fstat)
            found = system.open_descriptors()
        assert {fd: found.get(fd) for fd in more} == more
        assert not found.keys() & {memory._descriptor.fd if memory._descriptor else -1}


def test_the_limit_of_files_is_never_lowered_and_never_above_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for before, needed, after in (150, 100, 150), (150, 160, 160), (150, hard + 1, hard):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            assert system.allow_files(needed) == after
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
