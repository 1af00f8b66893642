"""PPO on a Gymnasium vector environment, in the style of CleanRL: one file, one loop, one line of penstock.

    python examples/vector_ppo.py --vector shm      # penstock's processes and shared memory
    python examples/vector_ppo.py --vector sync     # Gymnasium's single process

With the same seed, both give the same policy bit for bit. Only `make_envs` depends on the option.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

from penstock.learning import Steps, gae
from penstock.vector import ShmVectorEnv


def make_envs(kind: str, env_fns: list[Callable[[], Any]]) -> Any:
    """The environments: the only function with penstock."""
    if kind == "shm":
        return ShmVectorEnv(env_fns, n_workers=2, autoreset_mode=AutoresetMode.SAME_STEP)
    return SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vector", choices=("shm", "sync"), default="shm")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    return parser.parse_args()


class ActorCritic(nn.Module):
    def __init__(self, observation_size: int, n_actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, n_actions))
        self.critic = nn.Sequential(nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(observation)), self.critic(observation).squeeze(-1)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the other cores step the environments
    shuffler = np.random.default_rng(args.seed)
    envs = make_envs(args.vector, [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))] * args.num_envs)
    model = ActorCritic(int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    T, B = args.num_steps, args.num_envs
    observations = torch.zeros(T, B, *envs.single_observation_space.shape)
    actions, log_probs, values, final_values, rewards = (torch.zeros(T, B) for _ in range(5))
    terminations, truncations = (torch.zeros(T, B, dtype=torch.bool) for _ in range(2))
    observation, _ = envs.reset(seed=args.seed)
    episode_returns: list[float] = []
    began = time.perf_counter()

    for iteration in range(1, args.total_steps // (T * B) + 1):
        for t in range(T):
            observations[t] = torch.as_tensor(observation)
            with torch.no_grad():
                policy, values[t] = model(observations[t])
                action = policy.sample()
                actions[t], log_probs[t] = action, policy.log_prob(action)
            observation, reward, terminated, truncated, infos = envs.step(action.numpy())
            rewards[t] = torch.as_tensor(reward)
            terminations[t], truncations[t] = torch.as_tensor(terminated), torch.as_tensor(truncated)
            if "final_info" in infos:  # an episode has ended: RecordEpisodeStatistics reports its return
                final = infos["final_info"]
                episode_returns += final["episode"]["r"][final["_episode"]].tolist()
                # Where the episode was truncated, the value of its last observation stands for the rest.
                for i in np.flatnonzero(truncated & ~terminated):
                    with torch.no_grad():
                        final_values[t, i] = model(torch.as_tensor(infos["final_obs"][i]))[1]

        with torch.no_grad():
            next_value = model(torch.as_tensor(observation))[1]
        steps = Steps(rewards, values, terminations, truncations, next_value, final_values)
        advantages, targets = gae(steps, 0.99, 0.95)
        columns = [x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, targets)]
        for _ in range(4):
            for index in np.array_split(shuffler.permutation(T * B), 4):
                rows, action, old_log_prob, advantage, target = (x[index] for x in columns)
                policy, value = model(rows)
                ratio = (policy.log_prob(action) - old_log_prob).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                value_loss = (value - target).square().mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        if iteration % 10 == 0 or iteration == args.total_steps // (T * B):
            rate = iteration * T * B / (time.perf_counter() - began)
            print(f"{iteration * T * B:>8} steps  return {np.mean(episode_returns[-50:]):6.1f}  {rate:,.0f} steps/s")

    total = sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())
    print(f"sum of the parameters' magnitudes: {total:.12f}")
    envs.close()


if __name__ == "__main__":
    main()
