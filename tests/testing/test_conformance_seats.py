"""The kit for environments of several agents: what breaks each rule, and that sound environments break none."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.envs import CountingEnv, ScriptedGame
from penstock.errors import ConfigError
from penstock.testing import ConformanceError, check_aec_env, check_parallel_env

from ..toy_games import TurnGame
from .broken import finds


class Changed(ScriptedGame):
    """A game whose results `change` changes. `t` counts the steps of an episode."""

    def __init__(self, change: Callable[[Any, list[dict[Any, Any]]], Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.change = change
        self.kept: dict[Any, Any] = {}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = list(super().reset(seed, options))
        self.change(self, result)
        return tuple(result)

    def step(self, actions: dict[str, Any]) -> Any:
        result = list(super().step(actions))
        self.change(self, result)
        return tuple(result)


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


def give_one_dict_again(game: Any, result: Any) -> None:
    if len(result) == 5:
        game.kept.clear()
        game.kept.update(result[1])
        result[1] = game.kept


GAME = {"k": 3, "script": [{}, {"a1": "cut"}, {}, {}]}


@pytest.mark.parametrize("mask_key", ["info.action_mask", None])
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
        (give_one_dict_again, "returned_dicts_do_not_change", "after later steps"),
    ],
)
def test_a_broken_rule_is_named_with_the_agent(change: Any, rule: str, seen: str) -> None:
    with finds(rule, seen, "Changed"):
        check_parallel_env(lambda: Changed(change, **GAME), n_steps=12)


def test_agents_without_a_name_of_their_own_are_named() -> None:
    def make() -> ScriptedGame:
        game = ScriptedGame()
        game.possible_agents = ["a0", "a0"]
        return game

    with pytest.raises(ConformanceError, match="must name each agent once"):
        check_parallel_env(make)


@pytest.mark.slow
def test_games_of_pettingzoo_keep_all_rules() -> None:
    simple_tag = pytest.importorskip("mpe2.simple_tag_v3")
    check_parallel_env(simple_tag.parallel_env, n_steps=30)


# ---- games in turns --------------------------------------------------------------------------------


class Turns(TurnGame):
    """A random game that breaks a rule from move 4 on; with `""` none. It has `rewards`, as PettingZoo's have."""

    def __init__(self, how: str = "", mask: bool = False) -> None:
        super().__init__(3, mask)
        self.how, self.rewards = how, dict[str, float]()

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        if self.how == "seed":
            self._draw = np.float32(np.random.default_rng().random())
        self.rewards = dict.fromkeys(self.agents, 0.0)

    def last(self, observe: bool = True) -> Any:
        observation, reward, terminated, truncated, info = super().last(observe)
        if self.how == "wide" and self.t > 4:
            observation = np.zeros(5, np.float32)
        if self.how == "nan" and self.t > 4:
            reward = float("nan")
        return observation, reward, terminated, truncated, info

    def step(self, action: Any) -> None:
        before, agent = dict(self._rewards), self.agent_selection
        super().step(action)
        self.rewards = {
            other: 0.0 if action is None else own - (0.0 if other == agent else before[other])
            for other, own in self._rewards.items()
        }
        if self.how == "twice" and action is not None:  # the reward of the move before is counted again
            self._rewards[agent] += before[agent]
        if self.how == "gone" and self.t > 4:
            self.agents = []
        if self.how == "unknown" and self.t > 4:
            self.agent_selection = "a9"


def test_a_sound_game_in_turns_keeps_all_rules() -> None:
    check_aec_env(Turns)
    check_aec_env(Turns, env_kwargs={"mask": True}, mask_key="info.action_mask", n_steps=50)


@pytest.mark.parametrize(
    ("how", "rule", "seen"),
    [
        ("gone", "games_say_whose_turn_it_is_and_who_ends", "is not in env.agents any more, but neither terminated"),
        ("unknown", "games_say_whose_turn_it_is_and_who_ends", "agent 'a9' is not one of possible_agents"),
        ("wide", "games_say_whose_turn_it_is_and_who_ends", r"must have shape \(4,\)"),
        ("nan", "observations_lie_in_their_spaces", r"reward of env_rank 0, agent 'a\d' must be finite"),
        ("twice", "rewards_are_counted_until_the_next_turn", r"for agent 'a\d', whose entries in env.rewards since"),
        ("seed", "one_seed_gives_one_game", "returned"),
    ],
)
def test_a_broken_rule_of_turns_is_named(how: str, rule: str, seen: str) -> None:
    with finds(rule, seen):
        check_aec_env(Turns, env_kwargs={"how": how})


def test_other_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="is for a ParallelEnv"):
        check_parallel_env(CountingEnv)
    with pytest.raises(ConfigError, match="must return"):
        check_parallel_env(lambda: gym.spaces.Discrete(2))  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="check_aec_env is for an AECEnv of PettingZoo, and env_fn returns"):
        check_aec_env(ScriptedGame)
    with pytest.raises(ConfigError, match="check_parallel_env is for a ParallelEnv of PettingZoo, and env_fn returns"):
        check_parallel_env(TurnGame)
    with pytest.raises(ConfigError, match="check_aec_env is for an AECEnv"):
        check_aec_env(CountingEnv)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3"])
def test_classic_games_keep_all_rules(name: str) -> None:
    module = pytest.importorskip(f"pettingzoo.classic.{name}", exc_type=ImportError)
    check_aec_env(module.env, mask_key="observation.action_mask", n_steps=60)
