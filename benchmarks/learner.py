"""What `agent.evaluate` costs: training steps of PPO with it, beside two losses written by hand, in CPU time.

    python benchmarks/learner.py

"torch": with `torch.distributions`. "lean": with as few operations as this one kind of agent needs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from turns import cell, machine
from workloads import ActorCritic

from penstock import CategoricalPgAgent, GaussianPgAgent, RecurrentCategoricalPgAgent, SerialSampler

Found = tuple[Tensor, Tensor, Tensor]  # log_prob, entropy, value


def mean_and_value(observation_space: Any, action_space: Any) -> ActorCritic:
    """`ActorCritic` for Box actions."""
    return ActorCritic(observation_space, spaces.Discrete(action_space.shape[0]))


class Lstm(ActorCritic):
    """`ActorCritic` with an LSTM cell behind its body."""

    state_shape = ((64,), (64,))

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space)
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:  # type: ignore[override]
        h, c = self.cell(self.body(observation), state)
        return self.policy(h), self.value(h).squeeze(-1), (h, c)


def replayed(model: Any, part: Any) -> tuple[Tensor, Tensor]:
    """What `Lstm` returns for sequences, from their recorded state on."""
    state, outputs = tuple(part.initial_state), []
    for observation, is_first in zip(part.env.observation, part.env.prev_done, strict=True):
        state = tuple(x * ~is_first[:, None] for x in state)
        *output, state = model(observation, None, None, state)
        outputs.append(output)
    logits, value = (torch.stack(column) for column in zip(*outputs, strict=True))
    return logits, value


def categorical(outputs: Callable[[Any, Any], tuple[Tensor, Tensor]], model: Any, part: Any) -> Found:
    logits, value = outputs(model, part)
    policy = Categorical(logits=logits)
    return policy.log_prob(part.agent.action), policy.entropy(), value


def lean_categorical(outputs: Callable[[Any, Any], tuple[Tensor, Tensor]], model: Any, part: Any) -> Found:
    logits, value = outputs(model, part)
    log_probs = logits.log_softmax(-1)
    log_prob = log_probs.gather(-1, part.agent.action[..., None]).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs).sum(-1), value


def gaussian(model: Any, part: Any) -> Found:
    mean, value = model(part.env.observation)
    policy = Normal(mean, model.log_std.exp())
    return policy.log_prob(part.agent.agent_info.raw_action).sum(-1), policy.entropy().sum(-1), value


def lean_gaussian(model: Any, part: Any) -> Found:
    mean, value = model(part.env.observation)
    constant = 0.5 * math.log(2 * math.pi)
    z = (part.agent.agent_info.raw_action - mean) * (-model.log_std).exp()
    log_prob = (-0.5 * z * z - model.log_std - constant).sum(-1)
    return log_prob, (model.log_std + constant + 0.5).sum().expand_as(log_prob), value


def outputs_of(model: Any, part: Any) -> tuple[Tensor, Tensor]:
    logits, value = model(part.env.observation)
    return logits, value


#: By name: environment, agent, the two losses by hand, and the length of sequences.
CASES: dict[str, tuple[str, Callable[[], Any], Callable[..., Found], Callable[..., Found], int | None]] = {
    "Discrete": (
        "CartPole-v1",
        partial(CategoricalPgAgent, ActorCritic),
        partial(categorical, outputs_of),
        partial(lean_categorical, outputs_of),
        None,
    ),
    "Box": ("Pendulum-v1", partial(GaussianPgAgent, mean_and_value), gaussian, lean_gaussian, None),
    "LSTM": (
        "CartPole-v1",
        partial(RecurrentCategoricalPgAgent, Lstm),
        partial(categorical, replayed),
        partial(lean_categorical, replayed),
        16,
    ),
}


def measure(case: str, rows: int, repeats: int, batch_B: int) -> dict[str, list[float]]:
    """CPU time of the loss with `evaluate`, in relation to the two others, for each round. A minibatch has `rows`."""
    env_id, make_agent, with_torch, lean, length = CASES[case]
    agent = make_agent()
    with SerialSampler(partial(gym.make, env_id), batch_T=128, batch_B=batch_B) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples = sampler.obtain_samples(0)[0].copy()
    generator = torch.Generator().manual_seed(0)
    numbers = {name: torch.randn(128, batch_B, generator=generator) for name in ("advantage", "value")}
    parts = list(samples.with_targets(**numbers).minibatches(128 * batch_B // rows, generator, length=length))
    optimizer = torch.optim.Adam(agent.model.parameters())

    def update(log_prob: Tensor, entropy: Tensor, value: Tensor, part: Any) -> None:
        ratio = (log_prob - part.agent.agent_info.log_prob).exp()
        advantage = part.targets.advantage
        policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = policy_loss + 0.5 * (value - part.targets.value).square().mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def evaluate(part: Any) -> Found:
        now = agent.evaluate(part)
        return now.log_prob, now.entropy, now.value

    losses: dict[str, Callable[[Any], Found]] = {
        "evaluate": evaluate,
        "torch": partial(with_torch, agent.model),
        "lean": partial(lean, agent.model),
    }
    for found_one in (losses["torch"], losses["lean"]):
        torch.testing.assert_close(found_one(parts[0]), evaluate(parts[0]))
    found: dict[str, list[float]] = {"torch": [], "lean": []}
    for i in range(repeats):
        spent = {}
        for name in list(losses) if i % 2 else list(losses)[::-1]:
            began = time.process_time()
            for part in parts:
                update(*losses[name](part), part)
            spent[name] = time.process_time() - began
        for name, ratios in found.items():
            ratios.append(spent["evaluate"] / spent[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="rounds")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024], help="sizes of a minibatch")
    parser.add_argument("--batch-B", type=int, default=32, help="environments; each has 128 rows in the batch")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = [(case, rows) for case in CASES for rows in args.rows]
    results = {f"{case}, {rows} rows": measure(case, rows, args.repeats, args.batch_B) for case, rows in settings}
    for setting, found in results.items():
        for name, ratios in found.items():
            print(f"{setting:>20}, CPU time of evaluate beside {name}: {cell(ratios, '{:.3f}')}")
    if args.json:
        args.json.write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
