"""Which worker owns which columns, training and evaluation environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import integer
from penstock.errors import ConfigError
from penstock.workers.plan import WorkerPlan, span, split

_FIRSTS, _TOTALS = ("first_env_rank", "first_eval_env_rank"), ("n_envs", "n_eval_envs")


@dataclass(frozen=True, kw_only=True)
class EnvRange:
    """Which environments one sampler holds, of those of all samplers on all machines."""

    first_env_rank: int
    n_envs: int  #: of all samplers together
    first_eval_env_rank: int  #: the same for evaluation
    n_eval_envs: int
    generation: int = 0  #: how often these environments have been built again elsewhere

    @classmethod
    def of(
        cls,
        sizes: tuple[int, int],
        rank: int,
        world_size: int,
        given: tuple[tuple[int | None, int | None], tuple[int | None, int | None]],
        generation: int,
    ) -> EnvRange:
        """The environments of one sampler, from the arguments of `initialize`. `sizes`: how many it has, for training
        and for evaluation. `given`: the first ranks and the totals, or None. Without them, all samplers are equally
        large."""
        rank, world_size = integer("rank", rank), integer("world_size", world_size, 1, 2**31)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in range(world_size), got rank={rank!r}, world_size={world_size!r}")
        are_equal, numbers = given == ((None, None), (None, None)), {}
        for n, first, total, start, n_all in zip(sizes, _FIRSTS, _TOTALS, *given, strict=True):
            numbers[first], numbers[total] = rank * n, world_size * n
            if are_equal or (start is None and n_all is None and not n):
                continue
            if world_size != 1 or start is None or n_all is None:
                raise ConfigError(f"give {first} and {total} together, in place of rank and world_size")
            numbers[first] = integer(first, start, 0)
            numbers[total] = integer(total, n_all, numbers[first] + n, 2**31)
        return cls(**numbers, generation=generation)


@dataclass(frozen=True, kw_only=True)
class SamplerPlan(WorkerPlan):
    """What one worker of a sampler owns."""

    eval_columns: range = range(0)  #: its evaluation environments
    eval_env_ranks: range = range(0)  #: their global indices
    #: Its columns of the samples buffer, for each policy: see `Seating.with_cells`.
    cells: tuple[range, ...] = ()
    eval_cells: tuple[range, ...] = ()  #: the same for evaluation
    #: How many trajectories can end in one time step: one for each cell, and with several agents one for each game.
    n_records: int = 0
    n_eval_records: int = 0  #: the same for evaluation
    n_more_records: int = 0  #: how many more in one batch, or in one evaluation
    policies: tuple[str, ...] = ()  #: the names of the policies of a dict of agents

    @property
    def env_text(self) -> str:
        evaluation = f", for evaluation {span(self.eval_env_ranks)}" if self.eval_columns else ""
        return super().env_text + evaluation

    def who_text(self, who: int) -> str:
        return f" by the policy {self.policies[who - 1]!r}" if 0 < who <= len(self.policies) else ""

    def most_trajectories(self, batch_T: int, n_slots: int, eval_max_T: int, eval_max_trajectories: int | None) -> int:
        """The most trajectories that can end in the batches of all slots, or in one evaluation: one per environment
        step; in an evaluation, as many as are wanted and one more row."""
        n_evals = self.n_eval_records
        evaluation = eval_max_T * n_evals
        if eval_max_trajectories is not None and n_evals == len(self.eval_columns):
            evaluation = min(evaluation, eval_max_trajectories + n_evals)
        return max(self.first_record(batch_T, n_slots), evaluation + self.n_more_records, 1)

    def first_record(self, batch_T: int, slot: int) -> int:
        """Where the trajectory records of the batch in this slot begin."""
        return slot * (batch_T * self.n_records + self.n_more_records)


def make_plans(
    batch_B: int,
    eval_n_envs: int,
    cpus: Sequence[tuple[int, ...]],
    env_range: EnvRange,
    *,
    torch_threads: int = 1,
    unit: int = 1,
) -> tuple[SamplerPlan, ...]:
    """One plan per entry of `cpus`. `env_range` are this sampler's environments among all. A plan has a multiple of
    `unit` environments.
    """
    train, evals = (split(n, len(cpus), unit) for n in (batch_B, eval_n_envs))
    first, first_eval = env_range.first_env_rank, env_range.first_eval_env_rank
    return tuple(
        SamplerPlan(
            worker_rank=worker_rank,
            columns=columns,
            env_ranks=range(first + columns.start, first + columns.stop),
            eval_columns=eval_columns,
            eval_env_ranks=range(first_eval + eval_columns.start, first_eval + eval_columns.stop),
            cpus=worker_cpus,
            torch_threads=torch_threads,
            generation=env_range.generation,
        )
        for worker_rank, (columns, eval_columns, worker_cpus) in enumerate(zip(train, evals, cpus, strict=True))
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
