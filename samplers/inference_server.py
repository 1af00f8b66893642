"""The inference server: one agent that acts for the environments of all workers, in whatever process it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.base import Agent
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.step_buffer import StepBuffer
from penstock.collectors.acting import AgentInfoWriter, as_agent_step
from penstock.collectors.central import Question
from penstock.collectors.checks import write_action
from penstock.envs.examples import example_of
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import ConfigError, SamplerBrokenError, WorkerError
from penstock.samplers.program import SharedState
from penstock.samplers.readiness import LockStep, Readiness
from penstock.workers.control import Phase
from penstock.workers.interrupts import interrupts
from penstock.workers.plan import WorkerPlan
from penstock.workers.spinning import let_others_run

__all__ = ["Desk", "InferenceServer", "ServerJob"]


@dataclass(frozen=True)
class ServerJob:
    """What an inference server is made from. Travels by cloudpickle where that is a process of its own."""

    agent: Agent  #: a copy that acts where the learner's model is
    plans: Sequence[WorkerPlan]  #: of all that ask
    readiness: Readiness
    seed: int
    world_size: int  #: how many such samplers there are
    spin_seconds: float  #: how long it looks for questions before it sleeps
    compile_options: Mapping[str, Any] | None  #: arguments of `torch.compile`, if the model is to be compiled
    # Of a process of its own:
    sign_of_life: float  #: seconds between two of those that it gives while nobody asks
    torch_threads: int


class Desk:
    """One agent with its step buffer: that of the training environments, or that of evaluation."""

    def __init__(self, agent: Agent, steps: StepBuffer, shares: Sequence[range]) -> None:
        """`agent` has state for all columns; `shares` are the columns of each worker."""
        self.agent, self._shares = agent, [np.arange(share.start, share.stop) for share in shares]
        self._row = steps.memory.arrays
        self._whole_row = AgentInfoWriter(self._row.agent_info.map(lambda leaf: leaf[None]))
        self._parts: dict[int, tuple[NamedArrays, AgentInfoWriter]] = {}

    def step(self, ranks: Sequence[int]) -> int:
        """Act for these workers; returns for how many environments."""
        row, (columns, inputs) = self._row, self._select(ranks)
        n = len(inputs[-1])
        step = as_agent_step(self.agent.step(*inputs), self.agent)
        if columns is None:
            write_action(row.action, step.action)
            self._whole_row.write(0, step.agent_info)
        else:
            action = map_leaves(lambda leaf: leaf[columns], row.action)
            write_action(action, step.action)
            row.action[columns] = action
            agent_info, writer = self._part_of_a_row(n)
            writer.write(0, step.agent_info)
            row.agent_info[columns] = agent_info[0]
        return n

    def _part_of_a_row(self, n: int) -> tuple[NamedArrays, AgentInfoWriter]:
        """Room for the agent_info of n columns, `[1, n, ...]`, with its writer; made once."""
        if n not in self._parts:
            room = self._row.agent_info.map(lambda leaf: np.zeros((1, n, *leaf.shape[1:]), leaf.dtype))
            self._parts[n] = room, AgentInfoWriter(room)
        return self._parts[n]

    def value(self, ranks: Sequence[int]) -> None:
        """Estimate the values that these workers ask about."""
        columns, inputs = self._select(ranks)
        self._row.value[... if columns is None else columns] = self.agent.value(*inputs)

    def begin_anew(self, rank: int, rngs: Sequence[np.random.Generator]) -> None:
        """This worker's columns have new environments, and new streams."""
        columns = self._shares[rank]
        self.agent.reseed_columns(columns, rngs)
        for column in columns:
            self.agent.reset_one(int(column))

    def _select(self, ranks: Sequence[int]) -> tuple[npt.NDArray[np.intp] | None, tuple[Any, Any, Any]]:
        """Turn the agent to these workers' columns (None: all); returns them, and their inputs."""
        row, everyone = self._row, len(ranks) == len(self._shares)
        columns = None if everyone else np.concatenate([self._shares[rank] for rank in ranks])
        begin_anew = np.flatnonzero(row.reset) if columns is None else columns[row.reset[columns]]
        for column in begin_anew:
            self.agent.reset_one(int(column))
        row.reset[begin_anew] = False
        self.agent.select(columns)
        inputs = row.observation, row.prev_action, row.prev_reward
        return columns, inputs if columns is None else tuple(part[columns] for part in inputs)


class InferenceServer:
    """Answers the workers' questions. `serve` is called whenever somebody may have asked."""

    def __init__(self, job: ServerJob, state: SharedState) -> None:
        assert state.steps is not None
        assert state.totals is not None
        self._control, self._parameters, self._totals = state.control, state.parameters, state.totals
        self._plans, self._seed, self._readiness = list(job.plans), job.seed, job.readiness
        self._spin_seconds = job.spin_seconds
        self.progress = state.control.progress(len(job.plans))
        agent = job.agent
        agent.runtime.attach(state.parameters)
        agent.runtime.pull_shared_memory()
        if job.compile_options is not None:
            agent.runtime.compile_model(job.compile_options)
        self._train = _desk(agent, job, state.steps, Purpose.ACTION)
        self._eval = None if state.eval_steps is None else _desk(agent, job, state.eval_steps, Purpose.EVAL_ACTION)
        # A GPU reads inputs where the workers have written them.
        self._locks = ExitStack()
        for steps in (state.steps, state.eval_steps):
            if steps is not None:
                self._locks.enter_context(agent.runtime.page_locked(steps.memory.whole))
        self._desk, self._policy = self._train, self._readiness
        self._asked = [0] * len(self._plans)  # the number of each worker's question, as it was last looked at
        self._kept: list[int] = []  # workers whose actions lie ready, but who may not have them yet
        self._n_evaluations = 0
        self._error: SamplerBrokenError | None = None  # what the agent has raised, for `serve`
        self._is_acting = False  # stays so when something ends the agent's step that is no mere exception
        self._left = time.monotonic()

    def close(self) -> None:
        """Let go of the step buffers; again is harmless."""
        self._locks.close()

    # ---- occasions -------------------------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        """A batch is about to begin: act with the newest parameters."""
        self._desk, self._policy = self._train, self._readiness
        self._take_replacements()
        try:
            self._refresh(self._train.agent)
            self._train.agent.sample_mode(itr)
        except Exception as error:
            self._error = self._failure(error, "beginning", range(len(self._plans)))
        self._left = time.monotonic()

    def begin_evaluation(self, itr: int) -> None:
        """An evaluation is about to begin. Noise and state begin anew, as in the collectors."""
        assert self._eval is not None
        self._desk, self._policy = self._eval, LockStep()
        self._take_replacements()
        agent, key = self._eval.agent, self._n_evaluations
        try:
            rngs = [rng for plan in self._plans for rng in _rngs(self._seed, plan, Purpose.EVAL_ACTION, key)]
            agent.runtime.pull_shared_memory()
            agent.select(None)
            agent.seed_columns(rngs)
            agent.reset()
            agent.eval_mode(itr)
        except Exception as error:
            self._error = self._failure(error, "beginning", range(len(self._plans)))
        self._left = time.monotonic()
        self._n_evaluations += 1  # at last: should Ctrl-C come before, the workers have not begun it either

    def _refresh(self, agent: Agent) -> None:
        """Take the newest parameters over, and note which they are."""
        version = -1
        while version != self._parameters.version:  # or others were published meanwhile
            version = self._parameters.version
            agent.runtime.pull_shared_memory()
        self.progress.version = version

    def _take_replacements(self) -> bool:
        """Where a new worker has a dead one's place, its noise and its columns' state begin anew, and an answer
        that was kept for the dead one is dropped. Returns whether there is such a place."""
        control, found = self._control, False
        for rank, plan in enumerate(self._plans):
            if control.generation(rank) != plan.generation:
                found = True
                try:
                    self._replace(replace(plan, generation=control.generation(rank)))
                except Exception as error:
                    self._error = self._failure(error, "beginning anew", [rank])
        return found

    def _replace(self, plan: WorkerPlan) -> None:
        rank = plan.worker_rank
        self._plans[rank] = plan
        if rank in self._kept:
            self._kept.remove(rank)
        self._train.begin_anew(rank, _rngs(self._seed, plan, Purpose.ACTION))
        if self._eval is not None and self._n_evaluations:
            # Of the evaluation that is running, if one is; each begins with new ones.
            self._eval.begin_anew(rank, _rngs(self._seed, plan, Purpose.EVAL_ACTION, self._n_evaluations - 1))

    # ---- serving ---------------------------------------------------------------------------

    def serve(self, wake: Callable[[int], None], until: Callable[[], bool] = lambda: False) -> None:
        """Answer all that can be answered now, and look out for more for a while; `wake(rank)` wakes a worker whose
        answer lies ready. Returns at once when `until` is true.

        Raises `WorkerError` if the agent raises.
        """
        began = time.monotonic()
        self._totals.add_seconds(waiting=began - self._left)
        spin_until = began + self._spin_seconds
        while True:
            if self._serve_once(wake):
                if interrupts.has_come or until():  # Ctrl-C is for our caller to answer, and not at the batch's end
                    break
                spin_until = time.monotonic() + self._spin_seconds
            elif self._is_done_with or time.monotonic() >= spin_until:
                break
            else:
                let_others_run()
        self._left = time.monotonic()

    @property
    def _is_done_with(self) -> bool:
        """Whether nobody will ask any more before the next gate, or somebody else has something to say."""
        control = self._control
        return self.all_have_arrived or interrupts.has_come or control.quit

    @property
    def all_have_arrived(self) -> bool:
        """Whether every worker stands at barrier_out."""
        return all(map(self._control.has_arrived, range(len(self._plans))))

    def _serve_once(self, wake: Callable[[int], None]) -> bool:
        """Answer one round of questions; returns False if there was nothing to be done."""
        if self._is_acting:
            raise WorkerError(f"the inference server was interrupted while acting (itr={self._control.itr})")
        values, asking, working = self._look()
        if self._error is not None:
            raise self._error
        if self._kept and self._policy.may_go(working):
            kept, self._kept = self._kept, []
            self._answer(kept, wake)
            return True
        # Values first, by themselves: those who ask for them are in the middle of a step.
        ranks = values or self._policy.choose(asking, working)
        if not ranks:
            return False
        # Ctrl-C waits for the end of the step: else it would be made again, with other noise and a later state.
        with interrupts:
            self._act(ranks, for_values=bool(values))
            if not values and not self._policy.may_go(working):
                self._kept = list(ranks)
            elif self._error is None:
                self._answer(ranks, wake)
        return True

    def _answer(self, ranks: Sequence[int], wake: Callable[[int], None]) -> None:
        for rank in ranks:
            self._control.answer(rank, self._asked[rank])
            wake(rank)

    def _act(self, ranks: Sequence[int], *, for_values: bool) -> None:
        began = time.monotonic()
        self.progress.enter(Phase.ACTING)
        self._is_acting = True
        try:
            if for_values:
                self._desk.value(ranks)
            else:
                self._totals.count_step(self._desk.step(ranks))
        except Exception as error:
            self._error = self._failure(error, "acting", ranks)
        else:
            self.progress.enter(Phase.SERVING)
        self._is_acting = False
        self._totals.add_seconds(acting=time.monotonic() - began)

    def _look(self) -> tuple[list[int], list[int], list[int]]:
        """The workers that ask for values, those that ask for actions, and those that are in their batch and ask
        nothing."""
        control = self._control
        while True:
            values, asking, working = [], [], []
            for rank in range(len(self._plans)):
                self._asked[rank], question = control.last_question(rank)
                if question == Question.VALUE:
                    values.append(rank)
                elif question == Question.STEP:
                    if rank not in self._kept:
                        asking.append(rank)
                elif not control.has_arrived(rank):
                    working.append(rank)
            # In this order: a new worker's question is seen no sooner than that it is a new worker's.
            if not self._take_replacements():
                return values, asking, working

    def _failure(self, error: Exception, doing: str, ranks: Sequence[int]) -> SamplerBrokenError:
        is_eval = self._desk is self._eval
        env_ranks = [e for r in ranks for e in (self._plans[r].eval_env_ranks if is_eval else self._plans[r].env_ranks)]
        occasion = f"{'evaluation, ' if is_eval else ''}itr={self._control.itr}"
        failure = WorkerError(
            f"the inference server raised {in_one_line(error)} while {doing} for env_rank {env_ranks} ({occasion})"
        )
        failure.__cause__ = error
        return failure


def _desk(agent: Agent, job: ServerJob, steps: StepBuffer, purpose: Purpose) -> Desk:
    """What acts for one kind of environments. A compiled model has been run once then: that compiles it."""
    is_eval = purpose is Purpose.EVAL_ACTION
    shares = [plan.eval_columns if is_eval else plan.columns for plan in job.plans]
    ranks = [plan.eval_env_ranks if is_eval else plan.env_ranks for plan in job.plans]
    env_ranks = range(ranks[0].start, ranks[-1].stop)

    def copy_of_agent() -> Agent:
        copy = agent.runtime.column_copy(ColumnStreams(job.seed, env_ranks).rngs(purpose))
        copy.runtime.set_columns(env_ranks, len(env_ranks) * job.world_size)
        return copy

    if job.compile_options is not None:
        row, trial = steps.memory.arrays, copy_of_agent()
        row.observation[...] = example_of(agent.observation_space)
        trial.sample_mode(0)
        try:
            trial.step(row.observation, row.prev_action, row.prev_reward)
        except Exception as error:
            raise ConfigError(f"the model could not be compiled: {in_one_line(error)}") from error
    return Desk(copy_of_agent(), steps, shares)


def _rngs(seed: int, plan: WorkerPlan, purpose: Purpose, *key: int) -> list[np.random.Generator]:
    """The streams of one worker's columns."""
    env_ranks = plan.eval_env_ranks if purpose is Purpose.EVAL_ACTION else plan.env_ranks
    return ColumnStreams(seed, env_ranks, plan.generation).rngs(purpose, *key)
