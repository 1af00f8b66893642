"""Distributed experiments: workers, a control panel, and streams between them.

`pip install ".[cluster]"` installs what they need. `import penstock.control` imports neither ray nor zmq.
"""

from typing import TYPE_CHECKING, Any

from penstock.control.actor_worker import Actors, ActorWorker
from penstock.control.experiment import Experiment, Run
from penstock.control.keys import Connection
from penstock.control.metric_sinks import JsonLines, MetricsSink, Prometheus, RunState, TensorBoard
from penstock.control.name_table import NameClient
from penstock.control.panel import ControlPanel, Response
from penstock.control.pieces import Batch
from penstock.control.policy_worker import AgentPlan, Policies, PolicyWorker
from penstock.control.remote import RpcClient, RpcServer
from penstock.control.statuses import Status
from penstock.control.streams import InferenceClient, InferenceInbox, SampleConsumer, SampleProducer
from penstock.control.trainer_worker import Trainer, TrainerWorker, Training
from penstock.control.worker import PollResult, Worker

if TYPE_CHECKING:
    from penstock.control.launch_ray import RayConnection

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
    "NameClient",
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


def __getattr__(name: str) -> Any:
    if name == "RayConnection":  # not earlier: this imports ray
        from penstock.control.launch_ray import RayConnection

        return RayConnection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
