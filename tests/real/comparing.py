"""Compares a sampler's batches with the reference, field by field and bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from penstock import Agent, NamedArrays, Sampler, TrajInfo, WaitResetCollector

from .reference import play

SEED, DISCOUNT = 6, 0.9


class Diary(TrajInfo):
    """Keeps every argument of its calls."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.steps: list[Any] = []
        self.end: Any = None

    def step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        terminated, truncated, _, info = rest
        self.steps.append((observation, action, reward, terminated, truncated, info))

    def terminate(self, final_observation: Any) -> None:
        self.end = final_observation


def compare(
    sampler_cls: type[Sampler],
    env_fns: Sequence[Callable[[], Any]],
    make_agent: Callable[[], Agent],
    *,
    T: int,
    n_batches: int,
    warm_up: int = 0,
    **kwargs: Any,
) -> list[list[dict[str, Any]]]:
    """Raise AssertionError if sampler and reference differ. Returns the reference's batches by environment."""
    wait = kwargs.get("collector_cls") is WaitResetCollector
    size = {"batch_T": T, "batch_B": len(env_fns), "max_decorrelation_steps": warm_up}
    expected = []
    for b, env_fn in enumerate(env_fns):
        env = env_fn()
        expected.append(play(env, make_agent(), b, seed=SEED, T=T, n_batches=n_batches, warm_up=warm_up, wait=wait))
        env.close()
    with sampler_cls(env_fns, **size, **kwargs) as sampler:
        sampler.initialize(make_agent(), seed=SEED, bootstrap_value=True, traj_info_kwargs={"discount": DISCOUNT})
        for itr in range(n_batches):
            _, infos = sampler.obtain_samples(itr)
            columns = [column[itr] for column in expected]
            _compare_fields(sampler.samples_np, columns)
            _compare_infos(infos, columns)
    return expected


def _compare_fields(samples: Any, columns: list[dict[str, Any]]) -> None:
    fields = {**dict(samples.env.items()), **dict(samples.agent.items())}
    assert (fields.pop("policy_version") == 1).all()
    assert fields.keys() | {"env_info", "episodes"} == columns[0].keys() | {"env_info", "episodes"}
    for b, column in enumerate(columns):
        assert samples.agent.bootstrap_value[b] == np.float32(column["bootstrap_value"])
        for name, field in fields.items():
            if name == "env_info":
                _compare_env_info(field[:, b], column[name])
            elif name == "bootstrap_obs":
                _compare_leaves(f"{name} of {b}", field[b : b + 1], column[name])
            elif name != "bootstrap_value":
                _compare_leaves(f"{name} of {b}", field[:, b], column[name])


def _compare_leaves(name: str, field: Any, rows: list[Any]) -> None:
    if isinstance(field, NamedArrays):
        assert all(list(field.keys()) == list(row.keys()) for row in rows), name
        for key, part in field.items():
            _compare_leaves(f"{name}.{key}", part, [row[key] for row in rows])
        return
    wanted = np.array([np.asarray(row, field.dtype).reshape(field.shape[1:]) for row in rows])
    np.testing.assert_array_equal(field, wanted, name)


def _compare_env_info(field: NamedArrays, infos: list[dict[str, Any]], name: str = "env_info") -> None:
    """Entries that were given, with their flags; the others are zero."""
    for key, part in field.items():
        values = [info.get(key) for info in infos]
        if isinstance(part, NamedArrays):
            _compare_env_info(part, [value or {} for value in values], f"{name}.{key}")
        elif f"_{key}" in field:
            given = [value is not None for value in values]
            np.testing.assert_array_equal(field[f"_{key}"], given, f"flag of {name}.{key}")
            zero = np.zeros(part.shape[1:])
            _compare_leaves(f"{name}.{key}", part, [zero if value is None else value for value in values])


def _compare_infos(infos: Sequence[Any], columns: list[dict[str, Any]]) -> None:
    episodes = sorted((episode for column in columns for episode in column["episodes"]), key=lambda e: e[:2])
    assert len(infos) == len(episodes)
    for info, (_, _, steps, end) in zip(infos, episodes, strict=True):
        rewards = [float(step[2]) for step in steps]
        assert (info.Length, info.NonzeroRewards) == (len(rewards), np.count_nonzero(rewards))
        # TrajInfo adds up rewards in single precision, as they are recorded.
        assert info.Return == pytest.approx(sum(rewards), rel=1e-6, abs=1e-6)
        discounted = sum(DISCOUNT**i * reward for i, reward in enumerate(rewards))
        assert info.DiscountedReturn == pytest.approx(discounted, rel=1e-6, abs=1e-6)
        if isinstance(info, Diary):
            same(info.steps, steps)
            same(info.end, end)


def same(one: Any, other: Any) -> None:
    """Assert that two structures are equal, except for the types of their numbers."""
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        np.testing.assert_array_equal(one, other)
