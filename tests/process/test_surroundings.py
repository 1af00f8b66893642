"""Surroundings that are out of the ordinary: a suspended job, a kernel that refuses, no folders, no output, and too
little of what the machine gives. It runs, or there is one error with what is needed and what is there."""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import GpuSampler, ParallelSampler, RandomAgent, SerialSampler
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

from ..scale import FULL, methods, scaled
from ..support import BOUND, PROGRAMS, until
from .support import HEAD, Script, is_running, note, pause, python_path, refusing

pytestmark = [pytest.mark.timeout(scaled(3600, 120)), pytest.mark.slow]


SLOW = """
class Slow(CountingEnv):
    def step(self, action):
        time.sleep(0.2)
        return super().step(action)
calls = []
class Stopping(RandomAgent):
    def step(self, *args):
        calls.append(None)
        if len(calls) == AT:
            for pid in sampler.worker_pids:
                os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(*args)
from penstock import AlternatingSampler
sizes = {"batch_T": 8, "step_timeout": 1.0, "max_decorrelation_steps": 0, "start_method": METHOD}
with (AlternatingSampler if AT else ParallelSampler)(Slow, batch_B=N, n_workers=N, **sizes) as sampler:
    sampler.initialize(Stopping() if AT else RandomAgent())
    say(*sampler.worker_pids)
    sampler.obtain_samples(0)
    say("batch")
"""


@methods("fork", "forkserver")
@pytest.mark.parametrize("acts", [False, True], ids=["waits", "acts"])
def test_a_suspended_job_continues(tmp_path: Path, start_method: str, acts: bool) -> None:
    """`docker pause`, a freezer or a scheduler may hold all processes for longer than step_timeout. Also while the main
    process acts: it is not at its wait then, and the workers of the other half are at their steps."""
    with Script(tmp_path, SLOW, METHOD=start_method, AT=6 * acts, N=2 + 2 * acts) as script:
        pids = [script.pid, *script.pids()]
        if not acts:
            pause(0.3)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
        pause(2.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert script.line() == ["batch"]
        assert script.end(BOUND) == ("", "")


# ---- refused system calls ----------------------------------------------------------------------

SAMPLES = """
from penstock import GpuSampler
for cls, options in [(ParallelSampler, {}), (GpuSampler, {"server": "process"})][:N]:
    with cls(CountingEnv, batch_T=4, batch_B=2, n_workers=2, start_method=METHOD, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        say(sampler.obtain_samples(0)[0].env.reward.shape)
        os.kill(sampler.worker_pids[1], signal.SIGKILL)
        try:
            sampler.obtain_samples(1)
        except WorkerDiedError as error:
            say("worker 1" in str(error) and "SIGKILL" in str(error))
"""
only_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="knows the system calls of x86-64 only")


@only_x86_64
@pytest.mark.linux("the system call that is refused")
@methods("forkserver")
@pytest.mark.parametrize("error", scaled([errno.ENOSYS, errno.EPERM], [errno.ENOSYS]), ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["pidfd_open", "eventfd2", "memfd_create"])
def test_a_refused_system_call_has_a_fallback(tmp_path: Path, name: str, error: int, start_method: str) -> None:
    n = scaled(2, 1 + (name == "pidfd_open"))
    with Script(tmp_path, refusing(name, error) + SAMPLES, METHOD=start_method, N=n) as script:
        output, errors = script.end(60)
    assert output.split("\n")[:-1] == ["torch.Size([4, 2])", "True"] * n, errors


@only_x86_64
@pytest.mark.linux("masks of CPUs")
@pytest.mark.parametrize("error", scaled([errno.EPERM, errno.ENOSYS], [errno.EPERM]), ids=errno.errorcode.get)
def test_where_pinning_is_refused_a_worker_says_so_and_runs(tmp_path: Path, error: int) -> None:
    body = refusing("sched_setaffinity", error) + SAMPLES
    with Script(tmp_path, body, METHOD="forkserver", N=1) as script:
        output, errors = script.end(60)
    assert output.count("True") == 1
    assert "worker 0 is not pinned to CPUs [" in errors
    assert "Traceback" not in errors


# ---- folders -----------------------------------------------------------------------------------

ONE_BATCH = """
try:
    with ParallelSampler(CountingEnv, batch_T=4, batch_B=2, n_workers=2, start_method=METHOD) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        say("batch")
except ConfigError as error:
    say(error)
"""


@methods("forkserver", "spawn")
def test_a_deleted_current_folder_is_named(tmp_path: Path, start_method: str) -> None:
    body = "import torch; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')" + ONE_BATCH
    with Script(tmp_path, body, METHOD=start_method) as script:
        output, errors = script.end(60)
    assert "The current folder was deleted: change to another folder" in output, errors


@pytest.mark.linux("memfd_create; elsewhere messages are in files there")
def test_no_folder_for_temporary_files_is_needed(tmp_path: Path) -> None:
    body = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nonexistent']" + ONE_BATCH
    with Script(tmp_path, body, METHOD="forkserver") as script:
        assert script.end(60) == ("batch\n", "")


# ---- environments that do odd things -------------------------------------------------------------


class ClosesItsOutput(CountingEnv):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def reset(self, **kwargs: Any) -> Any:
        if self.how == "none":
            sys.stdout = None  # type: ignore[assignment]
        else:
            sys.stdout.close()
        return super().reset(**kwargs)


@pytest.mark.parametrize("how", ["none", "closed"])
def test_a_worker_without_standard_output_exits_quietly(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    factories = [lambda: CountingEnv() if os.getpid() == main else ClosesItsOutput(how)]
    main = os.getpid()
    with ParallelSampler(factories, batch_T=2, batch_B=1, n_workers=1) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        pid = sampler.worker_pids[0]
    assert not is_running(pid)
    assert "Traceback" not in capfd.readouterr().err


class Telling(CountingEnv):
    """Tells what it finds in its process."""

    def found(self) -> Any:
        os.umask(umask := os.umask(0))
        return umask, logging.getLogger("mine.own").getEffectiveLevel(), torch.get_default_dtype()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SerialSampler, {}),
        (ParallelSampler, {}),
        (ParallelSampler, {"start_method": "fork"}),
        (GpuSampler, {"server": "process"}),
        (ShmVectorEnv, {}),
        (ShmVectorEnv, {"context": "spawn"}),
    ],
)
def test_workers_have_umask_levels_of_loggers_and_default_dtype(
    cls: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are after the supervisor has started. A new interpreter has torch only when it has the program."""
    with ParallelSampler(CountingEnv, batch_T=2, batch_B=1) as sampler:
        sampler.initialize(RandomAgent())
    monkeypatch.setattr(logging.getLogger("mine"), "level", logging.DEBUG)
    old = os.umask(0o027)
    torch.set_default_dtype(torch.float64)
    try:
        if cls is ShmVectorEnv:
            with ShmVectorEnv([Telling] * 2, n_workers=1, **options) as envs:
                found = envs.call("found")
        else:
            with cls(Telling, batch_T=2, batch_B=2, **options) as sampler:
                sampler.initialize(RandomAgent())
                found = sampler.call("found")
    finally:
        os.umask(old)
        torch.set_default_dtype(torch.float32)
    assert list(found) == [(0o027, logging.DEBUG, torch.float64)] * 2


SEVERAL_TRIES = """
say("go")
for _ in range(3):
    try:
        with ParallelSampler(CountingEnv, batch_T=2, batch_B=2, n_workers=2) as sampler:
            sampler.initialize(RandomAgent())
            sampler.obtain_samples(0)
            say("batch")
            break
    except KeyboardInterrupt:
        say("interrupted")
"""


@pytest.mark.parametrize("delay", scaled([0.1 * i for i in range(30)], [0.2]))
def test_ctrl_c_while_the_supervisor_imports_spoils_no_later_start(tmp_path: Path, delay: float) -> None:
    """A terminal sends it to all processes, and the supervisor may be importing numpy for all workers."""
    with Script(tmp_path, SEVERAL_TRIES, new=FULL) as script:
        assert script.line() == ["go"]
        pause(delay)
        os.killpg(script.pid, signal.SIGINT)
        output, errors = script.end(60)
    assert output.split()[-1:] == ["batch"], errors


SURROUNDINGS: dict[str, Any] = {"cwd": "/", "timeout": 50, "env": {**os.environ, "PYTHONPATH": python_path()}}


# ---- descriptors and processes -------------------------------------------------------------


def test_no_descriptor_at_all(tmp_path: Path) -> None:
    with Script(tmp_path, PROGRAMS / "no_descriptors.py") as script:
        output, errors = script.end(60)
    lines = output.splitlines()
    assert len(lines) == 9, errors
    for line in lines:
        few = "file descriptors and this process may open only" in line
        assert few or line == "fine" or "this process has no file descriptor left: its limit is 80" in line, line
        assert line == "fine" or "ulimit -n" in line
    assert lines[0] != "fine"


@methods("forkserver")
def test_few_descriptors(tmp_path: Path, start_method: str) -> None:
    limits = [*range(20, 120, scaled(1, 12)), 64]
    with Script(tmp_path, PROGRAMS / "few_descriptors.py", start_method=start_method, limits=limits) as script:
        results = dict(zip(limits, script.line(), strict=True))
        _, stderr = script.end()
    assert stderr == ""
    assert script.process.returncode == 0
    assert results[min(limits)] == "refused"
    assert results[max(limits)] == "fine"


PROCESSES = """
import psutil, resource
mine = sum(p.num_threads() for p in psutil.process_iter() if p.uids().real == os.getuid())
resource.setrlimit(resource.RLIMIT_NPROC, (mine + 20,) * 2)
try:
    with ParallelSampler(CountingEnv, batch_T=5, batch_B=32, n_workers=32, start_method=METHOD) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
    say("fine")
except ConfigError as error:
    say("refused", str(error))
"""

# Nobody may not enter /root, where Python may lie: in a mount namespace of its own, it may.
AS_NOBODY = """
set -e
home=$(mktemp -d)
mount --rbind /root $home
mount -t tmpfs -o mode=755 tmpfs /root
for entry in .pyenv .local; do
    if [ -d $home/$entry ]; then mkdir /root/$entry; mount --rbind $home/$entry /root/$entry; fi
done
exec setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\"
"""


@pytest.mark.linux("mount namespaces")
@methods("fork")
def test_few_processes(start_method: str) -> None:
    command = [sys.executable, "-W", "error", "-"]
    if os.getuid() == 0:  # whom the limit does not bind
        command = ["unshare", "-m", "sh", "-c", AS_NOBODY, "sh", *command]
    script = f"METHOD = {start_method!r}\n{HEAD}\nsay('imported')\n{PROCESSES}"
    done = subprocess.run(command, input=script, capture_output=True, text=True, **SURROUNDINGS)
    imported, _, output = done.stdout.partition("\n")
    if os.getuid() == 0 and not imported:
        pytest.skip(f"RLIMIT_NPROC does not bind root, and nobody cannot run this: {done.stderr.strip()[-200:]}")
    # What workers say that cannot even load their libraries is not penstock's: OpenBLAS interrupts itself.
    assert output.startswith("refused"), done.stderr
    assert "allows no more processes" in output
    assert done.returncode == 0


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_many_workers(method: str, tmp_path: Path) -> None:
    n = scaled(256, 16)
    if psutil.virtual_memory().available < n * 60 * 2**20:
        pytest.skip(f"{n} workers take about {n * 60} MiB, which are not free")
    with ParallelSampler(CountingEnv, batch_T=5, batch_B=n, n_workers=n, start_method=method) as sampler:
        sampler.initialize(RandomAgent())
        for itr in range(3):
            samples, infos = sampler.obtain_samples(itr)
            assert len(infos) == int(samples.env.done.sum())
        note(f"workers of one sampler, {method}", n, 256)


# ---- memory --------------------------------------------------------------------------------


ADDRESSES = """
import resource
with open("/proc/self/status") as status:
    now = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (now + 300 * 2**20,) * 2)
try:
    with ParallelSampler(CountingEnv, batch_T=10**7, batch_B=8, n_workers=2, start_method=METHOD) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
    say("fine")
except ConfigError as error:
    say("refused", str(error))
"""


@pytest.mark.linux("/proc, and RLIMIT_AS, which other systems do not obey")
def test_too_small_an_address_space(tmp_path: Path) -> None:
    with Script(tmp_path, ADDRESSES, METHOD="forkserver") as script:
        words = script.line()
        _, stderr = script.end()
    assert words[0] == "refused"
    assert "samples" in " ".join(words)
    assert stderr == ""


# ---- /dev/shm ------------------------------------------------------------------------------

SHM = {
    "64 MB": "mount -t tmpfs -o size=64m tmpfs /dev/shm",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "absent": """
        mount -t tmpfs tmpfs /mnt && cd /mnt
        for name in null zero random urandom tty; do touch $name && mount --bind /dev/$name $name; done
        mount --move /mnt /dev && cd /
        test ! -e /dev/shm
    """,
}


def in_a_room_of_its_own(setup: str, program: str) -> subprocess.CompletedProcess[str]:
    commands = f"set -e\n{textwrap.dedent(setup)}\nexec {sys.executable} -W error {program}"
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", commands],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, "PYTHONPATH": python_path()},
    )


@pytest.mark.linux("mount namespaces, and memory that needs no /dev/shm")
@methods("fork")
@pytest.mark.parametrize("shm", scaled(list(SHM), ["absent"]))
def test_whatever_dev_shm_is(shm: str, start_method: str) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    tried = in_a_room_of_its_own(SHM[shm], "-c 1")
    if tried.returncode:
        pytest.skip(f"this system does not let /dev/shm be replaced: {tried.stderr.strip()}")
    done = in_a_room_of_its_own(SHM[shm], f"{PROGRAMS / 'large_samples.py'} {start_method}")
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
