"""PPO for Atari in one file, with the network of the Nature DQN paper (Mnih et al., 2015).

    python examples/ppo_atari.py --game Pong
    python examples/ppo_atari.py --game Breakout --device cuda

Needs the extra `atari`: ale-py and OpenCV. The settings are the usual ones for 10 million steps of 4 frames,
except for lives: Gymnasium's wrapper starts a new game after each lost life, so in a game with lives, such as Breakout,
training sees first lives only. Evaluations play whole games.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from penstock import CategoricalPgAgent, GpuSampler, ParallelSampler, Samples
from penstock.agents import PgAgent
from penstock.envs import EnvContext, Purpose
from penstock.targets import gae

try:
    import ale_py
    import cv2  # noqa: F401  AtariPreprocessing needs it
except ImportError as error:
    raise SystemExit(f"this example needs ale-py and OpenCV: pip install '.[atari]' ({error})") from error


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 64`."""

    game: str = "Pong"
    seed: int = 0
    device: str = "cpu"  # "cuda": one process acts and trains on the GPU, and the workers only step the environments
    total_steps: int = 10_000_000  # limit of environment steps
    n_workers: int = 0  # 0: one per CPU
    batch_T: int = 128
    batch_B: int = 8
    eval_every: int = 100  # iterations; 0: never
    eval_n_envs: int = 4
    learning_rate: float = 2.5e-4  # at the start; falls linearly to zero at total_steps
    discount: float = 0.99
    gae_lambda: float = 0.95
    epochs: int = 4  # passes over each batch
    minibatches: int = 4
    clip: float = 0.1
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


def make_env(game: str, context: EnvContext) -> gym.Env[Any, Any]:
    """Four frames `[4, 84, 84]` of uint8. In training, a lost life ends the episode, and rewards become -1, 0 or 1."""
    gym.register_envs(ale_py)
    is_training = context.purpose is not Purpose.EVAL
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, terminal_on_life_loss=is_training)
    if is_training:
        env = gym.wrappers.TransformReward(env, np.sign)
    return gym.wrappers.FrameStackObservation(env, 4)


class NatureCnn(nn.Module):
    """Three convolutions and one hidden layer, then a policy and a value."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Discrete) -> None:
        super().__init__()

        def initialized(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
            return layer

        self.body = nn.Sequential(
            initialized(nn.Conv2d(observation_space.shape[0], 32, 8, stride=4)),
            nn.ReLU(),
            initialized(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            initialized(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            initialized(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.policy = initialized(nn.Linear(512, int(action_space.n)), 0.01)
        self.value = initialized(nn.Linear(512, 1), 1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observation.float() / 255)
        return self.policy(features), self.value(features).squeeze(-1)


def train(agent: PgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    """Several epochs of minibatches with PPO's clipped objective, for the policy and for the value."""
    advantage, target = gae(samples, cfg.discount, cfg.gae_lambda)
    used = samples.select("env.observation", "agent.action", "agent.agent_info")
    used = used.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in (rows.to(cfg.device) for rows in used.minibatches(cfg.minibatches)):
            now, target, advantage = agent.evaluate(part), part.targets.value, part.targets.advantage
            old_log_prob, old_value = part.agent.agent_info.log_prob, part.agent.agent_info.value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (now.log_prob - old_log_prob).exp()
            clipped_ratio = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
            clipped_value = old_value + (now.value - old_value).clamp(-cfg.clip, cfg.clip)
            value_loss = 0.5 * torch.max((now.value - target).square(), (clipped_value - target).square()).mean()
            loss = policy_loss + cfg.value_weight * value_loss - cfg.entropy_weight * now.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.model.parameters(), cfg.max_grad_norm)
            optimizer.step()


def main(cfg: Config) -> None:
    torch.manual_seed(cfg.seed)  # for the order of minibatches; everything else depends on the sampler's seed
    agent = CategoricalPgAgent(NatureCnn, device=cfg.device)
    sampler_cls = ParallelSampler if cfg.device == "cpu" else GpuSampler
    sampler = sampler_cls(
        partial(make_env, cfg.game),
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers or None,
        eval_n_envs=cfg.eval_n_envs if cfg.eval_every else 0,
        eval_episodes=cfg.eval_n_envs if cfg.eval_every else None,
        eval_max_steps=cfg.eval_n_envs * 27_000,  # 30 minutes of each game
        record_final_obs=False,  # final_value is enough, and saves half of the memory
    )
    began = time.monotonic()
    batch_steps = cfg.batch_T * cfg.batch_B
    with sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        for itr in range(math.ceil(cfg.total_steps / batch_steps)):
            samples, _ = sampler.obtain_samples(itr)
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - itr * batch_steps / cfg.total_steps)
            train(agent, optimizer, samples, cfg)
            agent.sync_shared_memory()  # the workers use the new parameters from the next batch on
            steps, seconds = (itr + 1) * batch_steps, time.monotonic() - began
            if itr % 10 == 0:
                mean = sampler.metrics()["train/Return_mean"]  # of the newest 100 lives; nan before the first one ends
                print(f"batch {itr}: {steps:,} steps, {seconds:.0f} s: return per life {mean:.1f}", flush=True)
            if cfg.eval_every and (itr + 1) % cfg.eval_every == 0:
                scores = [info.Return for info in sampler.evaluate_agent(itr)]
                mean = sum(scores) / len(scores)
                print(f"batch {itr}: {steps:,} steps, {seconds:.0f} s: evaluation {mean:.1f}", flush=True)
    print(f"{steps:,} steps, {steps / seconds:,.0f} steps/s")


if __name__ == "__main__":
    main(parse_config())
