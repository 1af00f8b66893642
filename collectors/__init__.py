"""The loop over time inside a worker: it collects batches and follows trajectories."""

from penstock.collectors.collector import Collector, CollectorParts, EvalLimits, ResetCollector, WaitResetCollector
from penstock.collectors.evaluation import EvalCollector
from penstock.collectors.recorder import PolicyParts, Recorder
from penstock.collectors.tracking import Tracker, TrajInfo, make_tracker

__all__ = [
    "Collector",
    "CollectorParts",
    "EvalCollector",
    "EvalLimits",
    "PolicyParts",
    "Recorder",
    "ResetCollector",
    "Tracker",
    "TrajInfo",
    "WaitResetCollector",
    "make_tracker",
]
