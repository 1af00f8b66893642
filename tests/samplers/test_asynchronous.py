"""AsyncSampler: what it returns, in which order, by whom it was acted, and which calls it allows."""

import itertools
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import (
    AgentStep,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SamplerClosedError,
    SamplerState,
    SamplerStateError,
    TrajInfo,
    WaitResetCollector,
)
from penstock.envs import CountingEnv, SlowEnv
from penstock.samplers.inference_server import ServerOptions

from ..models import Gru
from ..scale import FULL, pairs
from ..support import Diary, Gated, pipes, until
from ..toy_games import Published
from .async_support import B, Delayed, T, TabularAgent, check_streams, one_batch_late, sample, until_idle
from .started import started

SIZES = list(itertools.product((1, 2, 3, 5), (2, 3, 4))) if FULL else [(1, 2), (2, 3), (3, 4), (5, 2)]

pytestmark = [pytest.mark.timeout(3600 if FULL else 60), pytest.mark.slow]
SERVERS = (None, "process")
servers = pytest.mark.parametrize("server", SERVERS, ids=["workers act", "server acts"])


def async_sampler(env_fn: Any = CountingEnv, **kwargs: Any) -> AsyncSampler:
    return AsyncSampler(env_fn, **{"batch_T": T, "batch_B": B, "n_workers": 2, **kwargs})


def begin(env_fn: Any = CountingEnv, agent: Any = None, **kwargs: Any) -> Any:
    return started(env_fn, agent, AsyncSampler, **{"batch_T": T, "batch_B": B, "n_workers": 2, **kwargs})


# ---- lag=1 -------------------------------------------------------------------------------------


class Slow(Delayed):
    def __init__(self) -> None:
        super().__init__(CountingEnv(length=4), 0.004)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *((sizes, {"server": server}) for sizes, server in pairs(SIZES, SERVERS)),
        ((3, 3), {"server": "process", "max_wait": 1e-4}),  # that waits for nobody: batches are not mixed
    ],
)
def test_lag_1_equals_a_serial_loop_that_trains_one_batch_late(sizes: tuple[int, int], options: Any) -> None:
    n_workers, n_slots = sizes
    expected = one_batch_late(partial(CountingEnv, length=4), TabularAgent(), 12)
    rng = random.SystemRandom()
    with async_sampler(Slow, n_workers=n_workers, n_slots=n_slots, lag=1, **options) as sampler:
        found = sample(sampler, TabularAgent(), 12, between=lambda itr: time.sleep(rng.choice([0, 0, 0.004])))
    assert found == expected
    versions = [np.frombuffer(batch["agent.policy_version"], np.int64) for batch, _ in found]
    assert [set(each) for each in versions] == [{1}, {1}, *({k} for k in range(2, 12))]


def test_lag_1_waits_before_it_overwrites_parameters_that_a_worker_needs() -> None:
    """The learner publishes several times for each batch, as fast as it can, while resets delay the workers."""

    class SlowReset(WaitResetCollector):
        def reset_if_needed(self) -> None:
            time.sleep(0.003 * (self.columns.env_ranks[0] == 0))  # of one worker, before it may begin
            super().reset_if_needed()

    agent = Published()
    with begin(agent=agent, lag=1, collector_cls=SlowReset) as sampler:
        newest = 1
        expected = [1, 1]
        for itr in range(30):
            samples, _ = sampler.obtain_samples(itr)
            assert set(samples.agent.policy_version.flatten().tolist()) == {expected[itr]}
            assert (samples.agent.agent_info.number == expected[itr] - 1)[samples.env.valid].all()
            for _ in range(3):
                agent.publish()
                newest += 1
            expected.append(newest)  # of batch itr + 2, which may begin when batch itr + 1 is handed out
        assert sampler.stats().lag.max == 3  # type: ignore[union-attr]
    for _ in range(2):  # nobody waits for workers that have ended
        agent.publish()


def test_a_batch_is_complete_before_the_resets_that_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inference server need not wait for the first requests of the next batch."""

    class Blocked(WaitResetCollector):
        def reset_if_needed(self) -> None:
            while self.columns.waiting and not may_reset.exists():
                time.sleep(0.001)
            super().reset_if_needed()

    may_reset = tmp_path / "may reset"
    plain = ServerOptions.of
    monkeypatch.setattr(ServerOptions, "of", lambda *args: replace(plain(*args), heartbeat_seconds=600.0))
    with begin(partial(CountingEnv, length=4), server="process", collector_cls=Blocked) as sampler:
        samples, _ = sampler.obtain_samples(0)
        assert not samples.env.valid.all()
        may_reset.touch()
        assert sampler.obtain_samples(1)[0].env.valid[0].all()


@servers
def test_an_evaluation_and_calls_change_no_batch_with_lag_1(server: Any) -> None:
    expected = one_batch_late(partial(CountingEnv, length=4), TabularAgent(), 8)
    options: dict[str, Any] = {"eval_n_envs": 2, "eval_max_steps": 20}
    with async_sampler(partial(CountingEnv, length=4), lag=1, server=server, **options) as sampler:

        def between(itr: int) -> None:
            for _ in range(5 if itr % 3 else 10):  # 10 are more commands than can be open at once
                assert len(sampler.evaluate_agent(itr)) == 2 * (10 // 4)
            assert sampler.get_attr("length") == [4] * B
            sampler.set_attr("length", 4)
            if itr % 3 == 2:
                sampler.pause()
                assert sampler.call("close") == [None] * B
                sampler.resume()

        assert sample(sampler, TabularAgent(), 8, between=between) == expected


# ---- free running ------------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "traj_info_cls"), pairs(SERVERS, [TrajInfo, Diary]))
def test_columns_are_unbroken_and_versions_true_and_infos_complete(server: Any, traj_info_cls: type[TrajInfo]) -> None:
    agent, rng = Published(), random.Random(1)
    batches: list[Any] = []
    n_done, n_infos, before = 0, 0, np.zeros(B, np.int64)
    with begin(agent=agent, server=server, traj_info_cls=traj_info_cls) as sampler:
        for itr in range(10_000 if FULL else 60):
            samples, infos = sampler.obtain_samples(itr)
            assert samples.batch == itr
            versions = samples.agent.policy_version.numpy()
            assert (samples.agent.agent_info.number.numpy() == versions - 1).all()
            assert (versions >= before).all()
            before = versions.copy()
            n_done, n_infos = n_done + int(samples.env.done.sum()), n_infos + len(infos)
            assert n_done == n_infos
            assert {info.Length for info in infos} <= {5}
            assert all(info.end[1] == 5 for info in infos if isinstance(info, Diary))
            batches = [*batches[-1:], samples.copy()]
            check_streams(batches)
            for _ in range(rng.choice([0, 1, 1, 2])):
                agent.publish()
        stats = sampler.stats()
    assert sum(worker.trajectories for worker in stats.workers) == n_infos
    assert stats.lag is not None
    assert 0 <= stats.lag.min <= stats.lag.mean <= stats.lag.max <= 2 * 3


@pytest.mark.parametrize("n_slots", [2, 3, 8])
def test_the_mean_lag_is_that_of_all_environments(n_slots: int) -> None:
    """A batch is at most as many batches old as there are slots."""
    agent, lags = Published(), list[Any]()
    env_fns = [CountingEnv, CountingEnv, partial(SlowEnv, 0.002)]  # the second worker has only the slow one
    with begin(env_fns, agent, batch_B=3, n_slots=n_slots) as sampler:
        while sum(lag.min() < lag.max() for lag in lags) < 5:
            samples, _ = sampler.obtain_samples(len(lags))
            lags.append(1 + len(lags) - samples.agent.policy_version[0].numpy())
            agent.publish()
        found = sampler.stats().lag
    assert found is not None
    assert (found.min, found.max) == (np.min(lags), np.max(lags))
    assert found.mean == pytest.approx(np.mean(lags))
    assert 1 <= found.max <= n_slots


@pytest.mark.parametrize("kwargs", [{"min_ready": 1}, {"max_wait": 1e-3}], ids=str)
def test_a_server_acts_for_environments_in_different_batches(kwargs: dict[str, Any]) -> None:
    options = {"batch_B": 3, "n_workers": 3, "eval_n_envs": 3, "eval_max_steps": 30, "eval_env_kwargs": {}, **kwargs}
    agent, options["server"], options["start_method"] = Published(), "process", "fork"
    with pipes(1) as [(gate, leave)], begin(Gated, agent, env_kwargs=[{"gate": gate}, {}, {}], **options) as sampler:
        until(lambda: [worker.batches for worker in sampler.stats().workers] == [0, 3, 3])
        os.write(leave, bytes(1000))
        before, batches = np.zeros(3, np.int64), list[Any]()
        for itr in range(20):
            samples, infos = sampler.obtain_samples(itr)
            assert len(infos) == int(samples.env.done.sum())
            versions, number = samples.agent.policy_version.numpy(), samples.agent.agent_info.number.numpy()
            assert (number[0] == versions[0] - 1).all()
            assert (np.diff(number, axis=0) >= 0).all(), "later steps may have newer parameters"
            assert (versions >= before).all()
            before, batches = versions.copy(), [*batches[-1:], samples.copy()]
            check_streams(batches)
            agent.publish()
        assert set(sampler.server_stats.served) <= {1, 2, 3}
        assert sampler.server_stats.shares.keys() == {"environments", "inference", "waiting", "between batches"}
        assert [info.Length for info in sampler.evaluate_agent(0)] == [5] * 6


def test_states_at_the_start_of_a_batch_need_environments_that_begin_together() -> None:
    agent = RecurrentCategoricalPgAgent(partial(Gru, 4, 2), record_state="batch")
    with pytest.raises(ConfigError, match=r'record_state="batch" and AsyncSampler.* without lag do not'):
        begin("CartPole-v1", agent, server="process", min_ready=1).__enter__()
    with begin("CartPole-v1", agent, server="process", min_ready=1, lag=1):
        pass
    with GpuSampler("CartPole-v1", batch_T=4, batch_B=3, n_workers=2, min_ready=1) as sampler:
        sampler.initialize(agent)


def test_several_batches_can_be_held() -> None:
    with begin(n_slots=3) as sampler:
        before, _ = sampler.obtain_samples(0)
        with sampler.hold():
            held = [before, *(sampler.obtain_samples(itr)[0] for itr in (1, 2))]
            until_idle(sampler)  # they overwrite nothing
            assert [samples.is_current for samples in held] == [True] * 3
            assert [samples.valid_until for samples in held] == [None] * 3
            check_streams(held)
            with pytest.raises(SamplerStateError, match="hold keeps 3 batches, and no slot is left of n_slots=3"):
                sampler.obtain_samples(3)
            with pytest.raises(SamplerStateError, match="hold was called inside hold"), sampler.hold():
                pass
            last = held[-1].copy()
        assert [samples.is_current for samples in held] == [False, False, True]
        assert held[-1].valid_until == 3
        check_streams([last, sampler.obtain_samples(3)[0]])


def test_with_newest_older_batches_are_left_out_but_their_trajectories_are_not() -> None:
    with begin(n_slots=3) as sampler:
        until_idle(sampler)
        samples, infos = sampler.obtain_samples(0, newest=True)
        assert samples.batch == 2
        assert len(infos) == 3 * T // 5 * B
        assert sampler.stats().skipped_batches == 2
        following, _ = sampler.obtain_samples(1)
        assert following.batch == 3
        assert (following.env.observation[0, :, 0] * 5 + following.env.observation[0, :, 1] == 3 * T).all()


def test_poll_returns_none_until_a_batch_is_complete() -> None:
    with pipes(1) as [(gate, leave)], begin(Gated, env_kwargs={"gate": gate}, start_method="fork") as sampler:
        assert sampler.poll_samples() is None
        os.write(leave, bytes(1000))
        check_streams([until(sampler.poll_samples)[0].copy() for _ in range(8)])


def test_pause_lets_the_workers_stand_still_and_resume_goes_on() -> None:
    with begin(n_slots=3) as sampler:
        batches = [sampler.obtain_samples(0)[0].copy()]
        sampler.pause()
        assert sampler.state is SamplerState.PAUSED
        collected = [worker.batches for worker in sampler.stats().workers]
        assert collected == [3, 3]
        batches += [sampler.obtain_samples(1)[0].copy()]
        polled = sampler.poll_samples()
        assert polled is not None
        batches.append(polled[0].copy())
        assert [worker.batches for worker in sampler.stats().workers] == collected
        with pytest.raises(SamplerStateError, match="you have had all its batches: call resume"):
            sampler.obtain_samples(3)
        assert sampler.poll_samples() is None
        sampler.resume()
        batches += [sampler.obtain_samples(itr)[0].copy() for itr in range(3, 8)]
        check_streams(batches)


def test_the_itr_of_the_agent_is_that_of_the_calls() -> None:
    class Noting(RandomAgent):
        def sample_mode(self, itr: int) -> None:
            self.itr = itr

        def step(self, *inputs: Any) -> Any:
            action, _ = super().step(*inputs)
            return AgentStep(action, {"itr": np.full(len(action), self.itr)})

    with async_sampler() as sampler:
        sampler.initialize(Noting(), seed=7)
        sampler.start(10)
        for itr in range(10, 16):
            assert (sampler.obtain_samples(itr)[0].agent.agent_info.itr == itr).all()


# ---- arguments and order of calls --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_slots": 1}, "n_slots of AsyncSampler must be from 2 to 8, got 1"),
        ({"n_slots": 9}, "n_slots of AsyncSampler must be from 2 to 8, got 9"),
        ({"lag": 2}, r"lag must be 1 \(reproducible\) or None, got 2"),
        ({"lag": True}, r"lag must be 1 \(reproducible\) or None, got True"),
        ({"min_ready": 1}, 'min_ready and max_wait are for a process that acts for all: give server="process" too'),
        ({"max_wait": 0.1}, 'min_ready and max_wait are for a process that acts for all: give server="process" too'),
        ({"max_wait": 0, "server": "process"}, "max_wait must be a positive number of seconds, got 0"),
        ({"server": "caller"}, "server must be \"process\" or None, got 'caller'"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async_sampler(**arguments)


def test_calls_out_of_order_name_the_call_that_was_meant() -> None:
    def refused(call: Any, message: str) -> None:
        with pytest.raises(SamplerStateError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)

    sampler = async_sampler(eval_n_envs=1, eval_max_steps=5)
    refused(sampler.start, "start was called out of order: the call expected now is initialize")
    with sampler:
        sampler.initialize(RandomAgent())
        assert [info.Length for info in sampler.evaluate_agent(0)] == [5]
        refused(lambda: sampler.obtain_samples(0), "obtain_samples was called .* expected now is start")
        refused(sampler.poll_samples, "poll_samples was called .* expected now is start")
        refused(sampler.pause, "pause was called .* expected now is start")
        refused(sampler.hold().__enter__, "hold was called .* expected now is start")
        sampler.start()
        refused(sampler.start, "start was called out of order: the call expected now is obtain_samples")
        refused(sampler.resume, "resume was called out of order: the call expected now is obtain_samples")
        refused(lambda: sampler.start_samples(0), "start_samples .* call start.. once, then obtain_samples")
        refused(sampler.wait_samples, "wait_samples .* call start.. once, then obtain_samples")
        sampler.pause()
        refused(sampler.pause, "pause was called out of order: the call expected now is resume")
        refused(sampler.start, "start was called out of order: the call expected now is resume")
    for call in (sampler.start, sampler.poll_samples, sampler.pause, sampler.resume):
        with pytest.raises(SamplerClosedError):
            call()


def test_a_sampler_that_runs_can_be_dropped() -> None:
    sampler = async_sampler()
    sampler.initialize(RandomAgent())
    sampler.start()
    sampler.obtain_samples(0)  # the fixture finds what it leaves
