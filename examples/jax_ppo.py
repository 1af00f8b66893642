"""PPO in JAX on CartPole-v1, in one file. Change what you like.

    python examples/jax_ppo.py

Needs the extra `jax`. The learner computes gradients with JAX, and compiles each update. Workers call the same network
with numpy: for a network this small that is as fast, and they need not import JAX. Stops when an evaluation reaches
the goal. Exits with status 1 if this takes too long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from penstock import FunctionAgent, ParallelSampler, Samples
from penstock.learning import Steps, gae

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise SystemExit(f"this example needs JAX: pip install '.[jax]' ({error})") from error

Parameters = dict[str, Any]  # arrays by name, of JAX in the learner and of numpy in the workers


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


def new_parameters(seed: int, n_inputs: int, hidden: int, n_actions: int) -> Parameters:
    shapes = {
        "policy": ((n_inputs, hidden), 1.0),
        "policy.out": ((hidden, n_actions), 0.01),  # small, so that all actions are about equally likely at first
        "value": ((n_inputs, hidden), 1.0),
        "value.out": ((hidden, 1), 0.1),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    weights = {
        name: gain * jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, (shape, gain)) in zip(keys, shapes.items(), strict=True)
    }
    return weights | {f"{name}.bias": jnp.zeros(weight.shape[1]) for name, weight in weights.items()}


# ---- the network, for numpy and for JAX: `xp` is one of both ---------------------------------------


def mlp(xp: Any, p: Parameters, name: str, inputs: Any) -> Any:
    hidden = xp.tanh(inputs @ p[name] + p[f"{name}.bias"])
    return hidden @ p[f"{name}.out"] + p[f"{name}.out.bias"]


def log_softmax(xp: Any, logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


def policy(p: Parameters, observation: Any, rngs: Sequence[np.random.Generator]) -> tuple[Any, dict[str, Any]]:
    """What the workers run: an action for each environment, its log-probability, and the value."""
    log_probs = log_softmax(np, mlp(np, p, "policy", observation))
    uniform = np.array([rng.random() for rng in rngs])  # one generator per environment
    drawn = (np.exp(log_probs).cumsum(axis=1) < uniform[:, None]).sum(axis=1)
    action = np.minimum(drawn, log_probs.shape[1] - 1)
    value = mlp(np, p, "value", observation)[:, 0]
    return action, {"log_prob": log_probs[np.arange(len(action)), action], "value": value}


# ---- the learner ------------------------------------------------------------------------------------


def loss(p: Parameters, part: dict[str, Any], clip: float) -> Any:
    """PPO's clipped objective, and half the squared error of the values."""
    log_probs = log_softmax(jnp, mlp(jnp, p, "policy", part["observation"]))
    log_prob = jnp.take_along_axis(log_probs, part["action"][:, None], axis=1)[:, 0]
    ratio = jnp.exp(log_prob - part["old_log_prob"])
    advantage = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
    objective = jnp.minimum(ratio * advantage, ratio.clip(1 - clip, 1 + clip) * advantage).mean()
    value = mlp(jnp, p, "value", part["observation"])[:, 0]
    return 0.5 * jnp.square(value - part["target"]).mean() - objective


@partial(jax.jit, static_argnames="cfg")
def update(p: Parameters, state: Any, part: dict[str, Any], cfg: Config) -> tuple[Parameters, Any]:
    """One step of Adam (Kingma and Ba, 2015), compiled. `state`: the number of steps, and the two moving averages."""
    n, mean, square = state
    gradient = jax.grad(loss)(p, part, cfg.clip)
    n += 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, gradient)

    def moved(x: Any, m: Any, s: Any) -> Any:
        return x - cfg.learning_rate * m / (1 - 0.9**n) / (jnp.sqrt(s / (1 - 0.999**n)) + 1e-8)

    return jax.tree.map(moved, p, mean, square), (n, mean, square)


def train(p: Parameters, state: Any, samples: Samples, rng: np.random.Generator, cfg: Config) -> tuple[Parameters, Any]:
    # The agent has no value function for the sampler to call, so compute the values after the last steps here.
    env, weights = samples.env, jax.device_get(p)
    last, final = (mlp(np, weights, "value", x)[..., 0] for x in (env.bootstrap_obs, env.final_obs))
    advantage, target = gae(Steps.of(samples, bootstrap_value=last, final_value=final), cfg.discount, cfg.gae_lambda)
    samples = samples.with_targets(advantage=advantage, value=target)
    for _ in range(cfg.epochs):
        for part in samples.minibatches(cfg.minibatches, rng):
            columns = {
                "observation": part.env.observation,
                "action": part.agent.action,
                "old_log_prob": part.agent.agent_info.log_prob,
                "advantage": part.targets.advantage,
                "target": part.targets.value,
            }
            p, state = update(p, state, columns, cfg)
    return p, state


def main(cfg: Config) -> dict[str, Any]:
    """Train until the goal or a limit is reached."""
    began, rng = time.monotonic(), np.random.default_rng(cfg.seed)
    parameters = new_parameters(cfg.seed, 4, cfg.hidden, 2)  # CartPole: 4 numbers, 2 actions
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state: Any = (0, zeros, zeros)
    agent = FunctionAgent(policy, parameters=parameters)
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
            agent.parameters, state = train(agent.parameters, state, sampler.samples_np, rng, cfg)
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
