"""What do many workers cost their panel and their trainer? Each simulated worker is a wire over sockets of its own.

    python benchmarks/cluster_scale.py --workers 10 100 1000 --json cluster_scale.json

The workers run in a few other processes: each has a lease, follows two names, and sends ten figures. Printed for each
number of them: the share of a core that the name table's own code takes, and the whole process of the panel with it,
while `panel.stats` is read four times a second. Then a trainer, in a process of its own, publishes parameters, and all
workers follow them: its CPU time for one version, and its memory at the peak, above the state before.

This machine cannot hold the parameters of 1,000 workers. So only the first 80 keep them. The others take each
version, and drop it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from turns import machine

from penstock.distributed import ControlPanel
from penstock.distributed import wire as wires
from penstock.distributed.keys import Connection
from penstock.distributed.names import NameClient, NameTable
from penstock.distributed.parameters import ParameterClient, ParameterServer
from penstock.distributed.wire import Node

N_PROCESSES, N_FULL = 4, 80
FIGURES = {f"figure{i}": 1.5 * i for i in range(8)}


_IDLE_SECONDS = 3  # how long the trainer is watched before it publishes


class Asker:
    """Follows the parameters, and takes none of them: this machine has no memory for those of so many workers."""

    def __init__(self, names: NameClient) -> None:
        self._trainer = names.reach(names.wait("parameters/policy", 60), lost_after=float("inf"))
        self._version, self._is_asking, self.n_versions, self.n_seen = [0, 0], False, 0, 0

    def _told(self, answer: Future[Any]) -> None:
        if answer.exception() is None:
            self._version = answer.result()["version"]
            self.n_versions += 1
        self._is_asking = False

    def newer(self) -> bool | None:
        """Whether there is another version. Otherwise None."""
        if not self._is_asking:
            self._is_asking = True
            self._trainer.ask(self._version, 1e9).add_done_callback(self._told)
        self.n_seen, n_before = self.n_versions, self.n_seen
        return True if self.n_seen > n_before else None


def work(file: str, first: int, count: int, n_full: int) -> None:
    """Be `count` workers, until standard input ends. Print a dot for each version that a worker has got."""
    wires.TICK_SECONDS = 0.5  # otherwise the threads of so many workers leave this machine no time
    connection = Connection.read(file)
    clients, followers = list[tuple[int, Node, NameClient]](), list[ParameterClient | Asker]()
    for i in range(first, first + count):
        wire = connection.wire()
        names = NameClient(wire, connection.address)
        names.write(f"figures/actor/{i}", {"status": "RUNNING", "seconds": 0.0, **FIGURES})
        names.announce(f"workers/actor/{i}", wire.open("worker"))
        names.follow("streams/train")
        clients.append((i, wire, names))
    print("ready", flush=True)
    has_trainer = threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            has_trainer.set()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    next_figures, n_polls = 0.0, 0
    while True:
        if time.monotonic() > next_figures:
            next_figures, n_polls = time.monotonic() + 0.5, n_polls + 1
            for i, _, names in clients:
                names.write(f"figures/actor/{i}", {"status": "RUNNING", "seconds": n_polls / 2, **FIGURES})
        if has_trainer.is_set() and not followers:
            followers = [ParameterClient(names, "policy") for *_, names in clients[:n_full]]
            followers += [Asker(names) for *_, names in clients[n_full:]]
        n_new = sum(follower.newer() is not None for follower in followers)
        if n_new:
            print("." * n_new, flush=True)
        time.sleep(0.05)


class Meter:
    """Seconds that the calls of some methods take, by the CPU clock of the thread that calls them, without the calls
    that another meter counts."""

    running = threading.local()  # the meter that counts now, and since when

    def __init__(self, cls: type, *methods: str) -> None:
        self.seconds = 0.0
        for name in methods:
            setattr(cls, name, self._metered(getattr(cls, name)))

    def _metered(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self.running, "meter", None)
            self._switch(outer, self)
            try:
                return method(*args, **kwargs)
            finally:
                self._switch(self, outer)

        return call

    def _switch(self, before: Meter | None, after: Meter | None) -> None:
        now = time.thread_time()
        if before is not None:
            before.seconds += now - self.running.since
        self.running.meter, self.running.since = after, now


class Crowd:
    """The simulated workers, in other processes."""

    def __init__(self, file: Path, count: int) -> None:
        self.n_versions = 0
        n = min(N_PROCESSES, count)
        shares = [range(count * i // n, count * (i + 1) // n) for i in range(n)]
        command = [sys.executable, __file__, "--work", str(file)]
        self.processes = [
            subprocess.Popen(
                [*command, str(own.start), str(len(own)), str(min(len(own), N_FULL // n))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for own in shares
        ]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            threading.Thread(target=self._count, args=(process.stdout,), daemon=True).start()

    def _count(self, lines: Any) -> None:
        for line in lines:
            self.n_versions += line.count(b".")

    def follow(self) -> None:
        """Follow the trainer, which is there now."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"follow\n")
            process.stdin.flush()

    def check(self) -> None:
        """Raise `RuntimeError` if one of the processes has ended."""
        for process in self.processes:
            if process.poll() is not None:
                raise RuntimeError(f"a process of simulated workers has ended with {process.returncode}: run it again")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(count: int, seconds: float, megabytes: float, table: Meter) -> dict[str, float]:
    """The figures for `count` workers."""
    me = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trial.json"
        with ControlPanel("scale", wire="zmq", file=file) as panel:
            crowd = Crowd(file, count)
            try:
                while len(panel.stats()) < count:
                    crowd.check()
                    time.sleep(0.1)
                time.sleep(3)  # until the begin is over
                table.seconds, before, began = 0.0, sum(me.cpu_times()[:2]), time.monotonic()
                ages: list[float] = []
                while time.monotonic() - began < seconds:
                    stats = panel.stats()
                    ages += [stats[name]["age"] for name in (min(stats), max(stats))]
                    time.sleep(0.25)
                wall = time.monotonic() - began
                found = {
                    "workers": count,
                    "table [%]": 100 * table.seconds / wall,
                    "panel [%]": 100 * (sum(me.cpu_times()[:2]) - before) / wall,
                    "age of figures [s]": float(np.mean(ages)),
                }
                return {**found, **publish(file, crowd, count, megabytes)}
            finally:
                crowd.close()


def publish(file: Path, crowd: Crowd, count: int, megabytes: float) -> dict[str, float]:
    """What publishing costs a trainer, which is another process."""
    command = [sys.executable, __file__, "--train", str(file), "--megabytes", str(megabytes)]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    try:
        crowd.follow()
        for version in (1, 2, 3, 4):
            print("publish", file=trainer.stdin, flush=True)
            began = time.monotonic()
            while crowd.n_versions < count * version:
                crowd.check()
                if trainer.poll() is not None or time.monotonic() > began + 300:
                    raise RuntimeError(f"{crowd.n_versions} of {count * version} versions have come: run it again")
                time.sleep(0.01)
            wall = time.monotonic() - began
        print("end", file=trainer.stdin, flush=True)
        found: dict[str, float] = json.loads(trainer.stdout.read())
        return {**found, "until all have it [s]": wall}
    finally:
        trainer.kill()
        trainer.wait()


def train(file: str, megabytes: float) -> None:
    """Publish a version for each line of standard input: a few numbers at first, then all parameters. After the last
    one, print what these have cost."""
    connection, me, lines = Connection.read(file), psutil.Process(), queue.SimpleQueue[str]()
    wire = connection.wire()
    server = ParameterServer(wire, NameClient(wire, connection.address), "policy")
    weight = np.random.default_rng(0).standard_normal(int(megabytes * 2**20 / 8))

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    peak, own = 0, 0.0  # bytes; CPU seconds of this thread in the code of the library

    def serve(timeout: float) -> str | None:
        """Wait until there is a line."""
        nonlocal peak
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            peak = max(peak, me.memory_info().rss)
            with contextlib.suppress(queue.Empty):
                return lines.get(timeout=0.01)
        return None

    def cpu() -> float:
        """CPU seconds of the other threads, and of this one without the polls of `serve`, which take more."""
        return time.process_time() - time.thread_time() + own

    serve(60)
    server.publish(1, {"weight": weight[:10]})
    serve(300)
    before = cpu()
    serve(_IDLE_SECONDS)
    usual = (cpu() - before) / _IDLE_SECONDS  # a second
    memory, peak = me.memory_info().rss, 0  # the memory of the connections is allocated by now
    before, began = cpu(), time.monotonic()
    for version in (2, 3, 4):
        begin = time.thread_time()
        server.publish(version, {"weight": weight})
        own += time.thread_time() - begin
        serve(300)
    seconds = cpu() - before - usual * (time.monotonic() - began)
    copies = (peak - memory) / 2**20 / megabytes
    print(json.dumps({"CPU of a publish [s]": seconds / 3, "memory at its peak [copies]": copies}), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measurement of table and panel")
    parser.add_argument("--megabytes", type=float, default=10.0, help="of the parameters")
    parser.add_argument("--json", type=Path, help="write the machine and all figures to this file")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train, args.megabytes)
    if args.work:
        return work(args.work[0], *map(int, args.work[1:]))
    meter = Meter(NameTable, "add", "beat", "clear", "delete", "expire", "find")
    found = [measure(count, args.seconds, args.megabytes, meter) for count in args.workers]
    table = Table(title=f"Workers over sockets, parameters of {args.megabytes:g} MB")
    for heading in found[0]:
        table.add_column(heading, justify="right")
    for row in found:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    Console(width=140).print(table)
    if args.json:
        args.json.write_text(json.dumps({**machine(), "results": found}, indent=1), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
