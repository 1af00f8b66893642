"""The process that starts the workers (the supervisor): what its end does, what interruptions do, what it shares."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock import ParallelSampler, RandomAgent, WorkerDiedError, WorkerTimeoutError
from penstock.buffers.native import COMPILED
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers import launcher as launch
from penstock.workers.affinity import thread_numbers
from penstock.workers.plan import PoolOptions

from ..scale import START_METHODS, scaled
from ..support import BOUND, PROGRAMS, until
from .support import SLACK, Script, gone_after, note

pytestmark = pytest.mark.timeout(scaled(600, 90))


KILLED = """
import psutil
from functools import partial
from penstock.vector import ShmVectorEnv
class Game(CountingEnv):
    def __init__(self):
        super().__init__()
        self.game = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)  # a Popen would warn that it was left
make = partial(ShmVectorEnv, [CountingEnv, Game], spaces=(CountingEnv().observation_space, CountingEnv().action_space))
with make() as first, make() as second:
    workers, games = [], []
    for envs in (first, second):
        envs.reset()
        workers += envs.worker_pids
        games.append(envs.apply(lambda env: getattr(env, "game", 0))[1])
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
            assert re.search(r"worker [01] \(pid \d+, .* ended with the supervisor.* was killed", line), line
        output, errors = script.end()
    assert output == "next start\n", errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "start_method"),
    scaled(
        [*product(("vector", "parallel", "alternating"), START_METHODS)],
        [("vector", "fork"), ("parallel", "forkserver")],
    ),
)
def test_volleys_of_ctrl_c_while_workers_start(tmp_path: Path, what: str, start_method: str) -> None:
    """Four in a row, as from an impatient user. No process is left, other samplers go on, and the next start works."""
    rng = random.Random(4)
    program = PROGRAMS / "starts_interrupted.py"
    with Script(tmp_path, program, n=scaled(40, 20), what=what, start_method=start_method) as script:
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


# ---- a stopped supervisor ------------------------------------------------------------------------


def new_sampler(**kwargs: Any) -> ParallelSampler:
    return ParallelSampler(CountingEnv, batch_T=4, batch_B=2, n_workers=2, **kwargs)


@contextlib.contextmanager
def stopped_supervisor() -> Iterator[psutil.Process]:
    process = psutil.Process(launch._supervisors[0].pid)
    process.suspend()
    try:
        yield process
    finally:
        process.resume()


STOPPED = r"worker 0 could not be started within \d+ s: the supervisor \(pid \d+\) was stopped by a signal, and contin"


@pytest.mark.slow
def test_a_stopped_supervisor_is_named_and_continues() -> None:
    began = time.monotonic()
    with new_sampler(start_timeout=0.5) as sampler, stopped_supervisor() as supervisor:
        with pytest.raises(WorkerTimeoutError, match=STOPPED) as caught:
            sampler.initialize(RandomAgent())
        assert time.monotonic() - began < 10
        until(lambda: supervisor.status() != psutil.STATUS_STOPPED)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_supervisor_that_is_stopped_while_it_starts_is_named_and_can_be_used_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stopped(launch.Supervisor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(launch, "_supervisors", [])
    monkeypatch.setattr(launch, "Supervisor", Stopped)
    launcher = launch.Launcher(PoolOptions("forkserver", None, 0.5, 0, 60.0), 1)
    launcher.prepare()
    (supervisor,) = launch._supervisors
    try:
        with pytest.raises(WorkerTimeoutError, match=STOPPED):
            launcher.start("worker 0", int)
        worker = launcher.start("worker 0", int, 3)
        worker.join(BOUND)
        assert (worker.exitcode, launch._supervisors) == (3, [supervisor])
        worker.close()
    finally:
        supervisor.close()


ENDS = """
import atexit, os, signal, sys, threading
path, ends = {!r}
atexit.register(lambda: open(path, "a").write("exit"))
threading.Thread(target=lambda: open(path, "a").write("thread ")).start()
if ends == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(ends)
"""


@pytest.mark.parametrize(("ends", "code"), [(3, 3), (None, 0), ("a text", 1), ("kill", -signal.SIGKILL)])
def test_a_process_beside_the_workers_ends_as_a_program_does(ends: Any, code: int, tmp_path: Path) -> None:
    process = launch.start_beside("a program", exec, ENDS.format((str(tmp_path / "said"), ends)), {})
    with contextlib.closing(process):
        assert process.join(BOUND) == code
        assert process.join(0) == code
    assert ends == "kill" or (tmp_path / "said").read_text() == "thread exit"


def test_a_process_beside_the_workers_has_as_many_threads_as_this_one() -> None:
    """Those of the supervisor's libraries are one, and it has imported torch."""
    n = torch.get_num_threads()
    torch.set_num_threads(n + 1)
    try:
        code = "from penstock.workers.affinity import thread_numbers; raise SystemExit(thread_numbers() != "
        code += f"{thread_numbers()})"
        with contextlib.closing(launch.start_beside("a program", exec, code, {})) as process:
            assert process.join(BOUND) == 0
    finally:
        torch.set_num_threads(n)


@pytest.mark.linux("elsewhere the supervisor alone says that a worker has ended")
@pytest.mark.slow
def test_a_worker_that_a_stopped_supervisor_cannot_replace() -> None:
    with new_sampler(start_timeout=0.5, on_worker_failure="restart") as sampler:
        sampler.initialize(RandomAgent())
        with stopped_supervisor():
            os.kill(sampler.worker_pids[0], signal.SIGKILL)
            with pytest.raises(WorkerDiedError) as caught:
                sampler.obtain_samples(0)
    assert "has ended with an unknown exit code: the supervisor" in str(caught.value)
    assert "worker 0 could not be replaced: worker 0 could not be started within" in str(caught.value)


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_stopped_supervisor() -> None:
    with new_sampler() as sampler, stopped_supervisor() as supervisor:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sampler.initialize(RandomAgent())
        timer.join()
        until(lambda: supervisor.status() != psutil.STATUS_STOPPED)


# ---- everything killed together ------------------------------------------------------------------

GAMES = """
from penstock.vector import ShmVectorEnv
class Game(CountingEnv):
    def __init__(self):
        super().__init__()
        say(subprocess.Popen(["sleep", "600"]).pid)
with ShmVectorEnv([Game] * 2, context=METHOD):
    say("ready")
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="needs the compiled part")
def test_main_process_and_supervisor_killed_together(tmp_path: Path, start_method: str) -> None:
    """What the environments have started ends too."""
    with Script(tmp_path, GAMES, METHOD=start_method) as script:
        games = [int(line[0]) for line in iter(script.line, ["ready"])]
        assert len(games) == 3
        (supervisor,) = (child for child in psutil.Process(script.pid).children() if child.name() == "penstock-start")
        for pid in (script.pid, supervisor.pid):
            os.kill(pid, signal.SIGKILL)
        gone_after(games, time.monotonic(), BOUND)


POOL = """
import multiprocessing, psutil
from penstock.vector import ShmVectorEnv
def job(i):
    with ShmVectorEnv([CountingEnv]) as envs:
        envs.reset()
    return [child.pid for child in psutil.Process().children()]
with multiprocessing.get_context("fork").Pool(2) as pool:
    for pids in pool.map(job, range(2)):
        say(*pids)
say("ended")
"""


@pytest.mark.slow
def test_a_process_of_a_pool_leaves_no_supervisor(tmp_path: Path) -> None:
    """`Pool.terminate` kills its processes."""
    with Script(tmp_path, POOL) as script:
        pids = [int(pid) for line in iter(script.line, ["ended"]) for pid in line]
        assert pids
        script.end(60)
        gone_after(pids, time.monotonic(), BOUND)
