"""`sampler.metrics()`: the same flat dict of floats at every call, and right figures in it."""

import csv
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SamplerStateError,
    SamplerStats,
    SerialSampler,
    ServerStats,
    TrajInfo,
    WorkerStats,
)
from penstock.envs import CountingEnv
from penstock.samplers import metrics as module
from penstock.samplers.metrics import SamplerMetrics

SAMPLERS = [
    SerialSampler,
    partial(ParallelSampler, n_workers=2),
    partial(GpuSampler, n_workers=2),
    partial(GpuSampler, n_workers=2, server="process"),
    partial(AlternatingSampler, n_workers=2),
    partial(AsyncSampler, n_workers=2, lag=1),
]


class Pushes(TrajInfo):
    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.Pushes, self.Last, self._hidden = 0, None, 1.0

    def step(self, observation: Any, action: Any, *more: Any) -> None:
        super().step(observation, action, *more)
        self.Pushes += int(action == 1)
        self.Last = observation


KINDS = ("idle", "acting", "stepping", "resetting")


@pytest.mark.parametrize("cls", SAMPLERS)
def test_every_sampler_has_the_same_figures(cls: Any, tmp_path: Path) -> None:
    with cls(CountingEnv, batch_T=8, batch_B=4, eval_n_envs=2, eval_max_steps=40, traj_info_cls=Pushes) as sampler:
        with pytest.raises(SamplerStateError, match="metrics was called before initialize"):
            sampler.metrics()
        sampler.initialize(RandomAgent(), seed=0)
        first = sampler.metrics()
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        infos = [info for itr in range(3) for info in sampler.obtain_samples(itr)[1]]
        evaluation = sampler.evaluate_agent(3)
        last = sampler.metrics()
    assert first.keys() == last.keys()
    assert all(type(value) is float for value in [*first.values(), *last.values()])
    assert (first["sampler/env_steps"], math.isnan(first["train/Return_mean"])) == (0.0, True)
    ahead = 1 if isinstance(sampler, AsyncSampler) else 0  # the batch that has begun
    assert 3 <= last["sampler/batches"] <= 3 + ahead
    assert 3 * 32 <= last["sampler/env_steps"] <= (3 + ahead) * 32
    assert last["sampler/steps_per_second"] > 0
    assert last["sampler/policy_version"] == 1.0
    for group, own in (("train", infos), ("eval", evaluation)):
        assert last[f"{group}/trajectories"] == len(own) > 0
        for name in ("Return", "Length", "Pushes"):
            values = [getattr(info, name) for info in own]
            assert last[f"{group}/{name}_mean"] == pytest.approx(sum(values) / len(values))
            assert (last[f"{group}/{name}_min"], last[f"{group}/{name}_max"]) == (min(values), max(values))
    assert not any("Last" in name or "hidden" in name or "discount_" in name for name in last)
    for rank in range(sampler.n_workers):
        assert sum(last[f"worker_{rank}/{kind}_share"] for kind in KINDS) == pytest.approx(1)
    is_central = isinstance(sampler, GpuSampler)
    assert ("server/idle_share" in last, "sampler/policy_lag" in last) == (is_central, bool(ahead))
    if is_central:
        assert 1 <= last["server/envs_per_step"] <= 4
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, first)
        writer.writerows([first, last])


def test_rates_and_shares_are_those_since_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = SamplerMetrics(TrajInfo(), has_evaluation=False)
    worker = WorkerStats(
        worker_rank=0,
        env_ranks=range(2),
        cpus=(),
        batches=1,
        steps=100,
        stepping=1.0,
        acting=2.0,
        resetting=4.0,
        waiting=1.0,
        trajectories=7,
        restarts=2,
        lost_trajectories=3,
    )
    other = replace(worker, worker_rank=1, waiting=5.0)
    now[0] = 105.0
    figures = metrics.figures(SamplerStats((worker, other), 0), ServerStats({1: 1, 3: 1}, 1.0, 3.0), 4)
    assert figures["sampler/steps_per_second"] == 200 / 5
    assert (figures["sampler/seconds"], figures["sampler/trajectories"]) == (5.0, 14.0)
    assert (figures["sampler/restarts"], figures["sampler/lost_trajectories"]) == (4.0, 6.0)
    assert (figures["worker_0/idle_share"], figures["worker_1/idle_share"]) == (1 / 8, 5 / 12)
    assert figures["sampler/idle_share"] == (1 / 8 + 5 / 12) / 2
    assert (figures["server/idle_share"], figures["server/envs_per_step"]) == (0.75, 2.0)
    assert not any(name.startswith("eval/") for name in figures)
    now[0] = 107.0
    later = replace(worker, steps=150, waiting=1.5, stepping=1.5, acting=3.0)
    figures = metrics.figures(SamplerStats((later, other), 0), ServerStats({1: 1, 3: 1}, 2.0, 4.0), 4)
    assert figures["sampler/steps_per_second"] == 50 / 2
    shares = [figures[f"worker_0/{kind}_share"] for kind in KINDS]
    assert shares == [0.25, 0.5, 0.25, 0.0]
    assert figures["worker_1/idle_share"] == 0.0, "no time was counted"
    assert figures["server/idle_share"] == 0.5


def test_the_newest_hundred_trajectories_of_training_count() -> None:
    metrics = SamplerMetrics(TrajInfo(), has_evaluation=True)
    stats = SamplerStats((WorkerStats(0, range(1), (), 0, 0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0),), 0)
    for first in (0, 150):
        metrics.training.extend(TrajInfo.from_records((0, 0, 1, float(i), 1, 0.0) for i in range(first, first + 150)))
    metrics.evaluation = TrajInfo.from_records([(0, 0, 3, 5.0, 1, 0.0)])
    figures = metrics.figures(stats, None, None)
    assert (figures["train/trajectories"], figures["train/Return_min"], figures["train/Return_max"]) == (100, 200, 299)
    assert (figures["eval/trajectories"], figures["eval/Length_mean"]) == (1, 3)
    assert math.isnan(figures["sampler/policy_version"])


def test_the_statistics_are_printed_as_a_table() -> None:
    with SerialSampler(CountingEnv, batch_T=4, batch_B=3) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        stats = sampler.stats()
    assert repr(stats) == str(stats), "a notebook shows the table too"
    units, heading, line, total = str(stats).splitlines()
    assert units.startswith("times in seconds")
    assert heading.split() == ["worker", "envs", "steps", "acting", "stepping", "resetting", "waiting", "idle"]
    assert line.split()[:5] == ["0", "0", "to", "2", "12"]
    assert total.endswith("MiB shared")
