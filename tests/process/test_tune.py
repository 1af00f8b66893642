"""`tune` and `penstock tune` with real processes and tiny budgets."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest

import penstock
from penstock import ConfigError, TuneReport, tune
from penstock.__main__ import main
from penstock.envs import CountingEnv, CrashingEnv, EnvContext, SlowEnv

from ..scale import FULL
from ..starter import Program

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tune")]  # one supervisor imports torch for all trials

TINY: dict[str, Any] = {"policy": "random", "batch_T": 4, "batch_B": 4, "n_workers": 2, "seconds": 0.3}


def samplers(report: TuneReport) -> list[str]:
    return [row.candidate.sampler for row in report.rows]


def test_every_candidate_has_turns() -> None:
    report = tune("CartPole-v1", **{**TINY, "batch_T": (4, 8), "n_workers": None})
    assert set(samplers(report)) == {"SerialSampler", "ParallelSampler", "GpuSampler", "AlternatingSampler"}
    assert [row.failure for row in report.rows if row.failure] == []
    for row in report.rows:
        assert row.turns, row.candidate
        assert all(turn.steps_per_s > 0 and turn.cpu_us > 0 for turn in row.turns)
        assert row.ratios(report.rows[0])
    assert report.best is not None
    assert {row.candidate.batch_T for row in report.rows} == {4, 8}
    namespace: dict[str, Any] = {name: getattr(penstock, name) for name in penstock.__all__}
    exec(report.recommendation, namespace)
    with namespace["sampler"] as sampler:
        sampler.initialize(penstock.RandomAgent(), seed=0)
        assert sampler.obtain_samples(0)[0].env.reward.shape == (sampler.batch_T, 4)


def test_many_workers_are_best_for_environments_that_wait() -> None:
    report = tune(partial(SlowEnv, 0.02), **{**TINY, "batch_B": 8, "n_workers": (2, 8), "seconds": 3})
    assert report.best is not None
    assert report.best.candidate.n_workers == 8
    assert statistics.median(report.best.ratios(report.rows[0])) > 2
    assert "times the speed of one process" in report.recommendation


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_mlp_acts_for_both_kinds_of_actions(env_id: str) -> None:
    report = tune(env_id, **{**TINY, "policy": "mlp", "n_workers": 1})
    assert {row.failure for row in report.rows} == {None}
    assert {"SerialSampler", "ParallelSampler", "GpuSampler"} == set(samplers(report))


def test_the_mlp_refuses_observations_that_it_cannot_read() -> None:
    report = tune(partial(penstock.envs.NestedEnv), **{**TINY, "policy": "mlp", "n_workers": 1})
    assert report.best is None
    assert all("a function that makes your agent" in str(row.failure) for row in report.rows)


def test_inference_is_tried_if_the_agent_has_this_argument() -> None:
    def make_agent(inference: str = "torch") -> penstock.RandomAgent:
        if inference == "numpy":
            raise ConfigError("cannot express Conv2d")
        return penstock.RandomAgent()

    report = tune("CartPole-v1", **{**TINY, "policy": make_agent})
    tried = {row.candidate.inference for row in report.rows}
    assert tried == {None, "traced", "numpy"}
    for row in report.rows:
        assert ("cannot express Conv2d" in (row.failure or "")) == (row.candidate.inference == "numpy")
    assert "cannot express Conv2d" in str(report)


def test_one_candidate_fails_and_the_others_go_on() -> None:
    def make_env(context: EnvContext) -> gym.Env[Any, Any]:
        return CrashingEnv("step", at=1 if context.worker_rank == 1 else 10**9)

    report = tune(make_env, **TINY)
    assert report.rows[0].turns
    assert report.rows[0].failure is None
    assert all("CrashingEnv raises in step" in str(row.failure) for row in report.rows[1:])
    assert "No other candidate could be measured" in report.recommendation
    assert "CrashingEnv raises in step" in str(report)
    json.dumps(report.as_dict())


@pytest.mark.parametrize(
    ("where", "how", "at", "message"),
    [
        ("step", "raise", 6, "CrashingEnv raises in step"),
        ("init", "raise", 1, "CrashingEnv raises in init"),
        ("step", "kill", 1, "its process died"),
        ("step", "hang", 1, "slow or hanging: start and first batch took more than 1 s"),
        ("step", "hang", 6, "slow or hanging: a batch of 4 time steps took more than 1 s"),
        ("init", "hang", 1, "slow or hanging"),
    ],
)
def test_failures_are_reported(where: str, how: str, at: int, message: str) -> None:
    env = partial(CrashingEnv, where, how, at)
    began = time.monotonic()
    report = tune(env, **{**TINY, "batch_B": 1, "n_workers": 1, "seconds": 0.1, "limit": 1.0})
    assert report.rows[0].candidate.sampler == "SerialSampler"
    assert message in str(report.rows[0].failure)
    assert all(row.failure for row in report.rows)
    assert report.best is None
    assert time.monotonic() - began < 60


def test_an_environment_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be pickled for the trials"):
        tune(partial(CountingEnv, reward_scale=threading.Lock()), **TINY)


# ---- the command line --------------------------------------------------------------------------------

COMMAND = ["--policy", "random", "--batch-T", "4", "--batch-B", "4", "--n-workers", "2", "--seconds", "0.2"]


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tune.json"
    assert main(["tune", "penstock.envs:CountingEnv", *COMMAND, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert "steps/s" in printed.out
    assert "Sampler(CountingEnv, batch_T=4, batch_B=4" in printed.out
    assert "they take turns" in printed.err
    content = json.loads(file.read_text(encoding="utf-8"))
    assert [row["sampler"] for row in content["rows"]] == ["SerialSampler", "ParallelSampler", "GpuSampler"]
    assert all(len(row["steps_per_s"]) == len(row["rounds"]) > 0 for row in content["rows"])
    assert content["recommendation"] in printed.out
    assert content["machine"].keys() >= {"python", "usable CPUs"}


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "NoSuchEnv-v0"]) == 2
    assert "not a registered environment id" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"cannot load penstock.envs:NoSuchEnv.*no attribute 'NoSuchEnv'"):
        main(["tune", "penstock.envs:NoSuchEnv"])


def program(*options: str) -> subprocess.Popen[str]:
    """`python -m penstock tune`. Daily, it is a fork of a process that has imported torch, as are its trials."""
    if FULL:
        command = [sys.executable, "-m", "penstock", "tune", *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return Program([penstock.__main__.__file__, "tune", *options], forks_supervisor=True)


@pytest.mark.usefixtures("starter")
def test_ctrl_c_prints_what_is_known_and_leaves_nothing() -> None:
    with program("CartPole-v1", *COMMAND[:-1], "60") as process:
        assert process.stderr is not None
        assert any("each has had a turn" in line for line in process.stderr)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in printed
    assert "Sampler(" in printed
    assert "Traceback" not in errors
    assert len(started) >= 3
    assert psutil.wait_procs(started, timeout=10)[1] == []
