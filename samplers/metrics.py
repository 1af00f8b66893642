"""`sampler.metrics()`: the figures of a run as a flat dict of numbers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from numbers import Real

from penstock.collectors import TrajInfo
from penstock.samplers.stats import SamplerStats, ServerStats, WorkerStats

_NEWEST = 100  # training trajectories
_KINDS = ("idle", "acting", "stepping")


class Metrics:
    """Makes the figures from `SamplerStats` and trajectories. Rates and shares are those since the call before."""

    def __init__(self, example: TrajInfo, *, has_evaluation: bool) -> None:
        """`example` is a new instance of the sampler's `traj_info_cls`. It has the names of the figures."""
        self._names = [name for name, value in vars(example).items() if name[0] != "_" and isinstance(value, Real)]
        self.training: deque[TrajInfo] = deque(maxlen=_NEWEST)  #: the newest trajectories of batches
        #: The trajectories of the last evaluation; None without evaluation environments.
        self.evaluation: Sequence[TrajInfo] | None = [] if has_evaluation else None
        self._began = self._called = time.monotonic()
        self._steps = 0
        self._seconds: dict[str, tuple[float, ...]] = {}  # at the call before, by group: of each of the kinds

    def figures(self, stats: SamplerStats, server: ServerStats | None, policy_version: int | None) -> dict[str, float]:
        """See `Sampler.metrics`."""
        now, workers = time.monotonic(), stats.workers
        steps = sum(worker.steps for worker in workers)
        seconds = now - self._called
        figures: dict[str, float] = {
            "sampler/env_steps": steps,
            "sampler/batches": min(worker.batches for worker in workers),
            "sampler/trajectories": sum(worker.trajectories for worker in workers),
            "sampler/seconds": now - self._began,
            "sampler/steps_per_second": (steps - self._steps) / seconds if seconds else 0.0,
            "sampler/policy_version": math.nan if policy_version is None else policy_version,
            "sampler/restarts": stats.restarts,
            "sampler/lost_trajectories": stats.lost_trajectories,
        }
        self._called, self._steps = now, steps
        if stats.lag is not None:
            figures["sampler/policy_lag"] = stats.lag.mean
            figures["sampler/skipped_batches"] = stats.skipped_batches
        shares = [self._shares(f"worker_{worker.worker_rank}", _seconds_of(worker)) for worker in workers]
        figures["sampler/idle_share"] = sum(next(iter(own.values())) for own in shares) / len(shares)
        for own in shares:
            figures.update(own)
        if server is not None:
            figures["server/idle_share"] = self._shares("server", (server.waiting, server.acting))["server/idle_share"]
            n_steps = sum(server.served.values())
            served = sum(n * times for n, times in server.served.items())
            figures["server/envs_per_step"] = served / n_steps if n_steps else math.nan
        figures.update(self._summary("train", self.training))
        if self.evaluation is not None:
            figures.update(self._summary("eval", self.evaluation))
        return {name: float(value) for name, value in figures.items()}

    def _shares(self, group: str, seconds: tuple[float, ...]) -> dict[str, float]:
        """The share of each kind in the time since the call before."""
        before = self._seconds.get(group, (0.0,) * len(seconds))
        self._seconds[group] = seconds
        spent = [new - old for new, old in zip(seconds, before, strict=True)]
        total = sum(spent)
        return {
            f"{group}/{kind}_share": part / total if total else 0.0 for kind, part in zip(_KINDS, spent, strict=False)
        }

    def _summary(self, group: str, infos: Iterable[TrajInfo]) -> dict[str, float]:
        infos = list(infos)
        figures: dict[str, float] = {f"{group}/trajectories": len(infos)}
        for name in self._names:
            found = [getattr(info, name, None) for info in infos]
            values = [float(value) for value in found if isinstance(value, Real)] or [math.nan]
            figures[f"{group}/{name}_mean"] = sum(values) / len(values)
            figures[f"{group}/{name}_min"], figures[f"{group}/{name}_max"] = min(values), max(values)
        return figures


def _seconds_of(worker: WorkerStats) -> tuple[float, float, float]:
    return worker.waiting, worker.acting, worker.stepping
