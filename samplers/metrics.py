"""`sampler.metrics()`: the figures of a run as a flat dict of numbers."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

from penstock.collectors import TrajInfo
from penstock.samplers.stats import SamplerStats, ServerStats

_NEWEST = 100  # The figures are of so many trajectories; where agents share a game, of so many games.
_MOST = 2000  # But of at most so many trajectories: a game of n agents has n + 1.
_KINDS = ("idle", "acting", "stepping", "resetting")
#: The figures that a resumed run continues; the others are of this sampler. The last two are of several agents.
COUNTS = ("env_steps", "batches", "trajectories", "seconds", "agent_steps", "late_rewards")


class SamplerMetrics:
    """Makes the figures from `SamplerStats` and trajectories. Rates and shares are of the time since the last call."""

    def __init__(
        self, example: TrajInfo, policies: Sequence[str] = (), per_game: int = 1, *, has_evaluation: bool
    ) -> None:
        """`example` is a new instance of the sampler's `traj_info_cls`. Its numbers have the names of the figures.
        `policies`: where several agents share an environment, the policies that play them; `per_game` is the largest
        number of trajectories in a game."""
        self._policies, self.agent_steps = policies, 0  # steps of agents in this sampler
        self._names = [name for name, value in vars(example).items() if name[0] != "_" and isinstance(value, Real)]
        #: The newest trajectories of batches.
        self.training: deque[TrajInfo] = deque(maxlen=min(_NEWEST * per_game, _MOST))
        #: The trajectories of the last evaluation; None without evaluation environments.
        self.evaluation: Sequence[TrajInfo] | None = [] if has_evaluation else None
        self._began = self._called = time.monotonic()
        self._steps = 0.0
        self._before = dict.fromkeys(COUNTS, 0.0)  # counts of the runs that this one continues
        self._seconds: dict[str, tuple[float, ...]] = {}  # at the last call: worker or server, seconds of each kind

    def counts(self, stats: SamplerStats) -> dict[str, float]:
        """The counts of this run, with those of the runs that it continues."""
        workers, before = stats.workers, self._before
        return {
            "env_steps": before["env_steps"] + sum(worker.steps for worker in workers),
            "batches": before["batches"] + min(worker.batches for worker in workers),
            "trajectories": before["trajectories"] + sum(worker.trajectories for worker in workers),
            "seconds": before["seconds"] + time.monotonic() - self._began,
            "agent_steps": before["agent_steps"] + self.agent_steps,
            "late_rewards": before["late_rewards"] + stats.late_rewards,
        }

    def start_at(self, counts: Mapping[str, float]) -> None:
        """Continue the counts of a saved run."""
        self._before = {name: counts[name] for name in COUNTS}
        self._steps = counts["env_steps"]

    def figures(
        self, stats: SamplerStats, server: ServerStats | None, policy_version: int | Mapping[str, int | None] | None
    ) -> dict[str, float]:
        """See `Sampler.metrics`. `policy_version`: with a dict of agents, the version of each."""
        now, workers = time.monotonic(), stats.workers
        counts = self.counts(stats)
        steps, seconds = counts["env_steps"], now - self._called
        figures: dict[str, float] = {
            **{f"sampler/{name}": counts[name] for name in (COUNTS if self._policies else COUNTS[:4])},
            "sampler/steps_per_second": (steps - self._steps) / seconds if seconds else 0.0,
            **_versions(policy_version),
            "sampler/restarts": stats.restarts,
            "sampler/lost_trajectories": stats.lost_trajectories,
        }
        self._called, self._steps = now, steps
        if stats.lag is not None:
            figures["sampler/policy_lag"] = stats.lag.mean
            figures["sampler/skipped_batches"] = stats.skipped_batches
        shares: dict[str, float] = {}
        for worker in workers:
            times = worker.waiting, worker.acting, worker.stepping, worker.resetting
            shares |= self._shares(f"worker_{worker.worker_rank}", times)
        idle = [shares[f"worker_{worker.worker_rank}/idle_share"] for worker in workers]
        figures["sampler/idle_share"] = sum(idle) / len(idle)
        figures |= shares
        if server is not None:
            figures["server/idle_share"] = self._shares("server", (server.waiting, server.acting))["server/idle_share"]
            n_steps = sum(server.served.values())
            served = sum(n * times for n, times in server.served.items())
            figures["server/envs_per_step"] = served / n_steps if n_steps else math.nan
        for group, infos, most in (("train", self.training, _NEWEST), ("eval", self.evaluation, sys.maxsize)):
            if infos is not None:
                # With several agents, whole games and the trajectories of each policy are separate groups.
                games = [info for info in infos if info.agent_id is None] if self._policies else infos
                figures.update(self._summary(group, games, most))
                for name in self._policies:
                    of_policy = [info for info in infos if info.policy == name]
                    figures.update(self._summary(f"{group}/{name}", of_policy, most))
        return {name: float(value) for name, value in figures.items()}

    def _shares(self, group: str, seconds: tuple[float, ...]) -> dict[str, float]:
        """The share of each kind in the time since the last call."""
        before = self._seconds.get(group, (0.0,) * len(seconds))
        self._seconds[group] = seconds
        spent = [new - old for new, old in zip(seconds, before, strict=True)]
        total = sum(spent)
        return {
            f"{group}/{kind}_share": part / total if total else 0.0 for kind, part in zip(_KINDS, spent, strict=False)
        }

    def _summary(self, group: str, infos: Iterable[TrajInfo], most: int) -> dict[str, float]:
        """The means of the newest trajectories, `most` at the most."""
        infos = list(infos)[-most:]
        figures: dict[str, float] = {f"{group}/trajectories": len(infos)}
        for name in self._names:
            fields = [getattr(info, name, None) for info in infos]
            values = [float(value) for value in fields if isinstance(value, Real)] or [math.nan]
            figures[f"{group}/{name}_mean"] = sum(values) / len(values)
            figures[f"{group}/{name}_min"], figures[f"{group}/{name}_max"] = min(values), max(values)
        return figures


def _versions(policy_version: int | Mapping[str, int | None] | None) -> dict[str, float]:
    name = "sampler/policy_version"
    versions = policy_version.items() if isinstance(policy_version, Mapping) else [("", policy_version)]
    return {f"{name}/{p}" if p else name: math.nan if version is None else version for p, version in versions}
