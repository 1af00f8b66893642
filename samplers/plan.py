"""Which worker owns which columns, training and evaluation environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.workers.plan import WorkerPlan, span, split


@dataclass(frozen=True, kw_only=True)
class SamplerPlan(WorkerPlan):
    """What one worker of a sampler owns."""

    eval_columns: range = range(0)  #: its evaluation environments
    eval_env_ranks: range = range(0)  #: their global indices

    @property
    def env_text(self) -> str:
        evaluation = f", for evaluation {span(self.eval_env_ranks)}" if self.eval_columns else ""
        return super().env_text + evaluation

    def most_trajectories(self, n_rows: int, eval_max_T: int, eval_max_trajectories: int | None) -> int:
        """The most trajectories that can end in `n_rows` time steps, or in one evaluation: one per environment step; in
        an evaluation, as many as are wanted and one more row."""
        n_evals = len(self.eval_columns)
        evaluation = eval_max_T * n_evals
        if eval_max_trajectories is not None:
            evaluation = min(evaluation, eval_max_trajectories + n_evals)
        return max(n_rows * len(self.columns), evaluation, 1)

    def first_record(self, batch_T: int, slot: int) -> int:
        """Where the trajectory records of the batch in this slot begin."""
        return slot * batch_T * len(self.columns)


def make_plans(
    batch_B: int,
    eval_n_envs: int,
    cpus: Sequence[tuple[int, ...]],
    *,
    torch_threads: int = 1,
    rank: int = 0,
    n_local: tuple[int, int] = (0, 0),
) -> tuple[SamplerPlan, ...]:
    """One plan per entry of `cpus`. `rank` is this sampler's index among several on many machines.

    If the main process steps environments itself, one more plan comes last, for the last `n_local[0]` training and the
    last `n_local[1]` evaluation environments.
    """
    train, evals = (
        [*split(n - local, len(cpus)), *([range(n - local, n)] if any(n_local) else [])]
        for n, local in zip((batch_B, eval_n_envs), n_local, strict=True)
    )
    first, first_eval = rank * batch_B, rank * eval_n_envs
    return tuple(
        SamplerPlan(
            worker_rank=worker_rank,
            columns=columns,
            env_ranks=range(first + columns.start, first + columns.stop),
            eval_columns=eval_columns,
            eval_env_ranks=range(first_eval + eval_columns.start, first_eval + eval_columns.stop),
            cpus=own_cpus,
            torch_threads=torch_threads,
        )
        for worker_rank, (columns, eval_columns, own_cpus) in enumerate(
            zip(train, evals, [*cpus, ()][: len(train)], strict=True)
        )
    )


def eval_max_T(eval_max_steps: int, eval_n_envs: int) -> int:
    """Time steps of one evaluation: all environments together make at most `eval_max_steps`, and each at least one."""
    return max(1, eval_max_steps // eval_n_envs) if eval_n_envs else 0


def episodes_per_env(episodes: int | None, n_envs: int, columns: range) -> tuple[int, ...] | None:
    """How many of an evaluation's `episodes` each environment of `columns` runs, of `n_envs` in all; None if the
    evaluation does not count episodes."""
    if episodes is None:
        return None
    size, longer = divmod(episodes, n_envs)
    return tuple(size + (column < longer) for column in columns)
