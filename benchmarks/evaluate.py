"""What `agent.evaluate` costs: updates of PPO with it, and with a loss that is written by hand for one kind of agent.

    python benchmarks/evaluate.py

An update is the loss of a minibatch, its gradient and a step of Adam. Both losses take turns, in random order, with the
same parameters and minibatches. The hand-written one knows its agent, calls no `torch.distributions`, and is checked:
it must find the same loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn
from turns import machine, ratios, show, spread, take_turns
from workloads import ENV

from penstock import CategoricalPgAgent, GaussianPgAgent, RecurrentCategoricalPgAgent, Samples, SerialSampler
from penstock.targets import gae

BY_HAND, EVALUATE = "by hand", "agent.evaluate"
Found = tuple[Tensor, Tensor, Tensor]  # log_prob, entropy, value


class ActorCritic(nn.Module):
    """The 64-64 MLP of the field's examples."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        (n_inputs,), self.hidden = observation_space.shape, 64
        n_out = action_space.shape[0] if isinstance(action_space, spaces.Box) else int(action_space.n)
        self.body = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, n_out), nn.Linear(64, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observation)
        return self.policy(features), self.value(features).squeeze(-1)


class Lstm(ActorCritic):
    """The same with an LSTM cell behind its body."""

    state_shape = ((64,), (64,))

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space)
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, observation: Tensor, prev_action: Any, prev_reward: Any, state: Any) -> Any:  # type: ignore[override]
        h, c = self.cell(self.body(observation), state)
        return self.policy(h), self.value(h).squeeze(-1), (h, c)


def categorical(model: Any, part: Samples) -> Found:
    """For Discrete actions."""
    return from_logits(*model(part.env.observation), part)


def from_logits(logits: Tensor, value: Tensor, part: Samples) -> Found:
    """For Discrete actions and any model."""
    log_probs = logits.log_softmax(-1)
    log_prob = log_probs.gather(-1, part.agent.action[..., None]).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs).sum(-1), value


def gaussian(model: Any, part: Samples) -> Found:
    """For Box actions with one standard deviation for all states."""
    mean, value = model(part.env.observation)
    log_std = model.log_std
    z = (part.agent.agent_info.raw_action - mean) * (-log_std).exp()
    log_prob = (-0.5 * z * z - log_std - 0.9189385332046727).sum(-1)
    return log_prob, (log_std + 1.4189385332046727).sum().expand_as(log_prob), value


def recurrent(model: Any, part: Samples) -> Found:
    """For sequences of Discrete actions, from the recorded state on."""
    state, outputs = tuple(part.initial_state), []
    for observation, is_first in zip(part.env.observation, part.env.prev_done, strict=True):
        state = tuple(x * ~is_first[:, None] for x in state)
        *output, state = model(observation, None, None, state)
        outputs.append(output)
    logits, value = (torch.stack(column) for column in zip(*outputs, strict=True))
    return from_logits(logits, value, part)


#: By name: the agent, its environment, the loss by hand, and how minibatches of 256 steps are drawn.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, Samples], Found], dict[str, int]]] = {
    "Discrete, mlp": (partial(CategoricalPgAgent, ActorCritic), ENV, categorical, {}),
    "Box, mlp": (partial(GaussianPgAgent, ActorCritic), partial(gym.make, "Pendulum-v1"), gaussian, {}),
    "Discrete, LSTM, sequences of 16": (partial(RecurrentCategoricalPgAgent, Lstm), ENV, recurrent, {"length": 16}),
}


def update(found: Callable[[Samples], Found], optimizer: torch.optim.Optimizer, part: Samples) -> Tensor:
    """One step of PPO; returns the loss."""
    log_prob, entropy, value = found(part)
    ratio, advantage = (log_prob - part.agent.agent_info.log_prob).exp(), part.targets.advantage
    objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss = 0.5 * (value - part.targets.value).square().mean() - objective - 0.01 * entropy.mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


class Updates:
    """A contestant."""

    def __init__(self, found: Callable[[Samples], Found], model: nn.Module, parts: list[Samples]) -> None:
        # The learning rate is zero: every update has the same work, and both contestants have the same parameters.
        self._update = partial(update, found, torch.optim.Adam(model.parameters(), lr=0.0))
        self._parts, self._next = parts, cycle(parts).__next__

    def losses(self) -> list[Tensor]:
        return [self._update(part) for part in self._parts]

    def batch(self) -> int:
        """One update."""
        self._update(self._next())
        return 1

    def close(self) -> None:
        """It has no resources."""


def evaluated(agent: Any, part: Samples) -> Found:
    """The other contestant's part of the loss."""
    now = agent.evaluate(part)
    return now.log_prob, now.entropy, now.value


def measure(case: str, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Updates per second."""
    make_agent, env, by_hand, sequences = CASES[case]
    agent = make_agent()
    # float32 as the model: a hand-written loss does not convert it.
    with SerialSampler(env, batch_T=64, batch_B=16, observation_dtype="float32") as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples = sampler.obtain_samples(0)[0].copy()
    advantage, value = gae(samples, discount=0.99, lambda_=0.95)
    parts = list(samples.with_targets(advantage=advantage, value=value).minibatches(4, **sequences))
    contestants = {
        BY_HAND: Updates(partial(by_hand, agent.model), agent.model, parts),
        EVALUATE: Updates(partial(evaluated, agent), agent.model, parts),
    }
    torch.testing.assert_close(*(contestant.losses() for contestant in contestants.values()))
    return take_turns(contestants, repeats, seconds)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--seconds", type=float, default=0.25, help="of a turn")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = machine()
    for case in CASES:
        figures = measure(case, args.repeats, args.seconds)
        show(f"{case}: updates per second", figures, BY_HAND)
        report[case] = {"figures": figures, "ratio": spread(ratios(figures[EVALUATE], figures[BY_HAND]))}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
