"""Agents outside a sampler: they act for one observation or many, save and load, and say what they are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    DeterministicPgAgent,
    EpsilonGreedyAgent,
    FunctionAgent,
    GaussianPgAgent,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SamplerStateError,
    SerialSampler,
    SpaceError,
)
from penstock.envs import CountingEnv, NestedEnv

from ..models import Constant, Echo, LogitsAndFirst
from ..toy_games import Published

pytestmark = pytest.mark.slow

BOX = spaces.Box(-1.0, 1.0, (3,), np.float64)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value, self.dropout = nn.Linear(3, 4), nn.Linear(3, 1), nn.Dropout(0.9)

    def forward(self, observation: Any) -> Any:
        return self.policy(self.dropout(observation)), self.value(observation)


class Memory(nn.Module):
    """The state counts steps, and the action is that count plus the previous action."""

    state_shape = (1,)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        chosen = (state[:, 0] + prev_action).long() % 4
        return nn.functional.one_hot(chosen, 4) * 100.0, prev_reward, state + 1


def ready(agent: Any, action_space: Any = None) -> Any:
    agent.initialize(BOX, action_space or spaces.Discrete(4), seed=0)
    return agent


# ---- act -------------------------------------------------------------------------------------------


def test_one_observation_gives_an_action_and_a_batch_gives_actions() -> None:
    agent = ready(CategoricalPgAgent(Policy))
    rows = np.random.default_rng(0).uniform(-1, 1, (6, 3))
    logits, _ = agent.model.eval()(torch.as_tensor(rows, dtype=torch.float32))
    best = logits.argmax(1).tolist()
    actions = [agent.act(row) for row in rows]
    assert actions == best
    assert all(isinstance(action, int) for action in actions)
    batch = agent.act(rows)
    assert (batch.tolist(), batch.shape) == (best, (6,))
    assert len({agent.act(rows[0], greedy=False) for _ in range(100)}) > 1


def test_acting_uses_the_present_weights_and_leaves_the_training_mode_as_it_was() -> None:
    agent = ready(CategoricalPgAgent(Policy))
    agent.train_mode(0)
    agent.model.value.eval()
    for best in (2, 1):
        with torch.no_grad():
            agent.model.policy.weight.zero_()
            agent.model.policy.bias.copy_(torch.eye(4)[best])
        assert agent.act(np.zeros(3)) == best
    training = {name: module.training for name, module in agent.model.named_modules()}
    assert training == {"": True, "policy": True, "value": False, "dropout": True}


def test_greedy_is_the_best_action_of_every_stock_agent() -> None:
    box, observation = spaces.Box(-2.0, 2.0, (3,), np.float32), np.array([0.5, -0.5, 0.0])
    deterministic = ready(DeterministicPgAgent(Echo, sigma=1.0), box)
    gaussian = ready(GaussianPgAgent(LogitsAndFirst), box)
    for agent in (deterministic, gaussian):
        action = agent.act(observation)
        assert (action.tolist(), action.dtype) == (observation.tolist(), np.float32)
    assert gaussian.act(observation, greedy=False).tolist() != observation.tolist()
    q = ready(EpsilonGreedyAgent(lambda: nn.Linear(3, 4), eval_epsilon=1.0))
    assert len({q.act(observation) for _ in range(50)}) == 1
    assert len({q.act(observation, greedy=False) for _ in range(50)}) > 1


def test_a_recurrent_agent_remembers_its_state_and_action() -> None:
    agent = ready(RecurrentCategoricalPgAgent(Memory))
    actions = [agent.act(np.zeros(3), start=t == 0) for t in range(4)]
    assert actions == [0, 1, 3, 2]  # the count plus the action before, modulo 4
    assert agent.act(np.zeros(3), start=True) == 0
    assert agent.act(np.zeros((2, 3)), start=True).tolist() == [0, 0]
    assert agent.act(np.zeros((2, 3)), start=[False, True]).tolist() == [1, 0]
    with pytest.raises(ConfigError, match="give start=True at the first step of an episode"):
        agent.act(np.zeros(3))


def test_actions_have_the_structure_that_env_step_takes() -> None:
    env, agent = NestedEnv(), RandomAgent()
    agent.initialize(env.observation_space, env.action_space)
    assert env.action_space.contains(agent.act(env.reset(seed=0)[0]))


@pytest.mark.parametrize("make", [RandomAgent, lambda: CategoricalPgAgent(Policy)])
def test_calls_before_initialize_say_what_to_call(make: Any, tmp_path: Path) -> None:
    agent = make()
    for call in (lambda: agent.act(np.zeros(3)), lambda: agent.load(tmp_path / "none.pt")):
        with pytest.raises(
            SamplerStateError, match=r"is not initialized: call sampler\.initialize\(agent\), or agent\."
        ):
            call()


def test_a_missing_attribute_says_why_it_is_missing() -> None:
    agent = CategoricalPgAgent(Policy)
    for use in (lambda: agent.model, agent.state_dict, lambda: agent.observation_space):
        with pytest.raises(AttributeError, match="is missing: this CategoricalPgAgent is not initialized: "):
            use()
    agent = ready(agent)
    with pytest.raises(AttributeError, match=r"outside of one, call agent\.act\(observation\)"):
        agent.step(np.zeros((2, 3), np.float32), np.zeros(2), np.zeros(2, np.float32))
    with pytest.raises(AttributeError, match="object has no attribute 'modell'"):
        _ = agent.modell
    assert not hasattr(CategoricalPgAgent(Policy), "model")


@pytest.mark.parametrize(("observation", "got"), [(np.zeros(2), "(2,)"), (np.zeros((5, 4)), "(5, 4)")])
def test_an_observation_of_a_wrong_shape_is_refused(observation: Any, got: str) -> None:
    message = re.escape(f"observation must have the shape (3,), or (B, 3), got {got}")
    with pytest.raises(SpaceError, match=message):
        ready(RandomAgent()).act(observation)


def test_a_missing_entry_of_an_observation_is_named() -> None:
    agent = RandomAgent()
    agent.initialize(spaces.Dict(a=BOX, b=BOX), spaces.Discrete(2))
    with pytest.raises(SpaceError, match=r"observation must be one dict with the keys \['a', 'b'\], got"):
        agent.act({"a": np.zeros(3)})


# ---- initialize, save and load -----------------------------------------------------------------------


def test_an_agent_whose_initialize_failed_may_be_initialized_again() -> None:
    agent = CategoricalPgAgent(lambda: "no model")  # type: ignore[arg-type, return-value]
    for _ in range(2):
        with SerialSampler("CartPole-v1", batch_T=2, batch_B=2) as sampler, pytest.raises(ConfigError, match="factory"):
            sampler.initialize(agent)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_what_is_loaded_acts_in_the_next_batch(cls: Any, tmp_path: Path) -> None:
    agents: list[Any] = [CategoricalPgAgent(Constant) for _ in range(2)]
    agent, trained = agents
    trained.initialize(CountingEnv().observation_space, CountingEnv().action_space)
    with torch.no_grad():
        trained.model.weight.fill_(1.0)
    trained.save(tmp_path / "agent.pt")
    with cls(CountingEnv, batch_T=3, batch_B=2, n_workers=1) as sampler:
        sampler.initialize(agent, seed=0)
        assert (sampler.obtain_samples(0)[0].agent.agent_info.value == 0).all()
        agent.load(tmp_path / "agent.pt")
        assert (sampler.obtain_samples(1)[0].agent.agent_info.value == 1).all()
        with torch.no_grad():
            trained.model.weight.fill_(2.0)
        agent.load_state_dict(trained.state_dict())
        assert (sampler.obtain_samples(2)[0].agent.agent_info.value == 2).all()
    assert [path.name for path in tmp_path.iterdir()] == ["agent.pt"]


def test_arrays_are_saved_and_loaded_as_arrays(tmp_path: Path) -> None:
    agent, other = ready(Published()), ready(Published())
    agent.number[...] = 7
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f"number.pt.{os.getpid()}.part").symlink_to(tmp_path / "mine")  # of somebody else
    agent.save(tmp_path / "number.pt")
    assert (tmp_path / "mine").read_text() == "mine"
    other.load(tmp_path / "number.pt")
    assert isinstance(other.number, np.ndarray)
    assert (other.number.tolist(), other.number.dtype) == (7, np.int64)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    ready(Published()).save(tmp_path / "number.pt")
    with pytest.raises(ConfigError, match=r"number\.pt has the state of a Published, this agent is"):
        ready(CategoricalPgAgent(Policy)).load(tmp_path / "number.pt")
    for content in (b"", b"i am junk\n", bytes(range(256))):
        (tmp_path / "junk.pt").write_bytes(content)
        with pytest.raises(ConfigError, match=r"junk\.pt was not written by agent\.save: torch cannot read it"):
            ready(Published()).load(tmp_path / "junk.pt")
    with pytest.raises(FileNotFoundError):
        ready(Published()).load(tmp_path / "missing.pt")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"other\.pt was not written by agent\.save"):
        ready(Published()).load(tmp_path / "other.pt")


# ---- repr ------------------------------------------------------------------------------------------


def test_repr_says_what_the_agent_is() -> None:
    agent: Any = CategoricalPgAgent(Policy, inference="numpy")
    assert repr(agent) == "<CategoricalPgAgent, inference='numpy', not initialized>"
    assert repr(ready(agent)) == (
        f"<CategoricalPgAgent, Policy with 20 parameters, inference='numpy', observations {BOX}, actions Discrete(4)>"
    )
    assert "mask_key='observation.m'" in repr(RandomAgent(mask_key="observation.m"))


# ---- FunctionAgent with parameters --------------------------------------------------------------------


def linear(parameters: Any, observation: Any) -> Any:
    return (observation @ parameters["layers"][0]["w"] + parameters["b"]).argmax(axis=1)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_new_parameters_of_a_function_act_in_the_next_batch(cls: Any) -> None:
    def tree(action: int) -> Any:
        return {"layers": [{"w": np.zeros((4, 2), np.float32)}], "b": np.eye(2, dtype=np.float32)[action]}

    agent = FunctionAgent(linear, parameters=tree(0))
    with cls("CartPole-v1", batch_T=3, batch_B=2, n_workers=1) as sampler:
        sampler.initialize(agent, seed=0)
        assert (sampler.obtain_samples(0)[0].agent.action == 0).all()
        agent.parameters = dict(reversed(tree(1).items()))
        assert (sampler.obtain_samples(1)[0].agent.action == 0).all(), "not published yet"
        agent.sync_shared_memory()
        assert (sampler.obtain_samples(2)[0].agent.action == 1).all()
        state = agent.state_dict()
        assert sorted(state) == ["b", "layers.0.w"]
        agent.load_state_dict({**state, "b": np.eye(2, dtype=np.float32)[0]})
        assert (sampler.obtain_samples(3)[0].agent.action == 0).all()
        assert agent.parameters["layers"][0]["w"].shape == (4, 2)


def test_parameters_may_be_of_another_library_and_are_numpy_in_workers() -> None:
    def kinds(parameters: Any, observation: Any, rngs: Any) -> Any:
        is_numpy = type(parameters.w) is np.ndarray and len(rngs) == len(observation)
        return np.full(len(observation), int(is_numpy))

    from collections import namedtuple

    Layer = namedtuple("Layer", "w")
    agent = FunctionAgent(kinds, parameters=Layer(torch.ones(3)))
    with ParallelSampler(CountingEnv, batch_T=2, batch_B=2, n_workers=1) as sampler:
        sampler.initialize(agent, seed=0)
        assert (sampler.obtain_samples(0)[0].agent.action == 1).all()


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match="must contain arrays"):
        FunctionAgent(linear, parameters={})
    with pytest.raises(ConfigError, match=r"calls its function as fn\(parameters, observation\)"):
        FunctionAgent(lambda observation: observation, parameters={"w": np.zeros(2)})
    agent = ready(FunctionAgent(linear, parameters={"w": np.zeros(2)}))
    with pytest.raises(ConfigError, match=r"the state has the parameters \['v'\], this FunctionAgent has \['w'\]"):
        agent.load_state_dict({"v": np.zeros(2)})
