"""Checks of the arguments of a vector environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.envs.factory import EnvFactory, env_factories
from penstock.errors import ConfigError, brief
from penstock.vector.exchange import Ids
from penstock.workers.affinity import usable_cpus
from penstock.workers.arguments import MOST_ENVS, integer, one_of, seconds
from penstock.workers.launch import START_METHODS
from penstock.workers.plan import Affinity, PoolOptions, WorkerPlan, assign_cpus, split
from penstock.workers.restarts import ON_WORKER_FAILURE

Options = dict[str, Any] | None


def as_factories(env_fns: Sequence[Callable[..., gym.Env[Any, Any]]]) -> tuple[EnvFactory, ...]:
    """One factory for each environment."""
    given: Any = env_fns
    if isinstance(given, str) or not isinstance(given, Sequence) or not given or not all(map(callable, given)):
        raise ConfigError(f"env_fns must be a list of callables, one for each environment, got {brief(env_fns)}")
    return env_factories(env_fns, None, integer("the number of env_fns", len(env_fns), 1, MOST_ENVS))


def as_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """An autoreset mode, or the one of that name (`"SameStep"` or `"SAME_STEP"`)."""
    try:
        named = AutoresetMode.__members__.get(str(mode))
        return AutoresetMode(mode) if named is None else named
    except ValueError:
        names = ", ".join(AutoresetMode.__members__)
        raise ConfigError(f"autoreset_mode must be one of {names}, got {mode!r}") from None


def as_plans(
    n_envs: int, in_series: int, n_workers: int | None, affinity: Affinity | Sequence[int | Sequence[int]] | None
) -> tuple[WorkerPlan, ...]:
    """Divide the environments among processes."""
    in_series = integer("in_series", in_series, 1)
    if n_workers is None:
        n_workers = -(-n_envs // in_series)
    elif in_series != 1:
        raise ConfigError("in_series and n_workers both say how many processes there are: leave one out")
    n_workers = min(integer("n_workers", n_workers, 1), n_envs)
    mask = usable_cpus()
    if affinity is None:
        affinity = Affinity(pin=n_workers <= len(mask))
    elif not isinstance(affinity, Affinity):
        affinity = Affinity(cpus=affinity)
    cpus = assign_cpus(affinity, n_workers, mask)
    return tuple(
        WorkerPlan(worker_rank=rank, columns=own, env_ranks=own, cpus=cpus[rank], torch_threads=affinity.torch_threads)
        for rank, own in enumerate(split(n_envs, n_workers))
    )


def as_options(
    context: str,
    step_timeout: float | None,
    start_timeout: float,
    on_worker_failure: str,
    max_restarts: int,
    restart_window: float,
) -> PoolOptions:
    """The options of the worker pool."""
    one_of("context", context, START_METHODS)
    one_of("on_worker_failure", on_worker_failure, ON_WORKER_FAILURE)
    max_restarts = integer("max_restarts", max_restarts, 0)
    return PoolOptions(
        start_method=context,
        step_timeout=None if step_timeout is None else seconds("step_timeout", step_timeout),
        start_timeout=seconds("start_timeout", start_timeout),
        max_restarts=max_restarts if on_worker_failure == "restart" else 0,
        restart_window=seconds("restart_window", restart_window),
        preload=("penstock.vector.program", "gymnasium.envs.classic_control"),
        keeps_messages=True,  # an info belongs to a reply that has been made, even if the worker dies afterwards
    )


def as_seeds(seed: int | Sequence[int | None] | None, n_envs: int) -> list[int | None]:
    """The seed of each environment's reset: `seed + i`, or the i-th of a list."""
    if seed is None:
        return [None] * n_envs
    given: Any = seed
    if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str):
        if len(given) != n_envs:
            raise ConfigError(f"seed must be a list of {n_envs} seeds, one for each environment, got {len(given)}")
        return [None if each is None else integer("seed", each, 0, None) for each in given]
    first = integer("seed", seed, 0, None)
    return [first + i for i in range(n_envs)]


def split_mask(options: Options, n_envs: int) -> tuple[Ids, Options]:
    """The environments to reset, by `options["reset_mask"]` if there is one, and the other options."""
    if not (options is None or isinstance(options, dict)):
        raise ConfigError(f"options must be a dict or None, got {brief(options)}")
    if options is None or "reset_mask" not in options:
        return np.arange(n_envs), options
    mask = options["reset_mask"]
    if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (n_envs,) and mask.any()):
        raise ConfigError(
            f"options['reset_mask'] must be a numpy array of {n_envs} bools, one at least True, got {brief(mask)}"
        )
    return np.flatnonzero(mask), {key: value for key, value in options.items() if key != "reset_mask"}


def env_ids_within(env_ids: Any, n_envs: int) -> Ids:
    """`env_ids` as an array; raises `ConfigError` unless they are different indices of environments."""
    ids = np.asarray(env_ids)
    fits = ids.ndim == 1 and len(ids) > 0 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < n_envs
    if not fits or len(np.unique(ids)) != len(ids):
        raise ConfigError(f"env_ids must be different indices from 0 to {n_envs - 1}, got {brief(env_ids)}")
    return ids.astype(np.intp)
