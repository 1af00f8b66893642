"""Column arithmetic: every environment has exactly one worker, whatever the counts."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, ParallelSampler, system
from penstock.envs import CountingEnv
from penstock.samplers.sampler_plan import EnvRange, eval_max_T, make_plans
from penstock.workers.launcher import Launcher
from penstock.workers.plan import Affinity, PoolArguments, StartMethod, assign_cpus, split

counts = st.integers(1, 200)


@given(n=st.integers(0, 500), parts=counts)
def test_split_covers_everything_once_and_evenly(n: int, parts: int) -> None:
    ranges = split(n, parts)
    assert [i for r in ranges for i in r] == list(range(n))
    lengths = [len(r) for r in ranges]
    assert len(ranges) == parts
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(batch_B=counts, eval_n_envs=st.integers(0, 50), n_workers=counts, rank=st.integers(0, 5))
def test_env_ranks_are_unique_across_workers_and_machines(
    batch_B: int, eval_n_envs: int, n_workers: int, rank: int
) -> None:
    cpus = [()] * min(n_workers, batch_B)
    here, next_machine = (
        make_plans(
            batch_B,
            eval_n_envs,
            cpus,
            EnvRange(
                first_env_rank=r * batch_B,
                n_envs=7 * batch_B,
                first_eval_env_rank=r * eval_n_envs,
                n_eval_envs=7 * eval_n_envs,
            ),
        )
        for r in (rank, rank + 1)
    )
    ranks = [r for plan in here + next_machine for r in plan.env_ranks]
    assert ranks == list(range(rank * batch_B, (rank + 2) * batch_B))
    evals = [r for plan in here for r in plan.eval_env_ranks]
    assert evals == list(range(rank * eval_n_envs, (rank + 1) * eval_n_envs))
    assert all(len(plan.columns) for plan in here)


@given(batch_B=counts, n_workers=st.none() | counts, cpus=st.integers(0, 64))
def test_there_are_never_more_workers_than_environments(batch_B: int, n_workers: int | None, cpus: int) -> None:
    sampler = ParallelSampler(CountingEnv, batch_T=1, batch_B=batch_B, n_workers=n_workers)
    n = sampler.acting().count_workers(sampler.config, range(cpus))
    assert 1 <= n <= batch_B
    if n_workers is not None:
        assert n == min(n_workers, batch_B)


@given(steps=st.integers(1, 10_000), n=st.integers(1, 100))
def test_an_evaluation_makes_no_more_steps_than_allowed_unless_that_is_less_than_one_each(steps: int, n: int) -> None:
    assert 1 <= eval_max_T(steps, n) <= max(1, steps // n)


def test_workers_take_the_cpus_of_the_mask_in_turn_or_those_that_are_said() -> None:
    assert assign_cpus(Affinity(), 5, (2, 7)) == [(2,), (7,), (2,), (7,), (2,)]
    assert assign_cpus(Affinity(cpus=[7, [2, 7]]), 2, (2, 7)) == [(7,), (2, 7)]
    assert assign_cpus(Affinity(pin=False), 2, (2, 7)) == [(), ()]
    assert assign_cpus(Affinity(), 2, ()) == [(), ()]  # a system that cannot tell


def test_where_nothing_can_be_pinned_cpus_have_no_effect_which_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            assert assign_cpus(Affinity(cpus=[7, [2, 7]]), 2, ()) == [(), ()]
        with pytest.raises(ConfigError, match="for 2 workers, there are 3"):
            assign_cpus(Affinity(cpus=[7, [2, 7]]), 3, ())
    (warning,) = caught
    assert str(warning.message) == "affinity has no effect: this system cannot pin a process to CPUs"


def test_where_forks_may_crash_a_start_method_that_makes_some_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "WHY_NO_FORK", "because")
    methods: tuple[StartMethod, ...] = ("spawn", "forkserver", "forkserver")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for start_method in methods:
            Launcher(PoolArguments(start_method=start_method).pool_options(), 1)
    (warning,) = caught
    assert str(warning.message) == 'workers may crash with start_method="forkserver": because. Use "spawn"'


@pytest.mark.parametrize(
    ("affinity", "message"),
    [
        (Affinity(cpus=[0, 99]), r"worker 1 to CPUs \[99\]: \[99\] are not among"),
        (Affinity(cpus=[0]), "for 1 workers, there are 2"),
        (Affinity(cpus=[0, []]), r"worker 1 to CPUs \[\]"),
        (Affinity(cpus=[0, 1], pin=False), "leave one out"),
        (Affinity(torch_threads=0), "torch_threads must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_affinity_is_a_clear_error(affinity: Affinity, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_cpus(affinity, 2, (0, 1))
