"""What the user holds: samplers with their states and statistics.

Read `sampler.py` (the calls), `sampler_program.py` (what a worker does between two gates), then the samplers. The
processes and gates behind them are in `workers/`: `control.py`, `gates.py`, `process.py`, `pool.py`, `monitor.py`.
"""

from penstock.samplers.asynchronous import AsyncSampler
from penstock.samplers.central import AlternatingSampler, GpuSampler
from penstock.samplers.config import SamplerState
from penstock.samplers.parallel import ParallelSampler
from penstock.samplers.resuming import ResumeReport
from penstock.samplers.sampler import Sampler
from penstock.samplers.serial import SerialSampler
from penstock.samplers.stats import LagStats, SamplerStats, ServerStats, WorkerStats
from penstock.workers.plan import Affinity

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
    "WorkerStats",
]
