"""The memory of a replay: a ring of rows `[T, B]`, and the words that say which rows are whole.

Steps count up and never wrap; step s lies in row s % T. Each writer owns some columns and two words: `begun`, the step
up to which it writes, and `done`, the step up to which it has written. A writer sets `begun`, copies, and sets `done`.
A reader copies rows out, and then reads `begun` again: rows of steps before `begun - T` may have been overwritten.
No lock is needed, and what a killed writer has left between `done` and `begun` is never read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers import ArraySpec, NamedArrays, NamedMemory
from penstock.buffers.memory_limits import free_memory
from penstock.buffers.named import map_leaves
from penstock.buffers.ordering import fence
from penstock.errors import ConfigError

# The flags of a row. BEGINS: the row does not continue the row before it. PARTIAL: it also does not begin an episode,
# so what came before it is unknown.
VALID, TERMINATED, TRUNCATED, BEGINS, PARTIAL = 1, 2, 4, 8, 16

_WORDS = 16  # int64 numbers per writer: 128 bytes, so that no two writers share a cache line
_STEP, _FINAL = 0, 1  # in these words: the step, and the number of final observations


@dataclass(frozen=True)
class Shape:
    """The size of a ring, and examples of one step's data."""

    T: int
    B: int
    observation: Any  # an array, or `NamedArrays`, of one step; with frames: of one frame
    action: Any
    state: Any = None  # the recurrent state, kept for every `state_every`-th step
    state_every: int = 1
    max_finals: int = 1  # final observations that each writer keeps
    n_writers: int = 1

    def specs(self) -> NamedArrays:
        """The arrays to allocate."""

        def rows(example: Any, *leading: int) -> Any:
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
        if self.state is not None:
            fields["state"] = rows(self.state, T // self.state_every, B)
        return NamedArrays(fields)


class Ring:
    """Rows `[T, B]` of steps, with `write` for writers and the rest for the reader.

    With `file`, the arrays are in this file, which has no name while it is used: its space is freed when the last
    process that has mapped it ends. With `shared`, they are in memory that workers get when they are started.

    Raises `ConfigError` if there is not enough memory, or not enough space for the file.
    """

    def __init__(self, shape: Shape, *, shared: bool = False, file: str | os.PathLike[str] | None = None) -> None:
        self.shape, self.is_shared = shape, shared
        self._memory: NamedMemory | None = None
        if file is None:
            _require_memory(sum(spec.nbytes for _, spec in shape.specs().leaves()))
            self._memory = NamedMemory(shape.specs(), shared=shared, purpose="a replay")
            arrays = self._memory.arrays
        else:
            arrays = _file_arrays(shape.specs(), Path(file))
        self._bind(arrays)

    def _bind(self, arrays: NamedArrays) -> None:
        self.T, self.B, self.size = self.shape.T, self.shape.B, self.shape.T * self.shape.B
        self.arrays = arrays
        self._begun, self._done = arrays.begun, arrays.done
        self._oldest = 0  # no row before this step was ever written
        self._writer_of = np.arange(self.B) * self.shape.n_writers // self.B  # by column

        def flat(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return leaf.reshape(self.size, *leaf.shape[2:])

        # `[T * B, ...]`: position p is entry p % (T * B)
        self.observation, self.action = map_leaves(flat, arrays.observation), map_leaves(flat, arrays.action)
        self.reward, self.flags, self.final = flat(arrays.reward), flat(arrays.flags), flat(arrays.final)
        self.policy_version = flat(arrays.policy_version)

    def __getstate__(self) -> tuple[Shape, NamedMemory]:
        if self._memory is None:
            raise TypeError("a replay in a file cannot be sent to a worker")
        return self.shape, self._memory

    def __setstate__(self, state: tuple[Shape, NamedMemory]) -> None:
        self.shape, self._memory = state
        self.is_shared = True
        self._bind(self._memory.arrays)

    # ---- for the reader --------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest step that no writer overwrites yet."""
        begun = self._begun[0, _STEP] if len(self._begun) == 1 else self._begun[:, _STEP].max()
        return max(int(begun) - self.T, self._oldest)

    @property
    def end(self) -> int:
        """The step after the newest that all writers have written."""
        return int(self._done[0, _STEP] if len(self._done) == 1 else self._done[:, _STEP].min())

    @property
    def n_finals(self) -> int:
        """Final observations that were ever written, by the only writer."""
        return int(self._done[0, _FINAL])

    def resume(self, first: int, end: int, n_finals: int) -> None:
        """Let the only writer continue at step `end`. The rows from `first` on are there."""
        self._oldest = max(first, end - self.T)
        for words in (self._begun, self._done):
            words[0, [_STEP, _FINAL]] = end, n_finals

    def has_final(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the final observations of the truncated steps in entries `at` `[n]` are still there."""
        first = self._begun[:, _FINAL] - self.shape.max_finals
        kept: npt.NDArray[np.bool_] = self.final[at] >= first[self._writer_of[at % self.B]]
        return kept

    def final_obs(self, at: npt.NDArray[np.int64]) -> Any:
        """The final observations `[n, ...]` of the truncated steps in entries `at` `[n]`."""
        writer, place = self._writer_of[at % self.B], self.final[at] % self.shape.max_finals
        return map_leaves(lambda leaf: leaf[writer, place], self.arrays.final_obs)

    # ---- for writers -----------------------------------------------------------------------

    def columns(self, writer: int) -> slice:
        """The columns that `writer` owns."""
        first, last = np.searchsorted(self._writer_of, [writer, writer + 1])
        return slice(int(first), int(last))

    def write(self, rows: NamedArrays, finals: Any, writer: int = 0) -> int:
        """Write the next rows: fields `[t, b, ...]` for the writer's b columns, t <= T.

        `finals` `[n, ...]` are the final observations of the truncated steps, in the order of numpy.nonzero.
        `rows.state` has the rows of steps that are multiples of `state_every`. Returns how many truncated steps in the
        ring have now lost their final observation.
        """
        columns = self.columns(writer)
        begun, done = self._begun[writer], self._done[writer]
        start, first_final = int(done[_STEP]), int(done[_FINAL])
        t, n_finals = len(rows.flags), len(next(_leaves(finals)))
        begun[_FINAL], begun[_STEP] = first_final + n_finals, start + t
        fence()
        for name, field in rows.items():
            every = self.shape.state_every if name == "state" else 1
            _put(self.arrays[name], columns, -(-start // every), field)
        n_lost = self._write_finals(rows.flags, finals, writer) if n_finals else 0
        fence()
        done[_FINAL], done[_STEP] = first_final + n_finals, start + t
        return n_lost

    def _write_finals(self, flags: npt.NDArray[np.uint8], finals: Any, writer: int) -> int:
        start, first = (int(word) for word in self._done[writer, [_STEP, _FINAL]])
        row, column = np.nonzero(lacks_next(flags))
        number, step = np.arange(first, first + len(row)), start + row
        self.arrays.final[step % self.T, column + self.columns(writer).start] = number
        n_kept = min(len(number), self.shape.max_finals)  # the newest
        place, steps = number[-n_kept:] % self.shape.max_finals, self.arrays.final_step[writer]
        is_new = number[-n_kept:] < self.shape.max_finals  # nothing was there before
        n_lost = len(number) - n_kept + int(((steps[place] >= start + len(flags) - self.T) & ~is_new).sum())
        steps[place] = step[-n_kept:]

        def copy(into: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
            into[writer, place] = values[-n_kept:]

        _pairs(copy, self.arrays.final_obs, finals)
        return n_lost


def lacks_next(flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where an episode was truncated and not terminated: the value after it is that of the final observation."""
    lacks: npt.NDArray[np.bool_] = (flags & (VALID | TRUNCATED | TERMINATED)) == (VALID | TRUNCATED)
    return lacks


def _leaves(tree: Any) -> Any:
    return (leaf for _, leaf in tree.leaves()) if isinstance(tree, NamedArrays) else iter((tree,))


def _pairs(fn: Callable[[Any, Any], None], target: Any, source: Any) -> None:
    if isinstance(target, NamedArrays):
        for name, part in target.items():
            _pairs(fn, part, source[name])
    else:
        fn(target, source)


def _put(target: Any, columns: slice, step: int, source: Any) -> None:
    """Write the rows of `source` from row `step % T` on, with at most one wrap."""

    def copy(into: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
        T, t = len(into), len(rows)
        row = step % T
        fits = min(t, T - row)
        into[row : row + fits, columns] = rows[:fits]
        if fits < t:
            into[: t - fits, columns] = rows[fits:]

    _pairs(copy, target, source)


def _require_memory(nbytes: int) -> None:
    free = free_memory()
    if nbytes > free:
        raise ConfigError(
            f"the replay needs {nbytes / 2**30:,.2f} GiB of memory, but only {free / 2**30:,.2f} GiB are free: lower "
            "capacity, use frames=Frames(n) if observations are stacks, or put the replay into a file with file=PATH. "
            "replay.estimate(...) shows what takes how much"
        )


def _file_arrays(specs: NamedArrays, path: Path) -> NamedArrays:
    """Zeroed arrays in a new file at `path`, whose name is removed at once."""
    offsets, nbytes = {}, 0
    for name, spec in specs.leaves():
        offsets[name], nbytes = nbytes, nbytes + -(-spec.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"file={str(path)!r} exists: remove it, or choose another name") from None
    except OSError as error:
        raise ConfigError(f"file={str(path)!r} cannot be made: {error.strerror}") from error
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, nbytes)  # otherwise a full disk is a SIGBUS later
        block = mmap.mmap(fd, nbytes)
    except OSError as error:
        raise ConfigError(
            f"the replay needs {nbytes / 2**30:,.2f} GiB in file={str(path)!r}: {error.strerror}. Lower capacity, or "
            "choose another disk"
        ) from error
    finally:
        os.close(fd)
    block.madvise(mmap.MADV_RANDOM)  # samples are drawn at random, so reading ahead only takes time

    def array(prefix: str, tree: Any) -> Any:
        if isinstance(tree, NamedArrays):
            return NamedArrays({name: array(f"{prefix}.{name}", part) for name, part in tree.items()})
        count = int(np.prod(tree.shape))
        return np.frombuffer(block, tree.dtype, count, offsets[prefix[1:]]).reshape(tree.shape)

    return NamedArrays({name: array(f".{name}", part) for name, part in specs.items()})
