"""The rules of a collector that need several runs: seeds, workers, and what remains after shutdown."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from penstock import system
from penstock.collectors import TrajInfo
from penstock.errors import SamplerBrokenError
from penstock.samplers import AlternatingSampler, GpuSampler, ParallelSampler, Sampler, SerialSampler
from penstock.testing.rules import Violation, first_difference
from penstock.testing.traces import CollectedBatch, CollectorSetup, Trace, run

_EXIT_SECONDS = 3.0  # how long processes may take to exit after shutdown


# ---- the same batch ------------------------------------------------------------------------


def one_seed_gives_one_batch(first: Trace, second: Sequence[CollectedBatch]) -> None:
    """Two runs with the same seed give the same batches and trajectories."""
    remedy = (
        "draw random numbers from self.streams.rngs(...), or seed generators with self.streams.env_seeds(...); the "
        "environments must be deterministic under a seed"
    )
    _compare(first.collected, second, "in two runs with one seed", remedy)


def any_number_of_workers_gives_the_same_batch(trace: Trace, n_workers: Sequence[int]) -> None:
    """ParallelSampler gives the batches of one process, with any number of workers."""
    remedy = (
        "use env_rank (self.columns.env_ranks), not the column's index in the worker; check without an agent whose "
        "output depends on the batch size"
    )
    for n in n_workers:
        batches, where = run(trace.setup, ParallelSampler, n_workers=n), f"in one process and in {n} workers"
        _compare(trace.collected, batches, where, remedy, close=trace.setup.agent is not None)


def central_samplers_give_the_same_batch(trace: Trace) -> None:
    """GpuSampler and AlternatingSampler give the batches of one process, in whatever order they serve the
    environments."""
    remedy = (
        "call self.act(t) or self.agent.step once per row, for all columns of the worker, and copy what it returns "
        "before the next call; check with central=False if the collector does not work with central inference"
    )
    ways: tuple[tuple[str, type[Sampler], dict[str, Any]], ...] = (
        ("a GpuSampler", GpuSampler, {}),
        ("a GpuSampler with min_ready=1", GpuSampler, {"min_ready": 1}),
        ("an AlternatingSampler", AlternatingSampler, {}),
    )
    for name, cls, arguments in ways:
        batches, where = run(trace.setup, cls, n_workers=2, **arguments), f"in one process and in {name}"
        _compare(trace.collected, batches, where, remedy, close=trace.setup.agent is not None)


def _compare(
    left: Sequence[CollectedBatch], right: Sequence[CollectedBatch], where: str, remedy: str, *, close: bool = False
) -> None:
    for one, two in zip(left, right, strict=True):
        difference = first_difference(_pairs(one, two), close=close)
        figures, others = (list(map(_figures, batch.infos)) for batch in (one, two))
        if difference is None and figures != others:
            difference = f"trajectories (Length, Return, env_rank, number, agent_id, policy) {figures} and {others}"
        if difference is not None:
            raise Violation(f"{difference} {where}, itr={one.itr}", remedy)


def _figures(info: TrajInfo) -> tuple[Any, ...]:
    return info.Length, info.Return, info.env_rank, info.number, info.agent_id, info.policy


def _pairs(left: CollectedBatch, right: CollectedBatch) -> list[tuple[str, Any, Any]]:
    """The fields of two batches: name, left, right. An inference server has no values of joint agents."""
    return [
        (name if len(left.fields) == 1 else f"{policy}.{name}", field, right.fields[policy][name])
        for policy, fields in left.fields.items()
        for name, field in fields.items()
        if name in right.fields[policy]
    ]


# ---- every cell ----------------------------------------------------------------------------


def every_cell_is_written(trace: Trace) -> None:
    """Every field of every cell is written in each batch, whatever the learner has written there before."""
    try:
        filled = run(trace.setup, fills=True)
    except SamplerBrokenError as error:
        raise Violation(
            f"after the batch before was filled with NaN, True and large integers: {error}",
            "read no row before it is written",
        ) from error
    remedy = "write all fields of each row, as self.act(t) and self.step_envs(t) do; self.begin_batch clears the flags"
    for one, two in zip(trace.collected, filled, strict=True):
        if (difference := first_difference(_pairs(one, two))) is not None:
            seen = f"{difference} (itr={one.itr}), depending on what the learner wrote into the batch before"
            raise Violation(seen, remedy)


# ---- after shutdown ------------------------------------------------------------------------


def nothing_is_left_after_shutdown(setup: CollectorSetup) -> None:
    """After shutdown, no process, thread or descriptor that the collector started or opened remains."""
    run(setup, ParallelSampler, n_workers=1)  # starts the supervisor, which stays
    for cls in (SerialSampler, ParallelSampler):  # the workers of the others hold nothing more
        before, children = _holdings(), _children()
        with setup.sampler(cls, n_workers=1) as sampler:
            sampler.initialize(setup.make_agent(), **setup.start)
            sampler.obtain_samples(0)
            # Grandchildren too, listed now: after their worker has exited they cannot be found.
            started = [process for process in _children() if process not in children]
        del sampler
        _, alive = psutil.wait_procs(started, timeout=_EXIT_SECONDS)
        if alive:
            names = ", ".join(f"{_command(process)[:80]} (pid {process.pid})" for process in alive)
            raise Violation(
                f"still running after shutdown: {names}",
                "stop processes in the environment's close; a worker's processes are killed with it, except those in "
                "a new session",
            )
        left = _left(before)
        if left:
            gc.collect()  # slow, so only if an unreachable object may hold something
            left = _left(before)
        if left:
            raise Violation(f"left after shutdown of a {cls.__name__}: {', '.join(left)}", "close what is opened")


def _children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.is_running()]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "?"


def _left(before: dict[tuple[str, int], str]) -> list[str]:
    return [f"{kind} {i} ({what})" for (kind, i), what in _holdings().items() if before.get((kind, i)) != what]


def _holdings() -> dict[tuple[str, int], str]:
    """Threads and open descriptors of this process, by kind and number."""
    held = {("thread", thread.ident or 0): thread.name for thread in threading.enumerate()}
    # Not the samples: the user may hold them for longer.
    return held | {("descriptor", fd): what for fd, what in system.open_descriptors().items()}
