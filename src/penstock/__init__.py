"""penstock: sample reinforcement-learning environments in parallel, straight into shared memory."""

import sys
from typing import TYPE_CHECKING, Any

# mypy does not follow `in` here, so it checks the rest for each system. system.py has all other tests of the system.
if sys.platform in ("win32", "cygwin"):
    raise ImportError(
        "penstock needs Linux or macOS. On Windows, use it in WSL 2. The page docs/install.md says why, under Systems"
    )

if TYPE_CHECKING:  # of these, `penstock` offers what `__all__` lists
    from penstock import errors
    from penstock.agents import *
    from penstock.buffers import *
    from penstock.collectors import *
    from penstock.envs import *
    from penstock.errors import *
    from penstock.evaluation import *
    from penstock.games import EnvProcess
    from penstock.samplers import *
    from penstock.tools import *

__version__ = "0.2.0"

__all__ = [
    "Affinity",
    "Agent",
    "AgentStep",
    "AlternatingSampler",
    "AsyncSampler",
    "CategoricalPgAgent",
    "ClusterError",
    "Collector",
    "CollectorParts",
    "ConfigError",
    "DeterministicPgAgent",
    "EnvCallError",
    "EnvProcess",
    "EpisodeResult",
    "EpsilonGreedyAgent",
    "EvalCollector",
    "EvalResults",
    "ExponentialSchedule",
    "FunctionAgent",
    "GameError",
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
    "PolicySamples",
    "PortLeaseError",
    "RandomAgent",
    "RecordedEpisode",
    "RecurrentCategoricalPgAgent",
    "RecurrentEpsilonGreedyAgent",
    "RecurrentGaussianPgAgent",
    "RepeatError",
    "RequestError",
    "ResetCollector",
    "ResumeReport",
    "RunningEvaluation",
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
    "WaitResetCollector",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStats",
    "WorkerTimeoutError",
    "errors",
    "evaluate",
    "start_evaluation",
    "tune",
]

# Each room needs the rooms before it, so a search in this order imports only what is needed.
_ROOMS = ("errors", "buffers", "envs", "agents", "collectors", "samplers", "evaluation", "tools")


def __getattr__(name: str) -> Any:
    # Imported on first use: to import what a process does not use takes time, and agents with a model need torch.
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"penstock.{name}")
    if name == "EnvProcess":  # its room has much else, which users import from there
        return import_module("penstock.games").EnvProcess
    if name in __all__:
        for room in _ROOMS:
            module = import_module(f"penstock.{room}")
            if name in module.__all__:
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
