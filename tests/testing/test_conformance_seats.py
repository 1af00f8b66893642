"""The kit for environments of several agents: what breaks each rule, and that sound environments break none."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.envs import CountingEnv, ScriptedGame
from penstock.errors import ConfigError
from penstock.testing import ConformanceError, check_parallel_env

from ..scale import quick_first


class Changed(ScriptedGame):
    """A game whose results `change` changes. `t` counts the steps of an episode."""

    def __init__(self, change: Callable[[Any, list[dict[Any, Any]]], Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.change = change
        self.kept: dict[Any, Any] = {}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed, options)
        self.change(self, list(result))
        return result

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        self.change(self, list(result))
        return result


def nothing(game: Any, result: Any) -> None:
    """The game is sound."""


def vanish(game: Any, result: Any) -> None:
    if game.t == 2:
        game.agents.remove("a0")


def truncate_without_observation(game: Any, result: Any) -> None:
    if len(result) == 5 and result[3].get("a1"):
        del result[0]["a1"]


def forget_the_observation(game: Any, result: Any) -> None:
    if game.t == 1:
        del result[0]["a0"]


def invent_an_agent(game: Any, result: Any) -> None:
    game.agents.append("a9")


def leave_nobody(game: Any, result: Any) -> None:
    if len(result) == 2:
        game.agents.clear()


def leave_the_space(game: Any, result: Any) -> None:
    if game.t == 3:
        result[0]["a2"][...] = np.nan


def widen(game: Any, result: Any) -> None:
    result[0]["a2"] = np.zeros(5, np.float32)


def lose_the_reward(game: Any, result: Any) -> None:
    if len(result) == 5:
        result[1]["a0"] = float("nan")


def ignore_the_seed(game: Any, result: Any) -> None:
    result[0]["a0"][3] = np.random.default_rng().random()


GAME = {"k": 3, "script": [{}, {"a1": "cut"}, {}, {}]}


@pytest.mark.parametrize("mask_key", quick_first(["info.action_mask", None]))
def test_a_sound_game_keeps_all_rules(mask_key: str | None) -> None:
    check_parallel_env(ScriptedGame, env_kwargs={"k": 4, "mask": True}, mask_key=mask_key)
    check_parallel_env(lambda: Changed(nothing, **GAME), n_steps=20)


@pytest.mark.parametrize(
    ("change", "rule", "seen"),
    [
        (vanish, "games_say_who_plays_and_who_ends", "agent 'a0' is not in env.agents any more, but neither"),
        (truncate_without_observation, "games_say_who_plays_and_who_ends", "agent 'a1' was truncated, but env.step"),
        (forget_the_observation, "games_say_who_plays_and_who_ends", "agent 'a0' goes on, but env.step returned no"),
        (invent_an_agent, "games_say_who_plays_and_who_ends", "agent 'a9' is not one of possible_agents"),
        (leave_nobody, "games_say_who_plays_and_who_ends", "must leave at least one agent in env.agents"),
        (widen, "games_say_who_plays_and_who_ends", "agent 'a2'"),
        (leave_the_space, "observations_lie_in_their_spaces", "agent 'a2'"),
        (lose_the_reward, "observations_lie_in_their_spaces", "reward of env_rank 0, agent 'a0' must be finite"),
        (ignore_the_seed, "one_seed_gives_one_game", "returned"),
    ],
)
def test_a_broken_rule_is_named_with_the_agent(change: Any, rule: str, seen: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_parallel_env(lambda: Changed(change, **GAME), n_steps=12)
    assert caught.value.rule == rule
    assert seen in str(caught.value)
    assert str(caught.value).startswith("Changed breaks the rule")


class Reusing(ScriptedGame):
    """Returns the same dict of rewards each time."""

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, *others = super().step(actions)
        self.rewards = getattr(self, "rewards", {})
        self.rewards.clear()
        self.rewards.update(rewards)
        return observations, self.rewards, *others


class ReusingArrays(ScriptedGame):
    """Writes each observation into the same array."""

    def step(self, actions: dict[str, Any]) -> Any:
        observations, *others = super().step(actions)
        if not hasattr(self, "arrays"):
            self.arrays = {agent: np.zeros(4, np.float32) for agent in self.possible_agents}
        for agent, observation in observations.items():
            self.arrays[agent][...] = observation
        return {agent: self.arrays[agent] for agent in observations}, *others


@pytest.mark.parametrize("cls", [Reusing, ReusingArrays])
def test_results_that_are_used_again_are_named(cls: type[ScriptedGame]) -> None:
    with pytest.raises(ConformanceError, match="after later steps") as caught:
        check_parallel_env(cls, env_kwargs=GAME, n_steps=12)
    assert caught.value.rule == "returned_dicts_do_not_change"


def test_other_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="is for a ParallelEnv"):
        check_parallel_env(CountingEnv)
    with pytest.raises(ConfigError, match="must return"):
        check_parallel_env(lambda: gym.spaces.Discrete(2))  # type: ignore[arg-type,return-value]


class Unnamed(ScriptedGame):
    """Names an agent twice."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a0", "a0"]


def test_agents_without_a_name_of_their_own_are_named() -> None:
    with pytest.raises(ConformanceError, match="must name each agent once"):
        check_parallel_env(Unnamed)


def test_games_of_pettingzoo_keep_all_rules() -> None:
    simple_tag = pytest.importorskip("mpe2.simple_tag_v3")
    check_parallel_env(simple_tag.parallel_env, n_steps=30)
