"""Signals at moments that nobody knows, to all that belongs to an environment in a process of its own."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ..games.games_support import processes
from ..scale import USUAL_METHODS, scaled
from ..support import BOUND, PROGRAMS, until
from .support import pause

pytestmark = [pytest.mark.timeout(scaled(600, 120)), pytest.mark.slow, pytest.mark.xdist_group("ports")]

N_SIGNALS = 5  # of each trial
TO_ENVIRONMENTS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT, signal.SIGSTOP]
SENT: Counter[str] = Counter()


def victims(mark: str, main: int) -> dict[str, list[int]]:
    """All processes of the sampler by kind."""
    hosts, workers, supervisors = list[int](), set[int](), set[int]()
    for pid in processes(mark):
        try:
            process = psutil.Process(pid)
            if "host.py" not in " ".join(process.cmdline()):
                continue
            hosts.append(pid)
            above = [each.pid for each in process.parents()]
            if main in above[2:]:  # else its worker has died, and the supervisor is now its parent
                workers.add(above[0])
                supervisors.add(above[1])
        except psutil.NoSuchProcess:
            continue
    found = {"environment": hosts, "worker": sorted(workers), "supervisor": sorted(supervisors), "main": [main]}
    return {kind: pids for kind, pids in found.items() if pids}


@pytest.mark.parametrize("trial", range(scaled(40, 1)))
def test_nothing_hangs_nothing_is_wrong_and_nothing_is_left(trial: int, tmp_path: Path) -> None:
    """Four signals to environments and workers, which are replaced. The fifth may end the whole."""
    draw, mark = random.Random(trial), f"SIGNALLED={os.getpid()}-{trial}"
    command = [sys.executable, str(PROGRAMS / "signalled_envs.py"), str(tmp_path), draw.choice(USUAL_METHODS)]
    environ, log = {**os.environ, **dict([mark.split("=")])}, tmp_path / "log"
    with log.open("wb") as errors:
        main = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environ, start_new_session=True)
    assert main.stdout is not None
    last = ["main", "supervisor", "worker", "environment"][trial % 4]
    try:
        assert select.select([main.stdout], [], [], 2 * BOUND)[0], "it does not start"
        assert main.stdout.readline() == b"up\n", log.read_text()
        for n in range(N_SIGNALS):
            pause(draw.uniform(0, 0.5))
            kind = last if n == N_SIGNALS - 1 else draw.choice(["environment", "environment", "worker"])
            victim = draw.choice(until(lambda kind=kind: victims(mark, main.pid).get(kind)))
            sent = draw.choice(TO_ENVIRONMENTS) if kind == "environment" else signal.SIGKILL
            if psutil.pid_exists(victim):
                os.kill(victim, sent)
                SENT[kind] += 1
        pause(draw.uniform(0, 0.5))
        (tmp_path / "stop").touch()
        code, said = main.wait(2 * BOUND), main.stdout.read().decode()
        until(lambda: not list(processes(mark)))
        if last == "main":
            assert code == -signal.SIGKILL
        else:
            assert code == 0, log.read_text()
            assert said.endswith("batches\n") or (last == "supervisor" and "Error" in said), said
    finally:
        main.kill()
        main.wait()
        main.stdout.close()
        print(dict(SENT))
