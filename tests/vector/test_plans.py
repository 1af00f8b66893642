"""ShmVectorEnv(episode_plan=): options and seeds at automatic resets. A plain loop resets with the same ones."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from penstock import ConfigError, ParallelSampler, RandomAgent, WorkerError
from penstock.envs import Purpose, stream
from penstock.envs.seeding import episode_seed
from penstock.envs.toy import ScriptedGame
from penstock.vector import ShmVectorEnv

from ..samplers import test_episode_plan as episode_plans
from ..samplers.test_episode_plan import plan
from .vector_support import counting, modes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

N, SEED, STEPS = 3, 11, 40


class Maze(episode_plans.Maze):
    def pid(self) -> int:
        return os.getpid()


def begin(env: Any, i: int, episode: int, seed: int = SEED, generation: int = 0) -> Any:
    """A plain loop begins this episode."""
    key = (generation,) if generation else ()
    options = plan(i, episode, stream(seed, Purpose.PLAN, i, episode, *key))
    return env.reset(seed=episode_seed(seed, i, episode, generation), options=options)[0]


def follow(envs: ShmVectorEnv, seed: int, firsts: list[int], observation: Any) -> list[int]:
    """Plays on beside a plain loop for each environment, and compares. Returns the number of each running episode."""
    rng, mode = np.random.default_rng(0), envs.autoreset_mode
    loops, episodes, is_over = [Maze() for _ in range(envs.num_envs)], list(firsts), [False] * envs.num_envs
    for i, loop in enumerate(loops):
        np.testing.assert_array_equal(observation[i], begin(loop, i, episodes[i], seed))
    for _ in range(STEPS):
        actions = rng.uniform(-1, 1, (envs.num_envs, 1)).astype(np.float32)
        if mode is AutoresetMode.DISABLED and any(is_over):
            observation, _ = envs.reset(options={"reset_mask": np.array(is_over)})
            for i in np.flatnonzero(is_over):
                episodes[i] += 1
                np.testing.assert_array_equal(observation[i], begin(loops[i], i, episodes[i], seed))
            is_over = [False] * envs.num_envs
        observation, reward, terminated, _, infos = envs.step(actions)
        for i, loop in enumerate(loops):
            if is_over[i]:  # NEXT_STEP: this step only resets
                episodes[i] += 1
                np.testing.assert_array_equal(observation[i], begin(loop, i, episodes[i], seed))
                is_over[i] = False
                continue
            seen, wanted, is_over[i], *_ = loop.step(actions[i])
            assert reward[i] == wanted
            assert terminated[i] == is_over[i]
            if is_over[i] and mode is AutoresetMode.SAME_STEP:
                np.testing.assert_array_equal(infos["final_obs"][i], seen)
                episodes[i] += 1
                seen, is_over[i] = begin(loop, i, episodes[i], seed), False
            np.testing.assert_array_equal(observation[i], seen)
    return episodes


@modes
@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_each_reset_gets_the_seed_and_the_options_of_its_episode(mode: AutoresetMode, n_workers: int) -> None:
    with ShmVectorEnv([Maze] * N, n_workers=n_workers, autoreset_mode=mode, episode_plan=plan) as envs:
        episodes = follow(envs, SEED, [0] * N, envs.reset(seed=SEED)[0])
        assert min(episodes) >= 4
        following = [episode + 1 for episode in episodes]
        follow(envs, SEED, following, envs.reset()[0])  # without a seed, the next episodes begin
        follow(envs, 5, [0] * N, envs.reset(seed=5)[0])


def test_the_episodes_are_those_of_a_sampler() -> None:
    options = {"batch_T": STEPS, "batch_B": N, "episode_plan": plan, "max_decorrelation_steps": 0}
    with ParallelSampler(Maze, n_workers=2, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=SEED)
        sampler.obtain_samples(0)
        samples = sampler.samples_np.copy()
    observations, actions, done = samples.env.observation, samples.agent.action, samples.env.done
    with ShmVectorEnv([Maze] * N, n_workers=3, autoreset_mode="SAME_STEP", episode_plan=plan) as envs:
        observation, _ = envs.reset(seed=SEED)
        for t in range(STEPS):
            np.testing.assert_array_equal(observation, observations[t])
            observation, _, terminated, truncated, _ = envs.step(actions[t])
            np.testing.assert_array_equal(terminated | truncated, done[t])


def test_some_environments_can_begin_again_with_a_seed() -> None:
    with ShmVectorEnv([Maze] * N, n_workers=2, episode_plan=plan) as envs:
        envs.reset(seed=SEED)
        observation, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
        observation, _ = envs.reset(seed=4, options={"reset_mask": np.array([False, True, False])})
        wanted = [begin(Maze(), 0, 1), begin(Maze(), 1, 0, 4), begin(Maze(), 2, 0)]
        np.testing.assert_array_equal(observation, wanted)


class Popping(episode_plans.Maze):
    """Takes the first goal out of its options."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.drawn = float(options["goals"].pop(0))
        return self._seen(), {}


GOALS = {"goals": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("n_workers", [1, 3])
def test_what_an_environment_changes_in_its_options_no_other_one_sees(n_workers: int) -> None:
    """Neither with a plan nor with options of `reset`: AsyncVectorEnv gives each environment its own, too."""
    with ShmVectorEnv([Popping] * N, n_workers=n_workers, episode_plan=lambda *_: dict(GOALS)) as envs:
        for _ in range(2):
            np.testing.assert_array_equal(envs.reset()[0][:, 2], [1, 1, 1])
    with ShmVectorEnv([Popping] * N, n_workers=n_workers) as envs:
        for _ in range(2):
            np.testing.assert_array_equal(envs.reset(options=GOALS)[0][:, 2], [1, 1, 1])


def test_without_a_first_seed_the_episodes_have_one_of_their_own() -> None:
    """As everywhere in Gymnasium: it differs from run to run, and the plan is followed."""
    seen = []
    for _ in range(2):
        with ShmVectorEnv([Maze] * N, n_workers=1, episode_plan=plan) as envs:
            observation, _ = envs.reset()
            seen.append(observation)
            assert [int(level) for level in observation[:, 0]] == [0, 100, 200]
            assert (envs.reset()[0][:, 0] == -1).all()  # episode 1 has no options
    assert not np.array_equal(*seen)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_after_a_replacement_the_episodes_go_on_with_seeds_of_the_next_generation(mode: Any) -> None:
    with ShmVectorEnv(
        [Maze] * 2, n_workers=1, autoreset_mode=mode, episode_plan=plan, on_worker_failure="restart"
    ) as envs:
        envs.reset(seed=SEED)
        envs.reset()
        os.kill(envs.call("pid")[0], signal.SIGKILL)
        observation, _, _, truncated, _ = envs.step(np.zeros((2, 1), np.float32))
        assert truncated.all()
        if mode == "NEXT_STEP":
            observation, *_ = envs.step(np.zeros((2, 1), np.float32))
        np.testing.assert_array_equal(observation, [begin(Maze(), i, 2, generation=1) for i in range(2)])
        observation, _ = envs.reset(seed=SEED)
        np.testing.assert_array_equal(observation, [begin(Maze(), i, 0) for i in range(2)])


def test_stable_baselines_gets_the_same_episodes() -> None:
    pytest.importorskip("stable_baselines3")
    from penstock.vector import Sb3VecEnv

    with ShmVectorEnv([Maze] * N, n_workers=2, autoreset_mode="SAME_STEP", episode_plan=plan) as ours:
        theirs = Sb3VecEnv([Maze] * N, n_workers=3, episode_plan=plan)
        try:
            theirs.seed(SEED)
            np.testing.assert_array_equal(ours.reset(seed=SEED)[0], theirs.reset())
            for _ in range(STEPS):
                actions = np.full((N, 1), 0.5, np.float32)
                observation, _, terminated, *_ = ours.step(actions)
                theirs.step_async(actions)
                same, _, done, _ = theirs.step_wait()
                np.testing.assert_array_equal(observation, same)
                np.testing.assert_array_equal(terminated, done)
            np.testing.assert_array_equal(ours.reset()[0], theirs.reset())
            theirs.set_options({"level": 3.0})
            with pytest.raises(ConfigError, match="the others come from episode_plan"):
                theirs.reset()
        finally:
            theirs.close()


def test_a_game_of_several_agents_has_one_plan() -> None:
    class Asking(ScriptedGame):
        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.asked = [*getattr(self, "asked", []), (seed, options)]
            return super().reset(seed=seed, options=options)

    with ShmVectorEnv([Asking] * 2, n_workers=2, episode_plan=plan) as envs:
        envs.reset(seed=SEED)
        for _ in range(30):
            envs.step(envs.action_space.sample())
        asked = list(envs.get_attr("asked"))
    for e, resets in enumerate(asked):
        assert len(resets) > 2
        for episode, (seed, options) in enumerate(resets):
            assert seed == episode_seed(SEED, e, episode)
            assert options == plan(e, episode, stream(SEED, Purpose.PLAN, e, episode))


def test_what_cannot_be_said_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batched environment resets its rows itself"):
        ShmVectorEnv(counting, num_envs=4, episode_plan=plan)
    with pytest.raises(ConfigError, match="episode_plan must be a function of env_rank, episode and rng"):
        ShmVectorEnv([Maze], episode_plan=3)  # type: ignore[arg-type]
    with ShmVectorEnv([Maze] * 2, n_workers=1, episode_plan=plan) as envs:
        with pytest.raises(ConfigError, match="the others come from episode_plan"):
            envs.reset(options={"level": 3.0})
        with pytest.raises(ConfigError, match=r"seed \(with episode_plan\) must be an integer"):
            envs.reset(seed=[1, 2])
        envs.reset(seed=0)


def test_a_plan_that_raises_is_named() -> None:
    def bad(env_rank: int, episode: int, rng: Any) -> Any:
        return {"level": 1.0 / (1 - env_rank)}

    with ShmVectorEnv([Maze] * 2, n_workers=2, episode_plan=bad) as envs:
        with pytest.raises(WorkerError, match="env_rank 1") as caught:
            envs.reset(seed=0)
        assert "episode_plan raised ZeroDivisionError" in str(caught.value.__cause__)
