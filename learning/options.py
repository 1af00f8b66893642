"""The options of a replay: priorities, sequences, frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.arguments import between, check_fields, choice, number
from penstock.errors import ConfigError


@dataclass(frozen=True)
class Prioritized:
    """Draw with probabilities in proportion to `priority ** alpha` (Schaul et al. 2016).

    The batch gets `weight` = (N * probability) ** -beta, divided by the largest weight of the batch. A new step gets
    the largest priority that is in the replay at that moment. `replay.alpha` and `replay.beta` can be set later.

    A priority below `min_priority` counts as `min_priority`, so a step with an error of 0 is drawn again. With
    `min_priority=0`, a step with priority 0 is never drawn.
    """

    alpha: Annotated[float, number] = 0.6
    beta: Annotated[float, number] = 0.4
    min_priority: Annotated[float, number] = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Sequences:
    """Draw sequences of `length` steps. The first `burn_in` only prepare the state of a recurrent model: `mask` is
    False there.

    Sequences start at every `state_every`-th step. If the agent records its recurrent state (`prev_rnn_state`), the
    replay keeps the states of these steps only. Agents with `record_state="batch"` need `state_every=batch_T`.
    """

    length: Annotated[int, between(1)] = 80
    burn_in: Annotated[int, between(0)] = 0
    state_every: Annotated[int, between(1)] = 1

    def __post_init__(self) -> None:
        check_fields(self)
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

    n: Annotated[int, between(2)] = 4
    padding: Annotated[Literal["reset", "zero"], choice("reset", "zero")] = "reset"

    def __post_init__(self) -> None:
        check_fields(self)
