"""Action masks: which discrete actions are legal, read from the observation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.buffers.named import fields_of
from penstock.errors import ConfigError, SpaceError

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.agents.agent import Agent

_Bools = npt.NDArray[np.bool_]

#: The name of a mask from `info` in the observation: `envs.MaskInObservation` adds it.
_FROM_INFO = "action_mask"


def mask_of(agent: Agent) -> ActionMask | None:
    """The mask that an initialized agent uses. None if it has no `mask_key`."""
    if agent.mask_key is None:
        return None
    return ActionMask(agent.mask_key, agent.observation_space, agent.action_space)


def mask_in(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> ActionMask | None:
    """The mask that the observations have as `action_mask`, as PettingZoo's do. None if they have none."""
    try:
        return ActionMask(f"observation.{_FROM_INFO}", observation_space, action_space)
    except (ConfigError, SpaceError):
        return None


def info_key(mask_key: str | None) -> str | None:
    """The name of the entry of `info` with the mask. None if the mask is not in `info`.

    Raises `ConfigError` if `mask_key` is not a text.
    """
    if not isinstance(mask_key, str | None):
        raise _wrong_key(mask_key)
    return mask_key.removeprefix("info.") if mask_key is not None and mask_key.startswith("info.") else None


def _wrong_key(mask_key: object) -> ConfigError:
    return ConfigError(
        f'mask_key must be "observation.NAME" or "info.NAME", where NAME is the name of the mask: got {mask_key!r}'
    )


class ActionMask:
    """The masks `[B, n]` in observations: 1 or True where an action is legal, 0 or False elsewhere.

    n is the number of actions of a `Discrete`. For a `MultiDiscrete` it is `nvec.sum()`: the entries of the first
    component come first, then those of the second, and so on. `key` is "observation" and the names that lead to the
    mask, as in "observation.action_mask", or "info." and a name.

    Raises `ConfigError` for a key that is not in the space, and `SpaceError` for a space that does not fit.
    """

    def __init__(self, key: str, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
            raise SpaceError(f"mask_key={key!r} needs a Discrete or MultiDiscrete action space, got {action_space}")
        n = action_space.nvec if isinstance(action_space, spaces.MultiDiscrete) else action_space.n
        self._sizes = np.asarray(n, np.int64).ravel()
        self._ends = self._sizes.cumsum()
        self._firsts = self._ends - self._sizes
        self.n, self.n_components = int(self._sizes.sum()), len(self._sizes)
        self._shape: tuple[int, ...] = tuple(action_space.shape or ())
        self._dtype, self._start = action_space.dtype, np.asarray(action_space.start)
        self._path = [_FROM_INFO] if info_key(key) else key.split(".")[1:]
        self._require(key, observation_space)

    def _require(self, key: str, space: gym.Space[Any]) -> None:
        if not (info_key(key) or key.split(".", maxsplit=1)[0] == "observation"):
            raise _wrong_key(key)
        part: Any = space
        for name in self._path:
            inner = {str(field): sub for field, sub in (fields_of(part) or {}).items()}
            if name not in inner:
                raise ConfigError(f"mask_key={key!r}: {part} has no entry {name!r}")
            part = inner[name]
        if part.shape != (self.n,) or part.dtype is None or part.dtype.kind not in "buif":
            raise SpaceError(
                f"mask_key={key!r} must name a mask with one number for each of the {self.n} actions, such as "
                f"MultiBinary({self.n}), the environment has {part}"
            )

    def _field(self, observation: object) -> Any:
        node = observation
        for name in self._path:
            fields = fields_of(node)
            assert fields is not None
            node = fields[name]
        return node

    def _read(self, observation: Any) -> npt.NDArray[Any]:
        mask: npt.NDArray[Any] = np.asarray(self._field(observation)).reshape(-1, self.n)
        return mask

    def has_others(self, observation: Any) -> _Bools:
        """`[B]`, True where the mask in `observation` `[B, ...]` has other numbers than 0 and 1."""
        mask = self._read(observation)
        others: _Bools = ((mask != 0) & (mask != 1)).any(axis=1)
        return others

    def has_none(self, observation: Any) -> _Bools:
        """`[B]`, True where the mask in `observation` `[B, ...]` allows no action."""
        has_any = np.logical_or.reduceat(self._read(observation) != 0, self._firsts, axis=1)
        none: _Bools = ~np.all(has_any, axis=1)
        return none

    def legal(self, observation: Any) -> _Bools:
        """Which actions are legal `[B, n]`. If the mask of a column allows none, all are legal: a column that waits for
        a reset has no mask."""
        mask: _Bools = self._read(observation) != 0
        has_any = np.logical_or.reduceat(mask, self._firsts, axis=1)
        return mask if has_any.all() else mask | np.repeat(~has_any, self._sizes, axis=1)

    def legal_tensor(self, observation: Any) -> Tensor:
        """As `legal`, for the tensors of samples `[N, ...]`."""
        import torch  # here, since agents without torch have masks too

        mask = torch.as_tensor(self._field(observation)).reshape(-1, self.n) != 0
        counts = mask.cumsum(1)[:, torch.as_tensor(self._ends - 1)]
        has_any = counts.diff(dim=1, prepend=counts.new_zeros(len(counts), 1)) > 0
        if bool(has_any.all()):
            return mask
        return mask | ~has_any.repeat_interleave(torch.as_tensor(self._sizes, device=mask.device), dim=1)

    def draw(self, legal: _Bools, uniform: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        """Random legal actions `[B, ...]`, all with the same probability, from `uniform` `[B, n_components]`."""
        index = np.empty(uniform.shape, np.int64)
        for i, (first, end) in enumerate(zip(self._firsts, self._ends, strict=True)):
            counts = legal[:, first:end].cumsum(axis=1)
            chosen = (uniform[:, i] * counts[:, -1]).astype(np.int64)  # the number of the action among the legal ones
            index[:, i] = (counts <= chosen[:, None]).sum(axis=1)
        actions: npt.NDArray[Any] = (index.reshape(len(index), *self._shape) + self._start).astype(self._dtype)
        return actions
