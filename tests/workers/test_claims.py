"""A claim has one owner on this machine, and what each of its two parts adds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from fasteners import InterProcessLock

from penstock.workers import claims
from penstock.workers.claims import claim, lock_folder, owner_of, remove_stale

from ..children import waiting_fork
from ..scale import some

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have only the lock")

# Other test processes on this machine have other names.
KIND = f"thing{os.getpid()}"
FOLDER = f"PENSTOCK_{KIND.upper()}_FOLDER"

OTHER = """
import os, sys
from penstock.workers import claims
claims._HAS_NAMES = sys.argv[1] == "True"
if sys.argv[3]:
    os.setuid(int(sys.argv[3]))
got = claims.claim(sys.argv[4], sys.argv[2])
print(got is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture(params=[True, False], ids=["lock and name", "lock alone"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(claims, "_HAS_NAMES", request.param and sys.platform == "linux")
    return claims._HAS_NAMES


@contextmanager
def another_process(
    label: str, names: bool = True, before: Sequence[str] = (), user: str = "", **environ: str
) -> Iterator[tuple[bool, int]]:
    """Another process that tries to claim `label`: whether it has got it, and its pid. It is killed at the end."""
    command = [*before, sys.executable, "-c", OTHER, str(names), label, user, KIND]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline() == "True\n", process.pid
        finally:
            process.kill()


@pytest.mark.slow
def test_a_claim_has_one_owner_until_it_is_released(folder: Path, names: bool) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    assert isinstance(mine._lock, InterProcessLock)
    assert [(path.name, path.stat().st_size) for path in folder.iterdir()] == [("1.lock", 0)]
    assert claim(KIND, "1") is None, "not twice in one process"
    owner = owner_of(KIND, "1")
    assert owner == (os.getpid(), os.geteuid(), mine.since)
    for _ in range(2):  # a refused claim closes the file in the other process, and not in this one
        with another_process("1", names) as (has_it, _):
            assert not has_it
    mine.release()
    mine.release()
    assert not mine.is_active
    assert list(folder.iterdir()) == []
    assert owner_of(KIND, "1") is None
    with another_process("1", names) as (has_it, pid):
        assert has_it
        assert claim(KIND, "1") is None
        owner = owner_of(KIND, "1")
        assert owner is not None
        assert owner[:2] == (pid if names else 0, os.geteuid())
        assert owner.since == (folder / "1.lock").stat().st_mtime


@pytest.mark.slow
def test_a_killed_owner_leaves_an_empty_file_that_blocks_nothing(folder: Path, names: bool) -> None:
    with another_process("1", names) as (has_it, _), another_process("2", names) as (has_other, _):
        assert (has_it, has_other) == (True, True)
    assert sorted(path.name for path in folder.iterdir()) == ["1.lock", "2.lock"]
    os.utime(folder / "1.lock", (1, 1))
    mine = claim(KIND, "1")
    assert mine is not None
    assert (folder / "1.lock").stat().st_mtime > 1, "it tells since when the new owner has it"
    remove_stale(KIND)
    assert [path.name for path in folder.iterdir()] == ["1.lock"], "this process's own file stays"
    with another_process("1", names) as (has_it, _):
        assert not has_it
    mine.release()
    assert list(folder.iterdir()) == []


def test_the_first_claim_of_a_process_removes_the_files_of_killed_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_swept", set())
    folder.mkdir(mode=0o700)
    (folder / "7.lock").touch()
    (folder / "a note.txt").touch()
    mine = claim(KIND, "1")
    assert mine is not None
    assert sorted(path.name for path in folder.iterdir()) == ["1.lock", "a note.txt"]
    mine.release()


@pytest.mark.slow
def test_a_file_that_its_last_owner_removes_at_the_same_time(
    folder: Path, names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking. The lock on the removed file would not stop a process that makes a new one."""
    trylock = InterProcessLock.trylock

    def remove_and_lock(lock: InterProcessLock) -> None:
        (folder / "1.lock").unlink()
        trylock(lock)

    with monkeypatch.context() as patch:
        patch.setattr(InterProcessLock, "trylock", remove_and_lock)
        assert claim(KIND, "1") is None
    mine = claim(KIND, "1")
    assert mine is not None
    with another_process("1", names) as (has_it, _):
        assert not has_it
    mine.release()


def test_a_file_that_was_replaced_is_not_removed(folder: Path) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    (folder / "1.lock").unlink()
    (folder / "1.lock").touch()
    mine.release()
    assert (folder / "1.lock").exists()


def test_it_is_released_after_its_folder_was_removed(folder: Path, names: bool) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    shutil.rmtree(folder)
    mine.release()
    assert not folder.exists()


@pytest.mark.slow
def test_a_fork_owns_nothing(folder: Path, names: bool) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    child = os.fork()
    if child == 0:
        mine.release()
        os._exit(mine.is_active or claim(KIND, "1") is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with another_process("1", names) as (has_it, _):
        assert not has_it
    mine.release()


@pytest.mark.slow
def test_a_fork_does_not_prolong_a_claim(folder: Path, names: bool) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    with waiting_fork():
        mine.release()
        with another_process("1", names) as (has_it, _):
            assert has_it


@pytest.mark.slow
def test_a_claim_of_a_thread_outlives_the_thread(folder: Path, names: bool) -> None:
    got = []
    thread = threading.Thread(target=lambda: got.append(claim(KIND, "1")))
    thread.start()
    thread.join()
    with another_process("1", names) as (has_it, _):
        assert not has_it
    (mine,) = got
    assert mine is not None
    mine.release()


# ---- what the name adds --------------------------------------------------------------------


@linux
@pytest.mark.slow
def test_the_name_holds_between_containers_that_share_the_network_but_no_folder(folder: Path, tmp_path: Path) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    elsewhere = {FOLDER: str(tmp_path / "elsewhere")}
    with another_process("1", True, **elsewhere) as (has_it, _):
        assert not has_it
    with another_process("1", False, **elsewhere) as (has_it, _):
        assert has_it, "the lock alone does not hold"
    mine.release()


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator can be two users")
@pytest.mark.slow
def test_the_name_holds_between_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    label, user = "1", "65534"
    mine = claim(KIND, label)
    assert mine is not None
    try:
        for names in (True, False):
            with another_process(label, names, user=user) as (has_it, _):
                assert has_it == (not names), "the lock alone does not hold"
    finally:
        mine.release()
        shutil.rmtree(f"/tmp/penstock-{KIND}s-{user}")
        lock_folder(KIND).rmdir()


@linux
@pytest.mark.slow
def test_the_name_holds_if_the_lock_file_is_removed(folder: Path) -> None:
    mine = claim(KIND, "1")
    assert mine is not None
    for names in (True, False):
        (folder / "1.lock").unlink(missing_ok=True)
        with another_process("1", names) as (has_it, _):
            assert has_it == (not names), "the lock alone does not hold"
    mine.release()


# ---- what the lock adds --------------------------------------------------------------------


def _in_a_network_of_its_own() -> list[str]:
    command = ["unshare", "--net"]
    can = shutil.which("unshare") and subprocess.run([*command, "true"], check=False).returncode == 0
    return command if can else []


@linux
@pytest.mark.slow
def test_the_lock_holds_between_containers_that_share_the_folder_but_no_network(folder: Path) -> None:
    if not (before := _in_a_network_of_its_own()):
        pytest.skip("this process may not make a network namespace")
    mine = claim(KIND, "1")
    assert mine is not None
    with another_process("1", before=before) as (has_it, _):
        assert not has_it
    with another_process("1", before=before, **{FOLDER: "/dev/null/locks"}) as (has_it, _):
        assert has_it, "the name alone does not hold"
    mine.release()


# ---- a folder that cannot be used ----------------------------------------------------------


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


def no_more_files(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "1.lock").mkdir()  # so that the file cannot be opened


SPOILED = [a_link, a_file, open_to_others, someone_elses, no_more_files]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("spoil", some(SPOILED, 3))
def test_without_a_folder_the_name_alone_decides(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    mine = claim(KIND, "1")
    assert mine is not None
    for path in (folder, folder.parent / "elsewhere"):
        assert not path.is_dir() or not any(each.is_file() for each in path.iterdir()), "it makes no file there"
    with another_process("1") as (has_it, _):
        assert not has_it
    mine.release()
    with another_process("1") as (has_it, _):
        assert has_it


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_system_without_names_needs_a_folder(
    folder: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_HAS_NAMES", False)
    spoil(folder)
    with pytest.raises(OSError, match=f"the lock file {folder}/1.lock cannot be used: "):
        claim(KIND, "1")
    assert not claims._claims


def test_a_file_system_without_locks(folder: Path, names: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: InterProcessLock) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(InterProcessLock, "trylock", refuse)
    if not names:
        with pytest.raises(OSError, match=r"cannot be used: .*No locks available"):
            claim(KIND, "1")
        return
    mine = claim(KIND, "1")
    assert mine is not None
    assert claim(KIND, "1") is None
    mine.release()


@pytest.mark.parametrize("given", ["", "PENSTOCK_PORT_FOLDER"])
def test_all_processes_of_a_user_find_the_same_folder(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
        monkeypatch.setenv(variable, "/nowhere")
    for kind in ("PORT", "CPU"):
        monkeypatch.delenv(f"PENSTOCK_{kind}_FOLDER")
    if given:
        monkeypatch.setenv(given, "/somewhere")
    assert lock_folder("cpu") == Path(f"/tmp/penstock-cpus-{os.geteuid()}")
    assert lock_folder("port") == Path("/somewhere" if given else f"/tmp/penstock-ports-{os.geteuid()}")


@pytest.mark.slow
def test_no_descriptor_is_left(folder: Path, names: bool) -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    before = descriptors()
    with another_process("2", names) as (has_it, _):
        during = descriptors()
        assert has_it
        assert claim(KIND, "2") is None
        mine = claim(KIND, "1")
        assert mine is not None
        assert len(descriptors() - during) == 1 + names
        mine.release()
        assert descriptors() == during
    assert descriptors() == before
