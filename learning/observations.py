"""Observations of positions: as they were recorded, or stacks of frames that are built again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays
from penstock.buffers.named import ArrayTree
from penstock.errors import SpaceError
from penstock.learning.compiled import PYTHON, compiled
from penstock.learning.options import Frames
from penstock.learning.ring import BEGINS, PARTIAL, TERMINATED, TRUNCATED, Ring
from penstock.learning.windows import Positions, Windows


@compiled
def read_ages(
    flags: npt.NDArray[Any], at: npt.NDArray[Any], B: int, back: int, age: npt.NDArray[Any], known: npt.NDArray[Any]
) -> None:
    """Fill the last two arrays `[N]` for the entries `at` `[N]` of a ring with B columns and these `flags`; see
    `FrameStacks.ages`."""
    rows = (at - np.arange(back + 1)[:, None] * B) % len(flags)
    row_flags = flags.take(rows)
    begins = (row_flags & BEGINS) != 0
    begins[-1] = True
    age[:] = begins.argmax(0)
    first = np.take_along_axis(row_flags, age[None], 0)[0]
    known[:] = (age == back) | ((first & PARTIAL) == 0)


@compiled
def take_frames(frames: npt.NDArray[Any], B: int, is_zero: bool, *stacks: npt.NDArray[Any]) -> bool:
    """`take_frames(frames, B, is_zero, at, age, out[, at, age, out])`: build the stacks `out` `[N, n, ...]` of entries
    `at` `[N]` again, from the `frames` of the ring. Frames before the beginning of the episode, `age` rows back, are
    zeros or copies of the first one. The compiled function returns False, and copies nothing, if it does not know the
    layout."""
    for at, age, out in zip(stacks[::3], stacks[1::3], stacks[2::3], strict=True):
        back = np.arange(out.shape[1])[::-1]  # how many rows back each frame is, oldest first
        limit = age[:, None]
        frames.take((at[:, None] - np.minimum(back, limit) * B) % len(frames), 0, out, mode="clip")
        if is_zero:
            out[back > limit] = 0
    return True


@compiled
def take_rows(source: npt.NDArray[Any], at: npt.NDArray[Any], out: npt.NDArray[Any]) -> bool:
    """Copy the entries `at` `[...]` of `source` `[size, ...]` into `out` `[..., ...]`. The compiled function returns
    False, and copies nothing, if it does not know the layout."""
    source.take(at, 0, out, mode="clip")  # with mode="raise", numpy would copy into a buffer first
    return True


class WholeObservations:
    """Observations that are stored as they are."""

    back = 0  #: how many rows before a position its observation needs

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def ages(self, at: Positions) -> Any:
        """What `is_known` and `take` need to know of entries `at` `[N]`."""

    def is_known(self, ages: object) -> npt.NDArray[np.bool_] | bool:
        """Whether all that the observations of these entries consist of is in the ring."""
        return True

    def take(self, at: Positions, out: ArrayTree | None = None) -> Any:
        """The observations of entries `at`, in its shape."""
        return take(self._ring.observation, at, out)

    def take_both(
        self, windows: Windows, ages: object, out: ArrayTree | None = None, out_next: ArrayTree | None = None
    ) -> tuple[Any, Any]:
        """The observations `[N, ...]` at the windows' first steps, and those after the windows: the final one after a
        truncation, zero after a termination. `ages`: those of `windows.at`."""
        next_obs = take(self._ring.observation, windows.after, out_next)
        if windows.truncated.size:
            next_obs[windows.truncated] = self._ring.final_obs(windows.last[windows.truncated])
        if windows.terminated.size:
            next_obs[windows.terminated] = 0
        return take(self._ring.observation, windows.at, out), next_obs


class FrameStacks:
    """Stacks `[n, ...]` of frames. The ring holds the newest frame of each stack; the older ones are in the rows before
    it. The methods are those of `WholeObservations`."""

    def __init__(self, ring: Ring, frames: Frames) -> None:
        self._ring, self._frames = ring, frames
        self.back = frames.n - 1

    def ages(self, at: Positions) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """How many rows back the episode began `[N]`, at most `back`, and whether the frames before are known `[N]`:
        they are not if it began in a row that is PARTIAL."""
        age, known = np.empty(len(at), np.int64), np.empty(len(at), np.bool_)
        read_ages(self._ring.flags, at, self._ring.B, self.back, age, known)
        return age, known

    def is_known(self, ages: tuple[Positions, npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_] | bool:
        known: npt.NDArray[np.bool_] = ages[1]
        return known

    def take(self, at: Positions, out: npt.NDArray[Any] | None = None) -> Any:
        flat = at.reshape(-1)
        out = self._memory(at.shape, out)
        self._build((flat, self.ages(flat)[0], out.reshape(len(flat), *out.shape[at.ndim :])))
        return out

    def take_both(
        self,
        windows: Windows,
        ages: tuple[Positions, npt.NDArray[np.bool_]],
        out: npt.NDArray[Any] | None = None,
        out_next: npt.NDArray[Any] | None = None,
    ) -> tuple[Any, Any]:
        after = windows.after
        if windows.truncated.size or windows.terminated.size:
            ends = np.concatenate([windows.truncated, windows.terminated])
            after = after.copy()
            after[ends] = windows.last[ends]  # a row of the same episode
        stacks, next_stacks = (self._memory(after.shape, memory) for memory in (out, out_next))
        self._build((windows.at, ages[0], stacks), (after, self.ages(after)[0], next_stacks))
        if windows.truncated.size:
            which = windows.truncated  # these move on by one frame, the final observation
            next_stacks[which, :-1] = next_stacks[which, 1:]
            next_stacks[which, -1] = self._ring.final_obs(windows.last[which])
        if windows.terminated.size:
            next_stacks[windows.terminated] = 0
        return stacks, next_stacks

    def _memory(self, shape: tuple[int, ...], out: npt.NDArray[Any] | None) -> Any:
        frames = self._ring.observation
        return np.empty((*shape, self._frames.n, *frames.shape[1:]), frames.dtype) if out is None else out

    def _build(self, *stacks: tuple[Any, Any, Any]) -> None:
        """Build the stacks of entries, with these ages, into memory: for each of `stacks`."""
        ring, is_zero = self._ring, self._frames.padding == "zero"
        arguments = ring.observation, ring.B, is_zero, *itertools.chain.from_iterable(stacks)
        if not take_frames(*arguments):
            PYTHON["take_frames"](*arguments)


def newest_frames(stacks: npt.NDArray[Any]) -> Any:
    """The newest frames `[..., H, W]` of stacks `[t, B, n, H, W]`."""
    return stacks[:, :, -1]


def check_frames(
    frames: Frames,
    stacks: npt.NDArray[Any],
    final_obs: npt.NDArray[Any] | None,
    flags: npt.NDArray[np.uint8],
    rows: Iterable[int],
) -> None:
    """Raise `SpaceError` unless the observations `[t, B, n, ...]` in `rows` are stacks of the rows before.

    `rows` are indices of at least 1. `final_obs` may be None.
    """
    for t in rows:
        begins = (flags[t] & BEGINS) != 0
        ok = (stacks[t, ~begins, :-1] == stacks[t - 1, ~begins, 1:]).all()
        started = stacks[t, begins]
        padding = started[:, -1:] if frames.padding == "reset" else np.zeros_like(started[:, -1:])
        ok = ok and (started[:, :-1] == padding).all()
        if ok and final_obs is not None:
            ends = (flags[t] & (TERMINATED | TRUNCATED)) != 0
            ok = (final_obs[t, ends, :-1] == stacks[t, ends, 1:]).all()
        if not ok:
            raise SpaceError(
                f"row {t} of the batch is no stack of the last {frames.n} frames, oldest first, with "
                f'padding="{frames.padding}": remove frames={frames}, or stack frames as Gymnasium\'s '
                "FrameStackObservation does"
            )


def take(source: ArrayTree, at: Positions, out: Any = None) -> Any:
    """Entries `at` of every leaf of `source`, into the leaves of `out` if it is given."""
    if isinstance(source, NamedArrays):
        return NamedArrays({n: take(v, at, None if out is None else out[n]) for n, v in source.items()})
    if out is None:
        out = np.empty((*at.shape, *source.shape[1:]), source.dtype)
    if not take_rows(source, at, out):
        PYTHON["take_rows"](source, at, out)
    return out
