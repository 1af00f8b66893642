"""PPO in one file, by default on CartPole-v1. penstock samples; change the rest as you like.

    python examples/ppo.py --out runs/cartpole

Stops after two evaluations in a row reach the goal. Exits with status 1 if this takes too long.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import CategoricalPgAgent, GaussianPgAgent, ParallelSampler, Samples
from penstock.agents import PgAgent
from penstock.learning import gae


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 64`."""

    out: str = "runs/cartpole"  # folder for progress.csv, trace.json and summary.json
    env_id: str = "CartPole-v1"
    seed: int = 0
    goal: float = 475.0  # mean return of an evaluation that counts as solved
    total_steps: int = 300_000  # limit of environment steps
    time_limit: float = 80.0  # seconds
    n_workers: int = 0  # 0: one per CPU
    batch_T: int = 128
    batch_B: int = 32
    eval_every: int = 2  # iterations
    eval_n_envs: int = 8
    # Enough for four episodes of 500 steps, the longest, in each environment. Only finished episodes count: with fewer
    # steps, an evaluation would drop long episodes and keep short ones.
    eval_max_steps: int = 8 * 4 * 500
    learning_rate: float = 1e-3  # at the start; falls linearly to zero at total_steps
    discount: float = 0.98
    gae_lambda: float = 0.9
    epochs: int = 8  # passes over each batch
    minibatches: int = 8
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    max_grad_norm: float = 0.5


# The columns of progress.csv. `seconds` counts from the first batch. The other two times are for one iteration.
COLUMNS = "itr", "steps", "seconds", "train_return_mean", "eval_return_mean", "sampling_seconds", "training_seconds"


def parse_config() -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args()))


class ActorCritic(nn.Module):
    """Two networks of 64-64. In a single one, the large value errors at the start dominate the policy's gradient.

    Returns logits of discrete actions, or the mean of continuous ones, and the value."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: Any) -> None:
        super().__init__()
        is_box = isinstance(action_space, gym.spaces.Box)
        n_inputs, n_actions = observation_space.shape[0], action_space.shape[0] if is_box else int(action_space.n)

        def linear(n_in: int, n_out: int, gain: float = 2**0.5) -> nn.Linear:
            layer = nn.Linear(n_in, n_out)
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
            return layer

        def mlp(n_out: int, gain: float) -> nn.Sequential:
            hidden = linear(n_inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh()
            return nn.Sequential(*hidden, linear(64, n_out, gain))

        self.policy = mlp(n_actions, gain=0.01)  # small, so that all actions are about equally likely at first
        self.value = mlp(1, gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation).squeeze(-1)


def train(agent: PgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    """Several epochs of minibatches with PPO's clipped objective."""
    advantage, target = gae(samples, cfg.discount, cfg.gae_lambda)
    used = samples.select("env.observation", "agent.action", "agent.agent_info")
    used = used.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in used.minibatches(cfg.minibatches):
            now, old_log_prob = agent.evaluate(part), part.agent.agent_info.log_prob
            advantage = part.targets.advantage
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (now.log_prob - old_log_prob).exp()
            clipped_ratio = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
            value_loss = mse_loss(now.value, part.targets.value)
            loss = policy_loss + cfg.value_weight * value_loss - cfg.entropy_weight * now.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.model.parameters(), cfg.max_grad_norm)
            optimizer.step()


def make_agent(env_id: str) -> PgAgent:
    """For discrete or continuous actions."""
    with gym.make(env_id) as env:
        is_box = isinstance(env.action_space, gym.spaces.Box)
    # Evaluations draw actions as training does, so that both returns belong to the same policy.
    return GaussianPgAgent(ActorCritic) if is_box else CategoricalPgAgent(ActorCritic)


def mean(returns: Collection[float]) -> float:
    return sum(returns) / len(returns) if returns else float("nan")


def main(cfg: Config) -> dict[str, Any]:
    """Train until the goal or a limit is reached. Returns what it writes to summary.json."""
    began = time.monotonic()
    torch.manual_seed(cfg.seed)  # for the order of minibatches; everything else depends on the sampler's seed
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    agent = make_agent(cfg.env_id)
    sampler = ParallelSampler(
        cfg.env_id,
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers or None,
        eval_n_envs=cfg.eval_n_envs,
        eval_max_steps=cfg.eval_max_steps,
    )
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    with sampler, (out / "progress.csv").open("w", newline="", buffering=1) as file:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        log = csv.writer(file)
        log.writerow(COLUMNS)
        recent: deque[float] = deque(maxlen=cfg.batch_B)  # returns of the last batch_B training episodes
        evals: list[float] = []
        spent = np.zeros(2)  # seconds sampling and training
        steps, reached, loop_began = 0, False, time.monotonic()

        for itr in itertools.count():
            sampling_began = time.monotonic()
            samples, traj_infos = sampler.obtain_samples(itr)
            training_began = time.monotonic()
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - steps / cfg.total_steps)
            with sampler.mark("training"):  # a span of trace.json
                train(agent, optimizer, samples, cfg)
                agent.sync_shared_memory()  # the workers use the new parameters from the next batch on
            times = sampling_began, training_began, time.monotonic()

            steps += cfg.batch_T * cfg.batch_B
            recent.extend(info.Return for info in traj_infos)
            if evaluated := itr % cfg.eval_every == 0:
                evals.append(mean([info.Return for info in sampler.evaluate_agent(itr)]))
                reached = len(evals) >= 2 and min(evals[-2:]) >= cfg.goal
            seconds = time.monotonic() - loop_began
            log.writerow([itr, steps, seconds, mean(recent), evals[-1] if evaluated else "", *np.diff(times)])
            spent += np.diff(times)
            if evaluated:
                rate = f"{steps / seconds:,.0f} steps/s"
                print(f"{steps:7,} steps  train {mean(recent):3.0f}  eval {evals[-1]:3.0f}  {rate}", flush=True)
            if reached or steps >= cfg.total_steps or time.monotonic() - began > cfg.time_limit:
                break

        sampler.trace(out / "trace.json")
        summary: dict[str, Any] = {
            "config": asdict(cfg),
            "goal_reached": reached,
            "eval_return_mean": mean(evals[-1:]),
            "total_steps": steps,
            "seconds": time.monotonic() - began,
            "steps_per_second": steps / seconds,
            "sampling_steps_per_second": steps / spent[0],
            "sampling_seconds": spent[0],
            "training_seconds": spent[1],
            **asdict(sampler.stats()),
        }
    (out / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
    return summary


if __name__ == "__main__":
    config = parse_config()
    result = main(config)
    mean_return, steps, seconds = result["eval_return_mean"], result["total_steps"], result["seconds"]
    line = f"mean evaluation return {mean_return:.0f} after {steps:,} steps, {seconds:.1f} s"
    if not result["goal_reached"]:
        sys.exit(f"goal of {config.goal:g} missed: {line}")
    print(f"goal of {config.goal:g} reached: {line}")
