"""What `agent.evaluate` costs: training steps of PPO with it, beside two losses written by hand, in CPU time.

    python benchmarks/learner.py

"torch": with `torch.distributions`. "lean": with as few operations as one Discrete action needs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from turns import cell, machine
from workloads import ActorCritic

from penstock import CategoricalPgAgent, SerialSampler


def measure(rows: int, repeats: int) -> dict[str, list[float]]:
    """CPU time of the loss with `evaluate`, in relation to the two others, for each round."""
    agent = CategoricalPgAgent(ActorCritic)
    with SerialSampler("CartPole-v1", batch_T=128, batch_B=32) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples = sampler.obtain_samples(0)[0].copy()
    generator = torch.Generator().manual_seed(0)
    numbers = {name: torch.randn(128, 32, generator=generator) for name in ("advantage", "value")}
    parts = list(samples.with_targets(**numbers).minibatches(4096 // rows, generator))
    optimizer = torch.optim.Adam(agent.model.parameters())

    def update(part: Any, log_prob: Any, entropy: Any, value: Any) -> None:
        ratio = (log_prob - part.agent.agent_info.log_prob).exp()
        advantage = part.targets.advantage
        policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = policy_loss + 0.5 * (value - part.targets.value).square().mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate(part: Any) -> None:
        now = agent.evaluate(part)
        update(part, now.log_prob, now.entropy, now.value)

    def with_torch(part: Any) -> None:
        logits, value = agent.model(part.env.observation)
        policy = torch.distributions.Categorical(logits=logits)
        update(part, policy.log_prob(part.agent.action), policy.entropy(), value.reshape(-1))

    def lean(part: Any) -> None:
        logits, value = agent.model(part.env.observation)
        log_probs = logits.log_softmax(1)
        log_prob = log_probs.gather(1, part.agent.action[:, None]).squeeze(1)
        update(part, log_prob, -(log_probs.exp() * log_probs).sum(1), value.reshape(-1))

    losses: dict[str, Callable[[Any], None]] = {"evaluate": evaluate, "torch": with_torch, "lean": lean}
    found: dict[str, list[float]] = {"torch": [], "lean": []}
    for i in range(repeats):
        spent = {}
        for name in list(losses) if i % 2 else list(losses)[::-1]:
            began = time.process_time()
            for part in parts:
                losses[name](part)
            spent[name] = time.process_time() - began
        for name, ratios in found.items():
            ratios.append(spent["evaluate"] / spent[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60, help="rounds")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {rows: measure(rows, args.repeats) for rows in (256, 1024)}
    for rows, found in results.items():
        for name, ratios in found.items():
            print(f"{rows:>5} rows, CPU time of evaluate beside {name}: {cell(ratios, '{:.2f}')}")
    if args.json:
        args.json.write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
