"""ShmVectorEnv as a Stable-Baselines3 VecEnv: value for value what its own DummyVecEnv gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from penstock import ConfigError, EnvCallError, SamplerStateError, SpaceError
from penstock.envs import BatchedCartPole, CountingEnv
from penstock.vector import ShmVectorEnv

pytest.importorskip("stable_baselines3")

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

from penstock.vector import Sb3VecEnv

from ..scale import pairs, scaled
from ..support import assert_same, until

pytestmark = pytest.mark.slow


def ours(fns: Any, **kwargs: Any) -> Any:
    return ShmVectorEnv(fns, in_series=2, autoreset_mode="SAME_STEP", **kwargs).to_sb3()


def batched(make: Any, n: int) -> Any:
    def env_fn(num_envs: int) -> Any:
        return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    return Sb3VecEnv(env_fn, num_envs=n, n_workers=2)


@pytest.mark.parametrize(
    ("build", "env_id"), pairs([lambda make, n: ours([make] * n), batched], ["CartPole-v1", "Pendulum-v1"])
)
def test_the_same_as_a_dummy_vec_env(build: Any, env_id: str) -> None:
    def make() -> Any:
        return Monitor(gym.make(env_id, max_episode_steps=15))

    mine, theirs = build(make, 3), DummyVecEnv([make] * 3)
    for envs in (mine, theirs):
        envs.seed(4)
        envs.action_space.seed(0)
    np.testing.assert_array_equal(mine.reset(), theirs.reset())
    for t in range(50):
        actions = np.stack([theirs.action_space.sample() for _ in range(3)])
        (*got, infos), (*wanted, expected) = mine.step(actions), theirs.step(actions)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(t))
        assert got[1].dtype == np.float32
        for info, other in zip(infos, expected, strict=True):
            assert_same(info.get("terminal_observation"), other.get("terminal_observation"))
            # What DummyVecEnv says of every step, this one says where an episode ended.
            assert info.get("TimeLimit.truncated", False) == other["TimeLimit.truncated"]
            assert ("episode" in info) == ("episode" in other)
            if "episode" in info:
                assert (info["episode"]["r"], info["episode"]["l"]) == (other["episode"]["r"], other["episode"]["l"])
    mine.close()
    theirs.close()


def test_the_rest_of_the_interface() -> None:
    envs = ours([partial(CountingEnv, length=3)] * 4)
    assert envs.get_attr("length") == [3] * 4
    envs.set_attr("length", 4, [2, 0])
    assert envs.get_attr("length", [0, 1, 2]) == [4, 3, 4]
    assert [seed[1] for seed in envs.env_method("reset", indices=[3, 1])] == [{}, {}]
    assert envs.env_is_wrapped(Monitor) == [False] * 4
    assert envs.env_is_wrapped(gym.Wrapper, 1) == [False]
    envs.set_options({"x": 1})
    envs.reset()
    monitored = VecMonitor(envs)
    monitored.set_options()
    monitored.reset()
    for _ in range(3):
        *_, infos = monitored.step(np.zeros(4, int))
    assert ["episode" in info for info in infos] == [False, True, False, True]
    monitored.close()


def test_the_rest_of_the_interface_of_batched_environments() -> None:
    def env_fn(num_envs: int) -> Any:
        return RecordEpisodeStatistics(BatchedCartPole(num_envs, max_episode_steps=3))

    envs = ShmVectorEnv(env_fn, num_envs=5, n_workers=2).to_sb3()
    assert envs.get_attr("num_envs") == [3, 3, 3, 2, 2]
    envs.set_attr("length", 0.6, 4)
    assert envs.get_attr("length", [0, 4]) == [0.5, 0.6]
    assert envs.env_is_wrapped(Monitor, [1, 4]) == [False, False]
    envs.seed(3)
    envs.set_options({"low": -0.01, "high": 0.01})
    plain = BatchedCartPole(5)
    np.testing.assert_array_equal(envs.reset(), plain.reset(seed=3, options={"low": -0.01, "high": 0.01})[0])
    assert envs.env_method("reset_rows", np.array([1]), indices=[4])[0][0].shape == (1, 4)
    monitored = VecMonitor(envs)
    monitored.reset()
    for _ in range(3):
        _, _, done, infos = monitored.step(np.zeros(5, int))
    assert done.all()
    for info in infos:
        assert info["TimeLimit.truncated"]
        assert info["terminal_observation"].shape == (4,)
        assert (info["episode"]["r"], info["episode"]["l"]) == (3, 3)
    envs.set_options([{}, {}, {}, {}, {"low": 0.1}])
    with pytest.raises(ConfigError, match="None or one dict"):
        envs.reset()
    monitored.close()


class Acting(gym.Env[Any, Any]):
    """Tells its actions and options in its infos. It may step before the first reset."""

    observation_space = spaces.Box(-1, 1, (1,))

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {"options": options}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {"action": action}


@pytest.mark.parametrize("kind", [DummyVecEnv, ours])
def test_each_environment_has_its_own_options(kind: Any) -> None:
    envs = kind([partial(Acting, spaces.Discrete(2))] * 3)
    for options in ([{"low": 1}, {"low": 2}, {}], {"low": 3}, None):
        envs.set_options(options)
        envs.reset()
        wanted = [options] * 3 if not isinstance(options, list) else options
        assert [info.get("options") for info in envs.reset_infos] == [o or None for o in wanted]
    envs.close()


NESTED = spaces.Dict({"a": spaces.Discrete(5), "b": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.MultiBinary(3)])})


@pytest.mark.parametrize("space", [NESTED, spaces.Tuple([spaces.Discrete(2), NESTED]), spaces.Discrete(4)])
def test_a_list_of_actions_also_before_the_first_reset(space: Any) -> None:
    mine, theirs = ours([partial(Acting, space)] * 3), DummyVecEnv([partial(Acting, space)] * 3)
    space.seed(1)
    for _ in range(3):
        actions = [space.sample() for _ in range(3)]
        got, wanted = ([info["action"] for info in envs.step(actions)[3]] for envs in (mine, theirs))
        assert_same(got, wanted)
    mine.close()


def test_a_list_of_actions_that_does_not_fit() -> None:
    envs = ours([partial(Acting, NESTED)] * 3)
    fits = {"a": 1, "b": (np.zeros(2, np.float32), np.zeros(3, np.int8))}
    for wrong in ([fits] * 2, [{"a": 1}] * 3, 5, [{**fits, "c": 1}] * 3, [{**fits, "b": (1,)}] * 3):
        with pytest.raises(
            SpaceError, match=r"action\S* must be a list of 3, one (dict|tuple) .* for each environment"
        ):
            envs.step(wrong)
    envs.step([fits] * 3)
    envs.close()


def test_stable_baselines3_is_imported_on_first_use_only() -> None:
    # Daily, the other tests use it: the import of torch takes 2 s of CPU time.
    code = "import sys, penstock.vector; assert 'stable_baselines3' not in sys.modules"
    code += scaled("; penstock.vector.Sb3VecEnv; assert 'stable_baselines3' in sys.modules", "")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    ("env_fns", "options", "problem"),
    [
        ([CountingEnv], {"copy": False}, "copy=True"),
        ([CountingEnv], {"autoreset_mode": "NEXT_STEP"}, "SAME_STEP"),
        ("CartPole-v1", {"num_envs": 4}, "is SAME_STEP, but the batched environment has the mode NEXT_STEP"),
        *(
            ([CountingEnv], {"reward_dtype": wrong}, "reward_dtype must be one of float32, float64")
            for wrong in (int, "float", None)
        ),
        ([CountingEnv], {"reward_dtyp": 1}, r"^Sb3VecEnv has no argument 'reward_dtyp': did you mean 'reward_dtype'"),
    ],
)
def test_arguments_that_do_not_fit_leave_no_worker(env_fns: Any, options: Any, problem: str) -> None:
    """The fixture of all tests looks for processes that are left."""
    with pytest.raises(ConfigError, match=problem):
        Sb3VecEnv(env_fns, **options)
    with ShmVectorEnv([CountingEnv]) as envs, pytest.raises(ConfigError, match='autoreset_mode="SAME_STEP"'):
        envs.to_sb3()


class Asked(gym.Wrapper[Any, Any, Any, Any]):
    """Has attributes of every kind, and counts its resets."""

    n_resets, level, _hidden = 0, 1, 2

    def reset(self, **kwargs: Any) -> Any:
        self.n_resets += 1
        return self.env.reset(**kwargs)

    def set_level(self, level: int, name: str = "") -> None:
        self.level = level

    @property
    def broken(self) -> int:
        raise AttributeError

    @property
    def locked(self) -> Any:
        return threading.Lock()

    @property
    def unreadable(self) -> Any:
        return Unreadable()


class Unreadable:
    def __reduce__(self) -> Any:
        raise AttributeError("a fault in pickling")


def asked() -> Any:
    return Asked(gym.make("CartPole-v1"))


METHODS, VALUES, FAILING = ("reset", "set_level", "close"), ("level", "_hidden", "gravity"), ("locked", "unreadable")
NAMES = [*METHODS, *VALUES, *FAILING, "_np_random", "broken", "x"]


def test_asking_for_attributes_calls_none_of_them() -> None:
    mine, theirs = Sb3VecEnv([asked] * 3, n_workers=2), DummyVecEnv([asked] * 3)
    for envs in (mine, theirs):
        envs.reset()
    assert [mine.has_attr(name) for name in NAMES] == [theirs.has_attr(name) for name in NAMES]
    for name in ("reset", "set_level"):
        found = mine.get_attr(name)
        assert [each.__name__ for each in found] == [each.__name__ for each in theirs.get_attr(name)] == [name] * 3
    for name in (*VALUES, "n_resets"):
        assert mine.get_attr(name) == theirs.get_attr(name)
        assert mine.get_attr(name, indices=[2, 0]) == theirs.get_attr(name, indices=[2, 0])
    for name in ("broken", "x"):
        for envs in (mine, theirs):
            with pytest.raises(AttributeError, match=f"'{name}'"):
                envs.get_attr(name, indices=1)
    assert mine.get_attr("n_resets", indices=[]) == []
    for name in FAILING:
        with pytest.raises(
            EnvCallError, match=rf"get_attr '{name}' on env_rank 1, a \w+, cannot be pickled: .*part of"
        ):
            mine.get_attr(name, indices=1)
    mine.env_method("set_level", 4, indices=2, name="hard")
    assert mine.get_attr("level") == [1, 1, 4]
    with pytest.raises(EnvCallError, match="TypeError: 'int' object is not callable"):
        mine.env_method("level")
    mine.close()


def test_a_method_that_cannot_be_pickled_is_there_and_the_error_says_how_to_use_it() -> None:
    def make() -> Any:
        env = asked()
        env.lock = threading.Lock()
        return env

    envs = Sb3VecEnv([make] * 2, n_workers=1)
    assert envs.has_attr("set_level")
    with pytest.raises(EnvCallError, match=r"a method, cannot be pickled: TypeError.*\. Call it by its name"):
        envs.get_attr("set_level")
    envs.env_method("set_level", 3)
    assert envs.get_attr("level") == [3, 3]
    envs.close()


class Signalling(CountingEnv):
    """At its second reset it interrupts the main process, and waits for a file."""

    def __init__(self, main_process: int, file: Path) -> None:
        super().__init__(length=50)
        self.main_process, self.file, self.n_resets = main_process, file, 0

    def reset(self, **kwargs: Any) -> Any:
        self.n_resets += 1
        if self.n_resets == 2:
            os.kill(self.main_process, signal.SIGINT)
            until(self.file.exists)
        return super().reset(**kwargs)


class Interrupted(Exception):
    pass


def test_no_result_of_an_interrupted_call_is_dropped_in_silence(tmp_path: Path) -> None:
    """The interruption may come when the results are there, but not yet at the caller."""
    file = tmp_path / "go on"
    envs = Sb3VecEnv([partial(Signalling, os.getpid(), file), CountingEnv], n_workers=2)
    action = np.zeros(2, int)
    envs.reset()
    take = envs.envs.step_wait_listed

    def take_and_raise() -> Any:
        take()
        raise Interrupted

    envs.envs.step_wait_listed = take_and_raise
    with pytest.raises(Interrupted):
        envs.step(action)
    envs.envs.step_wait_listed = take
    told = r"interrupted.* envs\.reset\(\), or, for learn.* model\._last_obs = None before it"
    with pytest.raises(SamplerStateError, match=told):
        envs.step(action)
    with pytest.raises(KeyboardInterrupt):
        envs.reset()
    file.touch()
    with pytest.raises(SamplerStateError, match="interrupted"):
        envs.step(action)
    envs.reset()
    with pytest.raises(SpaceError):  # nothing is interrupted by actions that do not fit
        envs.step(np.zeros(3, int))
    assert envs.step(action)[1].tolist() == [1, 1]
    envs.step_async(action)
    with pytest.raises(SamplerStateError, match="the call expected now is step_wait; if a step"):
        envs.step_async(action)
    assert envs.step_wait()[1].tolist() == [2, 2]
    envs.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # only SB3's own processes, which end at once
def test_float64_rewards_are_those_of_a_subproc_vec_env() -> None:
    def rewards(envs: Any) -> Any:
        envs.seed(3)
        envs.reset()
        found = [envs.step(np.zeros((2, 1), np.float32))[1] for _ in range(20)]
        envs.close()
        return np.stack(found)

    fns = [partial(gym.make, "Pendulum-v1")] * 2
    wanted, dummy = rewards(SubprocVecEnv(fns, start_method="fork")), rewards(DummyVecEnv(fns))
    assert (f"{wanted[0, 0]:.8f}", f"{dummy[0, 0]:.7f}") == ("-6.80562328", "-6.8056231")
    kwargs: Any = {"reward_dtype": np.float64, "n_workers": 2}
    for envs in (
        Sb3VecEnv(fns, **kwargs),
        make_vec_env("Pendulum-v1", 2, vec_env_cls=Sb3VecEnv, vec_env_kwargs=kwargs),  # type: ignore[arg-type]
        ShmVectorEnv(fns, autoreset_mode="SAME_STEP").to_sb3(reward_dtype=np.float64),
    ):
        assert_same(rewards(envs), wanted)
    assert_same(rewards(Sb3VecEnv(fns, context="fork")), dummy)


def test_indices_outside_are_refused_as_by_a_dummy_vec_env() -> None:
    for make in (DummyVecEnv, Sb3VecEnv):
        envs = make([partial(gym.make, "CartPole-v1")] * 2)
        assert len(envs.get_attr("spec", [-1, 0])) == 2
        for wrong, error in ((2, IndexError), (-3, IndexError), (1.0, TypeError)):
            with pytest.raises(error):
                envs.get_attr("spec", [wrong])
            with pytest.raises(error):
                envs.set_attr("mine", 1, [wrong])
        assert not envs.has_attr("mine")
        envs.close()
