"""The rules of a `TrajInfo` subclass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.agents import RandomAgent
from penstock.collectors import TrajInfo
from penstock.samplers import ParallelSampler, Sampler, SerialSampler
from penstock.testing.environments import Setup
from penstock.testing.rules import Violation
from penstock.testing.traces import ProbeAgent


@dataclass(frozen=True)
class TrajInfoSetup(Setup):
    """The `TrajInfo` subclass to check, and what it runs with."""

    traj_info_cls: type[TrajInfo]
    traj_info_kwargs: Mapping[str, Any] | None

    def run(self, cls: type[Sampler], traj_info_cls: type[TrajInfo] | None = None, **arguments: Any) -> list[TrajInfo]:
        """The trajectories of two batches."""
        infos: list[TrajInfo] = []
        with self.sampler(cls, traj_info_cls=traj_info_cls or self.traj_info_cls, **arguments) as sampler:
            kwargs = self.traj_info_kwargs if traj_info_cls is None else None
            sampler.initialize(ProbeAgent(RandomAgent()), seed=self.seed, traj_info_kwargs=kwargs)
            for itr in range(2):
                infos += sampler.obtain_samples(itr)[1]
        return infos

    def require_same(self, others: list[TrajInfo], where: str, remedy: str) -> None:
        """Raise `Violation` unless `others` have the attributes of the trajectories of a run in this process."""
        for i, (one, two) in enumerate(zip(self.run(SerialSampler), others, strict=True)):
            for name, value in vars(one).items():
                other = vars(two).get(name)
                if not _equal(value, other):
                    raise Violation(f"{name} of trajectory {i} is {value!r}, and {other!r} {where}", remedy)


def _equal(left: object, right: object) -> bool:
    try:
        return bool(np.all(np.asarray(left == right))) or pickle.dumps(left) == pickle.dumps(right)
    except Exception:  # values that cannot be compared count as equal if they have the same type
        return type(left) is type(right)


def a_traj_info_counts_like_its_base_class(setup: TrajInfoSetup) -> None:
    """Length, Return and NonzeroRewards are what `TrajInfo` itself counts."""
    for i, (info, wanted) in enumerate(zip(setup.run(SerialSampler), setup.run(SerialSampler, TrajInfo), strict=True)):
        for name in ("Length", "Return", "NonzeroRewards"):
            found, right = getattr(info, name), getattr(wanted, name)
            if not np.isclose(found, right, rtol=1e-4, atol=1e-5):
                raise Violation(f"{name} is {found} in trajectory {i}; it should be {right}", "call super().step(...)")


def a_traj_info_copies_what_it_keeps(setup: TrajInfoSetup) -> None:
    """A trajectory info does not change when the environment overwrites its last observation and info."""
    remedy = "copy what you keep of env_info; observation, action and agent_info are copies already"
    setup.require_same(setup.run(SerialSampler, reused=True), "in an environment that overwrites its memory", remedy)


def a_traj_info_is_the_same_from_a_worker(setup: TrajInfoSetup) -> None:
    """A trajectory info from a worker process has the same attributes as in this process."""
    remedy = "keep plain numbers and arrays that depend only on the trajectory; leave out what cannot be pickled"
    setup.require_same(setup.run(ParallelSampler, n_workers=2), "from a worker", remedy)


TRAJ_INFO_RULES: tuple[Callable[[TrajInfoSetup], None], ...] = (
    a_traj_info_counts_like_its_base_class,
    a_traj_info_copies_what_it_keeps,
    a_traj_info_is_the_same_from_a_worker,
)
