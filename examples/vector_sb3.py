"""Stable-Baselines3 on penstock's vector environment: only the line that creates `envs` is new.

python examples/vector_sb3.py --steps 50000
"""

from __future__ import annotations

import argparse

import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from penstock.vector import ShmVectorEnv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--num-envs", type=int, default=8)
    args = parser.parse_args()

    env_fns = [lambda: Monitor(gym.make("CartPole-v1"))] * args.num_envs
    envs = ShmVectorEnv(env_fns, n_workers=2, autoreset_mode="SAME_STEP").to_sb3()
    model = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, seed=0, device="cpu", verbose=1)
    model.learn(args.steps)
    mean, spread = evaluate_policy(model, envs, n_eval_episodes=16)
    print(f"return {mean:.1f} +- {spread:.1f} after {model.num_timesteps:,} steps")
    envs.close()


if __name__ == "__main__":
    main()
