"""`tune` and `penstock tune`: what they measure, what they say of samplers that break, and what they recommend."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import gymnasium as gym
import psutil
import pytest

import penstock
from penstock import (
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    TuneReport,
    TuneRow,
    tune,
)
from penstock.__main__ import main
from penstock.envs import CountingEnv, EnvContext, SlowEnv

from ..scale import FULL
from ..starter import Program
from ..support import crashing_env

TINY: dict[str, Any] = {"policy": "random", "batch_T": 4, "batch_B": 4, "n_workers": 2, "seconds": 0.2}
COMMAND = ["--policy", "random", "--batch-T", "4", "--batch-B", "4", "--n-workers", "2", "--seconds"]


def row(rate: float, n_workers: int, failure: str | None = None) -> TuneRow:
    options = {"batch_T": 8, "batch_B": 4, "n_workers": n_workers}
    return TuneRow(ParallelSampler, options, [rate / 10, rate, rate * 10], [1.0] * 3, [0.25, 0.5, 0.75], failure)


def test_the_fastest_is_recommended_unless_fewer_workers_are_nearly_as_fast() -> None:
    one = TuneRow(SerialSampler, {"batch_T": 8, "batch_B": 4}, [900.0, 1000.0], [1.0, 1.0], [0.0, 0.0])
    report = TuneReport("make_env", [one, row(1900, 2), row(1950, 4), row(9000, 8, "WorkerDiedError: worker 1 died")])
    line = "sampler = ParallelSampler(make_env, batch_T=8, batch_B=4, n_workers=2)"
    assert report.recommendation.splitlines() == ["# The fastest here: 1,900 steps/s", line]
    lines = str(report).splitlines()
    assert " ".join(lines[1].split()) == "SerialSampler - 950 (925 to 975) 1.0 (1.0 to 1.0) 0% (0% to 0%)"
    assert lines[4].split(None, 2)[2] == "failed: WorkerDiedError: worker 1 died"
    assert "Resets take 50% of the workers' time" in str(report)
    report.rows[2] = row(2000, 4)
    assert "n_workers=4" in report.recommendation
    report.rows[1:] = [row(1000, 2)]
    assert "SerialSampler" not in report.recommendation
    assert "Resets" in str(report)
    report.rows[1:] = [row(960, 2)]
    assert "sampler = SerialSampler(make_env, batch_T=8, batch_B=4)" in report.recommendation
    assert "Resets" not in str(report)
    assert "there is no recommendation" in TuneReport().recommendation


@pytest.mark.parametrize("load", [30.0, 0.0])
def test_a_busy_machine_is_named_before_the_search_and_with_the_result(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    said: list[str] = []
    report = tune(CountingEnv, **{**TINY, "n_workers": 1}, say=said.append)
    text = "30.0 processes ran on average in the last minute, on "
    assert (text in said[0], text in report.busy, text in str(report)) == (load > 0,) * 3
    assert ("Run it again when the machine is idle" in str(report)) == (load > 0)


@pytest.mark.slow
def test_every_sampler_is_measured_and_the_recommendation_is_code() -> None:
    report = tune("CartPole-v1", **{**TINY, "n_workers": (), "policy": "mlp"})
    assert {row.sampler for row in report.rows} == {SerialSampler, ParallelSampler, GpuSampler, AlternatingSampler}
    assert [row.failure for row in report.rows if row.failure] == []
    for row in report.rows:
        assert len(row.steps_per_s) == len(row.cpu_us) == len(row.resetting) > 0
        assert min(row.steps_per_s) > 0
    namespace: dict[str, Any] = {name: getattr(penstock, name) for name in penstock.__all__}
    exec(report.recommendation, namespace)
    with namespace["sampler"] as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert sampler.obtain_samples(0)[0].env.reward.shape == (4, 4)


@pytest.mark.slow
def test_many_workers_are_best_for_environments_that_wait() -> None:
    report = tune(partial(SlowEnv, 0.01), **{**TINY, "batch_B": 8, "n_workers": (2, 8), "seconds": 0.5})
    assert report.best is not None
    assert report.best.options["n_workers"] == 8


class SlowReset(CountingEnv):
    """It burns CPU time in `reset`, and its episodes have one step."""

    def __init__(self) -> None:
        super().__init__(length=1)

    def reset(self, **arguments: Any) -> Any:
        sum(range(400_000))
        return super().reset(**arguments)


@pytest.mark.slow
def test_the_share_of_resets_is_that_of_the_measured_batches() -> None:
    shares = [share for row in tune(SlowReset, **TINY).rows for share in row.resetting]
    assert min(shares) > 0.2
    assert max(shares) <= 1
    # The only resets of this one are before them.
    endless = partial(CountingEnv, length=10**9)
    assert {share for row in tune(endless, **TINY).rows for share in row.resetting} == {0}


@pytest.mark.slow
def test_a_sampler_that_breaks_is_a_row_and_the_others_go_on() -> None:
    def make_env(context: EnvContext) -> gym.Env[Any, Any]:
        # Only workers with rank 2 die, so samplers with two workers do well.
        return crashing_env("step", "kill", at=6 if context.worker_rank == 2 else 10**9)

    report = tune(make_env, **{**TINY, "n_workers": (2, 3)})
    broken = [row for row in report.rows if row.failure]
    assert [row.options.get("n_workers") for row in broken] == [3, 3]
    assert all("WorkerDiedError: worker 2" in str(row.failure) and "SIGKILL" in str(row.failure) for row in broken)
    assert report.best in [row for row in report.rows if not row.failure]
    assert str(report).count("failed: ") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "at", "message"),
    [
        ("raise", 1, "WorkerError"),
        ("hang", 1, "WorkerTimeoutError"),  # in the first batch
        ("hang", 6, "WorkerTimeoutError"),  # in the second, of four steps each
    ],
)
def test_no_sampler_hangs_where_every_one_breaks(how: str, at: int, message: str) -> None:
    env_fn = partial(crashing_env, "step", how, at, os.getpid())
    report = tune(env_fn, **{**TINY, "n_workers": 1, "step_timeout": 0.5})
    one, *others = report.rows
    assert all(message in str(row.failure) for row in others)
    assert one.failure == "not tried, since every other sampler has failed"
    assert report.best is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_fn": 3}, "env_fn must be a callable"),
        ({"env_fn": "NoSuchEnv-v0"}, "not a registered environment id"),
        ({"policy": "cnn"}, 'policy must be "random", "mlp" or a function'),
        ({"policy": "mlp", "env_fn": penstock.envs.NestedEnv}, "a function that makes your agent"),
        ({"batch_T": []}, "batch_T must be an integer"),
        ({"batch_B": 0}, "batch_B must be an integer of at least 1"),
        ({"n_workers": 1.5}, "n_workers must be an integer"),
        ({"n_workers": (2, 0)}, "n_workers must be an integer of at least 1"),
        ({"seconds": 0}, "seconds must be a positive number"),
        ({"step_timeout": -1}, "step_timeout must be a positive number"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(**{"env_fn": "CartPole-v1", **TINY, **arguments})  # type: ignore[arg-type]


# ---- the command line --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "penstock.envs:CountingEnv", *COMMAND, "0.2"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()[1:4]] == [
        "SerialSampler", "ParallelSampler", "GpuSampler",
    ]  # fmt: skip
    assert "Sampler(CountingEnv, batch_T=4, batch_B=4" in printed.out
    assert "round 1 of 8" in printed.err


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "NoSuchEnv-v0"]) == 2
    assert "not a registered environment id" in capsys.readouterr().err
    assert main(["tune", "penstock.envs:NoSuchEnv"]) == 2
    assert re.search(r"cannot load penstock.envs:NoSuchEnv.*no attribute 'NoSuchEnv'", capsys.readouterr().err)


def program(*options: str) -> subprocess.Popen[str]:
    """`python -m penstock tune`. Daily, it is a fork of a process that has imported torch."""
    if FULL:
        command = [sys.executable, "-m", "penstock", "tune", *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return Program([penstock.__main__.__file__, "tune", *options], forks_supervisor=True)


@pytest.mark.slow
@pytest.mark.usefixtures("starter")
def test_ctrl_c_prints_what_is_known_and_leaves_nothing() -> None:
    with program("CartPole-v1", *COMMAND, "6") as process:
        assert process.stderr is not None
        assert any("round 2" in line for line in process.stderr)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in errors
    assert "sampler = " in printed
    assert "Traceback" not in errors
    assert len(started) >= 4
    assert psutil.wait_procs(started, timeout=10)[1] == []
