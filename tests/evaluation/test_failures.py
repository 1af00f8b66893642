"""What an evaluation does when an environment, a worker or a policy fails."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from penstock import ConfigError, SpaceError, WorkerError, evaluate
from penstock.envs import ColumnStreams, CountingEnv, Purpose

from ..scale import scaled, some
from .reach import TASKS, Guilty, Moody, Reach, hang, moody, played, serial, vla

pytestmark = pytest.mark.timeout(scaled(600, 120))

EPISODES = range(scaled(50, 10))
truth = cache(partial(serial, EPISODES))
run = partial(evaluate, vla, success="is_success", episodes=EPISODES, tasks=TASKS, n_workers=2, batch_B=6, attempts=2)


def fail() -> None:
    raise RuntimeError("EGL_BAD_ALLOC")


def leave() -> None:
    raise SystemExit(4)


ACTS: dict[str, Any] = {
    "raises": fail,
    "exits": lambda: os._exit(3),
    "leaves": leave,
    "aborts": os.abort,
    "segfaults": partial(ctypes.string_at, 0),
}


def guilty_of() -> set[tuple[str, int]]:
    """The episodes whose environments fail: they have step 5, and the number of the guilty."""
    found = set()
    for row in truth():
        env = Reach(**TASKS[row.task])
        env.reset(seed=ColumnStreams(0, (zlib.crc32(row.task.encode()),)).env_seeds(Purpose.EVAL, row.episode)[0])
        if env.number % 20 == 3 and row.length > 5:
            found.add((row.task, row.episode))
    return found


@pytest.mark.parametrize("act", some(ACTS, 3, first=2))
@pytest.mark.slow
def test_an_episode_that_fails_once_is_begun_again(act: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = run(partial(Reach, fault=Guilty(ACTS[act], tmp_path)))
    assert played(found) == truth()
    assert "trajectories" not in caplog.text  # it knows only episodes, and none is lost
    assert act != "exits" or "it is being replaced\n" in caplog.text
    assert {(r.task, r.episode) for r in found.episodes if r.attempts > 1} >= guilty_of() - {("kitchen", 0)}
    assert guilty_of()


@pytest.mark.parametrize("act", some(ACTS, 2))
@pytest.mark.slow
def test_an_episode_that_always_fails_is_named(act: str) -> None:
    with pytest.warns(RuntimeWarning, match="are not in the means"):
        found = run(partial(Reach, fault=Guilty(ACTS[act], None)))
    assert {(r.task, r.episode) for r in found.failed} == guilty_of()
    assert played(found) == [row for row in truth() if (row.task, row.episode) not in guilty_of()]
    low, high = found.bounds("policy", "success")
    n, n_won = len(found.episodes), sum(result.metrics.get("success", False) for result in found.episodes)
    assert (low, high) == pytest.approx((n_won / n, (n_won + len(found.failed)) / n))  # tasks have as many episodes


@pytest.mark.slow
def test_failed_episodes_of_a_folder_are_played_again(tmp_path: Path) -> None:
    make = partial(Reach, fault=Guilty(partial(fail_without, tmp_path / "driver"), None))
    n = scaled(40, 21)
    again = partial(run, make, episodes=n, folder=tmp_path / "folder")
    with pytest.warns(RuntimeWarning, match="are not in the means"):
        first = again()
    assert len(first.failed) >= 3
    with pytest.warns(RuntimeWarning, match="are not in the means"):  # not a broken environment: others have ended
        assert again().episodes == first.episodes
    (tmp_path / "driver").touch()
    assert played(again()) == serial(range(n))


def fail_without(file: Path) -> None:
    if not file.exists():
        fail()


@pytest.mark.slow
def test_a_hang_is_found_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    found = run(partial(Reach, fault=Guilty(hang, tmp_path)), step_timeout=1.0, episodes=EPISODES)
    assert played(found) == truth()
    assert time.monotonic() - began < 10 + 3 * len(guilty_of())


def killed(stop: threading.Event, n: int, done: list[int]) -> None:
    """Kill workers of this process at random moments."""
    rng, me = random.Random(0), psutil.Process()
    while len(done) < n and not stop.wait(rng.uniform(0, 0.2)):
        supervisors = {child.pid for child in me.children()}
        workers = [p for p in me.children(recursive=True) if p.pid not in supervisors]
        if workers:
            try:
                rng.choice(workers).kill()
                done.append(1)
            except psutil.Error:
                continue


@pytest.mark.parametrize("act_in", ["caller", "workers"])
@pytest.mark.slow
def test_workers_are_killed(act_in: Any) -> None:
    stop, done = threading.Event(), list[int]()
    killer = threading.Thread(target=killed, args=(stop, scaled(200, 8), done))
    slow = partial(Reach, fault=partial(linger, 0.002))
    killer.start()
    try:
        found = run(slow, attempts=20, act_in=act_in, episodes=scaled(range(200), EPISODES))
    finally:
        stop.set()
        killer.join()
    assert done
    assert played(found) == serial(scaled(range(200), EPISODES))


def linger(seconds: float, number: int, t: int) -> None:
    time.sleep(seconds)


# ---- an environment that is broken, and wrong arguments --------------------------------------------------


def broken(act: Any, number: int, t: int) -> None:
    act()


@pytest.mark.slow
@pytest.mark.parametrize("act", some(["raises", "exits", "segfaults"], 2))
def test_a_broken_environment(act: str) -> None:
    """Daily, workers have one environment each. With more, some episode runs nearly always, and nearly all must fail
    before it is clear that none ends."""
    with pytest.raises(WorkerError, match=r"the environment is broken: the first \d+ episodes have all failed"):
        run(partial(Reach, fault=partial(broken, ACTS[act])), batch_B=scaled(6, 2))


def not_built(task: str) -> Any:
    if task == "b":
        raise OSError("no display")
    return gym.make("CartPole-v1")


def zeros(observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


def test_a_task_that_cannot_be_built_does_not_stop_the_others() -> None:
    with pytest.warns(RuntimeWarning, match="no display"):
        found = evaluate(zeros, not_built, tasks=["a", "b"], episodes=4, attempts=2, n_workers=2)
    assert [bool(r.failed) for r in found.episodes] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("spaces", [None, (gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2))])
@pytest.mark.parametrize("place", range(3))
def test_it_may_be_any_task(place: int, spaces: Any) -> None:
    """The tasks are compared with a plain loop. That of the broken environment is the first to fail, over and over:
    the others are reset later."""
    tasks = ["fine", "good"]
    tasks.insert(place, "broken")

    def make(task: str) -> Any:
        if task == "broken":
            raise OSError("no display")
        return Late(len(task))

    with pytest.warns(RuntimeWarning, match="no display"):
        found = evaluate(zeros, make, tasks=tasks, episodes=4, attempts=1, n_workers=2, batch_B=3, spaces=spaces)
    assert {r.task for r in found.failed} == {"broken"}
    assert [r.length for r in found.episodes if not r.failed] == [4] * 8


def test_all_tasks_cannot_be_built() -> None:
    def make(task: str) -> Any:
        raise OSError(f"no display for {task}")

    arguments: dict[str, Any] = {"tasks": ["a", "b", "c"], "episodes": 40, "attempts": 1, "n_workers": 1, "batch_B": 2}
    with pytest.raises(ConfigError, match="no display for a"):
        evaluate(zeros, make, **arguments)
    spaces = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    with pytest.raises(
        WorkerError, match=r"is broken: the first [345] episodes have all failed.* no display for [abc]"
    ):
        evaluate(zeros, make, spaces=spaces, **arguments)


class Late(gym.Env[Any, Any]):
    """Its first reset takes long. Episodes have a fixed length."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length
        time.sleep(0.3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == self.length, False, {}


def other_space(task: str) -> Any:
    return gym.make({"a": "CartPole-v1", "b": "Acrobot-v1"}[task])


@pytest.mark.parametrize("act_in", ["caller", "workers"])
def test_the_error_of_a_policy_is_raised_unchanged(act_in: Any) -> None:
    with pytest.raises(Moody, match="I will not"):
        evaluate(moody, "CartPole-v1", episodes=3, n_workers=1, act_in=act_in)


class Robot:
    """A policy, which cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle a lock")

    def reset(self) -> None:
        """Begin."""

    def select_action(self, batch: Any) -> Any:
        return [0]


class Switches(gym.Env[Any, Any]):
    """It ends in its first step, and returns these values in place of good ones."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.MultiBinary(2)

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.wrong.get("reset", (0, {}))

    def step(self, action: Any) -> Any:
        usual = {"observation": 0, "reward": 1.0, "terminated": True, "truncated": False, "info": {}}
        return tuple({**usual, **{k: v for k, v in self.wrong.items() if k in usual}}.values())


def off(observation: Any) -> Any:
    return np.zeros((len(observation), 2), np.int64)


def broken_by(**wrong: Any) -> dict[str, Any]:
    return {"policies": off, "env_fn": partial(Switches, **wrong), "attempts": 1}


@pytest.mark.parametrize("reward", [1, np.float32(1), np.array(1.0), True])
def test_usual_numbers_are_rewards(reward: Any) -> None:
    found = evaluate(off, partial(Switches, reward=reward, terminated=np.True_), episodes=1, n_workers=1)
    assert found.episodes[0].metrics["return"] == 1.0


BROKEN = "the environment is broken: .*"
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "success at": ({"success_at": "any"}, ConfigError, 'success_at="any" needs success'),
    "success when": ({"success": "ok", "success_at": "first"}, ConfigError, "success_at must be one of last, any"),
    "never a success": (
        {"success": "solved", "success_at": "any"},
        ConfigError,
        "success='solved' is not in the info of any step of an episode, .* must say it at least once of each",
    ),
    "success is a number": ({"success": 3}, ConfigError, "success must be a key of the info, a text, got 3"),
    "batched": ({"batched": "no"}, ConfigError, "batched must be True or False, got 'no'"),
    "folder": ({"folder": 3}, ConfigError, "folder must be the path of a folder, got 3"),
    "arguments": ({"tasks": {"a": {3: 4}}}, ConfigError, "tasks must be a list of different names"),
    "no policy": ({"policies": {}}, ConfigError, "has no policy"),
    "a number as policy": ({"policies": 3}, ConfigError, "a policy is an Agent, a function"),
    "episodes": ({"episodes": 0}, ConfigError, "episodes must be an integer of at least 1"),
    "a range": ({"episodes": range(4, 2)}, ConfigError, "episodes must be a number, or a range"),
    "tasks": ({"tasks": ["a", "a"]}, ConfigError, "tasks must be a list of different names"),
    "until": ({"until_success": True}, ConfigError, "until_success needs success"),
    "success": ({"success": "solved"}, ConfigError, r"success='solved' is not in the info of the last step of an"),
    "act_in": ({"act_in": "gpu"}, ConfigError, "act_in must be one of caller, workers"),
    "min_ready": ({"min_ready": 1.5}, ConfigError, "min_ready must be a number of environments, or a share"),
    "env list": ({"env_fn": [Reach]}, ConfigError, "env_fn must be one callable"),
    "shape": ({"policies": lambda x: np.zeros((len(x), 2, 2))}, SpaceError, r"must return actions \[\d, \] or chunks"),
    "dtype": ({"policies": lambda x: np.zeros(len(x))}, SpaceError, "must return int64 as action"),
    "chunk": ({"policies": lambda x: np.zeros((len(x), 200), int)}, ConfigError, "chunks of 200 actions, more"),
    "no start": ({"options": {}}, ConfigError, "options must be a function"),
    "bad options": ({"options": lambda task, k: 3}, ConfigError, r"options\('', 0\) must return a dict or None, got 3"),
    "start method": ({"start_method": "thread"}, ConfigError, "start_method must be one of"),
    "few environments": ({"n_workers": 3, "batch_B": 2}, ConfigError, "batch_B=2 is less than n_workers=3"),
    "nan": ({"min_ready": float("nan")}, ConfigError, "min_ready must be"),
    "a class": ({"policies": Robot}, ConfigError, "got the class Robot: make one of it"),
    "no array": ({"policies": lambda x: [[1], [1, 2]]}, SpaceError, "must return an array or a tensor as action"),
    "wraps": ({"policies": lambda x: np.full((len(x), 2), 300), "env_fn": Switches}, SpaceError, "from 300 to 300"),
    "states first": ({"policies": lambda states: np.zeros(len(states))}, SpaceError, "must return int64 as action"),
    "lock": (
        {"policies": partial(lambda lock, x: zeros(x), threading.Lock()), "act_in": "workers"},
        ConfigError,
        "the policy 'policy' cannot be pickled for the workers",
    ),
    "a policy that cannot be copied": ({"policies": Robot()}, ConfigError, r"Robot object at .* cannot pickle a lock"),
    "another space": (
        {"env_fn": other_space, "tasks": ["a", "b"]},
        SpaceError,
        r"the observation_space of the task 'b' is Box.*, expected was Box",
    ),
    "no reward": (broken_by(reward=None), WorkerError, BROKEN + "the reward of .* must be a single number, got None"),
    "a text": (broken_by(reward="1"), WorkerError, BROKEN + "the reward of .* must be a single number, got '1'"),
    "a flag": (broken_by(terminated=None), WorkerError, BROKEN + "terminated of .* must be True or False, got None"),
    "an info": (broken_by(info=None), WorkerError, BROKEN + "the info that env.step of env_rank 0 .* must be a dict"),
    "a reset": (broken_by(reset=0), WorkerError, BROKEN + r"env.reset of .* must return a tuple \(obs.*\), got 0"),
    "states": ({"policies": lambda x, states: zeros(x)}, SpaceError, r"must return \(action, states\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    given, kind, message = WRONG[case]
    arguments: dict[str, Any] = {"policies": zeros, "env_fn": "CartPole-v1", "episodes": 3, "n_workers": 1, **given}
    with pytest.raises(kind, match=message):
        evaluate(arguments.pop("policies"), arguments.pop("env_fn"), **arguments)


class Remembers(gym.Env[Any, Any]):
    """Each episode is longer than the one before."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    n = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n, self.t = self.n + 1, 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return 0, 1.0, self.t >= self.n, False, {}


def test_an_environment_that_remembers_is_noticed() -> None:
    message = (
        "1 of 1 episodes were different when they were played again. episode 2 of 'policy': it has 1 steps, and had 3"
    )
    with pytest.warns(RuntimeWarning, match=message):
        evaluate(zeros, Remembers, episodes=3, n_workers=1, batch_B=1)


class Starts(CountingEnv):
    """It could start a program, here and in a worker."""

    def __init__(self) -> None:
        super().__init__()
        marks = [value for name, value in os.environ.items() if name.startswith("PENSTOCK_PROCESS_")]
        assert "1" in marks, "the program would outlive the main process"


def test_programs_of_environments_end_with_the_main_process() -> None:
    evaluate(zeros, Starts, episodes=2, n_workers=1)
