"""The rules of an environment of several agents (PettingZoo's `ParallelEnv` and `AECEnv`), and the random games that
show them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.agents import RandomAgent
from penstock.envs import EnvFactory
from penstock.envs.seats import ParallelView, is_in_turns
from penstock.envs.state import is_same
from penstock.errors import ConfigError, SpaceError, WorkerError, brief
from penstock.samplers import SerialSampler
from penstock.testing.rules import Violation


class Recorded:
    """The environment. `log` has what each call has returned, and a copy of that and of `agents`."""

    def __init__(self, env: Any) -> None:
        self.env, self.log = env, list[tuple[Any, Any]]()
        self.rewards: list[tuple[Any, Any, float]] = []  #: in turns: agent, reward of `last`, sum of its `env.rewards`
        self._sums: dict[Any, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **arguments: object) -> Any:
        """As the environment."""
        self._sums = {}
        return self._noted(self.env.reset(**arguments))

    def step(self, actions: Any) -> Any:
        """As the environment."""
        if not is_in_turns(self.env):
            return self._noted(self.env.step(actions))
        self._sums[self.env.agent_selection] = 0.0
        self._noted(self.env.step(actions))
        for agent, reward in getattr(self.env, "rewards", {}).items():
            self._sums[agent] = self._sums.get(agent, 0.0) + reward
        return None

    def last(self) -> Any:
        """As the environment, which is played in turns."""
        agent, result = self.env.agent_selection, self.env.last()
        if hasattr(self.env, "rewards") and isinstance(result, tuple) and len(result) == 5:
            self.rewards.append((agent, result[1], self._sums.get(agent, 0.0)))
        return self._noted((agent, result))[1]

    def _noted(self, result: object) -> Any:
        self.log.append((result, copy.deepcopy((result, self.env.agents))))
        return result


@dataclass(frozen=True)
class GameSetup:
    """The environment to check, and how long random agents play in it."""

    factory: EnvFactory
    mask_key: str | None
    n_steps: int
    seed: int
    in_turns: bool = False

    def build(self) -> Recorded:
        """A new environment. Raises `ConfigError` if it has one agent, or is of the other kind."""
        env = replace(self.factory, as_seats=Recorded)()
        if not isinstance(env, Recorded) or is_in_turns(env.env) is not self.in_turns:
            env = env.env if isinstance(env, Recorded) else env
            name, kind = ("check_aec_env", "an AECEnv") if self.in_turns else ("check_parallel_env", "a ParallelEnv")
            raise ConfigError(f"{name} is for {kind} of PettingZoo, and env_fn returns {brief(env)}")
        return env

    def name(self) -> str:
        """The name of the environment's class."""
        env = self.build()
        env.close()
        return type(getattr(env, "unwrapped", env.env)).__name__

    def play(self, *, checks: bool = False) -> Recorded:
        """Play in a sampler, with a random agent for each seat. Raises `Violation` where it raises an error."""
        built: list[Recorded] = []

        def env_fn() -> Any:
            built.append(self.build())
            return built[-1]

        try:
            view = ParallelView(self.build())
            view.close()
            policies = {agent: f"p{i}" for i, agent in enumerate(view.possible_agents)}
            agents = {policy: RandomAgent(mask_key=self.mask_key) for policy in policies.values()}
            # In turns, a row of the batch has one decision of each agent.
            batch_T = -(-self.n_steps // len(agents)) if self.in_turns else self.n_steps
            with SerialSampler(
                env_fn, batch_T=batch_T, batch_B=1, max_decorrelation_steps=0, check_finite=checks, debug=checks
            ) as sampler:
                sampler.initialize(agents, policy_of=policies.__getitem__, seed=self.seed)
                sampler.obtain_samples(0)
        except (SpaceError, ConfigError, WorkerError) as error:
            broken = error.__cause__ if isinstance(error, WorkerError) else error
            if not isinstance(broken, SpaceError | ConfigError):
                raise
            remedy = "return flag, reward and last observation of each agent that acted, in the spaces of this agent"
            raise Violation(str(broken), remedy) from None
        return built[-1]


def games_say_who_plays_and_who_ends(setup: GameSetup) -> None:
    """env.reset leaves in env.agents those who act first. Who leaves it later is terminated or truncated in that step.
    Who stays or is truncated has an observation, and all ids are in possible_agents."""
    setup.play()


def observations_lie_in_their_spaces(setup: GameSetup) -> None:
    """Every observation, the last ones too, is an element of observation_space(agent), and rewards are finite."""
    setup.play(checks=True)


def returned_dicts_do_not_change(setup: GameSetup) -> None:
    """Later steps do not change the observations, rewards and flags that env.reset and env.step have returned."""
    for i, (result, (kept, _)) in enumerate(setup.play().log):
        for now, before in zip(result[:-1], kept[:-1], strict=True):  # infos are often the same dicts
            if not is_same(now, before):
                seen = f"call {i} after reset returned {brief(before)}, which is {brief(now)} after later steps"
                raise Violation(seen, "return new dicts and arrays in each step: wrappers and loops keep them")


def one_seed_gives_one_game(setup: GameSetup) -> None:
    """Two environments that are reset with the same seed, and get the same actions, return the same."""
    logs = [setup.play().log for _ in range(2)]
    for i, ((_, left), (_, right)) in enumerate(zip(*logs, strict=True)):
        if not is_same(left, right):
            seen = f"call {i} after reset returned {brief(left)} and {brief(right)}"
            raise Violation(seen, "draw all random numbers from a generator that reset(seed=...) seeds")


def games_say_whose_turn_it_is_and_who_ends(setup: GameSetup) -> None:
    """env.agent_selection is one of env.agents, and env.last() returns observation, reward, terminated, truncated and
    info of this agent. An agent leaves env.agents by the step(None) after its end."""
    setup.play()


def rewards_are_counted_until_the_next_turn(setup: GameSetup) -> None:
    """The reward of env.last() is the sum of the agent's entries in env.rewards since its last action. So each reward
    is returned once, and the reward for an action comes with the next observation of the agent."""
    for i, (agent, reward, wanted) in enumerate(setup.play().rewards):
        if not np.isclose(reward, wanted):
            raise Violation(
                f"call {i} of last() returned the reward {reward} for agent {agent!r}, whose entries in env.rewards "
                f"since its last action sum up to {wanted}",
                "clear env.rewards in each step, set _cumulative_rewards of the agent that acts to 0, then call "
                "_accumulate_rewards() once",
            )


TURN_RULES = (
    games_say_whose_turn_it_is_and_who_ends,
    observations_lie_in_their_spaces,
    rewards_are_counted_until_the_next_turn,
    one_seed_gives_one_game,
)

GAME_RULES = (
    games_say_who_plays_and_who_ends,
    observations_lie_in_their_spaces,
    returned_dicts_do_not_change,
    one_seed_gives_one_game,
)
