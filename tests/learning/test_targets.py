"""Advantages and returns: equal to the formulas of the papers, written out, on random episodes with every kind of end.

`make cases` runs 100,000 episodes, and `PENSTOCK_EPISODES=...` any number.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from penstock import FunctionAgent, SerialSampler, WaitResetCollector
from penstock.agents import Agent, AgentStep
from penstock.envs import CountingEnv
from penstock.errors import ConfigError
from penstock.learning import Steps, gae, lambda_return, n_step_return, vtrace

from ..scale import scaled

N_EPISODES = int(os.environ.get("PENSTOCK_EPISODES", scaled(100_000, 1_500)))
ENDS = "terminated", "truncated", "both", "parked", "running"
T, B = 24, 16


@dataclass
class Episode:
    """The steps of one episode in one column, as lists, and the value of what came after them."""

    column: int
    start: int
    reward: list[float]
    value: list[float]
    log_ratio: list[float]
    discount: list[float]
    after: float

    def __len__(self) -> int:
        return len(self.reward)

    def next_value(self, t: int) -> float:
        return self.value[t + 1] if t + 1 < len(self) else self.after

    def delta(self, t: int) -> float:
        return self.reward[t] + self.discount[t] * self.next_value(t) - self.value[t]


Batch: TypeAlias = tuple[Steps[Any], Any, Any, list[Episode], Counter[str]]


def random_batch(rng: np.random.Generator, T: int, B: int) -> Batch:
    """A batch, its logarithms of ratios, its discounts, and its episodes. All that must not be used is NaN."""
    nan = np.full((T, B), np.nan)
    reward, value, final_value, log_ratio = nan.copy(), nan.copy(), nan.copy(), nan.copy()
    number = float(rng.choice([0.0, 0.5, 0.99, 1.0]))
    discount = np.full((T, B), number) if rng.random() < 0.5 else 0.9 ** rng.integers(1, 9, (T, B))
    terminated, truncated, valid = (np.zeros((T, B), bool) for _ in range(3))
    bootstrap_value = np.full(B, np.nan)
    episodes, ends = [], Counter[str]()
    for b in range(B):
        t = 0
        while t < T:
            # Episodes of one step are frequent, and so are columns of a single episode.
            length = min(int(rng.geometric(rng.choice([0.9, 0.3, 0.05]))), T - t)
            rows, last = slice(t, t + length), t + length - 1
            reward[rows, b], value[rows, b], log_ratio[rows, b] = rng.normal(size=(3, length))
            valid[rows, b] = True
            end = rng.choice(ENDS[:4], p=[0.35, 0.35, 0.2, 0.1])
            if last == T - 1 and rng.random() < 0.5:
                end = "running"
            after = 0.0
            if end == "running":
                after = bootstrap_value[b] = rng.normal()
            elif end == "terminated" or (end == "parked" and rng.random() < 0.5):
                terminated[last, b] = True
            elif end == "both":
                terminated[last, b] = truncated[last, b] = True
            else:
                truncated[last, b] = True
                after = final_value[last, b] = rng.normal()
            lists = (x[rows, b].tolist() for x in (reward, value, log_ratio, discount))
            episodes.append(Episode(b, t, *lists, float(after)))
            ends[str(end)] += 1
            t = T if end == "parked" else t + length
    steps = Steps(reward, value, terminated, truncated, bootstrap_value, final_value, valid)
    is_one = (discount == number).all()
    return steps, log_ratio, number if is_one else np.where(valid, discount, np.nan), episodes, ends


# ---- the formulas of the papers, one step at a time ------------------------------------------------
# Each row may have a discount of its own: where a paper has a power, there is a product.


def paper_n_step(e: Episode, t: int, n: int) -> float:
    """Sutton and Barto (2018), 7.1."""
    end = min(t + n, len(e))
    found = sum(prod(e.discount[t:i]) * e.reward[i] for i in range(t, end))
    return found + prod(e.discount[t:end]) * e.next_value(end - 1)


def paper_lambda_return(e: Episode, t: int, lam: float) -> float:
    """Sutton and Barto (2018), 12.3: the weighted average of all n-step returns."""
    most = len(e) - t
    found = sum((1 - lam) * lam ** (n - 1) * paper_n_step(e, t, n) for n in range(1, most))
    return found + lam ** (most - 1) * paper_n_step(e, t, most)


def paper_gae(e: Episode, t: int, lam: float) -> float:
    """Schulman et al. (2016), equation 16."""
    return sum(lam ** (i - t) * prod(e.discount[t:i]) * e.delta(i) for i in range(t, len(e)))


def paper_vtrace(e: Episode, t: int, lam: float, clip_rho: float, clip_c: float) -> float:
    """Espeholt et al. (2018), equation 1. After the last step, the target is the value."""
    if t == len(e):
        return e.after
    found, product = e.value[t], 1.0
    for i in range(t, len(e)):
        found += product * min(clip_rho, np.exp(e.log_ratio[i])) * e.delta(i)
        product *= e.discount[i] * lam * min(clip_c, np.exp(e.log_ratio[i]))
    return found


def paper_vtrace_advantage(e: Episode, t: int, lam: float, clip_rho: float, clip_c: float) -> float:
    """The same, section 4.2."""
    after = paper_vtrace(e, t + 1, lam, clip_rho, clip_c)
    return min(clip_rho, np.exp(e.log_ratio[t])) * (e.reward[t] + e.discount[t] * after - e.value[t])


def table(episodes: list[Episode], shape: tuple[int, int], of: Callable[..., float], *arguments: float) -> Any:
    """`of(episode, t, ...)` of every step, and 0 where there is none."""
    found = np.zeros(shape)
    for episode in episodes:
        for t in range(len(episode)):
            found[episode.start + t, episode.column] = of(episode, t, *arguments)
    return found


def as_tensors(steps: Steps[Any]) -> Steps[Any]:
    return Steps(**{field.name: torch.from_numpy(getattr(steps, field.name)) for field in fields(steps)})


@pytest.mark.timeout(3600 if N_EPISODES > 1500 else 120)
def test_all_targets_are_those_of_the_papers() -> None:
    rng, n_episodes, seen = np.random.default_rng(1), 0, Counter[str]()
    while n_episodes < N_EPISODES:
        shape = int(rng.integers(1, 2 * T)), int(rng.integers(1, 2 * B))
        steps, log_ratio, discount, episodes, ends = random_batch(rng, *shape)
        n_episodes, seen = n_episodes + len(episodes), seen + ends
        lam, n = float(rng.choice([0.0, 0.5, 0.99, 1.0])), int(rng.integers(1, 9))
        clip_rho, clip_c = rng.uniform(0.5, 2.0, 2).tolist()
        wanted = {
            "gae": table(episodes, shape, paper_gae, lam),
            "lambda_return": table(episodes, shape, paper_lambda_return, lam),
            "n_step_return": table(episodes, shape, paper_n_step, n),
            "vtrace": table(episodes, shape, paper_vtrace_advantage, lam, clip_rho, clip_c),
            "vtrace target": table(episodes, shape, paper_vtrace, lam, clip_rho, clip_c),
        }
        wanted["gae return"] = wanted["gae"] + np.nan_to_num(steps.value) * steps.valid
        tensors = torch.from_numpy(log_ratio), discount if isinstance(discount, float) else torch.from_numpy(discount)
        for kind, of, ratios, own_discount in (
            ("numpy", steps, log_ratio, discount),
            ("torch", as_tensors(steps), *tensors),
        ):
            found: dict[str, Any] = {}
            found["gae"], found["gae return"] = gae(of, own_discount, lam)
            found["lambda_return"] = lambda_return(of, own_discount, lam)
            found["n_step_return"] = n_step_return(of, n, own_discount)
            found["vtrace"], found["vtrace target"] = vtrace(
                of, ratios, own_discount, lam, clip_rho=clip_rho, clip_c=clip_c
            )
            for name, array in found.items():
                assert isinstance(array, np.ndarray if kind == "numpy" else torch.Tensor)
                np.testing.assert_allclose(np.asarray(array), wanted[name], atol=1e-9, err_msg=f"{name}, {kind}")

    assert all(seen[end] > N_EPISODES / 100 for end in ENDS), seen


# ---- properties ------------------------------------------------------------------------------------


def terminating_batch() -> tuple[Steps[Any], Any]:
    """float32 tensors, of episodes that terminate."""
    generator = torch.Generator().manual_seed(3)
    reward, value, final_value, log_ratio = torch.randn(4, T, B, generator=generator)
    terminated = torch.rand(T, B, generator=generator) < 0.2
    steps = Steps(reward, value, terminated, torch.zeros_like(terminated), torch.ones(B), final_value)
    return steps, log_ratio


def test_gradients_flow() -> None:
    steps, _ = terminating_batch()
    value = steps.value.clone().requires_grad_()
    live = Steps(steps.reward, value, steps.terminated, steps.truncated, steps.bootstrap_value, steps.final_value)
    lambda_return(live, 0.9, 0.5).sum().backward()
    assert value.grad is not None
    assert value.grad[1:][~steps.terminated[:-1]].ne(0).all()


def test_the_ratios_of_vtrace_are_clipped_at_1_unless_told() -> None:
    steps, log_ratio = terminating_batch()
    wanted = vtrace(steps, log_ratio, 0.99, 1.0, clip_rho=1.0, clip_c=1.0)
    torch.testing.assert_close(vtrace(steps, log_ratio, 0.99), wanted)


def test_a_wrong_array_of_discounts_is_named() -> None:
    steps, _ = terminating_batch()
    discount = torch.full((T, B), 0.9)
    assert gae(steps, discount.double(), 0.9)[0].dtype == torch.float32
    torch.testing.assert_close(gae(steps, discount, 0.9), gae(steps, 0.9, 0.9))
    for wrong in (discount[0], discount.T, discount.numpy()):
        with pytest.raises(ConfigError, match=r"discount must be a Tensor \[24, 16\], as the rewards are: got a"):
            gae(steps, wrong, 0.9)
    for number in (1.1, -0.1, np.nan):
        discount[2, 3] = number
        with pytest.raises(ConfigError, match="discount must be from 0 to 1 in all valid rows"):
            gae(steps, discount, 0.9)


# ---- a sampler's batch -----------------------------------------------------------------------------


class Valued(Agent):
    """Its value is the second entry of the observation: the steps since the episode began."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(np.zeros(len(observation), np.int64), {"value": observation[:, 1].astype(np.float32)})

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return observation[:, 1].astype(np.float32)


def test_float32_stays_float32_whatever_the_type_of_the_other_arguments() -> None:
    steps, log_ratio, *_ = random_batch(np.random.default_rng(0), T, B)
    floats = {name: part for name, part in vars(steps).items() if part.dtype == np.float64}
    steps = Steps(**{**vars(steps), **{name: part.astype(np.float32) for name, part in floats.items()}})
    for number in (float, np.float64, np.float32, np.array):
        discount, lambda_, clip = number(0.99), number(0.95), number(1.0)
        found = [*gae(steps, discount, lambda_), n_step_return(steps, 3, discount)]
        found.append(lambda_return(steps, discount, lambda_))
        found += vtrace(steps, log_ratio.astype(np.float32), discount, lambda_, clip_rho=clip, clip_c=clip)
        assert {each.dtype for each in found} == {np.dtype(np.float32)}, number


@pytest.mark.parametrize("collector_cls", [None, WaitResetCollector])
def test_the_targets_of_a_samplers_batch(collector_cls: Any) -> None:
    options = {} if collector_cls is None else {"collector_cls": collector_cls}
    with SerialSampler(CountingEnv, batch_T=12, batch_B=3, max_decorrelation_steps=0, **options) as sampler:
        sampler.initialize(Valued(), seed=0, bootstrap_value=True)
        samples, _ = sampler.obtain_samples(0)
    env, value = samples.env, samples.agent.agent_info.value
    advantage, return_ = gae(samples, 0.5, 0.0)
    truncated_only = env.truncated & ~env.terminated
    after = torch.where(env.terminated, 0.0, torch.where(truncated_only, samples.agent.final_value, value + 1))
    wanted = torch.where(env.valid, env.reward + 0.5 * after - value, 0.0)
    assert env.done.any()
    torch.testing.assert_close(advantage, wanted)
    torch.testing.assert_close(return_, torch.where(env.valid, wanted + value, 0.0))
    torch.testing.assert_close(n_step_return(samples, 1, 0.5), return_)
    other = Steps.of(samples, value=value + 1)
    torch.testing.assert_close(gae(other, 0.0, 0.0)[0], torch.where(env.valid, env.reward - value - 1, 0.0))


def test_what_is_missing_or_wrong_is_named() -> None:
    with SerialSampler(CountingEnv, batch_T=4, batch_B=2) as sampler:
        sampler.initialize(FunctionAgent(lambda observation: np.zeros(len(observation), np.int64)), seed=0)
        samples, _ = sampler.obtain_samples(0)
    with pytest.raises(ConfigError, match=r"^these samples have no value: .*give Steps\.of\(samples, value=\.\.\.\)"):
        gae(samples, 0.9, 0.9)
    with pytest.raises(ConfigError, match=r"^these samples have no bootstrap_value: .*bootstrap_value=True"):
        gae(Steps.of(samples, value=samples.env.reward), 0.9, 0.9)
    steps, log_ratio = terminating_batch()
    parts = {name: array for name, array in vars(steps).items() if array is not None}
    with pytest.raises(ConfigError, match=r"bootstrap_value must have the shape \[16\].*got \[24, 16\]"):
        Steps(**{**parts, "bootstrap_value": steps.value})
    with pytest.raises(ConfigError, match=r"terminated must be an array of bool, got torch\.float32"):
        Steps(**{**parts, "terminated": steps.value})
    valid = torch.ones(T, B, dtype=torch.bool)
    valid[7, 5] = steps.terminated[6, 5] = False
    with pytest.raises(ConfigError, match=r"the step \[7, 5\] is not valid, but no episode ends at \[6, 5\]"):
        Steps(**parts, valid=valid)
    with pytest.raises(ConfigError, match="discount must be from 0 to 1, got 99"):
        gae(steps, 99, 0.9)
    with pytest.raises(ConfigError, match=r"lambda_ must be from 0 to 1, got 1\.1"):
        vtrace(steps, log_ratio, 0.9, 1.1)
    for wrong in ("x", "0.5", None, torch.zeros(2), np.zeros(2), np.nan):
        with pytest.raises(ConfigError, match=r"discount must be .*got"):
            gae(steps, wrong, 0.9)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="lambda_ must be from 0 to 1, got"):
            gae(steps, 0.9, wrong)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="clip_rho must be from 0 to inf, got"):
            vtrace(steps, log_ratio, 0.9, clip_rho=wrong)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="n must be an integer of at least 1, got 0"):
        n_step_return(steps, 0, 0.9)
    with pytest.raises(ConfigError, match=r"n must be an integer of at least 1, got 1\.5"):
        n_step_return(steps, 1.5, 0.9)  # type: ignore[call-overload]
    for other in (log_ratio[0], np.asarray(log_ratio), [1.0]):
        with pytest.raises(ConfigError, match=r"log_ratio must be a Tensor \[24, 16\], as the rewards are: got a"):
            vtrace(steps, other, 0.9)
    with pytest.raises(ConfigError, match=r"targets need samples or Steps, got a dict: obtain_samples returns"):
        gae(samples.to_dict(), 0.9, 0.9)  # type: ignore[call-overload]
