"""A shard on its node: one Ray actor, which makes one sampler and runs the driver's orders."""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy.typing as npt

from penstock import errors
from penstock.agents import Agent
from penstock.buffers.object_pipe import ObjectMessage, Unreadable
from penstock.buffers.reports import RemoteTraceback, dump_exception, in_one_line, load_exception
from penstock.envs.calls import EnvCall
from penstock.envs.seeding import seed_generators
from penstock.samplers.allocation import SeatingPlan
from penstock.samplers.config import SamplerConfig
from penstock.samplers.results import Trajectories
from penstock.samplers.resuming import StateMessage
from penstock.samplers.sampler import Sampler, SerialSampler
from penstock.samplers.sampler_plan import SamplerPlan, episodes_per_env, eval_max_T
from penstock.samplers.stats import WorkerStats
from penstock.workers.affinity import limit_threads
from penstock.workers.control import Command
from penstock.workers.plan import Affinity

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
    seats: SeatingPlan  #: of all shards together

    def options(self, plan: ShardPlan) -> dict[str, Any]:
        """The arguments of the sampler of one shard."""
        config, n_evals = self.config, len(plan.eval_columns)
        arguments = {field.name: getattr(config, field.name) for field in fields(config)}
        arguments |= {"batch_B": len(plan.columns), "n_workers": plan.n_workers, "n_slots": 1}
        arguments |= {
            "env_fn": _part(config.env_fn, plan.columns),
            "env_kwargs": _part(config.env_kwargs, plan.columns),
        }
        arguments |= {"eval_n_envs": n_evals, "eval_env_fn": None, "eval_env_kwargs": None, "eval_episodes": None}
        if n_evals:
            env_fn, kwargs = config.eval_source
            arguments["eval_env_fn"], arguments["eval_env_kwargs"] = env_fn, _part(kwargs, plan.eval_columns)
            arguments["eval_max_steps"] = n_evals * eval_max_T(config.eval_max_steps, config.eval_n_envs)
            # 0 is not allowed here. A shard with no episodes never evaluates.
            arguments["eval_episodes"] = self.episodes(plan) or config.eval_episodes
            if config.eval_max_trajectories is not None:  # its share
                arguments["eval_max_trajectories"] = math.ceil(
                    config.eval_max_trajectories * n_evals / config.eval_n_envs
                )
        return {**arguments, **self.sampler_options}

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

    arrays: Mapping[str, npt.NDArray[Any]]  #: its columns of the samples buffer, by path; empty except for batches
    results: Trajectories  #: finished trajectories, or the results of a call
    versions: tuple[int, ...]  #: by policy: the version of the parameters that acted
    workers: tuple[WorkerStats, ...]  #: the figures of its workers


class ShardHost:
    """The Ray actor. Its orders are `start`, then `run`, and have one thread, so they run one after another in the
    sequence of the calls. That thread makes the sampler, and lives as long as the actor: if a thread ends, the kernel
    may kill the processes that it has started. The other methods run in the thread of the group "control"."""

    def __init__(self, index: int, generation: int) -> None:
        self._index, self._generation = index, generation
        self._parameters: dict[int, Parameters] = {}  # by policy: new ones, for the next order
        self._sampler: Any = None

    # ---- beside the orders -----------------------------------------------------------------

    def ping(self) -> None:
        """Answer at once: the driver can reach this shard."""

    def take_parameters(self, *parameters: Parameters) -> None:
        """From the next order on, act with these parameters of some policies."""
        for parameter in parameters:
            self._parameters[parameter[0]] = parameter

    def clock(self) -> int:
        """The time on this node, for traces."""
        return time.monotonic_ns()

    def recorded(self) -> Any:
        """What its workers have done lately, for traces."""
        return self._sampler.run.pool.recorded()

    def close(self) -> None:
        """Close the sampler. An order that runs gets an error as its reply."""
        if self._sampler is not None:
            self._sampler.shutdown()

    # ---- orders ----------------------------------------------------------------------------

    def start(self, spec: bytes) -> Started | Failure:
        """Make the sampler."""
        try:
            return self._make(pickle.loads(spec))
        except BaseException as error:
            return Failure.of(error)

    def _make(self, spec: ShardSpec) -> Started:
        self._spec, self._plan = spec, spec.plans[self._index]
        # A SerialSampler steps in this process. Another sampler acts here while its workers wait: their CPUs are free.
        limit_threads(1 if issubclass(spec.sampler_cls, SerialSampler) else spec.n_cpus)
        options, plan = spec.options(self._plan), self._plan
        seed_generators(spec.setup["seed"], plan.env_ranks.start, self._generation)  # as those of a worker
        sampler = spec.sampler_cls(options.pop("env_fn"), **options)
        sampler.generation = self._generation << _GENERATION_BITS
        sampler._seats = replace(spec.seats, seating=spec.seats.seating.part(plan))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the driver has given the same warnings
            sampler.initialize(
                spec.agents,
                first_env_rank=plan.env_ranks.start,
                first_eval_env_rank=plan.eval_env_ranks.start,
                affinity=spec.affinity,
                **spec.setup,
            )
        self._sampler = sampler
        return Started(_node(), os.getpid(), tuple(sampler.worker_pids))

    def run(self, command: Command, message: bytes | None, *parameters: Parameters) -> Reply | Failure:
        """Run a command, with these parameters or newer ones."""
        sampler, arrays = self._sampler, {}
        results: Any = []
        try:
            shared = sampler.run.memory.parameters
            newer = [self._parameters.pop(p) for p in list(self._parameters)]  # the other thread may add some
            for p, version, values in (*parameters, *newer):
                if version > shared[p].version:
                    shared[p].publish(values, version)
            if command.has_message:
                results = self._call(pickle.loads(message or b""))
            elif command.do_eval:
                if self._plan.eval_columns and self._spec.episodes(self._plan) != 0:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", RuntimeWarning)  # the driver counts the episodes of all shards
                        results = sampler.evaluate_agent(command.itr)
            else:
                _, results = sampler.obtain_samples(command.itr)
                run = sampler.run
                slot = run.memory.slots[(run.batch - 1) % run.batches.n_slots]
                arrays = dict(slot.leaves())  # Ray copies them before this thread runs the next order
            versions = tuple(memory.version for memory in shared)
            results = [_portable(item) for item in results]
            return Reply(arrays, results, versions, sampler.stats().workers)
        except BaseException as error:
            return Failure.of(error)

    def _call(self, call: EnvCall | StateMessage) -> list[ObjectMessage]:
        if isinstance(call, StateMessage):
            self._sampler.run.send(call, "set_policy_of")
            return []
        columns = self._plan.eval_columns if call.evaluation else self._plan.columns
        if not columns:
            return []
        messages: list[ObjectMessage] = self._sampler._perform(replace(call, values=_part(call.values, columns)))
        return messages


def _node() -> str:
    """The node on which this shard runs."""
    import ray

    return f"{ray.util.get_node_ip_address()} {ray.get_runtime_context().get_node_id()[:8]}"


def _portable(item: object) -> Any:
    """`item`, if the driver can unpickle it. Otherwise a message with the reason."""
    if isinstance(item, ObjectMessage) and isinstance(item.payload, Unreadable):
        error = RemoteTraceback(in_one_line(item.payload.error))
        return item._replace(payload=replace(item.payload, error=error))
    return item
