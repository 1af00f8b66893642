"""Action masks: no illegal action is ever taken, drawn ones are uniform, and a mask without an action is named."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    EpsilonGreedyAgent,
    FunctionAgent,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SerialSampler,
    SpaceError,
    WorkerError,
)
from penstock.agents import ActionMask
from penstock.buffers import NamedArrays
from penstock.envs import MaskInObservation

N = 5
SIZES = np.array([2, 4])


class Masked(gym.Env[Any, Any]):
    """Raises for an illegal action. At least one action is legal at each step; after the last one, none is."""

    def __init__(self, *, multi: bool = False, where: str = "observation", start: int = 0, none_at: int = 0) -> None:
        self.action_space: Any = spaces.MultiDiscrete(SIZES) if multi else spaces.Discrete(N, start=start)
        self._sizes, self._start, self._where, self._none_at = SIZES if multi else np.array([N]), start, where, none_at
        board = spaces.Box(-1.0, 1.0, (3,), np.float32)
        n = int(self._sizes.sum())
        self.observation_space: Any = board
        if where == "observation":
            self.observation_space = spaces.Dict(board=board, rules=spaces.Dict(legal=spaces.MultiBinary(n)))

    def _result(self, *, is_last: bool = False) -> tuple[Any, dict[str, Any]]:
        masks = []
        for size in self._sizes:
            masks.append((self.np_random.random(size) < 0.4).astype(np.int8))
            masks[-1][self.np_random.integers(size)] = 1
        self.mask = np.concatenate(masks) * (not is_last and (not self._none_at or self.t < self._none_at))
        board = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        if self._where == "observation":
            return {"board": board, "rules": {"legal": self.mask}}, {}
        return board, {} if is_last else {"rules": {"legal": self.mask.astype(bool)}}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.length = int(self.np_random.integers(2, 9))
        return self._result()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        first = np.concatenate([[0], self._sizes.cumsum()[:-1]])
        assert self.mask[first + np.ravel(action) - self._start].all(), "illegal action"
        self.t += 1
        observation, info = self._result(is_last=self.t == self.length)
        return observation, 1.0, self.t == self.length, False, info


class Model(nn.Module):
    state_shape = (1,)

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        n = int(action_space.nvec.sum() if isinstance(action_space, spaces.MultiDiscrete) else action_space.n)
        self.board = "board" if "board" in observation_space.spaces else "observation"
        self.policy, self.value = nn.Linear(3, n), nn.Linear(3, 1)

    def forward(self, observation: Any) -> Any:
        board = observation[self.board]
        return self.policy(board), self.value(board)


class Recurrent(Model):
    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:  # type: ignore[override]
        return *super().forward(observation), state


class Q(Model):
    def forward(self, observation: Any) -> Any:
        return super().forward(observation)[0]


AGENTS = {
    "random": lambda key: RandomAgent(mask_key=key),
    "categorical": lambda key: CategoricalPgAgent(Model, mask_key=key),
    "recurrent": lambda key: RecurrentCategoricalPgAgent(Recurrent, mask_key=key),
    "greedy": lambda key: CategoricalPgAgent(Model, greedy_eval=True, mask_key=key),
    "numpy": lambda key: CategoricalPgAgent(Model, mask_key=key, inference="numpy"),
    "traced": lambda key: CategoricalPgAgent(Model, mask_key=key, inference="traced"),
    "epsilon": lambda key: EpsilonGreedyAgent(Q, epsilon=0.5, eval_epsilon=0.5, mask_key=key),
}
KEYS = {"observation": "observation.rules.legal", "info": "info.rules.legal"}


def mask_in(observation: Any, where: str) -> Any:
    return observation.rules.legal if where == "observation" else observation.action_mask


@pytest.mark.parametrize("where", KEYS)
@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("name", AGENTS)
def test_no_illegal_action_is_taken(name: str, multi: bool, where: str) -> None:
    if multi and name == "epsilon":
        pytest.skip("it is for Discrete actions")
    kwargs = {"multi": multi, "where": where}
    with SerialSampler(Masked, env_kwargs=kwargs, batch_T=40, batch_B=4, eval_n_envs=2, eval_episodes=6) as sampler:
        sampler.initialize(AGENTS[name](KEYS[where]), seed=0, bootstrap_value=True)
        samples, infos = sampler.obtain_samples(0)
        assert infos
        assert len(sampler.evaluate_agent(0)) == 6
    mask = mask_in(samples.env.observation, where)
    sizes = SIZES if multi else np.array([N])
    for component, part in enumerate(mask.split(sizes.tolist(), -1)):
        action = samples.agent.action[..., component] if multi else samples.agent.action
        assert part.gather(-1, action[..., None]).all()
    last = mask_in(samples.env.final_obs, where)
    assert not last.any(), "after the last step nothing is legal, and nothing needs to be"


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("steps", [0, 60])
def test_a_mask_without_an_action_names_the_environment(name: str, steps: int) -> None:
    kwargs = [{}, {}, {"none_at": 1}]
    with SerialSampler(Masked, env_kwargs=kwargs, batch_T=40, batch_B=3, max_decorrelation_steps=steps) as sampler:
        with pytest.raises(WorkerError, match="the action mask of env_rank 2 allows no action, but the episode") as e:
            sampler.initialize(AGENTS[name]("observation.rules.legal"), seed=0)
            sampler.obtain_samples(0)
        assert isinstance(e.value.__cause__, SpaceError)


def test_the_start_of_an_action_space_is_not_a_part_of_the_mask() -> None:
    with SerialSampler(Masked, env_kwargs={"start": 10}, batch_T=30, batch_B=2) as sampler:
        sampler.initialize(EpsilonGreedyAgent(Q, epsilon=0.5, mask_key="observation.rules.legal"), seed=0)
        samples, _ = sampler.obtain_samples(0)
    assert samples.agent.action.min() >= 10
    assert samples.env.observation.rules.legal.gather(-1, samples.agent.action[..., None] - 10).all()


def test_random_actions_are_uniform_among_the_legal_ones() -> None:
    space = spaces.Dict(m=spaces.MultiBinary(int(SIZES.sum())))
    mask = ActionMask("observation.m", space, spaces.MultiDiscrete(SIZES))
    legal = np.array([[1, 1, 0, 1, 1, 1]], bool)
    uniform = np.random.default_rng(0).random((6000, 2))
    actions = mask.draw(np.repeat(legal, 6000, 0), uniform)
    counts = [np.bincount(actions[:, i], minlength=n).tolist() for i, n in enumerate(SIZES)]
    assert counts[1][0] == 0
    np.testing.assert_allclose(counts[0], 3000, atol=200)
    np.testing.assert_allclose(counts[1][1:], 2000, atol=200)
    edges = mask.draw(np.repeat(legal, 2, 0), np.array([[0.0, 0.0], [1 - 2**-53] * 2]))
    assert edges.tolist() == [[0, 1], [1, 3]]


def test_columns_without_a_legal_action_are_found_by_component() -> None:
    mask = ActionMask("observation.m", spaces.Dict(m=spaces.MultiBinary(6)), spaces.MultiDiscrete(SIZES))
    observation = NamedArrays(m=np.array([[1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], np.int8))
    assert mask.has_none(observation).tolist() == [False, True, True]
    assert mask.legal(observation).tolist() == [
        [True, False, False, False, False, True],
        [True, True, True, True, True, True],
        [True, True, True, True, True, True],
    ]


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (3, ConfigError, 'mask_key must be "observation.NAME" or "info.NAME".* got 3'),
        ("action_mask", ConfigError, 'mask_key must be "observation.NAME" or "info.NAME"'),
        ("observation.legal", ConfigError, r"mask_key='observation\.legal': Dict\(.*\) has no entry 'legal'"),
        ("observation.board", SpaceError, r"one number for each of the 5 actions, such as MultiBinary\(5\)"),
    ],
)
def test_a_wrong_key_is_named_before_workers_start(key: Any, error: Any, message: str) -> None:
    for agent in (RandomAgent(mask_key=key), CategoricalPgAgent(Model, mask_key=key)):
        with SerialSampler(Masked, batch_T=2, batch_B=2) as sampler, pytest.raises(error, match=message):
            sampler.initialize(agent)


def test_masks_are_for_discrete_actions() -> None:
    with (
        SerialSampler("Pendulum-v1", batch_T=2, batch_B=2) as sampler,
        pytest.raises(SpaceError, match="needs a Discrete or MultiDiscrete action space"),
    ):
        sampler.initialize(RandomAgent(mask_key="observation.mask"))


def test_an_agent_of_ones_own_gets_legal_random_steps_and_the_check() -> None:
    def first_legal(observation: Any) -> Any:
        return observation.rules.legal.argmax(axis=1)

    agent = FunctionAgent(first_legal, mask_key="observation.rules.legal")
    with SerialSampler(Masked, batch_T=20, batch_B=3) as sampler:
        sampler.initialize(agent, seed=0)
        samples, _ = sampler.obtain_samples(0)
        assert torch.equal(samples.agent.action, samples.env.observation.rules.legal.argmax(-1))


class Additive(gym.Env[Any, Any]):
    """Its mask is 0 where an action is legal, and below that elsewhere."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(mask=spaces.Box(-np.inf, np.inf, (2,), np.float32))

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        mask = np.array([0, -1e8], np.float32)
        return {"mask": mask}, {"mask": mask}


@pytest.mark.parametrize("key", ["observation.mask", "info.mask"])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused(key: str) -> None:
    message = "the action mask .*(0|in info) must be 1 where an action is legal and 0 elsewhere"
    with (
        SerialSampler(Additive, batch_T=2, batch_B=2, max_decorrelation_steps=0) as sampler,
        pytest.raises((SpaceError, WorkerError), match=message),
    ):
        sampler.initialize(RandomAgent(mask_key=key))
        sampler.obtain_samples(0)


def test_the_wrapper_says_what_is_missing() -> None:
    env = MaskInObservation(Masked(where="info"), "rules.nothing")
    with pytest.raises(SpaceError, match=r"info has no action mask 'rules\.nothing'; it has \['rules'\]"):
        env.reset(seed=0)
    env = MaskInObservation(Masked(where="info"), "rules.legal")
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    with pytest.raises(SpaceError, match="has an entry 'action_mask' already"):
        MaskInObservation(env)
