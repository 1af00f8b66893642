"""The pool of shards: it gives them orders, receives their replies, and builds lost shards again.

An order is a call of a shard's actor, and Ray's reference to the result is the reply. An actor runs its orders one
after another, as they were given. The driver, in Ray's words, is the process of the user.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.buffers.object_pipe import ObjectMessage
from penstock.distributed.placement import actor_options
from penstock.distributed.shard import Failure, Reply, ShardHost, ShardPlan, Started
from penstock.errors import ConfigError, NodeLostError, PenstockError, SamplerBrokenError, SamplerClosedError
from penstock.samplers.config import SamplerConfig
from penstock.samplers.results import Trajectories
from penstock.samplers.sampler import Sampler
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.samplers.stats import WorkerStats
from penstock.workers import sigint, tracing
from penstock.workers.control import ASKED, DONE, Command
from penstock.workers.failures import Restarts
from penstock.workers.plan import split

_log = logging.getLogger("penstock")

_SLICE_SECONDS = 0.05  # how soon a wait notices that another thread closes the pool
_PING_SECONDS = 1.0  # how often a shard that works is asked whether it can be reached
_PLACE_SECONDS = 30.0  # how much longer than `start_timeout` a shard may take: Ray starts a process first
_CLOCK_LOOKS = 5  # at the clock of each node, for a trace: the fastest answer is the most exact
_CLOSE_SECONDS = 3.0
_CLOSE_BROKEN_SECONDS = 0.5

# What `ray.get` raises although the shard is alive. After all other errors it is lost, with its node or alone.
_TROUBLES = (ray_errors.RayTaskError, ray_errors.RaySystemError, ray_errors.ObjectStoreFullError)
# The figures of a worker that are summed over the actors of its shard.
_COUNTED = [
    field.name for field in fields(WorkerStats) if field.type in ("int", "float") and field.name != "worker_rank"
]


@dataclass(frozen=True)
class RayOptions:
    """The arguments that only `RaySampler` has, which documents them."""

    n_shards: int | None
    sampler_cls: type[Sampler]
    sampler_options: Mapping[str, Any]
    is_restarted: bool
    min_ready: int | None
    min_shards: int | None
    unavailable_timeout: float
    resources: Mapping[str, float]


@dataclass(eq=False)
class Shard:
    """What the driver knows of one shard."""

    plan: ShardPlan
    earlier: tuple[WorkerStats, ...]  #: figures of the workers of all actors before this one
    figures: tuple[WorkerStats, ...] = ()  #: of this actor's workers, in its last reply
    actor: Any = None
    generation: int = 0
    started: Started | None = None  #: None until it is ready
    node: str | None = None  #: where this actor runs, if it has answered
    since: float = 0.0  #: when its actor was made
    versions: list[int] = field(default_factory=list)  #: by policy: the version of its parameters
    ping: Any = None  #: a reference to the answer to the newest question whether it can be reached
    n_silent: int = 0  #: how many checks have found no answer to it
    #: The orders without a reply, oldest first: the number of the driver's command, 0 for the start, and the reference.
    orders: deque[tuple[int, Any]] = field(default_factory=deque)
    #: The driver's command: how many replies to it were taken, and what these have found.
    taken: int = 0
    results: Trajectories = field(default_factory=list)
    #: Totals of all its actors, for the statistics.
    batches: int = 0
    late: int = 0
    stale: int = 0
    missing: int = 0

    def totals(self) -> tuple[WorkerStats, ...]:
        """The figures of the workers of all its actors, as of the last reply."""
        return tuple(map(_sum, self.figures, self.earlier)) if self.figures else self.earlier

    def ask(self, method: str, *args: object) -> Any:
        """Call `method` of the actor beside its orders. Returns a reference to the answer."""
        return getattr(self.actor, method).options(concurrency_group="control").remote(*args)

    def place(self, path: str) -> Any:
        """The index of its columns in a field of the samples buffer."""
        policies = self.plan.policies
        policy, _, name = path.partition(".") if policies else ("", "", path)
        if name == "final_obs_taken":  # what the driver's learner has taken: no shard writes it
            return slice(0)
        cells = self.plan.cells[policies.index(policy) if policies else 0]
        columns = slice(cells.start, cells.stop)
        return columns if name in ("policy_version", "bootstrap_value") else (slice(None), columns)

    def __str__(self) -> str:
        """How errors name this shard."""
        return f"{self.plan.name} ({f'node {self.node}' if self.node else 'not started yet'}, {self.plan.env_text})"


def _sum(one: WorkerStats, other: WorkerStats) -> WorkerStats:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in _COUNTED})


def _no_figures(plan: ShardPlan, unit: int) -> tuple[WorkerStats, ...]:
    """The figures of a shard that has never answered."""
    parts, zeros = split(len(plan.columns), plan.n_workers, unit), dict.fromkeys(_COUNTED, 0)
    return tuple(WorkerStats(i, plan.env_ranks[part.start : part.stop], (), **zeros) for i, part in enumerate(parts))


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
        options: RayOptions,
        resources: ExitStack,
    ) -> None:
        """Make the actors. This does not wait for them: call `wait("start-up")` next. `close` closes `resources`."""
        self._config, self._memory, self._options, self._needs = config, memory, options, needs
        self._leaves = [dict(slot.leaves()) for slot in memory.slots]
        self.shards = [Shard(plan, _no_figures(plan, config.rows_per_env)) for plan in plans]
        self._least = options.min_shards or len(plans)  # the fewest shards that take part in a command
        self.restarts = Restarts(config.max_restarts, config.restart_window)
        self.has_lost_command = self.is_closed = False
        # The driver's last command: 0 is the start. `_depth`: see `submit`.
        self._number, self._command = 0, Command()
        self._message: bytes | None = None
        self._depth: int | None = None
        self._ready: deque[Shard] = deque()  # the oldest order of these shards has its reply
        # The newest parameters in Ray's object store, by policy. A version is put there once for all shards, except
        # the first, which is in the spec.
        self._versions = [1] * len(memory.parameters)
        self._parameters: list[Any] = [None] * len(memory.parameters)
        self._owner_pid, self._close_lock = os.getpid(), threading.RLock()  # a signal handler may call `close` in it
        self._have_ended = False  # whether the shards have ended
        memory.control.note_opening(Command(), time.monotonic_ns(), len(plans))  # the start
        self._spec, self._group = ray.put(spec), None
        # Orders have one thread, so that Ray keeps their sequence. What must not wait for them has another one.
        self._cls = ray.remote(concurrency_groups={"control": 1})(ShardHost)
        self._next_check = 0.0
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
        shard.actor = cls.remote(index, shard.generation)
        shard.started, shard.node, shard.ping, shard.since = None, None, None, time.monotonic()
        shard.earlier, shard.figures = shard.totals(), ()
        shard.versions = [1] * len(self._versions)
        shard.orders = deque([(0, shard.actor.start.remote(self._spec))])
        self._ready = deque(other for other in self._ready if other is not shard)

    def _fill(self, shard: Shard) -> None:
        """Give the shard the orders for the driver's command that it may have now."""
        if self._number == 0 or shard.started is None:
            return
        n, most = sum(number == self._number for number, _ in shard.orders), self._depth
        if most is None:
            most = 0 if shard.taken or (shard.orders and self._command.is_batch) else 1
        for i in range(n, most):
            self._order(shard, self._command._replace(itr=self._command.itr + shard.taken + i))

    def _order(self, shard: Shard, command: Command) -> None:
        reply = shard.actor.run.remote(command, self._message, *self._new_parameters(shard))
        shard.orders.append((self._number, reply))

    def _new_parameters(self, shard: Shard) -> list[Any]:
        """References to the parameters that are newer than those of the shard, which counts as having them now."""
        for p, newest in enumerate(self._memory.parameters):
            if newest.version != self._versions[p]:
                values, self._versions[p] = newest.read()
                self._parameters[p] = ray.put((p, self._versions[p], values))
        known, shard.versions = shard.versions, list(self._versions)
        pairs = zip(self._parameters, known, self._versions, strict=True)
        return [ref for ref, old, new in pairs if old != new]

    def send_parameters(self) -> None:
        """Give the newest parameters to all shards that are at work. They act with them from their next order on."""
        for shard in self._started:
            if refs := self._new_parameters(shard):
                shard.ask("take_parameters", *refs)

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
        self._build(shard)

    # ---- replies ---------------------------------------------------------------------------

    def _take(self, during: str) -> tuple[Shard, Reply] | None:
        """The next reply to the driver's command; None if there is none after `_SLICE_SECONDS`. The shard gets further
        orders. Replies to earlier commands are dropped, and counted.

        Raises `NodeLostError` if a shard is lost and not built again, or the error of a shard's sampler. Then the pool
        is closed. Raises `SamplerClosedError` if another thread closes the pool.
        """
        if self._memory.control.quit:
            raise SamplerClosedError(f"shut down by another thread during {during}")
        try:
            if (came := self._next_reply(during)) is None:
                return None
        except PenstockError:
            self.close(broken=True)
            raise
        shard, number, reply = came
        if isinstance(reply, Reply) and number == self._number:
            shard.taken += 1
            self._fill(shard)
            return shard, reply
        shard.late += isinstance(reply, Reply)
        self._fill(shard)  # it may have started only now
        return None

    def _next_reply(self, during: str) -> tuple[Shard, int, Started | Reply] | None:
        """The next reply to any order, and the number of its command. Those of a shard come in the order of its
        orders."""
        if not self._ready:
            heads = {shard.orders[0][1]: shard for shard in self.shards if shard.orders}
            refs = list(heads)
            with sigint.allowed():
                ready = ray.wait(refs, num_returns=1, timeout=_SLICE_SECONDS)[0]
                if len(refs) > 1 and ready:
                    ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
            self._ready.extend(heads[ref] for ref in ready)
            self._check(during)
        if not self._ready:
            return None
        shard = self._ready.popleft()
        number, ref = shard.orders[0]
        try:
            reply: Started | Reply | Failure = ray.get(ref)
        except _TROUBLES as error:
            raise SamplerBrokenError(f"{shard} cannot answer ({during}): {error}") from error
        except ray_errors.RayError as error:
            self._lose(shard, error, during)
            return None
        if isinstance(reply, Failure):
            if reply.kind == "SamplerClosedError":  # only if Ray ends its process
                self._lose(shard, NodeLostError(reply.text), during)
                return None
            shard.node = reply.node
            raise reply.as_error(str(shard), is_start=number == 0)
        if isinstance(reply, Started):
            shard.started, shard.node = reply, reply.node
        else:
            shard.figures = reply.workers
        shard.orders.popleft()
        return shard, number, reply

    def _check(self, during: str) -> None:
        """Once a second: raise an error if a shard that is needed has not started in time, and lose the shards that
        work and have answered no question for `unavailable_timeout` seconds."""
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check, limit = now + _PING_SECONDS, self._config.start_timeout + _PLACE_SECONDS
        late = [shard for shard in self.shards if shard.started is None and now - shard.since > limit]
        if late and len(self._started) < self._least:
            raise (NodeLostError if self._number else ConfigError)(
                f"{len(late)} of {len(self.shards)} shards were not ready after {limit:g} s ({during}): {late[0]} "
                f"and the others need {self._needs} each, and the cluster has {ray.cluster_resources()}: "
                "add nodes, or use fewer shards or workers"
            )
        limit = self._options.unavailable_timeout
        for shard in [shard for shard in self._started if shard.orders]:
            if shard.ping is None or ray.wait([shard.ping], timeout=0)[0]:
                shard.ping, shard.n_silent = shard.ask("ping"), 0
                continue
            shard.n_silent += 1  # this counts checks, not time: the driver may have been suspended
            if shard.n_silent * _PING_SECONDS > limit:
                self._lose(shard, NodeLostError(f"it could not be reached for unavailable_timeout={limit:g} s"), during)

    @property
    def _started(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.started is not None]

    @property
    def pids(self) -> list[int]:
        """The process ids of all workers on their nodes, by shard, as they were started. Empty when they have ended."""
        return [
            pid for shard in self.shards if shard.started and not self.is_closed for pid in shard.started.worker_pids
        ]

    # ---- commands --------------------------------------------------------------------------

    def submit(self, command: Command, message: bytes | None = None, *, depth: int | None = None) -> int:
        """Give `command` to the shards, and return its number. Each does it once. One that still works on an earlier
        batch, or has not started, gets it later. With `depth`, each makes pieces without end, the next one for the next
        `itr`, and has so many orders at a time."""
        self._number, self._command, self._message, self._depth = self._number + 1, command, message, depth
        self._memory.control.note_opening(command, time.monotonic_ns(), len(self.shards))
        try:
            for shard in self.shards:
                shard.taken, shard.results = 0, []
                self._fill(shard)
        except BaseException:
            self.has_lost_command = True  # some shards have it, and others do not
            self.close(broken=True)
            raise
        return self._number

    @property
    def _is_complete(self) -> bool:
        started = self._started
        n = len(started)
        if n < self._least or self._number == 0:
            return n >= self._least
        if self._command.is_batch:
            n = min(n, self._options.min_ready or n)
        return sum(shard.taken for shard in started) >= n

    def wait(self, during: str, **how: Any) -> None:
        """Wait until the shards, or enough of them, have done the last command. After Ctrl-C, it may be called again.

        Raises what `_take` raises. `how` is only for a `WorkerPool`.
        """
        control = self._memory.control
        control.note_wait(control.n_openings, ASKED)
        while not self._is_complete:
            if (came := self._take(during)) is not None:
                shard, reply = came
                for path, array in reply.arrays.items():
                    self._slot[path][shard.place(path)] = array
                shard.results = reply.results
                shard.batches += self._command.is_batch
        missing = [shard for shard in self.shards if not shard.taken]
        if missing and self._number > 0 and self._command.is_batch:
            for shard in missing:  # `valid` is False in their columns
                shard.missing += 1
                for path, target in self._slot.items():
                    target[shard.place(path)] = 0
            _log.info("%s: without %s", during, ", ".join(map(str, missing)))
        control.note_wait(control.n_openings, DONE, self.recorded)

    def next_piece(self, newest: Sequence[int], max_staleness: int | None) -> tuple[Shard, Reply, int, int]:
        """Wait for the next piece that is not too old. Returns it with its itr and its staleness. `newest`: the newest
        version of each policy."""
        self.send_parameters()
        while True:
            if (came := self._take("pieces")) is not None:
                shard, reply = came
                staleness = max(new - old for new, old in zip(newest, reply.versions, strict=True))
                if max_staleness is None or staleness <= max_staleness:
                    shard.batches += 1
                    return shard, reply, self._command.itr + shard.taken - 1, staleness
                shard.stale += 1

    @property
    def _slot(self) -> dict[str, Any]:
        """Where the batch that is being collected goes: arrays by path."""
        return self._leaves[self._command.batch % len(self._leaves)]

    def run(
        self, command: Command, during: str, take: Callable[[], Any], *, message: bytes | None = None, **how: Any
    ) -> Any:
        """`submit`, `wait`, `take`. Replies to a command whose wait Ctrl-C has ended are dropped when they come."""
        self.submit(command, message)
        self.wait(during, **how)
        return take()

    def take_messages(self, number: int | None = None) -> Trajectories:
        """The results of the last call on the environments, or the trajectories of the last batch or evaluation. Their
        records are ordered by time step, then env_rank."""
        joined = [item for shard in self.shards for item in shard.results]
        if joined and not isinstance(joined[0], ObjectMessage):
            joined.sort(key=itemgetter(0, 1))
        return joined

    def recorded(self) -> list[tracing.Recorded]:
        """What the driver and the shards have done lately, for a trace. Each node has its own clock. A shard that does
        not answer is left out."""
        about = tracing.describe("RaySampler", self._config.batch_T, ()) | {"batch_B": self._config.batch_B}
        found = [tracing.read(self._memory.control.memory.arrays, about, is_over=self._have_ended)]
        for shard in [] if self._have_ended else self._started:
            try:
                looks = [self._ask_clock(shard) for _ in range(_CLOCK_LOOKS)]
                parts = ray.get(shard.ask("recorded"), timeout=_CLOSE_SECONDS)
            except ray_errors.RayError as error:
                _log.warning("%s is not in the trace: %s", shard, error)
                continue
            within, shift = min(looks)
            for part in parts:
                facts = {"kind": f"{shard}: {part.about['kind']}", "clock_within_us": within / 1000}
                found.append(replace(part, shift=shift, about={**part.about, **facts}))
        return found

    def _ask_clock(self, shard: Shard) -> tuple[int, int]:
        """The largest error, and what to add to times of the shard, in nanoseconds. It assumes that the shard has read
        its clock halfway between the question and the answer."""
        began = time.monotonic_ns()
        theirs: int = ray.get(shard.ask("clock"), timeout=_CLOSE_SECONDS)
        half = (time.monotonic_ns() - began) // 2
        return half, began + half - theirs

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
            # The first call ends the order that runs. The second one comes after it, in the thread of the orders.
            pairs = [(shard.ask("close"), shard.actor.close.remote()) for shard in self.shards if shard.started]
            if refs := [ref for pair in pairs for ref in pair]:
                ray.wait(refs, num_returns=len(refs), timeout=seconds)
            for shard in self.shards:
                if shard.actor is not None:
                    ray.kill(shard.actor)
            if self._group is not None:
                remove_placement_group(self._group)
        except Exception:  # Ray itself has failed, and ends its actors
            _log.warning("Ray could not end the shards", exc_info=True)
