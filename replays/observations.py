"""Observations of positions: as they were recorded, or stacks of frames that are built again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import NamedArrays
from penstock.errors import SpaceError
from penstock.replays.options import Frames
from penstock.replays.ring import BEGINS, PARTIAL, TERMINATED, TRUNCATED, Ring
from penstock.replays.windows import Positions, Windows


class WholeObservations:
    """Observations that are stored as they are."""

    back = 0  #: how many rows before a position its observation needs

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def ages(self, at: Positions) -> Any:
        """What `is_known` and `take` need to know of entries `at` `[N]`."""

    def is_known(self, ages: Any) -> npt.NDArray[np.bool_] | bool:
        """Whether all that the observations of these entries consist of is in the ring."""
        return True

    def take(self, at: Positions, out: Any = None, ages: Any = None) -> Any:
        """The observations of entries `at`, in its shape. `ages`: those of `at`, if they are known already."""
        return take(self._ring.observation, at, out)

    def take_next(self, windows: Windows, out: Any = None) -> Any:
        """The observations `[N, ...]` after the windows: the final one after a truncation, zero after a termination."""
        found = take(self._ring.observation, windows.after, out)
        if windows.truncated.size:
            found[windows.truncated] = self._ring.final_obs(windows.last[windows.truncated])
        if windows.terminated.size:
            found[windows.terminated] = 0
        return found


class FrameStacks:
    """Stacks `[n, ...]` of frames. The ring holds the newest frame of each stack; the older ones are in the rows before
    it. The methods are those of `WholeObservations`."""

    def __init__(self, ring: Ring, frames: Frames) -> None:
        self._ring, self._frames = ring, frames
        self.back = frames.n - 1
        self._offsets = np.arange(frames.n)[::-1] * ring.B  # how far back each frame is, oldest first

    def is_known(self, ages: Any) -> npt.NDArray[np.bool_] | bool:
        age, flags = ages
        first = np.take_along_axis(flags, age[None], 0)[0]
        # If the row where the episode begins is PARTIAL, the frames before it are missing.
        known: npt.NDArray[np.bool_] = (age == self.back) | ((first & PARTIAL) == 0)
        return known

    def take(self, at: Positions, out: Any = None, ages: Any = None) -> Any:
        flat = at.reshape(-1)
        frames, is_padding = self._frame_entries(flat, (ages or self.ages(flat))[0])
        if out is not None:
            out = out.reshape(len(flat), *out.shape[at.ndim :])
        found = take(self._ring.observation, frames, out)
        if self._frames.padding == "zero":
            found[is_padding] = 0
        return found.reshape(*at.shape, *found.shape[1:])

    def take_next(self, windows: Windows, out: Any = None) -> Any:
        at = windows.after.copy()
        ends = np.concatenate([windows.truncated, windows.terminated])
        at[ends] = windows.last[ends]  # a row of the same episode
        found = self.take(at, out)
        if windows.truncated.size:
            self._add_final(found, windows.truncated, windows.last[windows.truncated])
        if windows.terminated.size:
            found[windows.terminated] = 0
        return found

    def _add_final(self, stacks: Any, which: npt.NDArray[np.intp], last: Positions) -> None:
        """Move the stacks `which` on by one frame, the final observations of the steps `last`."""
        older = stacks[which, 1:]
        stacks[which, :-1] = older
        stacks[which, -1] = self._ring.final_obs(last)

    def ages(self, at: Positions) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint8]]:
        """How many rows back the episode began `[N]`, at most `back`, and the flags `[back + 1, N]` of these rows."""
        rows = (at - np.arange(self.back + 1)[:, None] * self._ring.B) % self._ring.size
        flags = self._ring.flags.take(rows)
        begins = (flags & BEGINS) != 0
        begins[-1] = True
        return begins.argmax(0), flags

    def _frame_entries(self, at: Positions, age: npt.NDArray[np.intp]) -> tuple[Positions, npt.NDArray[np.bool_]]:
        """Entries `[N, n]` of the frames of each stack, and where there is only padding."""
        limit = age[:, None] * self._ring.B
        entries = (at[:, None] - np.minimum(self._offsets, limit)) % self._ring.size
        return entries, self._offsets > limit


def newest_frames(stacks: Any) -> Any:
    """The newest frames `[..., H, W]` of stacks `[t, B, n, H, W]`."""
    return stacks[:, :, -1]


def check_frames(frames: Frames, stacks: Any, final_obs: Any, flags: npt.NDArray[np.uint8], rows: Any) -> None:
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


def take(source: Any, at: Positions, out: Any = None) -> Any:
    """Entries `at` of every leaf of `source`, into the leaves of `out` if it is given."""
    if isinstance(source, NamedArrays):
        return NamedArrays({n: take(v, at, None if out is None else out[n]) for n, v in source.items()})
    # With mode="raise", numpy would copy into a buffer first.
    return source.take(at, 0, out, mode="clip")
