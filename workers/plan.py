"""All column arithmetic: which worker owns which environments, CPUs and evaluation environments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import ConfigError

__all__ = ["Affinity", "WorkerPlan", "assign_cpus", "make_plans", "server_plan", "split"]


@dataclass(frozen=True)
class Affinity:
    """Where workers run.

    `cpus`: one entry per worker, each a CPU number or several; None takes the CPUs of this process's
    own mask in turn. `pin=False` leaves workers wherever the system puts them. `torch_threads` is the
    number of threads that torch, OpenMP and MKL use in each worker.
    """

    cpus: Sequence[int | Sequence[int]] | None = None
    pin: bool = True
    torch_threads: int = 1


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker owns. Ranges count within this sampler; `env_ranks` across all machines."""

    worker_rank: int
    columns: range  #: its columns of the samples buffer
    env_ranks: range  #: the global indices of the environments in those columns
    eval_columns: range  #: its evaluation environments
    eval_env_ranks: range  #: their global indices
    cpus: tuple[int, ...]  #: CPUs to run on; empty: not pinned
    torch_threads: int
    generation: int = 0  #: how many workers had these columns before and failed

    @property
    def is_server(self) -> bool:
        """Whether this is the inference server, which owns no columns, as every worker does."""
        return not self.columns

    @property
    def name(self) -> str:
        """As errors call it."""
        return "the inference server" if self.is_server else f"worker {self.worker_rank}"

    def capacity(self, batch_T: int, eval_max_T: int, eval_max_trajectories: int | None) -> int:
        """The most trajectories that can end between two gates: one per environment step; and in an
        evaluation, those of one row more than are wanted."""
        n_evals = len(self.eval_columns)
        evaluation = eval_max_T * n_evals
        if eval_max_trajectories is not None:
            evaluation = min(evaluation, eval_max_trajectories + n_evals)
        return max(batch_T * len(self.columns), evaluation, 1)


def split(n: int, parts: int) -> list[range]:
    """`range(n)` in `parts` consecutive ranges whose lengths differ by one at most, longest first."""
    size, longer = divmod(n, parts)
    bounds = [i * size + min(i, longer) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def eval_max_T(eval_max_steps: int, eval_n_envs: int) -> int:
    """Time steps per evaluation so that all environments together make `eval_max_steps` at most, and
    at least one each."""
    return max(1, eval_max_steps // eval_n_envs) if eval_n_envs else 0


def episode_shares(episodes: int | None, n_envs: int, columns: range) -> tuple[int, ...] | None:
    """How many of an evaluation's `episodes` each environment of `columns` runs, of `n_envs` in all; None
    if they are not counted."""
    if episodes is None:
        return None
    size, longer = divmod(episodes, n_envs)
    return tuple(size + (column < longer) for column in columns)


def make_plans(
    batch_B: int,
    eval_n_envs: int,
    cpus: Sequence[tuple[int, ...]],
    *,
    torch_threads: int = 1,
    rank: int = 0,
    kept: tuple[int, int] = (0, 0),
) -> tuple[WorkerPlan, ...]:
    """One plan per entry of `cpus`. `rank` is this sampler's among several on many machines.

    One plan more, the last, is for the main process itself if it keeps some environments: the last `kept[0]` of
    those for training and `kept[1]` of those for evaluation.
    """
    n_workers = len(cpus)
    shares = [split(n - own, n_workers) for n, own in zip((batch_B, eval_n_envs), kept, strict=True)]
    if any(kept):
        shares = [
            [*ranges, range(n - own, n)] for ranges, n, own in zip(shares, (batch_B, eval_n_envs), kept, strict=True)
        ]
        cpus = [*cpus, ()]
    plans = []
    for worker_rank, (columns, evals) in enumerate(zip(*shares, strict=True)):
        first, first_eval = rank * batch_B, rank * eval_n_envs
        plans.append(
            WorkerPlan(
                worker_rank,
                columns,
                range(first + columns.start, first + columns.stop),
                evals,
                range(first_eval + evals.start, first_eval + evals.stop),
                cpus[worker_rank],
                torch_threads,
            )
        )
    return tuple(plans)


def server_plan(plans: Sequence[WorkerPlan], torch_threads: int) -> WorkerPlan:
    """The plan of an inference server that is a process of its own: the rank behind the workers', and no columns."""
    nothing = range(0)
    return WorkerPlan(len(plans), nothing, nothing, nothing, nothing, (), torch_threads)


def assign_cpus(affinity: Affinity, n_workers: int, mask: Sequence[int]) -> list[tuple[int, ...]]:
    """The CPUs of every worker. `mask`: the CPUs that this process may use, empty if unknown.

    Raises `ConfigError` for a wrong number of entries or a CPU outside the mask.
    """
    if not hasattr(affinity.torch_threads, "__index__") or affinity.torch_threads < 1:
        raise ConfigError(f"torch_threads must be at least 1, got {affinity.torch_threads!r}")
    if affinity.cpus is None:
        pin = affinity.pin and len(mask) > 0
        return [(mask[i % len(mask)],) if pin else () for i in range(n_workers)]
    if not affinity.pin:
        raise ConfigError("affinity gives cpus and pin=False at once: leave one out")
    try:
        entries = [
            (operator.index(entry),) if hasattr(entry, "__index__") else tuple(map(operator.index, entry))
            for entry in affinity.cpus
        ]
    except TypeError:
        raise ConfigError(
            f"affinity must list, for each worker, a CPU number or several, got {affinity.cpus!r}"
        ) from None
    if len(entries) != n_workers:
        raise ConfigError(f"affinity lists CPUs for {len(entries)} workers, there are {n_workers}: give one entry each")
    for i, entry in enumerate(entries):
        # The system would quietly drop what is not allowed and pin to the rest.
        outside = sorted(set(entry) - set(mask))
        if not entry or outside:
            raise ConfigError(
                f"affinity pins worker {i} to CPUs {list(entry)}"
                + (f", of which {outside} are not among those this process may use: {list(mask)}" if entry else "")
            )
    return entries


def n_workers_default(n_workers: int | None, batch_B: int, mask: Sequence[int]) -> int:
    """The number of workers: as asked, else one per usable CPU, and never more than environments."""
    return max(1, min(n_workers or len(mask) or 1, batch_B))
