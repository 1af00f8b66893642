"""A stream: the shards sample all the time, and the user gets their pieces as they arrive."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.buffers import NamedArrays, Samples
from penstock.buffers.samples import batch_view
from penstock.cluster.ray_pool import Shard, ShardPool
from penstock.cluster.shard import Reply, Started
from penstock.collectors import TrajInfo
from penstock.workers.control import Command


@dataclass(frozen=True)
class Piece:
    """One shard's part of a batch, as `RaySampler.stream` yields it.

    `samples` are torch tensors `[batch_T, n, ...]` of the shard's n environments. They are in memory of Ray, which can
    only be read: copy what you want to change. The memory is freed with the piece. With a dict of agents, they are
    `PolicySamples`, with the shard's columns of each policy.
    """

    samples: Samples
    traj_infos: list[TrajInfo]
    shard: int
    env_ranks: range  #: of the columns
    policy_version: Any  #: of the parameters that acted; with a dict of agents, a dict of the version of each
    staleness: int  #: how many versions newer the newest parameters were when you got it; the largest of all policies
    itr: int  #: the number of this piece of the shard; the first has the `itr` of `stream`


class Stream:
    """Gives every shard `max_in_flight` orders in advance. Pieces that have come and were not taken count too."""

    def __init__(self, pool: ShardPool, max_in_flight: int, max_staleness: int | None, itr: int) -> None:
        self._pool, self._max_in_flight, self._max_staleness, self._itr = pool, max_in_flight, max_staleness, itr
        self._number = pool.begin(Command())
        self._given: Counter[Shard] = Counter()  # orders of this stream
        self._taken: Counter[Shard] = Counter()  # pieces that were returned or dropped
        self._come: deque[tuple[Shard, Reply]] = deque()
        for shard in pool.shards:
            self._fill(shard)

    def _fill(self, shard: Shard) -> None:
        while shard.started is not None and self._given[shard] - self._taken[shard] < self._max_in_flight:
            self._pool.give(shard, Command(self._itr + self._given[shard]), self._number)
            self._given[shard] += 1

    def take(self, newest: Sequence[int]) -> tuple[Shard, Reply, int, int]:
        """Wait for the next piece that is not too old. Returns it with its itr and its staleness. `newest`: the newest
        version of each policy."""
        self._pool.send_parameters()
        while True:
            while not self._come:
                self._receive()
            shard, reply = self._come.popleft()
            itr = self._itr + self._taken[shard]
            self._taken[shard] += 1
            self._fill(shard)
            staleness = max(new - old for new, old in zip(newest, reply.versions, strict=True))
            if self._max_staleness is None or staleness <= self._max_staleness:
                shard.batches += 1
                return shard, reply, itr, staleness
            shard.stale += 1

    def _receive(self) -> None:
        for shard, order, reply in self._pool.replies("stream"):
            if isinstance(reply, Started):  # it was built again: give it the orders of the lost actor
                self._given[shard] = self._taken[shard] + sum(other is shard for other, _ in self._come)
                self._fill(shard)
            elif order.batch == self._number:
                self._come.append((shard, reply))
            else:
                shard.late += 1

    def end(self) -> None:
        """Pieces that have come and were not taken count as late. The pool counts later ones."""
        for shard, _ in self._come:
            shard.late += 1
        self._come.clear()


def as_samples(template: NamedArrays, reply: Reply, batch_T: int, n_seats: int | Mapping[str, int] | None) -> Any:
    """The samples of a piece; nothing is copied. `template` has the structure of a slot of the samples buffer."""
    arrays = iter([reply.arrays[path] for path, _ in template.leaves()])
    view = batch_view(template.map(lambda _: next(arrays)), batch_T, n_seats)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return view.torch()
