"""Environments and policies of several agents that do something wrong: each message names the environment and, where a
value is at fault, the agent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import (
    AgentStep,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.envs.toy import CountingEnv, ScriptedGame
from penstock.learning import Replay, gae

from ..scale import pairs, quick_first, scaled
from ..support import collect_with
from ..toy_games import Valued

LONG: Any = [{}] * 30
Spoil = Callable[[Any, list[Any]], Any]

SAMPLERS: list[tuple[type[Sampler], dict[str, Any]]] = [
    (SerialSampler, {}),
    (ParallelSampler, {"n_workers": 2}),
    (GpuSampler, {"n_workers": 2}),
]


class Spoiled(ScriptedGame):
    """Its step number `at` returns what `spoil(game, [observations, rewards, ...])` returns."""

    def __init__(self, spoil: Spoil | None = None, at: int = 3, script: Any = LONG, **kwargs: Any) -> None:
        super().__init__(script=script, **kwargs)
        self._spoil, self._at = spoil, at

    def step(self, actions: dict[str, Any]) -> Any:
        results = [*super().step(actions)]
        if self._spoil is None or self.t != self._at:
            return tuple(results)
        spoiled = self._spoil(self, results)
        return tuple(results) if spoiled is None else spoiled


def put(part: int, value: Any) -> Spoil:
    """In place of one of the five dicts."""

    def spoil(game: Any, results: list[Any]) -> None:
        results[part] = value

    return spoil


def give(part: int, value: Any, agent: str = "a1") -> Spoil:
    """In place of what one dict has for an agent."""

    def spoil(game: Any, results: list[Any]) -> None:
        results[part] = {**results[part], agent: value}

    return spoil


def leave_out(*parts: int, agent: str = "a1") -> Spoil:
    def spoil(game: Any, results: list[Any]) -> None:
        for part in parts:
            results[part] = {key: value for key, value in results[part].items() if key != agent}

    return spoil


def vanish(game: Any, results: list[Any]) -> None:
    game.agents = [agent for agent in game.agents if agent != "a1"]


def cut_without_observation(game: Any, results: list[Any]) -> None:
    leave_out(0)(game, results)
    give(3, True)(game, results)
    vanish(game, results)


def list_unknown(game: Any, results: list[Any]) -> None:
    game.agents = [*game.agents, "a9"]


def list_absent(game: Any, results: list[Any]) -> None:
    """a2 joins, but has no observation."""
    game.agents = [*game.agents, "a2"]


def raise_it(game: Any, results: list[Any]) -> None:
    raise ValueError("the game is broken")


FIVE = r"env\.step of env_rank 2 must return five dicts by agent \(observations, rewards, terminations"
SEAT = r"env_rank 2, agent 'a1'"

SPOILS: dict[str, tuple[Spoil, str]] = {
    "raises": (raise_it, r"raised ValueError while stepping env_rank 2, t=2 \(itr=0\): the game is broken"),
    "observation of another shape": (give(0, np.zeros(3, np.float32)), f"observation of {SEAT} must have shape"),
    "observation is text": (give(0, "left"), f"observation of {SEAT}"),
    "observation of None": (give(0, None), f"observation of {SEAT}"),
    "reward is text": (give(1, "much"), f"the reward of {SEAT} must be .* number.*'much'"),
    "reward of None": (give(1, None), f"the reward of {SEAT} must be .* number"),
    "reward of two": (give(1, [1.0, 2.0]), f"the reward of {SEAT} must be .* number"),
    "reward too large": (give(1, 1e300), f"the reward of {SEAT} must be a number that float32 can hold"),
    "flag is text": (give(2, "no"), f"terminated of {SEAT} must be True or False, got 'no'"),
    "flag of None": (give(3, None), f"truncated of {SEAT} must be True or False, got None"),
    "flag of two": (give(2, np.array([True, False])), f"terminated of {SEAT} must be True or False"),
    "flag of 2": (give(2, 2), f"terminated of {SEAT} must be True or False, got 2"),
    "info is text": (
        lambda game, results: (
            (give(4, "x")(game, results), give(3, True)(game, results), vanish(game, results))[:0] or None
        ),
        f"the info that env.step of {SEAT} returned must be a dict, got 'x'",
    ),
    "vanishes": (vanish, f"{SEAT} is not in env.agents any more, but neither terminated nor truncated"),
    "no observation": (leave_out(0), f"{SEAT} goes on, but env.step returned no observation for it"),
    "cut without observation": (cut_without_observation, f"{SEAT} was truncated, but env.step returned no observation"),
    "unknown in agents": (list_unknown, r"env_rank 2, agent 'a9' is not one of possible_agents, \['a0', 'a1', 'a2'\]"),
    "unknown observation": (give(0, np.zeros(4), "a9"), r"env_rank 2, agent 'a9' is not one of possible_agents"),
    "unknown flag": (give(2, True, "a9"), r"env_rank 2, agent 'a9' is not one of possible_agents"),
    "unknown reward": (give(1, 1.0, "a9"), r"env_rank 2, agent 'a9' is not one of possible_agents"),
    "joins without observation": (list_absent, r"env_rank 2, agent 'a2' is in env.agents, but has no observation"),
    "four dicts": (lambda game, results: tuple(results[:4]), r"env\.step.* of env_rank 2 .*"),
    "None": (lambda game, results: "nothing", r"env_rank 2"),
    **{
        f"{kind} {part}": (put(part, value), FIVE) for part in range(5) for kind, value in (("no", None), ("list", [1]))
    },
}


def spoiled(spoil: Spoil, at: int = 3) -> list[Any]:
    """Environment 2 is the bad one."""
    fine = partial(Spoiled, start=["a0", "a1"])
    return [fine, fine, partial(Spoiled, spoil, at, start=["a0", "a1"])]


@pytest.mark.parametrize("name", quick_first(SPOILS, 8))
def test_a_wrong_step_is_named(name: str) -> None:
    spoil, message = SPOILS[name]
    samplers = SAMPLERS if name in ("vanishes", "reward is text", "raises") else scaled(SAMPLERS, SAMPLERS[:1])
    for cls, kwargs in samplers:
        with cls(spoiled(spoil), batch_T=9, batch_B=3, max_decorrelation_steps=0, **kwargs) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            with pytest.raises(WorkerError, match=message) as told:
                sampler.obtain_samples(0)
            text = str(told.value)
            assert "while stepping env_rank 2, t=2 (itr=0)" in text or name.startswith(("reward", "observation"))
            assert len(text.splitlines()[0]) < 700


def test_wrong_steps_before_the_first_batch_are_named() -> None:
    for spoil, message in (SPOILS["vanishes"], SPOILS["unknown reward"], SPOILS["observation of another shape"]):
        with SerialSampler(spoiled(spoil, 1), batch_T=9, batch_B=3, max_decorrelation_steps=60) as sampler:
            with pytest.raises(WorkerError, match=message) as told:
                sampler.initialize(RandomAgent(), seed=1)
            assert "env_rank 2 (start-up)" in str(told.value)


def test_a_wrong_last_observation_is_named() -> None:
    def end_wrong(game: Any, results: list[Any]) -> None:
        give(0, np.zeros(3, np.float32))(game, results)
        give(2, True)(game, results)
        vanish(game, results)

    for record in (True, False):
        with SerialSampler(
            spoiled(end_wrong), batch_T=9, batch_B=3, max_decorrelation_steps=0, record_final_obs=record
        ) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            with pytest.raises(WorkerError, match=f"the final observation of {SEAT}"):
                sampler.obtain_samples(0)


def test_what_is_unusual_but_clear_is_accepted() -> None:
    """A missing flag is False, a missing reward 0, who dies needs no observation, and a ghost may stay in the list."""

    def no_flags(game: Any, results: list[Any]) -> None:
        leave_out(1, 2, 3, 4)(game, results)

    def dies_unseen(game: Any, results: list[Any]) -> None:
        leave_out(0)(game, results)
        give(2, True)(game, results)
        vanish(game, results)

    for spoil, valid, reward in ((no_flags, True, 0.0), (dies_unseen, False, None)):
        with SerialSampler(spoiled(spoil), batch_T=4, batch_B=3, max_decorrelation_steps=0) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            sampler.obtain_samples(0)
            env = sampler.samples_np.env
            column = sampler.seats()["agent"].index((2, "a1"))
            assert env.valid[:, column].tolist() == [True, True, True, valid]
            assert env.done[2, column] == (not valid)
            if reward is not None:
                assert env.reward[2, column] == reward
            else:
                assert not env.final_obs[2, column].any()
                assert env.reward[2, column] > 0


def test_an_index_of_columns_is_for_one_policy() -> None:
    with SerialSampler(ScriptedGame, batch_T=4, batch_B=2) as sampler:
        sampler.initialize({"one": RandomAgent(), "two": RandomAgent()}, policy_of=kinds, seed=0)
        batch, _ = sampler.obtain_samples(0)
        assert batch[1:3].two.env.reward.shape[0] == 2
        with pytest.raises(ConfigError, match=r"index the samples of one, for example batch\.one"):
            batch[:, 1]
        with pytest.raises(AttributeError, match=r"of one policy .* batch\.one\.minibatches"):
            _ = batch.minibatches
        with pytest.raises(AttributeError, match="has no field 'three'"):
            _ = batch.three
        for take in (partial(gae, discount=0.9, lambda_=0.9), Replay(100, discount=0.9).append):
            with pytest.raises(ConfigError, match=r"(?i)with several policies, give the samples of one"):
                take(batch)


# ---- resets ------------------------------------------------------------------------------------


class Resets(ScriptedGame):
    """Its reset number `at` returns what `spoil(game, observations, infos)` returns."""

    def __init__(self, spoil: Any = None, at: int = 2) -> None:
        super().__init__(3, [{}, {}])
        self._spoil, self._left = spoil, at

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed, options)
        self._left -= 1
        return self._spoil(self, observations, infos) if self._spoil and not self._left else (observations, infos)


def nobody(game: Any, observations: Any, infos: Any) -> Any:
    game.agents = []
    return {}, {}


RESETS: dict[str, tuple[Any, str]] = {
    "raises": (lambda game, *_: 1 / 0, "raised ZeroDivisionError while resetting env_rank 1"),
    "nobody": (nobody, r"env\.reset of env_rank 1 must leave at least one agent in env\.agents"),
    "observations alone": (lambda game, o, i: o, r"env\.reset of env_rank 1 must return a tuple of two dicts"),
    "no infos": (lambda game, o, i: (o, None), r"env\.reset of env_rank 1 must return a tuple of two dicts"),
    "no observations": (lambda game, o, i: (None, i), r"env\.reset of env_rank 1 must return a tuple of two dicts"),
    "one is missing": (
        lambda game, o, i: ({"a0": o["a0"], "a2": o["a2"]}, i),
        "env_rank 1, agent 'a1' is in env.agents, but has no observation",
    ),
    "unknown": (
        lambda game, o, i: ({**o, "a7": o["a0"]}, i),
        "env_rank 1, agent 'a7' is not one of possible_agents",
    ),
    "shape": (
        lambda game, o, i: ({**o, "a1": np.zeros(9, np.float32)}, i),
        "observation of env_rank 1, agent 'a1' must have shape",
    ),
}


@pytest.mark.parametrize("name", RESETS)
@pytest.mark.parametrize("at", quick_first([1, 2]))
@pytest.mark.parametrize("options", [{}, pytest.param({"global_state": True}, marks=pytest.mark.slow)])
def test_a_wrong_reset_is_named(name: str, at: int, options: dict[str, Any]) -> None:
    spoil, message = RESETS[name]
    env_fns = [Resets, partial(Resets, spoil, at)]
    with SerialSampler(env_fns, batch_T=9, batch_B=2, max_decorrelation_steps=0, **options) as sampler:
        with pytest.raises(WorkerError, match=message.replace("observation of", r"observation\S* of")) as told:
            sampler.initialize(RandomAgent(), seed=0)
            sampler.obtain_samples(0)
        during = "(start-up)" if at == 1 else "(itr=0)"
        assert during in str(told.value)


# ---- optional checks ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", quick_first([np.nan, np.inf]))
@pytest.mark.parametrize("where", ["observation", "reward", "final observation"])
def test_check_finite_names_the_agent(where: str, value: float) -> None:
    def spoil(game: Any, results: list[Any]) -> None:
        if where == "reward":
            give(1, value)(game, results)
            return
        give(0, np.array([1, 2, value, 4], np.float32))(game, results)
        if where == "final observation":
            give(2, True)(game, results)
            vanish(game, results)

    with SerialSampler(spoiled(spoil), batch_T=9, batch_B=3, max_decorrelation_steps=0, check_finite=True) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=rf"{where} of {SEAT} must be .*finite") as told:
            sampler.obtain_samples(0)
        assert "check_finite=True" in str(told.value)


def test_debug_names_the_agent_of_an_action_and_of_an_observation() -> None:
    class Seven(RandomAgent):
        def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
            step = super().step(observation, prev_action, prev_reward)
            action = np.array(step.action)
            action[observation[:, 1] == 2] = 7
            return AgentStep(action)

    env_fn = partial(Spoiled, script=[{"a0": "die"}, *LONG])
    with SerialSampler(env_fn, batch_T=9, batch_B=2, max_decorrelation_steps=0, debug=True) as sampler:
        sampler.initialize(Seven(), seed=0)
        with pytest.raises(WorkerError, match=r"the action of env_rank 0, agent 'a1', given by the agent, must be in"):
            sampler.obtain_samples(0)

    class Bounded(Spoiled):
        def observation_space(self, agent: str) -> gym.Space[Any]:
            return spaces.Box(0, 100, (4,), np.float32)

    env_fns = [Bounded, partial(Bounded, give(0, np.array([1, 2, -3, 4], np.float32)))]
    with SerialSampler(env_fns, batch_T=9, batch_B=2, max_decorrelation_steps=0, debug=True) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=r"observation of env_rank 1, agent 'a1' must be in Box"):
            sampler.obtain_samples(0)


def test_debug_accepts_idle_seats_whose_zeros_are_not_in_the_space() -> None:
    class Positive(ScriptedGame):
        def observation_space(self, agent: str) -> gym.Space[Any]:
            return spaces.Box(np.float32(-0.5), np.float32(99), (4,), np.float32)

        def observe(self) -> Any:
            return {agent: row + np.float32(0.25) for agent, row in super().observe().items()}

        def action_space(self, agent: str) -> gym.Space[Any]:
            return spaces.Discrete(3, start=2)  # 0 is no action

    for options in ({}, {"debug": True, "check_finite": True}):
        found = collect_with(SerialSampler, Positive, RandomAgent(), bootstrap_value=False, **options)
        assert any(not batch.env.valid.all() for batch, _ in found)
        for batch, _ in found:
            assert (batch.agent.action[batch.env.valid] >= 2).all()
            assert not batch.agent.action[~batch.env.valid].any()


# ---- policies ----------------------------------------------------------------------------------


class Failing(Valued):
    """Its method `where` fails at call `at`."""

    def __init__(self, where: str = "step", how: str = "raise", at: int = 3) -> None:
        super().__init__()
        self._where, self._how, self._left = where, how, at
        self._is_acting = False

    def _is_due(self, where: str) -> bool:
        self._left -= where == self._where
        return self._left == 0 and where == self._where

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self._is_acting = True
        step = super().step(observation, prev_action, prev_reward)
        self._is_acting = False
        if not self._is_due("step"):
            return step
        if self._how == "raise":
            raise ValueError("the policy is broken")
        return AgentStep(step.action[:-1] if self._how == "shape" else step.action + 0.5, step.agent_info)

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        if not self._is_acting and self._is_due("value"):
            raise ValueError("the policy is broken")
        return super().value(observation, prev_action, prev_reward)


def kinds(agent_id: str) -> str:
    return "one" if agent_id == "a0" else "two"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"raised ValueError while acting.*: the policy is broken"),
        ("shape", r"agent\.step must return action with shape \(\d,\) and dtype int64, as in .*, got \(\d,\)"),
        ("fraction", r"while acting, t=3 .*: action of env_rank \d, agent 'a1' must have dtype int64"),
    ],
)
@pytest.mark.parametrize("n_workers", quick_first([1, 2]))
def test_the_policy_that_was_acting_is_named(how: str, message: str, n_workers: int) -> None:
    agents = {"one": Valued(), "two": Failing("step", how, at=4)}
    with ParallelSampler(ScriptedGame, batch_T=9, batch_B=2, n_workers=n_workers, max_decorrelation_steps=0) as sampler:
        sampler.initialize(agents, policy_of=kinds, seed=0)
        with pytest.raises(WorkerError, match=message) as told:
            sampler.obtain_samples(0)
        text = str(told.value).splitlines()[0]  # the other lines say what each worker does
        if how != "fraction":  # the agent is named there
            assert "'two'" in text
        assert "'one'" not in text


class Remembering(Failing):
    """Its values are computed where an agent is cut off."""

    recurrent = True


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_policy_whose_value_fails_is_named(name: str) -> None:
    agents = {"one": Valued(), "two": Valued(), name: Failing("value", at=1)}
    with (
        SerialSampler(ScriptedGame, batch_T=9, batch_B=2) as sampler,
        pytest.raises(SpaceError, match=f"^policy '{name}': Failing failed on .*: the policy is broken"),
    ):
        sampler.initialize(agents, policy_of=kinds, seed=0, bootstrap_value=True)
    # At a truncation, or at the end of a batch:
    for agent, where in ((Remembering("value", at=2), "stepping env_rank 1"), (Failing("value", at=2), "acting")):
        agents = {"one": Valued(), "two": Valued(), name: agent}
        env_fn = partial(ScriptedGame, 3, [{"a0": "cut", "a1": "cut"}, *LONG])
        with SerialSampler(env_fn, batch_T=9, batch_B=2, max_decorrelation_steps=0) as sampler:
            sampler.initialize(agents, policy_of=kinds, seed=0, bootstrap_value=True)
            with pytest.raises(WorkerError, match=f"{where}.*'{name}'.*: the policy is broken"):
                sampler.obtain_samples(0)


# ---- environments that are refused -------------------------------------------------------------


class Turns:
    """As PettingZoo's AECEnv, as far as it is looked at."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    action_space = observation_space

    def agent_iter(self) -> Any:
        return iter(())

    def step(self, action: Any) -> None:
        """Nothing happens."""

    def close(self) -> None:
        """Nothing happens."""


class Unnamed(ScriptedGame):
    def __init__(self, possible: Any = ()) -> None:
        super().__init__()
        if possible is None:
            del self.possible_agents
        else:
            self.possible_agents = possible


@pytest.mark.parametrize(
    ("env_fn", "message"),
    [
        (Turns, "This environment is played in turns .*: give a ParallelEnv"),
        (partial(Unnamed, ()), "possible_agents of Unnamed must name each agent once"),
        (partial(Unnamed, None), "possible_agents of Unnamed must name each agent once"),
        (partial(Unnamed, ["a0", "a0"]), "possible_agents of Unnamed must name each agent once"),
        ([ScriptedGame, CountingEnv], "some environments have several agents and others one"),
    ],
)
def test_environments_that_do_not_fit_are_refused(env_fn: Any, message: str) -> None:
    with SerialSampler(env_fn, batch_T=2, batch_B=2) as sampler, pytest.raises(ConfigError, match=message):
        sampler.initialize(RandomAgent(), seed=0)


def test_one_agent_first_and_several_later_is_refused() -> None:
    with (
        SerialSampler([CountingEnv, ScriptedGame], batch_T=2, batch_B=2) as sampler,
        pytest.raises(WorkerError, match="env_fn returned an environment of several agents for env_rank 1"),
    ):
        sampler.initialize(RandomAgent(), seed=0)


def test_an_environment_with_other_agents_than_its_example_is_refused() -> None:
    def changing(context: Any) -> Any:
        return ScriptedGame(2 if context.worker_rank < 0 else 3)

    with (
        SerialSampler(changing, batch_T=2, batch_B=2) as sampler,
        pytest.raises(
            WorkerError,
            match=r"env_rank 0, agent 'a2' has the spaces .*main process it has none: possible_agents and their",
        ),
    ):
        sampler.initialize(RandomAgent(), seed=0)

    class Wide(ScriptedGame):
        def observation_space(self, agent: str) -> gym.Space[Any]:
            return spaces.Box(-1, 1, (9,)) if agent == "a1" else super().observation_space(agent)

    def widening(context: Any) -> Any:
        return ScriptedGame() if context.worker_rank < 0 else Wide()

    with (
        SerialSampler(widening, batch_T=2, batch_B=2) as sampler,
        pytest.raises(WorkerError, match=r"env_rank 0, agent 'a1' has the spaces .*main process it has"),
    ):
        sampler.initialize(RandomAgent(), seed=0)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_given_spaces_are_refused(cls: type[Sampler]) -> None:
    game = ScriptedGame()
    given = game.observation_space("a0"), game.action_space("a0")
    with (
        cls(ScriptedGame, batch_T=2, batch_B=2, spaces=given) as sampler,
        pytest.raises(WorkerError, match=r"of several agents for env_rank [01], but .*: leave `spaces` out"),
    ):
        sampler.initialize(RandomAgent(), seed=0)


def test_the_episode_of_a_game_needs_seed_episodes() -> None:
    with SerialSampler(ScriptedGame, batch_T=2, batch_B=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        with pytest.raises(ConfigError, match="construct the sampler with seed_episodes=True"):
            sampler.episode(0, 0)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_check_finite_sees_late_rewards(value: float) -> None:
    def spoil(game: Any, results: list[Any]) -> None:
        results[1]["a2"] = value

    game = partial(Spoiled, spoil, start=["a0", "a1"])
    with SerialSampler(game, batch_T=8, batch_B=2, max_decorrelation_steps=0, check_finite=True) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match="the reward of env_rank 0, agent 'a2' must be finite"):
            sampler.obtain_samples(0)


def test_a_list_of_agents_that_is_none_is_named() -> None:
    def spoil(game: Any, results: list[Any]) -> None:
        game.agents = None

    with SerialSampler(partial(Spoiled, spoil), batch_T=8, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match=r"env\.agents of env_rank 0 must be a list of agents, got None"):
            sampler.obtain_samples(0)


def test_an_agent_is_not_called_none() -> None:
    class Nameless(ScriptedGame):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = ["a0", None]  # type: ignore[list-item]

    with (
        SerialSampler(Nameless, batch_T=2, batch_B=1) as sampler,
        pytest.raises(ConfigError, match="none of them None"),
    ):
        sampler.initialize(RandomAgent(), seed=0)


def test_who_waits_is_not_said_to_be_a_policy() -> None:
    agents = {"x": RandomAgent(), "y": RandomAgent()}
    with SerialSampler(ScriptedGame, batch_T=2, batch_B=1) as sampler:
        sampler.initialize(agents, policy_of=lambda agent: "x" if agent == "a0" else "y", seed=0)
        sampler.obtain_samples(0)
        assert "by the policy" not in repr(sampler)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "options"), pairs([(2, 1), (3, 2), (3, 4)], [{}, {"server": "process"}]))
def test_a_worker_of_a_central_sampler_may_have_no_game_to_evaluate(
    sizes: tuple[int, int], options: dict[str, Any]
) -> None:
    (n_workers, n_evals), found = sizes, []
    evaluation: dict[str, Any] = {"eval_n_envs": n_evals, "eval_episodes": 5, "eval_max_steps": 2000}
    central: dict[str, Any] = {"n_workers": n_workers, **options}
    for cls, own in ((SerialSampler, {}), (GpuSampler, central)):
        with cls(ScriptedGame, batch_T=4, batch_B=6, **evaluation, **own) as sampler:
            sampler.initialize(RandomAgent(), seed=2)
            found.append([repr(info) for info in sampler.evaluate_agent(0)])
    assert found[0] == found[1]
