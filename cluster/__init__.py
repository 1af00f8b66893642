"""Many machines: `RaySampler`, and distributed experiments. `pip install ".[cluster]"` installs what they need.

Everything is imported on first use: `import penstock.cluster` imports neither ray nor zmq.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cluster.actor_worker import ActorWorker
    from penstock.cluster.experiment import Actors, Experiment, Policies, Run, Training
    from penstock.cluster.keys import Connection
    from penstock.cluster.metric_sinks import JsonLines, MetricsSink, Prometheus, RunState, TensorBoard
    from penstock.cluster.panel import ControlPanel, Response
    from penstock.cluster.pieces import Batch
    from penstock.cluster.policy_worker import AgentPlan, PolicyWorker
    from penstock.cluster.ray_sampler import RaySampler, RayStats, ShardStats
    from penstock.cluster.remote import RpcClient, RpcServer
    from penstock.cluster.statuses import Status
    from penstock.cluster.stream import Piece
    from penstock.cluster.streams import InferenceClient, InferenceInbox, SampleConsumer, SampleProducer
    from penstock.cluster.trainer_worker import Trainer, TrainerWorker
    from penstock.cluster.wire_ray import RayConnection
    from penstock.cluster.worker import PollResult, Worker

__all__ = [
    "ActorWorker",
    "Actors",
    "AgentPlan",
    "Batch",
    "Connection",
    "ControlPanel",
    "Experiment",
    "InferenceClient",
    "InferenceInbox",
    "JsonLines",
    "MetricsSink",
    "Piece",
    "Policies",
    "PolicyWorker",
    "PollResult",
    "Prometheus",
    "RayConnection",
    "RaySampler",
    "RayStats",
    "Response",
    "RpcClient",
    "RpcServer",
    "Run",
    "RunState",
    "SampleConsumer",
    "SampleProducer",
    "ShardStats",
    "Status",
    "TensorBoard",
    "Trainer",
    "TrainerWorker",
    "Training",
    "Worker",
]

_SOCKETS = ("zmq", "msgpack")
_RAY = ("ray",)

# Where each public name is defined, and the libraries that it needs.
_PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ActorWorker": ("actor_worker", ()),
    "Actors": ("experiment", ()),
    "AgentPlan": ("policy_worker", ()),
    "Batch": ("pieces", ()),
    "Connection": ("keys", _SOCKETS),
    "ControlPanel": ("panel", ()),
    "Experiment": ("experiment", ()),
    "InferenceClient": ("streams", ()),
    "InferenceInbox": ("streams", ()),
    "JsonLines": ("metric_sinks", ()),
    "MetricsSink": ("metric_sinks", ()),
    "Piece": ("stream", _RAY),
    "Policies": ("experiment", ()),
    "PolicyWorker": ("policy_worker", ()),
    "PollResult": ("worker", ()),
    "Prometheus": ("metric_sinks", ()),
    "RayConnection": ("wire_ray", _RAY),
    "RaySampler": ("ray_sampler", _RAY),
    "RayStats": ("ray_sampler", _RAY),
    "Response": ("panel", ()),
    "RpcClient": ("remote", _SOCKETS),
    "RpcServer": ("remote", _SOCKETS),
    "Run": ("experiment", ()),
    "RunState": ("metric_sinks", ()),
    "SampleConsumer": ("streams", ()),
    "SampleProducer": ("streams", ()),
    "ShardStats": ("ray_sampler", _RAY),
    "Status": ("statuses", ()),
    "TensorBoard": ("metric_sinks", ()),
    "Trainer": ("trainer_worker", ()),
    "TrainerWorker": ("trainer_worker", ()),
    "Training": ("experiment", ()),
    "Worker": ("worker", ()),
}


# Older names, which go in version 0.3.
_OLD_NAMES = {"InferenceServer": "InferenceInbox", "Metrics": "MetricsSink"}


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        new = _OLD_NAMES[name]
        warnings.warn(f"penstock.cluster.{name} is now called {new}", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, libraries = _PLACES[name]
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        raise ImportError(
            f'penstock.cluster.{name} needs {" and ".join(missing)}, which is not installed: pip install ".[cluster]"'
        )
    return getattr(import_module(f"penstock.cluster.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
