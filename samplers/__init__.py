"""What the user holds: samplers with their states and statistics.

Read `sampler.py` (the calls), `run.py` (a batch), `who_acts.py` and `schedule.py` (what a sampler is made of), then the
samplers; and `sampler_program.py` (what a worker does between two gates). The processes and gates behind them are in
`workers/`: `control.py`, `gates.py`, `process.py`, `pool.py`, `monitor.py`.

What not every sampler needs is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from penstock.samplers.config import SamplerState
from penstock.samplers.run import Run
from penstock.samplers.sampler import ParallelSampler, Sampler, SerialSampler
from penstock.samplers.sampler_plan import EnvRange, SamplerPlan, make_plans
from penstock.samplers.schedule import OnDemand, Schedule
from penstock.samplers.stats import LagStats, SamplerStats, ServerStats, WorkerStats
from penstock.samplers.who_acts import Acting, CallerSteps, WorkersAct
from penstock.workers.plan import Affinity

if TYPE_CHECKING:
    from penstock.samplers.asynchronous import Ahead, AsyncSampler
    from penstock.samplers.central import AlternatingSampler, GpuSampler, ServerActs
    from penstock.samplers.resuming import ResumeReport

__all__ = [
    "Acting",
    "Affinity",
    "Ahead",
    "AlternatingSampler",
    "AsyncSampler",
    "CallerSteps",
    "EnvRange",
    "GpuSampler",
    "LagStats",
    "OnDemand",
    "ParallelSampler",
    "ResumeReport",
    "Run",
    "Sampler",
    "SamplerPlan",
    "SamplerState",
    "SamplerStats",
    "Schedule",
    "SerialSampler",
    "ServerActs",
    "ServerStats",
    "WorkerStats",
    "WorkersAct",
    "make_plans",
]

_LATER = {
    **dict.fromkeys(("Ahead", "AsyncSampler"), "asynchronous"),
    **dict.fromkeys(("AlternatingSampler", "GpuSampler", "ServerActs"), "central"),
    "ResumeReport": "resuming",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"penstock.samplers.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
