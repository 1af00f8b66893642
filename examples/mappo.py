"""MAPPO on simple_spread: a critic that sees the state of the whole game, while each agent sees its own observation.

    python examples/mappo.py

Needs the extra `pettingzoo`. With `global_state=True`, an observation has two parts: `observation`, the
agent's own, and `global_state`. The actor ignores the second. The workers give both to the critic, so the values at the
ends of batches and games are right too. Exits with status 1 if the trained policy is not better than a random one by
`goal`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import gymnasium as gym
import torch
from mpe2 import simple_spread_v3
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import CategoricalPgAgent, ParallelSampler, RandomAgent, Samples, TrajInfo
from penstock.learning import gae


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 50`."""

    seed: int = 0
    goal: float = 0.3  # (trained - random) / |random|, of the mean returns per game
    total_steps: int = 240_000  # environment steps, in each of which all agents act
    n_agents: int = 3
    n_workers: int = 2
    batch_T: int = 100  # four games of 25 steps
    batch_B: int = 16  # environments; the batch has a column for each agent of each of them
    eval_games: int = 200
    print_every: int = 10  # iterations
    learning_rate: float = 2e-3  # at the start; falls linearly to zero at total_steps
    discount: float = 0.95
    gae_lambda: float = 0.95
    epochs: int = 10  # passes over each batch
    minibatches: int = 4
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


class ActorAndCentralCritic(nn.Module):
    """The actor gets the agent's own observation, the critic also the state of the game. Returns logits and value."""

    def __init__(self, observation_space: gym.spaces.Dict, action_space: Any) -> None:
        super().__init__()
        n_own, n_state = (math.prod(observation_space[name].shape or ()) for name in ("observation", "global_state"))

        def linear(n_in: int, n_out: int, gain: float = 2**0.5) -> nn.Linear:
            layer = nn.Linear(n_in, n_out)
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
            return layer

        def mlp(n_in: int, n_out: int, gain: float) -> nn.Sequential:
            hidden = linear(n_in, 64), nn.Tanh(), linear(64, 64), nn.Tanh()
            return nn.Sequential(*hidden, linear(64, n_out, gain))

        self.actor = mlp(n_own, int(action_space.n), gain=0.01)  # all actions are about equally likely at first
        # With its own observation too, the critic knows whose value it estimates: the agents' rewards differ.
        self.critic = mlp(n_own + n_state, 1, gain=1.0)

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        own, state = observation.observation, observation.global_state
        return self.actor(own), self.critic(torch.cat([own, state], -1)).squeeze(-1)


def train(agent: CategoricalPgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    """Several epochs of minibatches with PPO's clipped objective. Steps at which an agent was absent are left out."""
    advantage, target = gae(samples, cfg.discount, cfg.gae_lambda)
    used = samples.select("env.observation", "agent.action", "agent.agent_info")
    used = used.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in used.minibatches(cfg.minibatches):  # the steps of all agents, in random order
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


def make_sampler(cfg: Config) -> ParallelSampler:
    return ParallelSampler(
        simple_spread_v3.parallel_env,
        env_kwargs={"N": cfg.n_agents},
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers,
        global_state=True,
        eval_n_envs=cfg.batch_B,
        eval_episodes=cfg.eval_games,
        eval_max_steps=1_000_000,
    )


def mean_return(traj_infos: Iterable[TrajInfo]) -> float:
    """The mean return of whole games: the sum of all agents' rewards. Each game and each of its agents has a record."""
    returns = [info.Return for info in traj_infos if info.agent_id is None]
    return sum(returns) / len(returns) if returns else math.nan


def main(cfg: Config) -> float:
    """Train for `total_steps`. Returns by how much the trained policy is better than a random one."""
    torch.manual_seed(cfg.seed)  # for the order of minibatches; everything else depends on the sampler's seed
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    with make_sampler(cfg) as sampler:
        sampler.initialize(RandomAgent(), seed=cfg.seed)
        random = mean_return(sampler.evaluate_agent(0))
    print(f"random policy: mean return per game {random:.1f}", flush=True)
    began, agent = time.monotonic(), CategoricalPgAgent(ActorAndCentralCritic)
    with make_sampler(cfg) as sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        n_batches = math.ceil(cfg.total_steps / (cfg.batch_T * cfg.batch_B))
        for itr in range(n_batches):
            samples, traj_infos = sampler.obtain_samples(itr)  # [T, environments * agents, ...]
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - itr / n_batches)
            train(agent, optimizer, samples, cfg)
            agent.sync_shared_memory()  # the workers get the new parameters
            if itr % cfg.print_every == 0:
                steps, seconds = (itr + 1) * cfg.batch_T * cfg.batch_B, time.monotonic() - began
                print(f"{steps:7,} steps  {seconds:4.0f} s  mean return {mean_return(traj_infos):.1f}", flush=True)
        trained = mean_return(sampler.evaluate_agent(n_batches))
    better, seconds = (trained - random) / abs(random), time.monotonic() - began
    print(f"trained policy: mean return per game {trained:.1f}, {better:.0%} better, after {seconds:.0f} s", flush=True)
    return better


if __name__ == "__main__":
    config = parse_config()
    if main(config) < config.goal:
        sys.exit(f"goal missed: the trained policy must be better by {config.goal:.0%}")
