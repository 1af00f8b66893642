"""Episodes that are kept as plain lists, the batches that a sampler would make of them, and what a replay returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock import NamedArrays, Samples
from penstock.buffers import AgentSamples, EnvSamples
from penstock.learning import Frames, Replay, Sequences, compiled

DISCOUNT = 0.9


@contextmanager
def in_python() -> Iterator[None]:
    """Replays call no compiled function, as without a C compiler."""
    with pytest.MonkeyPatch.context() as patch:
        for module in [own for name, own in sys.modules.items() if name.startswith("penstock.learning.")]:
            for name, function in compiled.PYTHON.items():
                if name in vars(module):
                    patch.setattr(module, name, function)
        yield


def storage_of(replay: Replay) -> Any:
    """What a replay has allocated. Its parts have tests of their own: what they promise does not show in every draw."""
    assert replay._storage is not None
    return replay._storage


@dataclass(frozen=True)
class Row:
    """One step of one environment. `number` is unique: observation, action and state are made of it."""

    number: int
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    prev_done: bool
    follows_gap: bool  # the rows of its episode before this one were not appended
    episode: int  # rows of one episode without a gap between them have the same
    stack: tuple[int, ...]  # the numbers of the last frames, 0 for padding with zeros
    final_stack: tuple[int, ...]
    final_order: int  # how many truncated steps came before, if it is one
    prev_number: int  # 0 at the first step of an episode


class Stream:
    """`history[b][s]` is step s of column b, as far as it was appended."""

    def __init__(
        self,
        seed: int,
        B: int,
        *,
        p_end: float = 0.25,
        p_restart: float = 0.0,
        wait: bool = False,
        frames: Frames | None = None,
        nested: bool = False,
    ) -> None:
        self.rng, self.B, self.frames = np.random.default_rng(seed), B, frames
        self.p_end, self.p_restart, self.wait, self.nested = p_end, p_restart, wait, nested
        self.history: list[list[Row]] = [[] for _ in range(B)]
        self.n_finals = self._numbers = self._episodes = 0
        self._running: list[Row | None] = [None] * B  # the row before, in the same episode
        self._has_gap = True  # even the first batch may begin in the middle of an episode
        self._last: list[Row | None] = [None] * B
        self._has_ended, self._row_before = [False] * B, [_NOTHING] * B  # in this batch

    @property
    def end(self) -> int:
        return len(self.history[0])

    def batch(self, T: int, *, lost: bool = False) -> Samples:
        """The next T steps. If they are `lost`, nobody appends them."""
        first = self._running if self.end or lost else [self._warm_up(b) for b in range(self.B)]
        self._running = list(first)
        rows = [[self._row(b, t) for b in range(self.B)] for t in range(T)]
        # Truncated steps are counted in the order of rows, then columns.
        for t, b in np.ndindex(T, self.B):
            if rows[t][b].valid and rows[t][b].truncated and not rows[t][b].terminated and not lost:
                rows[t][b] = _with(rows[t][b], final_order=self.n_finals)
                self.n_finals += 1
        samples = self._samples(rows)
        for b in range(self.B):
            self._last[b] = rows[-1][b]
            if not lost:
                self.history[b] += [row[b] for row in rows]
        self._has_gap = lost
        return samples

    def _warm_up(self, b: int) -> Row | None:
        """The last step before the first batch, of an episode that runs already, in some columns."""
        return self._step(b, None, gap=False) if self.rng.random() < 0.5 else None

    def _row(self, b: int, t: int) -> Row:
        before = self._running[b]
        if t == 0 and self.rng.random() < self.p_restart:
            before = None
        self._has_ended[b] &= t > 0
        if self.wait and self._has_ended[b]:
            zeros = (0,) * (self.frames.n if self.frames else 1)
            row = _with(_NOTHING, prev_done=self._row_before[b].valid, stack=zeros, final_stack=zeros)
        else:
            row = self._step(b, before, gap=t == 0 and self._has_gap)
        self._running[b] = None if row.terminated or row.truncated or not row.valid else row
        self._has_ended[b] |= row.terminated or row.truncated
        self._row_before[b] = row
        return row

    def _step(self, b: int, before: Row | None, *, gap: bool) -> Row:
        self._numbers += 1
        number, n = self._numbers, self.frames.n if self.frames else 1
        terminated, truncated = (bool(self.rng.random() < self.p_end / 2) for _ in range(2))
        if before is None or gap:
            self._episodes += 1
        if before is not None:
            stack = (*before.stack[1:], number)
        elif self.frames is None or self.frames.padding == "reset":
            stack = (number,) * n
        else:
            stack = (*(0,) * (n - 1), number)
        return Row(
            number=number,
            reward=float(self.rng.integers(-9, 10)),
            terminated=terminated,
            truncated=truncated,
            valid=True,
            prev_done=before is None,
            follows_gap=gap and before is not None,
            episode=self._episodes if before is None or gap else before.episode,
            stack=stack,
            final_stack=(*stack[1:], 100_000 + number) if terminated or truncated else (0,) * n,
            final_order=-1,
            prev_number=0 if before is None else before.number,
        )

    def _samples(self, rows: list[list[Row]]) -> Samples:
        def field(name: str, dtype: Any) -> Any:
            return np.array([[getattr(row, name) for row in line] for line in rows], dtype)

        def before(values: Any, first: Any) -> Any:
            return np.concatenate([np.asarray(first, values.dtype)[None], values[:-1]])

        number, reward = field("number", np.int64), field("reward", np.float32)
        terminated, truncated = field("terminated", np.bool_), field("truncated", np.bool_)
        last = [row or _NOTHING for row in self._last]
        env = EnvSamples(
            observation=self.observation(field("stack", np.int64)),
            reward=reward,
            prev_reward=before(reward, [row.reward for row in last]),
            terminated=terminated,
            truncated=truncated,
            done=terminated | truncated,
            prev_done=field("prev_done", np.bool_),
            valid=field("valid", np.bool_),
            final_obs=self.observation(field("final_stack", np.int64)),
        )
        agent = AgentSamples(
            action=number,
            prev_action=before(number, [row.number for row in last]),
            agent_info=NamedArrays(prev_rnn_state=np.stack([number, -number], -1).astype(np.float32)),
        )
        # A worker's columns of a batch are not next to each other in memory.
        return Samples(env=env, agent=agent).map(lambda leaf: np.concatenate([leaf, leaf[:, :1]], 1)[:, :-1])

    def observation(self, stack: Any) -> Any:
        """Observations `[..., ...]` that are made of the stacks `[..., n]` of numbers."""
        if self.frames is not None:
            return (stack[..., None] * np.array([1, 2])).astype(np.float32)
        number = stack[..., -1]
        if self.nested:
            return NamedArrays(x=np.stack([number, -number], -1).astype(np.float32), y=NamedArrays(_0=number))
        return np.stack([number, -number], -1).astype(np.float32)


_NOTHING = Row(0, 0.0, False, False, False, False, False, -1, (0,), (0,), -1, 0)


def _with(row: Row, **changes: Any) -> Row:
    return Row(**{**row.__dict__, **changes})


@dataclass(frozen=True)
class Wanted:
    """What the replay must return for one position."""

    number: int
    stack: tuple[int, ...]
    return_: float
    discount: float
    next_stack: tuple[int, ...]


def wanted_transition(stream: Stream, step: int, b: int, *, T: int, n: int, max_finals: int = 10**9) -> Wanted | None:
    """The n-step transition from `step`, or None if it must not be drawn."""
    rows, back = stream.history[b], stream.frames.n - 1 if stream.frames else 0
    if not can_see(stream, step - back, step + n, T) or not rows[step].valid or not _has_frames(rows, step, back):
        return None
    start, return_ = rows[step], 0.0
    for k in range(n):
        row = rows[step + k]
        if row.episode != start.episode:
            return None
        return_ += DISCOUNT**k * row.reward
        if row.terminated:
            return Wanted(start.number, start.stack, return_, 0.0, (0,) * len(start.stack))
        if row.truncated:
            if row.final_order < stream.n_finals - max_finals:
                return None
            return Wanted(start.number, start.stack, return_, DISCOUNT ** (k + 1), row.final_stack)
    after = rows[step + n]
    if after.episode != start.episode:
        return None
    return Wanted(start.number, start.stack, return_, DISCOUNT**n, after.stack)


def can_see(stream: Stream, first: int, last: int, T: int) -> bool:
    """Whether the rows from `first` to `last` are in a ring of T rows. Before row 0 nothing is missing."""
    oldest = stream.end - T
    return (first >= oldest or oldest <= 0) and last < stream.end


def _has_frames(rows: list[Row], step: int, back: int) -> bool:
    """Whether the older frames of the stack of `step` were appended."""
    for s in range(step, step - back, -1):
        if rows[s].prev_done:
            return True
        if rows[s].follows_gap:
            return False
    return True


def can_start(stream: Stream, step: int, b: int, *, T: int, n: int, sequences: Sequences) -> bool:
    """Whether a sequence may start at `step`."""
    rows, back = stream.history[b], 1 + (stream.frames.n - 1 if stream.frames else 0)
    last = step + sequences.length + n - 1
    if step % sequences.state_every or not can_see(stream, step - back, last, T):
        return False
    if stream.frames and not _has_frames(rows, step, stream.frames.n - 1):
        return False
    return rows[step].valid and not any(row.follows_gap for row in rows[step : last + 1])
