"""The rules of a collector that take more than one run to show: seeds, workers, and what is left."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.buffers import Samples
from penstock.collectors import TrajInfo
from penstock.errors import SamplerBrokenError
from penstock.samplers import AlternatingSampler, GpuSampler, ParallelSampler, Sampler, SerialSampler
from penstock.testing.rules import Violation, first_difference, leaves
from penstock.testing.traces import Setup, Trace, record

__all__ = [
    "any_number_of_workers_gives_the_same",
    "central_samplers_give_the_same",
    "every_cell_is_written",
    "nothing_is_left_over",
    "one_seed_gives_one_batch",
]

_GONE_SECONDS = 3.0  # for what is to end with the sampler


def _pairs(left: Samples, right: Samples) -> list[tuple[str, Any, Any]]:
    """The fields of two batches, side by side."""
    fields = []
    for group in ("env", "agent"):
        fields += [(f"{group}.{name}", value, right[group][name]) for name, value in left[group].items()]
    return fields


def _figures(infos: Sequence[TrajInfo]) -> list[tuple[int, float]]:
    return [(info.Length, info.Return) for info in infos]


def one_seed_gives_one_batch(first: Trace, second: Trace) -> None:
    """Two runs with the same seed give the same batches and trajectories."""
    remedy = "draw what is random from self.streams.rngs(...) or from generators seeded by self.streams.env_seeds(...)"
    for one, other in zip(first.batches, second.batches, strict=True):
        difference = first_difference(_pairs(one.samples, other.samples))
        if difference is not None:
            raise Violation(f"{difference} in two runs with one seed, itr={one.itr}", remedy)
        if _figures(one.infos) != _figures(other.infos):
            raise Violation(f"other trajectories in two runs with one seed, itr={one.itr}", remedy)


def every_cell_is_written(setup: Setup, clean: Trace) -> None:
    """Every field of every valid cell is written in each batch, whatever stood there before."""
    try:
        filled = record(setup, before_batch=_fill)
    except SamplerBrokenError as error:
        raise Violation(
            f"in a buffer filled with NaN and the like beforehand: {error}", "read no row before it is written"
        ) from error
    for one, other in zip(clean.batches, filled.batches, strict=True):
        parked = ~one.samples.env.valid
        for name, left, right in _pairs(one.samples, other.samples):
            if name == "env.final_obs":  # cleared where `done` says that it was written; has a rule of its own
                continue
            flags = name in ("env.terminated", "env.truncated", "env.done", "agent.bootstrap_value")
            sides = (left, right) if flags else (_unparked(left, parked), _unparked(right, parked))
            difference = first_difference([(name, *sides)])
            if difference is not None:
                raise Violation(
                    f"{difference} (itr={one.itr}), depending on what stood in the buffer before the batch",
                    "write all fields of each row: self.act(t) and the writers of self.envs do, and self.begin_batch "
                    "clears the flags",
                )


def _unparked(value: Any, parked: Any) -> Any:
    value = value.copy()
    for _, leaf in leaves(value, ""):
        leaf[parked] = 0
    return value


def _fill(samples: Samples) -> None:
    """Overwrite all that a collector has to write, and nothing that it may carry over or is to keep."""
    last = len(samples.env.done) - 1  # of action, reward and done, this row goes to the next batch's first
    for name, field in (*samples.env.items(), *samples.agent.items()):
        # The first three are of the same memory as the fields that they precede.
        if name in ("prev_action", "prev_reward", "prev_done", "valid", "final_obs"):
            continue
        for _, leaf in leaves(field, name):
            rows = leaf[:last] if name in ("action", "reward", "done") else leaf
            rows[...] = _pattern(leaf.dtype)


def _pattern(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).max
    return dtype.kind == "b" or np.nan


def any_number_of_workers_gives_the_same(setup: Setup, n_workers: Sequence[int]) -> None:
    """ParallelSampler gives what SerialSampler gives, however the columns are spread over workers."""
    remedy = (
        "let everything hang on env_rank (self.envs.env_ranks) and not on the column's index in the worker; an agent "
        "that is not the same in batches of another shape has to be left out"
    )
    reference = _run(setup, SerialSampler)
    for n in n_workers:
        _compare(setup, reference, _run(setup, ParallelSampler, n_workers=n), f"{n} workers", remedy)


def central_samplers_give_the_same(setup: Setup) -> None:
    """GpuSampler and AlternatingSampler give what SerialSampler gives, in whatever order columns are served."""
    remedy = (
        "act by self.act(t) or self.agent.step once a row, for all columns of the worker at once, and copy what it "
        "returns before the next; check with central=False what is not for samplers whose workers hold no agent"
    )
    reference = _run(setup, SerialSampler)
    ways: tuple[tuple[str, type[Sampler], dict[str, Any]], ...] = (
        ("a GpuSampler", GpuSampler, {}),
        ("a GpuSampler with min_ready=1", GpuSampler, {"min_ready": 1}),
        ("an AlternatingSampler", AlternatingSampler, {}),
    )
    for name, cls, arguments in ways:
        _compare(setup, reference, _run(setup, cls, n_workers=2, **arguments), name, remedy)


_Run = list[tuple[Samples, list[tuple[int, float]]]]


def _compare(setup: Setup, reference: _Run, batches: _Run, where: str, remedy: str) -> None:
    for itr, ((one, infos), (other, other_infos)) in enumerate(zip(reference, batches, strict=True)):
        difference = first_difference(_pairs(one, other), close=setup.agent is not None)
        if difference is not None:
            raise Violation(f"{difference} in one process and in {where}, batch {itr}", remedy)
        if infos != other_infos:
            raise Violation(f"{infos} in one process and {other_infos} in {where}, batch {itr}", remedy)


def _run(setup: Setup, cls: type[Sampler], **arguments: Any) -> _Run:
    batches = []
    with setup.sampler(cls, **arguments) as sampler:
        sampler.initialize(setup.make_agent(), seed=setup.seed, bootstrap_value=setup.agent is None)
        for itr in range(setup.n_batches):
            _, infos = sampler.obtain_samples(itr)
            batches.append((sampler.samples_np.copy(), _figures(infos)))
    return batches


# ---- what is left --------------------------------------------------------------------------


def nothing_is_left_over(setup: Setup) -> None:
    """After shutdown no process, thread or descriptor remains that the collector has started or opened."""
    _run(setup, ParallelSampler, n_workers=1)  # first, for what it starts is for good: the fork server
    for cls in (SerialSampler, ParallelSampler):  # a central sampler's workers differ in nothing that could be left
        before, children = _holdings(), _children()
        with setup.sampler(cls, n_workers=1) as sampler:
            sampler.initialize(setup.make_agent(), seed=setup.seed)
            sampler.obtain_samples(0)
            # Grandchildren too: of what a worker leaves behind, nobody would know whose it was.
            started = [process for process in _children() if process not in children]
        del sampler
        _, alive = psutil.wait_procs(started, timeout=_GONE_SECONDS)
        remedy = "end in the environment's close what it has started; what a collector starts dies with its worker, "
        remedy += "unless it makes a session of its own"
        if alive:
            names = ", ".join(f"{' '.join(_command(process))[:80]} (pid {process.pid})" for process in alive)
            raise Violation(f"still running after shutdown: {names}", remedy)
        left = _left(before)
        if left:
            gc.collect()  # slow, so only where something is there that garbage may hold
            left = _left(before)
        if left:
            raise Violation(f"left after shutdown of a {cls.__name__}: {', '.join(left)}", "close what is opened")


def _children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.is_running()]


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:
        return ["?"]
    return command


def _left(before: Mapping[tuple[str, int], str]) -> list[str]:
    return [f"{kind} {i} ({what})" for (kind, i), what in _holdings().items() if before.get((kind, i)) != what]


def _holdings() -> dict[tuple[str, int], str]:
    """Threads and open descriptors of this process, by kind and number."""
    held = {("thread", thread.ident or 0): thread.name for thread in threading.enumerate()}
    folder = Path("/proc/self/fd")
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            what = os.readlink(entry)
        except OSError:
            continue  # the one that the listing itself had open
        if not what.startswith("/memfd:penstock"):  # the samples, which the user may hold for longer
            held["descriptor", int(entry.name)] = what
    return held
