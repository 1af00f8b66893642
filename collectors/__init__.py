"""The loop over time inside a worker: it collects batches and follows trajectories."""

from penstock.collectors.collector import Collector, CollectorParts
from penstock.collectors.eval_collector import (
    BaseEvalCollector,
    EpisodeEvalCollector,
    EvalCollector,
    EvalCollectorParts,
)
from penstock.collectors.reset import ResetCollector, WaitResetCollector
from penstock.collectors.tracking import Tracker, make_tracker
from penstock.collectors.traj_info import TrajInfo
from penstock.collectors.vector import VectorEnvCollector

__all__ = [
    "BaseEvalCollector",
    "Collector",
    "CollectorParts",
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
