"""Among the processes of a user, each port and each CPU has one owner."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fasteners import InterProcessLock

from penstock.workers import claims
from penstock.workers.claims import Claim, CpuClaims, claim, lock_folder
from penstock.workers.plan import Affinity
from penstock.workers.spinning import yield_cpu

from ..children import exit_code_of_fork, waiting_fork
from ..scale import scaled
from ..support import BOUND, until

KIND = "thing"

OTHER = """
import sys
from penstock.workers.claims import Claim, claim
print(isinstance(claim("thing", int(sys.argv[1])), Claim), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_THING_FOLDER", str(tmp_path / "locks"))
    monkeypatch.setattr(claims, "_swept", set())
    return tmp_path / "locks"


@contextmanager
def another_process(script: str, *arguments: object) -> Iterator[tuple[str, int]]:
    """Another process with this script: the line that it prints, and its pid. It is killed at the end."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


@contextmanager
def another_owner(number: int) -> Iterator[tuple[bool, int]]:
    """Another process that tries to claim the number: whether it has got it, and its pid."""
    with another_process(OTHER, number) as (line, pid):
        yield line == "True", pid


def own(number: int) -> Claim:
    got = claim(KIND, number)
    assert isinstance(got, Claim)
    return got


@pytest.mark.slow
def test_a_claim_is_refused_to_all_others_and_they_learn_the_owner(folder: Path) -> None:
    descriptors = os.listdir("/dev/fd")
    mine = own(1)
    assert [path.name for path in folder.iterdir()] == ["1.lock"]
    assert claim(KIND, 1) == (os.getpid(), mine.since), "not twice in one process"
    for _ in range(2):  # a refused claim closes the file in the other process, and not in this one
        with another_owner(1) as (has_it, _):
            assert not has_it
    mine.release()
    mine.release()
    assert not mine.is_active
    assert list(folder.iterdir()) == []
    with another_owner(1) as (has_it, pid):
        assert has_it
        assert claim(KIND, 1) == (pid, (folder / "1.lock").stat().st_mtime)
    assert os.listdir("/dev/fd") == descriptors
    assert not claims.held


@pytest.mark.slow
def test_the_first_claim_of_a_process_removes_the_files_of_killed_ones(folder: Path) -> None:
    with another_owner(1) as (has_it, _), another_owner(2) as (has_other, _):
        assert (has_it, has_other) == (True, True)
    (folder / "a note.txt").touch()
    (folder / "1a.lock").touch()
    assert {path.name for path in folder.iterdir()} == {"1.lock", "2.lock", "a note.txt", "1a.lock"}
    with another_owner(3) as (has_it, _):
        assert has_it
        mine = own(4)
        assert {path.name for path in folder.iterdir()} == {"3.lock", "4.lock", "a note.txt", "1a.lock"}
        mine.release()


@pytest.mark.slow
def test_a_file_that_its_last_owner_removes_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking. The lock on the removed file would not stop a process that makes a new one."""
    trylock = InterProcessLock.trylock

    def remove_and_lock(lock: InterProcessLock) -> None:
        (folder / "1.lock").unlink()
        trylock(lock)

    with monkeypatch.context() as patch:
        patch.setattr(InterProcessLock, "trylock", remove_and_lock)
        assert not isinstance(claim(KIND, 1), Claim)
    mine = own(1)
    with another_owner(1) as (has_it, _):
        assert not has_it
    mine.release()


def test_a_file_that_was_replaced_is_not_removed_and_its_folder_may_be_gone(folder: Path) -> None:
    mine, other = own(1), own(2)
    (folder / "1.lock").unlink()
    (folder / "1.lock").touch()
    mine.release()
    assert (folder / "1.lock").exists()
    shutil.rmtree(folder)
    other.release()
    assert not folder.exists()
    assert not claims.held


@pytest.mark.slow
def test_a_fork_owns_nothing(folder: Path) -> None:
    mine = own(1)

    def in_fork() -> None:
        mine.release()
        assert not mine.is_active
        assert claim(KIND, 1) == (os.getppid(), (folder / "1.lock").stat().st_mtime)

    assert exit_code_of_fork(in_fork) == 0
    with another_owner(1) as (has_it, _):
        assert not has_it
    with waiting_fork():
        mine.release()
        with another_owner(1) as (has_it, _):
            assert has_it, "the fork, which lives, has no part in it"


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


@pytest.mark.parametrize("spoil", [a_link, a_file, open_to_others, someone_elses, no_more_files])
def test_a_folder_that_is_not_safe_is_refused_and_no_file_is_made(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    with pytest.raises(OSError, match=str(folder)):
        claim(KIND, 1)
    assert not claims.held
    for path in (folder, folder.parent / "elsewhere"):
        assert not path.is_dir() or not any(each.is_file() for each in path.iterdir())


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lock: InterProcessLock) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(InterProcessLock, "trylock", refuse)
    with pytest.raises(RuntimeError, match="No locks available"):
        claim(KIND, 1)
    assert not claims.held
    assert chosen(2)[0] == [100, 101], "every process may use every CPU"


def test_all_processes_of_a_user_find_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("PENSTOCK_THING_FOLDER")
    folder = lock_folder(KIND)
    assert folder == Path(f"/tmp/penstock-things-{os.geteuid()}")
    folder.rmdir()


# ---- CPUs ----------------------------------------------------------------------------------


OTHER_RUN = """
import sys
from penstock.workers.claims import CpuClaims
from penstock.workers.plan import Affinity
claims = CpuClaims()
print(*(cpu for cpus in claims.assign(Affinity(), int(sys.argv[1]), (100, 101, 102, 103)) for cpu in cpus), flush=True)
sys.stdin.read()
"""
MASK = (100, 101, 102, 103)


@contextmanager
def another_run(n: int) -> Iterator[list[int]]:
    with another_process(OTHER_RUN, n) as (line, _):
        yield list(map(int, line.split()))


def chosen(n: int) -> tuple[list[int], CpuClaims]:
    cpus = CpuClaims()
    return [cpu for own in cpus.assign(Affinity(), n, MASK) for cpu in own], cpus


def claimed() -> set[int]:
    return {number for kind, number in claims.held if kind == "cpu"}


@pytest.mark.slow
def test_each_run_gets_the_first_cpus_that_are_free() -> None:
    with another_run(1) as first, another_run(2) as second:
        assert (first, second) == ([100], [101, 102])
        cpus, mine = chosen(1)
        assert cpus == [103]
        assert claimed() == {103}
        mine.close()
        mine.close()
        assert chosen(2)[0] == [], "not pinned: one CPU is left for two workers"
        assert claimed() == set()
    cpus, mine = chosen(9)
    assert cpus == [100, 101, 102, 103, 100, 101, 102, 103, 100]
    mine.close()
    assert list(lock_folder("cpu").iterdir()) == [], "those of the killed runs went with the next claims"


@pytest.mark.slow
def test_samplers_of_one_process_share_what_it_has_but_take_others_first() -> None:
    with another_run(2):
        first, first_claims = chosen(1)
        second, second_claims = chosen(1)
        third, third_claims = chosen(2)
        assert (first, second, third) == ([102], [103], [102, 103])
        for each in (first_claims, second_claims):
            each.close()
        assert claimed() == {102, 103}, "the third still uses them"
        third_claims.close()
    assert claimed() == set()


@pytest.mark.slow
def test_what_the_user_says_is_done_and_claimed() -> None:
    mine = CpuClaims()
    with another_run(1):
        # 100 belongs to the other run: both use it
        assert mine.assign(Affinity(cpus=[100, 101]), 2, MASK) == [(100,), (101,)]
        with another_run(1) as third:
            assert third == [102]
    mine.close()
    assert mine.assign(Affinity(pin=False), 2, MASK) == [(), ()]
    assert claimed() == set()


def test_a_cpu_that_is_not_needed_is_not_claimed_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set()
    monkeypatch.setattr(claims, "_is_ours", lambda cpu: tried.add(cpu) or True)  # type: ignore[func-returns-value]
    _, mine = chosen(2)
    assert tried == {100, 101}
    mine.close()


def race(me: int, owners: np.typing.NDArray[np.int64], rounds: np.typing.NDArray[np.int64]) -> None:
    """Claim a CPU, enter it in a table, look whether another process has entered itself, and close; for ever."""
    while True:
        cpus, mine = chosen(1)
        for cpu in cpus:
            before = owners[cpu - MASK[0]]
            owners[cpu - MASK[0]] = me
            yield_cpu()
            if before > 0 or owners[cpu - MASK[0]] != me:
                rounds[0] = -me
            owners[cpu - MASK[0]] = 0
            rounds[me] += 1
        mine.close()


@pytest.mark.slow
def test_processes_that_race_never_share_a_cpu_and_a_killed_one_frees_its_own() -> None:
    n = 6  # for four CPUs
    fork: Any = multiprocessing.get_context("fork")
    memory = fork.RawArray("q", len(MASK) + 1 + n)
    owners, rounds = np.split(np.frombuffer(memory, np.int64), [len(MASK)])
    processes = [fork.Process(target=race, args=(1 + i, owners, rounds), daemon=True) for i in range(n)]
    for process in processes:
        process.start()
    try:
        until(lambda: rounds[0] < 0 or bool(rounds[1:].min() >= scaled(2000, 50)), "many rounds of each")
    finally:  # each holds a CPU or is about to
        for process in processes:
            process.kill()
        for process in processes:
            process.join(BOUND)
            process.close()
    assert rounds[0] == 0, "two processes had one CPU"
    cpus, mine = chosen(len(MASK))
    assert cpus == list(MASK)
    mine.close()
    assert list(lock_folder("cpu").iterdir()) == []
