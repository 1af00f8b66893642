"""Where the time went: the statistics of a sampler and of its inference server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from penstock.buffers.named import NamedArrays
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.workers.control import ControlBlock
from penstock.workers.failures import Restarts
from penstock.workers.plan import WorkerPlan, span
from penstock.workers.pool import Pool

_MAX_SHOWN = 16  # workers in a repr


@dataclass(frozen=True)
class WorkerStats:
    """One worker, including the workers that it has replaced, since the sampler was initialized. Times are in seconds.

    `steps` counts environment steps of training batches; `stepping` and `acting` are the times that they took.
    With central inference, `acting` is the time in which the worker waited for its actions, except for the first of a
    batch: these are mostly computed while the worker waits at barrier_in.
    `resetting` is the time in `env.reset`, in batches and between them; `resets_between` is its second part. `waiting`
    is the time at barrier_in, while the learner trained or other workers finished. These four times add up. Not in them
    are evaluations and the start; `first_resets` is the time in `env.reset` at the start.
    `trajectories` counts what the sampler's calls have returned, from training and evaluation; `lost_trajectories` what
    was lost with workers that were replaced.
    """

    worker_rank: int
    env_ranks: range
    cpus: tuple[int, ...]
    batches: int
    steps: int
    stepping: float
    acting: float
    resetting: float
    waiting: float
    trajectories: int
    restarts: int
    lost_trajectories: int
    late_rewards: int = 0  #: see `SamplerStats.late_rewards`
    renewals: int = 0  #: see `SamplerStats.renewals`
    cut_episodes: int = 0  #: see `SamplerStats.cut_episodes`
    resets_between: float = 0.0
    first_resets: float = 0.0


@dataclass(frozen=True)
class LagStats:
    """How many versions newer the published parameters were than those that had acted, when `obtain_samples` returned
    the batch. Over all columns of all batches so far; 0 before the first batch."""

    min: int
    mean: float
    max: int


@dataclass(frozen=True)
class SamplerStats:
    """All workers, and the bytes of memory that they share with the main process.

    With an agent of `inference="numpy"` or `"traced"`, `inference_difference` is the largest absolute difference to
    torch's outputs, on 16 observations at `initialize`. With other agents it is None.
    Only an `AsyncSampler` has `lag`, and `skipped_batches`: how many `obtain_samples(newest=True)` has left out. With a
    replay, `dropped_trajectories` counts those that were too old when `take_traj_infos` was called.
    """

    workers: tuple[WorkerStats, ...]
    bytes_shared: int
    inference_difference: float | None = None
    lag: LagStats | None = None
    skipped_batches: int = 0
    dropped_trajectories: int = 0
    #: The share of the cells of all batches that hold a step (`valid`). None where several agents share an environment.
    valid_share: float | None = None

    def __repr__(self) -> str:  # for `print` and notebooks
        """A table with a line for each worker."""
        names = ("acting", "stepping", "resetting", "waiting")
        lines = ["times in seconds since initialize; idle: the share of waiting"]
        lines += [f"{'worker':>6} {'envs':>10} {'steps':>12} {' '.join(f'{name:>9}' for name in names)} {'idle':>5}"]
        for worker in self.workers:
            spent = worker.acting + worker.stepping + worker.resetting + worker.waiting
            idle = worker.waiting / spent if spent else 0.0
            times = " ".join(f"{getattr(worker, name):>9.2f}" for name in names)
            who = f"{worker.worker_rank:>6} {span(worker.env_ranks):>10} {worker.steps:>12,}"
            lines.append(f"{who} {times} {idle:>5.0%}")
        more = [f"{self.bytes_shared / 2**20:,.1f} MiB shared"]
        if (self.valid_share or 1.0) < 1.0:
            more.append(f"{self.valid_share:.0%} of the rows are valid")
        if self.restarts:
            more.append(f"{self.restarts} workers replaced, {self.lost_trajectories} trajectories lost")
        if self.renewals:
            more.append(f"{self.renewals} environments built again, {self.cut_episodes} episodes cut")
        if self.lag is not None:
            more.append(f"parameters {self.lag.mean:.2f} versions old, at most {self.lag.max}")
        return "\n".join([*lines, ", ".join(more)])

    @property
    def restarts(self) -> int:
        """How many workers have been replaced."""
        return sum(worker.restarts for worker in self.workers)

    @property
    def lost_trajectories(self) -> int:
        """How many trajectories were lost with workers that were replaced."""
        return sum(worker.lost_trajectories for worker in self.workers)

    @property
    def renewals(self) -> int:
        """How often an environment was built again after its game had failed (`on_game_failure="renew"`)."""
        return sum(worker.renewals for worker in self.workers)

    @property
    def cut_episodes(self) -> int:
        """How many episodes have ended in this way, in training and evaluation."""
        return sum(worker.cut_episodes for worker in self.workers)

    @property
    def late_rewards(self) -> int:
        """With several agents: how many rewards came for agents that had ended or had not joined. They are in no cell
        of a batch, but in the Return of the environment's `TrajInfo`."""
        return sum(worker.late_rewards for worker in self.workers)


def worker_stats(
    plan: WorkerPlan, control: ControlBlock, n_trajectories: Sequence[int], restarts: Restarts
) -> WorkerStats:
    """One worker's totals; `n_trajectories` counts those returned, by worker rank."""
    rank = plan.worker_rank
    row = control.snapshot(rank)
    times = row.stepping, row.acting, row.resets_within + row.resets_between, row.waiting
    n_lost = restarts.lost_per_worker[rank]
    games = row.late_rewards, row.renewals, row.cut_episodes
    counts = n_trajectories[rank], restarts.per_worker[rank], n_lost, *games
    parts = row.resets_between, row.first_resets
    return WorkerStats(rank, plan.env_ranks, plan.cpus, row.batches, row.steps, *times, *counts, *parts)


Bound = Literal["environments", "inference", "waiting", "between batches"]

_ADVICE: dict[Bound, str] = {
    "environments": "the steps of the environments: more CPUs and workers help, or faster environments",
    "inference": 'the agent: a GPU, compile_model, inference="numpy" or more environments for each step help',
    "waiting": "waiting for other environments (with min_ready or max_wait, the agent acts for those that are ready), "
    "or for a CPU (fewer workers may help)",
    "between batches": "the wait for the learner, or for the slowest worker: an "
    'AsyncSampler(server="process") samples while you train, and with min_ready or max_wait its workers do not wait '
    "for each other",
}


@dataclass(frozen=True)
class ServerStats:
    """What the inference server has done since the sampler was initialized.

    `served[n]` counts its steps for n environments at once. `acting` and `waiting` are its own seconds, with and
    without work. `shares` says where the time of a worker went, on average: "environments" (their steps and resets),
    "inference" (the agent acted), "waiting" (for actions, while the agent did not act), and "between batches" (at
    barrier_in).
    The time until the end of the first batch, with all starts, is left out as soon as there are more. `print` shows
    all of this.
    """

    served: dict[int, int]
    acting: float
    waiting: float
    shares: dict[Bound, float] = field(default_factory=dict)

    @property
    def bound_by(self) -> Bound:
        """The largest of the `shares`: what to change first. "environments" before the first batch."""
        return max(self.shares, key=self.shares.__getitem__, default="environments")

    def __repr__(self) -> str:
        n_acts, n_steps = sum(self.served.values()), sum(n * times for n, times in self.served.items())
        lines = [f"{n_acts:,} steps of the agent, for {n_steps / max(n_acts, 1):.1f} environments on average"]
        if any(self.shares.values()):
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
            lines += [f"time of the workers: {shares}", f"most of it is {_ADVICE[self.bound_by]}"]
        return "\n".join(lines)


class ServerTotals:
    """The inference server's counts, in shared memory; only the server writes them."""

    def __init__(self, most_columns: int, *, shared: bool) -> None:
        """`most_columns` is the largest number of environments that the agent acts for at once."""
        specs = NamedArrays(
            served=ArraySpec((most_columns + 1,), np.dtype(np.int64)),
            seconds=ArraySpec((2,), np.dtype(np.float64)),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the inference server's statistics")

    def count_step(self, n_columns: int) -> None:
        """The agent has acted once, for `n_columns` environments."""
        self.memory.arrays.served[n_columns] += 1

    def add_seconds(self, *, acting: float = 0.0, waiting: float = 0.0) -> None:
        """Add to the times."""
        seconds = self.memory.arrays.seconds
        seconds[0] += acting
        seconds[1] += waiting

    @property
    def stats(self) -> ServerStats:
        """The counts and times so far."""
        return self.with_workers((), None)

    def with_workers(
        self, workers: Sequence[WorkerStats], since: tuple[ServerStats, Sequence[WorkerStats]] | None
    ) -> ServerStats:
        """The counts and times so far, and the shares of the time of these workers `since` then."""
        arrays = self.memory.arrays
        served = {n: times for n, times in enumerate(arrays.served.tolist()) if times}
        acting, waiting = arrays.seconds.tolist()
        n, before, then = max(len(workers), 1), 0.0, list[WorkerStats]()
        if since is not None and sum(worker.batches for worker in workers) > sum(worker.batches for worker in since[1]):
            before, then = since[0].acting, list(since[1])
        stepping, resetting, requesting, idle = (
            (sum(getattr(worker, name) for worker in workers) - sum(getattr(worker, name) for worker in then)) / n
            for name in ("stepping", "resetting", "acting", "waiting")
        )
        stepping += resetting
        inference, whole = min(acting - before, requesting), (stepping + requesting + idle) or 1.0
        seconds: dict[Bound, float] = {"environments": stepping, "inference": inference}
        seconds |= {"waiting": requesting - inference, "between batches": idle}
        return ServerStats(served, acting, waiting, {name: value / whole for name, value in seconds.items()})


class Lags:
    """Sums for `LagStats`."""

    def __init__(self) -> None:
        self._least, self._most, self._sum, self._n = 0, 0, 0, 0

    def add(self, lag: int, n_columns: int) -> None:
        """`n_columns` columns of a batch have this lag."""
        self._least = min(self._least, lag) if self._n else lag
        self._most, self._sum, self._n = max(self._most, lag), self._sum + lag * n_columns, self._n + n_columns

    @property
    def stats(self) -> LagStats:
        return LagStats(self._least, self._sum / max(1, self._n), self._most)


def describe(plans: Sequence[WorkerPlan], pool: Pool, *, has_ended: bool) -> str:
    """The workers of a sampler, for its repr; with a line for what each is doing, unless they have ended."""
    restarts = f", {n} restarts" if (n := pool.restarts.total) else ""
    cpus = sorted({cpu for plan in plans for cpu in plan.cpus})
    pinned = f"on CPUs {', '.join(map(str, cpus))}" if cpus else "not pinned"
    statuses = [] if has_ended else pool.statuses()
    lines = [f"{len(plans)} worker{'s' if len(plans) > 1 else ''}, {pinned}{restarts}"]
    lines += [f"  {status}: {status.doing}" for status in statuses[:_MAX_SHOWN]]
    if len(statuses) > _MAX_SHOWN:
        lines.append(f"  ... and {len(statuses) - _MAX_SHOWN} more")
    return "\n".join(lines)
