"""`EnvProcess` beside the same environment in place: equal, bit for bit, in samplers and in old Pythons too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn

import penstock
from penstock import (
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    ParallelSampler,
    RandomAgent,
    SamplerStateError,
    SerialSampler,
    SpaceError,
)
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.evaluation import evaluate
from penstock.games import EnvProcess
from penstock.system import PORTABLE
from penstock.vector import Sb3VecEnv, ShmVectorEnv

from ..scale import scaled
from ..support import PROGRAMS, until
from . import own_envs_support
from .games_support import SAMPLERS
from .own_envs_support import OLD, assert_equal, here, old_python, own, own_envs, walk

import cloudpickle  # isort: skip

for module in (own_envs_support, own_envs):  # workers cannot import what is here
    cloudpickle.register_pickle_by_value(module)

CARTPOLE = {"id": "CartPole-v1"}


# ---- equal to the environment in place ---------------------------------------------------------


def make_other(length: int) -> Any:
    return here("Numbers", length=length)


#: By name: the environment in place, and in a process.
KINDS: dict[str, tuple[Any, Any]] = {
    "CartPole": (partial(gym.make, **CARTPOLE), partial(EnvProcess, "gymnasium:make", kwargs=CARTPOLE)),
    "image": (partial(here, "Scene"), partial(own, "Scene")),
    "in shared memory": (
        partial(here, "Scene", shape=(256, 256, 6)),
        partial(own, "Scene", kwargs={"shape": (256, 256, 6)}),
    ),
    "of all spaces": (partial(here, "Words"), partial(own, "Words")),
    "a function": (partial(make_other, 9), partial(EnvProcess, make_other, kwargs={"length": 9})),
    "a class": (own_envs.Numbers, partial(EnvProcess, own_envs.Numbers)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_comes_is_equal_to_a_plain_loop(kind: str) -> None:
    make_here, make_there = KINDS[kind]
    local, env = make_here(), make_there()
    assert (env.observation_space, env.action_space) == (local.observation_space, local.action_space)
    assert (env.render_mode, env.metadata) == (local.render_mode, local.metadata)
    for each in (local.action_space, env.action_space):
        each.seed(1)
    n, options = scaled(400, 60), {"level": (1, "x"), "m": np.eye(2), "none": None}
    actions = [local.action_space.sample() for _ in range(n)]
    assert_equal([env.action_space.sample() for _ in range(n)], actions)
    assert_equal(walk(env, actions, options=options), walk(local, actions, options=options))


class Elsewhere(EnvProcess):
    """As in another container: what the learner wants to share is another file there."""

    def _ask_alone(self, name: str, *arguments: Any) -> Any:
        return super()._ask_alone(name, *(("/dev/zero", *arguments[1:]) if name == "map" else arguments))


@pytest.mark.parametrize("cls", [EnvProcess, Elsewhere])
@pytest.mark.parametrize("shape", [(300, 300), (3000, 300)])
def test_the_memory_of_both_sides_fits_or_is_refused(cls: Any, shape: Any) -> None:
    env = cls("own_envs:Scene", path=[PROGRAMS], kwargs={"shape": shape})
    found, actions = [env.reset(seed=5)], [1] * 5
    found += [env.step(action) for action in actions]
    assert (env._memory is None) == (cls is Elsewhere or PORTABLE)
    env.close()
    assert_equal(found, walk(here("Scene", shape=shape), actions))


def test_methods_are_called_and_attributes_read() -> None:
    env = own("Numbers")
    assert env.call("double", 2, add=1) == 5
    assert_equal(env.call("double", np.arange(3)), 2 * np.arange(3))
    assert (env.call("length"), env.call("rng.randint.__name__")) == (7, "randint")
    assert psutil.Process(env.pid).ppid() == os.getpid()
    env.close()
    local, env = (
        gym.make(render_mode="rgb_array", **CARTPOLE),
        EnvProcess("gymnasium:make", kwargs={**CARTPOLE, "render_mode": "rgb_array"}),
    )
    for each in (local, env):
        each.reset(seed=1)
    assert_equal(env.render(), local.render())
    env.close(), local.close()


@pytest.mark.parametrize("how", ["five", "three", "four"])
def test_what_does_not_fit_its_space_has_the_text_of_a_sampler(how: str) -> None:
    texts = []
    for make in (partial(here, "Faulty", how=how), partial(own, "Faulty", kwargs={"how": how})):
        with SerialSampler(make, batch_T=8, batch_B=1, max_decorrelation_steps=0) as sampler:
            sampler.initialize(RandomAgent(), seed=1)
            with pytest.raises(penstock.WorkerError) as caught:
                sampler.obtain_samples(0)
            texts.append(str(caught.value.__cause__).splitlines()[0])
    assert texts[0] == texts[1]


# ---- seeds and renewal -----------------------------------------------------------------------------


def derived(first: int, k: int) -> int:
    """The seed of episode `k` after a reset with seed `first`."""
    return int(np.random.SeedSequence(first, spawn_key=(Purpose.EPISODE, k)).generate_state(1)[0])


def against_loop(batches: list[Any], make: Any, *, renews: bool) -> int:
    """Compare the batches with a plain loop, which makes the same actions. Returns how many cells there were."""
    n_cells = 0
    for b in range(batches[0].env.reward.shape[1]):
        first, k, env = ColumnStreams(11, [b]).env_seeds(Purpose.TRAIN)[0], 0, make()
        observation, _ = env.reset(seed=first)
        for batch in batches:
            for t in range(len(batch.env.reward)):
                np.testing.assert_array_equal(batch.env.observation[t, b], observation)
                action = int(batch.agent.action[t, b])
                observation, reward, ended, _, _ = env.step(action)
                assert (batch.env.reward[t, b], batch.env.done[t, b]) == (np.float32(reward), ended)
                n_cells += 1
                if ended:
                    k += 1
                    observation, _ = env.reset(seed=derived(first, k) if renews else None)
    return n_cells


#: After how many episodes a process is renewed, and how many workers there are.
ALL_TURNS = list(product((None, 1, 2, 3, 10**6), (1, 2, 3)))
SOME_TURNS = [(10**6, 1), (1, 2), (3, 1), (2, 3), (None, 2)]


@pytest.mark.filterwarnings("ignore:.*did not exit while resetting:RuntimeWarning")  # an `AsyncSampler` works ahead
@pytest.mark.parametrize(
    ("cls", "every", "n_workers"),
    [(cls, *how) for cls, how in scaled(product(SAMPLERS, ALL_TURNS), zip(SAMPLERS, SOME_TURNS, strict=True))],
)
def test_one_batch_whatever_the_sampler_and_the_turn_of_renewal(cls: Any, every: int | None, n_workers: int) -> None:
    options = {} if cls is SerialSampler else {"n_workers": max(n_workers, 2 if cls is AlternatingSampler else 1)}
    make = partial(own, "Numbers", renew_every=every)
    with cls(make, batch_T=10, batch_B=3, max_decorrelation_steps=0, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=11)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        batches = [sampler.obtain_samples(itr)[0].copy().numpy() for itr in range(2)]
    assert against_loop(batches, own_envs.Numbers, renews=every is not None) == 60


def test_a_process_is_renewed_after_its_episodes_and_none_stays() -> None:
    env = own("Leak", renew_every=3)
    pids = [env.reset(seed=k)[1]["pid"] for k in range(8)]
    assert [len(set(pids[k : k + 3])) for k in (0, 3, 6)] == [1, 1, 1]
    assert len(set(pids)) == 3
    env.action_space.seed(1)
    found = [(env.action_space.sample(), env.reset())[0] for _ in range(4)]  # the renewal leaves the spaces as they are
    env.close()
    env.action_space.seed(1)
    assert found == [env.action_space.sample() for _ in range(4)]
    assert not any(map(psutil.pid_exists, pids))


def test_a_leak_stays_below_its_limit() -> None:
    env = own("Leak")
    env.reset(seed=0)
    limit = psutil.Process(env.pid).memory_info().rss + (20 << 20)
    env.close()
    env, most, pids = own("Leak", max_rss=limit), 0, set()
    for k in range(scaled(300, 60)):
        _, info = env.reset(seed=None if k else 0)
        pids.add(info["pid"])
        most = max(most, psutil.Process(env.pid).memory_info().rss)
    env.close()
    assert most <= limit + (3 << 20)
    assert len(pids) >= scaled(12, 3)


def test_environments_with_global_generators_survive_a_renewal() -> None:
    found = [walk(own("Global", renew_every=every), [0] * 15) for every in (1, 10**6)]
    assert_equal(*found)
    env = own("Global")
    assert_equal(*[env.reset(seed=2) for _ in range(2)])
    env.close()


def test_an_unseeded_environment_draws_a_seed_of_its_own() -> None:
    found = [walk(own("Numbers", renew_every=1), [0], seed=None)[0][0] for _ in range(2)]
    assert (found[0] != found[1]).all()


# ---- composed with the rest ------------------------------------------------------------------------


def test_vector_environments() -> None:
    theirs = SyncVectorEnv([own_envs.Numbers] * 3)
    wanted = [theirs.reset(seed=4), *(theirs.step(np.full(3, k % 5)) for k in range(30))]
    for every in (None, 10**6):
        with ShmVectorEnv([partial(own, "Numbers", renew_every=every)] * 3, n_workers=2) as ours:
            found = [ours.reset(seed=4), *(ours.step(np.full(3, k % 5)) for k in range(8 if every else 30))]
        for ours_, theirs_ in zip(found, wanted, strict=False):
            for each, other in zip(ours_[:-1], theirs_[:-1], strict=True):
                np.testing.assert_array_equal(each, other)
            assert ours_[-1]["k"].tolist() == theirs_[-1]["k"].tolist()
            if every and ours_[-1]["k"].max() == 7:
                break
    with ShmVectorEnv([partial(own, "Numbers", renew_every=n) for n in (1, 2, 3)], n_workers=2) as ours:
        ours.reset(seed=4)
        found = [ours.step(np.zeros(3, int))[0].copy() for _ in range(20)]
    for column in range(3):
        env = here("Numbers")
        env.reset(seed=4 + column)
        for k in range(20):
            is_over = k > 0 and k % 8 == 7
            wanted_row = env.reset(seed=derived(4 + column, k // 8 + 1))[0] if is_over else env.step(0)[0]
            np.testing.assert_array_equal(found[k][column], wanted_row)


def test_stable_baselines() -> None:
    pytest.importorskip("stable_baselines3")
    envs = Sb3VecEnv([partial(own, "Numbers", renew_every=2)] * 2, n_workers=2)
    envs.seed(4)
    found = [envs.reset().copy(), *(envs.step(np.zeros(2, int))[0].copy() for _ in range(6))]
    assert envs.env_method("call", "double", 4) == [8, 8]
    envs.close()
    for column in range(2):
        env = here("Numbers")
        np.testing.assert_array_equal(found[0][column], env.reset(seed=4 + column)[0])
        for k in range(6):
            np.testing.assert_array_equal(found[k + 1][column], env.step(0)[0])


def choose(observations: Any) -> Any:
    return (np.abs(observations[:, 0]) * 10).astype(int) % 5


def test_an_evaluation_has_the_same_episodes() -> None:
    sizes = {"episodes": 6, "seed": 3, "n_workers": 2}
    ours = evaluate(choose, partial(own, "Numbers", renew_every=2), **sizes)
    theirs = evaluate(choose, own_envs.Numbers, **sizes)
    assert [(each.seed, each.length, each.metrics) for each in ours.episodes] == [
        (each.seed, each.length, each.metrics) for each in theirs.episodes
    ]


def test_environments_of_a_worker_start_side_by_side(tmp_path: Path) -> None:
    """Each waits, before it makes its environment, until all have begun."""

    def make(folder: str, n: int) -> Any:
        import time

        (Path(folder) / str(os.getpid())).touch()
        while len(os.listdir(folder)) < n:
            time.sleep(0.01)
        return own_envs.Numbers()

    local = here("Numbers")
    spaces, kwargs = (local.observation_space, local.action_space), {"folder": str(tmp_path), "n": 3}
    envs = [EnvProcess(make, kwargs=kwargs, spaces=spaces, start_timeout=30) for _ in range(3)]
    for env in envs:
        assert_equal(env.reset(seed=5), here("Numbers").reset(seed=5))
        env.close()


# ---- old Pythons ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("name", ["Scene", "OldScene"])
def test_an_old_python_with_an_old_gym_is_equal_too(version: str, name: str) -> None:
    env, local, actions = own(name, python=old_python(version)), here("Scene"), [0, 3, 4, 1] * 10
    assert (env.observation_space, env.action_space) == (local.observation_space, local.action_space)
    for found, wanted in zip(walk(env, actions), walk(local, actions), strict=True):
        has_info = len(found) == 5 or (name == "Scene" and OLD[version] != "0.21.0")
        assert_equal(found, wanted if has_info or name == "Scene" else (wanted[0], {}))


@pytest.mark.parametrize("version", OLD)
def test_the_environments_of_an_old_gym(version: str) -> None:
    """Its CartPole is today's. Its TimeLimit says that an episode was truncated."""
    python = old_python(version)
    env, local, actions = EnvProcess("gym:make", python=python, kwargs=CARTPOLE), gym.make("CartPole-v1"), [0, 1] * 40
    found, wanted = walk(env, actions), walk(local, actions)
    is_same_physics = OLD[version] != "0.21.0"  # which draws from another generator
    for ours, theirs in zip(found, wanted, strict=False) if is_same_physics else ():
        assert_equal(ours[:1] if len(ours) == 2 else ours[:4], theirs[:1] if len(theirs) == 2 else theirs[:4])
    env = EnvProcess("gym:make", python=python, kwargs={"id": "MountainCar-v0"})
    env.reset(seed=1)
    ends = [env.step(1)[2:4] for _ in range(200)]
    env.close()
    assert ends == [(False, False)] * 199 + [(False, True)]


@pytest.mark.parametrize("version", OLD)
def test_a_sampler_takes_batches_from_an_old_python(version: str) -> None:
    make = partial(EnvProcess, "own_envs:Numbers", python=old_python(version), path=[PROGRAMS], renew_every=2)
    with ParallelSampler(make, batch_T=10, batch_B=2, n_workers=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=11)
        batches = [sampler.obtain_samples(itr)[0].copy().numpy() for itr in range(2)]
    assert against_loop(batches, own_envs.Numbers, renews=True) == 40


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(30 * 32, 8)

    def forward(self, observation: Any) -> Any:
        found = self.body(observation.flatten(-2).float() / 255)
        return found[..., :7], found[..., 7]


@pytest.mark.slow
def test_a_game_that_needs_an_old_gym_and_an_old_numpy_is_trained() -> None:
    """Some batches of REINFORCE: a sampler in today's Python, Super Mario Bros. in its own."""
    python = old_python("3.7")
    if subprocess.run([python, "-c", "import gym_super_mario_bros"], check=False).returncode:
        pytest.skip("gym-super-mario-bros is not here: .ci/old_gyms installs it, with a C++ compiler")
    make = partial(EnvProcess, "own_envs:super_mario", python=python, path=[PROGRAMS])
    agent = CategoricalPgAgent(Pictures)
    with ParallelSampler(make, batch_T=16, batch_B=2, n_workers=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(agent, seed=1)
        before, optimizer = agent.model.body.weight.clone(), torch.optim.Adam(agent.model.parameters())
        for itr in range(3):
            samples, _ = sampler.obtain_samples(itr)
            loss = -(agent.evaluate(samples).log_prob * samples.env.reward).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            agent.sync_shared_memory()
            assert samples.env.observation.float().std() > 1
    assert not torch.equal(agent.model.body.weight, before)


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"target": "own_envs"}, ConfigError, 'target must be a text such as "my_envs:make" or a function'),
        ({"target": 3}, ConfigError, "target must be"),
        ({"target": make_other, "python": sys.executable}, ConfigError, "since it runs in another Python"),
        ({"kwargs": {"shape": object()}}, ConfigError, r"kwargs of EnvProcess: <object.*cannot be sent: use numbers"),
        ({"step_timeout": 0}, ConfigError, "step_timeout must be a positive number"),
        ({"environ": 3}, ConfigError, "environ must have names and texts"),
        ({"spaces": 3}, ConfigError, "spaces must be"),
        ({"renew_every": 0}, ConfigError, "renew_every must be"),
        ({"max_rss": "many"}, ConfigError, "max_rss must be"),
        ({"target": "own_envs:NoSpace"}, SpaceError, r"cannot send the space 'Sequence\(Discrete"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        EnvProcess(**{"target": "own_envs:Numbers", "path": [PROGRAMS], **arguments})


def test_calls_that_cannot_work_are_refused() -> None:
    env = own("Numbers")
    with pytest.raises(ConfigError, match=r"^reset of EnvProcess: <object .*, a builtins.object, cannot be sent"):
        env.reset(options={"x": object()})
    env.reset(seed=1)
    env.close()
    env.close()
    with pytest.raises(SamplerStateError, match="this EnvProcess is closed: make a new one"):
        env.step(0)
    spaces = gym.spaces.Box(0, 1, (4,)), gym.spaces.Discrete(5)
    env = own("Numbers", spaces=spaces)
    with pytest.raises(
        SpaceError, match=re.escape("observation_space: the environment has Box(-9.0, 9.0, (4,), float32)")
    ):
        env.reset(seed=1)
    env.close()


def test_what_the_process_gets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    log = tmp_path / "log"
    options: dict[str, Any] = {"environ": {"OWN": "x"}, "inherit_env": ["PATH"], "cwd": tmp_path, "log_file": log}
    env = own("Numbers", **options)
    names = "OWN", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PENSTOCK_TOKEN", "HOME"
    found = psutil.Process(env.pid).environ()
    assert [found.get(name) for name in names] == ["x", "1", "3", None, None]
    assert psutil.Process(env.pid).cwd() == str(tmp_path)
    env.close()
    until(log.exists)


def test_it_is_among_the_names_of_the_package() -> None:
    assert penstock.EnvProcess is EnvProcess


class Sticky(gym.Wrapper[Any, Any, Any, Any]):
    """Draws from the generator of its environment, as Gymnasium's wrappers do."""

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(int(self.np_random.integers(2)))
        return observation, *rest


def test_a_simulator_in_the_environment_is_no_wrapper_and_wrappers_outside_are_seeded() -> None:
    for seed in (7, None):
        found = Sticky(own("WithSimulator")), Sticky(here("WithSimulator"))
        for env in found:
            env.reset(seed=3)
        assert_equal(*(walk(env, [0] * 12, seed) for env in found))
