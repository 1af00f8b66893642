"""What the user calls (`base`), and what workers do between two gates (`worker`). The gates themselves and the
processes behind them are in `penstock.workers`, whose first lines say in which order to read them."""

from penstock.samplers.base import Sampler
from penstock.samplers.central import AlternatingSampler, GpuSampler
from penstock.samplers.parallel import ParallelSampler
from penstock.samplers.serial import SerialSampler
from penstock.samplers.server_totals import ServerStats
from penstock.samplers.state import SamplerState
from penstock.samplers.stats import SamplerStats, WorkerStats
from penstock.workers.plan import Affinity

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
