"""A2C in one file, by default on CartPole-v1: batches of T = 5 steps, and one gradient step for each.

    python examples/a2c.py

Stops when an evaluation reaches the goal. Exits with status 1 if this takes too long.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from penstock import CategoricalPgAgent, ParallelSampler, Samples
from penstock.agents import PgAgent


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 20`."""

    env_id: str = "CartPole-v1"
    seed: int = 0
    goal: float = 475.0  # mean return of an evaluation that counts as solved
    total_steps: int = 1_000_000  # limit of environment steps
    time_limit: float = 300.0  # seconds
    n_workers: int = 0  # 0: one per CPU
    batch_T: int = 5
    batch_B: int = 32
    eval_every: int = 25_000  # steps
    eval_episodes: int = 16
    learning_rate: float = 2e-3  # at the start; falls linearly to zero at total_steps
    discount: float = 0.99
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


class ActorCritic(nn.Module):
    """Two networks of 64-64."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Discrete) -> None:
        super().__init__()
        n_inputs, n_actions = observation_space.shape[0], int(action_space.n)

        def mlp(n_outputs: int, gain: float) -> nn.Sequential:
            layers = nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_outputs)
            for layer in layers[::2]:
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(layer.bias)
            nn.init.orthogonal_(layers[-1].weight, gain)
            return nn.Sequential(*layers)

        self.policy = mlp(n_actions, gain=0.01)  # small, so that all actions are about equally likely at first
        self.value = mlp(1, gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation).squeeze(-1)


def discounted_returns(samples: Samples, discount: float) -> Tensor:
    """Discounted rewards until the end of the batch, plus the value of the observation after it `[T, B]`."""
    env, agent = samples.env, samples.agent
    next_return, returns = agent.bootstrap_value, torch.empty_like(env.reward)
    for t in reversed(range(len(returns))):
        # After an episode's end, the next row belongs to another episode. final_value is the value of the last
        # observation where the episode was truncated, and zero where it terminated.
        next_return = env.reward[t] + discount * torch.where(env.done[t], agent.final_value[t], next_return)
        returns[t] = next_return
    return returns


def train(agent: PgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    """One gradient step on a batch."""
    returns = discounted_returns(samples, cfg.discount)
    now = agent.evaluate(samples)
    advantage = returns - now.value
    policy_loss = -(advantage.detach() * now.log_prob).mean()
    loss = policy_loss + cfg.value_weight * advantage.square().mean() - cfg.entropy_weight * now.entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.model.parameters(), cfg.max_grad_norm)
    optimizer.step()


def main(cfg: Config) -> dict[str, Any]:
    """Train until the goal or a limit is reached."""
    began = time.monotonic()
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    agent = CategoricalPgAgent(ActorCritic)
    sampler = ParallelSampler(
        cfg.env_id,
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers or None,
        eval_n_envs=8,
        eval_episodes=cfg.eval_episodes,
        eval_max_steps=cfg.eval_episodes * 1000,
    )
    result: dict[str, Any] = {"goal_reached": False, "eval_return_mean": float("nan")}
    next_eval = cfg.eval_every
    with sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.RMSprop(agent.model.parameters(), lr=cfg.learning_rate, alpha=0.99, eps=1e-5)
        for itr in itertools.count():
            samples, _ = sampler.obtain_samples(itr)
            steps = (itr + 1) * cfg.batch_T * cfg.batch_B
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * max(0.0, 1 - steps / cfg.total_steps)
            train(agent, optimizer, samples, cfg)
            agent.sync_shared_memory()  # the workers use the new parameters from the next batch on
            seconds = time.monotonic() - began
            result.update(total_steps=steps, seconds=seconds)
            if steps >= next_eval:
                next_eval += cfg.eval_every
                returns = [info.Return for info in sampler.evaluate_agent(itr)]
                result["eval_return_mean"] = sum(returns) / len(returns)
                print(f"{steps:,} steps, {seconds:.0f} s: {result['eval_return_mean']:.0f}", flush=True)
                result["goal_reached"] = result["eval_return_mean"] >= cfg.goal
            if result["goal_reached"] or steps >= cfg.total_steps or seconds > cfg.time_limit:
                return result


if __name__ == "__main__":
    config = parse_config()
    last = main(config)
    mean_return, steps, seconds = last["eval_return_mean"], last["total_steps"], last["seconds"]
    line = f"mean evaluation return {mean_return:.0f} after {steps:,} steps, {seconds:.1f} s"
    if not last["goal_reached"]:
        sys.exit(f"goal of {config.goal:g} missed: {line}")
    print(f"goal of {config.goal:g} reached: {line}")
