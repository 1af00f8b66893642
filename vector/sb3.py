"""A ShmVectorEnv with the `VecEnv` interface of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env import VecEnv

from penstock.arguments import one_of
from penstock.buffers.named import fields_of
from penstock.buffers.tree import map_tree
from penstock.envs.calls import EnvCall
from penstock.errors import EnvCallError, SpaceError, brief
from penstock.vector.env import ShmVectorEnv
from penstock.vector.vector_arguments import EnvFns, refuse_unknown
from penstock.vector.vector_pool import PendingCallError, State
from penstock.workers.plan import StartMethod

if TYPE_CHECKING:
    from typing_extensions import Self

_EXPECTED = (
    "step_wait; if a step or reset was interrupted, it is envs.reset(), or, for learn(reset_num_timesteps=False) of "
    "Stable-Baselines3, model._last_obs = None before it"
)


class Sb3VecEnv(VecEnv):
    """Runs a `ShmVectorEnv` as a `VecEnv` of Stable-Baselines3. It takes the arguments of `SubprocVecEnv`.

    With `num_envs`, `env_fns` is one function of batched environments, which must have the mode `SAME_STEP`.
    `start_method` is "forkserver", "spawn" or "fork". None is "forkserver", on macOS "spawn". `kwargs` are other
    arguments of `ShmVectorEnv`. Rewards are float32, as those of `DummyVecEnv`; with `reward_dtype=np.float64` they are
    float64, as those of `SubprocVecEnv`. `close` ends the workers. The class can be the `vec_env_cls` of
    Stable-Baselines3's `make_vec_env`.

    Raises as `ShmVectorEnv` does.
    """

    def __init__(
        self,
        env_fns: EnvFns,
        start_method: StartMethod | None = None,
        *,
        reward_dtype: type[np.floating[Any]] = np.float32,
        **kwargs: object,
    ) -> None:
        refuse_unknown(Sb3VecEnv, kwargs, ShmVectorEnv)
        arguments: dict[str, Any] = {"context": start_method, "autoreset_mode": "SAME_STEP", **kwargs}
        envs = ShmVectorEnv(env_fns, **arguments)
        try:
            self._wrap(envs, reward_dtype)
        except BaseException:
            envs.close()
            raise

    @classmethod
    def around(cls, envs: ShmVectorEnv, reward_dtype: type[np.floating[Any]] = np.float32) -> Self:
        """A `Sb3VecEnv` for an existing `ShmVectorEnv`. `close` closes both."""
        made = cls.__new__(cls)
        made._wrap(envs, reward_dtype)
        return made

    def _wrap(self, envs: ShmVectorEnv, reward_dtype: type[np.floating[Any]]) -> None:
        one_of("reward_dtype", getattr(reward_dtype, "__name__", str(reward_dtype)), ("float32", "float64"))
        self._reward_dtype = np.dtype(reward_dtype)
        envs.check_fit_for_sb3()
        envs.allow_step_before_reset()
        envs._guard.expected[State.STEPPING] = _EXPECTED
        self.envs, self._is_behind = envs, False
        # The environment of each row. Environments of several agents have several rows, and batched ones too.
        self._env_of = envs.env_of_rows
        # The rows that have their own seeds, options and pictures.
        firsts = range(envs.num_envs) if envs.seats is None else map(self._env_of.index, sorted(set(self._env_of)))
        self._first_rows = list(firsts)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.metadata = envs.metadata

    def reset(self) -> Any:
        """Reset all environments; returns observations `[n, ...]`. The infos are in `reset_infos`.

        The reset uses the seeds of `seed` and the options of `set_options`; the next reset does not. An environment of
        several agents gets the options of its first row. With an `episode_plan`, options come from there only.
        """
        self._is_behind = True
        seeds = self._seeds[: len(self._first_rows)]
        options = [self._options[row] or None for row in self._first_rows]
        has_plan = self.envs.has_plan and not any(options)  # it takes the seed that `seed` was given
        observations, infos = self.envs._reset_listed(*((seeds[0], None) if has_plan else (seeds, options)))
        self.reset_infos = [{} for _ in range(self.num_envs)]
        for i, info in infos:
            self.reset_infos[i] = info
        self._reset_seeds()
        self._reset_options()
        self._is_behind = False
        return observations

    def step_async(self, actions: Any) -> None:
        """Start a step of all environments. `actions` is batched, or a list with one action for each environment.

        Raises `SamplerStateError` if an exception, such as Ctrl-C, has interrupted the last step or reset: its results
        are lost, so `reset` must come first.
        """
        if self._is_behind:
            raise PendingCallError(f"step_async was called out of order: the call expected now is {_EXPECTED}", "step")
        self.envs.step_async(_batched(self.action_space, actions, self.num_envs))

    def step_wait(self) -> Any:
        """Wait for the step; returns observations `[n, ...]`, rewards `[n]`, dones `[n]` and `n` infos.

        Every info has `TimeLimit.truncated`. Where an episode ended it also has `terminal_observation`. With several
        agents, every info has `valid`, `alive` and `late_reward`.
        """
        self._is_behind = True  # until the caller has the results, whatever interrupts this
        observations, rewards, terminated, truncated, listed = self.envs.step_wait_listed()
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for i, info in listed:
            if done[i]:
                final_obs, final_info = info.pop("final_obs"), info.pop("final_info")
                is_cut = bool(truncated[i] and not terminated[i])
                infos[i] = {**final_info, "terminal_observation": final_obs, "TimeLimit.truncated": is_cut}
                self.reset_infos[i] = info
            else:
                infos[i].update(info)
        for info, states in zip(infos, self.envs.listed_states(), strict=False):
            info.update(states)
        self._is_behind = False
        return observations, rewards.astype(self._reward_dtype), done, infos

    def close(self) -> None:
        """Close the vector environment."""
        self.envs.close()

    def get_images(self) -> Sequence[Any]:
        """The frames of all environments."""
        frames = self.envs.render() or ()
        return [frames[row] for row in self._first_rows]

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of all environments, or of the environments `indices`. A method is not called.

        Raises `AttributeError` if it is missing, and `EnvCallError` if it cannot be pickled. What comes is a copy, and
        a method belongs to a copy of its environment: call methods with `env_method`.
        """
        return self._call("get_attr", indices, attr_name)

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have the attribute."""
        return all(self._call("has_attr", None, attr_name))

    def set_attr(self, attr_name: str, value: object, indices: Any = None) -> None:
        """Set an attribute of all environments, or of the environments `indices`."""
        if wanted := self._wanted(indices):
            self.envs.broadcast({attr_name: value}, sorted(set(wanted)))

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """The results of a method of all environments, or of the environments `indices`."""
        return self._call("call", indices, method_name, *method_args, **method_kwargs)

    def _wanted(self, indices: int | Iterable[int] | None) -> list[int]:
        """The environment of each of these rows."""
        return [self._env_of[i] for i in self._get_indices(indices)]

    def _call(
        self, verb: str, indices: int | Iterable[int] | None, name: str, /, *args: object, **kwargs: object
    ) -> list[Any]:
        wanted = self._wanted(indices)
        if not wanted:
            return []
        env_ids = sorted(set(wanted))
        try:
            results = self.envs._call(EnvCall(verb, name, args=args, kwargs=kwargs, only=frozenset(env_ids)))
        except EnvCallError as error:
            # An attribute that is there and cannot be pickled is not missing, whatever the pickling has raised.
            if isinstance(error.__cause__, AttributeError) and not (verb == "get_attr" and self.has_attr(name)):
                raise AttributeError(str(error)) from error
            raise
        by_index = dict(zip(env_ids, results, strict=True))
        return [by_index[i] for i in wanted]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        """Whether each environment, or each of the environments `indices`, has a wrapper of this class."""
        wrapped = self.envs.apply(lambda env: is_wrapped(env, wrapper_class))
        return [wrapped[i] for i in self._wanted(indices)]


def _batched(space: gym.Space[Any], actions: Any, n: int) -> Any:
    """`actions`, a list with one action for each environment, as one batch. A batch is returned unchanged."""
    kind = dict if isinstance(space, spaces.Dict) else tuple
    if fields_of(space) is None or isinstance(actions, kind):
        return actions
    try:
        if len(actions) != n:
            raise SpaceError(f"there are {len(actions)}")
        return map_tree(lambda _, *parts: list(parts), space, *actions)
    except (SpaceError, TypeError) as error:
        raise SpaceError(
            f"action must be a list of {n}, one {kind.__name__} as in {space} for each environment, or one such "
            f"{kind.__name__} of arrays [{n}, ...], got {brief(actions)}: {error}"
        ) from None
