"""Many machines: `RaySampler`, and distributed experiments (workers, a control panel, and streams between them).

`pip install ".[cluster]"` installs what they need. Each name is imported on first use: `import penstock.distributed`
imports neither ray nor zmq.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.distributed.actor_worker import Actors, ActorWorker
    from penstock.distributed.experiment import Experiment, RunningExperiment
    from penstock.distributed.keys import Connection
    from penstock.distributed.names import NameClient
    from penstock.distributed.panel import ControlPanel, Response, WorkerControlPanel
    from penstock.distributed.pieces import Batch
    from penstock.distributed.policy_worker import AgentPlan, Policies, PolicyWorker
    from penstock.distributed.ray_sampler import Piece, RaySampler, RayStats, ShardStats
    from penstock.distributed.remote import RpcClient, RpcServer
    from penstock.distributed.role import PollResult, Worker
    from penstock.distributed.run_state import RunState
    from penstock.distributed.statuses import Status
    from penstock.distributed.streams import InferenceClient, InferenceInbox, SampleConsumer, SampleProducer
    from penstock.distributed.trainer_worker import Trainer, TrainerWorker, Training

_NAMES_OF = {
    "actor_worker": ("ActorWorker", "Actors"),
    "experiment": ("Experiment", "RunningExperiment"),
    "keys": ("Connection",),
    "names": ("NameClient",),
    "panel": ("ControlPanel", "Response", "WorkerControlPanel"),
    "pieces": ("Batch",),
    "policy_worker": ("AgentPlan", "Policies", "PolicyWorker"),
    "ray_sampler": ("Piece", "RaySampler", "RayStats", "ShardStats"),
    "remote": ("RpcClient", "RpcServer"),
    "role": ("PollResult", "Worker"),
    "run_state": ("RunState",),
    "statuses": ("Status",),
    "streams": ("InferenceClient", "InferenceInbox", "SampleConsumer", "SampleProducer"),
    "trainer_worker": ("Trainer", "TrainerWorker", "Training"),
}
_FILE_OF = {name: file for file, names in _NAMES_OF.items() for name in names}

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
    "NameClient",
    "Piece",
    "Policies",
    "PolicyWorker",
    "PollResult",
    "RaySampler",
    "RayStats",
    "Response",
    "RpcClient",
    "RpcServer",
    "RunState",
    "RunningExperiment",
    "SampleConsumer",
    "SampleProducer",
    "ShardStats",
    "Status",
    "Trainer",
    "TrainerWorker",
    "Training",
    "Worker",
    "WorkerControlPanel",
]


def __getattr__(name: str) -> Any:
    file = _FILE_OF.get(name)
    if file is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"penstock.distributed.{file}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "zmq", "msgpack"):
            raise
        missing = f"penstock.distributed.{name} needs {error.name}, which is not installed"
        raise ImportError(f'{missing}: pip install ".[cluster]"') from error
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
