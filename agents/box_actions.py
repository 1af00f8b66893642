"""Box action spaces: their bounds in the form that agents compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.errors import SpaceError

if TYPE_CHECKING:
    import torch

__all__ = ["BoxActions"]


class BoxActions:
    """A floating-point `Box`, of any number of dimensions.

    `center` and `half_range` are float64, shaped like an action; where a dimension lacks one of its bounds
    they are 0 and 1. With `bounded=True` every dimension must have both.

    Raises `SpaceError` naming `agent` for any other space.
    """

    def __init__(self, space: gym.Space[Any], agent: str, *, bounded: bool = False) -> None:
        if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
            raise SpaceError(
                f"{agent} needs a Box action space of a floating-point type, the environment has {space}: "
                "use an agent made for it, or convert the actions with gymnasium.wrappers.TransformAction"
            )
        both = space.bounded_below & space.bounded_above
        if bounded and not both.all():
            raise SpaceError(
                f"{agent} squashes actions into their bounds, but {space} has dimensions without: "
                "bound them with gymnasium.wrappers.ClipAction or RescaleAction, or use an agent that does not squash"
            )
        self.shape, self.dtype = space.shape, space.dtype
        self.low, self.high = space.low, space.high
        low, high = (np.where(both, bound, 0).astype(np.float64) for bound in (space.low, space.high))
        # Halved first: the difference may be more than the type can hold.
        self.center = 0.5 * low + 0.5 * high
        self.half_range = np.where(both, 0.5 * high - 0.5 * low, 1.0)
        self._clips = bool((space.bounded_below | space.bounded_above).any())

    def clip(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`action` `[B, ...]` in the space's dtype and within its bounds, where it has any."""
        cast = action.astype(self.dtype, copy=False)
        # Two ufuncs: np.clip takes three times as long on a row of a few columns.
        return np.minimum(np.maximum(cast, self.low), self.high) if self._clips else cast

    def unsquash(self, tanh: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """From [-1, 1] to the bounds, in the space's dtype."""
        return self.clip(self.center + self.half_range * tanh)

    def unsquash_torch(self, tanh: torch.Tensor) -> torch.Tensor:
        """As `unsquash`, of a tensor, in its dtype and with gradients; not clipped."""
        center, half_range = tanh.new_tensor(self.center), tanh.new_tensor(self.half_range)
        return center + half_range * tanh
