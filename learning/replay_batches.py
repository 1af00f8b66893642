"""From positions to batches: transitions over n steps, and sequences for recurrent models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import FixedFields, NamedArrays, map_leaves
from penstock.errors import ConfigError
from penstock.learning.observations import FrameStacks, WholeObservations, take
from penstock.learning.options import Frames, Sequences
from penstock.learning.ring import (
    BEGINS,
    NOWHERE,
    PARTIAL,
    TERMINATED,
    TRUNCATED,
    VALID,
    Ring,
    Shape,
    lacks_next,
    writers_of,
)
from penstock.learning.windows import Positions, WindowReader

if TYPE_CHECKING:
    from torch import Tensor

_FINALS = ("final", "final_obs", "final_step")


def move(old: Ring, new: Ring) -> None:
    """Copy the steps of `old` to `new`. No process may write meanwhile.

    Raises `ConfigError` if the steps have other shapes or dtypes.
    """
    parts = [name for name, _ in old.arrays.items() if name not in ("begun", "done", *_FINALS)]
    layouts = [
        [(name, leaf.shape, leaf.dtype) for name, leaf in ring.arrays.leaves() if name.split(".")[0] in parts]
        for ring in (old, new)
    ]
    if layouts[0] != layouts[1]:
        raise ConfigError(
            f"the replay holds steps of another sampler: it has {layouts[0]}, this sampler gives {layouts[1]}"
        )
    for name in parts:
        new.arrays[name][...] = old.arrays[name]
    n_finals = _move_finals(old, new.arrays, new.shape)
    new.resume(old.first, old.end, n_finals, old.n_lost)


def of_one_writer(ring: Ring) -> tuple[NamedArrays, int, int]:
    """The arrays of `ring` as one writer would have written them, how many final observations there were ever, and how
    many are kept at most. No process may write meanwhile."""
    if not ring.is_shared:
        return ring.arrays, ring.n_finals[0], ring.shape.max_finals
    shape = replace(ring.shape, n_writers=1, writer_columns=(), max_finals=ring.shape.n_finals, spare_finals=0)
    specs = shape.specs()
    finals = {name: map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), specs[name]) for name in _FINALS}
    arrays = NamedArrays({**dict(ring.arrays.items()), **finals})
    (n_finals,) = _move_finals(ring, arrays, shape)
    return arrays, n_finals, shape.max_finals


def _move_finals(old: Ring, arrays: NamedArrays, shape: Shape) -> list[int]:
    """Write the final observations of `old` into `arrays` of this `shape`. Returns their number by writer."""
    positions = np.arange(old.first * old.B, old.end * old.B)  # in the order of time
    at = positions % old.size
    is_truncated = lacks_next(old.flags[at])
    at, steps = at[is_truncated], positions[is_truncated] // old.B
    final = arrays.final.reshape(-1)
    final[at] = NOWHERE
    is_kept = old.has_final(at)
    at, steps = at[is_kept], steps[is_kept]
    writer = writers_of(shape)[at % shape.B]
    counts = []
    for i in range(shape.n_writers):
        written = at[writer == i]
        number = np.arange(len(written))
        final[written] = number
        newest = slice(max(len(written) - shape.max_finals, 0), None)
        place = number[newest] % shape.max_finals
        arrays.final_step[i, place] = steps[writer == i][newest]
        arrays.final_obs[i, place] = old.final_obs(written[newest])
        counts.append(len(written))
    return counts


class ReplayBatch(FixedFields):
    """N transitions. The window of each is n steps, or fewer if the episode ends before. Every field is `[N, ...]`."""

    __slots__ = ()
    observation: Any  #: what the agent acted on
    action: Any  #: the action it took
    return_: Tensor  #: float32, the discounted sum of the rewards of the window, which ends with the episode
    discount: Tensor  #: float32, the factor of the value after the window: discount ** length, 0 after a termination
    next_observation: Any  #: the observation after the window: `final_obs` after a truncation, 0 after a termination
    env_info: NamedArrays  #: of the first step of the window; only if the samples have it
    extra: NamedArrays  #: the same for the fields of a collector
    index: Tensor  #: int64, the absolute position, step * B + b
    weight: Tensor  #: float32, the importance weight; only with priorities


class SequenceBatch(FixedFields):
    """N sequences of `length` steps, and n more for the windows of the last ones. Fields are `[length + n, N, ...]`,
    where no other shape is given."""

    __slots__ = ()
    observation: Any  #: what the agent acted on
    action: Any  #: the action it took
    reward: Tensor  #: float32
    terminated: Tensor  #: bool
    truncated: Tensor  #: bool
    prev_action: Any  #: what the agent got as previous action: 0 at the first step of an episode
    prev_reward: Tensor  #: float32, the same for rewards
    prev_done: Tensor  #: bool, True at the first step of an episode, where the recurrent state is the initial one
    return_: Tensor  #: `[length, N]`, as in `ReplayBatch`
    discount: Tensor  #: `[length, N]`, as in `ReplayBatch`
    next_row: Tensor  #: int64 `[length, N]`, the row of the observation after the window
    mask: Tensor  #: bool `[length, N]`, whether the step counts in the loss: see docs/replay.md
    env_info: NamedArrays  #: only if the samples have it
    extra: NamedArrays  #: the same for the fields of a collector
    state: Any  #: `[N, ...]`, the recurrent state before the first step; only if the agent records it
    index: Tensor  #: int64 `[N]`, the absolute position of the first step
    weight: Tensor  #: float32 `[N]`; only with priorities


class TransitionReader:
    """Reads `ReplayBatch`es. Every step is a place to draw."""

    every = 1  #: steps from one place to the next

    def __init__(self, ring: Ring, windows: WindowReader, frames: Frames | None) -> None:
        self._ring, self._windows = ring, windows
        self._observations = WholeObservations(ring) if frames is None else FrameStacks(ring, frames)
        self.back = self._observations.back  #: how many rows before a position its fields need
        self.ahead = windows.n_step  #: how many rows after it

    def eligible(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Whether each of `positions` `[N]` may be drawn. All must be within the bounds."""
        windows = self._windows.read(positions)
        return windows.eligible & self._observations.is_known(self._observations.ages(windows.at))

    def waits(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Whether the window of each of `positions` `[N]` is not complete yet."""
        return self._windows.read(positions).waits

    def read(self, positions: Positions, out: ReplayBatch | None = None) -> dict[str, Any] | None:
        """The fields of a batch, or None if one of `positions` is not eligible. `out`: memory for the large fields."""
        windows = self._windows.read(positions)
        ages = self._observations.ages(windows.at)
        if not (windows.eligible & self._observations.is_known(ages)).all():
            return None
        memory = _field(out, "observation"), _field(out, "next_observation")
        observation, next_observation = self._observations.take_both(windows, ages, *memory)
        return {
            "observation": observation,
            "action": take(self._ring.action, windows.at, _field(out, "action")),
            "return_": windows.return_,
            "discount": windows.discount,
            "next_observation": next_observation,
            **{name: take(value, windows.at) for name, value in self._ring.more.items()},
        }


class SequenceReader:
    """Reads `SequenceBatch`es. Every `state_every`-th step is a place to draw."""

    def __init__(self, ring: Ring, windows: WindowReader, frames: Frames | None, sequences: Sequences) -> None:
        self._ring, self._windows, self._sequences = ring, windows, sequences
        self._observations = WholeObservations(ring) if frames is None else FrameStacks(ring, frames)
        self.every = sequences.state_every
        self.back = 1 + self._observations.back
        self._n_rows = sequences.length + windows.n_step
        self.ahead = self._n_rows - 1
        # From one row before the sequence, which has the previous action and reward of its first step.
        self._rows = np.arange(-1, self._n_rows)[:, None] * ring.B

    def eligible(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Whether a sequence may start at each of `positions` `[N]`. All must be within the bounds."""
        at = (positions + self._rows) % self._ring.size
        flags = self._ring.flags.take(at[1:])
        eligible: npt.NDArray[np.bool_] = ((flags & PARTIAL) == 0).all(0) & ((flags[0] & VALID) != 0)
        return eligible & self._observations.is_known(self._observations.ages(at[1]))

    def waits(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """No sequence waits: its rows follow each other."""
        return np.zeros(len(positions), np.bool_)

    def read(self, positions: Positions, out: SequenceBatch | None = None) -> dict[str, Any] | None:
        """The fields of a batch, or None if one of `positions` is not eligible. `out`: memory for the observations."""
        if not self.eligible(positions).all():
            return None
        ring, length = self._ring, self._sequences.length
        at = (positions + self._rows) % ring.size
        flags, before, rows = ring.flags.take(at[1:]), at[:-1], at[1:]
        begins = (flags & BEGINS) != 0
        prev_action, prev_reward = take(ring.action, before), ring.reward.take(before)
        prev_action[begins], prev_reward[begins] = 0, 0

        starts = positions + self._rows[1 : length + 1]
        windows = self._windows.read(starts.reshape(-1))
        mask = windows.eligible
        mask[windows.truncated] = False  # the value after it is that of the final observation, which is not in the rows
        mask = mask.reshape(starts.shape)
        mask[: self._sequences.burn_in] = False
        n_rows_ahead = (windows.after - windows.at) % ring.size // ring.B
        fields = {
            "observation": self._observations.take(rows, _field(out, "observation")),
            "action": take(ring.action, rows),
            "reward": ring.reward.take(rows),
            "terminated": (flags & TERMINATED) != 0,
            "truncated": (flags & TRUNCATED) != 0,
            "prev_action": prev_action,
            "prev_reward": prev_reward,
            "prev_done": begins,
            "return_": windows.return_.reshape(starts.shape),
            "discount": windows.discount.reshape(starts.shape),
            "next_row": n_rows_ahead.reshape(starts.shape) + np.arange(length)[:, None],
            "mask": mask,
            **{name: take(value, rows) for name, value in ring.more.items()},
        }
        if "state" in ring.arrays:
            number, column = positions // ring.B // self.every, positions % ring.B
            fields["state"] = ring.arrays.state[number % (ring.T // self.every), column]
        return fields


def _field(out: NamedArrays | None, name: str) -> Any:
    """The memory for this field; None if it is to be allocated."""
    return getattr(out, name, None)
