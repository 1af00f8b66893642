"""CategoricalPgAgent: it samples the softmax of its model's logits, or of their parts, and reports what it sampled."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.agents import CategoricalPgAgent
from penstock.agents.torch_agent import output_array
from penstock.errors import SpaceError

from ..models import LogitsAndFirst, acting
from ..models import act as act_in_double


def acting_categorical(
    n: int, columns: range = range(2), *, start: int = 0, model: Any = LogitsAndFirst, seed: int = 0, **options: Any
) -> CategoricalPgAgent:
    agent = CategoricalPgAgent(model, **options)
    return acting(agent, spaces.Box(-np.inf, np.inf, (n,)), spaces.Discrete(n, start=start), columns, seed)


def act(agent: CategoricalPgAgent, logits: Any) -> Any:
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    return agent.step(logits, np.zeros(rows, np.int64), np.zeros(rows, np.float32))


# ---- what is sampled ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logits", [[0, 0, 0, 0], [1, 2, 3], [-5, 0, 0.5, -1, 2], [100, 101], [-1000, -1001, -1002], [7]], ids=str
)
def test_frequencies_are_those_of_the_softmax(logits: list[float]) -> None:
    columns, n_steps = range(64), 400
    agent = acting_categorical(len(logits), columns)
    rows = np.tile(np.float32(logits), (64, 1))
    actions = np.concatenate([act(agent, rows).action for _ in range(n_steps)])
    p = torch.tensor(logits, dtype=torch.float64).softmax(0).numpy()
    observed = np.bincount(actions, minlength=len(p)) / actions.size
    assert (np.abs(observed - p) <= 4.5 * np.sqrt(p * (1 - p) / actions.size) + 1e-9).all()


def test_each_column_samples_from_its_own_row() -> None:
    agent = acting_categorical(3, range(3))
    for _ in range(20):
        assert act(agent, 100 * np.eye(3)).action.tolist() == [0, 1, 2]


def test_an_action_of_no_probability_is_never_sampled() -> None:
    agent = acting_categorical(5, range(16))
    rows = np.tile(np.float32([-np.inf, 0, -np.inf, 1, -np.inf]), (16, 1))
    assert {int(a) for _ in range(200) for a in act(agent, rows).action} == {1, 3}


def test_log_prob_is_finite_for_logits_of_any_size_and_all_logits_are_recorded_on_request() -> None:
    logits = np.float32([[1e30, -1e30, 0], [-1e30, -1e30, -1e30]])
    info = act(acting_categorical(3, range(2), record_distribution=True), logits).agent_info
    np.testing.assert_allclose(info.log_prob, [0, -np.log(3)], rtol=1e-6)
    np.testing.assert_array_equal(info.logits, logits)
    assert [*info.keys()] == ["log_prob", "value", "logits"]


# ---- greedy evaluation -------------------------------------------------------------------------


def test_greedy_eval_takes_the_most_probable_action_in_evaluation_alone() -> None:
    agent = acting_categorical(3, range(32), start=10, greedy_eval=True)
    rows = np.tile(np.float32([0, 0.1, 0.05]), (32, 1))
    sampled = [act(agent, rows).action]
    agent.eval_mode(0)
    greedy = act(agent, rows)
    agent.sample_mode(0)
    sampled.append(act(agent, rows).action)
    assert greedy.action.tolist() == [11] * 32
    assert all(set(action.tolist()) == {10, 11, 12} for action in sampled)
    expected = torch.from_numpy(rows).log_softmax(1)[:, 1].numpy()
    np.testing.assert_allclose(greedy.agent_info.log_prob, expected, rtol=1e-6)


def test_without_greedy_eval_evaluation_samples_too() -> None:
    agent = acting_categorical(3, range(32))
    agent.eval_mode(0)
    assert set(act(agent, np.zeros((32, 3))).action.tolist()) == {0, 1, 2}


# ---- the model's output ------------------------------------------------------------------------


class Outputs(nn.Module):
    """Returns what `make` makes of the number of rows."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, observation: torch.Tensor) -> Any:
        return self.make(len(observation))


@pytest.mark.parametrize("shape", [lambda b: (b,), lambda b: (b, 1)], ids=["[B]", "[B, 1]"])
@pytest.mark.parametrize("rows", [1, 3])
def test_values_are_recorded_and_returned_one_per_row(shape: Any, rows: int) -> None:
    model = Outputs(lambda b: (torch.zeros(b, 4), torch.arange(1.0, b + 1).reshape(shape(b))))
    agent = acting_categorical(4, range(rows), model=lambda: model)
    step = act(agent, np.zeros((rows, 4)))
    value = agent.value(np.zeros((rows, 4), np.float32), np.zeros(rows, np.int64), np.zeros(rows, np.float32))
    for recorded in (step.agent_info.value, value):
        assert (recorded.tolist(), recorded.dtype) == ([*range(1, rows + 1)], np.float32)
    assert [*step.agent_info.keys()] == ["log_prob", "value"]


@pytest.mark.parametrize(
    ("space", "outputs"),
    [(spaces.Discrete(2), [0.4, 0.6]), (spaces.MultiDiscrete([2, 3]), [0.4, 0.6, 0.2, 0.3, 0.5])],
    ids=str,
)
def test_a_model_that_returns_probabilities_is_warned_of_once(space: Any, outputs: list[float]) -> None:
    agent = acting(CategoricalPgAgent(LogitsAndFirst), spaces.Box(0, 1, (len(outputs),)), space)
    with pytest.warns(RuntimeWarning, match="the model seems to return probabilities") as caught:
        act(agent, [outputs] * 2)
    assert len(caught) == 1
    act(agent, [outputs] * 2)  # a second warning would be an error


@pytest.mark.parametrize("outputs", [[0.0, 0.0], [0.0, 1.0], [0.5, 0.7], [2.0, -1.0]])
def test_other_outputs_are_not_warned_of(outputs: list[float]) -> None:
    act(acting_categorical(2), [outputs] * 2)


def test_bools_as_outputs_are_refused() -> None:
    for output in (torch.tensor([[True, False]]), np.array([[True, False]])):
        with pytest.raises(SpaceError, match="the model's logits must be numbers, got bools: return what they were"):
            output_array(output, "logits", (1, 2))


# ---- MultiDiscrete: one distribution per component, side by side in the logits -------------------


def acting_multi_discrete(space: spaces.MultiDiscrete, columns: range, **options: Any) -> Any:
    logits = spaces.Box(-np.inf, np.inf, (int(space.nvec.sum()),))
    return acting(CategoricalPgAgent(LogitsAndFirst, **options), logits, space, columns)


SPACES = [
    spaces.MultiDiscrete([3, 3]),
    spaces.MultiDiscrete([2, 5, 1, 3]),
    spaces.MultiDiscrete([4]),
    spaces.MultiDiscrete([[2, 3], [4, 1]]),
    spaces.MultiDiscrete([2, 3], start=[-5, 7]),
    spaces.MultiDiscrete([2, 3], dtype=np.int32),
    spaces.MultiDiscrete([2, 3], dtype=np.uint8, start=[1, 2]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_actions_are_of_the_space_with_the_frequencies_of_each_components_softmax(space: spaces.MultiDiscrete) -> None:
    row = np.random.default_rng(1).normal(size=int(space.nvec.sum()))
    logits, agent = np.tile(row, (64, 1)), acting_multi_discrete(space, range(64))
    actions = np.concatenate([act_in_double(agent, logits).action for _ in range(200)])
    assert actions.dtype == space.dtype
    assert all(space.contains(action) for action in actions[:100])
    index = (actions.astype(np.int64) - space.start).reshape(len(actions), -1)
    bounds = np.cumsum([0, *space.nvec.ravel()])
    for component, (a, b) in enumerate(pairwise(bounds)):
        p = torch.tensor(row[a:b]).softmax(0).numpy()
        observed = np.bincount(index[:, component], minlength=len(p)) / len(actions)
        assert (np.abs(observed - p) <= 4.5 * np.sqrt(p * (1 - p) / len(actions)) + 1e-9).all()


def test_components_are_independent() -> None:
    agent = acting_multi_discrete(spaces.MultiDiscrete([2, 2]), range(64))
    actions = np.concatenate([act_in_double(agent, np.zeros((64, 4))).action for _ in range(200)])
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.04


def test_greedy_eval_takes_each_components_most_probable() -> None:
    agent = acting_multi_discrete(spaces.MultiDiscrete([2, 3], start=[0, 10]), range(2), greedy_eval=True)
    agent.eval_mode(0)
    assert act_in_double(agent, [[0, 1, 2, 1, 0], [1, 0, 0, 0, 3]]).action.tolist() == [[1, 10], [0, 12]]
