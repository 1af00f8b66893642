"""PPO on Acrobot, with decisions that take several steps: the agent chooses an action, and how often it is repeated.

    python examples/action_repeats.py
    python examples/action_repeats.py --lengths 1    # decide in each step, to compare

A decision of `steps` steps has the discount `discount ** steps`, and its reward is the discounted sum of the rewards of
these steps. So the values are those of the game, whatever the agent chooses. Exits with status 1 if the mean score of
the last evaluation is below `goal`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import mean
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from penstock import CategoricalPgAgent, ParallelSampler, Samples, TrajInfo
from penstock.learning import gae


class Repeats(gym.Wrapper[Any, Any, Any, Any]):
    """An action is a move of the game and the number of its repeats, one of `lengths`."""

    def __init__(self, env: gym.Env[Any, Any], lengths: Sequence[int], discount: float) -> None:
        super().__init__(env)
        self._lengths, self._discount = lengths, discount
        self._n_moves = int(env.action_space.n)
        self.action_space = gym.spaces.Discrete(self._n_moves * len(lengths))

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        length, move = divmod(action, self._n_moves)
        reward, score, factor = 0.0, 0.0, 1.0
        for n in range(1, self._lengths[length] + 1):  # noqa: B007
            observation, one, terminated, truncated, info = self.env.step(move)
            reward, score, factor = reward + factor * one, score + one, factor * self._discount
            if terminated or truncated:
                break
        return observation, reward, terminated, truncated, {**info, "steps": n, "score": score}


class Game(TrajInfo):
    """`Score` and `Steps` are those of the game. `Return` is a sum of discounted rewards, `Length` counts decisions."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.Score, self.Steps = 0.0, 0

    def step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        terminated: bool,
        truncated: bool,
        agent_info: Any,
        info: dict[str, Any],
    ) -> None:
        super().step(observation, action, reward, terminated, truncated, agent_info, info)
        self.Score += info["score"]
        self.Steps += info["steps"]


class ActorCritic(nn.Module):
    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        super().__init__()
        n_inputs, n_actions = observation_space.shape[0], int(action_space.n)
        self.policy = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, n_actions))
        self.critic = nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.critic(observation).squeeze(-1)


def train(agent: CategoricalPgAgent, optimizer: torch.optim.Optimizer, samples: Samples, discount: float) -> None:
    advantage, target = gae(samples, discount**samples.env.env_info.steps, 0.95)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(4):
        for part in samples.minibatches(4):
            now, advantage = agent.evaluate(part), part.targets.advantage
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (now.log_prob - part.agent.agent_info.log_prob).exp()
            policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            value_loss = (now.value - part.targets.value).square().mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * now.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.model.parameters(), 0.5)
            optimizer.step()


def main(cfg: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    agent, lengths, discount = CategoricalPgAgent(ActorCritic), cfg.lengths, cfg.discount  # workers get these, not cfg
    with ParallelSampler(
        lambda: Repeats(gym.make("Acrobot-v1"), lengths, discount),
        batch_T=64,
        batch_B=16,
        n_workers=2,
        env_info={"steps": 0},  # the steps that each decision took
        traj_info_cls=Game,
        eval_n_envs=4,
        eval_episodes=20,
    ) as sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=1e-3)
        total = 0
        while total < cfg.total_steps:
            samples, games = sampler.obtain_samples(0)
            total += int(samples.env.env_info.steps.sum())
            train(agent, optimizer, samples, discount)
            agent.sync_shared_memory()
            if games:
                print(
                    f"{total:,} steps: score {mean(game.Score for game in games):.0f}, "
                    f"{mean(game.Steps / game.Length for game in games):.1f} steps for each decision"
                )
        score = mean(game.Score for game in sampler.evaluate_agent(0))
    print(f"mean score of 20 games: {score:.0f}")
    if score < cfg.goal:
        print(f"goal of {cfg.goal:.0f} missed", file=sys.stderr)
    return int(score < cfg.goal)


def parse_config(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8], help="default: 1 2 4 8")
    parser.add_argument("--total-steps", type=int, default=300_000, help="of the game; default: 300000")
    parser.add_argument("--goal", type=float, default=-110.0, help="mean score; default: -110")
    parser.add_argument("--discount", type=float, default=0.99, help="for each step of the game; default: 0.99")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(parse_config()))
