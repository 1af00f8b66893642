"""What workers hand over before barrier_out: trajectory infos and results of calls, exactly as many as promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.buffers.reports import in_one_line
from penstock.buffers.trajectory_queue import FIGURES, ObjectMessage, RecordRings, Unreadable
from penstock.collectors import TrajInfo
from penstock.errors import ConfigError
from penstock.workers.control import ControlBlock
from penstock.workers.plan import WorkerPlan
from penstock.workers.team import Team

__all__ = ["Deliveries"]


class Deliveries:
    """Takes what has been promised in the progress rows, and counts it."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        control: ControlBlock,
        rings: RecordRings,
        traj_info_cls: type[TrajInfo],
    ) -> None:
        self._plans, self._control, self._rings, self._cls = plans, control, rings, traj_info_cls
        self.delivered: Counter[int] = Counter()  #: trajectories taken so far, by worker rank

    def promised(self) -> list[int]:
        """How many trajectories, or results of a call, each worker says that it has handed over."""
        return [self._control.trajectories(plan.worker_rank) for plan in self._plans]

    def take_frames(self, team: Team) -> list[ObjectMessage]:
        """What came through the pipes. Raises `TrajectoryCountError` if it is not as many as were promised."""
        return team.take_frames(self.promised())

    def take_traj_infos(self, team: Team) -> list[TrajInfo]:
        """The trajectories that have finished, ordered by time step, then env_rank.

        Raises `ConfigError` naming the attribute of an info that cannot be unpickled, and as `take_frames` does.
        """
        cls, promised = self._cls, self.promised()
        self.delivered.update(dict(enumerate(promised)))
        if cls is TrajInfo:
            records = self._rings.take(promised)
            return cls.from_figures(zip(*(records[name].tolist() for name in FIGURES), strict=True))
        infos = []
        for t, env_rank, attributes in sorted(self.take_frames(team), key=lambda frame: frame[:2]):
            if isinstance(attributes, Unreadable):
                raise ConfigError(
                    f"the attribute {attributes.attribute!r} of a {cls.__name__} of env_rank {env_rank}, t={t}, cannot "
                    f"be unpickled in the main process: {in_one_line(attributes.error)}"
                ) from attributes.error
            infos.append(cls.restore(attributes))
        return infos
