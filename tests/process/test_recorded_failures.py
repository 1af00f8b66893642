"""A failure is repeated from its file in a fresh process: the same failure, at the same step."""

import builtins
import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecordedEpisode,
    SamplerBrokenError,
    SerialSampler,
    WaitResetCollector,
)

from ..scale import scaled
from ..starter import run
from .support import generator

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

EXCEPTIONS = ("ValueError", "ZeroDivisionError", "KeyError", "FloatingPointError", "SystemExit", "Unpicklable")
DEATHS = ("SIGKILL", "SIGSEGV", "exit")


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("an Unpicklable cannot be pickled")


class Fragile(gym.Wrapper[Any, Any, Any, Any]):
    """Fails in a few episodes, at a step that depends on the seed of the reset and on the actions."""

    def __init__(self, env_id: str, how: str, share: float, in_reset: bool = False) -> None:
        super().__init__(gym.make(env_id))
        self.how, self.env_range, self.in_reset, self.tells = how, share, in_reset, False

    def reset(self, **kwargs: Any) -> Any:
        result = self.env.reset(**kwargs)
        self.count, self.sum = 0, 0.0
        rng = np.random.default_rng(kwargs["seed"] or 0)
        self.limit = float(rng.integers(1, 60)) if rng.random() < self.env_range else np.inf
        if self.in_reset and self.limit < np.inf:
            self.fail()
        return result

    def step(self, action: Any) -> Any:
        self.sum += 1.0 + float(np.abs(np.asarray(action, np.float64)).mean())
        if self.sum > self.limit:
            self.fail()
        self.count += 1
        return self.env.step(action)

    def fail(self) -> None:
        if self.tells:
            print("step", self.count, flush=True)
        if self.how == "SIGKILL":
            os.kill(os.getpid(), 9)
        if self.how == "SIGSEGV":
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            ctypes.string_at(0)
        if self.how == "exit":
            os._exit(7)
        if self.how == "Unpicklable":
            raise Unpicklable("it failed")
        raise getattr(builtins, self.how)("it failed")


FRESH = """
import sys
from penstock import RecordedEpisode
episode = RecordedEpisode.load(sys.argv[1])
env, action = episode.run()
env.tells = True
print("stopped before", env.count if action is not None else "reset", flush=True)
try:
    env.reset(seed=episode.seed) if action is None else env.step(action)
except BaseException as error:
    print("raised", type(error).__name__, flush=True)
"""


def outcome_in_a_fresh_process(path: Path, folder: Path) -> tuple[list[str], int]:
    """What a program that repeats the failure prints, and its exit code. It is a fork of the starter."""
    (folder / "fresh.py").write_text(FRESH)
    done = run(folder / "fresh.py", path, cwd=folder)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines(), done.returncode


@pytest.mark.parametrize("i", range(scaled(200, 5)))
def test_a_failure_is_the_same_in_a_fresh_process(i: int, tmp_path: Path) -> None:
    rng = generator("replay", i)
    # The first ones are the daily sample: each kind of death, and some exceptions.
    how = (*DEATHS, *EXCEPTIONS)[i % 9]
    in_reset = rng.random() < 0.15
    samplers: list[Any] = [ParallelSampler, GpuSampler, AlternatingSampler, AsyncSampler]
    # In the main process it would end the main process, as it should.
    ends_the_process = how in DEATHS or how == "SystemExit"
    cls = rng.choice(samplers if ends_the_process else [SerialSampler, *samplers])
    options: dict[str, Any] = {
        "batch_T": rng.choice([1, 2, 7, 40]),
        "batch_B": rng.choice([2, 5]),
        "n_workers": 2,
        "max_decorrelation_steps": rng.choice([0, 30]),
        "start_method": rng.choice(["fork", "forkserver"]),
        "env_kwargs": {
            "env_id": rng.choice(["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"]),
            "how": how,
            "share": rng.choice([0.02, 0.2]) if not in_reset else 0.05,
            "in_reset": in_reset,
        },
    }
    if rng.random() < 0.3:
        options["collector_cls"] = WaitResetCollector
    if cls is not AsyncSampler and rng.random() < 0.3:
        options["n_slots"] = 3
    if options["env_kwargs"]["env_id"] == "Pendulum-v1":
        options["env_kwargs"]["share"] = 1.0 if not in_reset else 0.5  # its episodes have 200 steps
    with (
        cls(Fragile, seed_episodes=True, crash_dir=tmp_path, **options) as sampler,
        pytest.raises(SamplerBrokenError) as caught,
    ):
        sampler.initialize(RandomAgent(), seed=i)
        if cls is AsyncSampler:
            sampler.start()
        for itr in range(20_000):
            sampler.obtain_samples(itr)
    error = caught.value
    assert error.episode is not None, str(error)
    if how in EXCEPTIONS and how != "Unpicklable":
        assert type(error.__cause__).__name__ == how
    found = next(path for path in tmp_path.iterdir() if str(path) == error.episode.path)
    episode = RecordedEpisode.load(found)
    lines, code = outcome_in_a_fresh_process(found, tmp_path)
    stop = "reset" if in_reset else episode.step
    expected = [f"stopped before {stop}", f"step {0 if in_reset else episode.step}"]
    if how in EXCEPTIONS:
        assert (lines, code) == ([*expected, f"raised {how}"], 0)
    else:
        assert (lines, code) == (expected, {"SIGKILL": -9, "SIGSEGV": -11, "exit": 7}[how])
