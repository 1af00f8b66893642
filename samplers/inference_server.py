"""The inference server: one agent that acts for the environments of all workers.

It runs in the main process, or in a separate process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.agents.agent import Agent
from penstock.agents.joint import JointSeats
from penstock.buffers.ordering import fence
from penstock.buffers.reports import in_one_line
from penstock.envs.examples import example_of
from penstock.envs.seeding import Purpose, seed_generators
from penstock.errors import ConfigError, SamplerBrokenError, WorkerError
from penstock.samplers.inference_batch import InferenceBatch
from penstock.samplers.readiness import LockStep, Readiness
from penstock.samplers.sampler_memory import SamplerMemory, StepBuffer
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan
from penstock.samplers.sampler_program import SamplerProgram
from penstock.samplers.seating import Seating, column_streams
from penstock.workers import sigint
from penstock.workers.affinity import avoid_cpus
from penstock.workers.control import FOR_ANY, Command, Phase, StopCollecting
from penstock.workers.failures import raised
from penstock.workers.gates import notify
from penstock.workers.program import WorkerContext
from penstock.workers.spinning import SpinTime, is_crowded, look, spin_for_requests

_SLEEP_SECONDS = 1e-3  # the unit of a sleep: a shorter wait spins
_SERVE_SECONDS = 0.1  # how long `serve` runs at most: its caller notices deaths, and other processes its heartbeat


@dataclass(frozen=True)
class ServerOptions:
    """What an inference server is made from. If the server is a process, the pool pickles it with cloudpickle."""

    agent: Agent  #: a copy that acts on the device of the learner's model
    plans: Sequence[SamplerPlan]  #: the plans of all workers that send requests
    readiness: Readiness
    seed: int
    env_range: EnvRange  #: the environments of this sampler among all
    spin_seconds: float  #: the longest time that it spins for requests before it sleeps
    compile_options: Mapping[str, Any] | None  #: arguments of `torch.compile`; None: the model is not compiled
    heartbeat_seconds: float  #: the longest time between two heartbeats of a server process without requests
    seating: Seating  #: see `SamplerProgram`

    @classmethod
    def of(
        cls,
        agent: Agent,
        plans: Sequence[SamplerPlan],
        program: SamplerProgram,
        readiness: Readiness,
        spin_seconds: float,
        compile_options: Mapping[str, Any] | None = None,
    ) -> ServerOptions:
        """The options for the learner's `agent` and workers that run `program`."""
        server_agent, worker_agent = agent.runtime.server_copy(), program.agents[0]
        return cls(
            agent=JointSeats(server_agent, worker_agent.k) if isinstance(worker_agent, JointSeats) else server_agent,
            plans=plans,
            readiness=readiness,
            seed=program.seed,
            env_range=program.env_range,
            spin_seconds=spin_seconds,
            compile_options=compile_options,
            heartbeat_seconds=min(1.0, (program.config.step_timeout or 4.0) / 4),
            seating=program.seating,
        )


class InferenceServer:
    """Replies to the workers' requests. Call `serve` whenever there may be a request."""

    def __init__(self, options: ServerOptions, memory: SamplerMemory) -> None:
        assert memory.steps is not None
        assert memory.totals is not None
        self._control, self._parameters, self._totals = memory.control, memory.parameters[0], memory.totals
        self._plans, self._seed, self._readiness = list(options.plans), options.seed, options.readiness
        self._seating = options.seating
        self._spin_time, self._yields = SpinTime(options.spin_seconds), is_crowded(len(options.plans) + 1)
        self._fingerprint: int | None = None  # of the arrivals and requests that leave nothing to do; None: look
        self._idle_since: float | None = None  # when the last spin began, if nothing came during it
        self.progress = memory.control.progress(len(options.plans))
        agent = options.agent
        agent.runtime.attach(self._parameters)
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
        self._number = 1  # the opening of the workers' gates for this command; the first is start-up
        self._numbers: Sequence[int] = ()  # by rank: the number of the last request that was seen
        self._begun = [0] * len(self._plans)  # by rank: the last opening for which the version is noted
        self._n_replaced = 0  # how many workers have been replaced, as far as noticed
        self._are_all_at_gate, self._seen = False, 0  # what the last look has found
        self._held: list[int] = []  # workers whose actions are ready, but which may not have them yet
        self._n_evaluations = 0
        self._error: SamplerBrokenError | None = None  # the agent's error, which the next `serve` raises
        self._served_until = time.monotonic()  # when `serve` last returned

    @property
    def agent(self) -> Agent:
        """The agent that acts for the training environments."""
        return self._train.agent

    def resume(self, generation: int) -> None:
        """A saved run continues: the streams of evaluations are of this generation from now on."""
        self._plans = [replace(plan, generation=generation) for plan in self._plans]
        self._n_replaced, self._n_evaluations = self._control.n_replaced, 0

    def close(self) -> None:
        """Unlock the step buffers. It may be called twice."""
        self._page_locks.close()

    # ---- commands --------------------------------------------------------------------------

    def begin(self, command: Command, number: int) -> None:
        """The workers are about to run `command`, at opening `number` of their gates. Load the newest parameters, or
        the version that the command names."""
        self._number = number
        if command.has_message:
            return
        self._command, self._batch, self._rule = command, self._train, self._readiness
        self._fingerprint = self._idle_since = None
        if command.do_eval:
            assert self._eval is not None
            self._batch, self._rule = self._eval, LockStep()
        self._notice_replacements()
        try:
            if command.do_eval:
                self._begin_evaluation(self._batch.agent, command.itr)
            else:
                self._pull(self._batch.agent, command.version)
                self._note_begun([rank for rank in range(len(self._plans)) if self._control.arrived(rank) < number])
                self._batch.agent.sample_mode(command.itr)
        except Exception as error:
            self._error = self._worker_error(error, "beginning", range(len(self._plans)))
        self._served_until = time.monotonic()
        # Last: if Ctrl-C comes before this line, the workers do not start this evaluation either.
        self._n_evaluations += command.do_eval

    def _begin_evaluation(self, agent: Agent, itr: int) -> None:
        """Noise and state start again, as in the evaluation collectors."""
        key = self._n_evaluations
        rngs = [rng for plan in self._plans for rng in self._rngs(plan, Purpose.EVAL_ACTION, key)]
        agent.runtime.pull_shared_memory()
        agent.select(None)
        agent.seed_columns(rngs)
        agent.reset()
        agent.eval_mode(itr)

    def _pull(self, agent: Agent, version: int) -> None:
        """Load the newest parameters, or `version` if it is not 0, and note their version."""
        loaded = agent.runtime.pull_shared_memory(version)
        while not version and loaded != self._parameters.version:  # others may be published meanwhile
            loaded = agent.runtime.pull_shared_memory()
        self.progress.note_version(loaded)

    def _note_begun(self, ranks: Sequence[int]) -> None:
        """Note the parameters' version for each of these workers whose batch has none yet. Call it before their first
        actions."""
        control, version = self._control, self._control.version(-1)
        for rank in ranks:
            number = control.arrived(rank) + 1
            if self._begun[rank] < number:
                self._begun[rank] = number
                control.note_began_with(rank, version)

    def _rngs(self, plan: SamplerPlan, purpose: Purpose, *key: int) -> list[np.random.Generator]:
        """The random streams of one worker's columns."""
        is_eval = purpose is Purpose.EVAL_ACTION
        return column_streams(self._seating, plan, self._seed, evaluation=is_eval).rngs(purpose, *key)

    def _notice_replacements(self) -> bool:
        """Reset noise and state of the columns whose worker has been replaced, and drop held replies to dead workers.
        Returns whether a worker was replaced."""
        control, is_replaced = self._control, False
        self._n_replaced = control.n_replaced
        for rank, plan in enumerate(self._plans):
            if control.generation(rank) != plan.generation:
                is_replaced = True
                try:
                    self._replace(replace(plan, generation=control.generation(rank)))
                except Exception as error:
                    self._error = self._worker_error(error, "resetting", [rank])
        return is_replaced

    def _replace(self, plan: SamplerPlan) -> None:
        rank = plan.worker_rank
        self._plans[rank] = plan
        if rank in self._held:
            self._held.remove(rank)
        self._train.restart(rank, self._rngs(plan, Purpose.ACTION))
        if self._eval is not None and self._n_evaluations:
            # Each evaluation has its own streams: these are the streams of the last one.
            self._eval.restart(rank, self._rngs(plan, Purpose.EVAL_ACTION, self._n_evaluations - 1))

    # ---- serving ---------------------------------------------------------------------------

    def serve(self, wake: Callable[[int], None]) -> None:
        """Reply to all requests that the rule allows, then spin for new ones. `wake(rank)` wakes a worker that sleeps,
        after its reply. Raises `WorkerError` if the agent raises."""
        began = time.monotonic()
        self._totals.add_seconds(waiting=began - self._served_until)
        if self._idle_since is not None:
            self._spin_time.note(began - self._idle_since, True)
            self._idle_since = None
        while True:
            if self._serve_once(wake) and time.monotonic() - began > _SERVE_SECONDS:
                break
            # At a Ctrl-C return now: the caller handles it.
            if self._are_all_at_gate or sigint.is_pending():
                break
            if self._fingerprint is not None and not self._spin():
                break
        self._served_until = time.monotonic()

    def _spin(self) -> bool:
        """Spin for a short time. Returns whether there may be something to do."""
        began, seconds = time.monotonic(), self._spin_time.seconds
        left = self._rule.due - began
        if left < max(seconds, _SLEEP_SECONDS):
            self._has_news(max(left, 0.0))
            self._fingerprint = None  # news or not, the rule must choose again
            return not self._control.quit
        if self._has_news(seconds) and not self._control.quit:
            self._spin_time.note(time.monotonic() - began, False)
            return True
        self._idle_since = began
        return False

    def _has_news(self, spin_seconds: float) -> bool:
        """Whether a request or an arrival has come that the rule waits for, or comes within `spin_seconds`."""
        control, seen = self._control, self._fingerprint
        if seen is None:
            return True
        n, all_of_them = len(self._plans), self._rule.needs_all_idle
        return spin_for_requests(*control.block, n, seen, all_of_them, control.quit_word, spin_seconds, self._yields)

    @property
    def has_work(self) -> bool:
        """Whether `serve` must be called. Look at this once more before you sleep."""
        return self._has_news(0.0)

    @property
    def sleep_seconds(self) -> float:
        """How many seconds this process may sleep before it must call `serve`, in whole milliseconds; inf: no limit."""
        due = self._rule.due
        return due if due == math.inf else max(0.0, (due - time.monotonic()) // _SLEEP_SECONDS * _SLEEP_SECONDS)

    @property
    def wake_for_any(self) -> bool:
        """Whether each request and each arrival must wake the server. Otherwise it waits until no worker is working."""
        return not self._rule.needs_all_idle

    @property
    def all_have_arrived(self) -> bool:
        """Whether every worker has completed the command."""
        return self._control.have_completed(self._number, len(self._plans))

    def _serve_once(self, wake: Callable[[int], None]) -> bool:
        """Reply to one round of requests; returns False if there was nothing to do."""
        values, steps, working = self._look()
        if self._error is not None:
            raise self._error
        held = self._held
        if held:
            if self._rule.may_reply(working):
                self._held, self._fingerprint = [], None
                self._reply(held, wake)
                return True
            steps = [rank for rank in steps if rank not in held]
        # Values first, on their own: the workers that request them are in the middle of a step.
        valued = self._rule.choose_values(values, working)
        ranks = valued or self._rule.choose(steps, working)
        if not ranks:
            self._fingerprint = self._seen
            return False
        # All together: then there is nothing to do before the next request.
        self._fingerprint = self._seen if self._rule.needs_all_idle and not valued else None
        self._act(ranks, for_values=bool(valued))
        if not valued and not self._rule.may_reply(working):
            self._held = list(ranks)
        elif self._error is None:
            self._reply(ranks, wake)
        return True

    def _reply(self, ranks: Sequence[int], wake: Callable[[int], None]) -> None:
        for rank in self._control.reply(ranks, self._numbers):
            wake(rank)

    def _act(self, ranks: Sequence[int], *, for_values: bool) -> None:
        began, n_columns = self.progress.enter(Phase.ACTING), 0
        try:
            if for_values:
                self._batch.value(ranks)
            else:
                self._totals.count_step(n_columns := self._batch.step(ranks))
        except Exception as error:
            self._error = self._worker_error(error, "acting", ranks)
            self._fingerprint = None  # the next round raises the error
            ended = time.monotonic_ns()
        else:
            ended = self.progress.enter(Phase.SERVING)
        self._totals.add_seconds(acting=(ended - began) / 1e9)
        self._control.note_served(began, ended, n_columns, self._control.version(-1))

    def _look(self) -> tuple[list[int], list[int], list[int]]:
        """The ranks that request values, that request actions, and that work on their batch."""
        control = self._control
        while True:
            values, steps, working, self._numbers, self._seen = look(*control.block, len(self._plans))
            # If gates are opened ahead, a worker that has completed the command may have requests of the next batch
            # already. `FirstReady` mixes batches, unless each has its own version of the parameters. Otherwise these
            # requests wait until this server begins that batch.
            if control.opened[0] > self._number:
                if not (self._rule.needs_all_idle or self._command.version):
                    self._note_begun(steps)
                else:
                    ahead = [rank for rank in range(len(self._plans)) if control.arrived(rank) >= self._number]
                    values, steps, working = ([r for r in row if r not in ahead] for row in (values, steps, working))
            # After the requests: a new worker's generation is written before its first request.
            fence()
            if control.n_replaced == self._n_replaced or not self._notice_replacements():
                self._are_all_at_gate = not (values or steps or working)
                return values, steps, working

    def _worker_error(self, error: Exception, doing: str, ranks: Sequence[int]) -> SamplerBrokenError:
        is_eval = self._batch is self._eval
        env_ranks = [e for r in ranks for e in (self._plans[r].eval_env_ranks if is_eval else self._plans[r].env_ranks)]
        during = f"{'evaluation, ' if is_eval else ''}itr={self._command.itr}"
        doing = f"{doing} for env_rank {env_ranks} ({during})"
        failure = WorkerError(raised("the inference server", doing, in_one_line(error)))
        failure.__cause__ = error
        return failure


def _inference_batch(agent: Agent, options: ServerOptions, steps: StepBuffer, purpose: Purpose) -> InferenceBatch:
    """What acts for the training or the evaluation environments. If the model is to be compiled, a trial step compiles
    it here."""
    is_eval = purpose is Purpose.EVAL_ACTION
    columns = [plan.eval_cells[0] if is_eval else plan.cells[0] for plan in options.plans]
    streams = [column_streams(options.seating, plan, options.seed, evaluation=is_eval) for plan in options.plans]
    env_ranks, env_range = [rank for of_worker in streams for rank in of_worker.env_ranks], options.env_range

    def copy_of_agent() -> Agent:
        copy = agent.runtime.column_copy([rng for of_worker in streams for rng in of_worker.rngs(purpose)])
        n_envs = env_range.n_eval_envs if is_eval else env_range.n_envs
        copy.runtime.set_columns(env_ranks, n_envs, in_turns=options.seating.in_turns)
        return copy

    if options.compile_options is not None:
        row, trial = steps.memory.arrays, copy_of_agent()
        row.observation[...] = example_of(agent.observation_space)
        trial.sample_mode(0)
        try:
            trial.step(row.observation, row.prev_action, row.prev_reward)
        except Exception as error:
            raise ConfigError(f"the model could not be compiled: {in_one_line(error)}") from error
    return InferenceBatch(copy_of_agent(), steps, columns, in_turns=options.seating.in_turns)


@dataclass
class ServerProgram:
    """The `WorkerProgram` of an inference server."""

    options: ServerOptions

    data_name = "env_fn"  # unused: a server has no data of its own

    def pickled_parts(self) -> dict[str, Any]:
        """The options of the server, by the names of the user's arguments."""
        names = {"compile_options": "compile_model"}
        return {names.get(name, name): value for name, value in vars(self.options).items()}

    def build(self, context: WorkerContext) -> None:
        """Build the server."""
        assert context.gate is not None
        assert context.wakers is not None
        self._context, self._control, self._gate = context, context.memory.control, context.gate
        wakers = context.wakers
        self._wake = lambda rank: notify(wakers[rank].fd)  # it sleeps: its request has a reply
        self._poll_ms = max(1, round(self.options.heartbeat_seconds * 1000))
        self._worker_cpus = {cpu for plan in self.options.plans for cpu in plan.cpus}
        seed_generators(self.options.seed, self.options.env_range.first_env_rank, context.plan.worker_rank)
        self._server = InferenceServer(self.options, context.memory)

    def idle(self) -> None:
        """There is nothing to do between two commands."""

    def run(self, command: Command) -> None:
        """Reply to requests until every worker has arrived at barrier_out."""
        if command.has_message:
            return
        server, progress = self._server, self._context.progress
        server.begin(command, progress.arrived + 1)  # all gates are opened equally often
        if command.version:
            self._gate.wake_main()  # `sync_shared_memory` may wait until the parameters are loaded
        with avoid_cpus(self._worker_cpus):
            while not server.all_have_arrived:
                if self._control.quit:
                    raise StopCollecting
                try:
                    server.serve(self._wake)
                except WorkerError as error:
                    # The agent's own exception: the main process adds who raised it and when, as for every worker.
                    raise (error.__cause__ or error) from None
                progress.enter(Phase.SERVING)  # a heartbeat: a server without requests does not hang
                wake_for = FOR_ANY if server.wake_for_any else len(self.options.plans)
                most_ms = min(self._poll_ms, server.sleep_seconds * 1000)
                self._gate.sleep(lambda: server.has_work or server.all_have_arrived, most_ms, wake_for)

    def close(self) -> None:
        """Close the server."""
        self._server.close()
