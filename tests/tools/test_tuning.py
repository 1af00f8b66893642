"""What `tune` tries and what it recommends, on given figures. tests/process/test_tune.py runs it."""

from __future__ import annotations

import pytest

from penstock import ConfigError, TuneReport, TuneRow, tune
from penstock.tools.candidate import Candidate, Turn
from penstock.tools.tuning import choose, first_candidates

ONE = Candidate("SerialSampler", 8, 4)
TWO = Candidate("ParallelSampler", 8, 4, n_workers=2)
FOUR = Candidate("ParallelSampler", 8, 4, n_workers=4)


def row(candidate: Candidate, *rates: float, first_round: int = 1, failure: str | None = None) -> TuneRow:
    numbers = list(range(first_round, first_round + len(rates)))
    return TuneRow(candidate, numbers, [Turn(rate, 10.0) for rate in rates], failure)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({ONE: (100, 100), TWO: (60, 60), FOUR: (50, 50)}, ONE),
        ({ONE: (100, 100), TWO: (190, 190), FOUR: (150, 150)}, TWO),
        ({ONE: (100, 100), TWO: (190, 190), FOUR: (380, 380)}, FOUR),
        ({ONE: (100, 100), TWO: (102, 102), FOUR: (50, 50)}, ONE),  # 2 % are no reason for processes
        ({ONE: (100, 100), TWO: (190, 190), FOUR: (193, 193)}, TWO),  # nor for more of them
        ({ONE: (100, 10, 100), TWO: (150, 15, 150), FOUR: (120, 200, 120)}, TWO),  # ratios of the same rounds
    ],
)
def test_the_simplest_of_the_fastest_is_chosen(rates: dict[Candidate, tuple[float, ...]], best: Candidate) -> None:
    chosen = choose([row(candidate, *figures) for candidate, figures in rates.items()])
    assert chosen is not None
    assert chosen.candidate == best


def test_a_candidate_that_failed_is_not_chosen() -> None:
    fast_but_failed = row(TWO, 900, failure="WorkerError: no")
    chosen = choose([row(ONE, 100), fast_but_failed, row(FOUR, 200)])
    assert chosen is not None
    assert chosen.candidate == FOUR
    assert choose([row(ONE, failure="slow"), row(TWO, failure="slow")]) is None
    assert choose([]) is None


def test_without_one_process_steps_per_second_decide() -> None:
    chosen = choose([row(ONE, failure="slow"), row(TWO, 100), row(FOUR, 200)])
    assert chosen is not None
    assert chosen.candidate == FOUR


def test_stages_are_compared_through_one_process() -> None:
    # The machine was half as fast in the second stage, which is rounds 3 and 4.
    one = row(ONE, 100, 100, 50, 50)
    rows = [one, row(TWO, 150, 150), row(FOUR, 100, 100, first_round=3)]
    assert rows[2].ratios(one) == [2, 2]
    chosen = choose(rows)
    assert chosen is not None
    assert chosen.candidate == FOUR


def test_the_recommendation_is_code_and_says_so_if_one_process_is_fastest() -> None:
    report = TuneReport('"CartPole-v1"', [row(ONE, 100, 100), row(TWO, 60, 60)])
    line = 'sampler = SerialSampler("CartPole-v1", batch_T=8, batch_B=4)'
    assert report.recommendation.splitlines() == ["# One process is fastest here.", line]
    best = Candidate("ParallelSampler", 8, 4, n_workers=2, inference="numpy")
    report.rows.append(row(best, 250, 250))
    assert report.recommendation.splitlines() == [
        "# 2.50 times the speed of one process.",
        'sampler = ParallelSampler("CartPole-v1", batch_T=8, batch_B=4, n_workers=2)'
        "  # and the agent with inference='numpy'",
    ]
    assert str(report).endswith(report.recommendation)
    assert "no recommendation" in TuneReport().recommendation
    alone = TuneReport("env_fn", [row(ONE, 100), row(TWO, failure="slow"), row(FOUR, 300, failure="slow")])
    assert alone.recommendation.startswith("# No other candidate could be measured.")


def test_the_learner_limits_what_is_gained() -> None:
    # 10 µs a step in one process, 5 µs with two workers, and 10 µs of training.
    report = TuneReport("env_fn", [row(ONE, 100_000), row(TWO, 200_000)], learner_us=10.0)
    text = str(report)
    assert "training takes 50% of the time of one process: no sampler makes the whole more than 2.00 times" in text
    assert "The recommended one gives 66,667 steps/s, 1.33 times one process" in text
    assert "AsyncSampler, which samples while you train, gives at most 2.00 times" in text
    assert report.recommendation.startswith("# 1.33 times the speed of one process, with your training.")
    assert report.as_dict()["learner_us"] == 10.0
    without = str(TuneReport("env_fn", report.rows))
    assert "Nothing was trained" in without
    assert "--learner-us" in without


def test_where_no_sampler_can_help_one_process_is_recommended() -> None:
    # 10 µs a step in one process, 5 µs with two workers, and 1 ms of training.
    report = TuneReport("env_fn", [row(ONE, 100_000), row(TWO, 200_000)], learner_us=1000.0)
    assert report.best is not None
    assert report.best.candidate == ONE
    assert report.recommendation.startswith("# One process is fastest here, with your training.")
    assert "training takes 99% of the time of one process: no sampler makes the whole more than 1.01 times" in str(
        report
    )


def test_an_error_of_several_candidates_is_shown_once() -> None:
    rows = [
        row(ONE, failure="WorkerError: worker 0 (pid 11) raised ValueError: no server"),
        row(TWO, failure="WorkerError: worker 0 (pid 22) raised ValueError: no server\nworker 1 (pid 23) raised too"),
        row(FOUR, failure="WorkerError: worker 0 (pid 33) raised ValueError: no server"),
        row(Candidate("GpuSampler", 8, 4), failure="slow"),
    ]
    assert str(TuneReport(rows=rows)).partition("parentheses.\n")[2].splitlines()[:3] == [
        "SerialSampler (batch_T=8, batch_B=4): WorkerError: worker 0 (pid 11) raised ValueError: no server "
        "(the same error for 2 more)",
        "GpuSampler (batch_T=8, batch_B=4): slow",
        "",
    ]


def test_more_workers_than_cpus_are_tried_but_never_more_than_environments() -> None:
    candidates = first_candidates(128, 32, 2, None)
    assert candidates[0] == Candidate("SerialSampler", 128, 32)
    assert [each.n_workers for each in candidates if each.sampler == "ParallelSampler"] == [2, 4, 16]
    assert {each.sampler for each in candidates} == {
        "SerialSampler", "ParallelSampler", "GpuSampler", "AlternatingSampler",
    }  # fmt: skip
    assert all((each.n_workers or 0) <= 3 for each in first_candidates(128, 3, 8, None))
    assert {each.sampler for each in first_candidates(128, 1, 8, None)} == {"SerialSampler"}
    chosen = first_candidates(128, 32, 2, [3])
    assert {each.n_workers for each in chosen} == {None, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_fn": 3}, "env_fn must be a callable"),
        ({"env_fn": "NoSuchEnv-v0"}, "not a registered environment id"),
        ({"policy": "cnn"}, 'policy must be "random", "mlp" or a function'),
        ({"batch_T": []}, "batch_T is empty"),
        ({"batch_B": (4, 0)}, "batch_B must be an integer of at least 1"),
        ({"n_workers": 1.5}, "n_workers must be an integer"),
        ({"seconds": 0}, "seconds must be a positive number"),
        ({"limit": -1}, "limit must be a positive number"),
        ({"start_method": "thread"}, "start_method must be one of"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(**{"env_fn": "CartPole-v1", **arguments})  # type: ignore[arg-type]
