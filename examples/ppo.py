"""PPO on CartPole-v1 in one file, read from top to bottom. Sampling is penstock's, the rest is yours to change.

    python examples/ppo.py --out runs/cartpole

Stops as soon as two evaluations in a row reach the goal, and exits with status 1 if that never happens.
Evaluations act greedily: they measure the policy that would be deployed, training returns the one that explores.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss

from penstock import CategoricalPgAgent, ParallelSampler, Samples, TrajInfo


@dataclass(frozen=True)
class Config:
    """Every field is a command line option: `--batch-T 64`."""

    out: str = "runs/cartpole"  #: folder for progress.csv, timeline.npz and summary.json
    env_id: str = "CartPole-v1"
    goal: float = 475.0  #: mean evaluation return that counts as solved
    seed: int = 0  #: fixes environments, action noise, initial weights and the order of minibatches
    total_steps: int = 400_000  #: environment steps to take at most
    time_limit: float = 85.0  #: seconds to train at most
    n_workers: int = 0  #: worker processes; 0 for one per CPU
    batch_T: int = 64  #: time steps per batch
    batch_B: int = 32  #: environments
    eval_every: int = 5  #: iterations between two evaluations
    eval_n_envs: int = 8
    eval_max_steps: int = 16_000  #: four full episodes of 500 steps per environment
    learning_rate: float = 1e-3  #: falls linearly to zero at `total_steps`
    discount: float = 0.98
    gae_lambda: float = 0.9
    epochs: int = 8  #: passes over each batch
    minibatch_size: int = 512
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    max_grad_norm: float = 0.5


def parse_config() -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help=f"default: {field.default}")
    return Config(**vars(parser.parse_args()))


class ActorCritic(nn.Module):
    """Two 64-64 networks. Built by the agent, which names the spaces that the constructor asks for."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Discrete) -> None:
        super().__init__()

        def mlp(n_out: int, gain: float) -> nn.Sequential:
            sizes, gains = (observation_space.shape[0], 64, 64, n_out), (2**0.5, 2**0.5, gain)
            layers: list[nn.Module] = []
            for n_in, n_next, layer_gain in zip(sizes, sizes[1:], gains, strict=False):
                linear = nn.Linear(n_in, n_next)
                nn.init.orthogonal_(linear.weight, layer_gain)
                nn.init.zeros_(linear.bias)
                layers += [linear, nn.Tanh()]
            return nn.Sequential(*layers[:-1])

        self.policy = mlp(int(action_space.n), gain=0.01)  # begins with all actions equally likely
        self.critic = mlp(1, gain=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.critic(observation).squeeze(-1)


def advantages(samples: Samples, cfg: Config) -> Tensor:
    """Generalized advantage estimates `[T, B]`."""
    env, agent = samples.env, samples.agent
    value = agent.agent_info.value
    following = torch.cat([value[1:], agent.bootstrap_value[None]])
    # An episode's last step is not followed by the next row, which belongs to the next episode. Where time ran out the
    # pole still stood, so what follows is worth `final_value`; where it fell, nothing is, and `final_value` is zero.
    following = torch.where(env.done, agent.final_value, following)
    delta = env.reward + cfg.discount * following - value
    decay = cfg.discount * cfg.gae_lambda * ~env.done
    advantage = torch.empty_like(delta)
    carried = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage[t] = carried = delta[t] + decay[t] * carried
    return advantage


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    """Several epochs of minibatch updates with PPO's clipped objective."""
    advantage = advantages(samples, cfg)
    target = advantage + samples.agent.agent_info.value
    # [T, B, ...] to [T * B, ...]: still the workers' memory, nothing is copied.
    observation, action, old_log_prob, advantage, target = (
        x.flatten(0, 1)
        for x in (
            samples.env.observation, samples.agent.action, samples.agent.agent_info.log_prob, advantage, target,
        )
    )
    for _ in range(cfg.epochs):
        for i in torch.randperm(len(action)).split(cfg.minibatch_size):
            logits, value = model(observation[i])
            policy = Categorical(logits=logits)
            ratio = (policy.log_prob(action[i]) - old_log_prob[i]).exp()
            weight = (advantage[i] - advantage[i].mean()) / (advantage[i].std() + 1e-8)
            gain = torch.min(ratio * weight, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * weight).mean()
            loss = (
                cfg.value_weight * mse_loss(value, target[i]) - gain - cfg.entropy_weight * policy.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
            optimizer.step()


def mean_return(infos: list[TrajInfo]) -> float:
    return float(np.mean([info.Return for info in infos])) if infos else float("nan")


def main(cfg: Config) -> bool:
    """Train until the goal is reached; returns whether it was."""
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    agent = CategoricalPgAgent(ActorCritic, greedy_eval=True)
    out = Path(cfg.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    start = time.monotonic()
    with ParallelSampler(
        partial(gym.make, cfg.env_id), batch_T=cfg.batch_T, batch_B=cfg.batch_B, n_workers=cfg.n_workers or None,
        eval_n_envs=cfg.eval_n_envs, eval_max_steps=cfg.eval_max_steps,
    ) as sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        steps=0; itr=0; good=0; ts=tt=te=0.0
        print("init", time.monotonic()-start)
        hist=[]
        while steps < cfg.total_steps and time.monotonic()-start < cfg.time_limit:
            a=time.monotonic()
            samples, infos = sampler.obtain_samples(itr)
            b=time.monotonic()
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - steps / cfg.total_steps)
            train(agent.model, optimizer, samples, cfg)
            agent.sync_shared_memory()
            c=time.monotonic()
            steps += cfg.batch_T*cfg.batch_B
            ts+=b-a; tt+=c-b
            itr+=1
            if itr % cfg.eval_every == 0:
                d=time.monotonic()
                e = sampler.evaluate_agent(itr)
                te+=time.monotonic()-d
                r=mean_return(e)
                hist.append((steps, round(mean_return(infos)), round(r)))
                good = good+1 if r>=cfg.goal else 0
                if good==2: break
        print(f"seed {cfg.seed} ok {good==2} secs {time.monotonic()-start:.1f} steps {steps} ts {ts:.2f} tt {tt:.2f} te {te:.2f} sps {steps/ts:.0f}", hist[-8:], flush=True)
    return good==2


if __name__ == "__main__":
    sys.exit(0 if main(parse_config()) else 1)
