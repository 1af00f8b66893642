"""`penstock top`: what the workers of running samplers and vector environments do, seen from another process.

It reads the control blocks that workers/about.py lets it find. What it reads may be half-written, or may be left of a
worker that has crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock import system
from penstock.arguments import seconds
from penstock.buffers.descriptors import InheritedFd
from penstock.buffers.shared import NamedMemory
from penstock.errors import ConfigError
from penstock.workers import about
from penstock.workers.control import PID, ControlBlock, Phase
from penstock.workers.failures import WorkerStatus
from penstock.workers.handle import StackFile, status_of
from penstock.workers.plan import WorkerPlan, span

HELP = "show what the workers of running samplers and vector environments do"
_DESCRIPTION = """
Show what the workers of the samplers and vector environments do that run on this machine as this user. A SerialSampler
has no workers, so it is not shown. See docs/see.md.
"""
_STATUSES = """
exit status: 0 if all is well; 1 if nothing was found; 2 if the arguments are wrong; 130 after Ctrl-C.
"""
_NOTHING = "no sampler or vector environment of this user has workers on this machine"
_SILENT = 5.0  # seconds without progress after which a worker is marked
_IDLE = (Phase.WAITING, Phase.SERVING, Phase.CLOSED)
_SCAN_SECONDS, _SCAN_SHARE = 3.0, 0.05  # how often it looks for new runs, and how much of its time that may take
_KEPT_SECONDS = 60.0  # how long a run is shown that has ended
_NARROW, _MOST_ROWS = 100, 40
_WIDTHS = {
    "worker": 6,
    "pid": 8,
    "envs": 10,
    "steps/s": 9,
    "acting": 6,
    "stepping": 8,
    "idle": 5,
    "restarts": 8,
    "MiB": 6,
}
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description, parser.epilog = _DESCRIPTION, _STATUSES
    add = parser.add_argument
    add("pid", type=int, nargs="*", metavar="PID", help="only the runs of these main processes")
    add("--once", action="store_true", help="print one frame, of half a second, and end")
    add("--json", action="store_true", help="print each frame as one line of JSON")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between two frames (1)")
    add("--stacks", type=int, nargs="*", metavar="RANK", help="print the stacks of these workers, or of all, and end")
    add("--trace", metavar="FILE", help="write the last batches as a trace for Perfetto, and end")
    add("--join", metavar="FILE", help="show the workers of a distributed experiment too: its connection file")


class Watched:
    """One pool of another process. When the process has ended, what it has written last can still be read."""

    def __init__(self, pid: int, what: dict[str, Any], memory: NamedMemory) -> None:
        self.pid, self.what = pid, what
        self.arrays = memory.arrays
        self.control = ControlBlock.__new__(ControlBlock)
        self.control.__setstate__(memory)
        self.plans = [
            WorkerPlan(
                worker_rank=each["rank"],
                columns=range(*each["columns"]),
                env_ranks=range(*each["env_ranks"]),
                cpus=tuple(each["cpus"]),
                server_name=each["server"],
            )
            for each in what["workers"]
        ]
        self.ended: float | None = None  #: when its end was seen
        watch = system.watch_end(pid)
        self._watch = None if watch is None else InheritedFd(watch)
        self._before: dict[int, Any] = {}
        self._moves: dict[int, Any] = {}
        self.look()  # what cannot be read raises here

    def pid_of(self, rank: int) -> int:
        """The process of this worker; 0 while it starts."""
        return max(0, int(self.arrays.n_results[rank, PID]))

    def look(self) -> dict[str, Any]:
        """What `--json` prints. Rates and shares are of the time since the last look."""
        now, last = time.monotonic(), int(self.control.opened[0])
        sizes = {plan.worker_rank: system.rss(self.pid_of(plan.worker_rank)) for plan in self.plans}
        if self.ended is None and self._has_ended(sizes):
            self.ended = now
        rows = [self._row(plan, now, sizes[plan.worker_rank]) for plan in self.plans]
        n_busy = len(self.control.pending(len(rows)))
        main = "waits for {} of {} workers" if n_busy else "works, while all {1} workers wait"
        return {
            "pid": self.pid,
            "kind": self.what["kind"],
            "command": self.what["command"],
            "batch_T": self.what["batch_T"],
            "batch_B": self.what["batch_B"],
            "main": "has ended" if self.ended else main.format(n_busy, len(rows)),
            "has_ended": self.ended is not None,
            "seconds": round((self.ended or now) - self.what["began"], 1),
            "itr": self.control.command(0, last).itr,
            "opening": last,
            "steps_per_second": round(sum(row["steps_per_second"] for row in rows), 1),
            "workers": rows,
        }

    def _has_ended(self, sizes: dict[int, int]) -> bool:
        """Whether the process has ended, or has closed this pool and all workers have ended."""
        if self._watch is None:
            is_gone = status_of(self.pid) in ("", "zombie", "dead")
        else:
            is_gone = bool(select.select([self._watch], [], [], 0)[0])
        return is_gone or (self.control.quit and not any(sizes.values()))

    def status(self, plan: WorkerPlan) -> WorkerStatus:
        """What this worker is doing. Raises `ValueError` for a phase that does not exist."""
        return WorkerStatus(plan, self.pid_of(plan.worker_rank), self.control.snapshot(plan.worker_rank))

    def _row(self, plan: WorkerPlan, now: float, size: int) -> dict[str, Any]:
        rank, (first, *_) = plan.worker_rank, (*plan.env_ranks, None)
        row = {"worker": rank, "name": plan.name, "pid": self.pid_of(rank), "cpus": plan.cpus}
        row |= {"env_ranks": [plan.env_ranks.start, plan.env_ranks.stop], "restarts": self.control.generation(rank)}
        try:
            status = self.status(plan)
        except ValueError:  # what a crash has left
            nothing = dict.fromkeys(("steps_per_second", "acting", "stepping", "idle", "silent"), 0.0)
            return row | nothing | {"phase": "", "env_rank": first, "t": -1, "doing": "unreadable", "rss": size}
        seen, is_over = status.progress, self.ended is not None
        is_idle = seen.phase in _IDLE
        steps = seen.steps + max(0, seen.t) * len(plan.env_ranks) * (not is_idle)  # `steps` is of complete batches
        waiting = seen.waiting + (now - seen.heartbeat) * (is_idle and not is_over)
        moved = seen.phase, seen.t, seen.env_rank, seen.batches  # within a row, the heartbeat stays
        before, since = self._moves.get(rank, (moved, seen.heartbeat))
        self._moves[rank] = moved, since if moved == before else now
        new = now, steps, seen.acting, seen.stepping, waiting
        old = self._before.get(rank, (self.what["began"], 0, 0.0, 0.0, 0.0))
        self._before[rank] = new
        passed, n, acting, stepping, idle = (max(0.0, b - a) for a, b in zip(old, new, strict=True))
        if not acting + stepping:  # no batch has ended since: the shares of all batches
            acting, stepping = seen.acting, seen.stepping
        idle = min(1.0, idle / passed) if passed else 0.0
        busy = (1.0 - idle) / ((acting + stepping) or 1.0)
        silent = 0.0 if is_idle or is_over else max(0.0, now - max(seen.heartbeat, self._moves[rank][1]))
        figures = {"steps_per_second": n / passed if passed else 0.0, "steps": seen.steps, "batches": seen.batches}
        figures |= {"acting": busy * acting, "stepping": busy * stepping, "idle": idle, "silent": silent}
        figures |= {"version": self.control.version(rank), "rss": size}
        row |= {"phase": seen.phase.name.lower(), "env_rank": seen.env_rank, "t": seen.t, "doing": status.doing}
        return row | {key: round(value, 4) for key, value in figures.items()}

    def stack(self, plan: WorkerPlan) -> str:
        """The Python stack of this worker, under a line that names it. Nothing else happens to the worker."""
        status = self.status(plan)
        try:
            inode = self.what["workers"][self.plans.index(plan)]["stacks"]
            mine = [path for path in system.files_of(status.pid, "penstock-stack") if os.stat(path).st_ino == inode]
            if not mine:
                raise OSError("it has not begun yet")
            file = StackFile(os.open(mine[0], os.O_RDONLY | os.O_CLOEXEC))
            text = file.answer_to(lambda: system.ask_stacks(status.pid)) or "it does not answer"
        except OSError as error:
            text = f"no stack: {error}"
        return f"{self.what['kind']} pid {self.pid}, {status}, {status.doing}:\n{text}\n"


class Runs:
    """The pools that were found so far: those of these processes, or all of this user."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids: Sequence[int | None] = pids or [None]
        self.found: list[Watched] = []
        self.refused: list[str] = []
        self._known, self._next_scan = set[tuple[int, int]](), 0.0
        for pid in pids:
            self._require(pid)
        self.find()

    def _require(self, pid: int) -> None:
        """Raise `ConfigError` if this process has no pool that can be shown."""
        try:
            owners = [self._add(*place) for place in about.paths(pid)]
        except PermissionError:
            raise ConfigError(f"process {pid} is another user's: only that user and root see what it does") from None
        except OSError:
            raise ConfigError(f"there is no process {pid}") from None
        if self.refused:
            raise ConfigError(self.refused[0])
        if pid not in owners:
            other = next((owner for owner in owners if owner), None)
            hint = (
                "give the PID of the main process" if other is None else f"it is one of process {other}: give that PID"
            )
            raise ConfigError(f"process {pid} has no sampler or vector environment with workers: {hint}")

    def find(self) -> None:
        """Look for new runs, if it is time."""
        if (began := time.monotonic()) >= self._next_scan:
            for pid in self._pids:
                with suppress(OSError):  # it has ended
                    for place in about.paths(pid):
                        self._add(*place)
            self._next_scan = began + max(_SCAN_SECONDS, (time.monotonic() - began) / _SCAN_SHARE)

    def _add(self, pid: int, path: str) -> int:
        """Note this control block, if it is new and is that of a pool of `pid`: workers and forks have it open too.
        Returns whose it is; 0 if it cannot be read."""
        with suppress(*_UNREADABLE):
            key = pid, os.stat(path).st_ino
            if key in self._known:
                return pid
            what, memory = about.read(path)
            if what["pid"] == pid:
                if memory is None:
                    self.refused.append(
                        f"process {pid} runs penstock {what['version']}, whose control block (format {what['format']}) "
                        f"this version cannot read: use `penstock top` of the Python of that process"
                    )
                else:
                    self.found.append(Watched(pid, what, memory))
            self._known.add(key)
            return int(what["pid"])
        return 0

    def look(self) -> list[dict[str, Any]]:
        """What `--json` prints of each run."""
        self.find()
        now = time.monotonic()
        self.found = [run for run in self.found if run.ended is None or now - run.ended < _KEPT_SECONDS]
        return [run.look() for run in self.found]


def frame(found: Sequence[dict[str, Any]], columns: int = 200) -> str:
    """One frame, as text, for a terminal of so many columns."""
    names = [name for name in _WIDTHS if columns >= _NARROW or name not in ("pid", "restarts", "MiB")]
    lines = []
    for run in found:
        minutes, rest = divmod(int(run["seconds"]), 60)
        sizes = (
            f" T={run['batch_T']} B={run['batch_B']}  itr {run['itr']}" if run["batch_T"] else f" B={run['batch_B']}"
        )
        rate = "has ended" if run["has_ended"] else f"{run['steps_per_second']:,.0f} steps/s"
        lines += [f"{run['kind']} pid {run['pid']}{sizes}  {rate}  up {minutes}:{rest:02}  {run['command'][:60]}"]
        lines += [f"main process: {run['main']}"] * (not run["has_ended"])
        lines.append(" ".join(f"{name:>{_WIDTHS[name]}}" for name in names) + "  doing")
        rows = run["workers"]
        for row in sorted(rows, key=lambda row: -row["silent"])[:_MOST_ROWS] if len(rows) > _MOST_ROWS else rows:
            cells = {
                "worker": str(row["worker"]),
                "pid": str(row["pid"]),
                "envs": span(range(*row["env_ranks"])) if row["env_ranks"][0] < row["env_ranks"][1] else "-",
                "steps/s": f"{row['steps_per_second']:,.0f}",
                **{name: f"{row[name]:.0%}" for name in ("acting", "stepping", "idle")},
                "restarts": str(row["restarts"]),
                "MiB": f"{row['rss'] / 2**20:,.0f}",
            }
            silent = f" for {row['silent']:.1f} s" if row["silent"] >= 0.1 else ""
            mark = "  <- NO PROGRESS" if row["silent"] >= _SILENT else ""
            if row["pid"] and not row["rss"] and not run["has_ended"]:
                mark = "  <- ITS PROCESS HAS ENDED"
            lines.append(
                " ".join(f"{cells[name]:>{_WIDTHS[name]}}" for name in names) + f"  {row['doing']}{silent}{mark}"
            )
        if len(rows) > _MOST_ROWS:
            lines.append(f"... and {len(rows) - _MOST_ROWS} more, which made progress more recently")
        lines.append("")
    return "\n".join(lines).rstrip() if lines else _NOTHING


def run(args: argparse.Namespace, panel: Any = None) -> int:
    """Show what runs, and the workers that this `panel` knows. Returns the exit status."""
    seconds("interval", args.interval)
    runs = Runs(args.pid)
    if args.stacks is not None or args.trace:
        if not runs.found:
            print("\n".join([_NOTHING, *runs.refused]), file=sys.stderr)
            return 1
        return _trace(runs, args.trace) if args.trace else _stacks(runs, args.stacks)
    is_live = sys.stdout.isatty() and not (args.once or args.json)
    screen = None
    with suppress(ImportError):
        if is_live:
            from rich.live import Live
            from rich.text import Text

            screen = Live(screen=True, auto_refresh=False)
            screen.start()
    text = ""
    try:
        time.sleep(min(0.5, args.interval))
        while True:
            found = runs.look()
            if args.json:
                more = {} if panel is None else {"workers": panel.stats()}
                text = json.dumps({"time": time.time(), "runs": found, "refused": runs.refused, **more})
            else:
                columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 2 * _NARROW
                parts = [frame(found, columns), *runs.refused]
                text = "\n\n".join(parts if panel is None else [panel.table(), *parts])
            if screen is None:
                print(f"\x1b[H\x1b[J{text}" if is_live else text, flush=True)
            else:
                screen.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
            if args.once or (args.pid and all(each["has_ended"] for each in found)):
                return int(not found and panel is None)
            time.sleep(args.interval)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `head`, for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if screen is not None:
            screen.stop()
            print(text)


def _stacks(runs: Runs, ranks: Sequence[int]) -> int:
    if not system.OPENS_OTHERS:
        raise ConfigError("--stacks needs the /proc of Linux: here, py-spy dump --pid PID shows a stack")
    chosen = [(run, plan) for run in runs.found for plan in run.plans if not ranks or plan.worker_rank in ranks]
    if missing := {*ranks} - {plan.worker_rank for _, plan in chosen}:
        raise ConfigError(f"there is no worker {min(missing)}: give PID before --stacks, and ranks of workers after it")
    for run, plan in chosen:
        print(run.stack(plan))
    return 0


def _trace(runs: Runs, file: str) -> int:
    raise NotImplementedError
