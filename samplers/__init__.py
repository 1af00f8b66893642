"""What the user holds: samplers with their states and statistics.

Read `base.py` (the calls), `program.py` (what a worker does between two gates), then the samplers themselves. The
processes and gates behind them are in `workers/`: `control.py`, `gates.py`, `process.py`, `pool.py`, `monitor.py`.
"""

from typing import TYPE_CHECKING, Any

from penstock.samplers.asynchronous import AsyncSampler
from penstock.samplers.base import Sampler
from penstock.samplers.central import AlternatingSampler, GpuSampler
from penstock.samplers.parallel import ParallelSampler
from penstock.samplers.restoring import ResumeReport
from penstock.samplers.serial import SerialSampler
from penstock.samplers.states import SamplerState
from penstock.samplers.stats import LagStats, SamplerStats, ServerStats, WorkerStats
from penstock.workers.plan import Affinity

if TYPE_CHECKING:
    from penstock.samplers.tuning import TuneReport, TuneRow, tune

__all__ = [
    "Affinity",
    "AlternatingSampler",
    "AsyncSampler",
    "GpuSampler",
    "LagStats",
    "ParallelSampler",
    "ResumeReport",
    "Sampler",
    "SamplerState",
    "SamplerStats",
    "SerialSampler",
    "ServerStats",
    "TuneReport",
    "TuneRow",
    "WorkerStats",
    "tune",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: every process that imports penstock would pay for it, and few tune.
    if name in ("TuneReport", "TuneRow", "tune"):
        from penstock.samplers import tuning

        return getattr(tuning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
