"""Ctrl-C, and exceptions of other signal handlers, in calls on samplers: what follows is what it would have been."""

from __future__ import annotations

import signal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock import Agent, AgentStep, RandomAgent, SamplerBrokenError, SamplerState
from penstock.testing import DelegatingAgent
from penstock.workers import sigint

from ..scale import pairs, scaled, some, with_start_methods
from ..support import PROGRAMS, assert_same, until
from .support import Interrupts, Script, generator
from .test_restart import AGENTS, CARTPOLE, ELSEWHERE, KINDS, MODES, NEVER, POLE, restarting_sampler, undisturbed

pytestmark = [pytest.mark.timeout(scaled(1800, 200)), pytest.mark.slow]


def batches(mode: str, start_method: str = "forkserver", delays: Any = None) -> list[Any]:
    """Three batches, of which each is asked for in another way. With `delays`, Ctrl-C comes meanwhile, and in an
    evaluation before the next."""
    found = []
    how: dict[str, Any] = {"batch_T": 400, "eval_max_steps": 3 * 10**6, "start_method": start_method}
    with restarting_sampler(mode, CARTPOLE, **how) as sampler:
        sampler.initialize(RandomAgent(), seed=9)
        for itr in range(3):

            def call(itr: int = itr) -> None:
                if itr == 0:
                    sampler.obtain_samples(itr)
                    return
                sampler.start_samples(itr)
                if itr == 1:
                    sampler.wait_samples()

            if delays is None:
                call()
            else:
                with Interrupts(delays.uniform(0, 0.1)), pytest.raises(KeyboardInterrupt):
                    call()
                    until(lambda: False)  # it may have been too late for the batch
            if sampler.state is SamplerState.SAMPLING:
                sampler.wait_samples()
            elif sampler.stats().workers[0].batches == itr:  # it came before the batch had begun
                sampler.obtain_samples(itr)
            found.append(sampler.samples_np.copy())
            if delays is not None and itr < 2:
                with Interrupts(0.05), pytest.raises(KeyboardInterrupt):
                    sampler.evaluate_agent(itr)
                assert sampler.state is SamplerState.READY
    return found


uninterrupted = cache(batches)


@with_start_methods("mode", ["parallel", *some(MODES, 3), *some(ELSEWHERE, 1)])
def test_an_interrupted_call_changes_nothing_that_follows(mode: str, start_method: str) -> None:
    for trial in range(scaled(10, 1)):
        found = batches(mode, start_method, generator("ctrl-c", mode, start_method, trial))
        assert_same(found, uninterrupted("parallel"))


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


MOMENTS = scaled([*product(AGENTS, (False, True))], [("random", False), ("recurrent", True)])


@pytest.mark.parametrize(("mode", "moment"), pairs(some(MODES, 3), MOMENTS))
def test_ctrl_c_while_the_agent_acts_changes_nothing(mode: str, moment: tuple[str, bool]) -> None:
    (name, late), found, interrupted = moment, [], 0
    with restarting_sampler(mode, POLE(NEVER)) as sampler:
        agent = Interrupting(KINDS[name].agent(), {1, 10, 70, 200}, late=late)
        sampler.initialize(agent, seed=9, bootstrap_value=True)
        for itr in range(4):
            try:
                sampler.obtain_samples(itr)
            except KeyboardInterrupt:
                interrupted += 1
            while sampler.state is SamplerState.SAMPLING:
                try:
                    sampler.wait_samples()
                except KeyboardInterrupt:
                    interrupted += 1
            found.append({"agent": sampler.samples_np.copy()})
    assert interrupted >= 2
    assert_same(found, undisturbed(name)[0], **KINDS[name].tolerance)


def test_a_later_ctrl_c_ends_a_step_that_hangs_and_the_sampler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigint, "_PATIENCE_SECONDS", 0.0)
    with restarting_sampler("lock-step", CARTPOLE) as sampler:
        sampler.initialize(Interrupting(RandomAgent(), {5}, late=True, times=2), seed=9)
        with pytest.raises(KeyboardInterrupt):
            sampler.obtain_samples(0)
        with pytest.raises(SamplerBrokenError, match="interrupted"):
            sampler.wait_samples()


# ---- at random moments of random calls -----------------------------------------------------------


LIMIT = scaled(1700, 100)  # seconds, for all signals together


def trials(folder: Path, what: str, start_method: str, sig: str, n: int) -> tuple[int, int, str]:
    """Returns how often a new sampler was needed, how many descriptors are left, and what was said on stderr."""
    given = {"start_method": start_method, "what": what, "sig": sig, "n": n}
    with Script(folder, PROGRAMS / "random_signals.py", **given) as script:
        output, errors = script.end(LIMIT)
    assert output, errors
    n_signals, n_broken, n_processes, n_descriptors = map(int, output.split())
    assert n_signals == n
    assert n_processes == 0
    return n_broken, n_descriptors, errors


@with_start_methods("what", ["serial", "parallel", "gpu", "alternating", "async", "vector"])
def test_ctrl_c_gives_no_wrong_number_and_leaves_nothing(tmp_path: Path, what: str, start_method: str) -> None:
    """Each class goes on with the right numbers; a step in the main process ends, and then the sampler says so."""
    n_broken, n_descriptors, errors = trials(tmp_path, what, start_method, "SIGINT", scaled(34, 5))
    assert n_broken == 0 or what == "serial"
    assert n_descriptors == 0
    assert errors == ""


@with_start_methods("what", ["serial", "parallel", "gpu", "server", "vector"])
def test_an_exception_of_another_handler_may_break_a_sampler_and_the_next_call_says_so(
    tmp_path: Path, what: str, start_method: str
) -> None:
    trials(tmp_path, what, start_method, "SIGALRM", scaled(100, 5))
