"""A model of `RaySampler` on a cluster: slow nodes, lost nodes, and a driver that handles one message at a time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from turns import spread

from penstock import RandomAgent, SerialSampler
from penstock.cluster import RaySampler

SHARES = (1.0, 0.99, 0.95, 0.9)


@dataclass(frozen=True)
class Constants:
    """Times are in seconds."""

    call: float  #: of the driver, for each order and each reply
    rebuild: float  #: until a lost shard works again
    batch: float = 2.0  #: a shard's mean time for its part of a batch
    spread: float = 0.1  #: standard deviation of this time, as a share of it
    slow_share: float = 0.01  #: of the nodes
    slow_factor: float = 3.0
    losses_per_hour: float = 0.05  #: of each node


def share_of_ideal(n: int, min_ready: float, constants: Constants, n_batches: int = 400, seed: int = 0) -> float:
    """The rate of `n` shards, one on each node. 1 is the rate of n mean shards that never wait.

    `min_ready` is the share of the shards whose replies complete a batch. The replies of the others are dropped when
    they come; such a shard gets the next order after that.
    """
    rng, wanted = np.random.default_rng(seed), int(np.ceil(min_ready * n - 1e-9))
    mean = np.full(n, constants.batch)
    mean[: round(constants.slow_share * n)] *= constants.slow_factor
    now, free = 0.0, np.zeros(n)  # when each shard has done its last order
    for _ in range(n_batches):
        begin = np.maximum(now + constants.call * np.arange(1, n + 1), free)
        work = np.maximum(0.1, rng.normal(1.0, constants.spread, n)) * mean
        # A loss happens at some moment of the work. Then the shard is built again, and begins again.
        is_lost = rng.random(n) < constants.losses_per_hour / 3600 * work
        finish = begin + work + is_lost * (constants.rebuild + rng.random(n) * work)
        order = np.argsort(finish)
        # The driver handles one reply after another, in `call` seconds each.
        calls = constants.call * np.arange(n)
        handled = np.maximum.accumulate(finish[order] - calls) + calls + constants.call
        now = handled[wanted - 1]
        free = np.where(finish > now, finish, now)
    return float(n_batches * wanted * constants.batch / (n * now))


def measured_constants() -> Constants:
    """What an order or a reply costs this process, and how long it takes until a killed shard has sampled again."""
    options = {"batch_T": 1, "batch_B": 4, "n_shards": 4, "n_workers": 1, "sampler_cls": SerialSampler}
    with RaySampler("CartPole-v1", on_node_failure="restart", **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        costs = []
        for _ in range(10):
            began = time.thread_time()
            for itr in range(20):
                sampler.obtain_samples(itr)
            costs.append((time.thread_time() - began) / (20 * 4 * 2))
        pool: Any = sampler._pool
        os.kill(pool.shards[0].started.pid, signal.SIGKILL)
        began = time.monotonic()
        sampler.obtain_samples(0)
        return Constants(call=spread(costs)["median"], rebuild=time.monotonic() - began)


def simulate(most: int) -> dict[str, Any]:
    """The table of the model: share of the ideal rate, by number of shards and `min_ready`."""
    constants = measured_constants()
    print(constants)
    table = Table(
        title=f"Share of the ideal rate; measured: {constants.call * 1e3:.2f} ms a call, "
        f"{constants.rebuild:.1f} s to build a shard again"
    )
    for heading in ("shards", *(f"min_ready={share:g}" for share in SHARES)):
        table.add_column(heading, justify="right")
    found: dict[str, Any] = {"constants": vars(constants), "share": {}}
    for n in sorted({min(n, most) for n in (10, 100, 300, 1000, most)}):
        row = {share: share_of_ideal(n, share, constants) for share in SHARES}
        found["share"][n] = row
        table.add_row(str(n), *(f"{value:.2f}" for value in row.values()))
    Console(width=120).print(table)
    return found
