"""What the driver knows of the shards, and calls on their actors. The driver, in Ray's words, is your process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ray
from ray import exceptions as ray_errors

from penstock.agents.shared_parameters import SharedParameters
from penstock.buffers.object_pipe import ObjectMessage
from penstock.cluster.shard import Order, Reply, ShardPlan, Started
from penstock.samplers.results import Trajectories
from penstock.samplers.stats import WorkerStats
from penstock.workers.control import Command
from penstock.workers.plan import split

# What `ray.get` raises when the process of a shard or its node has ended, or when the reply was lost with them.
LOSSES = (
    ray_errors.RayActorError,
    ray_errors.ObjectLostError,
    ray_errors.NodeDiedError,
    ray_errors.WorkerCrashedError,
    ray_errors.OutOfMemoryError,
    ray_errors.LocalRayletDiedError,
    ray_errors.RuntimeEnvSetupError,
    ray_errors.ActorPlacementGroupRemoved,
    ray_errors.ActorUnschedulableError,
)

_COUNTED = [
    field.name for field in fields(WorkerStats) if field.type in ("int", "float") and field.name != "worker_rank"
]


@dataclass(frozen=True)
class ShardOptions:
    """What happens when shards are slow or lost; `RaySampler` documents it."""

    is_restarted: bool
    min_ready: int | float
    min_shards: int | None
    unavailable_timeout: float
    start_timeout: float
    max_restarts: int
    restart_window: float
    eval_max_trajectories: int | None


@dataclass(eq=False)
class Shard:
    """What the driver knows of one shard."""

    plan: ShardPlan
    actor: Any = None
    generation: int = 0
    started: Started | None = None  #: None until it is ready
    since: float = 0.0  #: when its actor was made
    version: int = 0  #: the version of the parameters that it has
    n_orders: int = 0  #: how many orders this actor was given
    waiting: set[int] = field(default_factory=set)  #: the numbers of the orders without a reply
    last_batch: int = -1  #: the number of the last command that this actor has
    #: Totals of all its actors, for the statistics.
    batches: int = 0
    late: int = 0
    stale: int = 0
    missing: int = 0
    figures: tuple[WorkerStats, ...] = ()  #: of this actor's workers, when it was last asked
    earlier: tuple[WorkerStats, ...] = ()  #: of the workers of the actors before it

    @property
    def columns(self) -> slice:
        """Its columns of the samples buffer."""
        cells = self.plan.cells[0]  # all shards have one policy
        return slice(cells.start, cells.stop)

    def totals(self) -> tuple[WorkerStats, ...]:
        """The figures of the workers of all its actors. Empty while no actor has answered."""
        if len(self.figures) != len(self.earlier):
            return self.figures or self.earlier
        return tuple(_sum(*pair) for pair in zip(self.figures, self.earlier, strict=True))

    def __str__(self) -> str:
        node = f"node {self.started.node}" if self.started else "not placed yet"
        return f"{self.plan.name} ({', '.join([node, self.plan.env_text])})"


def no_figures(plan: ShardPlan, n_workers: int, unit: int = 1) -> tuple[WorkerStats, ...]:
    """The figures of a shard that has never answered."""
    first, zeros = plan.env_ranks.start, dict.fromkeys(_COUNTED, 0)
    parts = enumerate(split(len(plan.env_ranks), n_workers, unit))
    return tuple(WorkerStats(i, range(first + own.start, first + own.stop), (), **zeros) for i, own in parts)


def _sum(one: WorkerStats, other: WorkerStats) -> WorkerStats:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in _COUNTED})


@dataclass(eq=False)
class Pending:
    """A call whose answer has not come."""

    shard: Shard
    order: Order | None = None  #: None: the call starts the shard
    batch: int = -1  #: the number of the driver's command
    unavailable_since: float | None = None  #: since when the shard cannot be reached
    retry_at: float = 0.0  #: when to give the order again


@dataclass
class Current:
    """The driver's last command."""

    number: int = 0
    command: Command = field(default_factory=Command)
    message: bytes | None = None
    members: list[Shard] = field(default_factory=list)  #: the shards that take part
    answered: dict[Shard, Reply] = field(default_factory=dict)  #: without the arrays, which have been copied


class PublishedParameters:
    """The newest parameters in Ray's object store: put once per version, for all shards."""

    def __init__(self, parameters: SharedParameters) -> None:
        self._parameters = parameters
        self._version = 1  # every new shard has this one
        self._ref: Any = None
        self.n_puts = 0

    def new_for(self, shard: Shard) -> Any:
        """A reference to the newest parameters, or None if the shard has them."""
        if self._parameters.version != self._version:
            values, self._version = self._parameters.read()
            self._ref = ray.put((self._version, values))
            self.n_puts += 1
        if shard.version == self._version:
            return None
        shard.version = self._version
        return self._ref


def call(shard: Shard, method: str, group: str, *args: Any) -> Any:
    """Call `method` of the actor in one of its groups of threads. Returns a reference to the answer."""
    return getattr(shard.actor, method).options(concurrency_group=group).remote(*args)


def answers_of(shards: Sequence[Shard], method: str, seconds: float) -> list[Any]:
    """What this method of each shard returns; None for a shard that does not answer within `seconds`."""
    refs = [call(shard, method, "control") if shard.started else None for shard in shards]
    wanted = [ref for ref in refs if ref is not None]
    ready = set(ray.wait(wanted, num_returns=len(wanted), timeout=seconds)[0]) if wanted else set()
    return [_value(ref) if ref in ready else None for ref in refs]


def _value(ref: object) -> Any:
    try:
        return ray.get(ref)
    except ray_errors.RayError:  # the shard is lost: the next wait finds out
        return None


def place_of(path: str, columns: slice) -> Any:
    """The index of these columns in a field of the samples buffer."""
    return columns if path in ("policy_version", "bootstrap_value") else (slice(None), columns)


def merged(found: Sequence[Trajectories]) -> Trajectories:
    """The trajectories of several shards; records are ordered by time step, then env_rank."""
    joined = [item for part in found for item in part]
    if joined and not isinstance(joined[0], ObjectMessage):
        joined.sort()
    return joined
