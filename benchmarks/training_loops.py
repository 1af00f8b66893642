"""Whole trainings with PPO: CleanRL's loop, Stable-Baselines3, and penstock. `training.py` runs each in a process.

CleanRL's loop is written again here after `cleanrl/ppo.py`, `ppo_continuous_action.py` and `ppo_atari.py` of
https://github.com/vwxyzjn/cleanrl, commit fe8d8a0: these files need Gymnasium 0.29. With CartPole-v1, seed 1 and
20,480 steps it has the returns of `ppo.py`, episode by episode. The hyper-parameters of all loops are theirs. No loop
writes to TensorBoard, which CleanRL's files do.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from clocks import cpu_clocks, processes
from gymnasium import spaces, wrappers
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

DISCOUNT, GAE_LAMBDA, VALUE_WEIGHT, MAX_GRAD_NORM, ADAM_EPS = 0.99, 0.95, 0.5, 0.5, 1e-5


@dataclass(frozen=True)
class Task:
    """An environment, and CleanRL's hyper-parameters for it."""

    make_env: Callable[[], gym.Env[Any, Any]]
    batch_B: int
    batch_T: int
    minibatches: int
    epochs: int
    learning_rate: float
    clip: float
    entropy_weight: float
    threads: int  # of torch, for SB3 and penstock; 0: as many as torch takes itself, as in CleanRL's files

    @property
    def batch_steps(self) -> int:
        return self.batch_B * self.batch_T


@dataclass
class Outcome:
    """What a loop found."""

    learning: float = 0.0  # seconds between the sampling of one batch and of the next
    learning_cpu: float = 0.0  # CPU seconds of this process meanwhile
    start: float = 0.0  # `time.monotonic()` at the first step; `main` subtracts the beginning
    returns: list[float] = field(default_factory=list)  # of all episodes, in their order
    cpu: float = 0.0  # CPU seconds of all its processes, before it ends them; `main` subtracts those before


def cartpole() -> gym.Env[Any, Any]:
    return wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


def halfcheetah() -> gym.Env[Any, Any]:
    env: Any = wrappers.RecordEpisodeStatistics(gym.make("HalfCheetah-v5"))
    env = wrappers.NormalizeObservation(env)
    env = wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = wrappers.NormalizeReward(env, gamma=DISCOUNT)
    return wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def pong() -> gym.Env[Any, Any]:
    """Gymnasium's wrappers do what CleanRL's do: no-ops at the start, 4 frames a step, 84 x 84 in grey, the sign of the
    reward, stacks of 4. Pong has no lives, and starts without FIRE."""
    import ale_py

    gym.register_envs(ale_py)
    env: Any = gym.make("PongNoFrameskip-v4")
    env = wrappers.AtariPreprocessing(wrappers.RecordEpisodeStatistics(env))
    return wrappers.FrameStackObservation(wrappers.TransformReward(env, np.sign), 4)


TASKS = {
    "cartpole": Task(cartpole, 4, 128, 4, 4, 2.5e-4, 0.2, 0.01, threads=1),
    "halfcheetah": Task(halfcheetah, 1, 2048, 32, 10, 3e-4, 0.2, 0.0, threads=1),
    "pong": Task(pong, 8, 128, 4, 4, 2.5e-4, 0.1, 0.01, threads=0),
}


def cpu_seconds() -> float:
    """Of this process and all that it has started, so far."""
    return sum(cpu_clocks(processes()).values())


@contextmanager
def learning(outcome: Outcome) -> Iterator[None]:
    began, cpu = time.monotonic(), time.process_time()
    yield
    outcome.learning += time.monotonic() - began
    outcome.learning_cpu += time.process_time() - cpu


def use_threads(n: int) -> None:
    if n:
        torch.set_num_threads(n)


def initialized(layer: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Network(nn.Module):
    """CleanRL's: two MLPs of 64-64, or for images the Nature-CNN. Returns logits or means, and values."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        is_box = isinstance(action_space, spaces.Box)
        n_actions = action_space.shape[0] if is_box else int(action_space.n)
        self.has_images = len(observation_space.shape) == 3
        if self.has_images:
            convolutions = (nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1))
            layers = [part for layer in convolutions for part in (initialized(layer), nn.ReLU())]
            self.body = nn.Sequential(*layers, nn.Flatten(), initialized(nn.Linear(64 * 7 * 7, 512)), nn.ReLU())
            self.actor, self.critic = initialized(nn.Linear(512, n_actions), 0.01), initialized(nn.Linear(512, 1), 1.0)
        else:
            n_inputs = observation_space.shape[0]
            self.critic, self.actor = self._mlp(n_inputs, 1, 1.0), self._mlp(n_inputs, n_actions, 0.01)
        if is_box:
            self.log_std = nn.Parameter(torch.zeros(n_actions))

    @staticmethod
    def _mlp(n_inputs: int, n_outputs: int, gain: float) -> nn.Sequential:
        first, second = initialized(nn.Linear(n_inputs, 64)), initialized(nn.Linear(64, 64))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), initialized(nn.Linear(64, n_outputs), gain))

    def forward(self, observation: Any) -> tuple[Any, Any]:
        x = self.body(observation.float() / 255) if self.has_images else observation
        return self.actor(x), self.critic(x).squeeze(-1)


def clipped_loss(
    task: Task, now: tuple[Tensor, Tensor, Tensor], then: tuple[Tensor, ...], clip_shares: list[float]
) -> Tensor:
    """PPO's loss as CleanRL computes it, with its diagnostics. `now`: log_prob, entropy and value. `then`: log_prob,
    value, advantage, return, and weights if the advantages have some."""
    log_prob, entropy, value = now
    old_log_prob, old_value, advantage, target, *weights = then
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    with torch.no_grad():
        # CleanRL computes these estimates of the KL divergence for its log.
        (-log_ratio).mean(), ((ratio - 1) - log_ratio).mean()
        clip_shares.append(((ratio - 1.0).abs() > task.clip).float().mean().item())
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for weight in weights:
        advantage = advantage * weight
    clipped_ratio = torch.clamp(ratio, 1 - task.clip, 1 + task.clip)
    policy_loss = torch.max(-advantage * ratio, -advantage * clipped_ratio).mean()
    clipped_value = old_value + torch.clamp(value - old_value, -task.clip, task.clip)
    value_loss = 0.5 * torch.max((value - target) ** 2, (clipped_value - target) ** 2).mean()
    return policy_loss - task.entropy_weight * entropy.mean() + VALUE_WEIGHT * value_loss


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_GRAD_NORM)
    optimizer.step()


# ---- CleanRL -----------------------------------------------------------------------------------------


def choose(network: Network, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Its `get_action_and_value`."""
    outputs, value = network(x)
    if hasattr(network, "log_std"):
        normal = Normal(outputs, torch.exp(network.log_std.expand_as(outputs)))
        action = normal.sample() if action is None else action
        return action, normal.log_prob(action).sum(1), normal.entropy().sum(1), value
    categorical = Categorical(logits=outputs)
    action = categorical.sample() if action is None else action
    return action, categorical.log_prob(action), categorical.entropy(), value


def with_clipped_actions(make_env: Callable[[], gym.Env[Any, Any]]) -> gym.Env[Any, Any]:
    """As CleanRL's environments of continuous actions. The agents of penstock and SB3 clip actions themselves."""
    env = make_env()
    return wrappers.ClipAction(env) if isinstance(env.action_space, spaces.Box) else env


def cleanrl_update(
    task: Task, network: Network, optimizer: torch.optim.Optimizer, storage: tuple[Tensor, ...], after: tuple[Any, Any]
) -> None:
    """Advantages, then the epochs."""
    obs, actions, logprobs, rewards, dones, values = storage
    next_obs, next_done = after
    with torch.no_grad():
        next_value = network(next_obs)[1].reshape(1, -1)
        advantages, last = torch.zeros_like(rewards), 0
        for t in reversed(range(task.batch_T)):
            is_last = t == task.batch_T - 1
            continues = 1.0 - (next_done if is_last else dones[t + 1])
            delta = rewards[t] + DISCOUNT * (next_value if is_last else values[t + 1]) * continues - values[t]
            advantages[t] = last = delta + DISCOUNT * GAE_LAMBDA * continues * last
        returns = advantages + values
    b_obs, b_actions = obs.flatten(0, 1), actions.flatten(0, 1)
    b_logprobs, b_values = logprobs.reshape(-1), values.reshape(-1)
    b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
    b_inds, size = np.arange(task.batch_steps), task.batch_steps // task.minibatches
    clip_shares: list[float] = []
    for _ in range(task.epochs):
        np.random.shuffle(b_inds)
        for start in range(0, task.batch_steps, size):
            mb = b_inds[start : start + size]
            chosen = b_actions[mb] if hasattr(network, "log_std") else b_actions.long()[mb]
            _, *now = choose(network, b_obs[mb], chosen)
            then = (b_logprobs[mb], b_values[mb], b_advantages[mb], b_returns[mb])
            descend(clipped_loss(task, tuple(now), then, clip_shares), optimizer)


def train_cleanrl(task: Task, seed: int, steps: int, threads: int = 0) -> Outcome:
    use_threads(threads)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    make = partial(with_clipped_actions, task.make_env)
    envs = gym.vector.SyncVectorEnv([make] * task.batch_B, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    space, network = envs.single_observation_space, Network(envs.single_observation_space, envs.single_action_space)
    optimizer = torch.optim.Adam(network.parameters(), lr=task.learning_rate, eps=ADAM_EPS)
    T, B = task.batch_T, task.batch_B
    obs, actions = torch.zeros((T, B, *space.shape)), torch.zeros((T, B, *envs.single_action_space.shape))
    logprobs, rewards, dones, values = (torch.zeros((T, B)) for _ in range(4))
    outcome = Outcome(start=time.monotonic())
    next_obs, next_done = torch.Tensor(envs.reset(seed=seed)[0]), torch.zeros(B)
    for itr in range(n := steps // task.batch_steps):
        optimizer.param_groups[0]["lr"] = task.learning_rate * (1 - itr / n)
        for t in range(T):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = choose(network, next_obs)
                values[t] = value.flatten()
            actions[t], logprobs[t] = action, logprob
            new_obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
            rewards[t] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(new_obs), torch.Tensor(np.logical_or(terminated, truncated))
            if "final_info" in infos:
                ended = infos["final_info"]
                outcome.returns += ended["episode"]["r"][ended["_episode"]].tolist()
        with learning(outcome):
            storage = obs, actions, logprobs, rewards, dones, values
            cleanrl_update(task, network, optimizer, storage, (next_obs, next_done))
    outcome.cpu = cpu_seconds()
    envs.close()
    return outcome


# ---- Stable-Baselines3 -------------------------------------------------------------------------------


def train_sb3(task: Task, seed: int, steps: int) -> Outcome:
    """Its own PPO. It clips values without the maximum of the two losses, and adds the value after a time limit."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Clock(BaseCallback):
        """Learning is what is between two samplings."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps:
                self._learning.__exit__(None, None, None)

        def _on_rollout_end(self) -> None:
            self._learning = learning(outcome)
            self._learning.__enter__()

        def _on_step(self) -> bool:
            outcome.returns.extend(float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info)
            return True

    use_threads(task.threads)
    outcome, clock = Outcome(), Clock()
    envs = DummyVecEnv([task.make_env] * task.batch_B)
    has_images = len(envs.observation_space.shape) == 3
    model = PPO(
        "CnnPolicy" if has_images else "MlpPolicy",
        envs,
        learning_rate=lambda left: left * task.learning_rate,
        n_steps=task.batch_T,
        batch_size=task.batch_steps // task.minibatches,
        n_epochs=task.epochs,
        gamma=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
        clip_range=task.clip,
        clip_range_vf=task.clip,
        ent_coef=task.entropy_weight,
        vf_coef=VALUE_WEIGHT / 2,  # its loss has no factor of 0.5
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
        device="cpu",
    )
    outcome.start = time.monotonic()
    model.learn(steps // task.batch_steps * task.batch_steps, callback=clock)
    clock._learning.__exit__(None, None, None)
    outcome.cpu = cpu_seconds()
    envs.close()
    return outcome


# ---- penstock ----------------------------------------------------------------------------------------


def penstock_update(
    task: Task, agent: Any, optimizer: torch.optim.Optimizer, samples: Any, is_late: bool = False
) -> None:
    """Advantages, then the epochs. `is_late`: an older policy acted. Then the clip limits the change from the present
    policy, and weights of at most 2 correct for the older one, as in examples/async_ppo.py (Hilton et al., 2021)."""
    from penstock.learning import Steps, gae

    info, steps, weights = samples.agent.agent_info, samples, {}
    old = {"log_prob": info.log_prob, "value": info.value}
    if is_late:
        with torch.no_grad():
            now, after = agent.evaluate(samples), agent.model(samples.env.bootstrap_obs)[1]
            old = {"log_prob": now.log_prob, "value": now.value}
        weights["weight"] = (now.log_prob - info.log_prob).exp().clamp(max=2.0)
        steps = Steps.of(samples, value=now.value, bootstrap_value=after)
    advantage, target = gae(steps, DISCOUNT, GAE_LAMBDA)
    used = samples.select("env.observation", "agent.action", "agent.agent_info")
    used = used.with_targets(**old, advantage=advantage, target=target, **weights)
    clip_shares: list[float] = []
    for _ in range(task.epochs):
        for part in used.minibatches(task.minibatches):
            now = agent.evaluate(part)
            loss = clipped_loss(task, (now.log_prob, now.entropy, now.value), tuple(part.targets), clip_shares)
            descend(loss, optimizer)


def new_agent(task: Task, inference: str) -> Any:
    """penstock's agent for this task. With images it acts with torch, whatever `inference` says."""
    from penstock import CategoricalPgAgent, GaussianPgAgent

    env = task.make_env()
    is_box, has_images = isinstance(env.action_space, spaces.Box), len(env.observation_space.shape) == 3
    env.close()
    return (GaussianPgAgent if is_box else CategoricalPgAgent)(Network, inference="torch" if has_images else inference)


def train_penstock(
    task: Task,
    seed: int,
    steps: int,
    *,
    lag: int = 0,
    inference: str = "numpy",
    threads: int | None = None,
    pinned: bool = False,
) -> Outcome:
    """`lag=1`: with `AsyncSampler` and one worker. `pinned`: it has the last CPU, and the learner the others."""
    from penstock import AsyncSampler, ParallelSampler, TrajInfo
    from penstock.workers.affinity import usable_cpus

    class Unscaled(TrajInfo):
        """With the return before wrappers change the rewards."""

        def traj_done(self, terminated: bool, truncated: bool, env_info: dict[str, Any]) -> bool:
            self.Return = float(env_info["episode"]["r"])
            return True

    use_threads(task.threads if threads is None else threads)
    torch.manual_seed(seed)
    np.random.seed(seed)
    agent = new_agent(task, inference)
    common: dict[str, Any] = {"batch_T": task.batch_T, "batch_B": task.batch_B, "record_final_obs": False}
    cpus = usable_cpus() or range(os.cpu_count() or 1)
    if task.make_env is cartpole:
        common["env_fn"] = partial(gym.make, "CartPole-v1")
    else:
        common["env_fn"], common["traj_info_cls"] = task.make_env, Unscaled
    if lag:
        sampler: Any = AsyncSampler(**common, n_workers=1, lag=1, n_slots=2)
    else:
        sampler = ParallelSampler(**common, n_workers=min(task.batch_B, len(cpus)))
    outcome = Outcome()
    with sampler:
        sampler.initialize(agent, seed=seed, bootstrap_value=True, affinity=[cpus[-1]] if pinned else None)
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=task.learning_rate, eps=ADAM_EPS, fused=True)
        outcome.start = time.monotonic()
        if lag:
            sampler.start()
            if pinned:  # after the sampler has started: it refuses CPUs that this process may not use
                os.sched_setaffinity(0, cpus[:-1])
        for itr in range(n := steps // task.batch_steps):
            samples, traj_infos = sampler.obtain_samples(itr)
            with learning(outcome):
                optimizer.param_groups[0]["lr"] = task.learning_rate * (1 - itr / n)
                penstock_update(task, agent, optimizer, samples, is_late=bool(lag and itr))
                agent.sync_shared_memory()
            outcome.returns += [info.Return for info in traj_infos]
        outcome.cpu = cpu_seconds()
    return outcome


def updates_by_name(env: str) -> dict[str, Callable[[], None]]:
    """Whole updates on one recorded batch, by name: CleanRL's and penstock's, each with Adam as it is and fused."""
    from penstock import SerialSampler

    task = TASKS[env]
    agent = new_agent(task, "numpy")
    with SerialSampler(task.make_env, batch_T=task.batch_T, batch_B=task.batch_B) as sampler:
        sampler.initialize(agent, seed=0, bootstrap_value=True)
        samples = sampler.obtain_samples(0)[0].copy()
    storage, after = as_storage(samples)
    updates: dict[str, Callable[[], None]] = {}
    for fused in (False, True):
        optimizer = torch.optim.Adam(agent.model.parameters(), lr=1e-6, eps=ADAM_EPS, fused=fused)
        name = ", fused Adam" if fused else ""
        updates[f"CleanRL's{name}"] = partial(cleanrl_update, task, agent.model, optimizer, storage, after)
        updates[f"penstock's{name}"] = partial(penstock_update, task, agent, optimizer, samples)
    return updates


def as_storage(samples: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """A batch as CleanRL's loop keeps it, and what it knows after the last step."""
    env, info = samples.env, samples.agent.agent_info
    action = info.raw_action if "raw_action" in info else samples.agent.action.float()
    arrays = env.observation.float(), action, info.log_prob, env.reward, env.prev_done.float(), info.value
    return arrays, (env.bootstrap_obs.float(), env.done[-1].float())


# ---- the program of one process ----------------------------------------------------------------------

#: By name: a loop, and its options.
ARMS: dict[str, tuple[Callable[..., Outcome], dict[str, Any]]] = {
    "cleanrl": (train_cleanrl, {}),
    "cleanrl, 1 thread": (train_cleanrl, {"threads": 1}),
    "sb3": (train_sb3, {}),
    "penstock": (train_penstock, {}),
    "penstock, lag=1": (train_penstock, {"lag": 1}),
    # Variants, to measure one choice: each differs in it from one of the two above.
    "acting with torch": (train_penstock, {"inference": "torch"}),
    "2 threads": (train_penstock, {"threads": 2}),
    "lag=1, pinned": (train_penstock, {"lag": 1, "pinned": True}),
}


def main() -> None:
    """Arguments: environment, arm, seed, steps. Prints the outcome as a line of JSON."""
    env, arm, seed, steps = sys.argv[1:]
    train, options = ARMS[arm]
    began, before = time.monotonic(), cpu_seconds()
    outcome = asdict(train(TASKS[env], int(seed), int(steps), **options))
    outcome["cpu"], outcome["start"] = outcome["cpu"] - before, outcome["start"] - began
    print(json.dumps({**outcome, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
