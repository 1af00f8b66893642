"""Calls of methods and attributes of the environments of a vector environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from penstock.envs.calls import EnvCall
from penstock.errors import ConfigError
from penstock.vector.vector_arguments import env_ids_within


def tile(frames: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """One picture with all `frames`, each `[height, width, channels]`, in a grid that is filled row by row.

    The grid is as square as possible, and unused places are black. Raises `ConfigError` unless all frames are pictures
    of the same size.
    """
    pictures = [frame for frame in frames if isinstance(frame, np.ndarray) and frame.ndim == 3]
    if len(pictures) != len(frames) or len({picture.shape for picture in pictures}) != 1:
        raise ConfigError(
            "render_tiled needs one picture [height, width, channels] of the same size from each environment: build "
            'the environments with render_mode="rgb_array"'
        )
    n_columns = math.ceil(math.sqrt(len(pictures)))
    n_rows = math.ceil(len(pictures) / n_columns)
    height, width, channels = pictures[0].shape
    grid = np.zeros((n_rows * n_columns, height, width, channels), pictures[0].dtype)
    grid[: len(pictures)] = pictures
    grid = grid.reshape(n_rows, n_columns, height, width, channels).swapaxes(1, 2)
    tiled: npt.NDArray[np.uint8] = grid.reshape(n_rows * height, n_columns * width, channels)
    return tiled


class CallsOnEnvs(VectorEnv[Any, Any, Any]):
    """The part of `ShmVectorEnv` that calls methods and attributes of the environments. `ShmVectorEnv` provides
    `_call`."""

    _n_called: int  # of environments; each of several agents is one, and each batched one
    _is_batched: bool  # whether an environment gives the frames of several rows
    #: The environment and the agent of each row, where environments have several agents; else None.
    seats: list[tuple[int, Any]] | None

    def _call(self, call: EnvCall) -> tuple[Any, ...]:
        """Make the call in the workers. Returns the results by index of the environment."""
        raise NotImplementedError

    def render(self) -> tuple[Any, ...] | None:
        """The frames of all environments; with several agents, for each row that of its environment."""
        frames = self._frames()
        return frames if self.seats is None else tuple(frames[e] for e, _ in self.seats)

    def render_tiled(self) -> npt.NDArray[np.uint8]:
        """One picture `[height, width, 3]` with the frames of all environments in a grid."""
        return tile(self._frames())

    def _frames(self) -> tuple[Any, ...]:
        frames = self._call(EnvCall("call", "render"))
        return tuple(frame for own in frames for frame in own or ()) if self._is_batched else frames

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """What `env.name(*args, **kwargs)` returns in each environment, or `env.name` if it is not a method.

        This first waits for running steps. If an environment raises, this raises `EnvCallError`, and the environments
        stay usable.
        """
        return self._call(EnvCall("call_or_get", name, args=args, kwargs=kwargs))

    def call_some(self, env_ids: Sequence[int], name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """As `call`, in the environments `env_ids` only. The results are in ascending order of the index."""
        only = frozenset(env_ids_within(env_ids, self._n_called).tolist())
        return self._call(EnvCall("call_or_get", name, args=args, kwargs=kwargs, only=only))

    def apply(self, function: Callable[[gym.Env[Any, Any]], Any]) -> tuple[Any, ...]:
        """What `function(env)` returns for each environment, in its worker."""
        if not callable(function):
            raise ConfigError(f"apply needs a function of an environment, got {function!r}")
        return self._call(EnvCall("apply", getattr(function, "__name__", "function"), args=(function,)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute `name` of each environment."""
        return self._call(EnvCall("get_attr", name))

    def set_attr(self, name: str, values: Any) -> None:
        """Set the attribute `name` of each environment. `values` is a list or tuple of `n` values, or one value for
        all."""
        each = values if isinstance(values, list | tuple) else [values] * self._n_called
        if len(each) != self._n_called:
            raise ConfigError(f"set_attr needs one value, or {self._n_called} of them in a list, got {len(each)}")
        self._call(EnvCall("set_attr", name, values=each))

    def broadcast(self, parameters: Mapping[str, Any], env_ids: Sequence[int] | None = None) -> None:
        """Set attributes of all environments, or of `env_ids`, between two steps; for example for a curriculum.

        Returns when every environment has all of them. Raises `EnvCallError` if one raises.
        """
        if not isinstance(parameters, Mapping):
            raise ConfigError(f"broadcast needs a dict of attributes and values, got {parameters!r}")
        only = None if env_ids is None else frozenset(env_ids_within(env_ids, self._n_called).tolist())
        for name, value in parameters.items():
            self._call(EnvCall("set_attr", name, values=[value] * self._n_called, only=only))

    @property
    def np_random_seed(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Copies of the environments' random generators."""
        return self.get_attr("np_random")
