"""shutdown: never raises, bounded, harmless again, from anywhere, after anything, and nothing accumulates."""

import functools
import gc
import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import GpuSampler, ParallelSampler, RandomAgent, SamplerClosedError, SamplerState, WorkerError
from penstock.envs import CountingEnv, SlowEnv
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from .. import support
from ..scale import START_METHODS, methods, pairs, scaled, with_start_methods
from ..support import PROGRAMS, until
from .support import SLACK, Script, Talkative, note

CLOSE_SECONDS = 2.5 * SLACK

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

parallel_sampler = functools.partial(support.sampler_of, ParallelSampler)


def close(sampler: ParallelSampler, kind: str) -> list[str]:
    """Shut down within the time; returns the warnings."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler.shutdown()
    note(f"shutdown, {kind}, s", time.monotonic() - began, CLOSE_SECONDS)
    assert all(w.category is RuntimeWarning for w in caught)
    return [str(w.message) for w in caught]


def test_three_times(start_method: str) -> None:
    sampler = parallel_sampler(start_method=start_method)
    sampler.initialize(RandomAgent())
    samples, _ = sampler.obtain_samples(0)
    for _ in range(3):
        assert close(sampler, "ordinary") == []
    assert samples.env.reward.sum() > 0, "the last samples stay readable"
    with pytest.raises(SamplerClosedError):
        sampler.obtain_samples(1)


def test_from_many_threads_at_once() -> None:
    sampler = parallel_sampler()
    sampler.initialize(RandomAgent())
    barrier = threading.Barrier(8)

    def body(_: int) -> None:
        barrier.wait()
        sampler.shutdown()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(body, range(8)))  # raises what they raise


SLOW: dict[str, Any] = {"env_fn": SlowEnv, "env_kwargs": {"seconds": 0.01}, "batch_T": 1000}
OUTSTANDING: dict[str, tuple[Any, dict[str, Any]]] = {
    "parallel": (ParallelSampler, SLOW),
    "own process": (GpuSampler, {**SLOW, "server": "process"}),
    "full pipe": (ParallelSampler, {"traj_info_cls": Talkative, "env_kwargs": {"length": 2}}),
}


@with_start_methods("what", OUTSTANDING)
def test_with_a_batch_outstanding(what: str, start_method: str) -> None:
    cls, options = OUTSTANDING[what]
    sampler = support.sampler_of(cls, start_method=start_method, **options)
    sampler.initialize(RandomAgent())
    sampler.start_samples(0)
    until(lambda: ("sending" if what == "full pipe" else "stepping") in repr(sampler))
    assert close(sampler, "with a batch outstanding") == []


@pytest.mark.parametrize(
    ("ending", "start_method"), pairs(["del", "gc"], scaled(START_METHODS, ("fork", "forkserver")))
)
def test_in_del(ending: str, start_method: str) -> None:
    sampler = parallel_sampler(start_method=start_method)
    sampler.initialize(RandomAgent())
    sampler.obtain_samples(0)
    pids = list(sampler.worker_pids)
    if ending == "gc":
        sampler.itself = sampler  # type: ignore[attr-defined]
    began = time.monotonic()
    del sampler
    gc.collect()
    note("shutdown, in __del__, s", time.monotonic() - began, CLOSE_SECONDS)
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("kind", ["ParallelSampler", "AsyncSampler", "ShmVectorEnv"])
def test_a_program_that_ends_without_shutdown_closes_its_environments(kind: str, tmp_path: Path) -> None:
    """As a program does whose environments are its own. Nothing is reported: no worker has failed."""
    body = """
        import logging
        from penstock.vector import ShmVectorEnv
        logging.basicConfig()

        class Noted(CountingEnv):
            def close(self):
                with open(file, "a") as closed:
                    closed.write("closed\\n")
                super().close()

        if kind == "ShmVectorEnv":
            envs = ShmVectorEnv([Noted] * 2, n_workers=2)
        else:
            sampler = {"ParallelSampler": ParallelSampler, "AsyncSampler": AsyncSampler}[kind](
                Noted, batch_T=2, batch_B=2, n_workers=2
            )
            sampler.initialize(RandomAgent())
        open(file, "w").close()  # that of the example environment does not count
    """
    with Script(tmp_path, body, new=True, kind=kind, file=str(tmp_path / "closed")) as script:
        assert script.end() == ("", "")
    assert (tmp_path / "closed").read_text() == "closed\n" * 2


def test_all_environments_hang_in_close() -> None:
    sampler = parallel_sampler(
        [CountingEnv] + [faulty_env(CountingEnv, Fault("hold the gil"), "close")] * 7,
        batch_B=8,
        n_workers=8,
        close_timeout=0.2,
    )
    sampler.initialize(RandomAgent())
    (complaint,) = close(sampler, "with a close that hangs")
    assert complaint.count("did not exit while closing") == 7


class Leaves(CountingEnv):
    """Its close takes some seconds, then writes a file. At the beginning it writes another one."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__()
        self.folder, self.seconds = folder, seconds

    def close(self) -> None:
        mark = f"{os.getpid()}-{id(self)}"
        (self.folder / f"closing-{mark}").touch()
        time.sleep(self.seconds)
        (self.folder / f"closed-{mark}").touch()


SPACES = CountingEnv().observation_space, CountingEnv().action_space


@pytest.mark.parametrize("is_vector", [False, True])
def test_each_environment_has_its_time_to_close(is_vector: bool, tmp_path: Path) -> None:
    fn = functools.partial(Leaves, tmp_path, 0.6)
    if is_vector:
        envs = ShmVectorEnv([fn] * 4, spaces=SPACES, in_series=4, close_timeout=1.2)
        envs.reset()
        envs.close()
    else:
        with parallel_sampler(fn, spaces=SPACES, n_workers=1, close_timeout=1.2) as sampler:
            sampler.initialize(RandomAgent())
            sampler.obtain_samples(0)
    assert len(list(tmp_path.glob("closed-*"))) == 4, "2.4 s in all, half of the limit for each"


def test_ctrl_c_ends_the_time_to_close(tmp_path: Path) -> None:
    sampler = parallel_sampler(
        Leaves, env_kwargs={"folder": tmp_path, "seconds": 600}, spaces=SPACES, close_timeout=300
    )
    sampler.initialize(RandomAgent())
    pids = sampler.worker_pids

    def press() -> None:
        until(lambda: len(list(tmp_path.glob("closing-*"))) == 2, "the close of both workers")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), pytest.warns(RuntimeWarning, match="while closing") as caught:
        sampler.shutdown()
    note("shutdown, ended by Ctrl-C, s", time.monotonic() - began, 30)
    thread.join()
    assert "close_timeout" not in str(caught[0].message)
    assert not any(map(psutil.pid_exists, pids))
    assert sampler.state is SamplerState.CLOSED


def test_after_a_failure_there_is_little_time_to_close(tmp_path: Path) -> None:
    fns = [functools.partial(Leaves, tmp_path, 600), faulty_env(CountingEnv, Fault("raise"), "step")]
    sampler = parallel_sampler(fns, batch_B=2, spaces=SPACES, close_timeout=300)
    sampler.initialize(RandomAgent())
    began = time.monotonic()
    with pytest.raises(WorkerError):
        sampler.obtain_samples(0)
    note("shutdown, after a failure, s", time.monotonic() - began, CLOSE_SECONDS)
    assert close(sampler, "after an error") == []


# ---- again and again -----------------------------------------------------------------------


@methods("fork", "forkserver")
def test_nothing_accumulates(tmp_path: Path, start_method: str) -> None:
    """Under -W error, in a process of its own, so that nothing else is in the figures."""
    n = scaled(500, 4)
    with Script(tmp_path, PROGRAMS / "cycles.py", start_method=start_method, n=n, n_before=scaled(10, 1)) as script:
        growth, *others = map(int, script.line())
        _, stderr = script.end()
    assert stderr == ""
    assert others == [0, 0, 0], "descriptors, threads, children"
    note(f"open/close cycles ({n}): growth of the main process, MB", growth / 1e6, scaled(5.0, 2.5))
