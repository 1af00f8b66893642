"""AsyncSampler: the workers continue to sample while the learner trains, as far ahead as there are free slots."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, cast

from penstock.arguments import integer, must_be
from penstock.buffers import Samples
from penstock.buffers.samples import parts_of
from penstock.collectors import TrajInfo
from penstock.envs import EnvFn
from penstock.errors import ConfigError, SamplerStateError
from penstock.samplers.allocation import Allocation
from penstock.samplers.config import SamplerOptions, SamplerState
from penstock.samplers.readiness import readiness_maker
from penstock.samplers.refusals import ASYNC, LAG, POLICIES, WRITTEN_REPLAY, refuse
from penstock.samplers.run import Run
from penstock.samplers.sampler import Sampler
from penstock.samplers.sampler_memory import Feed, MakesFeed
from penstock.samplers.schedule import Schedule
from penstock.samplers.stats import Lags, SamplerStats, ServerStats
from penstock.samplers.who_acts import Acting, WorkersAct
from penstock.workers.call_guard import GuardedCall
from penstock.workers.control import RING, Command
from penstock.workers.pool import WorkerPool

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RUNNING, _PAUSED = SamplerState.RUNNING, SamplerState.PAUSED


@dataclass
class _OpenBatch:
    """A batch that the workers may collect or have collected, and that the user has not had yet."""

    number: int  #: the number of the batch
    opening: int  #: the opening of the gates for it
    infos: list[TrajInfo] | None = None  #: the trajectories that finished in it, once they have been taken


class Ahead(Schedule):
    """The workers collect batch after batch, as long as there is a free slot.

    `begin` lets them start, `finish` waits for the oldest batch, and gives the batch before it back to the workers.

    Batches are numbered from 0. Those below `released` have been given back, those below `taken` have been handed out,
    and those below `opened` may be collected. See docs/asynchronous.md.

    Args:
        lag: 1: the workers may begin batch k + 1 when batch k is handed out, with the parameters of that moment. None:
            as soon as a slot is free.
        feed: the link with the replay that the workers write into; None: batches are handed out.
    """

    is_ahead = True
    refused_as = ASYNC

    def __init__(self, lag: Literal[1] | None = None, feed: Feed | None = None) -> None:
        self._lag, self.feed = lag, feed
        self.released = self.taken = self.opened = 0
        self.first_itr = 0  # batch k gets the `itr` `first_itr + k`, until a call gives another one
        self.open: deque[_OpenBatch] = deque()
        self.is_holding = False
        self.lags, self.n_skipped = Lags(), 0

    def connect(self, run: Run, allocation: Allocation, resources: ExitStack) -> Allocation:
        several = len(run.agents) > 1
        refuse({POLICIES: several, LAG: self._lag is not None, WRITTEN_REPLAY: self.feed is not None})
        this = weakref.ref(run)  # the parameters must not keep the run alive
        run.memory.parameters[0].before_overwrite = lambda version: _await_readers(this(), version)
        # The version in each column of each slot, by the recorded policies, as memoryviews: an item is read in a tenth
        # of numpy's time.
        views = run.batches.views
        names = run.agents if isinstance(views[0], Samples) else views[0].keys()
        self._versions = [
            {
                name: memoryview(cast(Any, part.agent.policy_version)[0])
                for name, part in zip(names, parts_of(batch), strict=True)
            }
            for batch in views
        ]
        if self.feed is None:
            return allocation
        if not isinstance(views[0], Samples):  # a dict with one agent
            raise ConfigError("workers write the batches of one agent into a replay: give the agent without a dict")
        appender = self.feed.connect(views[0], [plan.cells[0] for plan in run.plans], run.config.n_slots)
        resources.callback(appender.ring.memory.close)
        run.memory = replace(run.memory, appender=appender)
        return replace(allocation, layout=replace(allocation.layout, memory=run.memory))

    # ---- the four counts -------------------------------------------------------------------

    def begin(self, run: Run, itr: int) -> None:
        self.first_itr = integer("itr", itr) - self.taken
        self.give_credit(run)

    def give_credit(self, run: Run) -> None:
        """Open the gates once for each further batch that the workers may collect now."""
        limit = self.released + run.config.n_slots
        if self._lag is not None:
            limit = min(limit, self.taken + 1)
        version = run.memory.parameters[0].version if self._lag is not None else 0
        while self.opened < limit and (self.feed is None or self.feed.begin(self.opened)):
            batch = self.opened
            opening = run.pool.submit(Command(self.first_itr + batch, version=version, batch=batch))
            self.open.append(_OpenBatch(batch, opening))
            self.opened = batch + 1

    def require_batch(self, run: Run, call: str) -> None:
        """Raise `SamplerStateError` if `call` waits for a batch, and none is being collected."""
        if not self.open and run.guard.state is _PAUSED:
            raise SamplerStateError(
                f"{call} was called while the sampler is paused, and you have had all its batches: call resume() first"
            )
        if not self.open:
            raise SamplerStateError(
                f"{call} was called while hold keeps {self.taken - self.released} batches, and no slot is left of "
                f"n_slots={run.config.n_slots}: leave the hold context first"
            )

    def finish(self, run: Run) -> tuple[Samples, list[TrajInfo]]:
        return self.wait_and_take(run, self.first_itr + self.taken)

    def wait_and_take(self, run: Run, itr: int, *, newest: bool = False) -> tuple[Samples, list[TrajInfo]]:
        """Wait for the oldest batch, and hand it out, or the newest complete one."""
        self.require_batch(run, "obtain_samples")
        _pool(run).wait_for(self.open[0].opening, f"itr={itr}")
        return self.take(run, itr, newest=newest)

    def take(self, run: Run, itr: int, *, newest: bool = False) -> tuple[Samples, list[TrajInfo]]:
        """Hand out the oldest batch, which is complete, or the newest complete one."""
        infos = [*self._infos(run, self.open[0])]
        batch = self.open.popleft().number
        while newest and self.open and _pool(run).has_completed(self.open[0].opening):
            infos += self._infos(run, self.open[0])
            batch = self.open.popleft().number
            self.n_skipped += 1
        self.taken, self.first_itr = batch + 1, itr - batch
        samples = run.hand_out(batch, valid_until=None if self.is_holding else batch + 1)
        run.metrics.training.extend(infos)
        self._note_versions(run, batch)
        run.check_published()
        if not self.is_holding:
            self.release(run)
        elif run.guard.state is _RUNNING:
            self.give_credit(run)
        return samples, infos

    def _note_versions(self, run: Run, batch: int) -> None:
        slot, last = self._versions[batch % len(self._versions)], run.newest_versions()
        for p, (name, newest) in enumerate(list(last.items())):
            for plan in run.plans:
                if name in slot and (cells := plan.cells[p]):  # all columns of a worker have the same version
                    last[name] = version = slot[name][cells.start]
                    self.lags.add(newest - version, len(cells))
        run.policy_version = run.by_policy(last)

    def release(self, run: Run) -> None:
        """Give all batches back except the last one that was handed out, and let the workers continue."""
        last = self.taken - 1
        while len(run.batches.held) > 1:  # before the workers may write there: `debug` poisons this memory
            run.batches.give_back(last)
        self.released = max(self.released, last)
        if run.guard.state is _RUNNING:
            self.give_credit(run)

    def _infos(self, run: Run, batch: _OpenBatch) -> list[TrajInfo]:
        """The trajectories that finished in this batch, which is complete."""
        if batch.infos is None:
            # First, so that a second call takes nothing if this one raises: the messages are gone then.
            batch.infos = []
            batch.infos = run.take_traj_infos(batch.number % run.batches.n_slots, batch.opening)
        return batch.infos

    def pause(self, run: Run, call: str) -> None:
        _pool(run).wait_for(self.open[-1].opening if self.open else 0, call)
        for batch in self.open:  # the next command may overwrite their trajectories
            self._infos(run, batch)

    # ---- with a replay -----------------------------------------------------------------------

    def await_replay(self, run: Run, feed: Feed, n: int) -> None:
        """`n` positions of the replay will be drawn: wait until the ratio allows it."""
        done = 0
        feed.expect(n)
        while True:
            _pool(run).wait_for(done, "replay.sample")
            self.pass_on(run, feed, done)
            # After the line before: a batch that has been completed meanwhile may be the one that was missing.
            if feed.may_draw():
                return
            if not self.open:  # the ratio never stops both sides
                raise SamplerStateError(
                    "replay.sample would wait for ever: the sampler is paused, and ratio allows no draw before "
                    "there are more steps. Call resume() first"
                )
            done = self.open[0].opening

    def pass_on(self, run: Run, feed: Feed, awaited: int = 0) -> None:
        """Take the complete batches, which are in the replay, and let the workers continue. With `lag=1`, only up to
        the opening `awaited`: which others are complete depends on the timing."""
        pool = _pool(run)
        if self.open and pool.has_completed(self.open[0].opening):  # once, for all that were completed meanwhile
            run.check_published()
        while self.open and pool.has_completed((batch := self.open[0]).opening):
            if self._lag is not None and batch.opening > awaited:
                break
            infos = self._infos(run, batch)
            pool.control.note_taken(batch.opening, pool.recorded)
            feed.take(batch.number, infos)
            run.metrics.training.extend(infos)
            self._note_versions(run, batch.number)
            self.released = self.taken = self.open.popleft().number + 1
        if run.guard.state is _RUNNING:
            self.give_credit(run)

    # ---- parameters ------------------------------------------------------------------------

    def must_await(self, run: Run, version: int) -> bool:
        """Whether the next batch needs this version, and a worker or the server has not loaded it yet."""
        control, n = run.memory.control, len(run.plans)
        opening = control.opened[0]
        readers = [n] if run.acting.is_central else range(n)  # the server has the rank after the workers
        return version == control.command(0, opening).version != 0 and any(
            control.arrived(rank) < opening and control.version(rank) != version for rank in readers
        )


def _pool(run: Run) -> WorkerPool:
    """Its gates can be opened several batches ahead."""
    assert isinstance(run.pool, WorkerPool)
    return run.pool


def _await_readers(run: Run | None, version: int) -> None:
    """`sync_shared_memory` is about to overwrite this version: wait until no worker needs it."""
    if run is None or run.guard.state is not _RUNNING:
        return
    schedule, how = run.schedule, "sync_shared_memory"
    assert isinstance(schedule, Ahead)
    if schedule.must_await(run, version):
        with GuardedCall(run.guard, how, _RUNNING):
            _pool(run).wait(how, until=lambda: not schedule.must_await(run, version))


class AsyncSampler(Sampler):
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

    _defaults: ClassVar = {"n_slots": 3}

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
        n_slots = self.config.n_slots
        must_be("n_slots of AsyncSampler", n_slots, 2 <= n_slots <= RING, f"from 2 to {RING}")
        must_be("lag", lag, lag in (None, 1) and not isinstance(lag, bool), "1 (reproducible) or None")
        must_be("server", server, server in (None, "process"), '"process" or None')
        self._readiness = readiness_maker(min_ready, max_wait, self.batch_B)
        if server is None and not (min_ready is None and max_wait is None):
            raise ConfigError('min_ready and max_wait are for a process that acts for all: give server="process" too')
        if replay is None and ratio is not None:
            raise ConfigError("ratio needs a replay: give replay too, or leave ratio out")
        is_replay = replay is None or hasattr(replay, "make_feed")
        must_be("replay", replay, is_replay, "a Replay, as docs/replay.md makes one")
        is_pinned = lag is not None
        self._feed: Feed | None = None if replay is None else replay.make_feed(self, ratio, is_pinned=is_pinned)
        self._lag, self._server = lag, server
        self._guard.expected = {
            SamplerState.READY: "start, which begins to sample, evaluate_agent, or a call on the environments"
        }

    def acting(self) -> Acting:
        """Each worker acts, or an inference server."""
        if self._server is None:
            return WorkersAct()
        from penstock.samplers.central import ServerActs

        return ServerActs(self._server, self._readiness, mixes_batches=self._lag is None)

    def schedule(self) -> Schedule:
        """The workers are ahead of the learner."""
        return Ahead(self._lag, self._feed)

    @property
    def _ahead(self) -> tuple[Run, Ahead]:
        run = self._run
        assert run is not None
        assert isinstance(run.schedule, Ahead)
        return run, run.schedule

    # ---- running ---------------------------------------------------------------------------

    def start(self, itr: int = 0) -> None:
        """Make the workers sample, from now until `pause` or `shutdown`. `itr` is the `itr` of the first batch."""
        with GuardedCall(self._guard, "start", SamplerState.READY):
            run, ahead = self._ahead
            ahead.begin(run, itr)
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
        with GuardedCall(self._guard, "obtain_samples", _RUNNING, _PAUSED):
            run, ahead = self._ahead
            return ahead.wait_and_take(run, integer("itr", itr), newest=newest)

    def poll_samples(self) -> tuple[Samples, list[TrajInfo]] | None:
        """The same as `obtain_samples`, but None if no batch is complete: also while the sampler is paused, when there
        will be none until `resume`. It does not wait. The batch gets the `itr` after that of the batch before."""
        self._refuse_with_replay("poll_samples")
        with GuardedCall(self._guard, "poll_samples", _RUNNING, _PAUSED):
            run, ahead = self._ahead
            itr = ahead.first_itr + ahead.taken
            _pool(run).wait_for(0, f"itr={itr}")
            if not ahead.open and self.state is _PAUSED:  # the end of a loop that takes all that is complete
                return None
            ahead.require_batch(run, "poll_samples")
            is_complete = _pool(run).has_completed(ahead.open[0].opening)
            return ahead.wait_and_take(run, itr) if is_complete else None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A context in which no batch is given back, so that you can use several together: at most `n_slots`.

        At its end, all except the last one are given back.
        """
        self._refuse_with_replay("hold")
        with GuardedCall(self._guard, "hold", _RUNNING, _PAUSED):
            run, ahead = self._ahead
            if ahead.is_holding:
                raise SamplerStateError("hold was called inside hold: use one context for all batches")
            ahead.is_holding = True
        run.batches.set_valid_until(None)
        try:
            yield
        finally:
            ahead.is_holding = False
            if self.state in (_RUNNING, _PAUSED):
                with GuardedCall(self._guard, "hold", _RUNNING, _PAUSED):
                    ahead.release(run)
                    run.batches.set_valid_until(ahead.taken)

    def pause(self) -> None:
        """Let the workers finish the batches that they may collect, and wait for that. Then they stand still.

        `obtain_samples` and `poll_samples` still return the batches that are complete. `resume` continues.
        """
        with GuardedCall(self._guard, "pause", _RUNNING):
            run, ahead = self._ahead
            ahead.pause(run, "pause")
            self._guard.state = _PAUSED

    def resume(self) -> None:
        """Continue to sample after `pause`."""
        with GuardedCall(self._guard, "resume", _PAUSED):
            run, ahead = self._ahead
            ahead.give_credit(run)
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
        stats, (_, ahead) = super().stats(), self._ahead
        return replace(stats, lag=ahead.lags.stats, skipped_batches=ahead.n_skipped, dropped_trajectories=n_dropped)

    @property
    def server_stats(self) -> ServerStats:
        """As in `GpuSampler`. Raises `ConfigError` without `server="process"`."""
        return self._require_run("server_stats").server_stats()

    # ---- with a replay -----------------------------------------------------------------------

    def take_traj_infos(self) -> list[TrajInfo]:
        """With a replay: the trajectories that have finished since the last call, batch by batch, ordered by time step,
        then env_rank. The newest 65,536 are kept; `stats().dropped_trajectories` counts the others. It does not wait.
        Raises a `SamplerBrokenError` if a worker has failed.
        """
        if self._feed is None:
            raise SamplerStateError("take_traj_infos needs a replay: obtain_samples returns the trajectories")
        with GuardedCall(self._guard, "take_traj_infos", _RUNNING, _PAUSED):
            run, ahead = self._ahead
            _pool(run).wait_for(0, "take_traj_infos")
            ahead.pass_on(run, self._feed)
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
        with GuardedCall(self._guard, "replay.sample", _RUNNING, _PAUSED):
            run, ahead = self._ahead
            ahead.await_replay(run, self._feed, n)
