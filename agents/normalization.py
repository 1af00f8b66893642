"""Layers that normalize observations and rewards with the statistics of all batches so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.errors import ConfigError, SpaceError

_Array = npt.NDArray[Any]


class Moments(NamedTuple):
    """The statistics of some rows, in float64."""

    n_rows: float
    mean: _Array
    squares: _Array  #: sum of the squared differences from the mean

    @classmethod
    def of(cls, rows: _Array) -> Moments:
        """The moments of `rows` `[N, ...]`."""
        rows = rows.astype(np.float64)
        if not np.isfinite(rows).all():
            raise SpaceError(
                "the statistics of a normalization need finite values, got NaN or inf: check_finite=True of the "
                "sampler finds the environment"
            )
        mean = rows.mean(axis=0) if len(rows) else np.zeros(rows.shape[1:])
        return cls(float(len(rows)), mean, np.square(rows - mean).sum(axis=0))

    def with_others(self, other: Moments) -> Moments:
        """The moments of all rows of both."""
        if not other.n_rows:
            return self
        n_rows = self.n_rows + other.n_rows
        difference, share = other.mean - self.mean, other.n_rows / n_rows
        squares = self.squares + other.squares + np.square(difference) * (self.n_rows * share)
        return Moments(n_rows, self.mean + difference * share, squares)


class RunningStatistics(nn.Module):
    """The base of both layers: mean and standard deviation of all rows so far.

    The layer computes with the buffers `mean` and `std`, float32. They belong to the model, so
    `agent.sync_shared_memory()` publishes them with the parameters. Workers and evaluations never change them. The
    `state_dict` also has the exact sums, float64, and a run that loads it continues with them.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, shape: tuple[int, ...], clip: float, epsilon: float) -> None:
        super().__init__()
        if not (clip > 0 and epsilon > 0):
            raise ConfigError(f"clip and epsilon must be positive, got clip={clip!r}, epsilon={epsilon!r}")
        self.shape, self.clip, self.epsilon = shape, clip, epsilon
        self.moments = Moments(0.0, np.zeros(shape), np.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("std", torch.ones(shape))

    @property
    def count(self) -> int:
        """How many rows the statistics count."""
        return int(self.moments.n_rows)

    def merge(self, moments: Moments) -> None:
        """Add the moments of more rows. `moments_of` computes them, perhaps in another process."""
        self.moments = self.moments.with_others(moments)
        if self.moments.n_rows:
            variance = self.moments.squares / self.moments.n_rows
            with torch.no_grad():
                self.mean.copy_(torch.as_tensor(self.moments.mean))
                self.std.copy_(torch.as_tensor(np.sqrt(variance + self.epsilon)))

    def get_extra_state(self) -> torch.Tensor:
        """The exact sums, as one tensor for the `state_dict`."""
        n_rows, mean, squares = self.moments
        return torch.from_numpy(np.concatenate([[n_rows], np.ravel(mean), np.ravel(squares)]))

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Restore what `get_extra_state` has returned."""
        values, n = state.cpu().numpy().astype(np.float64), int(np.prod(self.shape))
        mean, squares = values[1 : n + 1], values[n + 1 : 2 * n + 1]
        self.moments = Moments(float(values[0]), mean.reshape(self.shape), squares.reshape(self.shape))


class ObservationNorm(RunningStatistics):
    """A layer that normalizes observations: `clamp((x - mean) / std, -clip, clip)`.

    Use it in your model, and call `update` with each batch, after training and before `agent.sync_shared_memory()`.
    Before the first `update`, mean is 0 and std is 1. Equal batches give equal statistics, so the number of workers
    does not matter.

    Args:
        shape: the shape of one observation, or of one field of a Dict observation: `observation_space.shape`. It may
            also be the shape of the last dimensions only: `(3,)` has one mean for each channel of `[H, W, 3]` images.
        clip: the largest absolute value of an output.
        epsilon: added to the variance.
    """

    def __init__(self, shape: int | tuple[int, ...], *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__((shape,) if isinstance(shape, int) else tuple(shape), clip, epsilon)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """The normalized observations, in the shape of `observation` `[..., *shape]`."""
        return ((observation - self.mean) / self.std).clamp(-self.clip, self.clip)

    def moments_of(self, observation: Any, valid: Any = None) -> Moments:
        """The moments of `observation` `[T, B, ...]`, a tensor or an array. This does not change the layer.

        Rows where `valid` `[T, B]` is False do not count. Raises `SpaceError` for another shape, and for NaN or inf.
        """
        rows = _array(observation)
        if rows.shape[rows.ndim - len(self.shape) :] != self.shape:
            raise SpaceError(
                f"ObservationNorm({self.shape}) got observations of shape {rows.shape}: their last dimensions must be "
                f"{self.shape}"
            )
        if valid is not None:
            rows = rows[_array(valid)]
        return Moments.of(rows.reshape(-1, *self.shape))

    def update(self, observation: Any, valid: Any = None) -> None:
        """Add a batch to the statistics; arguments as in `moments_of`."""
        self.merge(self.moments_of(observation, valid))


class RewardNorm(RunningStatistics):
    """A layer that scales rewards: `clamp(reward / std, -clip, clip)`, where `std` is the standard deviation of the
    discounted returns so far.

    Call it in the learner. Make it a part of the model, so that it is saved with the model. Before the first `update`,
    std is 1.

    The return of a step is `reward + discount * the return of the step before`, and starts at 0 in each episode, as in
    Gymnasium's `NormalizeReward` and Stable-Baselines3's `VecNormalize`. It continues from one batch to the next.
    """

    def __init__(self, discount: float = 0.99, *, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__((), clip, epsilon)
        self.discount = discount
        self._returns: _Array = np.zeros(0)  # [B], of the last step; 0 where an episode has ended

    def forward(self, reward: torch.Tensor) -> torch.Tensor:
        """The scaled rewards, in the shape of `reward`."""
        return (reward / self.std).clamp(-self.clip, self.clip)

    def moments_of(self, reward: Any, done: Any, valid: Any = None) -> Moments:
        """The moments of the discounted returns of a batch: `reward`, `done` and `valid` are `[T, B]`. It continues the
        returns of the batch before, so call it once for each batch. It does not change `std`."""
        rewards, ends = _array(reward), _array(done)
        if self._returns.shape != rewards.shape[1:]:  # the first batch, or another number of environments
            self._returns = np.zeros(rewards.shape[1:])
        returns = np.empty(rewards.shape)
        for t in range(len(rewards)):
            self._returns = self._returns * self.discount + rewards[t]
            returns[t] = self._returns
            self._returns[ends[t]] = 0.0
        return Moments.of(returns.ravel() if valid is None else returns[_array(valid)])

    def update(self, reward: Any, done: Any, valid: Any = None) -> None:
        """Add a batch to the statistics; arguments as in `moments_of`."""
        self.merge(self.moments_of(reward, done, valid))

    def get_extra_state(self) -> torch.Tensor:
        return torch.cat([super().get_extra_state(), torch.from_numpy(self._returns)])

    def set_extra_state(self, state: torch.Tensor) -> None:
        super().set_extra_state(state)
        self._returns = state.cpu().numpy().astype(np.float64)[3:]


def _array(value: object) -> _Array:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
