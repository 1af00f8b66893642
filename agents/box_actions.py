"""Bounds of Box action spaces, in the form that agents compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.agent import Space
from penstock.errors import SpaceError

if TYPE_CHECKING:
    import torch


class BoxActions:
    """A floating-point `Box` with any number of dimensions.

    `center` and `half_range` are float64 arrays in the shape of an action. They are 0 and 1 where a dimension has
    fewer than two bounds. With `bounded=True` every dimension must have two.

    Raises `SpaceError` with the name of `agent` for any other space.
    """

    def __init__(self, space: Space, agent: str, *, bounded: bool = False) -> None:
        if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
            raise SpaceError(
                f"{agent} needs a Box action space of a floating-point type, the environment has {space}: "
                "use an agent for this space, or convert the actions with gymnasium.wrappers.TransformAction"
            )
        both = space.bounded_below & space.bounded_above
        if bounded and not both.all():
            raise SpaceError(
                f"{agent} squashes actions into their bounds, but not every dimension of {space} has two bounds: wrap "
                "the environment in gymnasium.wrappers.TransformAction, or use an agent that does not squash"
            )
        self.shape, self.dtype = space.shape, space.dtype
        self.low, self.high = space.low, space.high
        low, high = (np.where(both, bound, 0).astype(np.float64) for bound in (space.low, space.high))
        # Halve first: the full range might overflow.
        self.center = 0.5 * low + 0.5 * high
        self.half_range = np.where(both, 0.5 * high - 0.5 * low, 1.0)
        self._clips = bool((space.bounded_below | space.bounded_above).any())

    def clip(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`action` `[B, ...]` in the dtype of the space, clipped to the bounds that exist."""
        cast = action.astype(self.dtype, copy=False)
        # Not np.clip, which takes three times as long on a row of a few columns.
        return np.minimum(np.maximum(cast, self.low), self.high) if self._clips else cast

    def scale(self, fraction: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scale from [-1, 1] to the bounds, in the dtype of the space."""
        return self.clip(self.center + self.half_range * fraction)

    def scale_torch(self, fraction: torch.Tensor) -> torch.Tensor:
        """As `scale`, for a tensor: in its dtype, with gradients, not clipped."""
        center, half_range = fraction.new_tensor(self.center), fraction.new_tensor(self.half_range)
        return center + half_range * fraction
