"""The pool of shards: it gives them orders, receives their replies, and builds lost shards again.

The driver, in Ray's words, is the process of the user.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.buffers.object_pipe import ObjectMessage
from penstock.cluster.placement import actor_options
from penstock.cluster.shard import Failure, Reply, ShardHost, ShardPlan, Started
from penstock.errors import ConfigError, NodeLostError, PenstockError, SamplerBrokenError, SamplerClosedError
from penstock.samplers.config import SamplerConfig
from penstock.samplers.results import Trajectories
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.samplers.stats import WorkerStats
from penstock.workers import sigint
from penstock.workers.control import Command
from penstock.workers.failures import Restarts
from penstock.workers.plan import split

_log = logging.getLogger("penstock")

_SLICE_SECONDS = 0.05  # how soon a wait notices that another thread closes the pool
_EVAL_POLL_SECONDS = 0.05  # how soon an evaluation is ended once enough trajectories have finished
_RETRY_SECONDS = 0.2  # between two tries to reach a shard that does not answer
_GRACE_SECONDS = 5.0  # how long the first start waits for the other shards once `min_shards` are ready
_PLACE_SECONDS = 30.0  # how much longer than `start_timeout` a shard may take: Ray starts a process first
_CLOSE_SECONDS = 3.0
_CLOSE_BROKEN_SECONDS = 0.5

# What `ray.get` raises although the shard is alive. After all other errors it is lost, with its node or alone.
_TROUBLES = (ray_errors.RayTaskError, ray_errors.RaySystemError, ray_errors.ObjectStoreFullError)
# The figures of a worker that are summed over the actors of its shard.
_COUNTED = [own.name for own in fields(WorkerStats) if own.type in ("int", "float") and own.name != "worker_rank"]


@dataclass(frozen=True)
class ShardOptions:
    """What happens when shards are slow or lost; `RaySampler` documents it."""

    is_restarted: bool
    min_ready: int | float
    min_shards: int | None
    unavailable_timeout: float


@dataclass(eq=False)
class Order:
    """What a shard is to do, until its reply has come."""

    number: int  #: of this actor; 0 is its start
    batch: int  #: the number of the driver's command
    command: Command
    message: bytes | None
    ref: Any = None  #: Ray's reference to the reply; None: the shard could not be reached
    retry_at: float = 0.0
    unavailable_since: float | None = None


@dataclass(eq=False)
class Shard:
    """What the driver knows of one shard."""

    plan: ShardPlan
    earlier: tuple[WorkerStats, ...]  #: figures of the workers of all actors before this one
    figures: tuple[WorkerStats, ...] = ()  #: of this actor's workers, when it was last asked
    actor: Any = None
    generation: int = 0
    started: Started | None = None  #: None until it is ready
    since: float = 0.0  #: when its actor was made
    versions: list[int] = field(default_factory=list)  #: by policy: the version of its parameters
    n_orders: int = 0  #: how many orders this actor was given
    orders: deque[Order] = field(default_factory=deque)  #: those without a reply, oldest first
    #: Totals of all its actors, for the statistics.
    batches: int = 0
    late: int = 0
    stale: int = 0
    missing: int = 0

    def totals(self) -> tuple[WorkerStats, ...]:
        """The figures of the workers of all its actors."""
        return tuple(map(_sum, self.figures, self.earlier)) if self.figures else self.earlier

    def call(self, method: str, group: str, *args: object) -> Any:
        """Call `method` of the actor in one of its groups of threads. Returns a reference to the answer."""
        return getattr(self.actor, method).options(concurrency_group=group).remote(*args)

    def place(self, path: str) -> Any:
        """The index of its columns in a field of the samples buffer."""
        policies = self.plan.policies
        policy, _, name = path.partition(".") if policies else ("", "", path)
        cells = self.plan.cells[policies.index(policy) if policies else 0]
        columns = slice(cells.start, cells.stop)
        return columns if name in ("policy_version", "bootstrap_value") else (slice(None), columns)

    def __str__(self) -> str:
        return self.text(self.started.node if self.started else None)

    def text(self, node: str | None) -> str:
        """How errors name this shard. `node` is where it runs, or None before it has started."""
        where = "not started yet" if node is None else f"node {node}"
        return f"{self.plan.name} ({where}, {self.plan.env_text})"


def _sum(one: WorkerStats, other: WorkerStats) -> WorkerStats:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in _COUNTED})


def _no_figures(plan: ShardPlan, unit: int) -> tuple[WorkerStats, ...]:
    """The figures of a shard that has never answered."""
    parts, zeros = split(len(plan.columns), plan.n_workers, unit), dict.fromkeys(_COUNTED, 0)
    return tuple(WorkerStats(i, plan.env_ranks[own.start : own.stop], (), **zeros) for i, own in enumerate(parts))


class ShardPool:
    """The calls of `WorkerPool`, with shards in place of workers. `needs` are the resources that Ray reserves for each
    shard. `spec` is a pickled `ShardSpec`, from which each shard is made."""

    def __init__(
        self,
        plans: Sequence[ShardPlan],
        needs: dict[str, float],
        spec: bytes,
        config: SamplerConfig,
        memory: SamplerMemory,
        options: ShardOptions,
        resources: ExitStack,
    ) -> None:
        """Make the actors. This does not wait for them: call `wait("start-up")` next. `close` closes `resources`."""
        self._config, self._memory, self._options, self._needs = config, memory, options, needs
        self._leaves = [dict(slot.leaves()) for slot in memory.slots]
        self.shards = [Shard(plan, _no_figures(plan, config.rows_per_env)) for plan in plans]
        self._least = options.min_shards or len(plans)  # the fewest shards that take part in a command
        self.restarts = Restarts(config.max_restarts, config.restart_window)
        self.has_lost_command = self.is_closed = False
        # The driver's last command: 0 is the start. A stream has none, and gives the orders itself.
        self._number, self._command = 0, Command()
        self._message: bytes | None = None
        self._members: list[Shard] = []  # the shards that take part in it
        self._answered: dict[Shard, Trajectories] = {}  # what they have found
        # The newest parameters in Ray's object store by policy, and how often any were put there: once per version.
        self._versions, self.n_puts = [1] * len(memory.parameters), 0
        self._parameters: list[Any] = [None] * len(memory.parameters)
        self._owner_pid, self._close_lock = os.getpid(), threading.RLock()  # a signal handler may call `close` in it
        self._have_ended = False  # whether the shards have ended
        self._spec, self._group = ray.put(spec), None
        self._cls = ray.remote(concurrency_groups={"orders": 16, "control": 4})(ShardHost)
        self._resources = resources.pop_all()
        atexit.register(self.close)  # Python calls it before Ray's own function, which was registered before
        try:
            if options.min_shards is None:  # reserve all places at once. Otherwise a shard starts when it has a place
                self._group = placement_group([needs] * len(plans), strategy="SPREAD")
            for shard in self.shards:
                self._build(shard)
        except BaseException:
            self.close(broken=True)
            raise

    # ---- shards ----------------------------------------------------------------------------

    def _build(self, shard: Shard) -> None:
        index, strategy = shard.plan.worker_rank, "SPREAD"
        if self._group is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        cls = self._cls.options(**actor_options(self._needs, strategy), max_restarts=0, max_task_retries=0)
        shard.actor = cls.remote(index, shard.generation, self._spec)
        shard.started, shard.since = None, time.monotonic()
        shard.earlier, shard.figures = shard.totals(), ()
        shard.versions, shard.n_orders = [1] * len(self._versions), 0
        shard.orders.clear()
        self.give(shard, Command(), 0)

    def give(self, shard: Shard, command: Command, batch: int, message: bytes | None = None) -> None:
        """Give the shard its next order. `batch` is the number of the driver's command."""
        order = Order(shard.n_orders, batch, command, message)
        shard.n_orders += 1
        shard.orders.append(order)
        self._send(shard, order)

    def _send(self, shard: Shard, order: Order) -> None:
        """Send the order, perhaps not for the first time: the shard runs it once."""
        arguments = order.number, shard.orders[0].number, order.command, order.message
        order.ref = shard.call("run", "orders", *arguments, *self._new_parameters(shard))

    def _new_parameters(self, shard: Shard) -> list[Any]:
        """References to the parameters that are newer than those of the shard, which counts as having them now."""
        for p, newest in enumerate(self._memory.parameters):
            if newest.version != self._versions[p]:
                values, self._versions[p] = newest.read()
                self._parameters[p] = ray.put((p, self._versions[p], values))
                self.n_puts += 1
        known, shard.versions = shard.versions, list(self._versions)
        pairs = zip(self._parameters, known, self._versions, strict=True)
        # Parameters without a reference have never changed: the shard has had them from the start.
        return [ref for ref, old, new in pairs if ref is not None and old != new]

    def send_parameters(self) -> None:
        """Give the newest parameters to all shards that are at work. They act with them from their next order on."""
        for shard in self.shards:
            if shard.started is not None and (refs := self._new_parameters(shard)):
                shard.call("take_parameters", "control", *refs)

    def _lose(self, shard: Shard, why: Exception, during: str) -> None:
        """The shard is lost. Build it again, or raise `NodeLostError`."""
        reason = next((line for line in reversed(str(why).strip().splitlines()) if line.strip()), type(why).__name__)
        text = f"{shard} was lost: {type(why).__name__}: {reason.strip()}"
        rank, n_lost = shard.plan.worker_rank, sum(map(len, shard.plan.cells))  # the trajectories that were running
        ray.kill(shard.actor)  # it may still run, although the driver cannot reach it
        if not self._options.is_restarted:
            raise NodeLostError(f"{text} ({during})") from why
        if (refusal := self.restarts.used_up(1, rank)) is not None:
            raise NodeLostError(f"{text} ({during})\n{refusal}") from why
        self.restarts.note(rank, f"{text} ({during})", n_lost)
        _log.warning("%s (%s); it is built again, %d trajectories are lost", text, during, n_lost)
        shard.generation += 1
        if shard in self._members and shard not in self._answered and len(self._members) > self._least:
            self._members.remove(shard)
        self._build(shard)

    # ---- replies ---------------------------------------------------------------------------

    def replies(self, during: str) -> Iterator[tuple[Shard, Order, Started | Reply]]:
        """The replies that have come, after a wait of `_SLICE_SECONDS` at most. Those of a shard come in the order of
        its orders."""
        if self._memory.control.quit:
            raise SamplerClosedError(f"shut down by another thread during {during}")
        now, heads = time.monotonic(), dict[Any, Shard]()
        for shard in self.shards:
            order = shard.orders[0] if shard.orders else None
            if order is not None and order.ref is None and order.retry_at <= now:
                self._send(shard, order)
            if order is not None and order.ref is not None:
                heads[order.ref] = shard
        refs = list(heads)
        with sigint.allowed():
            if not refs:
                time.sleep(_SLICE_SECONDS)
            ready = ray.wait(refs, num_returns=1, timeout=_SLICE_SECONDS)[0] if refs else []
            if len(refs) > 1 and ready:
                ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
        for ref in ready:
            shard = heads[ref]
            if (reply := self._reply(shard, during)) is not None:
                yield shard, shard.orders.popleft(), reply
        self._check_starts(during)

    def _reply(self, shard: Shard, during: str) -> Started | Reply | None:
        """The reply to its oldest order; None if the shard was lost or cannot be reached now."""
        order, now = shard.orders[0], time.monotonic()
        try:
            reply: Started | Reply | Failure = ray.get(order.ref)
        except ray_errors.ActorUnavailableError as error:
            order.unavailable_since = order.unavailable_since or now
            if order.number == 0 or now - order.unavailable_since > self._options.unavailable_timeout:
                self._lose(shard, error, during)
            else:  # send it again soon, with the parameters: it is unknown whether they have arrived
                order.ref, order.retry_at = None, now + _RETRY_SECONDS
                shard.versions = [0] * len(self._versions)
            return None
        except _TROUBLES as error:
            raise SamplerBrokenError(f"{shard} cannot answer ({during}): {error}") from error
        except ray_errors.RayError as error:
            self._lose(shard, error, during)
            return None
        if isinstance(reply, Failure):
            if reply.kind != "SamplerClosedError":
                raise reply.as_error(shard.text(reply.node), is_start=order.number == 0)
            self._lose(shard, NodeLostError(reply.text), during)  # only if Ray ends its process
            return None
        if isinstance(reply, Started):
            shard.started = reply
        return reply

    def _check_starts(self, during: str) -> None:
        """Raise an error if a shard that is needed has not started in time."""
        limit, is_start = self._config.start_timeout + _PLACE_SECONDS, self._number == 0
        needed = self._members if len(self._members) >= self._least else self.shards
        late = [shard for shard in needed if shard.started is None and time.monotonic() - shard.since > limit]
        if late and not (is_start and self._n_started >= self._least):
            raise (ConfigError if is_start else NodeLostError)(
                f"{len(late)} of {len(self.shards)} shards were not ready after {limit:g} s ({during}): {late[0]} "
                f"and the others need {self._needs} each, and the cluster has {ray.cluster_resources()}: "
                "add nodes, or use fewer shards or workers"
            )

    @property
    def _n_started(self) -> int:
        return sum(shard.started is not None for shard in self.shards)

    @property
    def pids(self) -> list[int]:
        """The process ids of all workers on their nodes, by shard, as they were started. Empty when they have ended."""
        shards = [] if self.is_closed else self.shards
        return [pid for shard in shards if shard.started for pid in shard.started.worker_pids]

    # ---- commands --------------------------------------------------------------------------

    def submit(self, command: Command, message: bytes | None = None) -> int:
        """Give `command` to the shards. A shard that still works on an earlier batch gets it after that."""
        self.begin(command, message)
        try:
            for shard in self._members:
                if not (shard.orders and self._is_batch):
                    self.give(shard, command, self._number, message)
        except BaseException:
            self.has_lost_command = True  # some shards have it, and others do not
            self.close(broken=True)
            raise
        return self._number

    def begin(self, command: Command, message: bytes | None = None) -> int:
        """Begin a new command, without orders: `submit` gives them, or a `Stream`. Returns its number."""
        self._number, self._command, self._message = self._number + 1, command, message
        self._members = [shard for shard in self.shards if shard.started is not None]  # the others take part later
        self._answered = {}
        return self._number

    @property
    def _is_batch(self) -> bool:
        return not (self._command.do_eval or self._command.has_message)

    @property
    def _is_complete(self) -> bool:
        if self._number == 0:
            is_late = time.monotonic() - self.shards[0].since > _GRACE_SECONDS
            return self._n_started >= (self._least if is_late else len(self.shards))
        n, wanted = len(self._members), self._options.min_ready
        if n < self._least:
            return False
        if self._is_batch:
            n = min(n, wanted) if isinstance(wanted, int) else math.ceil(wanted * n - 1e-9)
        return len(self._answered) >= n

    def wait(self, during: str, **how: Any) -> None:
        """Wait until the shards, or enough of them, have done the last command. After Ctrl-C, it may be called again.

        Raises `NodeLostError` if a shard is lost and not built again, or the error of a shard's sampler. Then the pool
        is closed. Raises `SamplerClosedError` if another thread closes the pool. `how` is only for a `WorkerPool`.
        """
        limit = self._config.eval_max_trajectories if self._command.do_eval else None
        next_poll = time.monotonic() + _EVAL_POLL_SECONDS
        try:
            while not self._is_complete:
                for shard, order, reply in self.replies(during):
                    self._take(shard, order, reply)
                if limit is not None and time.monotonic() > next_poll:
                    self._stop_if_enough(limit)
                    next_poll = time.monotonic() + _EVAL_POLL_SECONDS
            if self._number > 0 and self._is_batch:
                self._mark_missing(during)
        except BaseException as error:
            self.close_if_broken(error)
            raise

    def close_if_broken(self, error: BaseException) -> None:
        """Close the pool after an error of penstock, unless another thread has closed it."""
        if isinstance(error, PenstockError) and not isinstance(error, SamplerClosedError):
            self.close(broken=True)

    def _take(self, shard: Shard, order: Order, reply: Started | Reply) -> None:
        """Take a reply. The shard has nothing to do now: if the running command needs it, it gets this command."""
        if isinstance(reply, Reply):
            if order.batch == self._number:
                for path, array in reply.arrays.items():
                    self._slot[path][shard.place(path)] = array
                self._answered[shard] = reply.found
                shard.batches += self._is_batch
                return
            shard.late += 1  # the user has had this batch without it
        if shard not in self._members and len(self._members) < self._least:
            self._members.append(shard)
        has_it = shard in self._answered or any(order.batch == self._number for order in shard.orders)
        if shard in self._members and not has_it and self._number > 0:
            self.give(shard, self._command, self._number, self._message)

    @property
    def _slot(self) -> dict[str, Any]:
        """Where the batch that is being collected goes: arrays by path."""
        return self._leaves[self._command.batch % len(self._leaves)]

    def _mark_missing(self, during: str) -> None:
        """Fill the columns of shards that have not answered with zeros: `valid` is False there."""
        missing = [shard for shard in self.shards if shard not in self._answered]
        for shard in missing:
            shard.missing += 1
            for path, target in self._slot.items():
                target[shard.place(path)] = 0
        if missing:
            _log.info("%s: without %s", during, ", ".join(map(str, missing)))

    def _stop_if_enough(self, limit: int) -> None:
        """End the evaluation in all shards if they have finished so many trajectories."""
        waiting = [shard for shard in self._members if shard not in self._answered and shard.started]
        n = sum(map(len, self._answered.values()))
        n += sum(filter(None, self.ask(waiting, _EVAL_POLL_SECONDS, "n_finished")))
        if n >= limit:
            for shard in waiting:
                shard.call("stop_evaluation", "control")

    def ask(self, shards: Sequence[Shard], seconds: float, method: str, *args: object) -> list[Any]:
        """What this method of each shard returns; None for a shard that does not answer within `seconds`."""
        refs = [shard.call(method, "control", *args) if shard.started else None for shard in shards]
        wanted = [ref for ref in refs if ref is not None]
        ready = set(ray.wait(wanted, num_returns=len(wanted), timeout=seconds)[0]) if wanted else set()
        return [_value(ref) if ref in ready else None for ref in refs]

    def run(
        self, command: Command, during: str, discard: Callable[[], Any], *, message: bytes | None = None, **how: Any
    ) -> None:
        """`submit` and `wait`. Replies to a command whose wait Ctrl-C has ended are dropped when they come."""
        self.submit(command, message)
        self.wait(during, **how)

    def take_messages(self, number: int | None = None) -> Trajectories:
        """The results of the last call on the environments, or the trajectories of the last batch or evaluation. Their
        records are ordered by time step, then env_rank."""
        joined = [item for found in self._answered.values() for item in found]
        if joined and not isinstance(joined[0], ObjectMessage):
            joined.sort(key=itemgetter(0, 1))
        return joined

    def statuses(self) -> list[Any]:
        """Nothing: `RaySampler` shows the shards."""
        return []

    # ---- closing ---------------------------------------------------------------------------

    def close(self, *, broken: bool = False, await_call: Callable[[], bool] = lambda: True) -> None:
        """End the shards, then close the resources. It raises no error, and it may be called twice.

        Another thread may use the resources in a call. So this waits with `await_call` before it closes them; if that
        returns False, it leaves them open. A call that fails closes with `broken`.
        """
        self._memory.control.quit = True
        # With `broken`, the thread that closes the pool already waits for this call.
        if os.getpid() != self._owner_pid or not self._close_lock.acquire(blocking=not broken):
            return
        try:
            with sigint.deferred():
                if not self._have_ended:
                    self._end_shards(_CLOSE_BROKEN_SECONDS if broken else _CLOSE_SECONDS + self._config.close_timeout)
                    self._have_ended = True
                if not self.is_closed and await_call():
                    self._resources.close()
                    self.is_closed = True
                    atexit.unregister(self.close)
        finally:
            self._close_lock.release()

    def _end_shards(self, seconds: float) -> None:
        if not ray.is_initialized():  # Ray has ended before, and its actors with it
            return
        try:
            refs = [shard.call("close", "control") for shard in self.shards if shard.started]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=seconds)
            for shard in self.shards:
                if shard.actor is not None:
                    ray.kill(shard.actor)
            if self._group is not None:
                remove_placement_group(self._group)
        except Exception:  # Ray itself has failed, and ends its actors
            _log.warning("Ray could not end the shards", exc_info=True)


def _value(ref: object) -> Any:
    try:
        return ray.get(ref)
    except ray_errors.RayError:  # the shard is lost: the next wait finds out
        return None
