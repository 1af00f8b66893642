"""The inference server as a process of its own: what ends it, what it ends, what goes on meanwhile, and its agent."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from penstock import (
    AgentStep,
    AlternatingSampler,
    CategoricalPgAgent,
    ConfigError,
    GpuSampler,
    RandomAgent,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.envs import CountingEnv, SlowEnv
from penstock.testing import Fault, FaultyAgent

from ..models import Constant
from ..scale import FULL, methods, pairs, scaled
from ..support import Gated, sampler_of, until
from .support import ERROR_SECONDS, SLACK, Notebook, check_counting, is_running, note, pause

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]


served_sampler = partial(sampler_of, GpuSampler, server="process")


# ---- failures of the server ----------------------------------------------------------------


@methods("fork", "forkserver")
def test_a_server_killed_between_two_batches(start_method: str) -> None:
    with served_sampler(start_method=start_method) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        pid = sampler.worker_pids[-1]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_running(pid))
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"the inference server \(pid {pid}\) was killed by SIGKILL"):
            sampler.obtain_samples(1)
        note("server process, killed between two calls: call to error, s", time.monotonic() - began, ERROR_SECONDS)


class NotHere(RandomAgent):
    """Cannot be built again from what was pickled, but in the process that it comes from."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            raise RuntimeError("not in this process")
        vars(self).update(state)


@methods("forkserver")
def test_a_server_that_cannot_be_started(start_method: str) -> None:
    message = r"the inference server \(pid \d+\) raised RuntimeError while starting \(.*\): not in "
    with served_sampler(start_method=start_method) as sampler, pytest.raises(WorkerError, match=message):
        sampler.initialize(NotHere())


LIMIT = scaled(2.0, 0.5)


@pytest.mark.parametrize("serving", [False, True], ids=["parked", "waiting for requests"])
def test_a_server_that_is_stopped_while_it_waits(serving: bool) -> None:
    with served_sampler(SlowEnv, env_kwargs={"seconds": 0.05}, step_timeout=LIMIT) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        if serving:
            sampler.start_samples(0)
            until(lambda: sampler.server_stats.served)
        os.kill(sampler.worker_pids[-1], signal.SIGSTOP)
        with pytest.raises(WorkerTimeoutError, match=r"the inference server .* and is stopped by a signal while"):
            sampler.wait_samples() if serving else sampler.obtain_samples(0)


# ---- the end -------------------------------------------------------------------------------


def test_a_shutdown_while_its_agent_hangs(tmp_path: Path) -> None:
    agent = FaultyAgent(RandomAgent(), Notebook(tmp_path).fault("hang", at=2))
    with served_sampler(batch_T=1000) as sampler:
        sampler.initialize(agent)
        sampler.start_samples(0)
        pids = sampler.worker_pids
        until((tmp_path / "note").exists)
        began = time.monotonic()
        with pytest.warns(RuntimeWarning, match=r"the inference server \(pid \d+\) did not exit while acting"):
            sampler.shutdown()
        note("server process, shutdown while its agent hangs, s", time.monotonic() - began, 2.5 * SLACK)
    assert not any(map(psutil.pid_exists, pids))


def test_policy_version_is_that_which_acted_whenever_the_learner_publishes() -> None:
    """In the middle of a batch, and right after it has been started: at random before or after the server's start."""
    agent = CategoricalPgAgent(Constant)

    def publish() -> None:
        with torch.no_grad():
            agent.model.weight += 1
        agent.sync_shared_memory()

    rng = np.random.default_rng(0)
    with served_sampler(eval_n_envs=2, eval_max_steps=20) as sampler:
        sampler.initialize(agent, seed=0)
        assert sampler.policy_version is None
        for itr in range(scaled(300, 40)):
            sampler.start_samples(itr)
            if itr % 4:
                for _ in range(rng.integers(1, 30)):
                    publish()
            samples, _ = sampler.wait_samples()
            (value,) = samples.agent.agent_info.value.unique().tolist()
            assert sampler.policy_version == 1 + value, "version 1 has weight 0"
            if itr % 8 == 0:
                sampler.evaluate_agent(itr)
                assert sampler.policy_version == 1 + value, "an evaluation is no batch"


@pytest.mark.parametrize("spin_seconds", [None, 0.001])
def test_nobody_burns_cpu_while_nothing_can_be_done(spin_seconds: float | None) -> None:
    """For a second, in which there is nothing but signs of life."""
    read, write = os.pipe()
    kwargs: dict[str, Any] = {"start_method": "fork", "step_timeout": 2.0, "spin_seconds": spin_seconds}
    try:
        with served_sampler(Gated, env_kwargs={"gate": read}, batch_T=2, **kwargs) as sampler:
            sampler.initialize(RandomAgent())
            processes = [psutil.Process(), *map(psutil.Process, sampler.worker_pids)]
            sampler.start_samples(0)
            until(lambda: sampler.server_stats.served)

            def used() -> float:
                return sum(sum(process.cpu_times()[:2]) for process in processes[1:])

            began, before = time.monotonic(), used()
            pause(1.0)  # this is what is looked at
            took, cpu = time.monotonic() - began, used() - before
            os.write(write, bytes(8))
            samples, _ = sampler.wait_samples()
            check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
    finally:
        os.close(read)
        os.close(write)
    assert cpu < 0.25 * took, "it would be all of it, three times, if anything were looked at again and again"


# ---- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["gpu", None, ["process"]])
def test_odd_servers_are_refused(server: Any) -> None:
    with pytest.raises(ConfigError, match="server must be one of caller, process, got") as caught:
        GpuSampler(CountingEnv, batch_T=2, batch_B=4, server=server)
    assert repr(server) in str(caught.value)


def test_an_agent_that_cannot_travel_is_named() -> None:
    class Open(RandomAgent):
        def __init__(self) -> None:
            self.file = (line for line in ())

    with served_sampler() as sampler, pytest.raises(ConfigError, match="agent cannot be pickled"):
        sampler.initialize(Open())


@pytest.mark.filterwarnings("ignore:.* did not exit while:RuntimeWarning")  # there are many processes for few CPUs
@pytest.mark.skipif(not FULL, reason="full scale: 130 workers")
@pytest.mark.parametrize("start_method", ["forkserver"])
def test_more_workers_than_one_message_can_have_descriptors(start_method: str) -> None:
    """The server wakes every worker. The system sends at most 253 descriptors in one message."""
    with GpuSampler(
        CountingEnv, batch_T=2, batch_B=130, n_workers=130, server="process", start_method=start_method
    ) as s:
        s.initialize(RandomAgent(), seed=0)
        samples, _ = s.obtain_samples(0)
        assert samples.env.reward.shape == (2, 130)


# ---- what the agent does -------------------------------------------------------------------------


#: At which call of the agent's method it raises, and what the error says.
PLACES = {
    "sample_mode": (2, r"beginning for env_rank \[0, 1, 2, 3\] \(itr=1\): a fault"),
    "value": (1, r"acting for env_rank .*: a fault"),
    "reset_one": (5, r"acting for env_rank .*: a fault"),
}


@pytest.mark.parametrize(("where", "cls"), pairs(PLACES, (GpuSampler, AlternatingSampler)))
def test_an_agent_that_raises_is_the_action_servers(where: str, cls: type[GpuSampler]) -> None:
    """In a step, `test_faults.py` has it."""
    at, doing = PLACES[where]
    with sampler_of(cls) as sampler:
        with pytest.raises(WorkerError, match=rf"^the inference server raised \S+Fault while {doing}") as caught:
            sampler.initialize(FaultyAgent(RandomAgent(), Fault("raise", at), where), seed=3, bootstrap_value=True)
            for itr in range(3):
                sampler.obtain_samples(itr)
        assert sampler.worker_pids == []
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


class Stopping(RandomAgent):
    """Stops a process, once all have made two steps."""

    def __init__(self) -> None:
        self.pids: list[int] = []  # the copy that acts has the same list

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        if self.pids and observation[0, 1] == 2:
            os.kill(self.pids.pop(), signal.SIGSTOP)
        return super().step(observation, prev_action, prev_reward)


def test_a_worker_that_is_stopped_while_it_waits_is_blamed_once_it_has_its_answer() -> None:
    agent = Stopping()
    with sampler_of(GpuSampler, CountingEnv, step_timeout=scaled(2.0, 0.5)) as sampler:
        sampler.initialize(agent, seed=0)
        agent.pids.append(sampler.worker_pids[1])
        with pytest.raises(WorkerTimeoutError, match=r"worker 1 .* is stopped by a signal while waiting for actions"):
            sampler.obtain_samples(0)
