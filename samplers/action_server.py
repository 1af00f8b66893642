"""The action server: one agent that acts for the environments of all workers, in the main process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.base import Agent
from penstock.buffers.control import ControlBlock
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.step_buffer import StepBuffer
from penstock.collectors.acting import AgentInfoWriter, as_agent_step
from penstock.collectors.central import Question
from penstock.collectors.checks import write_action
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import SamplerBrokenError, WorkerError
from penstock.samplers.readiness import LockStep, Readiness
from penstock.workers.interrupts import interrupts
from penstock.workers.plan import WorkerPlan
from penstock.workers.reports import in_one_line

__all__ = ["ActionServer", "Desk", "ServerStats"]


@dataclass(frozen=True)
class ServerStats:
    """What the action server has done since the sampler was initialized: `served[n]` counts the steps that it
    made for n environments at once; `acting` and `waiting` are seconds."""

    served: dict[int, int]
    acting: float
    waiting: float


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


class ActionServer:
    """Answers the workers' questions. `serve` is called whenever somebody may have asked."""

    def __init__(
        self,
        control: ControlBlock,
        plans: Sequence[WorkerPlan],
        seed: int,
        desks: tuple[Desk, Desk | None],
        readiness: Readiness,
        *,
        spin_seconds: float,
    ) -> None:
        self._control, self._plans, self._seed = control, list(plans), seed
        (self._train, self._eval), self._readiness = desks, readiness
        self._spin_seconds = spin_seconds
        self._desk, self._policy = self._train, readiness
        self._kept: list[int] = []  # workers whose actions lie ready, but who may not have them yet
        self._n_evaluations = 0
        self._error: SamplerBrokenError | None = None  # what the agent has raised, for `serve`
        self._is_acting = False  # stays so when something ends the agent's step that is no mere exception
        self._served: Counter[int] = Counter()
        self._acting = self._waiting = 0.0
        self._left = time.monotonic()

    @property
    def stats(self) -> ServerStats:
        """What it has done so far."""
        return ServerStats(dict(sorted(self._served.items())), self._acting, self._waiting)

    # ---- occasions -------------------------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        """A batch is about to begin: act with the newest parameters."""
        self._desk, self._policy = self._train, self._readiness
        agent = self._train.agent
        try:
            agent.pull_shared_memory()
            agent.sample_mode(itr)
        except Exception as error:
            self._error = self._failure(error, "beginning", range(len(self._plans)))
        self._left = time.monotonic()

    def begin_evaluation(self, itr: int) -> None:
        """An evaluation is about to begin. Noise and state begin anew, as in the collectors."""
        assert self._eval is not None
        self._desk, self._policy = self._eval, LockStep()
        agent, key = self._eval.agent, self._n_evaluations
        rngs = [rng for plan in self._plans for rng in _rngs(self._seed, plan, Purpose.EVAL_ACTION, key)]
        try:
            agent.pull_shared_memory()
            agent.select(None)
            agent.seed_columns(rngs)
            agent.reset()
            agent.eval_mode(itr)
        except Exception as error:
            self._error = self._failure(error, "beginning", range(len(self._plans)))
        self._left = time.monotonic()
        self._n_evaluations += 1  # at last: should Ctrl-C come before, the workers have not begun it either

    def replace(self, plan: WorkerPlan) -> None:
        """A new worker does `plan` from the start: its noise begins anew, and what its forerunner asked is dropped."""
        rank = plan.worker_rank
        self._plans[rank] = plan
        if rank in self._kept:
            self._kept.remove(rank)
        columns = np.arange(plan.columns.start, plan.columns.stop)
        self._train.agent.reseed_columns(columns, _rngs(self._seed, plan, Purpose.ACTION))
        if self._eval is not None and self._n_evaluations:
            # Of the evaluation that is running, if one is; each begins with new ones.
            rngs = _rngs(self._seed, plan, Purpose.EVAL_ACTION, self._n_evaluations - 1)
            columns = np.arange(plan.eval_columns.start, plan.eval_columns.stop)
            self._eval.agent.reseed_columns(columns, rngs)

    # ---- serving ---------------------------------------------------------------------------

    def serve(self, answer: Callable[[int], None]) -> None:
        """Answer all that can be answered now; `answer(rank)` wakes a worker whose answer lies ready.

        Raises `WorkerError` if the agent raises.
        """
        began = time.monotonic()
        self._waiting += began - self._left
        spin_until = began + self._spin_seconds
        while True:
            if self._serve_once(answer):
                if interrupts.has_come:  # whoever waits for us is to answer it now, and not at the batch's end
                    break
                spin_until = time.monotonic() + self._spin_seconds
            elif time.monotonic() >= spin_until:
                break
        self._left = time.monotonic()

    def _serve_once(self, answer: Callable[[int], None]) -> bool:
        """Answer one round of questions; returns False if there was nothing to be done."""
        if self._is_acting:
            raise WorkerError(f"the action server was interrupted while acting (itr={self._control.itr})")
        if self._error is not None:
            raise self._error
        values, asking, working = self._look()
        if self._kept and self._policy.may_go(working):
            kept, self._kept = self._kept, []
            for rank in kept:
                answer(rank)
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
                for rank in ranks:
                    answer(rank)
        return True

    def _act(self, ranks: Sequence[int], *, for_values: bool) -> None:
        began = time.monotonic()
        self._is_acting = True
        try:
            if for_values:
                self._desk.value(ranks)
            else:
                self._served[self._desk.step(ranks)] += 1
        except Exception as error:
            self._error = self._failure(error, "acting", ranks)
        self._is_acting = False
        self._acting += time.monotonic() - began

    def _look(self) -> tuple[list[int], list[int], list[int]]:
        """The workers that ask for values, those that ask for actions, and those that are in their batch and ask
        nothing."""
        control = self._control
        values, asking, working = [], [], []
        for rank in range(len(self._plans)):
            question = control.question(rank)
            if question == Question.VALUE:
                values.append(rank)
            elif question == Question.STEP:
                if rank not in self._kept:
                    asking.append(rank)
            elif control.arrived(rank) != control.opened(rank):
                working.append(rank)
        return values, asking, working

    def _failure(self, error: Exception, doing: str, ranks: Sequence[int]) -> SamplerBrokenError:
        is_eval = self._desk is self._eval
        env_ranks = [e for r in ranks for e in (self._plans[r].eval_env_ranks if is_eval else self._plans[r].env_ranks)]
        occasion = f"{'evaluation, ' if is_eval else ''}itr={self._control.itr}"
        failure = WorkerError(
            f"the action server raised {in_one_line(error)} while {doing} for env_rank {env_ranks} ({occasion})"
        )
        failure.__cause__ = error
        return failure


def _rngs(seed: int, plan: WorkerPlan, purpose: Purpose, *key: int) -> list[np.random.Generator]:
    """The streams of one worker's columns."""
    env_ranks = plan.eval_env_ranks if purpose is Purpose.EVAL_ACTION else plan.env_ranks
    return ColumnStreams(seed, env_ranks, plan.generation).rngs(purpose, *key)
