"""What `penstock top` costs the run that it shows: the same sampler alone, and with a frame of `top` each second.

    python benchmarks/top.py --workers 2

The turns alternate, in random order; while "alone" has its turn, `top` is stopped. "alone again" shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading

from clocks import cpu_clocks
from turns import machine, show, take_turns
from workloads import ENV, ActorCritic

from penstock import CategoricalPgAgent, ParallelSampler


class Turn:
    """The sampler, beside a `top` that runs or is stopped."""

    now: Turn | None = None
    used = 0.0  # CPU seconds of top, from its start on

    def __init__(self, sampler: ParallelSampler, top: subprocess.Popen[bytes], signal_of_turn: int) -> None:
        self._sampler, self._top, self._signal, self._itr = sampler, top, signal_of_turn, 0

    def batch(self) -> int:
        """Collect one batch; returns its environment steps."""
        if Turn.now is not self:
            Turn.now = self
            self._top.send_signal(self._signal)
        self._sampler.obtain_samples(self._itr)
        self._itr += 1
        return self._sampler.batch_T * self._sampler.batch_B

    def close(self) -> None:
        Turn.used = max(Turn.used, *cpu_clocks([self._top.pid]).values(), 0.0)
        self._top.kill()
        self._top.wait()
        self._sampler.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two frames of top")
    parser.add_argument("--repeats", type=int, default=20, help="turns of each")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn, at least")
    parser.add_argument("--json", help="write the machine and all turns to this file")
    arguments = parser.parse_args()
    sampler = ParallelSampler(ENV, batch_T=128, batch_B=32, n_workers=arguments.workers)
    sampler.initialize(CategoricalPgAgent(ActorCritic), seed=0)
    command = [sys.executable, "-m", "penstock", "top", str(os.getpid()), "--json", f"--interval={arguments.interval}"]
    top = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert top.stdout is not None
    top.stdout.readline()  # it has begun
    reader = threading.Thread(target=top.stdout.read)
    reader.start()
    signals = {"alone": signal.SIGSTOP, "beside top": signal.SIGCONT, "alone again": signal.SIGSTOP}
    contestants = {name: Turn(sampler, top, number) for name, number in signals.items()}
    before = cpu_clocks([top.pid])[top.pid]
    figures = take_turns(contestants, arguments.repeats, arguments.seconds)
    reader.join()
    top.stdout.close()
    show(f"ParallelSampler, {arguments.workers} workers; load {os.getloadavg()[0]:.1f}", figures, "alone")
    cpu = (Turn.used - before) / (arguments.repeats * arguments.seconds)
    print(f"top has used {1e3 * cpu:.2f} ms of CPU time in each second of its turns")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**machine(), "results": figures}, file, indent=2)


if __name__ == "__main__":
    main()
