"""The arithmetic of a stream: what is under way, how old it is, and that every piece is accounted for."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.handles import Pending, Shard
from penstock.cluster.shard import Reply, ShardPlan, Started
from penstock.cluster.stream import Stream

pytestmark = [pytest.mark.ray]


class Pool:
    """Shards that run their orders when the test wants it, and may be lost."""

    def __init__(self, n_shards: int, choices: Iterator[int], may_lose: bool) -> None:
        plans = [ShardPlan(worker_rank=i, columns=range(i, i + 1), env_ranks=range(i, i + 1)) for i in range(n_shards)]
        self.shards = [Shard(plan, started=Started("here", 1, ())) for plan in plans]
        self.choices, self.may_lose = choices, may_lose
        self.newest, self.known = 1, 1
        self.orders: dict[Shard, deque[int]] = {shard: deque() for shard in self.shards}
        self.ran: Counter[Shard] = Counter()
        self.lost: Counter[Shard] = Counter()
        self.most = 0

    def begin_stream(self) -> int:
        return 7

    def send_parameters(self) -> None:
        self.known = self.newest

    def give(self, shard: Shard, command: Any, number: int) -> None:
        assert number == 7
        self.orders[shard].append(command.itr)
        self.most = max(self.most, len(self.orders[shard]))

    def answers(self, during: str) -> Iterator[tuple[Pending, Started | Reply]]:
        shard = self.shards[next(self.choices) % len(self.shards)]
        if self.may_lose and next(self.choices) % 4 == 0:
            self.lost[shard] += len(self.orders[shard])
            self.orders[shard].clear()
            yield Pending(shard), Started("there", 2, ())
        for _ in range(min(len(self.orders[shard]), 1 + next(self.choices) % 3)):
            self.orders[shard].popleft()
            self.ran[shard] += 1
            yield Pending(shard, None, 7), Reply(0, {}, [], self.known - (next(self.choices) % 2 and self.known > 1))


@given(
    data=st.data(),
    n_shards=st.integers(1, 4),
    max_in_flight=st.integers(1, 3),
    max_staleness=st.none() | st.integers(0, 2),
    may_lose=st.booleans(),
)
def test_every_piece_is_handed_over_or_counted(
    data: st.DataObject, n_shards: int, max_in_flight: int, max_staleness: int | None, may_lose: bool
) -> None:
    seeds = data.draw(st.lists(st.integers(0, 11), min_size=8, max_size=40))
    pool = Pool(n_shards, (seeds[i % len(seeds)] + i // len(seeds) for i in itertools.count()), may_lose)
    stream: Any = Stream(pool, max_in_flight, max_staleness, itr=100)  # type: ignore[arg-type]
    handed: Counter[Shard] = Counter()
    itrs: dict[Shard, list[int]] = {shard: [] for shard in pool.shards}
    for i in range(30):
        shard, reply, itr, staleness = stream.take(pool.newest)
        assert staleness == pool.newest - reply.version
        assert max_staleness is None or staleness <= max_staleness
        handed[shard] += 1
        itrs[shard].append(itr)
        pool.newest += seeds[i % len(seeds)] % 3 == 0
    assert pool.most <= max_in_flight
    stream.end()
    for shard in pool.shards:
        assert itrs[shard] == sorted(set(itrs[shard]))
        assert handed[shard] == shard.batches
        assert pool.ran[shard] == shard.batches + shard.stale + shard.late
        if max_staleness is None:
            assert itrs[shard] == list(range(100, 100 + len(itrs[shard])))


def test_replies_that_overtake_each_other_are_handed_over_in_order() -> None:
    pool = Pool(1, itertools.count(), may_lose=False)
    (shard,) = pool.shards
    stream: Any = Stream(pool, 3, None, itr=100)  # type: ignore[arg-type]
    shard.waiting = {0, 1, 2}
    comes = [(2, {0, 1}), (0, {1}), (1, set[int]())]  # the number of a reply, and what is missing then

    def answers(during: str) -> Iterator[tuple[Pending, Reply]]:
        number, shard.waiting = comes.pop(0)
        yield Pending(shard, None, 7), Reply(number, {}, [], number)

    pool.answers = answers  # type: ignore[assignment, method-assign]
    assert [(reply.number, itr) for _, reply, itr, _ in (stream.take(3) for _ in range(3))] == [
        (0, 100),
        (1, 101),
        (2, 102),
    ]


def test_a_reply_after_a_lost_order_is_counted_and_collected_again() -> None:
    pool = Pool(1, itertools.count(), may_lose=False)
    (shard,) = pool.shards
    stream: Any = Stream(pool, 2, None, itr=100)  # type: ignore[arg-type]
    started = Started("there", 2, ())
    comes: list[tuple[set[int], Started | Reply]] = [
        ({0}, Reply(1, {}, [], 1)),
        (set(), started),  # order 0 was lost with the actor
        ({1}, Reply(0, {}, [], 2)),
    ]

    def answers(during: str) -> Iterator[tuple[Pending, Started | Reply]]:
        shard.waiting, answer = comes.pop(0)
        pool.orders[shard].clear()
        yield Pending(shard, None, 7), answer

    pool.answers = answers  # type: ignore[method-assign]
    _, reply, itr, _ = stream.take(2)
    assert (reply.version, itr, shard.late) == (2, 100, 1)
    assert list(pool.orders[shard]) == [102], "the orders 100 and 101 were given again, then the next one"


def test_a_reply_waits_for_an_order_that_was_given_before_the_stream() -> None:
    pool = Pool(1, itertools.count(), may_lose=False)
    (shard,) = pool.shards
    stream: Any = Stream(pool, 1, None, itr=100)  # type: ignore[arg-type]
    comes = [(7, {0}, Reply(1, {}, [], 1)), (6, set[int](), Reply(0, {}, [], 1))]

    def answers(during: str) -> Iterator[tuple[Pending, Reply]]:
        batch, shard.waiting, reply = comes.pop(0)
        yield Pending(shard, None, batch), reply

    pool.answers = answers  # type: ignore[assignment, method-assign]
    _, reply, itr, _ = stream.take(1)
    assert (reply.number, itr, shard.late) == (1, 100, 1)
