"""Processes: a pool of workers that run commands between two gates. It knows no environments' library and no roles.

Read `control.py` (the shared words), `gates.py` (barrier_in and barrier_out), `process.py` (the worker's loop),
`pool.py` and `monitor.py` (the main process's side).
"""

from penstock.workers.control import Command, ControlBlock
from penstock.workers.plan import Affinity, WorkerPlan
from penstock.workers.pool import PoolOptions, WorkerPool
from penstock.workers.program import WorkerContext, WorkerProgram
from penstock.workers.progress import Phase, Progress, StopCollecting

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
