"""The options of a replay: priorities, sequences, frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.arguments import integer
from penstock.errors import ConfigError, brief

FINITE = float(np.finfo(np.float64).max)  #: the largest number that is finite


def require_number(name: str, value: Any, highest: float) -> float:
    """`value` as a float of Python. Raises `ConfigError` if it is not a number from 0 to `highest`."""
    try:
        number = np.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several numbers, for example
        number = np.nan
    if not 0 <= number <= highest:
        wanted = "a finite number of at least 0" if highest == FINITE else f"from 0 to {highest:g}"
        raise ConfigError(f"{name} must be {wanted}, got {brief(value)}")
    return number


@dataclass(frozen=True)
class Prioritized:
    """Draw with probabilities in proportion to `priority ** alpha` (Schaul et al. 2016).

    The batch gets `weight` = (N * probability) ** -beta, divided by the largest weight of the batch. A new step gets
    the largest priority that is in the replay at that moment. `replay.alpha` and `replay.beta` can be set later.

    A priority below `min_priority` counts as `min_priority`, so a step with an error of 0 is drawn again. With
    `min_priority=0`, a step with priority 0 is never drawn.
    """

    alpha: float = 0.6
    beta: float = 0.4
    min_priority: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "min_priority"):
            object.__setattr__(self, name, require_number(name, getattr(self, name), FINITE))


@dataclass(frozen=True)
class Sequences:
    """Draw sequences of `length` steps. The first `burn_in` only prepare the state of a recurrent model: `mask` is
    False there.

    Sequences start at every `state_every`-th step. If the agent records its recurrent state (`prev_rnn_state`), the
    replay keeps the states of these steps only. Agents with `record_state="batch"` need `state_every=batch_T`.
    """

    length: int = 80
    burn_in: int = 0
    state_every: int = 1

    def __post_init__(self) -> None:
        for name, lowest in (("length", 1), ("burn_in", 0), ("state_every", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), lowest))
        if self.burn_in >= self.length:
            raise ConfigError(
                f"burn_in={self.burn_in} leaves nothing of sequences of length={self.length} to train on: lower burn_in"
            )


@dataclass(frozen=True)
class Frames:
    """Observations are stacks `[n, ...]` of the last n frames, oldest first. The replay keeps the newest frame only.

    `padding` says what stands before an episode's first frame: `"reset"` (copies of it) or `"zero"`, as in Gymnasium's
    `FrameStackObservation`.
    """

    n: int = 4
    padding: Literal["reset", "zero"] = "reset"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n, 2))
        if self.padding not in ("reset", "zero"):
            raise ConfigError(f'padding must be "reset" or "zero", got {self.padding!r}')
