"""penstock: sample reinforcement-learning environments in parallel, straight into shared memory."""

import os
from typing import TYPE_CHECKING, Any

if not hasattr(os, "fork"):
    raise ImportError("penstock needs Linux: on Windows, use it in WSL 2")

from penstock import errors
from penstock.agents import Agent, AgentStep, ExponentialSchedule, FunctionAgent, LinearSchedule, RandomAgent
from penstock.buffers import NamedArrays, Samples
from penstock.collectors import (
    BaseEvalCollector,
    Collector,
    CollectorParts,
    EpisodeEvalCollector,
    EvalCollector,
    EvalCollectorParts,
    ResetCollector,
    TrajInfo,
    VectorEnvCollector,
    WaitResetCollector,
)
from penstock.envs import EpisodeReplay
from penstock.errors import (
    ClusterError,
    ConfigError,
    EnvCallError,
    NameTableError,
    NodeLostError,
    NoReplyError,
    PeerLostError,
    PenstockError,
    PortLeaseError,
    ReplayError,
    RequestError,
    SamplerBrokenError,
    SamplerClosedError,
    SamplerStateError,
    SpaceError,
    StaleSamplesError,
    TrajectoryCountError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.samplers import (
    Affinity,
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    LagStats,
    ParallelSampler,
    ResumeReport,
    Sampler,
    SamplerState,
    SamplerStats,
    SerialSampler,
    ServerStats,
    WorkerStats,
)

if TYPE_CHECKING:
    from penstock.agents import (
        CategoricalPgAgent,
        DeterministicPgAgent,
        EpsilonGreedyAgent,
        GaussianPgAgent,
        RecurrentCategoricalPgAgent,
        RecurrentEpsilonGreedyAgent,
        RecurrentGaussianPgAgent,
        SquashedGaussianAgent,
        TorchAgent,
    )
    from penstock.samplers import TuneReport, TuneRow, tune

__version__ = "0.2.0"

__all__ = [
    "Affinity",
    "Agent",
    "AgentStep",
    "AlternatingSampler",
    "AsyncSampler",
    "BaseEvalCollector",
    "CategoricalPgAgent",
    "ClusterError",
    "Collector",
    "CollectorParts",
    "ConfigError",
    "DeterministicPgAgent",
    "EnvCallError",
    "EpisodeEvalCollector",
    "EpisodeReplay",
    "EpsilonGreedyAgent",
    "EvalCollector",
    "EvalCollectorParts",
    "ExponentialSchedule",
    "FunctionAgent",
    "GaussianPgAgent",
    "GpuSampler",
    "LagStats",
    "LinearSchedule",
    "NameTableError",
    "NamedArrays",
    "NoReplyError",
    "NodeLostError",
    "ParallelSampler",
    "PeerLostError",
    "PenstockError",
    "PortLeaseError",
    "RandomAgent",
    "RecurrentCategoricalPgAgent",
    "RecurrentEpsilonGreedyAgent",
    "RecurrentGaussianPgAgent",
    "ReplayError",
    "RequestError",
    "ResetCollector",
    "ResumeReport",
    "Sampler",
    "SamplerBrokenError",
    "SamplerClosedError",
    "SamplerState",
    "SamplerStateError",
    "SamplerStats",
    "Samples",
    "SerialSampler",
    "ServerStats",
    "SpaceError",
    "SquashedGaussianAgent",
    "StaleSamplesError",
    "TorchAgent",
    "TrajInfo",
    "TrajectoryCountError",
    "TuneReport",
    "TuneRow",
    "VectorEnvCollector",
    "WaitResetCollector",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStats",
    "WorkerTimeoutError",
    "errors",
    "tune",
]

_WITH_TORCH = {
    "CategoricalPgAgent",
    "DeterministicPgAgent",
    "EpsilonGreedyAgent",
    "GaussianPgAgent",
    "RecurrentCategoricalPgAgent",
    "RecurrentEpsilonGreedyAgent",
    "RecurrentGaussianPgAgent",
    "SquashedGaussianAgent",
    "TorchAgent",
}


def __getattr__(name: str) -> Any:
    # What needs torch is imported on first use: workers and scripts without a model never pay for it.
    if name in _WITH_TORCH:
        from penstock import agents

        return getattr(agents, name)
    if name in ("TuneReport", "TuneRow", "tune"):
        from penstock import samplers

        return getattr(samplers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
