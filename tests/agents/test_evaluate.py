"""`agent.evaluate`: with unchanged parameters, it finds what the agent has recorded, for every kind of agent."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock import (
    CategoricalPgAgent,
    ConfigError,
    FunctionAgent,
    GaussianPgAgent,
    RecurrentCategoricalPgAgent,
    RecurrentGaussianPgAgent,
    SerialSampler,
    SquashedGaussianAgent,
    WaitResetCollector,
)
from penstock.agents import PolicyHead

from ..scale import examples

ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "from 2": spaces.Discrete(4, start=2),
    "even": spaces.MultiDiscrete([3, 3], start=[5, 7]),
    "uneven": spaces.MultiDiscrete([[2, 4], [3, 2]]),
    "below 0": spaces.Discrete(3, start=-5),
    "around 0": spaces.MultiDiscrete([3, 2], start=[-7, 3]),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "matrix": spaces.Box(-2, 2, (2, 3), np.float32),
    "number": spaces.Box(-1, 1, (), np.float32),
    "double": spaces.Box(-1, 1, (2,), np.float64),
}


class Walk(gym.Env[Any, Any]):
    """Random observations, a Dict with a mask if wanted, and episodes of 1 to 9 steps."""

    def __init__(self, kind: str, mask: bool) -> None:
        self.action_space = ACTIONS[kind]
        n = getattr(self.action_space, "nvec", getattr(self.action_space, "n", 0))
        self.sizes = np.ravel(n) if mask else ()
        board = spaces.Box(-1, 1, (2, 2), np.float64)
        self.observation_space: Any = (
            spaces.Dict(board=board, legal=spaces.MultiBinary(int(sum(self.sizes)))) if mask else board
        )

    def _observation(self) -> Any:
        board = self.np_random.uniform(-1, 1, (2, 2))
        if not len(self.sizes):
            return board
        masks = [(self.np_random.random(size) < 0.4).astype(np.int8) for size in self.sizes]
        for own in masks:
            own[self.np_random.integers(len(own))] = 1
        return {"board": board, "legal": np.concatenate(masks)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        is_over = self.left == 0
        truncated = bool(self.np_random.integers(2))
        return self._observation(), float(self.np_random.normal()), is_over and not truncated, is_over and truncated, {}


class Heads(nn.Module):
    """Outputs for each action space: logits, mean, or mean and log_std; with the previous action and reward."""

    def __init__(self, action_space: spaces.Space[Any], form: str) -> None:
        super().__init__()
        n = int(np.sum(getattr(action_space, "nvec", getattr(action_space, "n", 0))))
        self.shape = action_space.shape if isinstance(action_space, spaces.Box) else (n,)
        self.form, size = form, int(np.prod(self.shape))
        self.takes = int(np.prod(action_space.shape or ()))
        self.body = nn.Linear(4 + self.takes + 1, 8)
        self.heads = nn.ModuleList([nn.Linear(8, size), nn.Linear(8, size), nn.Linear(8, 1)])
        if form == "shared":
            self.own_log_std = nn.Parameter(torch.full(self.shape, -0.3))

    def inputs(self, observation: Any, prev_action: Tensor, prev_reward: Tensor) -> Tensor:
        board = observation if isinstance(observation, Tensor) else observation.board
        n = len(prev_reward)
        previous = prev_action.reshape(n, -1).to(board.dtype)
        return torch.cat([board.reshape(n, 4), previous, prev_reward[:, None]], 1)

    def outputs(self, features: Tensor) -> tuple[Tensor, ...]:
        main, log_std, value = (head(features) for head in self.heads)
        main = main.unflatten(1, self.shape) if self.shape else main[:, 0]
        if self.form == "mean" or self.form == "logits":
            return main, value
        if self.form == "shared":
            return main, self.own_log_std, value
        return main, (log_std.unflatten(1, self.shape) if self.shape else log_std[:, 0]).clamp(-1, 1), value

    def forward(self, observation: Any, prev_action: Tensor, prev_reward: Tensor) -> tuple[Tensor, ...]:
        return self.outputs(self.body(self.inputs(observation, prev_action, prev_reward)).tanh())


class Memory(Heads):
    """The same with a state: one tensor that the model learns to begin with, or h and c."""

    def __init__(self, action_space: spaces.Space[Any], form: str, cell: str) -> None:
        super().__init__(action_space, form)
        n_inputs = 4 + self.takes + 1
        self.body = nn.GRUCell(n_inputs, 8) if cell == "gru" else nn.LSTMCell(n_inputs, 8)
        if cell == "gru":
            self.initial_state = nn.Parameter(torch.linspace(-1, 1, 8))
        else:
            self.state_shape = ((8,), (8,))

    def forward(self, observation: Any, prev_action: Tensor, prev_reward: Tensor, state: Any) -> tuple[Any, ...]:
        state = self.body(self.inputs(observation, prev_action, prev_reward), state)
        return *self.outputs(state if isinstance(state, Tensor) else state[0]), state


class Squashed(Heads):
    """No value, and a standard deviation that is large enough for the bounds to matter."""

    def forward(self, observation: Any, prev_action: Tensor, prev_reward: Tensor) -> tuple[Tensor, ...]:
        return super().forward(observation, prev_action, prev_reward)[:2]


def make_agent(kind: str, form: str, mask: bool, cell: str | None, record_state: Any = "step") -> Any:
    is_box = isinstance(ACTIONS[kind], spaces.Box)
    if form == "squashed":
        return SquashedGaussianAgent(lambda action_space: Squashed(action_space, "state"))
    options: dict[str, Any] = {"mask_key": "observation.legal"} if mask else {}
    if cell is None:
        cls: Any = GaussianPgAgent if is_box else CategoricalPgAgent
        return cls(lambda action_space: Heads(action_space, form), **options)
    cls = RecurrentGaussianPgAgent if is_box else RecurrentCategoricalPgAgent
    return cls(lambda action_space: Memory(action_space, form, cell), record_state=record_state, **options)


def require_equal(agent: Any, part: Any) -> Any:
    found, info, valid = agent.evaluate(part), part.agent.agent_info, part.env.valid
    pairs = [(found.log_prob, info.log_prob)]
    if "value" in info:
        pairs.append((found.value, info.value))
        torch.testing.assert_close(found.entropy, found.distribution.entropy(), rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(ConfigError, match=r"returns no value: use your critics"):
            _ = found.value
    for ours, recorded in pairs:
        assert ours.shape == recorded.shape == found.entropy.shape
        error = (ours - recorded).abs() / recorded.abs().clamp(min=1)
        assert not (error[valid] > (1e-6 if "value" in info else 3e-6)).any()  # 25 roundings of float32
    return found


@examples(30, 600)
@given(data=st.data())
def test_unchanged_parameters_give_what_was_recorded(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(ACTIONS)))
    form = data.draw(st.sampled_from(["mean", "state", "shared", "squashed"]))
    cell, every = data.draw(st.sampled_from([None, "gru", "lstm"])), data.draw(st.sampled_from([4, 8]))
    mask, waits, seed = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.integers(0, 2**31))
    is_box = isinstance(ACTIONS[kind], spaces.Box)
    mask, form = mask and not is_box, form if is_box else "logits"
    has_value, cell = form != "squashed", None if form == "squashed" else cell
    agent: Any = make_agent(kind, form, mask, cell, "batch" if every == 8 else "step")
    options: dict[str, Any] = {"collector_cls": WaitResetCollector} if waits else {}
    rng = np.random.default_rng(seed)
    with SerialSampler(lambda: Walk(kind, mask), batch_T=8, batch_B=3, **options) as sampler:
        sampler.initialize(agent, seed=seed, bootstrap_value=has_value)
        for itr in range(2):
            samples, _ = sampler.obtain_samples(itr)
            parts = [samples, samples.copy().numpy(), *samples.minibatches(2, rng, length=every)]
            if cell is None:
                parts += [samples.flatten(), *samples.minibatches(3, rng), samples[2], samples[4:, 1]]
            for part in parts[:1] + parts[2:]:
                found = require_equal(agent, part)
            assert torch.equal(agent.evaluate(parts[1]).log_prob, agent.evaluate(samples).log_prob)
    (found.log_prob.sum() + found.entropy.sum() + (found.value.sum() if has_value else 0)).backward()
    for name, parameter in agent.model.named_parameters():
        if name == "initial_state" and not part.env.prev_done.any():
            continue
        is_used = form in ("state", "squashed") if name.startswith("heads.1") else name != "log_std" or form == "mean"
        if is_used and (has_value or not name.startswith("heads.2")):
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["matrix", "number"])
def test_a_squashed_distribution_has_that_log_prob_and_entropy(kind: str) -> None:
    torch.manual_seed(0)
    agent: Any = SquashedGaussianAgent(lambda action_space: Squashed(action_space, "state").double())
    with SerialSampler(lambda: Walk(kind, False), batch_T=2, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        samples, _ = sampler.obtain_samples(0)
        found = agent.evaluate(samples)
        with torch.no_grad():
            exact = found.distribution.log_prob(samples.agent.action.double())
            n_draws = 20_000
            distribution = found.distribution
            draws = -distribution.log_prob(distribution.sample((n_draws,)))
    # The recorded action is rounded to float32: near a bound, the inverse of the tanh is not exact.
    torch.testing.assert_close(found.log_prob, exact, rtol=1e-3, atol=1e-3)
    assert ((draws.mean(0) - found.entropy).abs() < 5 * draws.std(0) / n_draws**0.5).all()


def test_what_cannot_be_evaluated_is_refused() -> None:
    agent: Any = make_agent("discrete", "logits", mask=False, cell="gru")
    with SerialSampler(lambda: Walk("discrete", False), batch_T=8, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples, _ = sampler.obtain_samples(0)
        with pytest.raises(ConfigError, match=r"rows in their order, \[T, B\].*\[16\].*minibatches\(n, length="):
            agent.evaluate(samples.flatten())
        with pytest.raises(ConfigError, match=r"evaluate takes samples.*got EnvSamples"):
            agent.evaluate(samples.env)
        with pytest.raises(AttributeError, match="has no field 'action'"):
            agent.evaluate(samples.select("env", "agent.agent_info", "agent.prev_action"))


class NoEvaluation(CategoricalPgAgent.head_cls):  # type: ignore[misc, name-defined]
    """As a user writes it who needs no `evaluate`."""

    log_prob = PolicyHead.log_prob


class NoEvaluationAgent(CategoricalPgAgent):
    head_cls = NoEvaluation


def test_an_own_head_without_log_prob_says_what_to_define() -> None:
    agent = NoEvaluationAgent(lambda action_space: Heads(action_space, "logits"))
    with SerialSampler(lambda: Walk("discrete", False), batch_T=2, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        samples, _ = sampler.obtain_samples(0)
        with pytest.raises(ConfigError, match="NoEvaluation has no log_prob: define log_prob and entropy"):
            agent.evaluate(samples)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_is_where_the_model_goes(device: Any) -> None:
    agent = CategoricalPgAgent(lambda action_space: Heads(action_space, "logits"), device=device)
    agent.initialize(Walk("discrete", False).observation_space, ACTIONS["discrete"])
    assert {parameter.device.type for parameter in agent.model.parameters()} == {"meta"}


def test_a_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match='device must be a device of torch such as "cuda"'):
        CategoricalPgAgent(lambda: Heads(ACTIONS["discrete"], "logits"), device="graphics card")
    n = torch.cuda.device_count()
    agent = CategoricalPgAgent(lambda: Heads(ACTIONS["discrete"], "logits"), device=f"cuda:{n}")
    with pytest.raises(ConfigError, match=f'the model cannot be moved to device="cuda:{n}"'):
        agent.initialize(Walk("discrete", False).observation_space, ACTIONS["discrete"])


def test_an_agent_without_a_model_says_where_to_use_the_device() -> None:
    wrong: Any = "cuda"
    with pytest.raises(ConfigError, match=r"no model .* device='cuda': put the arrays on the device in fn"):
        FunctionAgent(lambda observation: observation, device=wrong)


def test_the_rows_of_named_arrays() -> None:
    from penstock.buffers import NamedArrays

    named = NamedArrays(a=np.arange(6).reshape(3, 2), b=NamedArrays(c=np.arange(3)))
    rows = list(named.rows())
    assert [row.b.c for row in rows] == [0, 1, 2]
    assert [row.a.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError, match="the same number of rows"):
        NamedArrays(a=np.zeros(2), b=np.zeros(3)).rows()
