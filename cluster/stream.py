"""A stream: the shards sample all the time, and the user gets their pieces as they arrive."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from penstock.buffers import NamedArrays, Samples
from penstock.buffers.samples import public_view
from penstock.cluster.handles import Shard
from penstock.cluster.ray_pool import ShardPool
from penstock.cluster.shard import Reply, Started
from penstock.collectors import TrajInfo
from penstock.workers.control import Command


@dataclass(frozen=True)
class Piece:
    """One shard's part of a batch, as `RaySampler.stream` yields it.

    `samples` are torch tensors `[batch_T, n, ...]` of the shard's n environments. They are in memory of Ray, which can
    only be read: copy what you want to change. The memory is freed with the piece.
    """

    samples: Samples
    traj_infos: list[TrajInfo]
    shard: int
    env_ranks: range  #: of the columns
    policy_version: int  #: of the parameters that acted
    staleness: int  #: the newest version when you got the piece, minus `policy_version`
    itr: int  #: the number of this piece of the shard; the first has the `itr` of `stream`


class Stream:
    """Gives every shard `max_in_flight` orders in advance. Pieces that have come and were not taken count too."""

    def __init__(self, pool: ShardPool, max_in_flight: int, max_staleness: int | None, itr: int) -> None:
        self._pool, self._max_in_flight, self._max_staleness, self._itr = pool, max_in_flight, max_staleness, itr
        self._number = pool.begin_stream()
        self._given: Counter[Shard] = Counter()  # orders of this stream
        self._taken: Counter[Shard] = Counter()  # pieces that were returned or dropped
        self._come: deque[tuple[Shard, Reply]] = deque()
        self._early: defaultdict[Shard, list[Reply]] = defaultdict(list)  # replies before which another is missing
        for shard in pool.shards:
            self._fill(shard)

    def _fill(self, shard: Shard) -> None:
        while shard.started is not None and self._given[shard] - self._taken[shard] < self._max_in_flight:
            self._pool.give(shard, Command(self._itr + self._given[shard]), self._number)
            self._given[shard] += 1

    def take(self, newest_version: int) -> tuple[Shard, Reply, int, int]:
        """Wait for the next piece that is not too old. Returns it with its itr and its staleness."""
        self._pool.send_parameters()
        while True:
            while not self._come:
                self._receive()
            shard, reply = self._come.popleft()
            itr = self._itr + self._taken[shard]
            self._taken[shard] += 1
            self._fill(shard)
            staleness = newest_version - reply.version
            if self._max_staleness is None or staleness <= self._max_staleness:
                shard.batches += 1
                return shard, reply, itr, staleness
            shard.stale += 1

    def _receive(self) -> None:
        for pending, answer in self._pool.answers("stream"):
            shard = pending.shard
            if isinstance(answer, Started):  # it was built again: give it the orders of the lost actor
                shard.late += len(self._early.pop(shard, ()))  # the order before them was lost: they run again
                n_waiting = sum(other is shard for other, _ in self._come)
                self._given[shard] = self._taken[shard] + n_waiting
                self._fill(shard)
            elif pending.batch == self._number:
                self._early[shard].append(answer)
            else:
                shard.late += 1
            # Several threads of a shard send its replies, so one may overtake another.
            early = self._early[shard]
            early.sort(key=lambda reply: reply.number)
            while early and all(early[0].number < number for number in shard.waiting):
                self._come.append((shard, early.pop(0)))

    def end(self) -> None:
        """Pieces that have come and were not taken count as late. The pool counts later ones."""
        for shard, _ in self._come:
            shard.late += 1
        for shard, replies in self._early.items():
            shard.late += len(replies)
        self._come.clear()
        self._early.clear()


def as_samples(template: NamedArrays, reply: Reply, batch_T: int, n_seats: int | None) -> Samples:
    """The samples of a piece; nothing is copied. `template` has the structure of a slot of the samples buffer."""
    arrays = iter([reply.arrays[path] for path, _ in template.leaves()])
    view = public_view(template.map(lambda _: next(arrays)), batch_T, n_seats)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return view.torch()
