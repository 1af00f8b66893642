"""The process that starts the workers (the fork server): what its end does, what interruptions do, and what it shares.

The tests ask for the parent of a worker, so they hold for any such process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from penstock.buffers.native import COMPILED
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers.launch import SUPERVISED

from ..scale import scaled
from .support import BOUND, SLACK, Script, gone_after, note

pytestmark = pytest.mark.timeout(scaled(600, 90))

KILLED = """
import psutil
from functools import partial
from penstock.vector import ShmVectorEnv
class Game(CountingEnv):
    def __init__(self, main):
        super().__init__()
        if os.getpid() != main:
            self.game = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation, {**info, "game": getattr(self, "game", 0)}
def make():
    return ShmVectorEnv([partial(Game, os.getpid())] * 2)
with make() as first, make() as second:
    games = [int(game) for envs in (first, second) for game in envs.reset()[1]["game"]]
    workers = [*first.worker_pids, *second.worker_pids]
    say(*workers, *games)
    os.kill(psutil.Process(workers[0]).ppid(), signal.SIGKILL)
    for envs in (first, second):
        try:
            while True:
                envs.step([0, 0])
        except WorkerDiedError as error:
            say(str(error).splitlines()[0])
with make() as third:
    third.reset()
    third.step([0, 0])
    say("next start")
"""


@pytest.mark.slow
def test_all_workers_end_with_the_process_that_starts_them_and_the_error_says_so(tmp_path: Path) -> None:
    """So does what their environments have started. The next start makes another such process."""
    with Script(tmp_path, KILLED) as script:
        pids, began = script.pids(), time.monotonic()
        seconds = gone_after(pids if COMPILED else pids[:4], began, 2.0 * SLACK)
        note("starting process killed to no worker left, s", seconds, 2.0 * SLACK)
        for _ in range(2):
            line = " ".join(script.line())
            assert re.search(r"worker 0 \(pid \d+, .* ended with the (fork server|supervisor).* was killed", line), line
        output, errors = script.end()
    assert output == "next start\n", errors
    assert "Traceback" not in errors


VOLLEYS = """
import psutil
from penstock.vector import ShmVectorEnv
def n_processes():
    return len(psutil.Process().children(recursive=True))
with ShmVectorEnv([CountingEnv] * 2) as other:
    other.reset()
    before, n, is_ready = n_processes(), 0, False
    def on_interrupt(*_):
        global n
        n += 1
        if is_ready and n < N:
            raise KeyboardInterrupt
    signal.signal(signal.SIGINT, on_interrupt)
    say("ready")
    def starts():
        while n < N:
            try:
                ShmVectorEnv([CountingEnv] * 2).close()
            except KeyboardInterrupt:
                pass
    while n < N:
        try:
            is_ready = True
            starts()
        except KeyboardInterrupt:
            pass
    deadline = time.monotonic() + 20
    while n_processes() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    say("left", n_processes() - before)
    other.step([0, 0])
with ShmVectorEnv([CountingEnv] * 2) as envs:
    envs.reset()
say("end")
"""


@pytest.mark.slow
@pytest.mark.skipif(not SUPERVISED, reason="an interrupt during the start of the guardian leaves a shell")
def test_volleys_of_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    """Four in a row, as from an impatient user. No process is left, other samplers go on, and the next start works."""
    rng = random.Random(4)
    with Script(tmp_path, VOLLEYS, N=scaled(200, 40)) as script:
        assert script.line() == ["ready"]
        began = time.monotonic()
        while script.process.poll() is None and time.monotonic() < began + BOUND:
            for _ in range(4):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(script.pid, signal.SIGINT)
                time.sleep(rng.uniform(0.0002, 0.02))  # to come at any moment
        output, errors = script.end()
    assert output.splitlines() == ["left 0", "end"], errors


class Frozen(CountingEnv):
    """Notes how many objects garbage collection does not search, before the worker itself excludes any."""

    def __init__(self) -> None:
        super().__init__()
        self.n_frozen = gc.get_freeze_count()


def test_workers_share_what_the_starting_process_has_imported() -> None:
    """Garbage collection in a worker would search and copy the memory of these modules."""
    with ShmVectorEnv([Frozen] * 2) as envs:
        assert min(envs.get_attr("n_frozen")) > 10_000
