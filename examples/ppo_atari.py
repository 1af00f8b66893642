"""PPO for Atari in one file, with the network of the Nature DQN paper (Mnih et al., 2015).

    python examples/ppo_atari.py --game Breakout
    python examples/ppo_atari.py --game Pong --envs single --device cuda

Needs the extra `atari`: ale-py and OpenCV. The settings are those of CleanRL's ppo_atari.py: 40 million frames, 4 in
each step. A lost life ends an episode, and the game goes on. Scores are those of whole games, with rewards as the game
gives them. The learner clips the rewards.
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
import torch
from torch import Tensor, nn

from penstock import (
    CategoricalPgAgent,
    GpuSampler,
    ParallelSampler,
    Samples,
    TrajInfo,
)
from penstock.agents import PgAgent
from penstock.envs import BatchedEpisodicLife, EpisodicLife
from penstock.learning import gae

try:
    import ale_py
    import cv2  # noqa: F401  AtariPreprocessing needs it
except ImportError as error:
    raise SystemExit(f"this example needs ale-py and OpenCV: pip install '.[atari]' ({error})") from error


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 64`."""

    game: str = "Breakout"
    envs: str = "batched"  # ALE steps all games of a worker in one call; "single": one environment for each game
    seed: int = 0
    device: str = "cpu"  # "cuda": one process acts and trains on the GPU, and the workers only step the environments
    total_frames: int = 40_000_000  # frames of the games, as papers count them
    n_workers: int = 0  # 0: one per CPU
    batch_T: int = 128
    batch_B: int = 8
    eval_every: int = 100  # iterations; 0: never
    eval_n_envs: int = 4
    learning_rate: float = 2.5e-4  # at the start; falls linearly to zero at total_frames
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
        choices = sorted(MAKERS) if field.name == "envs" else None
        parser.add_argument(
            f"--{name}", type=type(default), default=default, choices=choices, help=f"default: {default}"
        )
    return Config(**vars(parser.parse_args(arguments)))


FRAMES_PER_STEP = (
    4  # of the game in each environment step; an observation has the newest frame of each of the last 4 steps
)


def make_game(game: str) -> gym.Env[Any, Any]:
    """A single game. Observations are frames `[4, 84, 84]` of uint8."""
    gym.register_envs(ale_py)
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = EpisodicLife(gym.wrappers.AtariPreprocessing(env, frame_skip=FRAMES_PER_STEP))
    return gym.wrappers.FrameStackObservation(env, 4)


def make_games(game: str, num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` games with such observations in one environment, ALE's `AtariVectorEnv`."""
    gym.register_envs(ale_py)
    options = {
        "frameskip": FRAMES_PER_STEP,
        "repeat_action_probability": 0.0,
        "reward_clipping": False,
        "num_threads": 1,
    }
    env = gym.make_vec(f"ALE/{game}-v5", num_envs, "vector_entry_point", autoreset_mode="SameStep", **options)
    return BatchedEpisodicLife(env)


MAKERS = {"batched": make_games, "single": make_game}


class GameInfo(TrajInfo):
    """The record of one whole game, with all its lives. `Return` is its score."""

    def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
        return truncated or bool(env_info["game_over"])


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
    samples.env.reward.sign_()  # clipped to -1, 0 or 1; the scores have been counted
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
        partial(MAKERS[cfg.envs], cfg.game),
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers or None,
        batched=cfg.envs == "batched",
        traj_info_cls=GameInfo,
        eval_n_envs=cfg.eval_n_envs if cfg.eval_every else 0,
        eval_episodes=cfg.eval_n_envs if cfg.eval_every else None,  # whole games
        eval_max_steps=cfg.eval_n_envs * 27_000,  # 30 minutes of each game
        record_final_obs=False,  # final_value is enough, and saves half of the memory
    )
    began = time.monotonic()
    batch_frames = cfg.batch_T * cfg.batch_B * FRAMES_PER_STEP
    with sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        for itr in range(math.ceil(cfg.total_frames / batch_frames)):
            samples, _ = sampler.obtain_samples(itr)
            optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - itr * batch_frames / cfg.total_frames)
            train(agent, optimizer, samples, cfg)
            agent.sync_shared_memory()  # the workers use the new parameters from the next batch on
            frames, seconds = (itr + 1) * batch_frames, time.monotonic() - began
            if itr % 10 == 0:
                mean = sampler.metrics()["train/Return_mean"]  # of the newest 100 games; nan before the first one ends
                print(f"batch {itr}: {frames:,} frames, {seconds:.0f} s: score {mean:.1f}", flush=True)
            if cfg.eval_every and (itr + 1) % cfg.eval_every == 0:
                scores = [info.Return for info in sampler.evaluate_agent(itr)]
                mean = sum(scores) / len(scores) if scores else math.nan  # nan: no game ended in eval_max_steps
                print(f"batch {itr}: {frames:,} frames, {seconds:.0f} s: evaluation {mean:.1f}", flush=True)
    print(f"{frames:,} frames, {frames / seconds:,.0f} frames/s")


if __name__ == "__main__":
    main(parse_config())
