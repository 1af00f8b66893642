"""Soft actor-critic in one file, by default on Pendulum-v1. Change what you like.

    python examples/sac.py

With `--asynchronous 1`, the workers of an AsyncSampler write into the replay while the learner draws from it.
Stops when an evaluation reaches the goal. Exits with status 1 if this takes too long. To see why truncations matter,
cut the training episodes at 50 steps, and then treat these cuts as terminations:

    python examples/sac.py --max-episode-steps 50
    python examples/sac.py --max-episode-steps 50 --truncation-terminates 1
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

from penstock import AsyncSampler, SerialSampler, SquashedGaussianAgent
from penstock.learning import Ratio, Replay, ReplayBatch


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-size 128`."""

    env_id: str = "Pendulum-v1"
    seed: int = 0
    goal: float = -200.0  # mean return of an evaluation that counts as solved
    total_steps: int = 40_000  # limit of environment steps
    time_limit: float = 600.0  # seconds
    asynchronous: int = 0  # 1: sample and train at the same time
    max_episode_steps: int = 200  # of training episodes; evaluations have 200
    truncation_terminates: int = 0  # 1: treat truncations as terminations, which is wrong
    batch_B: int = 4
    capacity: int = 100_000
    discount: float = 0.99
    batch_size: int = 128
    updates_per_step: float = 1.0
    min_steps: int = 1_000  # of random actions, before training begins
    learning_rate: float = 1e-3
    target_rate: float = 0.01  # how much of the critics goes into the target networks at each update
    eval_every: int = 1_000  # steps
    eval_episodes: int = 16


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_out))


class Policy(nn.Module):
    """Mean and log of the standard deviation of the action before the tanh."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Box) -> None:
        super().__init__()
        self.layers = mlp(observation_space.shape[0], 2 * action_space.shape[0])

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.layers(observation).chunk(2, -1)
        return mean, log_std.clamp(-5.0, 2.0)


class Critics(nn.Module):
    """Two critics. They return action values `[2, n]`; the learner uses the smaller of both."""

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.both = nn.ModuleList(mlp(n_inputs, 1) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        inputs = torch.cat([observation, action], -1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.both])


class Learner:
    """Policy, critics, target critics, and the weight of the entropy, with their updates."""

    def __init__(self, agent: SquashedGaussianAgent, n_inputs: int, n_actions: int, cfg: Config) -> None:
        self.agent, self.policy, self.cfg = agent, agent.model, cfg
        self.critics = Critics(n_inputs + n_actions)
        self.target = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.wanted_entropy = -float(n_actions)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=cfg.learning_rate)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=cfg.learning_rate)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=cfg.learning_rate)

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """An action and the log of its probability density, before it is scaled to the bounds."""
        mean, log_std = self.policy(observation)
        distribution = torch.distributions.Normal(mean, log_std.exp())
        raw = distribution.rsample()
        log_slope = 2 * (torch.log(torch.tensor(2.0)) - raw - softplus(-2 * raw))  # of the tanh
        return self.agent.action_of(raw), (distribution.log_prob(raw) - log_slope).sum(-1)

    def update(self, batch: ReplayBatch) -> None:
        """One step of gradient descent for each part."""
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.act(batch.next_observation)
            next_value = self.target(batch.next_observation, next_action).amin(0) - alpha * next_log_prob
            # `discount` is 0 after a termination, but not after a truncation.
            target = batch.return_ + batch.discount * next_value
        q = self.critics(batch.observation, batch.action)
        step(self.critic_optimizer, mse_loss(q, target.expand_as(q)))
        action, log_prob = self.act(batch.observation)
        step(self.policy_optimizer, (alpha * log_prob - self.critics(batch.observation, action).amin(0)).mean())
        step(self.alpha_optimizer, -(self.log_alpha * (log_prob.detach() + self.wanted_entropy)).mean())
        with torch.no_grad():
            for target, source in zip(self.target.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(source, self.cfg.target_rate)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(cfg: Config) -> dict[str, Any]:
    """Train until the goal or a limit is reached."""
    if cfg.asynchronous and cfg.truncation_terminates:
        sys.exit("--truncation-terminates 1 changes the samples before they are appended: use --asynchronous 0")
    began = time.monotonic()
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    agent = SquashedGaussianAgent(Policy, warmup_random_itrs=cfg.min_steps // cfg.batch_B)
    replay = Replay(cfg.capacity, 1, cfg.discount, max_truncations=cfg.capacity // 16, seed=cfg.seed)
    ratio = Ratio(cfg.updates_per_step * cfg.batch_size, cfg.batch_B, cfg.batch_size, cfg.min_steps)
    options: dict[str, Any] = {
        "env_kwargs": {"max_episode_steps": cfg.max_episode_steps},
        "batch_T": 1,
        "batch_B": cfg.batch_B,
        "eval_n_envs": 8,
        "eval_episodes": cfg.eval_episodes,
        "eval_env_kwargs": {"max_episode_steps": 200},
        "observation_dtype": "float32",
    }
    sampler = (
        AsyncSampler(cfg.env_id, n_workers=1, replay=replay, ratio=ratio, **options)
        if cfg.asynchronous
        else SerialSampler(cfg.env_id, **options)
    )
    result: dict[str, Any] = {"goal_reached": False, "eval_return_mean": float("nan")}
    next_eval, itr, n_updates = cfg.min_steps + cfg.eval_every, 0, 0
    with sampler:
        example = sampler.initialize(agent, seed=cfg.seed)
        learner = Learner(agent, example.env.observation.shape[-1], example.agent.action.shape[-1], cfg)
        if isinstance(sampler, AsyncSampler):
            sampler.start()  # from here on, the worker writes into the replay, as far as the ratio allows
        while True:
            while not cfg.asynchronous and ratio.may_append(replay):
                samples, _ = sampler.obtain_samples(itr)
                if cfg.truncation_terminates:
                    samples.env.terminated[...] = samples.env.done
                replay.append(samples)
                itr += 1
            learner.update(replay.sample(cfg.batch_size))  # with AsyncSampler: waits, if there are too few steps
            n_updates += 1
            if n_updates % cfg.batch_B == 0:
                agent.sync_shared_memory()
            steps, seconds = replay.n_steps, time.monotonic() - began
            result.update(total_steps=steps, seconds=seconds)
            if steps >= next_eval:
                next_eval += cfg.eval_every
                returns = [info.Return for info in sampler.evaluate_agent(replay.n_steps // cfg.batch_B)]
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
