"""A contestant of `peers.py` in its own process tree, which is stopped while others have their turn."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from clocks import cpu_clocks, used

Turn = dict[str, float]

# ---- in the contestant's process -------------------------------------------------------------------


def one_turn(contestant: Any, seconds: float, pause: float, kind: str, *, whole_batches: bool) -> Turn:
    """Steps for `seconds`. The pauses of `pause` seconds after each batch do not count."""
    if hasattr(contestant, "turn") and not whole_batches:
        turn: Turn = contestant.turn(seconds)
        return {**turn, "pause_cpu": 0.0}
    steps, took, pause_cpu, slowest = 0, 0.0, 0.0, 0.0
    while took < seconds:
        began = time.perf_counter()
        steps += contestant.advance()
        span = time.perf_counter() - began
        took, slowest = took + span, max(slowest, span)
        if pause:
            pause_cpu += rest(pause, kind)
    return {"steps": steps, "rate": steps / took, "pause_cpu": pause_cpu, "longest_batch": slowest}


def rest(seconds: float, kind: str) -> float:
    """What a learner does between two batches: it sleeps or works. Returns the CPU seconds that this took."""
    before = time.process_time()
    if kind == "sleep":
        time.sleep(seconds)
    else:
        import numpy as np

        matrix, end = np.ones((64, 64), np.float32), time.perf_counter() + seconds
        while time.perf_counter() < end:
            matrix @ matrix
    return time.process_time() - before


def serve(work_name: str, name: str, whole_batches: bool, module: str = "peer_adapters") -> None:
    """Make the contestant, and run one turn for each line of stdin, which has the arguments of `one_turn` as JSON.
    `module` has the works and the contestants."""
    # Not stdout: the contestant's processes inherit it, and an environment may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        import importlib
        from dataclasses import replace

        import torch

        adapters = importlib.import_module(module)
        torch.set_num_threads(1)  # more threads would disturb the environments' processes
        work = adapters.WORKS[work_name]
        if whole_batches:
            work = replace(work, rows=work.T)
        began = time.perf_counter()
        contestant = adapters.CONTESTANTS[name][0](work)
        start_seconds = time.perf_counter() - began
        one_turn(contestant, 0.05, 0.0, "sleep", whole_batches=whole_batches)
    except Exception as error:  # a peer may raise anything: the table says what
        return answer({"missing": f"{type(error).__name__}: {error}"})
    answer({"start_seconds": start_seconds})
    for line in sys.stdin:
        answer(one_turn(contestant, **json.loads(line), whole_batches=whole_batches))
    contestant.close()
    return None


# ---- in the process that compares ------------------------------------------------------------------


_EVENTS = {  # in /proc/<pid>/task/<tid>/status and sched
    "voluntary_ctxt_switches": "sleeps",
    "se.nr_migrations": "migrations",
}


def scheduling(pids: Sequence[int]) -> dict[str, int]:
    """How often a thread of these processes slept, and how often one came to another CPU. Kernels without
    CONFIG_SCHED_DEBUG do not count the second: then it is 0."""
    found = dict.fromkeys(_EVENTS.values(), 0)
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*")]
    for file in (task / name for task in tasks for name in ("status", "sched")):
        with contextlib.suppress(OSError):  # the thread has ended
            for line in file.read_text().splitlines():
                field, _, value = line.partition(":")
                if (event := _EVENTS.get(field.strip())) is not None:
                    found[event] += int(value)
    return found


def ready_seconds(pids: Sequence[int]) -> float:
    """How long threads of these processes were ready to run, but had no CPU."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(int(file.read_text().split()[1]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return total / 1e9


def machine_seconds() -> tuple[float, float]:
    """Of all CPUs together, seconds in which they ran programs, and in which the host took them away (steal)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


class Machine:
    """What other programs use from now on. Programs at idle priority (SCHED_IDLE) hardly disturb, and do not count."""

    def __init__(self) -> None:
        self._began, self._idle_class, self._before = time.perf_counter(), idle_class_clocks(), machine_seconds()

    def taken(self, own: float) -> tuple[float, float]:
        """CPUs that other programs used, and CPUs that the host took away, if this program used `own` CPU seconds."""
        took, (busy, steal) = time.perf_counter() - self._began, machine_seconds()
        others = busy - self._before[0] - own - used(self._idle_class, idle_class_clocks(self._idle_class))
        return max(0.0, others) / took, max(0.0, steal - self._before[1]) / took


def idle_class_clocks(pids: Iterable[int] | None = None) -> dict[int, float]:
    """CPU seconds so far of the processes at idle priority; of these `pids`, if given."""
    found = []
    for pid in psutil.pids() if pids is None else pids:
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getscheduler(pid) == os.SCHED_IDLE:
                found.append(pid)
    return cpu_clocks(found)


def await_calm(seconds: float) -> None:
    """Wait until other programs use less than a tenth of a CPU, at most for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        machine = Machine()
        time.sleep(0.1)
        if sum(machine.taken(0.0)) < 0.1:
            return


class Contestant:
    """The process tree of one contestant. It is stopped, except in its turns."""

    def __init__(self, work: str, name: str, limit: float, whole_batches: bool, script: str = "") -> None:
        self.name, self._limit = name, limit
        script = script or str(Path(__file__).with_name("peers.py"))
        command = [sys.executable, script, "--serve", work, name]
        # All contestants may use all CPUs, so they claim none.
        environ = {"PENSTOCK_CPU_FOLDER": os.devnull}
        self._process = subprocess.Popen(
            [*command, *(["--whole-batches"] if whole_batches else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if os.environ.get("PEERS_QUIET") else None,
            env={**os.environ, **environ},
            start_new_session=True,
        )
        self._buffer = b""
        hello = self._read()
        self.missing: str | None = hello.get("missing")  #: why it takes no part (any more)
        self.start_seconds: float = hello.get("start_seconds", 0.0)  #: until its workers were ready
        if self.missing is None:
            self._signal(signal.SIGSTOP)
        else:
            self.close()

    def _tree(self) -> list[int]:
        main = psutil.Process(self._process.pid)
        return [main.pid, *(process.pid for process in main.children(recursive=True))]

    def _signal(self, number: int) -> list[int]:
        """Signal the whole tree. Returns its process ids."""
        try:
            pids = self._tree()
        except psutil.NoSuchProcess:
            return []
        for pid in pids if number == signal.SIGSTOP else reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def _read(self) -> Any:
        """The next answer, or {"missing": reason} after `limit` seconds or at the end of the process."""
        assert self._process.stdout is not None
        descriptor, end = self._process.stdout.fileno(), time.monotonic() + self._limit
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                return {"missing": f"no answer within {self._limit:g} s"}
            if not (part := os.read(descriptor, 65536)):
                return {"missing": "its process ended"}
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def turn(self, **how: Any) -> Turn | None:
        """Let it run for one turn. None if it failed; then `missing` says why."""
        pids = self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        own, before, ready = sum(cpu_clocks(pids).values()), scheduling(pids), ready_seconds(pids)
        machine = Machine()
        began = time.perf_counter()
        self._process.stdin.write((json.dumps(how) + "\n").encode())
        self._process.stdin.flush()
        turn: Turn = self._read()
        took = time.perf_counter() - began
        pids = self._signal(signal.SIGSTOP)
        if "missing" in turn:
            self.missing = str(turn["missing"])
            self.close()
            return None
        cpu = sum(cpu_clocks(pids).values()) - own
        others, steal = machine.taken(cpu)
        events = {name: n - before[name] for name, n in scheduling(pids).items()}
        return {
            **turn,
            "cpu_us": (cpu - turn.pop("pause_cpu")) / turn["steps"] * 1e6,
            "sleeps": events["sleeps"] / turn["steps"] * 1000,
            "migrations": events["migrations"] / turn["steps"] * 1000,
            "steal": steal,
            # What others used while this contestant's processes did not wait for a CPU did not disturb them.
            "others": min(others, (ready_seconds(pids) - ready) / took),
        }

    def memory(self) -> float:
        """The megabytes that only one process has (unique set size), the mean over all but the main process."""
        own = [psutil.Process(pid).memory_full_info().uss / 2**20 for pid in self._tree()[1:]]
        return sum(own) / max(1, len(own))

    def close(self) -> None:
        """End the tree: first its main process, then what is left."""
        pids = self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)  # TorchRL's take more than 5 s on a busy machine, and leave semaphores if killed
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        for process in psutil.wait_procs(left, 5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
