"""The pool of shards: it gives them orders, receives their replies, and builds lost shards again."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray import exceptions as ray_errors

from penstock.buffers.object_pipe import ObjectMessage
from penstock.cluster.handles import (
    LOSSES,
    Current,
    Pending,
    PublishedParameters,
    Shard,
    ShardOptions,
    answers_of,
    call,
    merged,
    place_of,
)
from penstock.cluster.placement import Placement
from penstock.cluster.shard import Failure, Order, Reply, ShardPlan, Started
from penstock.errors import ConfigError, NodeLostError, PenstockError, SamplerBrokenError, SamplerClosedError
from penstock.samplers.results import Trajectories
from penstock.samplers.sampler_memory import SamplerMemory
from penstock.workers import sigint
from penstock.workers.control import Command
from penstock.workers.failures import Restarts

_log = logging.getLogger("penstock")

_SLICE_SECONDS = 0.05  # how soon a wait notices that another thread closes the pool
_EVAL_POLL_SECONDS = 0.05  # how soon an evaluation is ended once enough trajectories have finished
_RETRY_SECONDS = 0.2  # between two tries to reach a shard that does not answer
_GRACE_SECONDS = 5.0  # how long the first start waits for the other shards once `min_shards` are ready
_PLACE_SECONDS = 30.0  # how much longer than `start_timeout` a shard may take: Ray starts a process first
_CLOSE_SECONDS = 3.0
_CLOSE_BROKEN_SECONDS = 0.5


class ShardPool:
    """The calls of `WorkerPool`, with shards in place of workers."""

    pids: tuple[int, ...] = ()

    def __init__(
        self,
        plans: Sequence[ShardPlan],
        placement: Placement,
        memory: SamplerMemory,
        options: ShardOptions,
        resources: ExitStack,
    ) -> None:
        """Make the actors. This does not wait for them: call `wait("start-up")` next. `close` closes `resources`."""
        self._memory, self._options, self._placement = memory, options, placement
        self._leaves = [dict(slot.leaves()) for slot in memory.slots]
        self.shards = [Shard(plan) for plan in plans]
        self.restarts = Restarts(options.max_restarts, options.restart_window)
        self.has_lost_command = self.is_closed = False
        self.parameters = PublishedParameters(memory.parameters[0])
        self._pending: dict[Any, Pending] = {}  # by reference, oldest first
        self._retries: list[Pending] = []
        self._current: Current | None = None  # None during start-up
        self._owner_pid, self._close_lock = os.getpid(), threading.Lock()
        self._closing_thread: int | None = None
        self._have_ended = False  # whether the shards have ended
        self._resources = resources.pop_all()
        atexit.register(self.close)  # Python calls it before Ray's own function, which was registered before
        try:
            for shard in self.shards:
                self._build(shard)
        except BaseException:
            self.close(broken=True)
            raise

    # ---- shards ----------------------------------------------------------------------------

    def _build(self, shard: Shard) -> None:
        shard.actor = self._placement.make(shard.plan.worker_rank, shard.generation)
        shard.started, shard.since = None, time.monotonic()
        shard.earlier, shard.figures = shard.totals(), ()
        shard.version, shard.n_orders, shard.waiting, shard.last_batch = 1, 0, set(), -1
        self._pending[call(shard, "start", "control")] = Pending(shard)

    def give(self, shard: Shard, command: Command, batch: int, message: bytes | None = None) -> None:
        """Give the shard its next order. `batch` is the number of the driver's command."""
        order = Order(shard.n_orders, command, message, min(shard.waiting, default=shard.n_orders))
        shard.waiting.add(shard.n_orders)
        shard.n_orders, shard.last_batch = shard.n_orders + 1, batch
        self._send(Pending(shard, order, batch))

    def _send(self, pending: Pending) -> None:
        """Send the order, perhaps not for the first time: the shard runs it once."""
        shard = pending.shard
        ref = call(shard, "run", "orders", pending.order, self.parameters.new_for(shard))
        self._pending[ref] = pending

    def send_parameters(self) -> None:
        """Give the newest parameters to all shards that are at work. They act with them from their next order on."""
        for shard in self.shards:
            if shard.started is not None and (ref := self.parameters.new_for(shard)) is not None:
                call(shard, "take_parameters", "control", ref)

    def _lose(self, shard: Shard, why: Exception, during: str) -> None:
        """The shard is lost. Build it again, or raise `NodeLostError`."""
        reason = next((line for line in reversed(str(why).strip().splitlines()) if line.strip()), type(why).__name__)
        text = f"{shard} was lost: {type(why).__name__}: {reason.strip()}"
        ray.kill(shard.actor)  # it may still run, although the driver cannot reach it
        if not self._options.is_restarted:
            raise NodeLostError(f"{text} ({during})") from why
        if (refusal := self.restarts.used_up(1, shard.plan.worker_rank)) is not None:
            raise NodeLostError(f"{text} ({during})\n{refusal}") from why
        n_lost = len(shard.plan.cells[0])  # the trajectories that were running
        self.restarts.note(shard.plan.worker_rank, f"{text} ({during})", n_lost)
        _log.warning("%s (%s); it is built again, %d trajectories are lost", text, during, n_lost)
        self._pending = {ref: pending for ref, pending in self._pending.items() if pending.shard is not shard}
        self._retries = [pending for pending in self._retries if pending.shard is not shard]
        shard.generation += 1
        current, least = self._current, self._options.min_shards
        if current is not None and least is not None and shard not in current.answered:
            others = [member for member in current.members if member is not shard]
            current.members = others if len(others) >= least else current.members
        self._build(shard)

    # ---- answers ---------------------------------------------------------------------------

    def answers(self, during: str) -> Iterator[tuple[Pending, Started | Reply]]:
        """The answers that have come, after a wait of `_SLICE_SECONDS` at most."""
        if self._memory.control.quit:
            raise SamplerClosedError(f"shut down by another thread during {during}")
        now = time.monotonic()
        due = [pending for pending in self._retries if pending.retry_at <= now]
        self._retries = [pending for pending in self._retries if pending.retry_at > now]
        for pending in due:
            self._send(pending)
        refs = list(self._pending)
        with sigint.allowed():
            if not refs:
                time.sleep(_SLICE_SECONDS)
            ready = ray.wait(refs, num_returns=1, timeout=_SLICE_SECONDS)[0] if refs else []
            if len(refs) > 1 and ready:
                ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
        for ref in ready:
            if ref not in self._pending:  # its shard was lost meanwhile
                continue
            pending = self._pending.pop(ref)
            if (answer := self._answer(ref, pending, during)) is not None:
                yield pending, answer
        self._check_starts(during)

    def _answer(self, ref: object, pending: Pending, during: str) -> Started | Reply | None:
        """The answer to one call; None if the shard was lost or cannot be reached now."""
        shard = pending.shard
        try:
            answer = ray.get(ref)
        except ray_errors.ActorUnavailableError as error:
            self._try_again(pending, error, during)
            return None
        except LOSSES as error:
            self._lose(shard, error, during)
            return None
        except ray_errors.RayError as error:
            raise SamplerBrokenError(f"{shard} cannot answer ({during}): {error}") from error
        if isinstance(answer, Failure):
            if answer.kind == "SamplerClosedError":  # only if Ray ends its process
                self._lose(shard, NodeLostError(answer.text), during)
                return None
            raise answer.as_error(str(shard), is_start=pending.order is None)
        if isinstance(answer, Started):
            shard.started = answer
        else:
            shard.waiting.discard(answer.number)
        return answer  # type: ignore[no-any-return]

    def _try_again(self, pending: Pending, error: Exception, during: str) -> None:
        """The shard cannot be reached. Give its order again soon, or give the shard up after `unavailable_timeout`."""
        now, since = time.monotonic(), pending.unavailable_since
        pending.unavailable_since = now if since is None else since
        if pending.order is None or now - pending.unavailable_since > self._options.unavailable_timeout:
            self._lose(pending.shard, error, during)
            return
        pending.retry_at = now + _RETRY_SECONDS
        pending.shard.version = 0  # it may not have the parameters that came with the order
        self._retries.append(pending)

    def _check_starts(self, during: str) -> None:
        """Raise an error if a shard that is needed has not started in time."""
        limit, current = self._options.start_timeout + _PLACE_SECONDS, self._current
        needed = self.shards
        if current is not None and len(current.members) >= (self._options.min_shards or 0):
            needed = current.members
        late = [shard for shard in needed if shard.started is None and time.monotonic() - shard.since > limit]
        if late and not (current is None and self._has_enough_shards()):
            error = ConfigError if current is None else NodeLostError
            raise error(
                f"{len(late)} of {len(self.shards)} shards were not ready after {limit:g} s ({during}): {late[0]} "
                f"and the others need {self._placement.resources} each, and the cluster has {ray.cluster_resources()}: "
                "add nodes, or use fewer shards or workers"
            )

    def _has_enough_shards(self) -> bool:
        n_ready = sum(shard.started is not None for shard in self.shards)
        least = self._options.min_shards
        return n_ready == len(self.shards) or (least is not None and n_ready >= least)

    # ---- commands --------------------------------------------------------------------------

    def submit(self, command: Command, message: bytes | None = None) -> int:
        """Give `command` to the shards. A shard that still works on an earlier batch gets it after that."""
        number = 1 if self._current is None else self._current.number + 1
        ready = [shard for shard in self.shards if shard.started is not None]
        members = self.shards if self._options.min_shards is None else ready  # the others take part later
        self._current = Current(number, command, message, list(members))
        try:
            for shard in ready:
                if not (shard.waiting and self._is_batch):
                    self.give(shard, command, number, message)
        except BaseException:
            self.has_lost_command = True  # some shards have it, and others do not
            self.close(broken=True)
            raise
        return number

    @property
    def _is_batch(self) -> bool:
        assert self._current is not None
        return not (self._current.command.do_eval or self._current.command.has_message)

    @property
    def _is_complete(self) -> bool:
        current = self._current
        if current is None:
            n_ready = sum(shard.started is not None for shard in self.shards)
            is_late = time.monotonic() - self.shards[0].since > _GRACE_SECONDS
            return n_ready == len(self.shards) or (is_late and self._has_enough_shards())
        n, wanted = len(current.members), self._options.min_ready
        if n < (self._options.min_shards or 0):
            return False
        if self._is_batch:
            n = min(n, wanted) if isinstance(wanted, int) else math.ceil(wanted * n - 1e-9)
        return len(current.answered) >= n

    def wait(self, during: str, **how: Any) -> None:
        """Wait until the shards, or enough of them, have done the last command. After Ctrl-C, it may be called again.

        Raises `NodeLostError` if a shard is lost and not built again, or the error of a shard's sampler. Then the pool
        is closed. Raises `SamplerClosedError` if another thread closes the pool. `how` is only for a `WorkerPool`.
        """
        next_poll = time.monotonic() + _EVAL_POLL_SECONDS
        try:
            while not self._is_complete:
                for pending, answer in self.answers(during):
                    self._take(pending, answer)
                if self._is_limited_evaluation and time.monotonic() > next_poll:
                    self._stop_if_enough()
                    next_poll = time.monotonic() + _EVAL_POLL_SECONDS
            self._mark_missing(during)
        except BaseException as error:
            self.close_if_broken(error)
            raise

    def close_if_broken(self, error: BaseException) -> None:
        """Close the pool after an error of penstock, unless another thread has closed it."""
        if isinstance(error, PenstockError) and not isinstance(error, SamplerClosedError):
            self.close(broken=True)

    def _take(self, pending: Pending, answer: Started | Reply) -> None:
        current, shard = self._current, pending.shard
        if isinstance(answer, Reply) and current is not None and pending.batch == current.number:
            self._store(shard, answer)
            current.answered[shard] = Reply(answer.number, {}, answer.found, answer.version)
            shard.batches += self._is_batch
            return
        if isinstance(answer, Reply):
            shard.late += 1  # the user has had this batch without it
        # The shard has nothing to do now. If the running command needs it, it gets this command.
        least = self._options.min_shards or 0
        if current is not None and shard not in current.members and len(current.members) < least:
            current.members.append(shard)
        is_wanted = current is not None and shard in current.members and shard not in current.answered
        if current is not None and is_wanted and shard.last_batch != current.number:
            self.give(shard, current.command, current.number, current.message)

    @property
    def _slot(self) -> dict[str, Any]:
        """Where the batch that is being collected goes: arrays by path."""
        assert self._current is not None
        return self._leaves[self._current.command.batch % len(self._leaves)]

    def _store(self, shard: Shard, reply: Reply) -> None:
        columns, slot = shard.columns, self._slot
        for path, array in reply.arrays.items():
            slot[path][place_of(path, columns)] = array

    def _mark_missing(self, during: str) -> None:
        """Fill the columns of shards that have not answered with zeros: `valid` is False there."""
        if self._current is None or not self._is_batch or len(self._current.answered) == len(self.shards):
            return
        missing = [shard for shard in self.shards if shard not in self._current.answered]
        for shard in missing:
            shard.missing += 1
            for path, target in self._slot.items():
                target[place_of(path, shard.columns)] = 0
        _log.info("%s: without %s", during, ", ".join(map(str, missing)))

    @property
    def _is_limited_evaluation(self) -> bool:
        current = self._current
        return current is not None and current.command.do_eval and self._options.eval_max_trajectories is not None

    def _stop_if_enough(self) -> None:
        assert self._current is not None
        waiting = [shard for shard in self._current.members if shard not in self._current.answered and shard.started]
        n = sum(len(reply.found) for reply in self._current.answered.values())
        n += sum(filter(None, answers_of(waiting, "n_finished", _EVAL_POLL_SECONDS)))
        if n >= (self._options.eval_max_trajectories or 0):
            for shard in waiting:
                call(shard, "stop_evaluation", "control")

    def run(
        self, command: Command, during: str, discard: Callable[[], Any], *, message: bytes | None = None, **how: Any
    ) -> None:
        """`submit` and `wait`. Replies to a command whose wait Ctrl-C has ended are dropped when they come."""
        self.submit(command, message)
        self.wait(during, **how)

    def take_trajectories(self) -> Trajectories:
        """The trajectories of the last command, of all shards; records are ordered by time step, then env_rank."""
        assert self._current is not None
        found = [reply.found for reply in self._current.answered.values()]
        return merged(found)

    def take_messages(self, number: int | None = None) -> list[ObjectMessage]:
        """The results of the last call on the environments."""
        return self.take_trajectories()

    def statuses(self) -> list[Any]:
        """Nothing: `RaySampler` shows the shards."""
        return []

    # ---- streams ---------------------------------------------------------------------------

    def begin_stream(self) -> int:
        """From now on, a `Stream` gives the orders. Returns the number for `give`."""
        number = 1 if self._current is None else self._current.number + 1
        self._current = Current(number, members=list(self.shards))
        return number

    # ---- closing ---------------------------------------------------------------------------

    def close(self, *, broken: bool = False, await_call: Callable[[], bool] = lambda: True) -> None:
        """End the shards, then close the resources. It raises no error, and it may be called twice.

        Another thread may use the resources in a call. So this waits with `await_call` before it closes them; if that
        returns False, it leaves them open. A call that fails closes with `broken`.
        """
        self._memory.control.quit = True
        if os.getpid() != self._owner_pid or self._closing_thread == threading.get_ident():
            return
        if broken and self._closing_thread is not None:
            return
        with self._close_lock, sigint.deferred():
            if self.is_closed:
                return
            self._closing_thread = threading.get_ident()
            try:
                if not self._have_ended:
                    self._end_shards(_CLOSE_BROKEN_SECONDS if broken else _CLOSE_SECONDS)
                self._have_ended = True
                if await_call():
                    self._pending.clear()
                    self._resources.close()
                    self.is_closed = True
                    atexit.unregister(self.close)
            finally:
                self._closing_thread = None

    def _end_shards(self, seconds: float) -> None:
        if not ray.is_initialized():  # Ray has ended before, and its actors with it
            return
        try:
            refs = [call(shard, "close", "control") for shard in self.shards if shard.started]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=seconds)
            self._placement.close([shard.actor for shard in self.shards if shard.actor is not None])
        except Exception:  # Ray itself has failed, and ends its actors
            _log.warning("Ray could not end the shards", exc_info=True)
