"""Double DQN in one file, by default on CartPole-v1, with n-step returns and priorities. Change what you like.

    python examples/dqn.py

With `--asynchronous 1`, the workers of an AsyncSampler write into the replay while the learner draws from it.
Stops when an evaluation reaches the goal. Exits with status 1 if this takes too long.
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
from torch.nn.functional import smooth_l1_loss

from penstock import AsyncSampler, EpsilonGreedyAgent, LinearSchedule, SerialSampler
from penstock.learning import Prioritized, Ratio, Replay, ReplayBatch


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--n-step 1`."""

    env_id: str = "CartPole-v1"
    seed: int = 0
    goal: float = 475.0  # mean return of an evaluation that counts as solved
    total_steps: int = 300_000  # limit of environment steps
    time_limit: float = 600.0  # seconds
    asynchronous: int = 0  # 1: sample and train at the same time
    batch_T: int = 4
    batch_B: int = 8
    capacity: int = 100_000
    n_step: int = 3
    discount: float = 0.99
    alpha: float = 0.6  # the exponent of the priorities
    beta: float = 0.4  # the exponent of the importance weights
    batch_size: int = 128
    samples_per_step: float = 32.0  # positions drawn for each environment step
    min_steps: int = 1_000  # before training begins
    epsilon: float = 0.05  # from `explore_steps` on; 1 at the start
    explore_steps: int = 10_000
    learning_rate: float = 5e-4
    target_every: int = 200  # updates from one copy of the target network to the next
    publish_every: int = 8  # updates
    eval_every: int = 5_000  # steps
    eval_episodes: int = 16


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


class QNetwork(nn.Module):
    """One value for each action."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Discrete) -> None:
        super().__init__()
        n_inputs, n_actions = observation_space.shape[0], int(action_space.n)
        hidden = nn.Linear(n_inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
        self.layers = nn.Sequential(*hidden, nn.Linear(84, n_actions))

    def forward(self, observation: Tensor) -> Tensor:
        q: Tensor = self.layers(observation)
        return q


class Learner:
    """The Q-network, its target network, and the update of both."""

    def __init__(self, q: nn.Module, cfg: Config) -> None:
        self.q, self.target, self.cfg = q, copy.deepcopy(q).requires_grad_(False), cfg
        self.optimizer = torch.optim.Adam(q.parameters(), lr=cfg.learning_rate)
        self.n_updates = 0

    def update(self, batch: ReplayBatch) -> Tensor:
        """One step of gradient descent. Returns the absolute temporal-difference errors `[n]`."""
        with torch.no_grad():
            next_action = self.q(batch.next_observation).argmax(1, keepdim=True)  # double DQN
            next_value = self.target(batch.next_observation).gather(1, next_action).squeeze(1)
            # `discount` is discount ** length, and 0 after a termination. After a truncation it is not 0, and
            # `next_observation` is the last one of the episode.
            target = batch.return_ + batch.discount * next_value
        q = self.q(batch.observation).gather(1, batch.action[:, None]).squeeze(1)
        loss = (batch.weight * smooth_l1_loss(q, target, reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self.optimizer.step()
        self.n_updates += 1
        if self.n_updates % self.cfg.target_every == 0:
            self.target.load_state_dict(self.q.state_dict())
        return (q.detach() - target).abs()


def main(cfg: Config) -> dict[str, Any]:
    """Train until the goal or a limit is reached."""
    began = time.monotonic()
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    batch_steps = cfg.batch_T * cfg.batch_B
    agent = EpsilonGreedyAgent(
        QNetwork, epsilon=LinearSchedule(1.0, cfg.epsilon, max(cfg.explore_steps // batch_steps, 1))
    )
    prioritized = Prioritized(cfg.alpha, cfg.beta)
    replay = Replay(cfg.capacity, cfg.n_step, cfg.discount, prioritized, seed=cfg.seed)
    ratio = Ratio(cfg.samples_per_step, batch_steps, cfg.batch_size, cfg.min_steps)
    options: dict[str, Any] = {
        "batch_T": cfg.batch_T,
        "batch_B": cfg.batch_B,
        "eval_n_envs": 8,
        "eval_episodes": cfg.eval_episodes,
    }
    # A step of CartPole takes microseconds. For slower environments, use ParallelSampler.
    sampler = (
        AsyncSampler(cfg.env_id, n_workers=1, replay=replay, ratio=ratio, **options)
        if cfg.asynchronous
        else SerialSampler(cfg.env_id, **options)
    )
    result: dict[str, Any] = {"goal_reached": False, "eval_return_mean": float("nan")}
    next_eval, itr = cfg.eval_every, 0
    with sampler:
        sampler.initialize(agent, seed=cfg.seed)
        learner = Learner(agent.model, cfg)
        if isinstance(sampler, AsyncSampler):
            sampler.start()  # from here on, the worker writes into the replay, as far as the ratio allows
        while True:
            while not cfg.asynchronous and ratio.may_append(replay):
                replay.append(sampler.obtain_samples(itr)[0])
                itr += 1
            batch = replay.sample(cfg.batch_size)  # with AsyncSampler: waits, if there are too few steps
            replay.update(batch.index, learner.update(batch) + 1e-3)  # small errors are drawn too
            if learner.n_updates % cfg.publish_every == 0:
                agent.sync_shared_memory()
            steps, seconds = replay.n_steps, time.monotonic() - began
            result.update(total_steps=steps, seconds=seconds)
            if steps >= next_eval:
                next_eval += cfg.eval_every
                agent.sync_shared_memory()
                returns = [info.Return for info in sampler.evaluate_agent(learner.n_updates)]
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
