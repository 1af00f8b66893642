"""The memory of a replay: a ring of rows `[T, B]`, and the words that say which rows are whole.

Steps count up and never wrap; step s lies in row s % T. Each writer owns some columns and two words: `begun`, the step
up to which it writes, and `done`, the step up to which it has written. A writer sets `begun`, copies, and sets `done`.
A reader copies rows out, and then reads `begun` again: rows of steps before `begun - T` may have been overwritten.
No lock is needed, and what a killed writer has left between `done` and `begun` is never read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import ArraySpec, NamedArrays, NamedMemory
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.memory_limits import size_text
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.ordering import fence
from penstock.buffers.tree import tree_leaves
from penstock.errors import ConfigError
from penstock.learning.compiled import PYTHON, compiled

# The flags of a row. BEGINS: the row does not continue the row before it. PARTIAL: it also does not begin an episode,
# so what came before it is unknown. CUT: the episode goes on, but the row after it is no step and has only the next
# observation, since with own clocks the rows of a column may end before those of the batch. RESUMES: the row continues
# the last step of its column, which is CUT; it also has BEGINS and PARTIAL, since the row before it is another one.
VALID, TERMINATED, TRUNCATED, BEGINS, PARTIAL, CUT, RESUMES = 1, 2, 4, 8, 16, 32, 64

_REMEDY = (
    "lower capacity, use frames=Frames(n) if observations are stacks, or put the replay into a file with file=PATH. "
    "replay.estimate(...) shows what takes how much"
)
_WORDS = 16  # int64 numbers per writer: 128 bytes, so that no two writers share a cache line
NOWHERE = -(1 << 62)  #: the number, or the step, of a final observation that is lost
_STEP, _FINAL, _LOST = 0, 1, 2  # in these words: the step, the number of final observations, and in `done` of lost ones


@compiled
def copy_rows(targets: Sequence[Any], sources: Sequence[Any], row: int, column: int) -> bool:
    """Copy the arrays `sources` `[t, b, ...]` into the rows from `row` on of `targets` `[T, B, ...]`, which wrap once,
    from `column` on. The compiled function returns False, and copies nothing, if it does not know the layout of an
    array."""
    for target, source in zip(targets, sources, strict=True):
        _put(target, slice(column, column + source.shape[1]), row, row + len(source), source)
    return True


@dataclass(frozen=True)
class Shape:
    """The size of a ring, and examples of one step's data."""

    T: int
    B: int
    observation: Any  # an array, or `NamedArrays`, of one step; with frames: of one frame
    action: Any
    more: NamedArrays | None = None  # other fields that are kept: `env_info` and `extra` of the samples
    state: Any = None  # the recurrent state, kept for every `state_every`-th step
    state_every: int = 1
    max_finals: int = 1  # final observations that each writer keeps
    spare_finals: int = 0  # how many of these are not drawn, since a writer may be overwriting them: see `Ring.pin`
    n_writers: int = 1
    writer_columns: tuple[int, ...] = ()  # how many columns each writer has; empty: the numbers differ by at most one

    @property
    def n_finals(self) -> int:
        """Final observations that are kept to be drawn, of all writers."""
        return (self.max_finals - self.spare_finals) * self.n_writers

    def specs(self) -> NamedArrays:
        """The arrays to allocate."""

        def rows(example: object, *leading: int) -> Any:
            return map_leaves(lambda leaf: ArraySpec.like(leaf, *leading), example)

        T, B = self.T, self.B
        fields = {
            "observation": rows(self.observation, T, B),
            "action": rows(self.action, T, B),
            "reward": rows(np.float32(0), T, B),
            "flags": rows(np.uint8(0), T, B),
            "final": rows(np.int64(0), T, B),  # where TRUNCATED: number of the final observation
            "policy_version": rows(np.int32(0), T, B),
            "final_obs": rows(self.observation, self.n_writers, self.max_finals),
            "final_step": rows(np.int64(0), self.n_writers, self.max_finals),
            "begun": rows(np.int64(0), self.n_writers, _WORDS),
            "done": rows(np.int64(0), self.n_writers, _WORDS),
        }
        for name, example in () if self.more is None else self.more.items():
            fields[name] = rows(example, T, B)
        if self.state is not None:
            fields["state"] = rows(self.state, T // self.state_every, B)
        return NamedArrays(fields)


class Ring:
    """Rows `[T, B]` of steps, with `write` for writers and the rest for the reader.

    With `file`, the arrays are in this file, which has no name while it is used: its space is freed when the last
    process that has mapped it ends. With `shared`, workers get the memory, or the file, when they are started.

    Raises `ConfigError` if there is not enough memory, or not enough space for the file.
    """

    def __init__(self, shape: Shape, *, shared: bool = False, file: str | os.PathLike[str] | None = None) -> None:
        self.shape, self.is_shared = shape, shared
        self.memory: NamedMemory
        if file is None:
            self.memory = NamedMemory(shape.specs(), shared=shared, purpose="the replay", remedy=_REMEDY)
        else:
            self.memory = _FileMemory(shape.specs(), Path(file))
            if not shared:
                self.memory.close()
        self._bind(self.memory.arrays)

    def _bind(self, arrays: NamedArrays) -> None:
        self.T, self.B, self.size = self.shape.T, self.shape.B, self.shape.T * self.shape.B
        self.arrays = arrays
        self._begun, self._done = arrays.begun, arrays.done
        self._words = [(self._begun[writer], self._done[writer]) for writer in range(self.shape.n_writers)]
        observation, action = leaves(arrays.observation), leaves(arrays.action)
        #: The arrays `[T, B, ...]` that get a row for each step, in the order in which `write` takes them.
        more = NamedArrays(
            {} if (more_specs := self.shape.more) is None else {name: arrays[name] for name, _ in more_specs.items()}
        )
        self.leaves = (arrays.flags, arrays.reward, arrays.policy_version, *observation, *action, *leaves(more))
        #: The arrays that a batch repeats in its `prev_reward` and `prev_action`.
        self.kept = (arrays.reward, *action)
        self._oldest = 0  # no row before this step was ever written
        self._pinned: _Pinned | None = None
        self._writer_of = writers_of(self.shape)
        bounds = np.searchsorted(self._writer_of, np.arange(self.shape.n_writers + 1)).tolist()
        self._columns = [slice(first, last) for first, last in pairwise(bounds)]

        def flat(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return leaf.reshape(self.size, *leaf.shape[2:])

        # `[T * B, ...]`: position p is entry p % (T * B)
        self.observation, self.action = map_leaves(flat, arrays.observation), map_leaves(flat, arrays.action)
        self.reward, self.flags, self.final = flat(arrays.reward), flat(arrays.flags), flat(arrays.final)
        self.policy_version = flat(arrays.policy_version)
        self.more: dict[str, Any] = {name: map_leaves(flat, value) for name, value in more.items()}

    def __getstate__(self) -> tuple[Shape, Any]:
        return self.shape, self.memory

    def __setstate__(self, state: tuple[Shape, Any]) -> None:
        self.shape, self.memory = state
        self.is_shared = True
        self._bind(self.memory.arrays)

    # ---- for the reader --------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest step that no writer overwrites yet."""
        if self._pinned is not None:
            return max(self._pinned.begun - self.T, self._oldest)
        begun = self._begun[0, _STEP] if len(self._begun) == 1 else self._begun[:, _STEP].max()
        return max(int(begun) - self.T, self._oldest)

    @property
    def end(self) -> int:
        """The step after the newest that all writers have written."""
        if self._pinned is not None:
            return self._pinned.end
        if not self.is_shared:
            return int(self._done[0, _STEP])
        end = int(self._done[:, _STEP].min())
        fence()  # the rows are read after this word
        return end

    def pin(self, end: int, begun: int) -> None:
        """From now on, the reader sees the steps up to `end`, and takes the steps up to `begun` for begun, however far
        the writers have come: what it reads does not depend on their timing. They must have written `end`, and must not
        begin more than `begun`. Between the two, a writer may have up to `spare_finals` final observations.

        If `end` is another one than before, no writer may write at the moment.
        """
        fence()  # the rows are read after the news that they are written
        before = self._pinned
        n_finals = self._done[:, _FINAL].copy() if before is None or before.end != end else before.n_finals
        self._pinned = _Pinned(end, begun, n_finals)

    @property
    def n_finals(self) -> list[int]:
        """How many final observations each writer has ever written."""
        return [int(n) for n in self._done[:, _FINAL]]

    @property
    def n_lost(self) -> int:
        """Truncated steps whose final observation was overwritten before they were."""
        return int(self._done[0, _LOST] if len(self._words) == 1 else self._done[:, _LOST].sum())

    def resume(self, first: int, end: int, n_finals: Sequence[int], n_lost: int = 0) -> None:
        """Let the writers continue at step `end`. The rows from `first` on are there."""
        self._oldest = first
        for words in (self._begun, self._done):
            words[:, _STEP], words[:, _FINAL] = end, n_finals
        self._done[0, _LOST] = n_lost

    def has_final(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the final observations of the truncated steps in entries `at` `[n]` are still there."""
        first, pinned = self._begun[:, _FINAL] - self.shape.max_finals, self._pinned
        if pinned is not None:
            first = pinned.n_finals + self.shape.spare_finals - self.shape.max_finals
        kept: npt.NDArray[np.bool_] = self.final[at] >= first[self._writer_of[at % self.B]]
        return kept

    def final_obs(self, at: npt.NDArray[np.int64]) -> Any:
        """The final observations `[n, ...]` of the truncated steps in entries `at` `[n]`."""
        writer, place = self._writer_of[at % self.B], self.final[at] % self.shape.max_finals
        return map_leaves(lambda leaf: leaf[writer, place], self.arrays.final_obs)

    # ---- for writers -----------------------------------------------------------------------

    def written(self, writer: int) -> int:
        """The step up to which `writer` has written."""
        return int(self._done[writer, _STEP])

    def columns(self, writer: int) -> slice:
        """The columns that `writer` owns."""
        return self._columns[writer]

    def write(
        self, rows: tuple[Any, ...], finals: ArrayTree | None, writer: int = 0, state: ArrayTree | None = None
    ) -> None:
        """Write the next rows: arrays `[t, b, ...]` for the writer's b columns, t <= T, in the order of `leaves`.

        `finals` `[n, ...]` are the final observations of the truncated steps, in the order of numpy.nonzero; None if
        there are none. `state` has the rows of steps that are multiples of `state_every`.
        """
        columns, flags = self._columns[writer], rows[0]
        begun, done = self._words[writer]
        start, first_final = int(done[_STEP]), int(done[_FINAL])
        end, end_final = start + len(flags), first_final + (0 if finals is None else len(leaves(finals)[0]))
        if begun[_STEP] > start:  # a writer has died in this batch: of its steps, none may be counted as lost later
            steps = self.arrays.final_step[writer]
            steps[steps >= start] = NOWHERE
        # Never lower: a writer that has died may have overwritten more final observations than this batch has.
        begun[_FINAL], begun[_STEP] = max(end_final, int(begun[_FINAL])), end
        fence()
        if not copy_rows(self.leaves, rows, start % self.T, columns.start):
            PYTHON["copy_rows"](self.leaves, rows, start % self.T, columns.start)
        if state is not None:
            every = self.shape.state_every
            _put(self.arrays.state, columns, -(-start // every), -(-end // every), state)
        if finals is not None:
            done[_LOST] += self._write_finals(flags, finals, writer)
        fence()
        done[_FINAL], done[_STEP] = end_final, end

    def _write_finals(self, flags: npt.NDArray[np.uint8], finals: ArrayTree, writer: int) -> int:
        """Returns how many truncated steps are in the ring whose final observation is now overwritten."""
        start, first = (int(word) for word in self._done[writer, [_STEP, _FINAL]])
        row, column = np.nonzero(lacks_next(flags))
        number, step = np.arange(first, first + len(row)), start + row
        self.arrays.final[step % self.T, column + self.columns(writer).start] = number
        size, n_drawn = self.shape.max_finals, self.shape.max_finals - self.shape.spare_finals
        steps = self.arrays.final_step[writer]
        lost = number[:n_drawn] - n_drawn  # of which the new ones take the places, among those that are drawn
        is_in_ring = (lost >= 0) & (steps[lost % size] >= start + len(flags) - self.T)
        n_lost = len(number[n_drawn:]) + int(is_in_ring.sum())
        n_kept = min(len(number), size)  # the newest
        place = number[-n_kept:] % size
        steps[place] = step[-n_kept:]

        newest = map_leaves(lambda leaf: leaf[-n_kept:], finals)
        self.arrays.final_obs[writer, place] = newest
        return n_lost


@dataclass(frozen=True)
class _Pinned:
    """What the reader sees, after `Ring.pin`."""

    end: int
    begun: int
    n_finals: npt.NDArray[np.int64]  # final observations that each writer has written before `end`


def writers_of(shape: Shape) -> npt.NDArray[np.intp]:
    """The writer of each column. Each has consecutive columns."""
    n = shape.n_writers
    size, n_longer = divmod(shape.B, n)
    sizes = shape.writer_columns or [size + (writer < n_longer) for writer in range(n)]
    return np.repeat(np.arange(n), sizes)


def lacks_next(flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where an episode was truncated and not terminated: the value after it is that of the final observation."""
    lacks: npt.NDArray[np.bool_] = (flags & (VALID | TRUNCATED | TERMINATED)) == (VALID | TRUNCATED)
    return lacks


def leaves(tree: object) -> tuple[Any, ...]:
    """The arrays of a tree, in order."""
    return tuple(leaf for _, leaf in tree_leaves(tree))


def _put(target: ArrayTree, columns: slice, first: int, end: int, source: ArrayTree) -> None:
    """Write `source` into the rows of the steps from `first` to `end`, with at most one wrap."""
    for _, rows, values in tree_leaves(target, "", source):
        T = len(rows)
        row, stop = first % T, first % T + end - first
        fits = min(stop, T) - row
        rows[row : row + fits, columns] = values[:fits]
        rows[: stop - row - fits, columns] = values[fits:]


class _FileMemory(NamedMemory):
    """Zeroed arrays in a new file, whose name is removed at once. A worker maps the same file when it is started."""

    def __init__(self, specs: NamedArrays, path: Path) -> None:
        self._lay_out(specs)
        try:
            descriptor = InheritedFd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            raise ConfigError(f"file={str(path)!r} exists: remove it, or choose another name") from None
        except OSError as error:
            raise ConfigError(f"file={str(path)!r} cannot be made: {error.strerror}") from error
        try:
            path.unlink()
            self._allocate(descriptor)
        except OSError as error:
            raise ConfigError(
                f"the replay needs {self.nbytes / 2**30:,.2f} GiB in file={str(path)!r}: {error.strerror}. Lower "
                "capacity, or choose another disk"
            ) from error

    def _map(self, fd: int) -> None:
        super()._map(fd)
        self._buffer.madvise(mmap.MADV_RANDOM)  # samples are drawn at random, so reading ahead only takes time


@dataclass(frozen=True)
class Estimate:
    """Bytes of each array of a replay. Printed, it is a table."""

    n_steps: int
    nbytes: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(self.nbytes.values())

    @classmethod
    def of(cls, shape: Shape, tree_nbytes: int = 0) -> Estimate:
        """The estimate for a ring of this shape, and a tree of priorities of `tree_nbytes` bytes (0: none)."""
        nbytes = {name: spec.nbytes for name, spec in shape.specs().leaves()}
        if tree_nbytes:
            nbytes["priorities"] = tree_nbytes
        return cls(shape.T * shape.B, nbytes)

    def __str__(self) -> str:
        lines = [f"{'a replay of':>24}  {self.n_steps:,} steps"]
        lines += [f"{name:>24}  {size_text(nbytes)}" for name, nbytes in self.nbytes.items()]
        return "\n".join([*lines, f"{'total':>24}  {size_text(self.total)}"])
