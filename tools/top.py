"""`penstock top`: what the workers of running samplers and vector environments do, seen from another process.

It reads the control blocks that workers/about.py lets it find. What it reads may be half-written, or written by a
worker that has crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from penstock import system
from penstock.arguments import seconds
from penstock.errors import ConfigError
from penstock.workers import about
from penstock.workers.control import ARRIVED, PID, ControlBlock, Phase
from penstock.workers.failures import WorkerStatus
from penstock.workers.handle import StackFile
from penstock.workers.marking import is_alive
from penstock.workers.plan import WorkerPlan, span

HELP = "show what the workers of running samplers and vector environments do"
_MORE = """Exit status: 0 if all is well; 1 if nothing was found; 2 if the arguments are wrong; 130 after Ctrl-C. A
SerialSampler has no workers, so it is not shown. See docs/see.md."""
_NOTHING = "no sampler or vector environment of this user has workers on this machine"
_IDLE = (Phase.WAITING, Phase.SERVING, Phase.CLOSED, Phase.UNREADABLE)
_SILENT = 5.0  # seconds without progress after which a worker is marked
_KEPT_SECONDS = 60.0  # how long a run is shown that has ended
_SCAN_SECONDS, _SCAN_SHARE = 3.0, 0.05  # how often it looks for new runs, and how much of its time that may take
_COLUMNS = ["worker", "     pid", "      envs", "  steps/s", "acting", "stepping", " idle", "restarts", "   MiB"]
_CLEAR = "\x1b[H\x1b[J"  # the screen of a terminal
_NARROW, _LEFT_OUT, _MOST_ROWS = 100, (1, 7, 8), 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description, parser.epilog, add = f"{HELP.capitalize()}.", _MORE, parser.add_argument
    add("pid", type=int, nargs="*", metavar="PID", help="only the runs of these main processes")
    add("--once", action="store_true", help="print one frame, of half a second, and end")
    add("--json", action="store_true", help="print each frame as one line of JSON")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between two frames (1)")
    add("--stacks", type=int, nargs="*", metavar="RANK", help="print the stacks of these workers, or of all, and end")
    add("--trace", metavar="FILE", help="write the last batches as a trace for Perfetto, and end")
    add("--join", metavar="FILE", help="show the workers of a distributed experiment too: its connection file")


class Run:
    """One pool of another process. When the process has ended, its last figures can still be read."""

    def __init__(self, pid: int, what: dict[str, Any], memory: about.RunMemory) -> None:
        self.pid, self.what, self.arrays = pid, what, memory.arrays
        self.control = ControlBlock.__new__(ControlBlock)
        self.control.__setstate__(memory)
        self.plans = [
            WorkerPlan(worker_rank=i, columns=range(*envs), env_ranks=range(*envs), cpus=tuple(cpus), server_name=name)
            for i, (name, *envs, cpus) in enumerate(what["plans"])
        ]
        self._process = psutil.Process(pid)
        self.ended: float | None = None  #: when its end was seen
        self._before, self._moves = dict[int, Any](), dict[int, Any]()  # by rank: the last figures, the last move
        self.look()  # what cannot be read raises here
        self._before.clear()  # the first rates are those since the start

    def look(self) -> dict[str, Any]:
        """What `--json` prints. Rates and shares are of the time since the last look."""
        now, n = time.monotonic(), len(self.plans)
        runs = min(self.control.opened[0], 1 + int(self.arrays.progress[:n, ARRIVED].min()))  # more may be open ahead
        statuses = [self.status(plan) for plan in self.plans]
        sizes = [system.rss(status.pid) for status in statuses]
        if self.ended is None and self._has_ended(any(sizes)):
            self.ended = now
        n_busy = len(self.control.pending(n))
        main = f"waits for {n_busy} of {n} workers" if n_busy else f"has the results of all {n} workers"
        rows = [self._row(status, now, size) for status, size in zip(statuses, sizes, strict=True)]
        facts = {name: self.what[name] for name in ("kind", "pid", "batch_T", "batch_B", "command", "version")}
        facts |= {"itr": self.control.command(0, runs).itr, "main": "has ended" if self.ended else main}
        facts |= {"seconds": (self.ended or now) - self.what["began"], "workers": rows}
        return facts | {"steps_per_second": sum(row["steps_per_second"] for row in rows)}

    def _has_ended(self, has_workers: bool) -> bool:
        """Whether the process has ended, or has closed this pool."""
        return not is_alive(self._process) or (self.control.quit and not has_workers)

    def status(self, plan: WorkerPlan) -> WorkerStatus:
        """What this worker is doing."""
        pid = max(0, int(self.arrays.n_results[plan.worker_rank, PID]))
        return WorkerStatus(plan, pid, self.control.snapshot(plan.worker_rank))

    def _row(self, status: WorkerStatus, now: float, size: int) -> dict[str, Any]:
        plan, rank, seen = status.plan, status.plan.worker_rank, status.progress
        is_idle = seen.phase in _IDLE
        steps = seen.steps + (0 if is_idle else max(0, seen.t) * len(plan.env_ranks))  # `steps` is of complete batches
        waiting = seen.waiting + (now - seen.heartbeat if is_idle and not self.ended else 0.0)
        new = now, steps, seen.acting, seen.stepping, waiting
        old, self._before[rank] = self._before.get(rank, (self.what["began"], 0, 0.0, 0.0, 0.0)), new
        passed, n, acting, stepping, idle = (max(0.0, b - a) for a, b in zip(old, new, strict=True))
        if not acting + stepping:  # no batch has ended since: the shares of all batches
            acting, stepping = seen.acting, seen.stepping
        idle = min(1.0, idle / passed) if passed else 0.0
        busy = (1.0 - idle) / ((acting + stepping) or 1.0)
        moved = seen.phase, seen.t, seen.env_rank, seen.batches  # within a row, the heartbeat stays
        before, since = self._moves.get(rank, (moved, self.what["began"]))
        self._moves[rank] = moved, since if moved == before else now
        silent = 0.0 if is_idle or self.ended else max(0.0, now - max(seen.heartbeat, self._moves[rank][1]))
        row = {"worker": rank, "name": plan.name, "pid": status.pid, "rss": size, "cpus": plan.cpus}
        row |= {"env_ranks": [plan.env_ranks.start, plan.env_ranks.stop], "restarts": self.control.generation(rank)}
        row |= {"doing": status.doing, "silent": silent}
        row |= {"steps_per_second": n / passed if passed else 0.0, "version": self.control.version(rank)}
        row |= {"shares": {"acting": busy * acting, "stepping": busy * stepping, "idle": idle}}
        return row | {"progress": {**vars(seen), "phase": seen.phase.name}}

    def stack(self, plan: WorkerPlan) -> str:
        """The Python stack of this worker, under a line that names it. Nothing else happens to the worker."""
        status, inode, text = self.status(plan), self.what["stacks"][plan.worker_rank], "no stack: it does not run"
        try:
            files = about.files_of(status.pid if system.OPENS_OTHERS else self.pid, about.STACKS) if status.pid else ()
            for path in files:
                if os.stat(path).st_ino == inode:
                    file = StackFile(os.open(path, os.O_RDONLY))
                    text = file.answer_to(lambda: system.ask_stacks(status.pid)) or "it does not answer"
        except (OSError, OverflowError) as error:
            text = f"no stack: {error}"
        return f"{self.what['kind']} pid {self.pid}, {status}, {status.doing}:\n{text}\n"


class Runs:
    """The pools that were found so far: those of these processes, or all of this user."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._known, self._next_scan = pids, set[tuple[object, int]](), 0.0
        self.found: list[Run] = []
        self.refused: list[str] = []  #: why others cannot be read
        for pid in pids:
            self._find(pid)
            if self.refused:
                raise ConfigError(self.refused[0])
            if all(run.pid != pid for run in self.found):
                raise ConfigError(
                    f"process {pid} has no sampler or vector environment with workers: give the PID of a main process"
                )

    def _find(self, pid: int) -> None:
        """Note the pools of this process that are new."""
        try:
            for path in about.files_of(pid):
                with suppress(Exception):  # it cannot be read, or not yet
                    # On a disk, a new file may get the number of a removed one.
                    if (key := (pid if system.OPENS_OTHERS else path, os.stat(path).st_ino)) not in self._known:
                        self._add(pid, path)
                        self._known.add(key)
        except ConfigError as error:
            self.refused += {str(error)} - {*self.refused}
        except PermissionError:
            raise ConfigError(f"process {pid} is another user's: only that user and root see what it does") from None
        except (OSError, OverflowError):
            raise ConfigError(f"there is no process {pid}") from None

    def _add(self, pid: int, path: str) -> None:
        try:
            what, memory = about.RunMemory.read(path)
            if what["pid"] == pid:  # workers and forks have it open too
                self.found.append(Run(pid, what, memory))
        except ConfigError as error:
            self.refused += {str(error)} - {*self.refused}

    def look(self) -> list[dict[str, Any]]:
        """What `--json` prints of each run."""
        began = time.monotonic()
        if began >= self._next_scan:
            for pid in self._pids or psutil.pids():
                with suppress(ConfigError):  # it has ended, or is another user's
                    self._find(pid)
            self._next_scan = began + max(_SCAN_SECONDS, (time.monotonic() - began) / _SCAN_SHARE)
        self.found = [run for run in self.found if not run.ended or began - run.ended < _KEPT_SECONDS]
        return [run.look() for run in self.found]


def frame(found: Sequence[dict[str, Any]], width: int = _NARROW) -> str:
    """One frame, as text, for a terminal of so many columns."""
    lines, columns = [], [i for i in range(len(_COLUMNS)) if width >= _NARROW or i not in _LEFT_OUT]
    for run in found:
        has_ended, up = run["main"] == "has ended", divmod(int(run["seconds"]), 60)
        sizes = f"T={run['batch_T']} B={run['batch_B']}  itr {run['itr']}" if run["batch_T"] else f"B={run['batch_B']}"
        rate = "has ended" if has_ended else f"{run['steps_per_second']:,.0f} steps/s"
        lines += [f"{run['kind']} pid {run['pid']} {sizes}  {rate}  up {up[0]}:{up[1]:02}  {run['command'][:60]}"]
        lines += [] if has_ended else [f"main process: {run['main']}"]
        lines += [f"{' '.join(_COLUMNS[i] for i in columns)}  doing"]
        rows = sorted(run["workers"], key=lambda row: -row["silent"] if len(run["workers"]) > _MOST_ROWS else 0)
        for row in rows[:_MOST_ROWS]:
            shares, envs = [f"{share:.0%}" for share in row["shares"].values()], range(*row["env_ranks"])
            cells = [row["worker"], row["pid"], span(envs) if envs else "-", f"{row['steps_per_second']:,.0f}", *shares]
            cells += [row["restarts"], f"{row['rss'] / 2**20:,.0f}"]
            waits = row["progress"]["phase"] == "REQUESTING"  # for other workers, or for the server
            doing = f"{row['doing']} for {row['silent']:.1f} s" if row["silent"] >= 0.1 else row["doing"]
            doing += "  <- NO PROGRESS" if row["silent"] >= _SILENT and not waits else ""
            doing += "  <- ITS PROCESS HAS ENDED" if row["pid"] and not (row["rss"] or has_ended) else ""
            lines += [" ".join(f"{cells[i]!s:>{len(_COLUMNS[i])}}" for i in columns) + f"  {doing}"]
        lines += [f"... and {len(rows) - _MOST_ROWS} more, which made progress later"] * (len(rows) > _MOST_ROWS) + [""]
    return "\n".join(lines).rstrip() or _NOTHING


def run(args: argparse.Namespace, panel: Any = None) -> int:
    """Show what runs, and the workers that this `panel` knows. Returns the exit status."""
    interval = min(seconds("interval", args.interval), 1e6)
    runs = Runs(args.pid)
    if args.stacks is not None or args.trace:
        runs.look()
        if not runs.found:
            print("\n".join([_NOTHING, *runs.refused]), file=sys.stderr)
            return 1
        return _trace(runs, args.trace) if args.trace else _stacks(runs, args.stacks)
    is_terminal = sys.stdout.isatty()
    is_live = is_terminal and os.environ.get("TERM", "dumb") != "dumb" and not (args.once or args.json)
    runs.look()
    time.sleep(min(0.5, interval))
    while True:
        found = runs.look()
        if args.json:
            more = {} if panel is None else {"workers": panel.stats()}
            text = json.dumps({"time": time.time(), "runs": found, "refused": runs.refused, **more})
        else:
            text = frame(found, shutil.get_terminal_size().columns if is_terminal else _NARROW)
            text = "\n\n".join([*([panel.table()] if panel else []), text, *runs.refused])
        print(_CLEAR * is_live + text, flush=True)
        if args.once or (args.pid and all(run.ended for run in runs.found)):
            return int(not found and panel is None)
        time.sleep(interval)


def _stacks(runs: Runs, ranks: Sequence[int]) -> int:
    chosen = [(run, plan) for run in runs.found for plan in run.plans if not ranks or plan.worker_rank in ranks]
    if missing := {*ranks} - {plan.worker_rank for _, plan in chosen}:
        raise ConfigError(f"there is no worker {min(missing)}: give PID before --stacks, and ranks of workers after it")
    for run, plan in chosen:
        print(run.stack(plan))
    return 0


def _trace(runs: Runs, file: str) -> int:
    """All runs in one file, on one clock. They need not help, so their main processes may hang."""
    from penstock.workers import tracing

    names, found = ("version", "kind", "pid", "batch_T", "batch_B", "workers"), []
    for run in runs.found:
        facts = {name: run.what[name] for name in names}
        found.append(tracing.read(run.arrays, facts, is_over=run.ended is not None))
    path = tracing.write(file, found)
    print(f"{path} has the last batches of {len(found)} samplers or vector environments: open it in ui.perfetto.dev")
    return 0
