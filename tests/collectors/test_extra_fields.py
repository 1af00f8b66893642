"""Fields that a collector declares: they come out of every sampler, and a replay keeps them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    SpaceError,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import BatchedCartPole, CountingEnv
from penstock.learning import Ratio, Replay, Sequences
from penstock.testing import Fault, check_collector, faulty_env

from ..scale import scaled, with_start_methods

T, B, LENGTH = 8, 4, 5


class Cost(ResetCollector):
    """Writes a cost for each step, and the goal of the environment in every second row."""

    extra_fields: ClassVar[Any] = {"cost": np.float32(0), "goal": spaces.Box(-1, 1, (2,), np.float64)}

    def collect_batch(self, itr: int) -> None:
        self.begin_batch(itr)
        for t in range(self.batch_T):
            self.act(t)
            self.step_envs(t)
            self.record_extra(t, cost=2 * self.samples.reward[t + 1])
            if t % 2:
                self.record_extra(t, goal=np.repeat(np.array(self.columns.env_ranks)[:, None], 2, 1))
        self.end_batch()


def require_right(samples: Any) -> None:
    extra = samples.env.extra
    assert torch.equal(extra.cost, 2 * samples.env.reward)
    assert extra.goal.shape == (T, B, 2)
    assert extra.goal.dtype == torch.float64
    assert torch.equal(extra.goal[1::2], torch.arange(B).double()[None, :, None].expand(T // 2, B, 2))
    assert not extra.goal[::2].any(), "zero where nothing was written"


SAMPLERS: dict[str, Any] = {
    "serial": SerialSampler,
    "parallel": partial(ParallelSampler, n_workers=3),
    "slots": partial(ParallelSampler, n_workers=2, n_slots=2, debug=True),
    "central": partial(GpuSampler, n_workers=2),
    "process": partial(GpuSampler, n_workers=2, server="process"),
    "alternating": partial(AlternatingSampler, n_workers=2),
    "async": partial(AsyncSampler, n_workers=2, lag=1),
}


@with_start_methods("kind", SAMPLERS)
def test_every_sampler_returns_them(kind: str, start_method: str) -> None:
    options = {"batch_T": T, "batch_B": B, "start_method": start_method}
    with SAMPLERS[kind](partial(CountingEnv, LENGTH), collector_cls=Cost, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        if kind == "async":
            sampler.start()
        for itr in range(4):
            samples, _ = sampler.obtain_samples(itr)
            require_right(samples)
            assert torch.equal(samples.flatten().env.extra.cost, samples.env.extra.cost.flatten())


@pytest.mark.slow
def test_a_replaced_worker_writes_its_columns_again(tmp_path: Path) -> None:
    env_fn = faulty_env(partial(CountingEnv, LENGTH), Fault("exit", at=13, marker=str(tmp_path / "failed")))
    options: dict[str, Any] = {"collector_cls": Cost, "n_workers": 2, "on_worker_failure": "restart"}
    with ParallelSampler(env_fn, batch_T=T, batch_B=B, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(4):
            require_right(sampler.obtain_samples(itr)[0])
        assert sampler.stats().restarts == 1


@pytest.mark.slow
def test_the_checks_of_collectors_accept_them() -> None:
    check_collector(Cost, partial(CountingEnv, LENGTH), n_workers=scaled((2, 3), (2,)))


def test_transitions_have_them_and_env_info() -> None:
    options: dict[str, Any] = {"collector_cls": Cost, "env_info": ["count"]}
    with SerialSampler(partial(CountingEnv, LENGTH), batch_T=T, batch_B=B, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        steps = sampler.obtain_samples(0)[0].transitions(0.9)
    assert torch.equal(steps.extra.cost, 2 * steps.reward)
    assert torch.equal(steps.env_info.count.float(), steps.reward)


PARTS = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 1, (2,))})


@pytest.mark.parametrize(
    ("declared", "name", "value", "text"),
    [
        (np.float32(0), "cost", np.zeros(3), r"Wrong must write extra.cost with shape \(2,\) and dtype float32, as "),
        (np.float32(0), "cost", 1.0, r"extra.cost with shape \(2,\) .*, as extra_fields declares, got \(\) float64"),
        (np.float32(0), "cost", None, r"extra.cost with shape \(2,\) and dtype float32, .*, got \(\) object"),
        (np.float32(0), "speed", np.zeros(2), r"extra_fields of Wrong has no 'speed', only \['cost'\]: declare it "),
        (np.float32(0), "t", np.zeros(2), r"extra_fields of Wrong has no 't', only \['cost'\]: declare it there"),
        (None, "cost", np.zeros(2), r"extra_fields of Wrong has no 'cost', only \[\]: declare it there"),
        (PARTS, "cost", {"a": np.zeros(2, int)}, r"extra.cost with the fields \['a', 'b'\], .* got .* \['a'\]"),
        (PARTS, "cost", {"a": np.zeros(2, int), "b": np.zeros(2)}, r"extra.cost.b with shape \(2, 2\)"),
    ],
)
def test_a_wrong_value_is_named(declared: Any, name: str, value: Any, text: str) -> None:
    class Wrong(ResetCollector):
        extra_fields: ClassVar[Any] = {} if declared is None else {"cost": declared}

        def step_envs(self, t: int) -> None:
            super().step_envs(t)
            self.record_extra(t, **{name: value})

    with SerialSampler(CountingEnv, batch_T=2, batch_B=2, collector_cls=Wrong) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(WorkerError, match=rf"^worker 0 \(.*env_rank 0 to 1\) raised .*SpaceError .*t=0.*{text}"):
            sampler.obtain_samples(0)


@pytest.mark.parametrize(
    ("dtype", "value", "shown"), [(np.int32, 0.5, "int32, .* got float64 0.5"), (np.uint8, 300, "uint8, .* int64 300")]
)
def test_a_value_that_would_change_is_named_with_its_worker_and_environment(dtype: Any, value: Any, shown: str) -> None:
    class Wrong(ResetCollector):
        extra_fields: ClassVar[Any] = {"cost": dtype(0)}

        def step_envs(self, t: int) -> None:
            super().step_envs(t)
            if (ranks := np.array(self.columns.env_ranks))[-1] == 3:
                self.record_extra(t, cost=np.where(ranks == 3, value, 0))

    with ParallelSampler(CountingEnv, batch_T=2, batch_B=4, n_workers=2, collector_cls=Wrong) as sampler:
        sampler.initialize(RandomAgent())
        text = rf"^worker 1 .*SpaceError .*extra\.cost of env_rank 3 must have dtype {shown}: convert it, or declare"
        with pytest.raises(WorkerError, match=text):
            sampler.obtain_samples(0)


class Waiting(WaitResetCollector):
    extra_fields: ClassVar[Any] = {"steps": np.int32(0)}

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        self.samples.extra.steps[t] = self.samples.valid[t]


class Batched(ResetCollector):
    extra_fields: ClassVar[Any] = {"angle": spaces.Box(-10, 10, (), np.float32)}

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        self.samples.extra.angle[t] = self.samples.observation[t][:, 2]


def test_other_collectors_declare_them_too() -> None:
    with SerialSampler(partial(CountingEnv, LENGTH), batch_T=T, batch_B=2, collector_cls=Waiting) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        assert torch.equal(samples.env.extra.steps > 0, samples.env.valid)
    with SerialSampler(BatchedCartPole, batch_T=T, batch_B=3, batched=True, collector_cls=Batched) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        assert torch.equal(samples.env.extra.angle, samples.env.observation[..., 2])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (["cost"], "extra_fields of Wrong must be a dict of names and spaces or examples"),
        ({"two words": 0.0}, "extra_fields of Wrong must be a dict"),
        ({"items": 0.0}, r"extra_fields of Wrong must not contain 'items': samples\.env\.extra\.items is a method of "),
        ({"_values": 0.0}, "extra_fields of Wrong must not contain '_values'"),
        ({"class": 0.0}, "must not contain 'class'.*Give the field another name"),
        ({"cost": "much"}, r"extra_fields\['cost'\] of Wrong must be a space, a number or an array"),
        ({"cost": spaces.Text(4)}, r"extra_fields\['cost'\] of Wrong has a Text space"),
    ],
)
def test_wrong_declarations_are_named(fields: Any, text: str) -> None:
    class Wrong(ResetCollector):
        extra_fields = fields

    sampler = SerialSampler(CountingEnv, batch_T=2, batch_B=1, collector_cls=Wrong)
    with sampler, pytest.raises((ConfigError, SpaceError), match=text):
        sampler.initialize(RandomAgent())


def test_who_declares_none_is_told_how() -> None:
    with SerialSampler(CountingEnv, batch_T=2, batch_B=1) as sampler:
        sampler.initialize(RandomAgent())
        samples, _ = sampler.obtain_samples(0)
        with pytest.raises(
            AttributeError, match=r"no field 'extra'.*declare extra_fields in the class of the collector"
        ):
            samples.env.extra  # noqa: B018


# ---- replay ----------------------------------------------------------------------------------------


def require_kept(batch: Any, observation: Any) -> None:
    """In a CountingEnv, the reward of a step, and `info["count"]`, is one more than the count before it."""
    count = observation[..., 1] + 1
    assert torch.equal(batch.extra.cost, 2 * count)
    assert torch.equal(batch.env_info.count.to(count), count)
    assert batch.env_info["_count"].all()
    assert batch.extra.goal.shape == (*count.shape, 2)


def fill(replay: Replay, n: int = 4) -> Any:
    options: dict[str, Any] = {"collector_cls": Cost, "env_info": ["count"], "max_decorrelation_steps": 3}
    with SerialSampler(partial(CountingEnv, LENGTH), batch_T=T, batch_B=B, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(n):
            samples, _ = sampler.obtain_samples(itr)
            replay.append(samples)
        return samples.copy()


def test_a_replay_keeps_them_and_env_info(tmp_path: Path) -> None:
    replay = Replay(capacity=3 * T * B, n_step=2, discount=0.9, seed=0)  # the ring wraps
    samples = fill(replay)
    batch = replay.sample(64)
    require_kept(batch, batch.observation)
    assert {"env_info.count", "extra.cost"} <= replay.estimate(samples).nbytes.keys()
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path)
    ours, theirs = replay.sample(32), loaded.sample(32)
    require_kept(theirs, theirs.observation)
    assert ours.extra.cost.shape == theirs.extra.cost.shape
    with pytest.raises(SpaceError, match=r"these samples have no env\.env_info, which the first batch had: append"):
        replay.append(samples.select("env.observation", "env.reward", "env.valid", "agent.action"))


def test_sequences_have_them() -> None:
    replay = Replay(capacity=4 * T * B, sequences=Sequences(4, state_every=2), discount=0.9, seed=0)
    fill(replay)
    batch = replay.sample(16)
    require_kept(batch, batch.observation)


@pytest.mark.slow
def test_workers_write_them_into_a_replay() -> None:
    replay = Replay(capacity=8 * T * B, discount=0.9, seed=0)
    options: dict[str, Any] = {"collector_cls": Cost, "env_info": ["count"], "replay": replay, "ratio": Ratio(1.0)}
    with AsyncSampler(partial(CountingEnv, LENGTH), batch_T=T, batch_B=B, n_workers=2, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.start()
        for _ in range(3):
            batch = replay.sample(16)
            require_kept(batch, batch.observation)
