"""PPO on CartPole-v1 in one file, sampled by shards: on this machine, or on the cluster that RAY_ADDRESS names.

    python examples/ray_ppo.py --n-shards 2

Without RAY_ADDRESS, penstock starts Ray on this machine and ends it. Needs `pip install ".[cluster]"`. Stops
when an evaluation reaches the goal. Exits with status 1 if this takes too long.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import CategoricalPgAgent, Samples
from penstock.agents import PgAgent
from penstock.distributed import RaySampler
from penstock.learning import gae


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--n-shards 4`."""

    env_id: str = "CartPole-v1"
    seed: int = 0
    goal: float = 400.0  # mean return of an evaluation
    time_limit: float = 120.0  # seconds of training
    n_shards: int = 2
    n_workers: int = 1  # of each shard
    batch_T: int = 128
    batch_B: int = 32
    eval_every: int = 5  # iterations
    learning_rate: float = 1e-3
    discount: float = 0.98
    gae_lambda: float = 0.9
    epochs: int = 8
    minibatches: int = 8
    clip: float = 0.2


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation).squeeze(-1)


def train(agent: PgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    advantage, target = gae(samples, cfg.discount, cfg.gae_lambda)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in samples.minibatches(cfg.minibatches):
            now, old_log_prob = agent.evaluate(part), part.agent.agent_info.log_prob
            advantage = part.targets.advantage
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (now.log_prob - old_log_prob).exp()
            clipped_ratio = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
            loss = policy_loss + 0.5 * mse_loss(now.value, part.targets.value)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.model.parameters(), 0.5)
            optimizer.step()


def main(cfg: Config) -> bool:
    """Train until the goal or the time limit is reached. Returns whether it was the goal."""
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    agent = CategoricalPgAgent(ActorCritic)
    with RaySampler(
        cfg.env_id,
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_shards=cfg.n_shards,
        n_workers=cfg.n_workers,
        on_node_failure="restart",
        eval_n_envs=2 * cfg.n_shards,
        eval_episodes=4 * cfg.n_shards,
    ) as sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        began, itr = time.monotonic(), 0
        while time.monotonic() - began < cfg.time_limit:
            samples, _ = sampler.obtain_samples(itr)
            train(agent, optimizer, samples, cfg)
            agent.sync_shared_memory()  # the shards use the new parameters from the next batch on
            itr += 1
            if itr % cfg.eval_every == 0:
                returns = [info.Return for info in sampler.evaluate_agent(itr)]
                mean, steps = sum(returns) / len(returns), itr * cfg.batch_T * cfg.batch_B
                print(f"{steps:7,} steps, {time.monotonic() - began:3.0f} s: mean return {mean:3.0f}", flush=True)
                if mean >= cfg.goal:
                    for shard in sampler.stats().shards:
                        print(f"shard {shard.shard} on node {shard.node}: {shard.batches} batches")
                    return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    if not main(Config(**vars(parser.parse_args()))):
        sys.exit("the goal was missed")
