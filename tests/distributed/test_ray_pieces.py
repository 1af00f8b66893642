"""The arithmetic of `RaySampler.pieces`: what is under way, how old it is, and that every piece is accounted for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from hypothesis import given
from hypothesis import strategies as st

from penstock.distributed.ray_pool import Shard, ShardPool
from penstock.distributed.shard import Reply, ShardPlan, Started
from penstock.workers.control import Command

pytestmark = [pytest.mark.ray]


def reply(*versions: int) -> Reply:
    return Reply({}, [], versions, (), None)


class Pool(ShardPool):
    """Shards without Ray, which run their orders when the test wants it, and may be lost."""

    def __init__(self, n_shards: int, choices: Iterator[int], may_lose: bool) -> None:
        self._number = 6
        self._memory: Any = SimpleNamespace(control=SimpleNamespace(quit=False))
        plans = [
            ShardPlan(worker_rank=i, columns=range(i, i + 1), env_ranks=range(i, i + 1), n_workers=1)
            for i in range(n_shards)
        ]
        self.shards = [Shard(plan, (), started=Started("here", 1, ())) for plan in plans]
        self.choices, self.may_lose = choices, may_lose
        self.newest, self.known = 1, 1
        self.ran: Counter[Shard] = Counter()
        self.lost: Counter[Shard] = Counter()
        self.most = 0

    def send_parameters(self) -> None:
        self.known = self.newest

    def _order(self, shard: Shard, command: Command) -> None:
        shard.orders.append((self._number, command.itr))
        self.most = max(self.most, len(shard.orders))

    def _next_reply(self, during: str) -> tuple[Shard, int, Started | Reply] | None:
        shard = self.shards[next(self.choices) % len(self.shards)]
        if self.may_lose and next(self.choices) % 4 == 0:
            self.lost[shard] += len(shard.orders)
            shard.orders.clear()
            return shard, 0, Started("there", 2, ())
        if next(self.choices) % 3 == 0:
            return None
        shard.orders.popleft()
        self.ran[shard] += 1
        return shard, 7, reply(self.known - (next(self.choices) % 2 and self.known > 1), 1)


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
    assert pool.submit(Command(100), depth=max_in_flight) == 7
    handed: Counter[Shard] = Counter()
    itrs: dict[Shard, list[int]] = {shard: [] for shard in pool.shards}
    for i in range(30):
        shard, found, itr, staleness = pool.next_piece((pool.newest, 1), max_staleness)
        assert staleness == pool.newest - found.versions[0], "that of the policy that is oldest"
        assert max_staleness is None or staleness <= max_staleness
        handed[shard] += 1
        itrs[shard].append(itr)
        pool.newest += seeds[i % len(seeds)] % 3 == 0
    assert pool.most <= max_in_flight
    for shard in pool.shards:
        assert itrs[shard] == sorted(set(itrs[shard]))
        assert handed[shard] == shard.batches
        assert pool.ran[shard] == shard.batches + shard.stale
        if max_staleness is None:
            assert itrs[shard] == list(range(100, 100 + len(itrs[shard])))


def test_pieces_of_a_lost_shard_are_ordered_again_and_those_of_an_earlier_command_are_late() -> None:
    pool = Pool(1, itertools.count(), may_lose=False)
    (shard,) = pool.shards
    pool.submit(Command(100), depth=2)
    comes: list[tuple[int, Started | Reply]] = [
        (6, reply(1)),  # of the batch before the pieces
        (0, Started("there", 2, ())),  # the orders 100 and 101 were lost with the actor
        (7, reply(2)),
    ]

    def next_reply(during: str) -> tuple[Shard, int, Started | Reply]:
        number, found = comes.pop(0)
        if number == 0:
            shard.orders.clear()
        if number == 7:
            shard.orders.popleft()
        return shard, number, found

    pool._next_reply = next_reply  # type: ignore[method-assign]
    _, found, itr, _ = pool.next_piece((2,), None)
    assert (found.versions, itr, shard.late) == ((2,), 100, 1)
    assert list(shard.orders) == [(7, 101), (7, 102)], "the orders 100 and 101 were given again, then the next one"


def test_the_columns_of_each_policy_have_their_place() -> None:
    cells = {"cells": (range(4, 8), range(2, 4)), "policies": ("even", "odd")}
    envs = {"columns": range(2, 4), "env_ranks": range(2, 4)}
    shard = Shard(ShardPlan(worker_rank=0, n_workers=1, **envs, **cells), ())  # type: ignore[arg-type]
    assert shard.place("odd.reward") == (slice(None), slice(2, 4))
    assert shard.place("even.policy_version") == slice(4, 8)
    assert shard.place("odd.bootstrap_value") == slice(2, 4)
    assert shard.place("even.agent_info.policy_version") == (slice(None), slice(4, 8)), "a field of the agent"
