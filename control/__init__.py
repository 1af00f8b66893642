"""Distributed experiments: workers, a control panel, and streams between them.

`pip install ".[cluster]"` installs what they need.

Everything is imported on first use: `import penstock.control` imports neither ray nor zmq.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.control.actor_worker import ActorWorker
    from penstock.control.experiment import Actors, Experiment, Policies, Run, Training
    from penstock.control.keys import Connection
    from penstock.control.launch_ray import RayConnection
    from penstock.control.metric_sinks import JsonLines, MetricsSink, Prometheus, RunState, TensorBoard
    from penstock.control.panel import ControlPanel, Response
    from penstock.control.pieces import Batch
    from penstock.control.policy_worker import AgentPlan, PolicyWorker
    from penstock.control.remote import RpcClient, RpcServer
    from penstock.control.statuses import Status
    from penstock.control.streams import InferenceClient, InferenceInbox, SampleConsumer, SampleProducer
    from penstock.control.trainer_worker import Trainer, TrainerWorker
    from penstock.control.worker import PollResult, Worker

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
    "Policies",
    "PolicyWorker",
    "PollResult",
    "Prometheus",
    "RayConnection",
    "Response",
    "RpcClient",
    "RpcServer",
    "Run",
    "RunState",
    "SampleConsumer",
    "SampleProducer",
    "Status",
    "TensorBoard",
    "Trainer",
    "TrainerWorker",
    "Training",
    "Worker",
]

_SOCKETS = ("zmq", "msgpack")

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
    "Policies": ("experiment", ()),
    "PolicyWorker": ("policy_worker", ()),
    "PollResult": ("worker", ()),
    "Prometheus": ("metric_sinks", ()),
    "RayConnection": ("launch_ray", (*_SOCKETS, "ray")),
    "Response": ("panel", ()),
    "RpcClient": ("remote", _SOCKETS),
    "RpcServer": ("remote", _SOCKETS),
    "Run": ("experiment", ()),
    "RunState": ("metric_sinks", ()),
    "SampleConsumer": ("streams", ()),
    "SampleProducer": ("streams", ()),
    "Status": ("statuses", ()),
    "TensorBoard": ("metric_sinks", ()),
    "Trainer": ("trainer_worker", ()),
    "TrainerWorker": ("trainer_worker", ()),
    "Training": ("experiment", ()),
    "Worker": ("worker", ()),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, libraries = _PLACES[name]
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        raise ImportError(
            f'penstock.control.{name} needs {" and ".join(missing)}, which is not installed: pip install ".[cluster]"'
        )
    return getattr(import_module(f"penstock.control.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
