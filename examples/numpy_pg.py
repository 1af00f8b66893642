"""PPO in numpy on CartPole-v1: no torch in the policy, and gradients by hand.

    python examples/numpy_pg.py

jax_ppo.py is the same with gradients of JAX. Stops when an evaluation reaches the goal. Exits with status 1 if this
takes too long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from penstock import FunctionAgent, ParallelSampler, Samples
from penstock.learning import Steps, gae

Array = np.ndarray[Any, Any]
Parameters = dict[str, Array]


@dataclass(frozen=True)
class Config:
    """Each field is also an option of the command line: `--batch-T 64`."""

    seed: int = 0
    goal: float = 300.0  # mean return of an evaluation that counts as solved
    total_steps: int = 300_000  # limit of environment steps
    time_limit: float = 120.0  # seconds
    n_workers: int = 2
    batch_T: int = 64
    batch_B: int = 16
    hidden: int = 64
    learning_rate: float = 5e-3
    discount: float = 0.98
    gae_lambda: float = 0.95
    epochs: int = 4
    minibatches: int = 4
    clip: float = 0.2
    eval_every: int = 10  # iterations


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Config):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return Config(**vars(parser.parse_args(arguments)))


def new_parameters(rng: np.random.Generator, n_inputs: int, hidden: int, n_actions: int) -> Parameters:
    def layer(n_in: int, n_out: int, gain: float) -> Array:
        return (gain * rng.standard_normal((n_in, n_out)) / n_in**0.5).astype(np.float32)

    weights = {
        "policy.hidden": layer(n_inputs, hidden, 1.0),
        "policy.out": layer(hidden, n_actions, 0.01),
        "value.hidden": layer(n_inputs, hidden, 1.0),
        "value.out": layer(hidden, 1, 0.1),
    }
    biases = {f"{name}.bias": np.zeros(weight.shape[1], np.float32) for name, weight in weights.items()}
    return weights | biases


def network(p: Parameters, name: str, inputs: Array) -> tuple[Array, Array]:
    """The outputs of one of the two networks, and its hidden layer."""
    hidden = np.tanh(inputs @ p[f"{name}.hidden"] + p[f"{name}.hidden.bias"])
    return hidden @ p[f"{name}.out"] + p[f"{name}.out.bias"], hidden


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def policy(p: Parameters, observation: Array, rngs: Sequence[np.random.Generator]) -> tuple[Array, dict[str, Array]]:
    """What the workers run: an action for each environment, its log-probability, and the value."""
    log_probs = log_softmax(network(p, "policy", observation)[0])
    uniform = np.array([rng.random() for rng in rngs])  # one generator per environment
    drawn = (np.exp(log_probs).cumsum(axis=1) < uniform[:, None]).sum(axis=1)
    action = np.minimum(drawn, log_probs.shape[1] - 1)
    value = network(p, "value", observation)[0][:, 0]
    return action, {"log_prob": log_probs[np.arange(len(action)), action], "value": value}


def backward(p: Parameters, name: str, inputs: Array, hidden: Array, slope: Array) -> Parameters:
    """Gradients of one network from the slope of the loss with respect to its outputs."""
    inner = slope @ p[f"{name}.out"].T * (1 - hidden**2)
    return {
        f"{name}.out": hidden.T @ slope,
        f"{name}.out.bias": slope.sum(axis=0),
        f"{name}.hidden": inputs.T @ inner,
        f"{name}.hidden.bias": inner.sum(axis=0),
    }


def gradients(p: Parameters, part: Samples, cfg: Config) -> Parameters:
    """The gradient of PPO's clipped objective and of the squared error of the values."""
    n, observation, action = len(part.env.reward), part.env.observation, part.agent.action
    logits, hidden = network(p, "policy", observation)
    log_probs = log_softmax(logits)
    old_log_prob = part.agent.agent_info.log_prob
    ratio = np.exp(log_probs[np.arange(n), action] - old_log_prob)
    advantage = part.targets.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    # The clipped objective has no slope where the ratio has left the interval in the direction of the advantage.
    is_free = np.where(advantage > 0, ratio < 1 + cfg.clip, ratio > 1 - cfg.clip)
    slope = np.exp(log_probs) * (ratio * advantage * is_free)[:, None]
    slope[np.arange(n), action] -= ratio * advantage * is_free
    found = backward(p, "policy", observation, hidden, (slope / n).astype(np.float32))
    value, hidden = network(p, "value", observation)
    error = value - part.targets.value[:, None]
    return found | backward(p, "value", observation, hidden, (error / n).astype(np.float32))


class Adam:
    """The optimizer of Kingma and Ba (2015)."""

    def __init__(self, parameters: Parameters, learning_rate: float) -> None:
        self.learning_rate, self.n = learning_rate, 0
        self.mean, self.square = ({name: np.zeros_like(x) for name, x in parameters.items()} for _ in range(2))

    def step(self, parameters: Parameters, slopes: Parameters) -> Parameters:
        self.n += 1
        new = {}
        for name, slope in slopes.items():
            self.mean[name] += 0.1 * (slope - self.mean[name])
            self.square[name] += 0.001 * (slope**2 - self.square[name])
            mean, square = self.mean[name] / (1 - 0.9**self.n), self.square[name] / (1 - 0.999**self.n)
            new[name] = (parameters[name] - self.learning_rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
        return new


def train(agent: FunctionAgent, optimizer: Adam, samples: Samples, rng: np.random.Generator, cfg: Config) -> None:
    env = samples.env
    # The agent has no value function for the sampler to call, so compute the values after the last steps here.
    last, final = (network(agent.parameters, "value", x)[0][..., 0] for x in (env.bootstrap_obs, env.final_obs))
    advantage, target = gae(Steps.of(samples, bootstrap_value=last, final_value=final), cfg.discount, cfg.gae_lambda)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in samples.minibatches(cfg.minibatches, rng):
            agent.parameters = optimizer.step(agent.parameters, gradients(agent.parameters, part, cfg))


def main(cfg: Config) -> dict[str, Any]:
    """Train until the goal or a limit is reached."""
    began, rng = time.monotonic(), np.random.default_rng(cfg.seed)
    agent = FunctionAgent(policy, parameters=new_parameters(rng, 4, cfg.hidden, 2))  # CartPole: 4 numbers, 2 actions
    optimizer = Adam(agent.parameters, cfg.learning_rate)
    result: dict[str, Any] = {"goal_reached": False}
    with ParallelSampler(
        "CartPole-v1",
        batch_T=cfg.batch_T,
        batch_B=cfg.batch_B,
        n_workers=cfg.n_workers,
        eval_n_envs=8,
        eval_episodes=16,
    ) as sampler:
        sampler.initialize(agent, seed=cfg.seed)
        for itr in range(cfg.total_steps // (cfg.batch_T * cfg.batch_B)):
            sampler.obtain_samples(itr)
            train(agent, optimizer, sampler.samples_np, rng, cfg)
            agent.sync_shared_memory()
            steps, seconds = (itr + 1) * cfg.batch_T * cfg.batch_B, time.monotonic() - began
            result.update(steps=steps, seconds=seconds)
            if itr % cfg.eval_every == cfg.eval_every - 1:
                returns = [info.Return for info in sampler.evaluate_agent(itr)]
                result["eval_return_mean"] = sum(returns) / len(returns)
                print(f"{steps:,} steps, {seconds:.0f} s: {result['eval_return_mean']:.0f}", flush=True)
                result["goal_reached"] = result["eval_return_mean"] >= cfg.goal
            if result["goal_reached"] or seconds > cfg.time_limit:
                break
    return result


if __name__ == "__main__":
    config = parse_config()
    last = main(config)
    if not last["goal_reached"]:
        sys.exit(f"goal of {config.goal:g} missed: {last}")
