"""How much faster do two learners train than one, where learning is the limit?

    python benchmarks/cluster_learners.py --turns 3

An Experiment over sockets with one trainer, then with two, in turns. Each step of a trainer takes `--step-ms`
milliseconds, in which it sleeps: so this machine needs no more CPUs for two. The gradients of a small model are
averaged at each step. The rate is of pieces that were trained on, by both trainers together. Prints it for each turn,
the CPU time of all processes per piece, and the ratio. Fails if the parameters of the two differ after any step of
which both have reported them. "Busy" is the share of the time that the trainers spend in steps: if it is far below
100 %, learning is not the limit, and the ratio says little: take longer steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import psutil
import torch
from workloads import ActorCritic

from penstock import CategoricalPgAgent, SerialSampler
from penstock.distributed import Actors, Batch, Experiment, Policies, RunState, Training


class SlowTrainer:
    """Trains the value for one step, and sleeps for the rest of its time."""

    def __init__(self, seconds: float, agent: Any) -> None:
        torch.set_num_threads(1)
        self.agent, self.seconds = agent, seconds
        self.optimizer = torch.optim.SGD(agent.model.parameters(), 1e-3)

    def step(self, batch: Batch) -> Mapping[str, float]:
        until = time.monotonic() + self.seconds
        loss = (self.agent.evaluate(batch.samples).value - batch.samples.env.reward).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        time.sleep(max(0.0, until - time.monotonic()))
        total = sum(parameter.double().sum().item() for parameter in self.agent.model.parameters())
        return {"loss": loss.item(), "total": total}


def turn(count: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Pieces per second, seconds of CPU time per piece, and the share of the time in steps."""
    totals = [dict[int, float]() for _ in range(count)]  # of the parameters of each trainer, by version

    def note_totals(state: RunState, is_over: bool) -> bool:
        for rank, seen in enumerate(totals):
            figures = state.workers[f"trainer/{rank}"]
            if "total" in figures:
                seen[int(figures["version"])] = figures["total"]
        return is_over

    experiment = Experiment(
        "learners",
        partial(CategoricalPgAgent, ActorCritic),
        Actors(2, partial(SerialSampler, "CartPole-v1", batch_T=16, batch_B=4), inference="policy"),
        Training(partial(SlowTrainer, args.step_ms / 1000), batch=args.batch, count=count),
        Policies(1),
        seed=0,
    )
    with experiment.run(wire="zmq") as run:
        first = run.wait(
            lambda state: note_totals(state, state.version >= 4), timeout=120 + args.step_ms / 100
        ).version  # warm
        began, cpu = time.monotonic(), used_cpu()
        last = run.wait(lambda state: note_totals(state, time.monotonic() - began >= args.seconds)).version
        wall, cpu = time.monotonic() - began, used_cpu() - cpu
        if first < 4 or last == first or any(run.restarts.values()):
            raise RuntimeError(
                f"the trainers made steps {first} to {last}, restarts {run.restarts}: is the machine busy?"
            )
    common = set.intersection(*map(set, totals))
    if not common or any(len({seen[version] for seen in totals}) > 1 for version in common):
        raise RuntimeError(f"the parameters of the trainers differ: {totals}")
    pieces = (last - first) * args.batch * count
    return pieces / wall, cpu / pieces, (last - first) * args.step_ms / 1000 / wall


def used_cpu() -> float:
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="of each (3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn (10)")
    parser.add_argument("--step-ms", type=float, default=500.0, help="of one step of a trainer (500)")
    parser.add_argument("--batch", type=int, default=2, help="pieces per step of a trainer (2)")
    args = parser.parse_args()
    ratios = []
    for _ in range(args.turns):
        rates = []
        for count in (1, 2):
            rate, cpu, busy = turn(count, args)
            rates.append(rate)
            print(
                f"{count} trainers {rate:7.2f} pieces/s, {1000 * cpu:6.1f} ms of CPU each, busy {busy:4.0%}", end="   "
            )
        ratios.append(rates[1] / rates[0])
        print(f"ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
