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
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count
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
Point = tuple[str, int, str, int, int]  # of an arrow, or a moment: phase, track, name, time, arrow's number


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
    """The newest records of one worker: of those that were complete when they were copied."""

    def __init__(self, arrays: Any, rank: int, newest: int = N_KEPT) -> None:
        self.resets: list[Any] = _stable(arrays.resets[rank]).tolist()  # first: each has ended before what follows
        fence()
        self.row: list[int] = arrays.progress[rank].tolist()
        last = self.row[c.ARRIVED]
        fence()
        records, self._stamps = arrays.records[rank].copy(), arrays.timeline[rank].copy()
        fence()
        current = int(arrays.progress[rank, c.ARRIVED]) + 1  # it may have been written meanwhile
        self._first_stamped, first = current - len(self._stamps) + 1, max(1, current - N_KEPT + 1, last + 1 - newest)
        #: By the number of the opening.
        self.records: dict[int, list[int]] = {k: records[k % N_KEPT].tolist() for k in range(first, last + 1)}
        #: When the worker came to barrier_in, and saw the opening that it runs; None if it runs none.
        self.running: list[int] | None = None
        if self.row[c.BEGUN] == last + 1 > current - N_KEPT:
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


def read(arrays: Any, about: Mapping[str, Any], *, is_over: bool = False, most_spans: int | None = None) -> Recorded:
    """All spans of a pool. `arrays` are those of its control block, and `about` is what `describe` has returned.
    `is_over`: it has ended. Otherwise, what still runs ends now. `most_spans`: only the newest, about so many. Raises
    `ConfigError` if what the arrays hold is no run."""
    try:
        return _Maker(arrays, about, is_over, most_spans).made()
    # A crash of C code may write anything.
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise ConfigError(f"no trace can show what process {about['pid']} has left in its memory: {error!r}") from error


class _Maker:
    """Makes the spans and points of one pool."""

    def __init__(self, arrays: Any, about: Mapping[str, Any], is_over: bool, most_spans: int | None) -> None:
        described, most = about["workers"], sys.maxsize if most_spans is None else most_spans
        self._arrays, self._about, self._most_rows = arrays, about, most // max(1, len(described))  # of each worker
        newest = max(2, min(N_KEPT, self._most_rows // (2 * about["batch_T"] + 8)))
        self._workers = workers = [_Worker(arrays, rank, newest) for rank in range(len(described))]
        found = _stable(arrays.openings).tolist()
        self._openings = {opening[c.NUMBER]: opening for opening in found if opening[c.NUMBER]}
        self._events, self._now = _stable(arrays.events).tolist(), time.monotonic_ns()
        if is_over:  # at the newest time
            stamps = [worker.row[HEARTBEAT] for worker in workers] + [event[2] for event in self._events]
            stamps += [max(opening[c.OPENED : c.DONE + 1]) for opening in self._openings.values()]
            self._now = min(self._now, max(stamps, default=self._now))
        self._pids, self._is_over = arrays.n_results[: len(workers), c.PID].tolist(), is_over
        self._in_place = self._pids == [about["pid"]]
        self._spans: list[Span] = []
        self._points: list[Point] = []
        self._tracks = {_MAIN: "main process", _MARKS: "marks and publications"}
        # By opening: when each worker was at barrier_out, and which. One that is not there yet is the slowest.
        self._at_gate: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for rank, worker in enumerate(workers):
            env_ranks = range(*described[rank]["env_ranks"])
            self._tracks[_WORKERS + rank] = f"worker {rank}" + (f": env_rank {span(env_ranks)}" if env_ranks else "")
            for k, record in worker.records.items():
                self._at_gate[k].append((record[HEARTBEAT], rank))
            self._at_gate[worker.row[c.ARRIVED] + 1].append((math.inf, rank))

    def made(self) -> Recorded:
        """All of it."""
        for rank in range(len(self._workers)):
            self._add_worker(rank)
        self._add_main()
        self._add_events()
        for began, ended, n, version in _stable(self._arrays.served).tolist():
            if 0 < began <= ended:
                self._tracks[_SERVER] = "inference server"
                name = f"act for {n} environments" if n else "values"
                self._spans.append((_SERVER, name, "server", began, ended, {"version": version}))
        return Recorded({**self._about, "pids": self._pids}, self._tracks, self._spans, self._points)

    def _name(self, opening: Sequence[int] | None, number: int) -> str:
        if number == 1:
            return "start-up"
        if opening is None or not opening[c.KIND]:
            return _NAMES[0].format("?" if opening is None else opening[c.ITR]) if self._about["batch_T"] else "step"
        return _NAMES[opening[c.KIND]].format(opening[c.ITR])

    # ---- a worker ----------------------------------------------------------------------------

    def _add_worker(self, rank: int) -> None:
        """Its commands, their rows, waits and resets."""
        worker, track, before = self._workers[rank], _WORKERS + rank, None
        restarts = [began for kind, began, _, value in self._events if (kind, value) == (c.RESTARTED, rank)]
        for k, record in worker.records.items():
            self._add_command(rank, k, record, before, restarts)
            before = record
        row = worker.row
        if worker.running is not None or not row[c.ARRIVED]:  # or it starts
            self._add_command(rank, row[c.ARRIVED] + 1, row, before, restarts)
        elif row[c.PHASE] == Phase.WAITING and not self._in_place:
            self._add_wait(rank, row[c.ARRIVED] + 1, row[HEARTBEAT], self._now)
        if row[c.PHASE] == Phase.RESETTING:
            began, saw = row[HEARTBEAT], (worker.running or (0, 0))[1]
            # It runs still, or has ended since the row was read: then a later time step has begun.
            stamps = worker.rows(row[c.ARRIVED] + 1, saw, self._now)
            ended = next((stamp for stamp in stamps if stamp > began), self._now)
            worker.resets.append((row[c.ENV_RANK] & (1 << c.WHO_BITS) - 1, row[c.T], began, ended))
        for env_rank, t, began, ended in worker.resets:
            if 0 < began <= ended:
                self._spans.append((track, f"reset env_rank {env_rank}", "reset", began, ended, {"t": t}))

    def _add_command(
        self, rank: int, k: int, record: list[int], before: list[int] | None, restarts: Sequence[int]
    ) -> None:
        """Command k, its rows, and what was before it. `before`: the record of the one before, if it is kept."""
        worker, track, opening = self._workers[rank], _WORKERS + rank, self._openings.get(k)
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
                self._spans.append((track, name, "between", before[HEARTBEAT], came, None))
            self._add_wait(rank, k, came, saw)
            if opening is not None:
                self._add_flows(track, k << 16 | rank << 1, opening, saw, None if runs else end)
        args: dict[str, float] = {"opening": k, "version": record[c.VERSION]}
        if before is not None:
            args["steps"] = record[c.STEPS] - before[c.STEPS]
            args |= {name: (record[word] - before[word]) / 1e6 for name, word in _PARTS.items()}
        self._spans.append((track, self._name(opening, k), "batch", saw, end, args))
        stamps = worker.rows(k, saw, end) + [end] * runs
        for i in range(max(0, len(stamps) - 1 - self._most_rows), len(stamps) - 1):
            if stamps[i] < stamps[i + 1]:
                name, t = ("acting", "stepping")[i % 2], i // 2
                self._spans.append((track, name, "row", stamps[i], stamps[i + 1], {"t": t}))

    def _add_flows(self, track: int, key: int, opening: Sequence[int], saw: int, end: int | None) -> None:
        """From the opening to the worker; and from its end to the wait, if that has ended later."""
        opened, asked, done = opening[c.OPENED : c.DONE + 1]
        self._points += ("s", _MAIN, "batch", opened, key), ("f", track, "batch", saw, key)
        if end is not None and done >= max(end, asked):
            self._points += ("s", track, "batch", end, key + 1), ("f", _MAIN, "batch", done, key + 1)

    def _add_wait(self, rank: int, k: int, came: int, saw: int) -> None:
        """It waited for opening k: for other workers until all had completed the one before, then for the main
        process."""
        all_at, slowest = max(self._at_gate.get(k - 1, ()), default=(0, rank))
        middle = int(min(max(came, all_at), saw))
        for name, a, b in (("barrier_out", came, middle), ("barrier_in", middle, saw)):
            if a < b:
                args = {"waits_for": f"worker {slowest}" if name == "barrier_out" else "main process"}
                self._spans.append((_WORKERS + rank, name, "wait", a, b, args))

    # ---- the main process --------------------------------------------------------------------

    def _add_main(self) -> None:
        """When it opened gates, when it waited, and the time between: the learner's."""
        found = []
        for k, opening in self._openings.items():
            name, args, (opened, asked, done) = self._name(opening, k), {"opening": k}, opening[c.OPENED : c.DONE + 1]
            if self._in_place:  # it has worked itself
                worker = self._workers[0]
                if k <= worker.row[c.ARRIVED] and k not in worker.records:  # its record is not kept
                    continue
                done = worker.records[k][HEARTBEAT] if k in worker.records else self._now
            is_ahead = asked - opened > 10 * _GAP_NS and k > 1
            if is_ahead or not done:
                found.append((opened, opened + 1000, f"start {name}", args))
            if asked > opened or done:
                end = done if done >= asked else self._now
                found.append((asked if is_ahead else opened, end, f"wait for {name}", args))
        ended = 0
        for began, end, name, args in sorted(found, key=lambda entry: entry[:2]):
            if ended and began - ended > _GAP_NS:
                self._spans.append((_MAIN, "learner", "learner", ended, began, None))
            if max(began, ended) < end:
                self._spans.append((_MAIN, name, "wait", max(began, ended), end, args))
                ended = end
        if 0 < ended < self._now and not self._is_over:
            self._spans.append((_MAIN, "learner", "learner", ended, self._now, None))

    def _add_events(self) -> None:
        """Publications, marks and restarts. Spans of several threads may overlap: those that do not nest get further
        tracks."""
        names, lanes = self._arrays.names.tolist(), defaultdict[int, list[int]](list)  # by track: ends of open spans
        for kind, began, ended, value in sorted(self._events, key=lambda event: (event[1], -event[2])):
            if kind == c.RESTARTED:
                self._points.append(("i", _WORKERS + value, f"worker {value} failed and is replaced", began, 0))
            if kind not in (c.PUBLISHED, c.MARKED):
                continue
            for track in chain([_MARKS], count(_WORKERS + len(self._workers))):
                lanes[track] = lane = [end for end in lanes[track] if end > began]
                if not lane or ended <= lane[-1]:
                    break
            lane.append(ended)
            self._tracks[track] = self._tracks[_MARKS]
            if kind == c.MARKED:
                self._spans.append((track, names[value].decode(), "mark", began, ended, None))
            else:
                self._spans.append((track, f"publish version {value}", "publish", began, ended, {"version": value}))


# ---- writing -----------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], recorded: Sequence[Recorded], profile: Any = None) -> Path:
    """Write a file for Perfetto, https://ui.perfetto.dev, or chrome://tracing. `profile`: see `Sampler.trace`. Raises
    `ConfigError` if it cannot be written, or `profile` cannot be read."""
    path, pids = Path(_path("path", path)), [one.about["pid"] for one in recorded]
    if not path.name or (os.path.exists(path) and not os.path.isfile(path)):  # it would take the place of a device
        raise ConfigError(f"the trace cannot be written to {os.fspath(path)!r}, which is no file: give the path of one")
    recorded = [  # processes of several machines, and pools of one process, may have one number
        replace(one, about={**one.about, "pid": pid + _MOST_PIDS * pids[:i].count(pid)})
        for i, (one, pid) in enumerate(zip(recorded, pids, strict=True))
    ]
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}.part")
    offset = time.time_ns() - time.monotonic_ns()
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


def _path(name: str, value: Any) -> str:
    """`value` as a text; raises `ConfigError` naming the argument unless it is a path."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    must_be(name, value, isinstance(text, str) and "\0" not in text, "a path")
    return str(text)


def write_or_warn(path: str, recorded: Callable[[], Sequence[Recorded]], why: str) -> None:
    """Write a trace and log `why`. If this fails, it only warns: the call of the user goes on."""
    try:
        _log.warning("%s: a trace is in %s", why, write(path, recorded()))
    except Exception as error:
        _log.warning("%s, and its trace could not be written: %s", why, str(error))  # the record may outlive the pool


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
    fits = isinstance(name, str) and name != "" and name.isprintable()
    must_be("name", name, fits, "a text that says what the time is spent on, in printable characters")
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
        self._folder, self._factor = _path("folder", folder), number("factor", factor, 1e9)
        must_be("factor", factor, self._factor > 1, "above 1: a batch that takes so many times as long is slow")
        self._least, self._left = number("least", least, 1e9) * 1e9, integer("most", most, 1)
        self._env_ranks, self._n, self._usual = env_ranks, 0, 0.0
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder={self._folder!r} cannot be made: {error}. Give another one") from error
        self._folder = os.path.abspath(self._folder)  # the program may change its folder

    def __call__(self, k: int, control: ControlBlock, recorded: Callable[[], Sequence[Recorded]]) -> None:
        """The main process has waited for opening k."""
        arrays, n, slowest = control.memory.arrays, len(self._env_ranks), 0
        opening = arrays.openings[k % N_KEPT].tolist()
        records, before = arrays.records[:n, k % N_KEPT], arrays.records[:n, (k - 1) % N_KEPT]
        has_records = records[:, c.BEGUN].any()  # otherwise shards have their own
        if k == 1 or opening[c.KIND] or not self._left or (has_records and (records[:, c.BEGUN] != k).any()):
            return
        began, ended = opening[c.OPENED], opening[c.DONE]
        if has_records:  # until the last worker came to barrier_out; workers may be ahead of the main process
            slowest = int(records[:, HEARTBEAT].argmax())
            began, ended = max(began, int(before[:, HEARTBEAT].max())), int(records[slowest, HEARTBEAT])
        took, usual, self._n = ended - began, self._usual, self._n + 1
        most = self._factor * usual if self._n > _WARM_UP else math.inf
        self._usual += (min(took, most) - usual) / min(self._n, 50)  # a very slow one changes little
        if took > max(most, self._least) and self._n > _WARM_UP:
            self._left -= 1
            why = f"itr {opening[c.ITR]} took {took / 1e6:.1f} ms, usually {usual / 1e6:.1f} ms"
            why += self._explain(arrays, k, slowest) if has_records else ""
            write_or_warn(os.path.join(self._folder, f"itr-{opening[c.ITR]}-{k}.trace.json"), recorded, why)

    def _explain(self, arrays: Any, k: int, rank: int) -> str:
        """Where the worker that was the last has spent the most time."""
        record = arrays.records[rank, k % N_KEPT].tolist()
        text = f": worker {rank} (env_rank {span(self._env_ranks[rank])}) was the last"
        worker = _Worker(arrays, rank)
        steps = np.diff(worker.rows(k, record[c.SAW], record[HEARTBEAT]))
        if not len(steps):
            return text
        i = int(steps.argmax())
        text += f", and {('acted', 'stepped')[i % 2]} for {steps[i] / 1e6:.1f} ms at t={i // 2}"
        for env_rank, _, began, ended in worker.resets:
            if record[c.SAW] <= began and ended <= record[HEARTBEAT] and (ended - began) * 2 > steps[i]:
                text += f", of which it reset env_rank {env_rank} for {(ended - began) / 1e6:.1f} ms"
        return text
