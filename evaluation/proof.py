"""Proof that the results of an evaluation repeat: one episode of each policy and task is played twice.

The second time, in a new environment, the steps get the stored actions, and the policy says what it would have done. So
rounding, which depends on how many rows a network gets, does not add up over an episode.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers.reports import in_one_line
from penstock.envs.recorded_episode import RecordedEpisode
from penstock.errors import ConfigError, RepeatError, brief
from penstock.vector.objects import has_fixed_shape

#: Floats that differ by so much, or by this share, count as equal.
TOLERANCE = 1e-5
_ROWS = 256  # observations are marked together: one alone costs ten times as much
_BYTES = 1 << 18  # the most memory for these rows: more would not stay in the cache
_Marks = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]  # `Trace.checks` and `Trace.sums`


class Trace(NamedTuple):
    """What happened in an episode of n steps."""

    actions: list[npt.NDArray[Any]]  #: the parts of the actions, `[n, ...]`
    rewards: npt.NDArray[np.float64]  #: `[n]`
    #: `[n + 1, 2]`: two checksums of each observation, from the reset on: one of its parts that are no floats, one of
    #: the floats.
    checks: npt.NDArray[np.uint32]
    sums: npt.NDArray[np.float64]  #: `[n + 1]`: weighted sums of the floats, each between -1 and 1, for rounding


class ObservationMarks:
    """Computes `Trace.checks` and `Trace.sums` of the observations of an episode."""

    def __init__(self, space: gym.Space[Any]) -> None:
        parts = [(path, part) for path, part in _leaves(space) if has_fixed_shape(part)]
        self._others = [path for path, part in _leaves(space) if not has_fixed_shape(part)]
        is_array = [path for path, _ in parts] == [()]
        sizes = [-(-int(np.prod(part.shape)) * part.dtype.itemsize // 8) * 8 for _, part in parts]
        n_rows = max(1, min(_ROWS, _BYTES // max(1, sum(sizes))))
        # Rows of whole words for each kind of part, so that one product makes all checksums.
        self._bytes = [np.zeros((n_rows, size), np.uint8) for size in sizes]
        self._kinds = [int(part.dtype.kind == "f") for _, part in parts]
        self._views: list[npt.NDArray[Any]] = [
            np.ndarray((n_rows, *part.shape), part.dtype, buffer, 0, (buffer.shape[1], *_strides(part)))
            for (_, part), buffer in zip(parts, self._bytes, strict=True)
        ]
        self._paths = [(view, path) for view, (path, _) in zip(self._views, parts, strict=True)]
        self._view = self._views[0] if is_array else None  # of a space that is one array
        self._crc, self._n_rows = np.zeros(n_rows, np.uint32), n_rows
        rng = np.random.Generator(np.random.PCG64(0))  # the same numbers in every process
        self._factors = [rng.integers(1 << 63, size=size // 8, dtype=np.uint64) * np.uint64(2) + 1 for size in sizes]
        self._weights = [rng.uniform(0.5, 1, int(np.prod(part.shape))) for _, part in parts]
        self.clear()

    def clear(self) -> None:
        """An episode begins."""
        self._n = 0
        self._done: list[_Marks] = []

    def add(self, observation: Any) -> None:
        """The next observation. One that does not fit is for the check of the last one of a step, which names it."""
        n = self._n
        try:
            if self._view is not None:
                self._view[n] = observation
            else:
                for view, path in self._paths:
                    view[n] = reduce(getitem, path, observation)
                if self._others:
                    values = tuple(reduce(getitem, path, observation) for path in self._others)
                    self._crc[n] = zlib.crc32(b"".join(_bytes_of(values)))
        except (ValueError, TypeError, LookupError, OverflowError):
            self._crc[n] = 1
            for view in self._views:
                view[n] = 0
        self._n = n = n + 1
        if n == self._n_rows:
            self._mark()

    def _mark(self) -> None:
        n, self._n = self._n, 0
        checks, sums = np.zeros((n, 2), np.uint32), np.zeros(n)
        checks[:, 0] = self._crc[:n]
        for kind, buffer, view, factors, weights in zip(
            self._kinds, self._bytes, self._views, self._factors, self._weights, strict=True
        ):
            checks[:, kind] ^= (buffer[:n].view(np.uint64) @ factors >> np.uint64(32)).astype(np.uint32)
            if kind:
                values = view[:n].reshape(n, -1).astype(np.float64)
                with np.errstate(invalid="ignore"):  # infinity by itself
                    sums += values / (1 + np.abs(values)) @ weights
        self._crc[:n] = 0
        self._done.append((checks, sums))

    def take(self) -> _Marks:
        """The checksums and sums since `clear`."""
        if self._n or not self._done:
            self._mark()
        checks, sums = zip(*self._done, strict=True)
        return np.concatenate(checks), np.concatenate(sums)


def _leaves(space: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The keys and indices that lead to each basic space, and this space."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield path, space
        return
    for key, part in space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces):
        yield from _leaves(part, (*path, key))


def _strides(part: Any) -> tuple[int, ...]:
    return np.zeros(part.shape, part.dtype).strides


def _bytes_of(value: Any) -> Iterator[bytes]:
    """The content of a part of an observation that has no fixed shape: a text, a graph, a tuple of any length."""
    if isinstance(value, str | None):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield repr(key).encode()
            yield from _bytes_of(entry)
    elif isinstance(value, tuple | list):
        yield str(len(value)).encode()
        for entry in value:
            yield from _bytes_of(entry)
    else:
        array = np.asarray(value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()


def differs(stored: Trace, again: Trace) -> tuple[str, bool]:
    """What first differs between two traces, "" if nothing does; and whether all is equal bit for bit."""
    n, seen = len(stored.rewards), len(again.rewards)
    found = [
        (step, 0, f"its observation after {step} steps is another one")
        for step in _unequal_observations((stored.checks, stored.sums), (again.checks, again.sums))
    ]
    for part, ours, theirs in zip(range(len(stored.actions)), again.actions, stored.actions, strict=True):
        name = "its action" if len(stored.actions) == 1 else f"part {part} of its action"
        found += [(i, 1, f"{name} in step {i} {_was(theirs[i], ours[i])}") for i in _unequal(theirs, ours)]
    found += [
        (i + 1, -1, f"its reward of step {i} {_was(stored.rewards[i], again.rewards[i])}")
        for i in _unequal(stored.rewards, again.rewards)
    ]
    if n != seen:
        found.append((min(n, seen) + 1, 2, f"it has {seen} steps, and had {n}" if seen < n else f"it had {n} steps"))
    is_equal = n == seen and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(_arrays(stored), _arrays(again), strict=True)
    )
    return min(found)[-1] if found else "", is_equal


def _arrays(trace: Trace) -> list[npt.NDArray[Any]]:
    return [*trace.actions, trace.rewards, trace.checks]


def _was(then: Any, now: Any) -> str:
    return f"was {brief(then.tolist())}, and is {brief(now.tolist())}"


def _unequal(stored: npt.NDArray[Any], again: npt.NDArray[Any]) -> list[int]:
    """The first row in which two arrays differ, as far as both go, in a list; else an empty one."""
    n = min(len(stored), len(again))
    x, y = stored[:n], again[:n]
    if x.dtype.kind == "f" and y.dtype.kind == "f":
        equal = np.isclose(x, y, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    else:
        equal = x == y
    return _first(~equal.reshape(n, -1).all(axis=1)) if n else []


def _unequal_observations(stored: _Marks, again: _Marks) -> list[int]:
    """As `_unequal`, of observations."""
    n = min(len(stored[0]), len(again[0]))
    equal = stored[0][:n] == again[0][:n]
    near = np.isclose(stored[1][:n], again[1][:n], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return _first(~(equal[:, 0] & (equal[:, 1] | near)))


def _first(rows: npt.NDArray[np.bool_]) -> list[int]:
    return [int(i) for i in np.flatnonzero(rows)[:1]]


@dataclass(frozen=True)
class PlayedEpisode(RecordedEpisode):
    """An episode of an evaluation. `run`, `steps` and `film` compare each observation with the one that was."""

    checks: Any = None  #: `Trace.checks`
    sums: Any = None  #: `Trace.sums`

    def _repeated(self, env: gym.Env[Any, Any], n_steps: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        marks = ObservationMarks(env.observation_space)
        for i, (action, result) in enumerate(super()._repeated(env, n_steps)):
            marks.clear()
            marks.add(result[0])
            if _unequal_observations((self.checks[i : i + 1], self.sums[i : i + 1]), marks.take()):
                raise RepeatError(
                    f"{self._name} differs from what was played: its observation after {i} steps is another one. The "
                    "evaluation had another environment, other arguments or other options of the reset; or the "
                    "environment depends on something else than the seed of its reset and its actions"
                )
            yield action, result


def load_trace(path: Path, length: int) -> Trace:
    """The trace in a file. Raises `ConfigError` unless it is one of an episode of so many steps."""
    try:
        with open(path, "rb") as opened, np.load(opened) as file:  # it refuses code
            parts = [file[f"action_{i}"] for i in range(len(file.files) - 3)]
            trace = Trace(parts, file["rewards"], file["checks"], file["sums"])
    except Exception as error:  # numpy and zipfile raise many kinds
        raise ConfigError(f"{path} cannot be read: {in_one_line(error)}") from error
    if {len(part) for part in (*parts, trace.rewards)} != {length} or (length + 1, 2) != trace.checks.shape:
        raise ConfigError(f"{path} is not that of an episode of {length} steps, as {path.parent} says")
    return trace
