"""Recurrent agents: the state of each column, what is recorded of it, and that values leave it alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.agents import RecurrentCategoricalPgAgent, RecurrentEpsilonGreedyAgent, RecurrentGaussianPgAgent
from penstock.agents.recurrent import RecurrentState
from penstock.buffers import NamedArrays
from penstock.errors import ConfigError, SpaceError

from ..models import acting
from ..support import assert_same

OBSERVATIONS, DISCRETE, BOX = (
    spaces.Box(-9, 9, (2,), np.float64),
    spaces.Discrete(3),
    spaces.Box(-1, 1, (3,), np.float64),
)


class Pair(NamedTuple):
    h: Any
    c: Any


class Counting(nn.Module):
    """The state counts the steps of each column; it is the value, and the logits tell it."""

    state_shape: Any = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.seen: list[Any] = []

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        self.seen.append((prev_action, prev_reward, state))
        return state.expand(-1, 3), state[:, 0], state + 1


class Lstm(nn.Module):
    """An LSTM of two layers, as the documentation says to lay its state out."""

    state_shape = ((2, 5), (2, 5))

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, num_layers=2)
        self.out = nn.Linear(5, 4)
        self.double()

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        h, c = (part.transpose(0, 1).contiguous() for part in state)
        features, (h, c) = self.lstm(observation[None], (h, c))
        out = self.out(features[0])
        return out[:, :3], out[:, 3], (h.transpose(0, 1), c.transpose(0, 1))


def acting_recurrent(model: Any, columns: range = range(3), space: Any = DISCRETE, **options: Any) -> Any:
    cls = RecurrentCategoricalPgAgent if space is DISCRETE else RecurrentGaussianPgAgent
    twin = acting(cls(model, **options), OBSERVATIONS, space, columns)
    twin.sample_mode(0)
    return twin


def inputs(B: int = 3, t: int = 0) -> Any:
    return np.random.default_rng(t).normal(size=(B, 2)), np.zeros(B, np.int64), np.zeros(B, np.float32)


def counts(agent: Any) -> list[float]:
    value = agent.value(*inputs())
    assert value.dtype == np.float32
    assert_same(agent.step(*inputs()).agent_info.value, value)
    return [float(x) for x in value]


# ---- the life of the state ---------------------------------------------------------------------


def test_the_state_goes_on_until_its_column_is_reset() -> None:
    agent = acting_recurrent(Counting)
    assert [counts(agent), counts(agent)] == [[0, 0, 0], [1, 1, 1]]
    agent.reset_one(1)
    assert [counts(agent), counts(agent)] == [[2, 0, 2], [3, 1, 3]]
    agent.reset()
    assert counts(agent) == [0, 0, 0]


def test_a_new_batch_and_an_evaluation_mode_leave_the_state_alone() -> None:
    agent = acting_recurrent(Counting)
    counts(agent)
    for mode in (agent.sample_mode, agent.eval_mode):
        mode(1)
    assert counts(agent) == [1, 1, 1]


def test_a_model_that_updates_its_state_in_place_does_no_harm() -> None:
    class InPlace(Counting):
        def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
            value = state[:, 0].clone()
            state += 1
            return torch.zeros(3, 3), value, state

    agent = acting_recurrent(InPlace)
    recorded = []
    for _ in range(3):
        agent.value(*inputs())
        recorded.append(agent.step(*inputs()).agent_info.prev_rnn_state[:, 0].tolist())
    assert recorded == [[0] * 3, [1] * 3, [2] * 3]


def test_the_model_gets_the_previous_action_and_reward() -> None:
    agent = acting_recurrent(Counting)
    agent.step(np.zeros((3, 2)), np.array([2, 0, 1]), np.float32([0.5, 0, 1]))
    prev_action, prev_reward, state = agent.model.seen[-1]
    assert (prev_action.tolist(), prev_reward.tolist()) == ([2, 0, 1], [0.5, 0, 1])
    assert (state.shape, state.dtype) == ((3, 1), torch.float64), "like the model's parameters"


# ---- like the agents without recurrence --------------------------------------------------------


def test_the_gaussian_one_records_what_its_sibling_does() -> None:
    step = acting_recurrent(Lstm, space=BOX, initial_log_std=-1.0, record_state=None).step(*inputs())
    assert [*step.agent_info.keys()] == ["raw_action", "mean", "log_std", "log_prob", "value"]
    assert step.agent_info.log_std.tolist() == [[-1.0] * 3] * 3
    assert (np.abs(step.action) <= 1).all()


def test_greedy_evaluation() -> None:
    agent = acting_recurrent(Lstm, greedy_eval=True)
    agent.eval_mode(0)
    first = agent.step(*inputs()).action.tolist()
    agent.reset()
    assert agent.step(*inputs()).action.tolist() == first


# ---- what is recorded --------------------------------------------------------------------------


def test_the_state_with_which_each_step_was_begun_is_recorded() -> None:
    agent = acting_recurrent(Lstm)
    model = agent.model
    h = c = np.zeros((3, 2, 5))
    for t in range(4):
        state = agent.step(*inputs(t=t)).agent_info.prev_rnn_state
        assert [*state.keys()] == ["_0", "_1"]
        np.testing.assert_allclose(state._0, h, atol=1e-12)
        np.testing.assert_allclose(state._1, c, atol=1e-12)
        observation, prev_action, prev_reward = (torch.from_numpy(x) for x in inputs(t=t))
        with torch.no_grad():
            *_, new = model(observation, prev_action, prev_reward, (torch.from_numpy(h), torch.from_numpy(c)))
        h, c = (part.numpy().copy() for part in new)
        if t == 1:
            agent.reset_one(2)
            h[2] = c[2] = 0


def test_once_a_batch_means_in_its_first_row() -> None:
    agent, rows, has_state = acting_recurrent(Counting, record_state="batch"), [], []
    for t in range(6):
        if t % 3 == 0:
            agent.sample_mode(t // 3)
        info = agent.step(*inputs()).agent_info
        rows.append(info.prev_rnn_state[:, 0].tolist())
        has_state.append(info.has_rnn_state.tolist())
    assert rows == [[0] * 3, [0] * 3, [0] * 3, [3] * 3, [0] * 3, [0] * 3]
    assert has_state == [[t % 3 == 0] * 3 for t in range(6)]


def test_nothing_is_recorded_on_request() -> None:
    assert "prev_rnn_state" not in acting_recurrent(Counting, record_state=None).step(*inputs()).agent_info
    with pytest.raises(ConfigError, match='record_state must be "step", "batch" or None, got \'all\''):
        RecurrentCategoricalPgAgent(Counting, record_state="all")  # type: ignore[arg-type]


def test_states_of_half_precision_are_recorded_in_float32() -> None:
    class Half(Counting):
        def initial_state(self) -> Any:
            return torch.full((1,), 0.5, dtype=torch.bfloat16)

        def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
            return torch.zeros(3, 3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), state

    agent = acting_recurrent(lambda: Half().bfloat16())
    info = agent.step(*inputs()).agent_info
    assert (info.prev_rnn_state.tolist(), info.prev_rnn_state.dtype) == ([[0.5]] * 3, np.float32)


# ---- structures of the state -------------------------------------------------------------------


class Giving(nn.Module):
    """Has the initial state that it is made with, and returns whatever `change` makes of the state."""

    def __init__(self, change: Any = lambda state: state, **attributes: Any) -> None:
        super().__init__()
        self.change = change
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        self.got = state
        B = len(observation)
        return torch.zeros(B, 3), torch.zeros(B), self.change(state)


STRUCTURES = {
    "a number": ({"state_shape": 4}, torch.Tensor, {"": (4,)}),
    "a shape": ({"state_shape": (4, 2)}, torch.Tensor, {"": (4, 2)}),
    "a tuple": ({"state_shape": ((4,), (5, 6))}, tuple, {"_0": (4,), "_1": (5, 6)}),
    "a named tuple": ({"state_shape": Pair((4,), (5,))}, Pair, {"h": (4,), "c": (5,)}),
    "a dict": ({"state_shape": {"h": (4,), "c": 5}}, NamedArrays, {"h": (4,), "c": (5,)}),
    "a tensor": ({"initial_state": torch.ones(4)}, torch.Tensor, {"": (4,)}),
    "a parameter": ({"initial_state": nn.Parameter(torch.ones(4))}, torch.Tensor, {"": (4,)}),
    "tensors": ({"initial_state": Pair(torch.ones(4), torch.ones(2))}, Pair, {"h": (4,), "c": (2,)}),
    "a function": ({"initial_state": lambda: (torch.ones(3),)}, tuple, {"_0": (3,)}),
    "integers": ({"initial_state": torch.ones(2, dtype=torch.int64)}, torch.Tensor, {"": (2,)}),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_state_keeps_the_structure_that_the_model_gives(kind: str) -> None:
    attributes, cls, shapes = STRUCTURES[kind]
    agent = acting_recurrent(lambda: Giving(**attributes))
    for _ in range(3):
        recorded = agent.step(*inputs()).agent_info.prev_rnn_state
        agent.reset_one(0)
    assert isinstance(agent.model.got, cls)
    parts = dict(recorded.items()) if isinstance(recorded, NamedArrays) else {"": recorded}
    assert {name: array.shape for name, array in parts.items()} == {name: (3, *s) for name, s in shapes.items()}
    first = 1 if "initial_state" in attributes else 0
    assert all((array == first).all() for array in parts.values())


def test_a_learned_initial_state_travels_and_is_taken_at_each_reset() -> None:
    class Learned(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.initial_state = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    agent = acting_recurrent(Learned)
    counts(agent)
    agent.write_parameters({**agent.read_parameters(), "initial_state": np.full(1, 50.0)})
    agent.reset_one(2)
    assert counts(agent) == [1, 1, 50]


def test_a_state_that_was_handed_out_is_not_changed_by_a_reset() -> None:
    state = RecurrentState(Giving(initial_state=torch.ones(2)), 3, torch.float32)
    state.advance(torch.full((3, 2), 7.0))
    before = state.current
    state.reset_one(1)
    assert before[:, 0].tolist() == [7, 7, 7]
    assert state.current[:, 0].tolist() == [7, 1, 7]


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda s: s[:2], r"got \(2, 4\) float32"),
        (lambda s: s[None], r"got \(1, 3, 4\) float32"),
        (lambda s: s.double(), r"got \(3, 4\) float64"),
        (lambda s: (s, s), r"got \(_0: \(3, 4\) float32, _1: \(3, 4\) float32\)"),
        (lambda s: s.numpy(), r"got ndarray"),
        (lambda s: None, r"got NoneType"),
    ],
)
def test_a_new_state_unlike_the_old_names_both(change: Any, got: str) -> None:
    agent = acting_recurrent(lambda: Giving(change, state_shape=(4,)))
    with pytest.raises(SpaceError, match=rf"new state must have .*: expected \(3, 4\) float32, {got}"):
        agent.step(*inputs())


def test_a_model_that_does_not_say_what_its_state_is() -> None:
    with pytest.raises(ConfigError, match=r"give Giving an attribute state_shape, .* or method initial_state"):
        acting_recurrent(Giving)


@pytest.mark.parametrize("wrong", [{"state_shape": "big"}, {"initial_state": 3}, {"initial_state": ()}], ids=str)
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="state"):
        acting_recurrent(lambda: Giving(**wrong))


def test_a_model_without_a_state_is_refused() -> None:
    class Plain(nn.Module):
        state_shape = (1,)

        def forward(self, observation: Any) -> Any:
            return observation, observation[:, 0]

    with pytest.raises(ConfigError, match=r"prev_reward, state\), but the forward of Plain takes \(observation\)"):
        acting_recurrent(Plain)


def test_outputs_without_the_new_state_are_refused() -> None:
    class Short(Giving):
        def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
            return torch.zeros(3, 3), torch.zeros(3)

    with pytest.raises(SpaceError, match=r"must return a tuple \(logits, value, new_state\), got tuple of 2"):
        acting_recurrent(lambda: Short(state_shape=1)).step(*inputs())
    q = acting(RecurrentEpsilonGreedyAgent(lambda: Giving(state_shape=1)), OBSERVATIONS, DISCRETE, range(3))
    with pytest.raises(SpaceError, match=r"must return a tuple \(q, new_state\)"):
        q.step(*inputs())
    with pytest.raises(SpaceError, match=r"\(mean, value, new_state\) or \(mean, log_std, value, new_state\)"):
        acting_recurrent(lambda: Short(state_shape=1), space=BOX).step(*inputs())


# ---- epsilon-greedy: the best action for the state -----------------------------------------------


class CountingQ(nn.Module):
    """The state counts the steps of each column. The best action is the count, modulo 3."""

    state_shape = (1,)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        q = nn.functional.one_hot(state[:, 0].long() % 3, 3) * (1 + state)
        return q, state + 1


def test_an_epsilon_greedy_agent_acts_with_the_state_of_each_column() -> None:
    agent = acting(RecurrentEpsilonGreedyAgent(CountingQ, epsilon=0.0), OBSERVATIONS, DISCRETE, range(3))
    agent.sample_mode(0)
    for t in range(5):
        if t == 3:
            agent.reset_one(1)
        now = [t, t - 3 if t >= 3 else t, t]
        assert agent.value(*inputs()).tolist() == [count + 1 for count in now]
        action, info = agent.step(*inputs())
        assert action.tolist() == [count % 3 for count in now]
        assert info.prev_rnn_state[:, 0].tolist() == now
        assert info.q.tolist() == [count + 1 for count in now]
