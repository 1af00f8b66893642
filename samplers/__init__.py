"""The processes around the collectors. To see the protocol, read in this order: `gates`, `process`
(the worker's loop), `crew` and `supervision` (the main process's side), `base` (what the user calls)."""

from penstock.samplers.base import Sampler
from penstock.samplers.calls import SamplerState
from penstock.samplers.central import AlternatingSampler, GpuSampler
from penstock.samplers.parallel import ParallelSampler
from penstock.samplers.plan import Affinity
from penstock.samplers.serial import SerialSampler
from penstock.samplers.server_totals import ServerStats
from penstock.samplers.stats import SamplerStats, WorkerStats

__all__ = [
    "Affinity",
    "AlternatingSampler",
    "GpuSampler",
    "ParallelSampler",
    "Sampler",
    "SamplerState",
    "SamplerStats",
    "SerialSampler",
    "ServerStats",
    "WorkerStats",
]
