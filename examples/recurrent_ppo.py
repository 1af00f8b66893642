"""Recurrent PPO in one file, and the same PPO without memory, on a T-maze that needs memory.

    python examples/recurrent_ppo.py --out runs/recurrent

The first observation contains a sign, which says where to turn at the end of a corridor. Later observations do not
contain it. A policy without memory can only guess: its mean return is at most 0.5. Both policies train for the same
number of steps. recurrent.png shows both learning curves, and results.json contains the numbers. Exits with status 1 if
the recurrent policy misses the goal.

Measured with seeds 0 to 9: the recurrent policy reached the goal after 29k to 41k steps and ended at 0.99 or 1.00. No
evaluation of the feed-forward policy was above 0.58. The script took 26 to 95 s (median 43 s) on two cores that were
also busy with other work.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import CategoricalPgAgent, ParallelSampler, Samples
from penstock.agents import PgAgent, RecurrentCategoricalPgAgent
from penstock.learning import gae

try:
    import matplotlib
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise SystemExit(f"this example needs matplotlib and rich: pip install matplotlib rich ({error})") from error
matplotlib.use("Agg")  # before the import of pyplot, for machines without a screen
from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 64`."""

    out: str = "runs/recurrent"  # folder for recurrent.png and results.json
    length: int = 8  # steps from the sign to the junction
    seed: int = 0
    goal: float = 0.95  # mean return of an evaluation that counts as solved
    steps: int = 60_000  # environment steps of each policy, rounded up to whole batches
    n_workers: int = 0  # 0: one per CPU
    batch_T: int = 64  # several times the corridor's length: gradients do not go back beyond a batch
    batch_B: int = 32
    eval_every: int = 2  # iterations
    eval_n_envs: int = 16
    eval_episodes: int = 192
    hidden: int = 32
    learning_rate: float = 3e-3  # at the start; falls linearly to zero at the last step
    discount: float = 0.97
    gae_lambda: float = 0.95
    epochs: int = 4  # passes over each batch
    minibatches: int = 4  # each of whole columns
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5


def parse_config() -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args()))


BEST_WITHOUT_MEMORY = 0.5  # at the junction the sign is not visible


class TMaze(gym.Env[Any, Any]):
    """A corridor of `length` steps that ends in a junction. Actions: forward, turn left, turn right.

    The observation is (sign, in the corridor, at the junction). The sign, -1 for left and 1 for right, is zero after
    the first observation. A turn in the corridor has no effect. A turn at the junction ends the episode, with reward 1
    if it is the correct one. After `time_limit` steps the episode is truncated.
    """

    def __init__(self, length: int, time_limit: int) -> None:
        self.observation_space = Box(-1, 1, (3,), np.float32)
        self.action_space = Discrete(3)
        self.length, self.time_limit = length, time_limit

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.sign = int(self.np_random.integers(2)) * 2 - 1
        self.position = self.time = 0
        return np.array([self.sign, 1, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        at_junction = self.position == self.length
        turned = at_junction and action != 0
        right = turned and (action == 2) == (self.sign == 1)
        self.position += not at_junction and action == 0
        at_junction = self.position == self.length
        observation = np.array([0, not at_junction, at_junction], np.float32)
        return observation, float(right), turned, self.time >= self.time_limit, {}


# ---- policies ------------------------------------------------------------------------------------


def linear(n_in: int, n_out: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """An encoder, a core with or without memory, and two heads."""

    def __init__(self, core: nn.Module, hidden: int, observation_space: Box, action_space: Discrete) -> None:
        super().__init__()
        self.encoder = nn.Sequential(linear(observation_space.shape[0], hidden), nn.Tanh())
        self.core = core
        self.policy = linear(hidden, int(action_space.n), gain=0.01)  # small, so that actions are equally likely
        self.critic = linear(hidden, 1, gain=1.0)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(features), self.critic(features).squeeze(-1)


class FeedForward(ActorCritic):
    """Acts on the current observation only."""

    def __init__(self, hidden: int, observation_space: Box, action_space: Discrete) -> None:
        core = nn.Sequential(linear(hidden, hidden), nn.Tanh())
        super().__init__(core, hidden, observation_space, action_space)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.core(self.encoder(observation)))


class Recurrent(ActorCritic):
    """The same network with a GRU as its core. It does not use the previous action and reward."""

    def __init__(self, hidden: int, observation_space: Box, action_space: Discrete) -> None:
        core = nn.GRUCell(hidden, hidden)
        nn.init.orthogonal_(core.weight_hh)
        # The update gate is almost closed at first, so that the state changes slowly and keeps the sign.
        nn.init.zeros_(core.bias_hh)
        nn.init.zeros_(core.bias_ih)
        nn.init.constant_(core.bias_ih.data[hidden : 2 * hidden], 2.0)
        super().__init__(core, hidden, observation_space, action_space)
        self.state_shape = (hidden,)  # the agent starts each episode with zeros of this shape

    def forward(
        self, observation: Tensor, prev_action: Tensor, prev_reward: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = self.core(self.encoder(observation), state)
        return *self.heads(state), state


# ---- PPO -----------------------------------------------------------------------------------------


def train(agent: PgAgent, optimizer: torch.optim.Optimizer, samples: Samples, cfg: Config) -> None:
    """Several epochs of minibatches with PPO's clipped objective. A minibatch is a few whole columns."""
    advantage, target = gae(samples, cfg.discount, cfg.gae_lambda)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in samples.minibatches(cfg.minibatches, length=cfg.batch_T):
            now, old_log_prob = agent.evaluate(part), part.agent.agent_info.log_prob
            advantage, ratio = part.targets.advantage, (now.log_prob - old_log_prob).exp()
            clipped_ratio = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            policy_loss = -torch.min(ratio * advantage, clipped_ratio * advantage).mean()
            value_loss = mse_loss(now.value, part.targets.value)
            loss = policy_loss + cfg.value_weight * value_loss - cfg.entropy_weight * now.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.model.parameters(), cfg.max_grad_norm)
            optimizer.step()


def learn(memory: bool, cfg: Config, bar: Progress) -> dict[str, Any]:
    """Train one policy. Returns its learning curve."""
    torch.manual_seed(cfg.seed)  # for the order of minibatches; everything else depends on the sampler's seed
    cls = Recurrent if memory else FeedForward
    time_limit = 6 * cfg.length  # about twice the steps of a random policy

    def make_model(observation_space: Box, action_space: Discrete) -> FeedForward | Recurrent:
        return cls(cfg.hidden, observation_space, action_space)

    # "batch": only the state before each batch is recorded; `evaluate` computes the others.
    agent = RecurrentCategoricalPgAgent(make_model, record_state="batch") if memory else CategoricalPgAgent(make_model)
    sampler = ParallelSampler(
        partial(TMaze, cfg.length, time_limit),
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers or None,
        eval_n_envs=cfg.eval_n_envs,
        eval_episodes=cfg.eval_episodes,  # whole episodes, the same number in each environment
        eval_max_steps=(cfg.eval_episodes + cfg.eval_n_envs) * time_limit,
    )
    began = time.monotonic()
    curve: dict[str, list[float]] = {"steps": [], "seconds": [], "eval_return_mean": []}
    row = bar.add_task(cls.__name__, total=cfg.steps, eval=float("nan"), rate=0.0)
    n_itrs = math.ceil(cfg.steps / (cfg.batch_T * cfg.batch_B))
    with sampler:
        sampler.initialize(agent, seed=cfg.seed, bootstrap_value=True)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=cfg.learning_rate, eps=1e-5)
        for itr in range(n_itrs + 1):  # the last iteration only evaluates
            steps, seconds = itr * cfg.batch_T * cfg.batch_B, time.monotonic() - began
            if itr % cfg.eval_every == 0 or itr == n_itrs:
                returns = [info.Return for info in sampler.evaluate_agent(itr)]
                for name, value in zip(curve, (steps, seconds, sum(returns) / len(returns)), strict=True):
                    curve[name].append(value)
            bar.update(row, completed=steps, eval=curve["eval_return_mean"][-1], rate=steps / seconds)
            if itr < n_itrs:
                samples, _ = sampler.obtain_samples(itr)
                optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - itr / n_itrs)
                train(agent, optimizer, samples, cfg)
                agent.sync_shared_memory()  # the workers use the new parameters from the next batch on
    return curve


# ---- the comparison ------------------------------------------------------------------------------


def draw(curves: dict[str, dict[str, list[float]]], cfg: Config) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    for (name, curve), colour in zip(curves.items(), ("#0072B2", "#D55E00"), strict=True):
        axes.plot(curve["steps"], curve["eval_return_mean"], color=colour, marker="o", markersize=3, label=name)
    axes.axhline(BEST_WITHOUT_MEMORY, color="#555555", linestyle="--", linewidth=1, label="best without memory")
    axes.set(xlabel="environment steps", ylabel="mean return of an evaluation", xlim=(0, None), ylim=(0, 1.05))
    axes.set_title(f"PPO in a T-maze of {cfg.length} steps, seed {cfg.seed}", loc="left")
    axes.grid(color="#E5E5E5")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(Path(cfg.out) / "recurrent.png")
    plt.close(figure)


def main(cfg: Config) -> dict[str, Any]:
    """Train both policies. Returns what it writes to results.json."""
    torch.set_num_threads(1)  # a second thread does not help with networks this small
    Path(cfg.out).mkdir(parents=True, exist_ok=True)
    numbers = "eval {task.fields[eval]:.2f}  {task.fields[rate]:,.0f} steps/s"
    bar = Progress("{task.description:>11}", BarColumn(24), TextColumn(numbers), TimeElapsedColumn())
    with bar:
        curves = {"recurrent": learn(True, cfg, bar), "feed-forward": learn(False, cfg, bar)}
    draw(curves, cfg)
    curve = curves["recurrent"]
    solved = [i for i, mean in enumerate(curve["eval_return_mean"]) if mean >= cfg.goal]
    results: dict[str, Any] = {
        "config": asdict(cfg),
        "goal_reached": curve["eval_return_mean"][-1] >= cfg.goal,
        "final": {name: curve["eval_return_mean"][-1] for name, curve in curves.items()},
        "seconds": {name: curve["seconds"][-1] for name, curve in curves.items()},
        "first_at_goal": {name: curve[name][solved[0]] for name in ("steps", "seconds")} if solved else None,
        "curves": curves,
    }
    (Path(cfg.out) / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    config = parse_config()
    result = main(config)
    line = ", ".join(f"{name} {final:.2f}" for name, final in result["final"].items())
    if not result["goal_reached"]:
        sys.exit(f"goal of {config.goal:g} missed: {line}")
    print(f"goal of {config.goal:g} reached: {line}")
