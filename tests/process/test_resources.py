"""Too little of what the machine gives: it runs, or there is one error with what is needed and what is there."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv

from ..scale import methods, scaled
from ..support import PROGRAMS
from .support import HEAD, Script, note, python_path

SURROUNDINGS: dict[str, Any] = {"cwd": "/", "timeout": 50, "env": {**os.environ, "PYTHONPATH": python_path()}}

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

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


@methods("forkserver")
def test_few_processes(start_method: str) -> None:
    command = [sys.executable, "-W", "error", "-"]
    if os.getuid() == 0:  # whom the limit does not bind
        command = ["unshare", "-m", "sh", "-c", AS_NOBODY, "sh", *command]
        tried = subprocess.run([*command[:-1], "-c", "import penstock"], capture_output=True, text=True, **SURROUNDINGS)
        if tried.returncode:
            pytest.skip(f"RLIMIT_NPROC does not bind root, and nobody cannot run this: {tried.stderr.strip()[-200:]}")
    script = f"METHOD = {start_method!r}\n{HEAD}\n{PROCESSES}"
    done = subprocess.run(command, input=script, capture_output=True, text=True, **SURROUNDINGS)
    # What workers say that cannot even load their libraries is not penstock's: OpenBLAS interrupts itself.
    assert done.stdout.startswith("refused"), done.stderr
    assert "allows no more processes" in done.stdout
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


def in_a_room_of_its_own(setup: str, program: str) -> "subprocess.CompletedProcess[str]":
    commands = f"set -e\n{textwrap.dedent(setup)}\nexec {sys.executable} -W error {program}"
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", commands],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, "PYTHONPATH": python_path()},
    )


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
