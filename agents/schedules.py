"""Settings of agents that depend on the iteration or on the environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arguments import must_be
from penstock.errors import ConfigError

#: One number for all environments, or one per environment in the order of env_ranks, or a function of `itr` that
#: returns either. Each worker calls the function itself.
Setting = float | Sequence[float] | npt.NDArray[Any] | Callable[[int], Any]


@dataclass(frozen=True)
class LinearSchedule:
    """Goes from `start` at itr 0 to `end` at itr `n_itrs` in equal steps, and then stays at `end`.

    Raises `ConfigError` unless `n_itrs` is at least 1.
    """

    start: float
    end: float
    n_itrs: int

    def __post_init__(self) -> None:
        fits = isinstance(self.n_itrs, int | float | np.integer | np.floating) and self.n_itrs >= 1
        must_be("n_itrs of a LinearSchedule", self.n_itrs, fits, "at least 1")

    def __call__(self, itr: int) -> float:
        done = min(max(itr / self.n_itrs, 0.0), 1.0)
        return (1.0 - done) * self.start + done * self.end


@dataclass(frozen=True)
class ExponentialSchedule:
    """`start * rate ** itr`, but not less than `end`."""

    start: float
    rate: float
    end: float = 0.0

    def __call__(self, itr: int) -> float:
        return float(max(self.start * self.rate**itr, self.end))


class ColumnSetting:
    """The values of a `Setting` for the columns of one worker.

    With `spread`, environment i of N gets `value ** (1 + spread * i / (N - 1))`, so that the environments explore
    differently (Ape-X, Horgan et al. 2018, eq. 1, with value 0.4 and spread 7). If the environments of the columns
    are not known, every column gets the value of environment 0.
    """

    def __init__(self, name: str, setting: Setting, highest: float = np.inf, spread: float | None = None) -> None:
        self._name, self._setting, self._highest, self._spread = name, setting, highest, spread
        if not callable(setting):
            self._evaluate(0)  # a wrong value raises now, in the constructor

    def at(
        self, itr: int, n_columns: int, env_ranks: Sequence[int] | None, n_envs: int | None
    ) -> npt.NDArray[np.float64]:
        """The values `[B]` of `n_columns` columns: the environments `env_ranks` of `n_envs`.

        Raises `ConfigError` with the name of the setting if it has a wrong length or is out of range.
        """
        values = self._evaluate(itr)
        if env_ranks is None or n_envs is None:
            return np.full(n_columns, values.flat[0])
        if values.ndim == 1:
            if len(values) != n_envs:
                raise ConfigError(
                    f"{self._name} has {len(values)} values for {n_envs} environments: give one value per environment, "
                    "or one number for all"
                )
            return values.take(env_ranks)
        if self._spread is None:
            return np.full(n_columns, float(values))
        return np.power(float(values), 1.0 + self._spread * np.asarray(env_ranks) / max(n_envs - 1, 1))

    def _evaluate(self, itr: int) -> npt.NDArray[np.float64]:
        given = self._setting(itr) if callable(self._setting) else self._setting
        when = f" at itr {itr}" if callable(self._setting) else ""
        try:
            values = np.asarray(given, np.float64)
        except (TypeError, ValueError):
            values = np.empty((0, 0))
        if values.ndim > 1 or values.size == 0:
            raise ConfigError(
                f"{self._name} must be a number, or one per environment, or a function of itr, got {given!r}{when}"
            )
        if self._spread is not None and values.ndim == 1:
            raise ConfigError(
                f"with spread, {self._name} must be one number, got {given!r}{when}: give one number, or remove spread"
            )
        if not ((values >= 0) & (values <= self._highest) & np.isfinite(values)).all():
            limit = "0 or more" if self._highest == np.inf else f"between 0 and {self._highest:g}"
            raise ConfigError(f"{self._name} must be {limit}, got {given!r}{when}")
        return values
