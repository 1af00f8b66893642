"""The loop over time inside a worker: what is collected, and how a trajectory is accounted for."""

from penstock.collectors.base import Collector, CollectorParts
from penstock.collectors.columns import EnvColumns
from penstock.collectors.evaluation import BaseEvalCollector, EpisodeEvalCollector, EvalCollector, EvalCollectorParts
from penstock.collectors.reset import ResetCollector
from penstock.collectors.tracking import Tracker, make_tracker
from penstock.collectors.traj_info import TrajInfo
from penstock.collectors.vector import VectorEnvCollector
from penstock.collectors.wait_reset import WaitResetCollector

__all__ = [
    "BaseEvalCollector",
    "Collector",
    "CollectorParts",
    "EnvColumns",
    "EpisodeEvalCollector",
    "EvalCollector",
    "EvalCollectorParts",
    "ResetCollector",
    "Tracker",
    "TrajInfo",
    "VectorEnvCollector",
    "WaitResetCollector",
    "make_tracker",
]
