"""seed_episodes=True with several agents in an environment. A plain loop steps each game with the recorded seed and
actions, and must meet the same rewards and observations."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from penstock import (
    GameError,
    NamedArrays,
    ParallelSampler,
    RandomAgent,
    RecordedEpisode,
    RepeatError,
    SerialSampler,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs.toy import ScriptedGame

from ..against_loop import figures
from ..scale import FULL, covering, pairs
from ..support import Diary, assert_same, kept
from ..toy_games import Odd
from .started import check_refused, started

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here

T, B, N = 12, 4, 6  # with two workers, each has two environments
KINDS = [{"k": k} for k in (3, 2, 4, 3)]


class Plain(ScriptedGame):
    """Returns what depends on the agents' order and on all their actions: `sum` is in each observation."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.sum = 0
        return super().reset(seed, options)

    def observe(self) -> Any:
        return {agent: seen + np.float32(1000 * self.sum) for agent, seen in super().observe().items()}

    def step(self, actions: Any) -> Any:
        for i, (agent, action) in enumerate(actions.items()):
            self.sum += (i + 1) * (int(agent[1:]) + 1) * (int(action) + 1)
        return super().step(actions)


class Failing(Plain):
    """Its game fails now and then, at a step that depends on the seed of the reset and on the actions."""

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        if self.sum % 11 == 5:
            raise GameError(f"the game has failed at {self.t}")
        return result


class Unpicklable(Plain):
    """Cannot be saved, so its episode is repeated."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a socket")


def policies_of(n: int) -> dict[str, Any]:
    if n == 1:
        return {"agent": RandomAgent()}
    names = "even", "odd", "even", "last"  # only one environment has a seat of "last"
    return {"agent": {name: RandomAgent() for name in names}, "policy_of": lambda agent: names[int(agent[1:])]}


def recording(cls: Any, env_fn: Any = Plain, n_policies: int = 1, **options: Any) -> Any:
    """A sampler that has started."""
    given = {"batch_T": T, "batch_B": B, "env_kwargs": KINDS, "seed_episodes": True, **policies_of(n_policies)}
    given |= {} if cls is SerialSampler else {"n_workers": 2}
    return started(env_fn, cls=cls, **{**given, **options})


def seats_of(sampler: Any, batch: Any) -> dict[int, dict[str, Any]]:
    """By environment and agent: the arrays of its column."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, seats in sampler.seats().items():
        samples = batch if hasattr(batch, "env") else getattr(batch, name)
        for column, (env_rank, agent) in enumerate(seats):
            env, actions = samples.env, samples.agent.action
            found[env_rank][agent] = NamedArrays(
                valid=env.valid[:, column],
                action=actions[:, column],
                reward=env.reward[:, column],
                observation=env.observation[:, column],
                done=env.done[:, column],
            )
    return {e: {agent: own[agent] for agent in sorted(own)} for e, own in sorted(found.items())}


def check_episode(sampler: Any, e: int, t: int) -> int:
    """Play the episode of environment e until step t, here and with `run`, and make the step. Returns how many steps it
    had before the batch."""
    episode, seats = sampler.episode(e, t), seats_of(sampler, sampler.samples_np)[e]
    acting = [agent for agent, seat in seats.items() if seat.valid[t]]
    wanted = {agent: seats[agent].action[t] for agent in acting}
    plain = Plain(**KINDS[e])
    seen, _ = plain.reset(seed=episode.seed)
    for i, recorded in enumerate(episode.rewards):
        given = dict(zip(plain.possible_agents, [int(own[i]) for own in episode.actions], strict=True))
        acts = list(plain.agents)
        seen, rewards, *_ = plain.step({agent: given[agent] for agent in acts})
        assert recorded.tolist() == [rewards[agent] if agent in acts else 0 for agent in plain.possible_agents]
    game, actions = episode.run()
    assert list(actions) == game.agents == plain.agents
    assert actions == wanted
    results = game.step(actions), plain.step(wanted)
    for agent in acting:
        np.testing.assert_array_equal(seats[agent].observation[t], seen[agent])
        assert {result[1][agent] for result in results} == {seats[agent].reward[t]}
        np.testing.assert_array_equal(results[0][0][agent], results[1][0][agent])
    game.close()
    *_, last = episode.steps()
    for i, agent in enumerate(plain.possible_agents):
        assert (last.action[i], last.reward[i]) == (
            (wanted[agent], results[1][1][agent]) if agent in acting else (0, 0)
        )
        if agent in plain.agents:
            np.testing.assert_array_equal(last.next_observation[i], results[1][0][agent])
    assert last.terminated == (not plain.agents)
    return int(episode.step - t)


RUNS = list(product([SerialSampler, ParallelSampler], [1, 3], [False, True]))


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "n_policies", "waits"), RUNS if FULL else covering(RUNS))
def test_any_step_of_the_last_batch_is_repeated(cls: Any, n_policies: int, waits: bool) -> None:
    rng, n_before, seeds, infos = np.random.default_rng(0), [], {}, []
    n_random_steps = 0 if n_policies == 1 else 30
    options: dict[str, Any] = {"collector_cls": WaitResetCollector} if waits else {"traj_info_cls": Diary}
    options |= {"max_decorrelation_steps": n_random_steps, "seed": 4}
    with recording(cls, n_policies=n_policies, **options) as sampler:
        for itr in range(N):
            infos += sampler.obtain_samples(itr)[1]
            for e, seats in seats_of(sampler, sampler.samples_np).items():
                for t in np.flatnonzero(np.any([seat.valid for seat in seats.values()], 0))[:: rng.integers(1, 5)]:
                    n_before.append(check_episode(sampler, e, int(t)))
                    episode = sampler.episode(e, int(t))
                    seeds[e, episode.episode] = episode.seed
    assert sum(n > 0 for n in n_before) > 4, "games that began before the batch, some in random steps"
    assert len(set(seeds.values())) == len(seeds) > 3 * B
    known = [info for info in infos if (info.env_rank, info.number) in seeds]
    assert len(known) > 6 * B, "of games and of agents"
    assert n_random_steps or all(info.seed == seeds[info.env_rank, info.number] for info in known)


@pytest.mark.parametrize(
    "options", [{"env_kwargs": {"mask": True}, "global_state": True}, {"env_fn": partial(Odd, shuffle=False)}]
)
def test_masks_states_and_games_that_return_the_same_arrays(options: dict[str, Any]) -> None:
    is_masked = "global_state" in options
    agent = RandomAgent(mask_key="info.action_mask") if is_masked else RandomAgent()
    with recording(SerialSampler, agent=agent, **{"env_kwargs": {"k": 3}, **options}) as sampler:
        for itr in range(3):
            sampler.obtain_samples(itr)
            for t in range(T):
                game, actions = sampler.episode(1, t).run()
                rewards = game.step(actions)[1]
                for agent_id, column in ((f"a{i}", 3 + i) for i in range(3)):
                    if agent_id in actions:
                        assert rewards[agent_id] == sampler.samples_np.env.reward[t, column]


# ---- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["batch", "random steps"])
@pytest.mark.parametrize("n_policies", [1, 3])
@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_run_stops_before_the_step_that_failed(cls: Any, n_policies: int, where: str, tmp_path: Path) -> None:
    n = 400 if where == "random steps" else 0
    options = {"crash_dir": tmp_path, "max_decorrelation_steps": n, "seed": 1}
    with (
        pytest.raises(WorkerError, match="the game has failed at") as caught,
        recording(cls, Failing, n_policies, **options) as sampler,
    ):
        for itr in range(50):
            sampler.obtain_samples(itr)
    assert ("in the random steps before the first batch" in str(caught.value)) == (where == "random steps")
    error = caught.value
    assert error.episode.path in str(error)
    for episode in (error.episode, RecordedEpisode.load(error.episode.path)):
        game, actions = episode.run()
        assert game.t == episode.step
        with pytest.raises(GameError, match=f"failed at {episode.step + 1}"):
            game.step(actions)


@pytest.mark.parametrize("waits", [False, True])
def test_games_that_are_built_again_are_repeated_too(waits: bool) -> None:
    options: dict[str, Any] = {"on_game_failure": "renew", "max_renewals": 1000, "seed": 1}
    options |= {"collector_cls": WaitResetCollector} if waits else {}
    with recording(SerialSampler, Failing, 3, **options) as sampler:
        n = 0
        for itr in range(4):
            sampler.obtain_samples(itr)
            for e, seats in seats_of(sampler, sampler.samples_np).items():
                for t in np.flatnonzero(np.any([seat.valid for seat in seats.values()], 0)):
                    game, actions = sampler.episode(e, int(t)).run()
                    rewards = game.step(actions)[1]
                    assert all(seats[agent].reward[t] == rewards[agent] for agent in actions)
                    n += 1
        assert sampler.stats().cut_episodes > 5
        assert n > 40


# ---- saved runs ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("env_fn", "n_policies"), pairs([Plain, Unpicklable], [1, 3]))
def test_a_run_continues_with_the_seeds_of_its_games(env_fn: Any, n_policies: int) -> None:
    def collect(sampler: Any, itrs: range) -> list[Any]:
        return [(kept(samples, infos), figures(infos)) for samples, infos in map(sampler.obtain_samples, itrs)]

    options: dict[str, Any] = {"max_decorrelation_steps": 30, "traj_info_cls": Diary, "seed": 3}
    with recording(ParallelSampler, env_fn, n_policies, **options) as sampler:
        collect(sampler, range(2))
        state = sampler.state_dict()
        wanted = collect(sampler, range(2, 5))
    kinds = {column["kind"] for column in state["columns"].values()}
    assert kinds == {"repeat" if env_fn is Unpicklable else "pickle"}
    with recording(SerialSampler, env_fn, n_policies, **options) as sampler:
        assert sampler.load_state_dict(state).exact == (0, 1, 2, 3)
        assert_same(collect(sampler, range(2, 5)), wanted)
        sampler.obtain_samples(5)
        for e in range(B):
            check_episode(sampler, e, T - 1)


# ---- what cannot be repeated -----------------------------------------------------------------


def test_the_first_step_that_differs_is_named() -> None:
    with recording(SerialSampler) as sampler:
        sampler.obtain_samples(0)
        episode = sampler.episode(2, 2)
    with pytest.raises(RepeatError, match=r"of env_rank 2 differs .* of its 2 steps: the reward of step 0 is \["):
        replace(episode, rewards=episode.rewards + 1).run()


def test_policies_that_are_not_recorded_are_refused() -> None:
    message = r"seed_episodes=True and a policy that is not recorded \(record\) do not go"
    options: dict[str, Any] = {"batch_B": B, "env_kwargs": KINDS, "seed_episodes": True, "record": ["even"]}
    check_refused(ScriptedGame, message, **policies_of(3), **options)
