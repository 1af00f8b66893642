"""A shard on its node: one Ray actor. A thread of this actor makes one sampler and runs the driver's orders."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import errors
from penstock.agents import Agent
from penstock.buffers.object_pipe import ObjectMessage, Unreadable
from penstock.buffers.reports import RemoteTraceback, dump_exception, in_one_line, load_exception
from penstock.envs import EnvFactory
from penstock.envs.calls import EnvCall
from penstock.envs.seeding import seed_generators
from penstock.samplers.allocation import eval_fn, eval_kwargs
from penstock.samplers.column_states import StateMessage
from penstock.samplers.config import SamplerConfig
from penstock.samplers.results import Trajectories
from penstock.samplers.sampler import Sampler
from penstock.samplers.sampler_plan import SamplerPlan, episodes_per_env, eval_max_T
from penstock.samplers.seating import Seating
from penstock.samplers.serial import SerialSampler
from penstock.workers.affinity import limit_threads, usable_cpus
from penstock.workers.control import Command
from penstock.workers.plan import Affinity

_CLOSE_SECONDS = 2.5
_GENERATION_BITS = 16  # the lowest bits of a generation count the replaced workers of one actor, the others the actors

#: The index of a policy, a version of its parameters, and their values by name.
Parameters = tuple[int, int, dict[str, npt.NDArray[Any]]]


@dataclass(frozen=True, kw_only=True)
class ShardPlan(SamplerPlan):
    """Which columns and environments a shard holds."""

    n_workers: int

    @property
    def name(self) -> str:
        return f"shard {self.worker_rank}"

    def most_trajectories(self, batch_T: int, n_slots: int, eval_max_T: int, eval_max_trajectories: int | None) -> int:
        return 1  # they come with the replies, so the driver needs no memory for them


@dataclass(frozen=True)
class ShardSpec:
    """What all shards of a sampler are made from."""

    sampler_cls: type[Sampler]
    sampler_options: Mapping[str, Any]  #: arguments that only this class has
    config: SamplerConfig  #: of all shards together
    agents: Agent | Mapping[str, Agent]  #: copies that act
    plans: tuple[ShardPlan, ...]
    n_cpus: int  #: that a shard takes
    affinity: Affinity
    setup: Mapping[str, Any]  #: further arguments of `initialize`
    seats: tuple[Seating, Sequence[EnvFactory]] | None = None  #: see `InitArguments`; of all shards together

    def options(self, plan: ShardPlan) -> dict[str, Any]:
        """The arguments of the sampler of one shard."""
        config, n_evals = self.config, len(plan.eval_columns)
        own = {field.name: getattr(config, field.name) for field in fields(config)}
        own |= {"batch_B": len(plan.columns), "n_workers": plan.n_workers, "n_slots": 1}
        own |= {"env_fn": _part(config.env_fn, plan.columns), "env_kwargs": _part(config.env_kwargs, plan.columns)}
        own |= {"eval_n_envs": n_evals, "eval_env_fn": None, "eval_env_kwargs": None, "eval_episodes": None}
        if n_evals:
            own["eval_env_fn"], own["eval_env_kwargs"] = eval_fn(config), _part(eval_kwargs(config), plan.eval_columns)
            own["eval_max_steps"] = n_evals * eval_max_T(config.eval_max_steps, config.eval_n_envs)
            # 0 is not allowed here. A shard with no episodes never evaluates.
            own["eval_episodes"] = self.episodes(plan) or config.eval_episodes
        return {**own, **self.sampler_options}

    def episodes(self, plan: ShardPlan) -> int | None:
        """How many of an evaluation's episodes this shard runs; None if it does not count them."""
        config = self.config
        episodes = episodes_per_env(config.eval_episodes, config.eval_n_envs or 1, plan.eval_columns)
        return None if episodes is None else sum(episodes)


def _part(value: Any, columns: range) -> Any:
    """The part of these columns, if `value` is a list with an entry for each."""
    is_list = not (value is None or isinstance(value, str | Mapping) or callable(value))
    return value[columns.start : columns.stop] if is_list else value


class Failure(NamedTuple):
    """An exception of a shard, in a form that every process can unpickle."""

    kind: str  #: the class in `penstock.errors`
    text: str
    cause: tuple[bytes, bytes, bytes]  #: see `dump_exception`
    node: str  #: where it was raised: IP address and Ray's id of the node

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """From the exception that the sampler has raised in this process."""
        is_ours = isinstance(error, errors.PenstockError) and type(error).__name__ in errors.__all__
        if is_ours:
            return cls(type(error).__name__, str(error), dump_exception(error.__cause__ or error), _node())
        return cls("WorkerError", f"raised {in_one_line(error)}", dump_exception(error), _node())

    def as_error(self, where: str, *, is_start: bool) -> errors.PenstockError:
        """The exception for the user; `where` comes before its message. After the start, whatever a shard raises breaks
        the sampler."""
        kind = getattr(errors, self.kind)
        if not (is_start or issubclass(kind, errors.SamplerBrokenError)):
            kind = errors.SamplerBrokenError
        error: errors.PenstockError = kind(f"{where}: {self.text}")
        error.__cause__ = load_exception(*self.cause).as_cause()
        return error


@dataclass(frozen=True)
class Started:
    """Where a shard runs."""

    node: str
    pid: int
    worker_pids: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """What a shard has done for an order."""

    arrays: dict[str, npt.NDArray[Any]]  #: its columns of the samples buffer, by path; empty except for batches
    found: Trajectories  #: finished trajectories, or the results of a call
    versions: tuple[int, ...]  #: by policy: the version of the parameters that acted


class ShardHost:
    """The Ray actor. One thread makes the sampler and runs all orders. The methods give it orders and wait for replies.

    Ray may run each call in another thread. But if a thread ends, the kernel may kill the processes that it has
    started. So the thread that makes the sampler runs as long as the actor.
    """

    def __init__(self, index: int, generation: int, spec: bytes) -> None:
        self._index, self._generation = index, generation
        self._lock = threading.Lock()
        self._early: dict[int, tuple[Command, bytes | None]] = {}  # orders that have come before an earlier one
        self._orders: queue.SimpleQueue[tuple[int, Command, bytes | None] | None] = queue.SimpleQueue()
        self._next_number = 1
        self._replies: dict[int, Future[Started | Reply | Failure]] = {0: Future()}  # number 0 is the start
        self._n_known = 0  # the driver has the replies to all orders below this number
        self._spare: list[dict[str, npt.NDArray[Any]]] = []  # arrays to use again: the driver has their replies
        self._parameters: dict[int, Parameters] = {}  # new ones, by policy
        self._is_evaluating = False
        self._sampler: Any = None
        self._thread = threading.Thread(target=self._work, args=(spec,), name="penstock-shard", daemon=True)
        self._thread.start()

    # ---- calls of the driver ---------------------------------------------------------------

    def run(
        self, number: int, n_known: int, command: Command, message: bytes | None, *parameters: Parameters
    ) -> Started | Reply | Failure | None:
        """Run order `number` after those before it, with these parameters or newer ones. Order 0 is the start. The
        driver has the replies to all orders below `n_known`. If it does not know whether an order has arrived, it gives
        this order again, and gets the same reply."""
        self.take_parameters(*parameters)
        with self._lock:
            self._n_known = max(self._n_known, n_known)
            if number < self._n_known:
                return None  # it was sent twice, and the driver has its reply
            for known in [known for known in self._replies if known < self._n_known]:
                if isinstance(reply := self._replies.pop(known).result(), Reply) and reply.arrays:
                    self._spare.append(reply.arrays)
            if number not in self._replies:
                self._replies[number], self._early[number] = Future(), (command, message)
            while self._next_number in self._early:  # Ray's threads may change the order
                self._orders.put((self._next_number, *self._early.pop(self._next_number)))
                self._next_number += 1
            del self._spare[len(self._replies) :]  # one for each order that the driver waits for
            future = self._replies[number]
        return future.result()

    def take_parameters(self, *parameters: Parameters) -> None:
        """From the next order on, act with these parameters of some policies, unless there are newer ones."""
        with self._lock:
            for own in parameters:
                p, version, _ = own
                if p not in self._parameters or version > self._parameters[p][1]:
                    self._parameters[p] = own

    def n_finished(self) -> int:
        """How many trajectories the evaluation that runs has finished so far; 0 if none runs."""
        sampler = self._sampler
        return sum(sampler._memory.control.n_results_by_rank(sampler.n_workers)) if self._is_evaluating else 0

    def stop_evaluation(self) -> None:
        """End the evaluation that runs now, at its next step. An evaluation that has not begun yet is not affected."""
        if self._is_evaluating:
            self._sampler._memory.control.stop_eval = True

    def ask(self, method: str) -> Any:
        """What this method of the sampler returns."""
        return getattr(self._sampler, method)()

    def close(self) -> None:
        """Close the sampler. Running orders get errors as their replies."""
        self._orders.put(None)
        if self._sampler is not None:  # an order that runs ends only when another thread closes the sampler
            self._sampler.shutdown()
        self._thread.join(_CLOSE_SECONDS)

    # ---- the thread ------------------------------------------------------------------------

    def _work(self, spec: bytes) -> None:
        try:
            self._replies[0].set_result(self._make(pickle.loads(spec)))
        except BaseException as error:
            self._replies[0].set_result(Failure.of(error))
            return
        while (item := self._orders.get()) is not None:
            number, command, message = item
            self._replies[number].set_result(self._execute(command, message))
        self._sampler.shutdown()

    def _make(self, spec: ShardSpec) -> Started:
        self._spec, self._plan = spec, spec.plans[self._index]
        # A SerialSampler steps in this process. Another sampler acts here while its workers wait: their CPUs are free.
        limit_threads(1 if issubclass(spec.sampler_cls, SerialSampler) else spec.n_cpus)
        options, plan = spec.options(self._plan), self._plan
        seed_generators(spec.setup["seed"], plan.env_ranks.start, self._generation)  # as those of a worker
        sampler = spec.sampler_cls(options.pop("env_fn"), **options)
        sampler._generation = self._generation << _GENERATION_BITS
        if spec.seats is not None:
            sampler._seats = spec.seats[0].part(plan), spec.seats[1]
        sampler._makes_infos = False  # the driver makes them, in the order of all shards
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the driver has given the same warnings
            sampler.initialize(
                spec.agents,
                first_env_rank=plan.env_ranks.start,
                first_eval_env_rank=plan.eval_env_ranks.start,
                affinity=_own_affinity(spec),
                **spec.setup,
            )
        self._sampler = sampler
        return Started(_node(), os.getpid(), tuple(sampler.worker_pids))

    def _execute(self, command: Command, message: bytes | None) -> Reply | Failure:
        sampler, arrays = self._sampler, {}
        found: Any = []
        with self._lock:
            parameters, self._parameters = self._parameters, {}
        try:
            shared = sampler._memory.parameters
            for p, version, values in parameters.values():
                if version > shared[p].version:
                    shared[p].publish(values, version)
            if command.has_message:
                found = self._call(pickle.loads(message or b""))
            elif command.do_eval:
                found = self._evaluate(command.itr)
            else:
                _, found = sampler.obtain_samples(command.itr)
                arrays = self._copy_batch()
            return Reply(arrays, [_portable(item) for item in found], tuple(own.version for own in shared))
        except BaseException as error:
            return Failure.of(error)

    def _evaluate(self, itr: int) -> Trajectories:
        if not self._plan.eval_columns or self._spec.episodes(self._plan) == 0:
            return []
        self._is_evaluating = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # the driver counts the episodes of all shards
                found: Trajectories = self._sampler.evaluate_agent(itr)
        finally:
            self._is_evaluating = False
        return found

    def _copy_batch(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of the last batch, by path. It reuses the arrays of an earlier reply: to get new memory takes longer
        than to copy."""
        sampler = self._sampler
        slot = sampler._memory.slots[(sampler._batch - 1) % sampler._batches.n_slots]
        with self._lock:
            arrays = self._spare.pop() if self._spare else {}
        for path, array in slot.leaves():
            if path in arrays:
                np.copyto(arrays[path], array)
            else:
                arrays[path] = array.copy()
        return arrays

    def _call(self, call: EnvCall | StateMessage) -> list[ObjectMessage]:
        if isinstance(call, StateMessage):
            self._sampler._send(call, "set_policy_of")
            return []
        columns = self._plan.eval_columns if call.evaluation else self._plan.columns
        if not columns:
            return []
        found: list[ObjectMessage] = self._sampler._perform(replace(call, values=_part(call.values, columns)))
        return found


def _node() -> str:
    """The node on which this shard runs."""
    import ray

    return f"{ray.util.get_node_ip_address()} {ray.get_runtime_context().get_node_id()[:8]}"


def _own_affinity(spec: ShardSpec) -> Affinity:
    """Pin workers only if the shard has all CPUs of this machine, or if the user has chosen the CPUs. Otherwise other
    shards here would be pinned to the same CPUs."""
    has_all = spec.affinity.cpus is not None or spec.n_cpus >= len(usable_cpus())
    return spec.affinity if has_all else replace(spec.affinity, pin=False)


def _portable(item: object) -> Any:
    """`item`, if the driver can unpickle it. Otherwise a message with the reason."""
    if isinstance(item, ObjectMessage) and isinstance(item.payload, Unreadable):
        error = RemoteTraceback(in_one_line(item.payload.error))
        return item._replace(payload=replace(item.payload, error=error))
    return item
