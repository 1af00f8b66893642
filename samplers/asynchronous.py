"""AsyncSampler: the workers continue to sample while the learner trains, as far ahead as there are free slots."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, cast

from penstock.arguments import integer
from penstock.buffers import Samples
from penstock.buffers.samples import parts_of
from penstock.collectors import TrajInfo
from penstock.envs import EnvFn
from penstock.errors import ConfigError, SamplerStateError
from penstock.samplers.allocation import Allocation
from penstock.samplers.central import pool_with_server
from penstock.samplers.config import SamplerOptions, SamplerState
from penstock.samplers.feeding import Feed, MakesFeed
from penstock.samplers.inference_server import ServerOptions
from penstock.samplers.parallel import PRELOAD_TO_ACT, ParallelSampler, pool_options
from penstock.samplers.readiness import readiness_maker
from penstock.samplers.refusals import ASYNC, BATCH_STATE, FIRST_READY, LAG, POLICIES, WRITTEN_REPLAY, refuse
from penstock.samplers.sampler_plan import EnvRange
from penstock.samplers.stats import Lags, SamplerStats, ServerStats
from penstock.workers.control import RING, Command
from penstock.workers.pool import WorkerPool
from penstock.workers.spinning import SPIN_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RUNNING, _PAUSED = SamplerState.RUNNING, SamplerState.PAUSED


@dataclass
class _OpenBatch:
    """A batch that the workers may collect or have collected, and that the user has not had yet."""

    number: int  #: the number of the batch
    opening: int  #: the opening of the gates for it
    infos: list[TrajInfo] | None = None  #: the trajectories that finished in it, once they have been taken


class AsyncSampler(ParallelSampler):
    """The workers sample all the time, also while you train.

    After `start`, the workers collect one batch after another. `obtain_samples` returns the oldest complete batch and
    gives the memory of the batch before it back to the workers. They wait when all slots are full. So no batch is
    thrown away, and the parameters that acted are less than `n_slots` versions old, if you publish once for each batch.
    `samples.agent.policy_version` tells for each column which parameters acted.

    It has the arguments of `Sampler`, and these:

    Args:
        n_slots: how many batches there is memory for, from 2 to 8; 3 by default. One is in your hands, the others are
            being collected, or are complete and wait. With two, all workers wait for the slowest one after each batch.
        lag: 1 makes the run reproducible. The workers may begin batch k + 1 when `obtain_samples` returns batch k, and
            act with the parameters that are the newest at that moment. So they are exactly one batch late, and the same
            seed gives the same batches, whatever the timing and the number of workers and slots. None: workers begin as
            soon as a slot is free, with the parameters that are the newest then. With a replay, 1 needs a `ratio`.
        server: None: each worker acts, with its own copy of the agent. "process": a separate process, the
            inference server, acts for all of them, as in `GpuSampler(server="process")`.
        min_ready, max_wait: as in `GpuSampler`, with `server="process"`. Without `lag`, the server then acts for
            environments in different batches together, so that no batch ends with a wait for the slowest. The later
            steps of a batch may have newer parameters than `samples.agent.policy_version`, with which it began. The
            agent's `sample_mode` is called when the slowest environment begins a batch.
        replay: a `penstock.learning.Replay` that the workers write into. `replay.sample` draws from it, and
            `take_traj_infos` returns the trajectories. There are no batches to obtain then.
        ratio: how many positions are drawn for each step: `replay.sample` waits for the workers, and they wait for it.
            None: the workers continue with each `replay.sample`, at most `n_slots` batches.
    """

    _idle_states = (SamplerState.READY, _RUNNING, _PAUSED)
    _defaults: ClassVar = {"n_slots": 3}
    _no_restore = ASYNC

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        lag: Literal[1] | None = None,
        server: Literal["process"] | None = None,
        min_ready: int | float | None = None,
        max_wait: float | None = None,
        replay: MakesFeed | None = None,
        ratio: object = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        options.setdefault("n_slots", self._defaults["n_slots"])
        super().__init__(env_fn, **options)
        if not 2 <= self.config.n_slots <= RING:
            raise ConfigError(f"n_slots of AsyncSampler must be from 2 to {RING}, got {self.config.n_slots}")
        if lag not in (None, 1) or isinstance(lag, bool):
            raise ConfigError(f"lag must be 1 (reproducible) or None, got {lag!r}")
        if server not in (None, "process"):
            raise ConfigError(f'server must be "process" or None, got {server!r}')
        self._make_readiness = readiness_maker(min_ready, max_wait, self.batch_B)
        if server is None and not (min_ready is None and max_wait is None):
            raise ConfigError('min_ready and max_wait are for a process that acts for all: give server="process" too')
        if replay is None and ratio is not None:
            raise ConfigError("ratio needs a replay: give replay too, or leave ratio out")
        if replay is not None and not hasattr(replay, "make_feed"):
            raise ConfigError(f"replay must be a penstock.learning.Replay, got {replay!r}")
        is_pinned = lag is not None
        self._feed: Feed | None = None if replay is None else replay.make_feed(self, ratio, is_pinned=is_pinned)
        self._lag, self._central = lag, server == "process"
        self._guard.expected = {
            SamplerState.READY: "start, which begins to sample, evaluate_agent, or a call on the environments"
        }
        # Batches are numbered from 0. Those below `_released` have been given back, those below `_taken` have been
        # handed out, and those below `_opened` may be collected. See docs/asynchronous.md.
        self._released = self._taken = self._opened = 0
        self._first_itr = 0  # batch k gets the `itr` `_first_itr + k`, until a call gives another one
        self._open: deque[_OpenBatch] = deque()
        self._is_holding = False
        self._pinned = 0, 0  # the last opening, and the version of the parameters that it names (0: none)
        self._lags = Lags()
        self._n_skipped = 0

    def _make_pool(self, allocation: Allocation, resources: ExitStack) -> WorkerPool:
        this = weakref.ref(self)  # the parameters must not keep the sampler alive
        n_policies = len(allocation.memory.parameters)
        refuse({POLICIES: n_policies > 1, LAG: self._lag is not None, WRITTEN_REPLAY: self._feed is not None})
        allocation.memory.parameters[0].before_overwrite = lambda version: _await_readers(this(), version)
        if self._feed is not None:
            batch = allocation.batches[0]
            if not isinstance(batch, Samples):  # a dict with one agent
                raise ConfigError("workers write the batches of one agent into a replay: give the agent without a dict")
            appender = self._feed.connect(batch, [plan.cells[0] for plan in self._plans], self.config.n_slots)
            memory = replace(allocation.memory, appender=appender)
            allocation = replace(allocation, memory=memory)
            resources.callback(appender.ring.memory.close)
            self._memory = memory
        options = pool_options(
            self.config, allocation, preload=() if self._central else PRELOAD_TO_ACT, has_lookout=True
        )
        if not self._central:
            programs = [allocation.program] * len(self._plans)
            return WorkerPool(self._plans, programs, allocation.worker_data, allocation.memory, options, resources)
        readiness = self._make_readiness(self._plans)
        mixes_batches = self._lag is None and not readiness.needs_all_idle
        refuse({FIRST_READY: mixes_batches, BATCH_STATE: getattr(self._agent, "record_state", None) == "batch"})
        server = ServerOptions.of(self._agent, self._plans, allocation.program, readiness, SPIN_SECONDS)
        return pool_with_server(self._agent, self._plans, allocation, options, resources, server)

    def _store_allocation(self, allocation: Allocation, env_range: EnvRange) -> None:
        super()._store_allocation(allocation, env_range)
        # The version in each column of each slot, by the recorded policies, as memoryviews: an item is read in a tenth
        # of numpy's time.
        batches = allocation.batches
        names = self._agents if isinstance(batches[0], Samples) else batches[0].keys()
        self._versions = [
            {
                name: memoryview(cast(Any, own.agent.policy_version)[0])
                for name, own in zip(names, parts_of(batch), strict=True)
            }
            for batch in batches
        ]

    # ---- running ---------------------------------------------------------------------------

    def start(self, itr: int = 0) -> None:
        """Make the workers sample, from now until `pause` or `shutdown`. `itr` is the `itr` of the first batch."""
        with self._guard.call("start", SamplerState.READY):
            self._first_itr = integer("itr", itr)
            self._give_credit()
            self._guard.state = _RUNNING

    def obtain_samples(self, itr: int, *, newest: bool = False) -> tuple[Samples, list[TrajInfo]]:
        """Wait for the oldest batch that you have not had, and return it. The batch before is given back, and the
        workers may overwrite it.

        With `newest`, return the newest complete batch instead. The older ones are given back and counted in `stats()`.
        Their trajectories are in the list too.

        Returns torch tensors `[batch_T, batch_B, ...]` and the trajectories that finished in this batch, ordered by
        time step, then env_rank. Raises a `SamplerBrokenError` if a worker fails, also if a complete batch waits.
        """
        self._refuse_with_replay("obtain_samples")
        with self._guard.call("obtain_samples", _RUNNING, _PAUSED):
            itr = integer("itr", itr)
            pool = self._require_batch("obtain_samples")
            pool.wait_for(self._open[0].opening, f"itr={itr}")
            return self._take(pool, itr, newest=newest)

    def poll_samples(self) -> tuple[Samples, list[TrajInfo]] | None:
        """The same as `obtain_samples`, but None if no batch is complete. It does not wait. The batch gets the `itr`
        after that of the batch before."""
        self._refuse_with_replay("poll_samples")
        with self._guard.call("poll_samples", _RUNNING, _PAUSED):
            pool, itr = self._require_batch("poll_samples"), self._first_itr + self._taken
            pool.wait_for(0, f"itr={itr}")
            if not pool.has_completed(self._open[0].opening):
                return None
            return self._take(pool, itr, newest=False)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A context in which no batch is given back, so that you can use several together: at most `n_slots`.

        At its end, all except the last one are given back.
        """
        self._refuse_with_replay("hold")
        with self._guard.call("hold", _RUNNING, _PAUSED):
            if self._is_holding:
                raise SamplerStateError("hold was called inside hold: use one context for all batches")
            self._is_holding = True
        self._batches.set_valid_until(None)
        try:
            yield
        finally:
            self._is_holding = False
            if self.state in (_RUNNING, _PAUSED):
                with self._guard.call("hold", _RUNNING, _PAUSED):
                    self._release()
                    self._batches.set_valid_until(self._taken)

    def pause(self) -> None:
        """Let the workers finish the batches that they may collect, and wait for that. Then they stand still.

        `obtain_samples` and `poll_samples` still return the batches that are complete. `resume` continues.
        """
        with self._guard.call("pause", _RUNNING):
            self._finish_batches(self._require_pool("pause"), "pause")
            self._guard.state = _PAUSED

    def resume(self) -> None:
        """Continue to sample after `pause`."""
        with self._guard.call("resume", _PAUSED):
            self._give_credit()
            self._guard.state = _RUNNING

    def start_samples(self, itr: int) -> NoReturn:
        """Raises `SamplerStateError`: this sampler samples all the time."""
        self._refuse("start_samples")

    def wait_samples(self) -> NoReturn:
        """Raises `SamplerStateError`: this sampler samples all the time."""
        self._refuse("wait_samples")

    def _refuse(self, call: str) -> NoReturn:
        raise SamplerStateError(
            f"{call} was called on an AsyncSampler, which samples all the time: call start() once, then "
            "obtain_samples(itr) or poll_samples() for each batch"
        )

    def _refuse_with_replay(self, call: str) -> None:
        if self._feed is not None:
            raise SamplerStateError(
                f"{call} was called on a sampler whose workers write into a replay: call replay.sample(n), and "
                "take_traj_infos() for the trajectories"
            )

    def stats(self) -> SamplerStats:
        """Where the workers' time went since `initialize`, and how old the parameters were that acted."""
        n_dropped = 0 if self._feed is None else self._feed.n_dropped
        own = {"lag": self._lags.stats, "skipped_batches": self._n_skipped, "dropped_trajectories": n_dropped}
        return replace(super().stats(), **own)  # type: ignore[arg-type]

    @property
    def server_stats(self) -> ServerStats:
        """As in `GpuSampler`. Raises `ConfigError` without `server="process"`."""
        return self._server_stats()

    # ---- with a replay -----------------------------------------------------------------------

    def take_traj_infos(self) -> list[TrajInfo]:
        """With a replay: the trajectories that have finished since the last call, batch by batch, ordered by time step,
        then env_rank. The newest 65,536 are kept; `stats().dropped_trajectories` counts the others. It does not wait.
        Raises a `SamplerBrokenError` if a worker has failed.
        """
        if self._feed is None:
            raise SamplerStateError("take_traj_infos needs a replay: obtain_samples returns the trajectories")
        with self._guard.call("take_traj_infos", _RUNNING, _PAUSED):
            pool = self._require_pool("take_traj_infos")
            assert isinstance(pool, WorkerPool)
            pool.wait_for(0, "take_traj_infos")
            self._pass_on(pool)
            infos = list(self._feed.traj_infos)
            self._feed.traj_infos.clear()
            return infos

    @property
    def is_feeding(self) -> bool:
        """Whether the workers write into the replay, or may do so soon."""
        return self.state in (SamplerState.READY, _RUNNING, _PAUSED)

    @contextmanager
    def stand_still(self) -> Iterator[None]:
        """Inside, no worker writes into the replay."""
        if self.state is not _RUNNING:
            yield
            return
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def await_replay(self, n: int) -> None:
        """`n` positions of the replay will be drawn: wait until the ratio allows it."""
        assert self._feed is not None
        with self._guard.call("replay.sample", _RUNNING, _PAUSED):
            pool, done = self._require_pool("replay.sample"), 0
            assert isinstance(pool, WorkerPool)
            self._feed.expect(n)
            while True:
                pool.wait_for(done, "replay.sample")
                self._pass_on(pool, done)
                # After the line before: a batch that has been completed meanwhile may be the one that was missing.
                if self._feed.may_draw():
                    return
                if not self._open:  # the ratio never stops both sides
                    raise SamplerStateError(
                        "replay.sample would wait for ever: the sampler is paused, and ratio allows no draw before "
                        "there are more steps. Call resume() first"
                    )
                done = self._open[0].opening

    def _pass_on(self, pool: WorkerPool, awaited: int = 0) -> None:
        """Take the complete batches, which are in the replay, and let the workers continue. With `lag=1`, only up to
        the opening `awaited`: which others are complete depends on the timing."""
        assert self._feed is not None
        if self._open and pool.has_completed(self._open[0].opening):  # once, for all that were completed meanwhile
            self._check_published()
        while self._open and pool.has_completed((batch := self._open[0]).opening):
            if self._lag is not None and batch.opening > awaited:
                break
            infos = self._infos(pool, batch)
            self._feed.take(batch.number, infos)
            self._metrics.training.extend(infos)
            self._note_versions(batch.number)
            self._released = self._taken = self._open.popleft().number + 1
        if self.state is _RUNNING:
            self._give_credit()

    # ---- the four counts -------------------------------------------------------------------

    def _give_credit(self) -> None:
        """Open the gates once for each further batch that the workers may collect now."""
        limit = self._released + self.config.n_slots
        if self._lag is not None:
            limit = min(limit, self._taken + 1)
        version = self._memory.parameters[0].version if self._lag is not None else 0
        while self._opened < limit and (self._feed is None or self._feed.begin(self._opened)):
            batch = self._opened
            command = Command(self._first_itr + batch, version=version, batch=batch)
            opening = self._require_pool("start").submit(command)
            self._open.append(_OpenBatch(batch, opening))
            self._opened, self._pinned = batch + 1, (opening, version)

    def _require_batch(self, call: str) -> WorkerPool:
        """The pool. Raises `SamplerStateError` if no batch is being collected that could be waited for."""
        if not self._open and self.state is _PAUSED:
            raise SamplerStateError(
                f"{call} was called while the sampler is paused, and you have had all its batches: call resume() first"
            )
        if not self._open:
            raise SamplerStateError(
                f"{call} was called while hold keeps {self._taken - self._released} batches, and no slot is left of "
                f"n_slots={self.config.n_slots}: leave the hold context first"
            )
        pool = self._require_pool(call)
        assert isinstance(pool, WorkerPool)
        return pool

    def _take(self, pool: WorkerPool, itr: int, *, newest: bool) -> tuple[Samples, list[TrajInfo]]:
        """Hand out the oldest batch, which is complete, or the newest complete one."""
        infos = [*self._infos(pool, self._open[0])]
        batch = self._open.popleft().number
        while newest and self._open and pool.has_completed(self._open[0].opening):
            infos += self._infos(pool, self._open[0])
            batch = self._open.popleft().number
            self._n_skipped += 1
        self._taken, self._first_itr = batch + 1, itr - batch
        samples = self._batches.hand_out(batch, None if self._is_holding else batch + 1)
        self.samples_np = self._batches.views[batch % self._batches.n_slots]
        if not batch:
            self._note_first_batch()
        self._note_versions(batch)
        self._metrics.training.extend(infos)
        self._check_published()
        if self._seating is not None:
            self._count_agents(samples)
        if not self._is_holding:
            self._release()
        elif self.state is _RUNNING:
            self._give_credit()
        return samples, infos

    def _note_versions(self, batch: int) -> None:
        slot, last = self._versions[batch % len(self._versions)], self._newest_versions()
        for p, (name, newest) in enumerate(list(last.items())):
            for plan in self._plans:
                if name in slot and (cells := plan.cells[p]):  # all columns of a worker have the same version
                    last[name] = version = slot[name][cells.start]
                    self._lags.add(newest - version, len(cells))
        self.policy_version = self._by_policy(last)

    def _release(self) -> None:
        """Give all batches back except the last one that was handed out, and let the workers continue."""
        last = self._taken - 1
        self._released = max(self._released, last)
        if self.state is _RUNNING:
            self._give_credit()
        while len(self._batches.held) > 1:
            self._batches.give_back(last)

    def _infos(self, pool: WorkerPool, batch: _OpenBatch) -> list[TrajInfo]:
        """The trajectories that finished in this batch, which is complete."""
        if batch.infos is None:
            # First, so that a second call takes nothing if this one raises: the messages are gone then.
            batch.infos = []
            batch.infos = self._take_traj_infos(pool, batch.number % self._batches.n_slots, batch.opening)
        return batch.infos

    def _finish_batches(self, pool: Any, during: str) -> None:
        pool.wait_for(self._open[-1].opening if self._open else 0, during)
        for batch in self._open:  # the next command may overwrite their trajectories
            self._infos(pool, batch)

    # ---- parameters ------------------------------------------------------------------------

    def _must_await(self, version: int) -> bool:
        """Whether the next batch needs this version, and a worker or the server has not loaded it yet."""
        opening, pinned = self._pinned
        control, n = self._memory.control, len(self._plans)
        readers = [n] if self._central else range(n)  # the server has the rank after the workers
        return version == pinned != 0 and any(
            control.arrived(rank) < opening and control.version(rank) != version for rank in readers
        )

    def _await_readers(self, version: int) -> None:
        if self.state is _RUNNING and self._must_await(version):
            with self._guard.call("sync_shared_memory", _RUNNING):
                pool, how = self._require_pool("sync_shared_memory"), "sync_shared_memory"
                assert isinstance(pool, WorkerPool)
                pool.wait(how, until=lambda: not self._must_await(version))


def _await_readers(sampler: AsyncSampler | None, version: int) -> None:
    """`sync_shared_memory` is about to overwrite this version: wait until no worker needs it."""
    if sampler is not None:
        sampler._await_readers(version)
