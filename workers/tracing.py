"""A trace of what has happened, from the rings of a control block, in the format of Chrome and Perfetto.

`read` makes spans from the arrays, which another process may write meanwhile. `write` makes a file of them. Neither
needs a sampler: `penstock top` calls them with the arrays of other processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.arguments import integer, must_be, number
from penstock.buffers.ordering import fence
from penstock.errors import ConfigError, brief
from penstock.workers import control as c
from penstock.workers.control import HEARTBEAT, N_KEPT, ControlBlock, Phase
from penstock.workers.plan import WorkerPlan, span

_log = logging.getLogger("penstock")

_MAIN, _MARKS, _SERVER, _WORKERS = 1, 2, 3, 4  # the numbers of tracks; the first of the workers has the last one
_GAP_NS = 20_000  # the shortest time that is shown between two batches, and as the learner's
_NAMES = "itr {}", "evaluation itr {}", "call"  # by kind
_PARTS = {"acting_ms": c.ACTING, "stepping_ms": c.STEPPING, "resetting_ms": c.RESETTING, "waiting_ms": c.WAITING}
_MOST_PIDS = 1 << 22  # what Linux allows
_WARM_UP = 20  # batches before the first that may be slow

Span = tuple[int, str, str, int, int, Mapping[str, Any] | None]  # track, name, category, begin, end, arguments
Point = tuple[str, int, str, int, int]  # phase, track, name, time, number of the flow


@dataclass(frozen=True)
class Recorded:
    """What has happened in one pool, in nanoseconds of its `time.monotonic_ns`."""

    about: Mapping[str, Any]  #: see `describe`, with the pids of the workers
    tracks: Mapping[int, str]  #: their names
    spans: list[Span]
    points: list[Point]
    shift: int = 0  #: how far the clock of this process is ahead of that one


def describe(kind: str, batch_T: int, plans: Sequence[WorkerPlan]) -> dict[str, Any]:
    """What the rings do not say."""
    return {
        "version": sys.modules["penstock"].__version__,
        "kind": kind,
        "pid": os.getpid(),
        "batch_T": batch_T,
        "batch_B": sum(len(plan.env_ranks) for plan in plans),
        "workers": [
            {"env_ranks": [plan.env_ranks.start, plan.env_ranks.stop]} for plan in plans if not plan.server_name
        ],
    }


# ---- reading -----------------------------------------------------------------------------------------


def _stable(ring: Any) -> Any:
    """A copy of a ring that nothing announces. What changes meanwhile is 0."""
    copy = ring.copy()
    fence()
    copy[(copy != ring).any(-1)] = 0
    return copy


class _Worker:
    """The records of one worker: those that were complete when they were copied."""

    def __init__(self, arrays: Any, rank: int) -> None:
        self.row: list[int] = arrays.progress[rank].tolist()
        last = self.row[c.ARRIVED]
        fence()
        records, self._stamps = arrays.records[rank].copy(), arrays.timeline[rank].copy()
        fence()
        current = int(arrays.progress[rank, c.ARRIVED]) + 1  # it may have been written meanwhile
        self._first_stamped = current - len(self._stamps) + 1
        #: By the number of the opening.
        self.records: dict[int, list[int]] = {
            k: records[k % N_KEPT].tolist() for k in range(max(1, current - N_KEPT + 1), last + 1)
        }
        #: When the worker came to barrier_in, and saw the opening that it runs; None if it runs none.
        self.running: list[int] | None = None
        if self.row[c.BEGUN] == last + 1 and last + 1 > current - N_KEPT:
            self.running = records[(last + 1) % N_KEPT, :2].tolist()

    def rows(self, number: int, saw: int, end: int) -> list[int]:
        """The stamps of this opening, if it has any and they are kept. They begin within the record."""
        found: list[int] = self._stamps[number % len(self._stamps)].tolist() if number >= self._first_stamped else []
        at = saw
        for i, stamp in enumerate(found):
            if not at <= stamp <= end:  # of an earlier opening, or not written yet
                return found[:i]
            at = stamp
        return found


def read(arrays: Any, about: Mapping[str, Any], *, is_over: bool = False) -> Recorded:
    """All spans of a pool. `arrays` are those of its control block, and `about` is what `describe` has returned.
    `is_over`: it has ended. Otherwise, what still runs ends now."""
    maker = _Maker(arrays, about, is_over=is_over)
    restarts = [event for event in maker.events if event[0] == c.RESTARTED]
    for rank in range(len(maker.workers)):
        resets = _stable(arrays.resets[rank]).tolist()
        maker.add_worker(rank, [began for _, began, _, value in restarts if value == rank], resets)
    maker.add_main()
    maker.add_events(arrays.names.tolist())
    for began, ended, n, version in _stable(arrays.served).tolist():
        if 0 < began <= ended:
            maker.tracks[_SERVER] = "inference server"
            name = f"act for {n} environments" if n else "values"
            maker.spans.append((_SERVER, name, "server", began, ended, {"version": version}))
    return Recorded({**about, "pids": maker.pids}, maker.tracks, maker.spans, maker.points)


class _Maker:
    """Makes the spans and points of one pool."""

    def __init__(self, arrays: Any, about: Mapping[str, Any], *, is_over: bool) -> None:
        described = about["workers"]
        self.workers = workers = [_Worker(arrays, rank) for rank in range(len(described))]
        found = _stable(arrays.openings).tolist()
        self._openings = {opening[c.NUMBER]: opening for opening in found if opening[c.NUMBER]}
        self.events, self._now = _stable(arrays.events).tolist(), time.monotonic_ns()
        if is_over:  # at the newest time
            stamps = [worker.row[HEARTBEAT] for worker in workers] + [event[2] for event in self.events]
            stamps += [max(opening[c.OPENED : c.DONE + 1]) for opening in self._openings.values()]
            self._now = min(self._now, max(stamps, default=self._now))
        self.pids = arrays.n_results[: len(workers), c.PID].tolist()
        self._in_place, self._has_rows, self._is_over = self.pids == [about["pid"]], about["batch_T"] > 0, is_over
        self.spans: list[Span] = []
        self.points: list[Point] = []
        self.tracks = {_MAIN: "main process", _MARKS: "marks and publications"}
        # By opening: when each worker was at barrier_out, and which. One that is not there yet is the slowest.
        self._at_gate: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for rank, worker in enumerate(workers):
            env_ranks = range(*described[rank]["env_ranks"])
            self.tracks[_WORKERS + rank] = f"worker {rank}" + (f": env_rank {span(env_ranks)}" if env_ranks else "")
            for k, record in worker.records.items():
                self._at_gate[k].append((record[HEARTBEAT], rank))
            self._at_gate[worker.row[c.ARRIVED] + 1].append((math.inf, rank))

    def _name(self, opening: Sequence[int] | None, number: int) -> str:
        if number == 1:
            return "start-up"
        if opening is None or not opening[c.KIND]:
            return _NAMES[0].format("?" if opening is None else opening[c.ITR]) if self._has_rows else "step"
        return _NAMES[opening[c.KIND]].format(opening[c.ITR])

    # ---- a worker ----------------------------------------------------------------------------

    def add_worker(self, rank: int, restarts: Sequence[int], resets: Sequence[Sequence[int]]) -> None:
        """Its commands, their rows, waits and resets."""
        worker, track, before = self.workers[rank], _WORKERS + rank, None
        for k, record in worker.records.items():
            self._add_command(rank, k, record, before, restarts)
            before = record
        row = worker.row
        if worker.running is not None or not row[c.ARRIVED]:  # or it starts
            self._add_command(rank, row[c.ARRIVED] + 1, row, before, restarts)
        elif row[c.PHASE] == Phase.WAITING and not self._in_place:
            self._add_wait(rank, row[c.ARRIVED] + 1, row[HEARTBEAT], self._now)
        if row[c.PHASE] == Phase.RESETTING:  # it runs still
            resets = [*resets, (row[c.ENV_RANK] & (1 << c.WHO_BITS) - 1, row[c.T], row[HEARTBEAT], self._now)]
        for env_rank, t, began, ended in resets:
            if 0 < began <= ended:
                self.spans.append((track, f"reset env_rank {env_rank}", "reset", began, ended, {"t": t}))

    def _add_command(
        self, rank: int, k: int, record: list[int], before: list[int] | None, restarts: Sequence[int]
    ) -> None:
        """Command k, its rows, and what was before it. `before`: the record of the one before, if it is kept."""
        worker, track, opening = self.workers[rank], _WORKERS + rank, self._openings.get(k)
        if opening is not None and not opening[c.TOGETHER]:
            opening = None
        came, saw, end = record[c.CAME], record[c.SAW], record[HEARTBEAT]
        if runs := record is worker.row:
            (came, saw), end = worker.running or (0, 0), self._now
        if k == 1 or not came:  # it did not come from a gate
            saw = end if opening is None else opening[c.OPENED]
        elif not self._in_place:
            if before is not None and came - before[HEARTBEAT] > _GAP_NS:
                is_lost = any(before[HEARTBEAT] < at < came for at in restarts)
                name = "lost, and started again" if is_lost else "between two batches"
                self.spans.append((track, name, "between", before[HEARTBEAT], came, None))
            self._add_wait(rank, k, came, saw)
            if opening is not None:
                self._add_flows(track, k << 16 | rank << 1, opening, saw, math.inf if runs else end)
        args: dict[str, float] = {"opening": k, "version": record[c.VERSION]}
        if before is not None:
            args["steps"] = record[c.STEPS] - before[c.STEPS]
            args |= {name: (record[word] - before[word]) / 1e6 for name, word in _PARTS.items()}
        self.spans.append((track, self._name(opening, k), "batch", saw, end, args))
        self._add_rows(track, worker.rows(k, saw, end) + [end] * runs)

    def _add_rows(self, track: int, stamps: Sequence[int]) -> None:
        for i, (a, b) in enumerate(pairwise(stamps)):
            if a < b:
                self.spans.append((track, ("acting", "stepping")[i % 2], "row", a, b, {"t": i // 2}))

    def _add_flows(self, track: int, key: int, opening: Sequence[int], saw: int, end: float) -> None:
        """From the opening to the worker; and from its end to the wait, if that has ended later."""
        opened, asked, done = opening[c.OPENED : c.DONE + 1]
        self.points += ("s", _MAIN, "batch", opened, key), ("f", track, "batch", saw, key)
        if done >= max(end, asked):
            self.points += ("s", track, "batch", int(end), key + 1), ("f", _MAIN, "batch", done, key + 1)

    def _add_wait(self, rank: int, k: int, came: int, saw: int) -> None:
        """It waited for opening k: for other workers until all had completed the one before, then for the main
        process."""
        all_at, slowest = max(self._at_gate.get(k - 1, ()), default=(0, rank))
        middle = int(min(max(came, all_at), saw))
        for name, a, b in (("barrier_out", came, middle), ("barrier_in", middle, saw)):
            if a < b:
                args = {"waits_for": f"worker {slowest}" if name == "barrier_out" else "main process"}
                self.spans.append((_WORKERS + rank, name, "wait", a, b, args))

    # ---- the main process --------------------------------------------------------------------

    def add_main(self) -> None:
        """When it opened gates, when it waited, and the time between: the learner's."""
        found = []
        for k, opening in self._openings.items():
            name, args, (opened, asked, done) = self._name(opening, k), {"opening": k}, opening[c.OPENED : c.DONE + 1]
            if self._in_place:  # it has worked itself
                done = record[HEARTBEAT] if (record := self.workers[0].records.get(k)) else self._now
            is_ahead = asked - opened > 10 * _GAP_NS and k > 1
            if is_ahead or not done:
                found.append((opened, opened + 1000, f"start {name}", args))
            if asked > opened or done:
                end = done if done >= asked else self._now
                found.append((asked if is_ahead else opened, end, f"wait for {name}", args))
        ended = 0
        for began, end, name, args in sorted(found, key=lambda entry: entry[:2]):
            if ended and began - ended > _GAP_NS:
                self.spans.append((_MAIN, "learner", "learner", ended, began, None))
            if max(began, ended) < end:
                self.spans.append((_MAIN, name, "wait", max(began, ended), end, args))
                ended = end
        if 0 < ended < self._now and not self._is_over:
            self.spans.append((_MAIN, "learner", "learner", ended, self._now, None))

    def add_events(self, names: Sequence[bytes]) -> None:
        """Publications, marks and restarts. Spans of several threads may overlap: those that do not nest get further
        tracks."""
        lanes = list[list[int]]()  # the ends of the spans that are open, by track
        for kind, began, ended, value in sorted(self.events, key=lambda event: (event[1], -event[2])):
            if kind == c.RESTARTED:
                self.points.append(("i", _WORKERS + value, f"worker {value} failed and is replaced", began, 0))
            if kind not in (c.PUBLISHED, c.MARKED):
                continue
            for lane in lanes:
                lane[:] = [end for end in lane if end > began]
            fitting = [i for i, lane in enumerate(lanes) if not lane or ended <= lane[-1]]
            i = fitting[0] if fitting else len(lanes)
            lanes[i:] = lanes[i:] or [[]]
            lanes[i].append(ended)
            track = _WORKERS + len(self.workers) + i - 1 if i else _MARKS
            self.tracks[track] = self.tracks[_MARKS]
            if kind == c.MARKED:
                self.spans.append((track, names[value].decode(), "mark", began, ended, None))
            else:
                self.spans.append((track, f"publish version {value}", "publish", began, ended, {"version": value}))


# ---- writing -----------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], recorded: Sequence[Recorded], profile: Any = None) -> Path:
    """Write a file for Perfetto, https://ui.perfetto.dev, or chrome://tracing. `profile`: see `Sampler.trace`. Raises
    `ConfigError` if it cannot be written, or `profile` cannot be read."""
    path, recorded = Path(path), _with_own_pids(recorded)
    part, offset = path.with_name(f"{path.name}.{os.getpid()}.part"), time.time_ns() - time.monotonic_ns()
    base = min((entry[3] + one.shift for one in recorded for entry in one.spans), default=0) + offset
    theirs, base = ([], base) if profile is None else _of_torch(profile, recorded)
    facts = [one.about for one in recorded]
    try:
        part.unlink(missing_ok=True)
        with open(part, "x") as file:  # a new file: somebody else may have put a link there
            head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "penstock": facts if facts[1:] else facts[0]}
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            lines = [json.dumps(event) for event in theirs]
            for i, one in enumerate(recorded):
                lines += _lines(one, base - offset - one.shift, i << 48)
            file.write(",\n".join(lines) + "\n]}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the trace cannot be written to {os.fspath(path)!r}: {error}. Give a file in a folder that exists"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return path


def _with_own_pids(recorded: Sequence[Recorded]) -> list[Recorded]:
    """The same. Where processes of several machines have one number, all but one get other numbers."""
    found: dict[int, Recorded] = {}
    for one in recorded:
        pid = one.about["pid"]
        while pid in found:
            pid += _MOST_PIDS
        found[pid] = replace(one, about={**one.about, "pid": pid})
    return list(found.values())


def write_or_warn(path: str, recorded: Callable[[], Sequence[Recorded]], why: str) -> None:
    """Write a trace because of `why`, beside what the user has asked for: if it fails, that goes on."""
    try:
        _log.warning("%s: a trace is in %s", why, write(path, recorded()))
    except Exception as error:
        _log.warning("%s, and its trace could not be written: %s", why, error)


def _lines(one: Recorded, base: int, first_flow: int) -> Iterator[str]:
    """The events, as JSON. Times are in microseconds after `base`."""
    pid, dumps, quoted = one.about["pid"], json.dumps, cache(json.dumps)
    yield f'{{"ph":"M","pid":{pid},"tid":0,"name":"process_name","args":{dumps({"name": one.about["kind"]})}}}'
    for track, name in one.tracks.items():
        place = f'{{"ph":"M","pid":{pid},"tid":{track}'
        yield f'{place},"name":"thread_name","args":{dumps({"name": name})}}}'
        yield f'{place},"name":"thread_sort_index","args":{{"sort_index":{track}}}}}'
    for track, name, category, began, ended, args in sorted(one.spans, key=lambda entry: (entry[3], -entry[4])):
        # Most are rows: for them, `dumps` would take half of the time.
        more = f'{{"t":{args["t"]}}}' if args and category == "row" else dumps(args or {})
        yield (
            f'{{"ph":"X","pid":{pid},"tid":{track},"name":{quoted(name)},"cat":"{category}",'
            f'"ts":{(began - base) / 1000:.3f},"dur":{(ended - began) / 1000:.3f},"args":{more}}}'
        )
    for phase, track, name, at, key in one.points:
        more = '"s":"t"' if phase == "i" else f'"id":{first_flow + key}' + ',"bp":"e"' * (phase == "f")
        category = "restart" if phase == "i" else "batch"
        yield (
            f'{{"ph":"{phase}","pid":{pid},"tid":{track},"name":{quoted(name)},"cat":"{category}",'
            f'"ts":{(at - base) / 1000:.3f},{more}}}'
        )


def _of_torch(profile: Any, recorded: Sequence[Recorded]) -> tuple[list[dict[str, Any]], int]:
    """The events of torch's profiler, and the Unix time in nanoseconds that its times are relative to."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = profile
            if not isinstance(profile, str | os.PathLike):
                profile.export_chrome_trace(file := os.path.join(folder, "torch.json"))
            data = json.loads(Path(file).read_text())
        theirs, base = list(data["traceEvents"]), int(data.get("baseTimeNanoseconds", 0))
    except Exception as error:  # torch raises AssertionError, RuntimeError and others
        raise ConfigError(
            "profile must be a torch.profiler.profile that has been stopped and not exported yet (leave its `with` "
            f"block first), or the file that it has exported, got {brief(profile)}: {error!r}"
        ) from error
    tracks = {one.about["pid"]: max(one.tracks) for one in recorded}
    events = []
    for event in theirs:
        pid, tid = event.get("pid"), event.get("tid")
        if pid not in tracks or (event.get("name"), event["ph"]) != ("process_name", "M"):  # ours has its name
            if isinstance(tid, int) and tid <= tracks.get(pid, -1):  # in a container, numbers of threads are small
                event["tid"] = tid + _MOST_PIDS
            events.append(event)
    return events, base


# ---- marks and slow batches ----------------------------------------------------------------------------


@contextlib.contextmanager
def mark(control: ControlBlock, name: str) -> Iterator[None]:
    """See `Sampler.mark`."""
    must_be("name", name, isinstance(name, str) and bool(name), "a text that says what the time is spent on")
    began = time.monotonic_ns()
    try:
        yield
    finally:
        control.note_mark(name, began)


class SlowBatches:
    """Writes a trace after each slow batch; see `Sampler.trace_when_slow`."""

    def __init__(
        self, folder: str | os.PathLike[str], factor: float, least: float, most: int, env_ranks: Sequence[range]
    ) -> None:
        self._folder, self._factor = os.fspath(folder), number("factor", factor, 1e9)
        must_be("factor", factor, self._factor > 1, "above 1: a batch that takes so many times as long is slow")
        self._least, self._left = number("least", least, 1e9) * 1e9, integer("most", most, 1)
        self._env_ranks, self._n, self._usual = env_ranks, 0, 0.0
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder={self._folder!r} cannot be made: {error}. Give another one") from error

    def __call__(self, k: int, control: ControlBlock, recorded: Callable[[], Sequence[Recorded]]) -> None:
        """The main process has waited for opening k."""
        arrays = control.memory.arrays
        opening = arrays.openings[k % N_KEPT].tolist()
        begun = arrays.records[: len(self._env_ranks), k % N_KEPT, c.BEGUN]
        has_records = begun.any()  # otherwise shards have their own
        if k == 1 or opening[c.KIND] or not self._left or (has_records and (begun != k).any()):
            return
        slowest, took = self._slowest(arrays, k) if has_records else (None, opening[c.DONE] - opening[c.OPENED])
        usual, self._n = self._usual, self._n + 1
        # A very slow one changes little.
        most = self._factor * usual if self._n > _WARM_UP else math.inf
        self._usual += (min(took, most) - usual) / min(self._n, 50)
        if took > max(most, self._least) and self._n > _WARM_UP:
            self._left -= 1
            why = f"itr {opening[c.ITR]} took {took / 1e6:.1f} ms, usually {usual / 1e6:.1f} ms"
            if slowest is not None:
                why += self._explain(arrays, k, slowest)
            write_or_warn(os.path.join(self._folder, f"itr-{opening[c.ITR]}-{k}.trace.json"), recorded, why)

    def _slowest(self, arrays: Any, k: int) -> tuple[int | None, int]:
        """The worker that came last to barrier_out, and how long the batch took: from the opening, or from the end of
        the batch before, until then."""
        before, ends = (arrays.records[: len(self._env_ranks), i % N_KEPT, HEARTBEAT] for i in (k - 1, k))
        slowest = int(ends.argmax())
        return slowest, int(ends[slowest]) - max(int(arrays.openings[k % N_KEPT, c.OPENED]), int(before.max()))

    def _explain(self, arrays: Any, k: int, rank: int) -> str:
        record = arrays.records[rank, k % N_KEPT].tolist()
        text = f": worker {rank} (env_rank {span(self._env_ranks[rank])}) was the last"
        steps = np.diff(_Worker(arrays, rank).rows(k, record[c.SAW], record[HEARTBEAT]))
        if not len(steps):
            return text
        i = int(steps.argmax())
        text += f", and {('acted', 'stepped')[i % 2]} for {steps[i] / 1e6:.1f} ms at t={i // 2}"
        for env_rank, _, began, ended in arrays.resets[rank].tolist():
            if record[c.SAW] <= began and ended <= record[HEARTBEAT] and (ended - began) * 2 > steps[i]:
                text += f", of which it reset env_rank {env_rank} for {(ended - began) / 1e6:.1f} ms"
        return text
