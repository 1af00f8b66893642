"""`make_vec`: a ShmVectorEnv from an environment id; and `concat_vec_envs`: what SuperSuit's function of this
name returns."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorWrapper

from penstock.arguments import MOST_ENVS, integer, one_of, signature
from penstock.buffers import pickling
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError
from penstock.vector.env import ShmVectorEnv
from penstock.workers.affinity import cpus_to_fill, usable_cpus

Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]


def make_vec(
    id: str | EnvSpec, num_envs: int = 1, wrappers: Sequence[Wrapper] | None = None, **kwargs: Any
) -> ShmVectorEnv:
    """A `ShmVectorEnv` of `num_envs` environments `id`.

    Each environment is wrapped in all `wrappers`; the first is the innermost.
    Arguments of `ShmVectorEnv`, such as `autoreset_mode`, go there, all others to `gymnasium.make`. It can be the
    `vector_entry_point` of a registered environment. Raises `ConfigError` for an id that is not registered, for
    `vectorization_mode` and `vector_kwargs` of `gymnasium.make_vec`, and as `ShmVectorEnv` does.
    """
    if isinstance(wrappers, str) or not {"vectorization_mode", "vector_kwargs"}.isdisjoint(kwargs):
        raise ConfigError(
            "make_vec of penstock has no vectorization_mode and no vector_kwargs, since it makes a ShmVectorEnv: "
            "leave them out. Give the arguments of ShmVectorEnv to make_vec itself, such as "
            'autoreset_mode="SAME_STEP" or n_workers=4'
        )
    try:
        spec = gym.spec(id) if isinstance(id, str) else id
    except gym.error.Error as error:
        raise ConfigError(f"id={id!r} is not a registered environment id: {error}") from error
    names = set(signature(ShmVectorEnv).parameters) - {"env_fns", "unknown"}
    options = {name: kwargs.pop(name) for name in names & set(kwargs)}
    num_envs = integer("num_envs", num_envs, 1, MOST_ENVS)
    return ShmVectorEnv([partial(_make_one, spec, tuple(wrappers or ()), kwargs)] * num_envs, **options)


def _make_one(spec: EnvSpec, wrappers: Sequence[Wrapper], kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    env: gym.Env[Any, Any] = gym.make(spec, **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


BASE_CLASSES = ("gymnasium", "gym", "stable_baselines3")


def concat_vec_envs(
    env: Any,
    num_vec_envs: int,
    num_cpus: int | None = None,
    base_class: Literal["gymnasium", "gym", "stable_baselines3"] = "gymnasium",
    **kwargs: Any,
) -> Any:
    """`num_vec_envs` copies of a PettingZoo `ParallelEnv`, whose agents are the sub-environments of a vector
    environment: in the place of SuperSuit's `pettingzoo_env_to_vec_env_v1` and `concat_vec_envs_v1`.

    Args:
        env: a `ParallelEnv`, or what `pettingzoo_env_to_vec_env_v1` returns, of which copies are made by pickling; or a
            function that returns a `ParallelEnv`, or its id in PettingZoo's registry.
        num_vec_envs: the number of environments; each has as many rows as agents.
        num_cpus: the number of worker processes; None takes one for each CPU that may be used, 0 takes one.
        base_class: "gymnasium" (or "gym") for loops in the style of CleanRL: the spaces are those of one row, rewards
            are float32, and infos are a list of dicts. "stable_baselines3" returns a `Sb3VecEnv`.
        kwargs: other arguments of `ShmVectorEnv`.

    Raises `ConfigError` for an environment that cannot be pickled, and as `ShmVectorEnv` does.
    """
    one_of("base_class", base_class, BASE_CLASSES)
    num_vec_envs = integer("num_vec_envs", num_vec_envs, 1, MOST_ENVS)
    n_workers = cpus_to_fill(usable_cpus()) if num_cpus is None else max(1, integer("num_cpus", num_cpus, 0))
    make = env
    if not (callable(env) or isinstance(env, str)):
        try:
            make = partial(pickle.loads, pickling.dumps(getattr(env, "par_env", env)))
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise ConfigError(
                f"the environment cannot be pickled, so it cannot be copied: {in_one_line(error)}. Give a function "
                "that builds it"
            ) from error
    envs = ShmVectorEnv([make] * num_vec_envs, n_workers=min(n_workers, num_vec_envs), **kwargs)
    return envs.to_sb3() if base_class == "stable_baselines3" else SeatVecEnv(envs)


class SeatVecEnv(VectorWrapper):
    """A `ShmVectorEnv` with the interface of SuperSuit's vector environments: the spaces are those of one row, rewards
    are float32, and infos are a list with a dict for each row.

    Every info has `valid`, `alive` and `late_reward`. Where an episode ended, it has `terminal_observation`.
    """

    def __init__(self, envs: ShmVectorEnv) -> None:
        super().__init__(envs)
        self.envs = envs
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all environments; environment i gets `seed + i`. Returns observations `[n, ...]` and `n` infos."""
        observations, listed = self.envs._reset_listed(seed, options)
        infos: list[dict[str, Any]] = self.envs.listed_states()
        for row, info in listed:
            infos[row].update(info)
        return observations, infos

    def step(self, actions: Any) -> Any:
        """Step all rows; returns observations, rewards, terminations and truncations `[n]`, and `n` infos."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Start a step; `step_wait` returns its results."""
        self.envs.step_async(actions)

    def step_wait(self) -> Any:
        """Wait for the step; returns as `step` does."""
        observations, rewards, terminated, truncated, listed = self.envs.step_wait_listed()
        infos = self.envs.listed_states()
        for row, info in listed:
            if "final_obs" in info:
                infos[row].update({**info.pop("final_info"), "terminal_observation": info.pop("final_obs")})
            infos[row].update(info)
        return observations, rewards.astype("float32"), terminated, truncated, infos

    def env_is_wrapped(self, wrapper_class: type) -> list[bool]:
        """For each row, whether its `ParallelEnv` is or has a wrapper of this class. SuperSuit says False of each."""
        wrapped = self.envs.apply(lambda env: any(isinstance(layer, wrapper_class) for layer in _layers(env)))
        return [wrapped[i] for i in self.envs.env_of_rows]

    def render(self) -> Any:
        """The frame of the first environment."""
        return self.envs.call_some([0], "render")[0]


def _layers(env: Any) -> Iterator[Any]:
    """The environment and what it wraps."""
    while env is not None:
        yield env
        env = getattr(env, "env", None) or getattr(env, "aec_env", None)
