"""The inference server: one agent that acts for the environments of all workers.

It runs in the main process, or in a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.agents.base import Agent
from penstock.buffers.ordering import fence
from penstock.buffers.reports import in_one_line
from penstock.collectors.central import Request
from penstock.envs.examples import example_of
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import ConfigError, SamplerBrokenError, WorkerError
from penstock.samplers.inference_batch import InferenceBatch
from penstock.samplers.memory import SamplerMemory
from penstock.samplers.plan import SamplerPlan
from penstock.samplers.readiness import LockStep, Readiness
from penstock.samplers.step_buffer import StepBuffer
from penstock.workers import sigint
from penstock.workers.control import Command
from penstock.workers.progress import Phase
from penstock.workers.spinning import yield_cpu


@dataclass(frozen=True)
class ServerOptions:
    """What an inference server is made from. If the server is a process, the pool pickles it with cloudpickle."""

    agent: Agent  #: a copy that acts on the device of the learner's model
    plans: Sequence[SamplerPlan]  #: the plans of all workers that send requests
    readiness: Readiness
    seed: int
    world_size: int  #: how many such samplers there are
    spin_seconds: float  #: how long it spins for requests before it sleeps
    compile_options: Mapping[str, Any] | None  #: arguments of `torch.compile`; None: the model is not compiled
    heartbeat_seconds: float  #: the longest time between two heartbeats of a server process without requests


class InferenceServer:
    """Replies to the workers' requests. Call `serve` whenever there may be a request."""

    def __init__(self, options: ServerOptions, memory: SamplerMemory) -> None:
        assert memory.steps is not None
        assert memory.totals is not None
        self._control, self._parameters, self._totals = memory.control, memory.parameters, memory.totals
        self._plans, self._seed, self._readiness = list(options.plans), options.seed, options.readiness
        self._spin_seconds = options.spin_seconds
        self.progress = memory.control.progress(len(options.plans))
        agent = options.agent
        agent.runtime.attach(memory.parameters)
        agent.runtime.pull_shared_memory()
        if options.compile_options is not None:
            agent.runtime.compile_model(options.compile_options)
        self._train = _inference_batch(agent, options, memory.steps, Purpose.ACTION)
        self._eval = None
        if memory.eval_steps is not None:
            self._eval = _inference_batch(agent, options, memory.eval_steps, Purpose.EVAL_ACTION)
        self._page_locks = ExitStack()  # a GPU reads the inputs from the memory that the workers write
        for steps in (memory.steps, memory.eval_steps):
            if steps is not None:
                self._page_locks.enter_context(agent.runtime.page_locked(steps.memory.whole))
        self._command, self._batch, self._rule = Command(), self._train, self._readiness
        self._numbers = [0] * len(self._plans)  # by rank: the number of the last request that was seen
        self._held: list[int] = []  # workers whose actions are ready, but which may not have them yet
        self._n_evaluations = 0
        self._error: SamplerBrokenError | None = None  # the agent's error, which the next `serve` raises
        self._is_acting = False  # stays True if a second Ctrl-C ended a step of the agent
        self._served_until = time.monotonic()  # when `serve` last returned

    def close(self) -> None:
        """Unlock the step buffers. It may be called twice."""
        self._page_locks.close()

    # ---- commands --------------------------------------------------------------------------

    def begin(self, command: Command) -> None:
        """The workers are about to run `command`: act with the newest parameters."""
        if command.has_message:
            return
        self._command, self._batch, self._rule = command, self._train, self._readiness
        if command.do_eval:
            assert self._eval is not None
            self._batch, self._rule = self._eval, LockStep()
        self._notice_replacements()
        try:
            if command.do_eval:
                self._begin_evaluation(self._batch.agent, command.itr)
            else:
                self._pull_newest(self._batch.agent)
                self._batch.agent.sample_mode(command.itr)
        except Exception as error:
            self._error = self._worker_error(error, "beginning", range(len(self._plans)))
        self._served_until = time.monotonic()
        # Last: if Ctrl-C comes before this line, the workers do not start this evaluation either.
        self._n_evaluations += command.do_eval

    def _begin_evaluation(self, agent: Agent, itr: int) -> None:
        """Noise and state start again, as in the evaluation collectors."""
        key = self._n_evaluations
        rngs = [rng for plan in self._plans for rng in _rngs(self._seed, plan, Purpose.EVAL_ACTION, key)]
        agent.runtime.pull_shared_memory()
        agent.select(None)
        agent.seed_columns(rngs)
        agent.reset()
        agent.eval_mode(itr)

    def _pull_newest(self, agent: Agent) -> None:
        """Load the newest parameters, and note their version."""
        version = -1
        while version != self._parameters.version:  # others may be published meanwhile
            version = self._parameters.version
            agent.runtime.pull_shared_memory()
        self.progress.note_version(version)

    def _notice_replacements(self) -> bool:
        """Reset noise and state of the columns whose worker has been replaced, and drop held replies to dead workers.
        Returns whether a worker was replaced."""
        control, found = self._control, False
        for rank, plan in enumerate(self._plans):
            if control.generation(rank) != plan.generation:
                found = True
                try:
                    self._replace(replace(plan, generation=control.generation(rank)))
                except Exception as error:
                    self._error = self._worker_error(error, "resetting", [rank])
        return found

    def _replace(self, plan: SamplerPlan) -> None:
        rank = plan.worker_rank
        self._plans[rank] = plan
        if rank in self._held:
            self._held.remove(rank)
        self._train.restart(rank, _rngs(self._seed, plan, Purpose.ACTION))
        if self._eval is not None and self._n_evaluations:
            # Each evaluation has its own streams: these are the streams of the last one.
            self._eval.restart(rank, _rngs(self._seed, plan, Purpose.EVAL_ACTION, self._n_evaluations - 1))

    # ---- serving ---------------------------------------------------------------------------

    def serve(self, wake: Callable[[int], None], until: Callable[[], bool] = lambda: False) -> None:
        """Reply to all requests that the rule allows, then spin for new ones. `wake(rank)` wakes a worker after its
        reply. Returns at once when `until` is True. Raises `WorkerError` if the agent raises."""
        began = time.monotonic()
        self._totals.add_seconds(waiting=began - self._served_until)
        spin_until = began + self._spin_seconds
        while True:
            if self._serve_once(wake):
                if sigint.is_pending() or until():  # return now: the caller handles the Ctrl-C
                    break
                spin_until = time.monotonic() + self._spin_seconds
            elif self.all_have_arrived or sigint.is_pending() or self._control.quit or time.monotonic() >= spin_until:
                break
            else:
                yield_cpu()
        self._served_until = time.monotonic()

    @property
    def all_have_arrived(self) -> bool:
        """Whether every worker waits at barrier_out."""
        return not self._control.pending(len(self._plans))

    def _serve_once(self, wake: Callable[[int], None]) -> bool:
        """Reply to one round of requests; returns False if there was nothing to do."""
        if self._is_acting:
            raise WorkerError(f"the inference server was interrupted while acting (itr={self._command.itr})")
        values, steps, working = self._look()
        if self._error is not None:
            raise self._error
        if self._held and self._rule.may_go(working):
            held, self._held = self._held, []
            self._reply(held, wake)
            return True
        # Values first, on their own: the workers that request them are in the middle of a step.
        ranks = values or self._rule.choose(steps, working)
        if not ranks:
            return False
        # Ctrl-C waits for the end of the agent's step. Otherwise the step would be repeated, with other noise.
        with sigint.nested():
            self._act(ranks, for_values=bool(values))
            if not values and not self._rule.may_go(working):
                self._held = list(ranks)
            elif self._error is None:
                self._reply(ranks, wake)
        return True

    def _reply(self, ranks: Sequence[int], wake: Callable[[int], None]) -> None:
        for rank in ranks:
            self._control.reply(rank, self._numbers[rank])
            wake(rank)

    def _act(self, ranks: Sequence[int], *, for_values: bool) -> None:
        began = time.monotonic()
        self.progress.enter(Phase.ACTING)
        self._is_acting = True
        try:
            if for_values:
                self._batch.value(ranks)
            else:
                self._totals.count_step(self._batch.step(ranks))
        except Exception as error:
            self._error = self._worker_error(error, "acting", ranks)
        else:
            self.progress.enter(Phase.SERVING)
        self._is_acting = False
        self._totals.add_seconds(acting=time.monotonic() - began)

    def _look(self) -> tuple[list[int], list[int], list[int]]:
        """The ranks that request values, that request actions, and that work on their batch."""
        control = self._control
        while True:
            values, steps, working = [], [], []
            for rank in range(len(self._plans)):
                self._numbers[rank], kind = control.last_request(rank)
                if kind == Request.VALUE:
                    values.append(rank)
                elif kind == Request.STEP:
                    if rank not in self._held:
                        steps.append(rank)
                elif not control.has_arrived(rank):
                    working.append(rank)
            # After the requests: a new worker's generation is written before its first request.
            fence()
            if not self._notice_replacements():
                return values, steps, working

    def _worker_error(self, error: Exception, doing: str, ranks: Sequence[int]) -> SamplerBrokenError:
        is_eval = self._batch is self._eval
        env_ranks = [e for r in ranks for e in (self._plans[r].eval_env_ranks if is_eval else self._plans[r].env_ranks)]
        occasion = f"{'evaluation, ' if is_eval else ''}itr={self._command.itr}"
        found = WorkerError(
            f"the inference server raised {in_one_line(error)} while {doing} for env_rank {env_ranks} ({occasion})"
        )
        found.__cause__ = error
        return found


def _inference_batch(agent: Agent, options: ServerOptions, steps: StepBuffer, purpose: Purpose) -> InferenceBatch:
    """What acts for the training or the evaluation environments. If the model is to be compiled, a trial step compiles
    it here."""
    is_eval = purpose is Purpose.EVAL_ACTION
    columns = [plan.eval_columns if is_eval else plan.columns for plan in options.plans]
    ranks = [plan.eval_env_ranks if is_eval else plan.env_ranks for plan in options.plans]
    env_ranks = range(ranks[0].start, ranks[-1].stop)

    def copy_of_agent() -> Agent:
        copy = agent.runtime.column_copy(ColumnStreams(options.seed, env_ranks).rngs(purpose))
        copy.runtime.set_columns(env_ranks, len(env_ranks) * options.world_size)
        return copy

    if options.compile_options is not None:
        row, trial = steps.memory.arrays, copy_of_agent()
        row.observation[...] = example_of(agent.observation_space)
        trial.sample_mode(0)
        try:
            trial.step(row.observation, row.prev_action, row.prev_reward)
        except Exception as error:
            raise ConfigError(f"the model could not be compiled: {in_one_line(error)}") from error
    return InferenceBatch(copy_of_agent(), steps, columns)


def _rngs(seed: int, plan: SamplerPlan, purpose: Purpose, *key: int) -> list[np.random.Generator]:
    """The random streams of one worker's columns."""
    env_ranks = plan.eval_env_ranks if purpose is Purpose.EVAL_ACTION else plan.env_ranks
    return ColumnStreams(seed, env_ranks, plan.generation).rngs(purpose, *key)
