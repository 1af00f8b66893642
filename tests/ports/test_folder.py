"""A folder or a lock file that is not safe to use is refused."""

import fcntl
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import PortLeaseError
from penstock.ports import PortLease, lease_port, leases
from penstock.ports.claims import owner_of, remove_stale
from penstock.ports.lock_files import FOLDER_VARIABLE, lock_folder, ports_with_lock_file

pytestmark = pytest.mark.xdist_group("ports")


@pytest.fixture
def port() -> int:
    """A free port."""
    with leases(1) as found:
        return found.ports[0]


@pytest.fixture
def folder(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


def lease(port: int) -> PortLease:
    return lease_port(port, port + 1, timeout=0)


def test_the_folder_is_made_for_its_user_alone(folder: Path, port: int) -> None:
    umask = os.umask(0)
    try:
        with lease(port):
            assert folder.stat().st_mode & 0o7777 == 0o700
            (file,) = folder.iterdir()
            assert file.stat().st_mode & 0o777 == 0o600
            assert file.read_text().split()[0] == str(os.getpid())
    finally:
        os.umask(umask)
    assert list(folder.iterdir()) == []


def test_all_processes_of_a_user_find_the_same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
        monkeypatch.setenv(variable, "/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert lock_folder() == Path(f"/tmp/penstock-ports-{os.geteuid()}")


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def a_file(folder: Path) -> None:
    folder.touch()


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def someone_elses(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the administrator can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 65_534, -1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (a_link, "is a symbolic link"),
        (a_file, "cannot be used: Not a directory"),
        (open_to_others, r"is open to other users \(mode 0750, must be 0700\)"),
        (someone_elses, "belongs to user 65534, but this process runs as user 0"),
    ],
)
def test_a_folder_that_is_not_safe(folder: Path, port: int, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    with pytest.raises(PortLeaseError, match=rf"{folder} {message}: remove it, or name another .*{FOLDER_VARIABLE}"):
        lease(port)
    if folder.is_dir():
        assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_created(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "deeper"))
    with pytest.raises(PortLeaseError, match=r"cannot be used: No such file or directory"):
        lease(port)


def test_a_symbolic_link_in_place_of_a_file(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    target = folder.parent / "precious"
    (folder / f"{port}.lock").symlink_to(target)
    with pytest.raises(
        PortLeaseError, match=rf"{port}.lock is a symbolic link, so a lock on it would not protect the port"
    ):
        lease(port)
    assert not target.exists()
    target.write_text("unchanged")
    with pytest.raises(PortLeaseError, match="is a symbolic link"):
        lease(port)
    assert target.read_text() == "unchanged"
    (folder / f"{port}.lock").unlink()
    lease(port).release()


def test_a_file_with_a_second_hard_link(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    (folder / "other").touch()
    os.link(folder / "other", folder / f"{port}.lock")
    with pytest.raises(PortLeaseError, match="is not a regular file of this user with one hard link"):
        lease(port)


def test_a_pipe_in_place_of_a_file(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / f"{port}.lock")
    with pytest.raises(PortLeaseError, match="is not a regular file"):
        lease(port)


@pytest.fixture
def removed_when_locked(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lock file is removed after it is opened and before it is locked, as often as the list's only number says."""
    times = [0]
    lockf = fcntl.lockf

    def remove_and_lock(file: io.FileIO, operation: int) -> None:
        if times[0] > 0:
            times[0] -= 1
            os.unlink(folder / f"{port}.lock")
        lockf(file, operation)

    monkeypatch.setattr(fcntl, "lockf", remove_and_lock)
    return times


def test_a_file_that_its_last_owner_removes_at_the_same_time(
    folder: Path, port: int, removed_when_locked: list[int]
) -> None:
    removed_when_locked[0] = 2
    with lease(port) as mine:
        assert removed_when_locked == [0]
        assert ports_with_lock_file() == [mine.port], "the locked file is the one in the folder"


def test_a_file_that_is_removed_again_and_again(folder: Path, port: int, removed_when_locked: list[int]) -> None:
    removed_when_locked[0] = 1_000_000
    with pytest.raises(PortLeaseError, match=rf"{port}.lock was removed or replaced 8 times while it was being locked"):
        lease(port)


def test_a_file_that_was_replaced_is_not_removed(folder: Path, port: int) -> None:
    with lease(port) as mine:
        file = folder / f"{port}.lock"
        file.unlink()
        file.write_text("another file")
        mine.release()
        assert file.read_text() == "another file"
        file.unlink()


def test_a_lease_is_released_after_its_folder_was_removed(folder: Path, port: int) -> None:
    with lease(port):
        (folder / f"{port}.lock").unlink()
        folder.rmdir()
    assert not folder.exists()
    lease(port).release()


def test_a_file_system_without_locks(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: io.FileIO, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(PortLeaseError, match=r"cannot be locked: .*No locks available.*a local disk"):
        lease(port)


def test_lock_files_of_killed_processes_are_removed(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    for stale in (1, 2, 3):
        (folder / f"{stale}.lock").write_text(f"{2**22 + 1} 1.0\n")
    (folder / "a note.txt").touch()
    with lease(port):
        remove_stale()
        assert ports_with_lock_file() == [port]
    assert [path.name for path in folder.iterdir()] == ["a note.txt"]


def test_a_bad_file_does_not_stop_the_removal_of_others(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "1.lock").symlink_to("/nowhere")
    (folder / "2.lock").touch()
    remove_stale()
    assert ports_with_lock_file() == [1]


@pytest.mark.parametrize("text", ["", "1", "not a note", "not anote", f"{2**22 + 1} 1.0"])
def test_a_file_that_names_no_running_process(folder: Path, port: int, text: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / f"{port}.lock").write_text(text)
    assert owner_of(port) is None


def test_no_descriptor_is_left(folder: Path, port: int) -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    before = descriptors()
    with lease(port), pytest.raises(PortLeaseError):
        lease(port)
    (folder / f"{port}.lock").symlink_to("/nowhere")
    with pytest.raises(PortLeaseError):
        lease(port)
    assert descriptors() == before
