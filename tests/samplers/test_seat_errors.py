"""Environments and policies of several agents that do something wrong: each message names the environment and, where a
value is at fault, the agent."""

from __future__ import annotations

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
from penstock.testing import Fault, FaultyAgent

from ..scale import pairs, scaled
from ..support import collect_with
from ..toy_games import Valued
from .spoiled_games import LONG, Spoil, Spoiled, all_of, give, leave_out, put, vanish
from .started import check_fails, check_refused, started

SAMPLERS: list[tuple[type[Sampler], dict[str, Any]]] = [
    (SerialSampler, {}),
    (ParallelSampler, {"n_workers": 2}),
    (GpuSampler, {"n_workers": 2}),
]


def list_unknown(game: Any, results: list[Any]) -> None:
    game.agents = [*game.agents, "a9"]


def list_none(game: Any, results: list[Any]) -> None:
    game.agents = None


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
    "reward is text": (give(1, "much"), f"the reward of {SEAT} must be .* number.*'much'"),
    "reward too large": (give(1, 1e300), f"the reward of {SEAT} must be a number that float32 can hold"),
    "flag is text": (give(2, "no"), f"terminated of {SEAT} must be True or False, got 'no'"),
    "flag of None": (give(3, None), f"truncated of {SEAT} must be True or False, got None"),
    "info is text": (
        all_of(give(4, "x"), give(3, True), vanish),
        f"the info that env.step of {SEAT} returned must be a dict, got 'x'",
    ),
    "vanishes": (vanish, f"{SEAT} is not in env.agents any more, but neither terminated nor truncated"),
    "no observation": (leave_out(0), f"{SEAT} goes on, but env.step returned no observation for it"),
    "cut without observation": (
        all_of(leave_out(0), give(3, True), vanish),
        f"{SEAT} was truncated, but env.step returned no observation",
    ),
    "last observation": (
        all_of(give(0, np.zeros(3, np.float32)), give(2, True), vanish),
        f"the final observation of {SEAT}",
    ),
    "unknown in agents": (list_unknown, r"env_rank 2, agent 'a9' is not one of possible_agents, \['a0', 'a1', 'a2'\]"),
    "unknown observation": (give(0, np.zeros(4), "a9"), r"env_rank 2, agent 'a9' is not one of possible_agents"),
    "unknown flag": (give(2, True, "a9"), r"env_rank 2, agent 'a9' is not one of possible_agents"),
    "unknown reward": (give(1, 1.0, "a9"), r"env_rank 2, agent 'a9' is not one of possible_agents"),
    "agents of None": (list_none, "env.agents of env_rank 2 must be a list of agents, got None"),
    "joins without observation": (list_absent, r"env_rank 2, agent 'a2' is in env.agents, but has no observation"),
    "four dicts": (lambda game, results: tuple(results[:4]), r"env\.step.* of env_rank 2 .*"),
    "None": (lambda game, results: "nothing", r"env_rank 2"),
    **{f"no {part}": (put(part, None), FIVE) for part in range(5)},
    "a list": (put(2, [1]), FIVE),
}


def spoiled(spoil: Spoil, at: int = 3) -> list[Any]:
    """Environment 2 is the bad one."""
    fine = partial(Spoiled, start=["a0", "a1"])
    return [fine, fine, partial(Spoiled, spoil, at, start=["a0", "a1"])]


@pytest.mark.parametrize("name", SPOILS)
def test_a_wrong_step_is_named(name: str) -> None:
    spoil, message = SPOILS[name]
    samplers = SAMPLERS if name in ("vanishes", "reward is text", "raises") else scaled(SAMPLERS, SAMPLERS[:1])
    for cls, options in samplers:
        text = check_fails(spoiled(spoil), message, cls=cls, batch_B=3, **options)
        assert "while stepping env_rank 2, t=2 (itr=0)" in text or name.startswith(("reward", "observation"))
        assert len(text.splitlines()[0]) < 700


def test_wrong_steps_before_the_first_batch_are_named() -> None:
    for name in ("vanishes", "unknown reward", "observation of another shape"):
        spoil, message = SPOILS[name]
        random_steps = {"max_decorrelation_steps": 60, "seed": 1}
        text = check_refused(spoiled(spoil, 1), message, error=WorkerError, batch_B=3, **random_steps)
        assert "env_rank 2 in the random steps before the first batch (start-up)" in text


def test_a_wrong_last_observation_that_is_not_recorded_is_named() -> None:
    spoil, message = SPOILS["last observation"]
    check_fails(spoiled(spoil), message, batch_B=3, record_final_obs=False)


def test_what_is_unusual_but_clear_is_accepted() -> None:
    """A missing flag is False, a missing reward 0, who dies needs no observation, and a ghost may stay in the list."""
    dies_unseen = all_of(leave_out(0), give(2, True), vanish)
    for spoil, goes_on in ((leave_out(1, 2, 3, 4), True), (dies_unseen, False)):
        with started(spoiled(spoil), batch_T=4, batch_B=3) as sampler:
            sampler.obtain_samples(0)
            env = sampler.samples_np.env
            column = sampler.seats()["agent"].index((2, "a1"))
            assert env.valid[:, column].tolist() == [True, True, True, goes_on]
            assert env.done[2, column] == (not goes_on)
            assert (env.reward[2, column] == 0) == goes_on
            assert goes_on or not env.final_obs[2, column].any()


def test_an_index_of_columns_is_for_one_policy() -> None:
    agents = {"one": RandomAgent(), "two": RandomAgent()}
    with started(ScriptedGame, agents, policy_of=kinds, batch_T=4) as sampler:
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
        assert "by the policy" not in repr(sampler)


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
    "unknown": (lambda game, o, i: ({**o, "a7": o["a0"]}, i), "env_rank 1, agent 'a7' is not one of possible_agents"),
    "shape": (
        lambda game, o, i: ({**o, "a1": np.zeros(9, np.float32)}, i),
        "observation of env_rank 1, agent 'a1' must have shape",
    ),
}


@pytest.mark.parametrize("name", RESETS)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("options", [{}, pytest.param({"global_state": True}, marks=pytest.mark.slow)])
def test_a_wrong_reset_is_named(name: str, at: int, options: dict[str, Any]) -> None:
    spoil, message = RESETS[name]
    env_fns, message = [Resets, partial(Resets, spoil, at)], message.replace("observation of", r"observation\S* of")
    if at == 1:
        assert "(start-up)" in check_refused(env_fns, message, error=WorkerError, **options)
    else:
        assert "(itr=0)" in check_fails(env_fns, message, **options)


# ---- optional checks ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("where", ["observation", "reward", "final observation", "late reward"])
def test_check_finite_names_the_agent(where: str, value: float) -> None:
    observed, late = give(0, np.array([1, 2, value, 4], np.float32)), where == "late reward"
    spoil = {
        "observation": observed,
        "reward": give(1, value),
        "final observation": all_of(observed, give(2, True), vanish),
        "late reward": give(1, value, "a2"),  # it is not there
    }[where]
    message = rf"{'reward' if late else where} of env_rank 2, agent '{'a2' if late else 'a1'}' must be .*finite"
    text = check_fails(spoiled(spoil), message, batch_B=3, check_finite=True)
    assert "check_finite=True" in text


class Seven(RandomAgent):
    """Takes an action that there is not for the second step of each agent."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        action = np.array(super().step(observation, prev_action, prev_reward).action)
        action[observation[:, 1] == 2] = 7
        return AgentStep(action)


class Bounded(Spoiled):
    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(0, 100, (4,), np.float32)


def test_debug_names_the_agent_of_an_action_and_of_an_observation() -> None:
    env_fn = partial(Spoiled, script=[{"a0": "die"}, *LONG])
    message = r"the action of env_rank 0, agent 'a1', given by the agent, must be in"
    check_fails(env_fn, message, Seven(), debug=True)
    env_fns = [Bounded, partial(Bounded, give(0, np.array([1, 2, -3, 4], np.float32)))]
    check_fails(env_fns, r"observation of env_rank 1, agent 'a1' must be in Box", debug=True)


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


def kinds(agent_id: str) -> str:
    return "one" if agent_id == "a0" else "two"


class Wrong(Valued):
    """Its actions in step 2 of a game are wrong."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        action, info = super().step(observation, prev_action, prev_reward)
        return AgentStep(self._change(action) if (observation[:, 1] == 2).any() else action, info)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda action: action[:-1],
            r"'two', t=2 .*: agent\.step must return action with shape \(\d,\) and dtype int64, as",
        ),
        (lambda action: action + 0.5, r"acting, t=2 .*: action of env_rank \d, agent 'a[12]' must have dtype int64"),
    ],
)
@pytest.mark.parametrize("n_workers", [1, 2])
def test_the_policy_that_was_acting_is_named(change: Any, message: str, n_workers: int) -> None:
    agents = {"one": Valued(), "two": Wrong(change)}
    text = check_fails(ScriptedGame, message, agents, cls=ParallelSampler, n_workers=n_workers, policy_of=kinds)
    assert "'one'" not in text.splitlines()[0]  # the other lines say what each worker does


class Worthless(RandomAgent):
    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        raise ValueError("the policy is broken")


class Remembering(Valued):
    """Its values are computed where an agent is cut off."""

    recurrent = True


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_policy_whose_value_fails_is_named(name: str) -> None:
    options: dict[str, Any] = {"policy_of": kinds, "bootstrap_value": True}
    agents = {"one": Valued(), "two": Valued()}
    message = f"^policy '{name}': Worthless failed on .*: the policy is broken"
    check_refused(ScriptedGame, message, {**agents, name: Worthless()}, error=SpaceError, **options)
    # At a truncation, or at the end of a batch:
    env_fn = partial(ScriptedGame, 3, [{"a0": "cut", "a1": "cut"}, *LONG])
    for agent, where in ((Remembering(), "stepping env_rank 0"), (Valued(), "acting")):
        failing = {**agents, name: FaultyAgent(agent, Fault("raise"), "value")}
        check_fails(env_fn, f"{where}.*'{name}'.*: a fault was injected", failing, **options)


# ---- environments that are refused -------------------------------------------------------------


class Wide(ScriptedGame):
    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-1, 1, (9,)) if agent == "a1" else super().observation_space(agent)


def unlike_its_example(example: Any, real: Any) -> Any:
    return lambda context: example() if context.worker_rank < 0 else real()


OF_A_GAME = ScriptedGame().observation_space("a0"), ScriptedGame().action_space("a0")


@pytest.mark.parametrize(
    ("env_fn", "options", "message", "error"),
    [
        ([ScriptedGame, CountingEnv], {}, "some environments have several agents and others one", ConfigError),
        (
            [CountingEnv, ScriptedGame],
            {},
            "env_fn returned an environment of several agents for env_rank 1",
            WorkerError,
        ),
        (
            unlike_its_example(partial(ScriptedGame, 2), ScriptedGame),
            {},
            r"env_rank 0, agent 'a2' has the spaces .*main process it has none: possible_agents and their",
            WorkerError,
        ),
        (
            unlike_its_example(ScriptedGame, Wide),
            {},
            r"env_rank 0, agent 'a1' has the spaces .*main process it has",
            WorkerError,
        ),
        *[
            (
                ScriptedGame,
                {"spaces": OF_A_GAME, "cls": cls},
                r"of several agents for env_rank [01], but .*: leave `spaces` out",
                WorkerError,
            )
            for cls in (SerialSampler, ParallelSampler)
        ],
    ],
)
def test_environments_that_do_not_fit_are_refused(
    env_fn: Any, options: dict[str, Any], message: str, error: type[Exception]
) -> None:
    check_refused(env_fn, message, error=error, **options)


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
