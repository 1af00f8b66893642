"""The supervisor alone: whatever ends, is interrupted or is refused, at any moment, nothing is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from penstock import system
from penstock.buffers.descriptors import InheritedFd
from penstock.workers.supervisor import SUPERVISOR_ENDED, SupervisedProcess, Supervisor

from ..children import waiting_fork
from ..process.support import SLACK, gone_after, is_running
from ..scale import pairs, scaled, some
from ..support import BOUND, until
from . import supervised
from .supervised import sleep, sleep_with_child, sleep_with_children, start

LEFT_SECONDS = 2.0 * SLACK  # until nothing is left
HOWS = ["exec", "spawn", "fork"]

pytestmark = [
    pytest.mark.timeout(scaled(600, 60)),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of Pythons that warn wherever threads run
]


@contextlib.contextmanager
def supervising(*preload: str, is_fork: bool = False) -> Iterator[Supervisor]:
    supervisor = Supervisor(preload, is_fork=is_fork)
    try:
        yield supervisor
    finally:
        supervisor.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with supervising() as made:
        yield made


@pytest.mark.parametrize("how", HOWS)
def test_a_supervisor_may_open_more_files_than_the_main_process_and_a_worker_as_many(how: str) -> None:
    """The main process may raise its limit when the supervisor runs already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = 200, 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0], hard))
        with supervising(is_fork=how == "fork") as supervisor:
            for limit in (*limits, limits[0]):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                asked = start(
                    supervisor, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 10, spawns=how == "spawn"
                )
                assert ended(asked) == limit // 10
            if hasattr(resource, "prlimit"):
                assert resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Pipe:
    """The lines that workers write."""

    def __init__(self) -> None:
        self.reader, self.writer = map(InheritedFd, os.pipe())
        self._text = b""

    def pids(self, n: int) -> list[int]:
        """The numbers of the next `n` lines."""
        while self._text.count(b"\n") < n:
            assert select.select([self.reader], [], [], BOUND)[0], "a worker has not written"
            self._text += os.read(self.reader.fd, 4096)
        *lines, self._text = self._text.split(b"\n", n)
        return [int(word) for line in lines for word in line.split()]


def ended(process: SupervisedProcess) -> int | None:
    process.join(BOUND)
    return process.exitcode


class Script:
    """A main process of its own, with three workers."""

    def __init__(self, how: str, function: str, code: str = "", *, options: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-W", "error", *options, supervised.__file__, how, function, code]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.supervisor, *self.pids = self.numbers()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def numbers(self) -> list[int]:
        return list(map(int, self.line().split()))

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("how", "function"), pairs(HOWS, ["sleep_with_children", "hold_interpreter_lock"]))
def test_the_end_of_the_main_process_is_the_end_of_everything(how: str, function: str) -> None:
    """Also of processes in sessions of their own, and of workers whose C code holds the interpreter lock."""
    with Script(how, function) as script:
        assert len(script.pids) == (9 if function == "sleep_with_children" else 6)
        main, others = script.process.pid, [script.supervisor, *script.pids[:: len(script.pids) // 3]]
        # In another session, a process that spins and yields would not let the others run: a vector environment on two
        # CPUs was half as fast.
        assert {os.getsid(pid) for pid in others} == {os.getsid(main)}
        assert os.getpgid(main) not in {os.getpgid(pid) for pid in others}, "Ctrl-C reaches the main process alone"
        script.process.kill()
        gone_after([script.supervisor, *script.pids], time.monotonic(), LEFT_SECONDS)


@pytest.mark.slow
def test_the_end_of_the_main_process_while_modules_are_imported() -> None:
    code = "from penstock.workers.supervisor import Supervisor as S; s = S(['slow']); print(s.pid, flush=True); input()"
    for seconds in (0.05, 0.2, scaled(1.0, 0.4)):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            time.sleep(seconds)  # to come at any moment
            process.kill()
            gone_after([pid], time.monotonic(), LEFT_SECONDS)


@pytest.mark.slow
def test_a_killed_worker(supervisor: Supervisor) -> None:
    """Its group ends and the others live. Exit codes and signals are known."""
    pipe = Pipe()
    first, second = start(supervisor, sleep_with_children, pipe.writer), start(supervisor, sleep)
    pid, child, apart = pipe.pids(1)
    try:
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert select.select([first.sentinel], [], [], BOUND)[0]
        assert ended(first) == -signal.SIGKILL
        gone_after([child], began, LEFT_SECONDS)
    finally:
        os.kill(apart, signal.SIGKILL)
    assert second.pid is not None
    assert is_running(second.pid)
    assert ended(start(supervisor, lambda: 7)) == 7
    assert ended(start(supervisor, os.abort)) == -signal.SIGABRT
    second.signal(signal.SIGTERM)
    assert ended(second) == -signal.SIGTERM
    second.signal(signal.SIGTERM)  # harmless
    assert ended(start(supervisor, lambda: None, spawns=True)) == 0


def test_an_exception_of_a_worker_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with supervising() as supervisor:
        assert ended(start(supervisor, lambda: 1 // 0)) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.slow
def test_dropping_a_worker_kills_it(supervisor: Supervisor) -> None:
    pipe = Pipe()
    worker = start(supervisor, sleep_with_child, pipe.writer)
    pids = pipe.pids(1)
    del worker
    gone_after(pids, time.monotonic(), LEFT_SECONDS)


def test_closing_a_supervisor_ends_its_workers() -> None:
    pipe = Pipe()
    with supervising() as supervisor:
        workers = [start(supervisor, sleep_with_children, pipe.writer) for _ in range(2)]
        pids = pipe.pids(2)
    assert not [pid for pid in pids if is_running(pid)]
    supervisor.close()
    assert [ended(worker) for worker in workers] == [SUPERVISOR_ENDED] * 2


# ---- forks and threads ---------------------------------------------------------------------------

FORKS = """
import os
living = os.fork()
if living == 0:
    os.close(1)
    signal.pause()
ending = os.fork()
if ending == 0:
    sys.exit(0)
os.waitpid(ending, 0)
print(living, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", some(HOWS, 1, 1))
def test_a_fork_of_the_main_process_keeps_nothing_alive(how: str) -> None:
    """It holds every descriptor. The exit of another fork ends nothing."""
    with Script(how, "sleep_with_children", FORKS) as script:
        (fork,) = script.numbers()
        try:
            assert all(is_running(pid) for pid in script.pids)
            script.process.kill()
            gone_after([script.supervisor, *script.pids], time.monotonic(), LEFT_SECONDS)
            assert is_running(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_is_closed_beside_a_fork_that_has_its_leash(supervisor: Supervisor) -> None:
    worker = start(supervisor, sleep)
    assert worker.pid is not None
    with waiting_fork():
        worker.close()
        gone_after([worker.pid], time.monotonic(), LEFT_SECONDS)


@pytest.mark.slow
def test_threads_start_workers_at_once_and_end() -> None:
    """Also the thread in which the supervisor was made."""
    with ThreadPoolExecutor(1) as first:
        supervisor = first.submit(Supervisor).result()
    start(supervisor, lambda: None).close()  # modules are imported now
    with ThreadPoolExecutor(4) as threads:
        workers = list(threads.map(lambda _: start(supervisor, sleep), range(16)))
    pids = [worker.pid for worker in workers if worker.pid is not None]
    assert len(set(pids)) == 16
    assert all(map(is_running, pids))
    supervisor.close()
    assert not any(map(is_running, pids))


# ---- surroundings --------------------------------------------------------------------------------

SURROUNDINGS = """
import logging, os, sys
sys.path.insert(0, sys.argv[1])
from multiprocessing import resource_tracker
from penstock import system
from supervised import Supervisor, start
resource_tracker.ensure_running()  # it may import modules of the current folder
os.chdir("..")
supervisor = Supervisor()
start(supervisor, lambda: 0).join()
assert "PYTHONSAFEPATH" not in os.environ
class Mine:
    value = 41
os.environ["NEW"] = "x"
os.environ.pop("OLD")
os.chdir("/tmp")
sys.path.append("/nowhere")
cpus = set(sorted(system.cpu_mask())[:1])
system.set_cpu_mask(cpus)
os.umask(0o027)
logging.disable(5)
logging.getLogger().setLevel(12)
logging.getLogger("mine.own").setLevel(17)
def check():
    found = os.environ["NEW"], os.environ.get("OLD"), os.getcwd(), sys.path[-1], system.cpu_mask()
    assert found == ("x", None, "/tmp", "/nowhere", cpus), found
    levels = logging.root.manager.disable, *(logging.getLogger(name).level for name in ("", "mine", "mine.own"))
    assert (os.umask(0), *levels) == (0o027, 5, 12, 0, 17), levels
    return Mine.value + 1
for spawns in (False, True):
    worker = start(supervisor, check, spawns=spawns)
    worker.join()
    assert worker.exitcode == 42
supervisor.close()
print("end")
"""


@pytest.mark.slow
def test_a_worker_gets_what_the_main_process_has_now(tmp_path: Path) -> None:
    """Variables, import path, folder, CPUs, umask and levels of loggers. A script needs no guard, and the current
    folder is not imported."""
    for name in ("torch", "pickle", "json", "socket", "ctypes", "gymnasium", "random", "penstock"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(SURROUNDINGS)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(Path(supervised.__file__).parent)],
        capture_output=True,
        text=True,
        cwd=script.parent,
        env={**os.environ, "OLD": "x"},
        timeout=BOUND,
    )
    assert (done.stdout, done.stderr) == ("end\n", "")


@pytest.mark.slow
def test_a_main_process_without_standard_input_output_and_error(tmp_path: Path) -> None:
    """The resource tracker of multiprocessing ends with it: its pipe is not among the standard descriptors."""
    code = """
import os, sys
from multiprocessing import resource_tracker
for fd in 0, 1, 2:
    os.close(fd)
sys.path.insert(0, sys.argv[1])
from supervised import Supervisor, start
supervisor = Supervisor()
def check():
    os.system("echo printed by a program")
    return 6
worker = start(supervisor, check)
worker.join()
supervisor.close()
tracker = resource_tracker._resource_tracker._pid
with open(sys.argv[2], "w") as file:
    print(tracker, os.waitpid(tracker, os.WNOHANG)[0], file=file)
os._exit(worker.exitcode)
"""
    found = tmp_path / "tracker"
    command = [sys.executable, "-c", code, str(Path(supervised.__file__).parent), str(found)]
    assert subprocess.run(command, timeout=BOUND).returncode == 6
    tracker, has_ended = map(int, found.read_text().split())
    assert not has_ended, "it lives as long as the main process"
    gone_after([tracker], time.monotonic(), LEFT_SECONDS)


@pytest.mark.linux("prlimit of another process, and a pidfd")
@pytest.mark.slow
def test_a_supervisor_that_may_open_no_more_descriptors(supervisor: Supervisor) -> None:
    """The others go on."""
    other, limits = start(supervisor, sleep), resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)

    def links() -> dict[int, str]:
        folder = f"/proc/{supervisor.pid}/fd"
        return {int(name): os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}

    n_pidfds = 0 if system.PORTABLE else 1  # of the main process
    until(lambda: sum("pidfd" in link for link in links().values()) == n_pidfds, "the end of the start")
    numbers = links()
    free = [number for number in range(100) if number not in numbers]
    for more in (0, 1):  # not even the control socket, and the control socket alone
        resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (free[more], limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            start(supervisor, sleep)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, limits)
    assert ended(start(supervisor, lambda: 3)) == 3
    assert other.pid is not None
    assert is_running(other.pid)
    other.close()


@pytest.mark.slow
def test_more_descriptors_than_one_message_can_have(supervisor: Supervisor) -> None:
    owners = [InheritedFd(system.anonymous_file("test")) for _ in range(300)]
    inodes = [os.fstat(owner.fd).st_ino for owner in owners]
    for spawns in (False, True):
        same = start(supervisor, lambda fds: [os.fstat(fd.fd).st_ino for fd in fds] == inodes, owners, spawns=spawns)
        assert ended(same) == 1


def blas_threads() -> int:
    import threadpoolctl

    (found,) = {module["num_threads"] for module in threadpoolctl.threadpool_info()}
    return int(found)


@pytest.mark.slow
def test_blas_has_one_thread() -> None:
    with supervising("numpy") as supervisor:
        assert ended(start(supervisor, blas_threads)) == 1
        assert psutil.Process(supervisor.pid).num_threads() == 1


def share_memory(pipe: InheritedFd) -> None:
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=1)
    process = multiprocessing.current_process()
    os.write(pipe.fd, f"{process.name}|{process.authkey.hex()}|{memory.name}\n".encode())
    sleep()


@pytest.mark.slow
@pytest.mark.parametrize("spawns", [False, True])
def test_what_multiprocessing_needs_in_environments(supervisor: Supervisor, spawns: bool) -> None:
    """The name and the key of the process, and the main process's resource tracker, which outlives a killed worker."""
    from multiprocessing import resource_tracker, shared_memory

    pipe = Pipe()
    worker = start(supervisor, share_memory, pipe.writer, spawns=spawns)
    assert select.select([pipe.reader], [], [], BOUND)[0]
    name, key, memory_name = os.read(pipe.reader.fd, 4096).decode().strip().split("|")
    assert (name, bytes.fromhex(key)) == ("a worker", multiprocessing.current_process().authkey)
    worker.kill()
    assert ended(worker) == -signal.SIGKILL
    memory = shared_memory.SharedMemory(memory_name)  # the tracker would have removed it if it had ended
    memory.close()
    memory.unlink()
    assert resource_tracker.getfd() is not None  # type: ignore[func-returns-value]


NO_PIDFD = """
import os, time
fork = os.fork()
if fork == 0:
    os.close(1)
    signal.pause()
os.kill(workers[0].pid, signal.SIGKILL)
workers[0].join(10)
workers[1].signal(signal.SIGTERM)
workers[1].join(10)
print(fork, workers[0].exitcode, workers[1].exitcode, workers[0]._pidfd is None, flush=True)
"""


@pytest.mark.slow
def test_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And SIGCHLD is ignored and blocked. The control socket says that a worker has ended, and its child lives on."""
    before = """
import os, signal
vars(os).pop("pidfd_open", None)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
"""
    monkeypatch.setenv("BEFORE", before)
    with Script("fork", "sleep_with_child", NO_PIDFD) as script:
        fork, *others = script.line().split()
        try:
            assert others == ["-9", "-15", "True"]
            script.process.kill()
            gone_after([script.supervisor, *script.pids], time.monotonic(), LEFT_SECONDS)
        finally:
            os.kill(int(fork), signal.SIGKILL)


@pytest.mark.slow
def test_a_supervisor_that_is_stopped_is_killed_at_its_close(supervisor: Supervisor) -> None:
    os.kill(supervisor.pid, signal.SIGSTOP)
    supervisor.close()
    assert not psutil.pid_exists(supervisor.pid)


@pytest.mark.slow
def test_a_supervisor_that_was_killed(supervisor: Supervisor) -> None:
    """The workers end with it, and their groups. The next start says so, and another supervisor can be had at once."""
    pipe = Pipe()
    workers = [start(supervisor, sleep_with_children, pipe.writer) for _ in range(3)]
    pids = pipe.pids(3)
    apart = pids[2::3]
    try:
        began = time.monotonic()
        os.kill(supervisor.pid, signal.SIGKILL)
        assert [ended(worker) for worker in workers] == [SUPERVISOR_ENDED] * 3
        gone_after([pid for pid in pids if pid not in apart], began, LEFT_SECONDS)
        assert supervisor.has_ended(BOUND)
        with pytest.raises(EOFError, match=rf"the supervisor \(pid {supervisor.pid}\) has ended"):
            start(supervisor, sleep)
        with supervising() as another:
            assert ended(start(another, lambda: 3)) == 3
    finally:
        for pid in apart:
            os.kill(pid, signal.SIGKILL)
