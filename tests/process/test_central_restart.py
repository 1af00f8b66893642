"""Replaced workers and Ctrl-C where one process acts for all: nothing shows in the columns that were not hit."""

import functools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    CategoricalPgAgent,
    EvalCollector,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    SamplerBrokenError,
    SamplerState,
)
from penstock.envs import CountingEnv
from penstock.testing import DelegatingAgent, Fault, faulty_env, faulty_eval_collector
from penstock.workers import sigint

from ..models import Gru, Net
from ..scale import methods, pairs, scaled, some
from ..support import assert_same, until
from .support import Notebook, check_counting, generator, killer, pid_of
from .test_main_process import Interrupts

cloudpickle.register_pickle_by_value(sys.modules[Interrupts.__module__])

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

B, T = 6, 24
CARTPOLE = functools.partial(gym.make, "CartPole-v1", max_episode_steps=25)

MODES: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    "lock-step": (GpuSampler, {}),
    "first-ready": (GpuSampler, {"min_ready": 2}),
    "alternating": (AlternatingSampler, {}),
    "no overlap": (AlternatingSampler, {"overlap": False}),
}
#: As `MODES`, with the server in a process of its own. (What Ctrl-C does there is nobody's business but the caller's.)
ELSEWHERE: dict[str, tuple[type[GpuSampler], dict[str, Any]]] = {
    f"own process, {mode}": (cls, {"server": "process", **options}) for mode, (cls, options) in MODES.items()
}
PARALLEL: dict[str, tuple[Any, dict[str, Any]]] = {"parallel": (ParallelSampler, {})}
EVERYWHERE = [*list(MODES)[:: scaled(1, 3)], *list(ELSEWHERE)[:: scaled(1, 2)]]
everywhere = pytest.mark.parametrize("mode", EVERYWHERE)


AGENTS: dict[str, Callable[[], Agent]] = {
    "random": RandomAgent,
    "categorical": lambda: CategoricalPgAgent(lambda: Net(4, 2, 0)),
    "recurrent": lambda: RecurrentCategoricalPgAgent(lambda: Gru(4, 2)),
}
TOLERANCE: dict[str, dict[str, float]] = {name: {"rtol": 1e-6, "atol": 1e-9} for name in AGENTS} | {"random": {}}


def restarting_sampler(mode: str, env_fn: Any, **kwargs: Any) -> GpuSampler:
    cls, options = {**MODES, **ELSEWHERE, **PARALLEL}[mode]
    arguments: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_workers": 3, "on_worker_failure": "restart"}
    arguments.update(eval_n_envs=3, eval_max_steps=3 * 60, max_decorrelation_steps=0, eval_env_kwargs={})
    return cls(env_fn, **{**arguments, **options, **kwargs})


def batches(sampler: GpuSampler, agent: Agent, n: int = 4) -> list[Any]:
    sampler.initialize(agent, seed=9, bootstrap_value=True)
    found = []
    for itr in range(n):
        _, infos = sampler.obtain_samples(itr)
        assert len(infos) == int(sampler.samples_np.env.done.sum())
        found.append(sampler.samples_np.copy())
        if itr == 2:
            assert sampler.evaluate_agent(itr)
    return found


# ---- replacements --------------------------------------------------------------------------


@functools.cache
def undisturbed(agent: str) -> list[Any]:
    with restarting_sampler("lock-step", faulty_env(CARTPOLE, Fault("delay", at=10**9))) as sampler:
        return batches(sampler, AGENTS[agent]())


@pytest.mark.parametrize(("agent", "mode"), pairs(AGENTS, [*MODES, *some(ELSEWHERE, 1)]))
@pytest.mark.parametrize("at", scaled([1, 30], [30]))
def test_a_replacement_changes_no_other_column(agent: str, at: int, mode: str, tmp_path: Path) -> None:
    """env_rank 3 kills its worker, of columns 2 and 3: at once, or in the second batch."""
    fns = [faulty_env(CARTPOLE, Fault("delay", at=10**9))] * B
    fns[3] = faulty_env(CARTPOLE, Notebook(tmp_path).fault("kill", at))
    with restarting_sampler(mode, fns) as sampler:
        found = batches(sampler, AGENTS[agent]())
        assert [worker.restarts for worker in sampler.stats().workers] == [0, 1, 0]
    others = [0, 1, 4, 5]
    wanted = [batch[:, others] for batch in undisturbed(agent)]
    assert_same([batch[:, others] for batch in found], wanted, **TOLERANCE[agent])
    for batch in found:
        assert batch.env.valid.all()
        assert np.isfinite(batch.env.observation).all()
        assert (np.abs(batch.env.observation[..., 2]) < 0.25)[~batch.env.done].all(), "a pole that stands"
    hit = [batch.agent.action[:, 2:4] for batch in (found[-1], undisturbed(agent)[-1])]
    assert not np.array_equal(*hit), "its streams are fresh"


@methods("forkserver")
@pytest.mark.parametrize("mode", [*PARALLEL, *EVERYWHERE])
def test_what_is_redone_is_complete_and_valid_wherever_it_was_cut(mode: str, start_method: str) -> None:
    rng = generator("central", mode, start_method)
    kwargs: dict[str, Any] = {"max_restarts": 10**6, "start_method": start_method}
    with killer() as kill, restarting_sampler(mode, CountingEnv, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        itr = 0
        for wanted in range(1, scaled(30, 3) + 1):
            kill.kill([pid_of(sampler, rng.randrange(sampler.n_workers))], rng.uniform(0, 0.02))
            while sampler.stats().restarts < wanted:
                samples, infos = sampler.obtain_samples(itr)
                check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
                assert {info.Length for info in infos} == {5}
                assert len(infos) == int(samples.env.done.sum())
                assert len(sampler.evaluate_agent(itr)) == 3 * 12
                itr += 1
            kill.when()


def disturbed(mode: str, agent: Agent, seed: int, n: int) -> list[Any]:
    """Batches, with evaluations, calls, pauses and killed workers between them, in an order that `seed` draws."""
    rng, found, n_kills = random.Random(seed), [], 0
    kwargs: dict[str, Any] = {"batch_T": 3, "max_restarts": n}
    with restarting_sampler(mode, CARTPOLE, **kwargs) as sampler:
        sampler.initialize(agent, seed=9)
        for itr in range(n):
            what = rng.choice(["batch", "batch", "pause", "evaluation", "call", "kill", "parameters", "change"])
            if what == "evaluation":
                sampler.evaluate_agent(itr)
            elif what == "call":
                sampler.call("get_wrapper_attr", "spec")
            elif what == "kill":
                n_kills += 1
                os.kill(sampler.worker_pids[0], signal.SIGKILL)
            elif what == "parameters":
                agent.sync_shared_memory()
            if what == "pause":
                sampler.start_samples(itr)
                sampler.wait_samples()
            else:
                sampler.obtain_samples(itr)
            found.append(sampler.samples_np.copy())
            if what == "change":  # the next batch begins with what the user has made of the last row
                sampler.samples_np.env.bootstrap_obs[...] *= -0.5
        assert sampler.stats().restarts == n_kills
    return found


@pytest.mark.parametrize(("mode", "seed"), pairs(MODES, range(scaled(20, 4))))
def test_batches_are_those_of_a_parallel_sampler_in_any_order_of_calls(mode: str, seed: int) -> None:
    name = list(AGENTS)[seed % 3]
    found = disturbed(mode, AGENTS[name](), seed, scaled(40, 12))
    assert_same(found, disturbed("parallel", AGENTS[name](), seed, len(found)), **TOLERANCE[name])


class Telling(CountingEnv):
    """The return tells which actions were taken, in order."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(int(action) * 4**self.count), *rest


def evaluations(folder: Path | None, mode: str, seed: int = 9) -> list[list[float]]:
    """Two evaluations; in the first, one worker is killed if there is a folder for its fault."""
    kwargs: dict[str, Any] = {}
    if folder is not None:
        kwargs["eval_collector_cls"] = faulty_eval_collector(EvalCollector, Notebook(folder).fault("kill", 4))
    with restarting_sampler(mode, Telling, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=seed)
        return [[info.Return for info in sampler.evaluate_agent(itr)] for itr in range(2)]


@everywhere
def test_an_evaluation_is_made_good(mode: str, tmp_path: Path) -> None:
    whole, hit = evaluations(None, mode), evaluations(tmp_path, mode)
    assert [len(returns) for returns in hit] == [36, 36]
    env_rank = [[hit[e][b::3] == whole[e][b::3] for b in range(3)] for e in range(2)]
    assert env_rank[0].count(True) == env_rank[1].count(True) == 2, "the other two are what they would have been"
    (b,) = (b for b in range(3) if not env_rank[0][b])
    assert not env_rank[1][b]
    assert not set(hit[0][b::3]) & set(hit[1][b::3]), "the redone evaluation shares no noise with the next"


# ---- Ctrl-C --------------------------------------------------------------------------------


DAILY = ["random, early", "recurrent, late"]


class Interrupting(DelegatingAgent):
    """Ctrl-C comes in some of its steps: before it has drawn its noise, or when its state has advanced."""

    def __init__(self, agent: Agent, at: set[int], *, late: bool, times: int = 1) -> None:
        super().__init__(agent)
        self.at, self.late, self.times, self.calls = at, late, times, [0]

    def _interrupt(self) -> None:
        if self.in_worker and self.calls[0] in self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.calls[0] += self.in_worker
        if not self.late:
            self._interrupt()
        step = super().step(observation, prev_action, prev_reward)
        if self.late:
            self._interrupt()
        return step


@pytest.mark.parametrize(
    ("mode", "moment"),
    pairs(MODES, scaled([f"{a}, {w}" for a in AGENTS for w in ("early", "late")], DAILY)),
)
def test_ctrl_c_while_the_agent_acts_changes_nothing(mode: str, moment: str) -> None:
    agent, when = moment.split(", ")
    late, interrupted = when == "late", 0
    found = []
    with restarting_sampler(mode, faulty_env(CARTPOLE, Fault("delay", at=10**9))) as sampler:
        sampler.initialize(Interrupting(AGENTS[agent](), {1, 10, 70, 200}, late=late), seed=9, bootstrap_value=True)
        for itr in range(4):
            try:
                _, infos = sampler.obtain_samples(itr)
            except KeyboardInterrupt:
                interrupted += 1
                while sampler.state is SamplerState.SAMPLING:
                    try:
                        _, infos = sampler.wait_samples()
                    except KeyboardInterrupt:
                        interrupted += 1
            assert len(infos) == int(sampler.samples_np.env.done.sum())
            found.append(sampler.samples_np.copy())
    assert interrupted >= 2
    assert_same(found, undisturbed(agent), **TOLERANCE[agent])


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_in_an_evaluation_changes_nothing_that_follows(mode: str) -> None:
    def run(at: set[int]) -> list[Any]:
        found = []
        with restarting_sampler(mode, CARTPOLE, eval_max_steps=3 * 10**6) as sampler:
            agent = Interrupting(RandomAgent(), at, late=True)
            sampler.initialize(agent, seed=9)
            for itr in range(3):
                sampler.obtain_samples(itr)
                found.append(sampler.samples_np.copy())
                if at:
                    agent.at |= {agent.calls[0] + 30}
                    with pytest.raises(KeyboardInterrupt):
                        sampler.evaluate_agent(itr)
                    assert sampler.state is SamplerState.READY
        return found

    assert_same(run({0}), run(set()))


def test_ctrl_c_at_any_moment_changes_nothing() -> None:
    def run(delay: float | None) -> list[Any]:
        found = []
        with restarting_sampler("lock-step", CARTPOLE, batch_T=400, eval_n_envs=0) as sampler:
            sampler.initialize(RandomAgent(), seed=9)
            for itr in range(2):
                sampler.start_samples(itr)
                if delay is not None:
                    with Interrupts(delay), pytest.raises(KeyboardInterrupt):
                        sampler.wait_samples()
                        until(lambda: False)  # it may have been too late for the batch
                if sampler.state is SamplerState.SAMPLING:
                    sampler.wait_samples()
                found.append(sampler.samples_np.copy())
        return found

    wanted, rng = run(None), generator("central", "ctrl-c")
    for _ in range(scaled(20, 2)):
        assert_same(run(rng.uniform(0, 0.1)), wanted)


def test_a_later_ctrl_c_ends_a_step_that_hangs_and_the_sampler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigint, "_PATIENCE_SECONDS", 0.0)
    with restarting_sampler("lock-step", CARTPOLE) as sampler:
        sampler.initialize(Interrupting(RandomAgent(), {5}, late=True, times=2), seed=9)
        with pytest.raises(KeyboardInterrupt):
            sampler.obtain_samples(0)
        with pytest.raises(SamplerBrokenError, match="interrupted"):
            sampler.wait_samples()
