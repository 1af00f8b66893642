"""Worker processes: a pool of workers that run commands between two gates. Nothing here imports Gymnasium or an agent.

Read in this order: `control.py` (the shared words), `gates.py` (barrier_in and barrier_out), `process.py` (the loop of
a worker), `pool.py` and `monitor.py` (what the main process does).
"""

from penstock.workers.control import Command, ControlBlock, Phase, Progress, StopCollecting
from penstock.workers.plan import Affinity, PoolOptions, WorkerPlan
from penstock.workers.pool import WorkerPool
from penstock.workers.program import WorkerContext, WorkerProgram

__all__ = [
    "Affinity",
    "Command",
    "ControlBlock",
    "Phase",
    "PoolOptions",
    "Progress",
    "StopCollecting",
    "WorkerContext",
    "WorkerPlan",
    "WorkerPool",
    "WorkerProgram",
]
