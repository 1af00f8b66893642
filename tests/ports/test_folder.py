"""The folder of lock files and what is in it are refused where they cannot be trusted."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import fasteners
import pytest

from penstock import PortLeaseError
from penstock.ports import PortLease, lease_port, leases
from penstock.ports.files import FOLDER_VARIABLE, lock_folder, ports_noted
from penstock.ports.holdings import sweep_lock_files

pytestmark = pytest.mark.xdist_group("ports")


@pytest.fixture
def port() -> int:
    """A port that nobody has."""
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


def test_a_users_processes_find_the_same_folder(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (someone_elses, "belongs to user 65534, and this process is user 0's"),
    ],
)
def test_a_folder_that_cannot_be_trusted(folder: Path, port: int, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    with pytest.raises(PortLeaseError, match=rf"{folder} {message}: remove it, or name another .*{FOLDER_VARIABLE}"):
        lease(port)
    if folder.is_dir():
        assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "deeper"))
    with pytest.raises(PortLeaseError, match=r"cannot be used: No such file or directory"):
        lease(port)


def test_a_planted_link(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    target = folder.parent / "precious"
    (folder / f"{port}.lock").symlink_to(target)
    with pytest.raises(PortLeaseError, match=rf"{port}.lock is a symbolic link, so a lock on it would exclude nobody"):
        lease(port)
    assert not target.exists()
    target.write_text("as it was")
    with pytest.raises(PortLeaseError, match="is a symbolic link"):
        lease(port)
    assert target.read_text() == "as it was"
    (folder / f"{port}.lock").unlink()
    lease(port).release()


def test_a_file_with_a_second_name(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    (folder / "other").touch()
    os.link(folder / "other", folder / f"{port}.lock")
    with pytest.raises(PortLeaseError, match="is not a regular file of this user's with one name"):
        lease(port)


def test_a_pipe_in_the_place_of_a_file(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / f"{port}.lock")
    with pytest.raises(PortLeaseError, match="is not a regular file"):
        lease(port)


@pytest.fixture
def removed_when_locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lock files are removed between being opened and being locked, as often as the list's only number says."""
    times = [0]
    acquire = fasteners.InterProcessLock.acquire

    def removing(lock: fasteners.InterProcessLock, *args: object, **kwargs: object) -> bool:
        if times[0] > 0:
            times[0] -= 1
            os.unlink(lock.path)
        return bool(acquire(lock, *args, **kwargs))

    monkeypatch.setattr(fasteners.InterProcessLock, "acquire", removing)
    return times


def test_a_file_that_its_last_owner_removes_meanwhile(folder: Path, port: int, removed_when_locked: list[int]) -> None:
    removed_when_locked[0] = 2
    with lease(port) as mine:
        assert removed_when_locked == [0]
        assert ports_noted(folder) == [mine.port], "it is the file in the folder that is locked"


def test_a_file_that_is_removed_again_and_again(folder: Path, port: int, removed_when_locked: list[int]) -> None:
    removed_when_locked[0] = 1_000_000
    with pytest.raises(PortLeaseError, match=rf"{port}.lock was removed or replaced 8 times while it was being locked"):
        lease(port)


def test_a_file_that_is_replaced_is_left_alone(folder: Path, port: int) -> None:
    with lease(port) as mine:
        file = folder / f"{port}.lock"
        file.unlink()
        file.write_text("somebody else's")
        mine.release()
        assert file.read_text() == "somebody else's"
        file.unlink()


def test_a_folder_that_has_gone_keeps_nobody_from_releasing(folder: Path, port: int) -> None:
    with lease(port):
        (folder / f"{port}.lock").unlink()
        folder.rmdir()
    assert not folder.exists()
    lease(port).release()


def test_a_file_system_without_locks(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: fasteners.InterProcessLock) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fasteners.InterProcessLock, "trylock", refuse)
    with pytest.raises(PortLeaseError, match=r"cannot be locked: .*No locks available.*a local disk"):
        lease(port)


def test_what_the_dead_have_left_is_removed(folder: Path, port: int) -> None:
    folder.mkdir(mode=0o700)
    for left in (1, 2, 3):
        (folder / f"{left}.lock").write_text(f"{2**22 + 1} 1.0\n")
    (folder / "a note.txt").touch()
    with lease(port):
        sweep_lock_files()
        assert ports_noted(folder) == [port]
    assert [path.name for path in folder.iterdir()] == ["a note.txt"]


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
