"""A model of `RaySampler` on a cluster: slow nodes, lost nodes, and a driver that handles one message at a time."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from turns import spread

from penstock import RandomAgent, SerialSampler
from penstock.distributed import RaySampler

SHARES = (1.0, 0.99, 0.95, 0.9)
#: MB that a shard sends for each batch: CartPole with [128, 32], and images of 84 x 84 x 4 with [64, 16].
SIZES = {"CartPole": 0.18, "images": 28.9}
LEARNERS = 0.7  # the share of the ideal rate that the plan with several learners must keep


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
    megabytes: float = 0.0  #: of a shard's part of a batch, which comes through the network and is copied once
    network: float = 1.25e9  #: bytes each second that the driver's machine receives: 10 Gb/s
    copies: float = 4e9  #: bytes each second that one thread copies

    @property
    def reply(self) -> float:
        """Seconds of the driver for each reply."""
        return self.call + self.megabytes * 2**20 * (1 / self.network + 1 / self.copies)


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
        # The driver handles one reply after another.
        replies = constants.reply * np.arange(n)
        handled = np.maximum.accumulate(finish[order] - replies) + replies + constants.reply
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
        pool: Any = sampler.run.pool
        os.kill(pool.shards[0].started.pid, signal.SIGKILL)
        began = time.monotonic()
        sampler.obtain_samples(0)
        return Constants(call=spread(costs)["median"], rebuild=time.monotonic() - began)


def simulate(most: int) -> dict[str, Any]:
    """The table of the model: share of the ideal rate, by number of shards and by `min_ready` as a share of them."""
    constants = measured_constants()
    print(constants)
    table = Table(
        title=f"Share of the ideal rate; measured: {constants.call * 1e3:.2f} ms a call, "
        f"{constants.rebuild:.1f} s to build a shard again"
    )
    for heading in ("shards", *(f"{share:.0%} ready" for share in SHARES)):
        table.add_column(heading, justify="right")
    found: dict[str, Any] = {"constants": vars(constants), "share": {}}
    for n in sorted({min(n, most) for n in (10, 100, 300, 1000, most)}):
        row = {share: share_of_ideal(n, share, constants) for share in SHARES}
        found["share"][n] = row
        table.add_row(str(n), *(f"{value:.2f}" for value in row.values()))
    Console(width=120).print(table)
    found["bytes"] = simulate_bytes(constants, list(found["share"]))
    return found


def simulate_bytes(constants: Constants, counts: list[int]) -> dict[str, dict[int, float]]:
    """The table with the bytes that come into the one driver, where 95 % of the shards complete a batch; and into each
    of several learners, which are ranks of torch.distributed on machines of their own, with shards of their own. What
    the learners send each other is left out."""
    table = Table(title="Share of the ideal rate with 95 % ready and the bytes of the samples")
    for heading in ("shards", *SIZES, f"images, learners for {LEARNERS:g}"):
        table.add_column(heading, justify="right")
    found: dict[str, dict[int, float]] = {name: {} for name in (*SIZES, "learners")}
    for n in counts:
        for name, megabytes in SIZES.items():
            found[name][n] = share_of_ideal(n, 0.95, replace(constants, megabytes=megabytes))
        images = replace(constants, megabytes=SIZES["images"])
        found["learners"][n] = next(
            k for k in range(1, n + 1) if share_of_ideal(-(-n // k), 0.95, images) >= LEARNERS or k == n
        )
        row = [f"{found[name][n]:.2f}" for name in SIZES]
        table.add_row(str(n), *row, f"{found['learners'][n]} of {-(-n // found['learners'][n])} shards")
    Console(width=120).print(table)
    return found
