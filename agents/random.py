"""Random elements of a space, and the agent that acts with them. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import Agent, AgentStep, Space
from penstock.agents.noise import ColumnNoise
from penstock.buffers.named import as_named
from penstock.buffers.tree import map_tree
from penstock.errors import SpaceError


def draw(space: Space, rng: np.random.Generator, n: int) -> Any:
    """`n` independent elements of `space`, as actions are recorded, with leading dimension n.

    The distribution is that of Gymnasium's `space.sample()`: uniform between two bounds, shifted exponential with
    one bound, normal with none. Raises `SpaceError` for an unsupported space.
    """
    return as_named(map_tree(lambda part: _draw(part, rng, n), space))


def _draw(space: Space, rng: np.random.Generator, n: int) -> Any:
    if isinstance(space, spaces.Discrete):
        start, stop = int(space.start), int(space.start) + int(space.n)
        # One number alone takes a third of the time without `size`; the stream is the same.
        drawn: Any = [rng.integers(start, stop)] if n == 1 else rng.integers(start, stop, size=n)
        return np.array(drawn, space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        first = np.asarray(space.start, np.int64)
        return rng.integers(first, first + space.nvec, size=(n, *space.nvec.shape)).astype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, size=(n, *space.shape), dtype=np.int8)
    if isinstance(space, spaces.Box):
        return _draw_box(space, rng, n)
    raise SpaceError(
        f"cannot draw from a {type(space).__name__} space: use Box, Discrete, MultiDiscrete, MultiBinary, and Dict and "
        "Tuple of these"
    )


def _draw_box(space: spaces.Box, rng: np.random.Generator, n: int) -> Any:
    shape = (n, *space.shape)
    integral = space.dtype.kind in "iub"
    below, above = space.bounded_below, space.bounded_above
    if integral and bool((below & above).all()):  # exact for the full range of every integer type
        low, high = (
            np.asarray(bound).astype(np.uint8) if space.dtype.kind == "b" else bound for bound in _bounds(space)
        )
        drawn = rng.integers(low, high, size=shape, dtype=low.dtype, endpoint=True)
        return drawn.astype(space.dtype)
    low, high = (
        np.where(mask, bound, 0).astype(np.float64) for mask, bound in zip((below, above), _bounds(space), strict=True)
    )
    if integral:
        high = np.where(above, high + 1, high)  # values are rounded down below, so that the bound itself can be drawn
    # Draw from all distributions for every element. So the random stream advances by the same amount for all bounds.
    values = np.select(
        [below & above, below, above],
        [low + rng.random(shape) * (high - low), low + rng.exponential(size=shape), high - rng.exponential(size=shape)],
        rng.normal(size=shape),
    )
    if integral:
        values = np.floor(values)
    return np.clip(values.astype(space.dtype), space.low, space.high)


def _bounds(space: spaces.Box) -> tuple[Any, Any]:
    return np.asarray(space.low), np.asarray(space.high)


class RandomAgent(Agent):
    """Draws random actions from the action space, with the distribution of `space.sample()`. Its values are zero.

    Supports every action space that can be recorded. Each column has its own random stream, so that its actions do
    not depend on the sampler or on the number of workers.

    With `mask_key`, only legal actions are drawn, all with the same probability (see `Agent.mask_key`).
    """

    _noise: ColumnNoise
    _mask: ActionMask | None = None

    def __init__(self, *, mask_key: str | None = None) -> None:
        self.mask_key = mask_key

    def initialize(self, observation_space: Space, action_space: Space, *, seed: int | None = None) -> None:
        super().initialize(observation_space, action_space, seed=seed)
        self._mask = mask_of(self)

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        mask = self._mask
        if mask is None:
            self._noise = ColumnNoise(rngs, partial(draw, self.action_space))
        else:
            self._noise = ColumnNoise(rngs, lambda rng, n: rng.random((n, mask.n_components)))

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        drawn = self._noise.next_row(self.selected)
        return AgentStep(drawn if self._mask is None else self._mask.draw(self._mask.legal(observation), drawn))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        return np.zeros(len(prev_reward), np.float32)
