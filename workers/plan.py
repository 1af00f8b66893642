"""What a pool is made from: the plan of each worker, and the options of the pool."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal, TypedDict, get_args

from penstock import system
from penstock.arguments import between, check_fields, choice, integer, optional, seconds
from penstock.errors import ConfigError
from penstock.workers.spinning import SPIN_SECONDS


@dataclass(frozen=True)
class Affinity:
    """Where workers run.

    `cpus`: one entry per worker, each a CPU number or several. None gives each worker one CPU that this process may use
    and that no other run has claimed. If too few are left, the workers are not pinned.
    `pin=False` leaves the placement to the system. `torch_threads` is the number of threads that torch, OpenMP and
    linear algebra (OpenBLAS, MKL, BLIS) use in each worker.
    """

    cpus: Sequence[int | Sequence[int]] | None = None
    pin: bool = True
    torch_threads: int = 1


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What one worker owns. `columns` count within this sampler, `env_ranks` over all machines."""

    worker_rank: int
    columns: range = range(0)  #: its columns of the samples buffer
    env_ranks: range = range(0)  #: the global indices of the environments in those columns
    cpus: tuple[int, ...] = ()  #: CPUs to run on; empty: not pinned
    torch_threads: int = 1
    generation: int = 0  #: how often these environments have been built again
    server_name: str = ""  #: its name in errors, if it serves other workers and owns no environments; never replaced

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.server_name or f"worker {self.worker_rank}"

    @property
    def env_text(self) -> str:
        """Its environments, for errors; empty if it has none."""
        return f"env_rank {span(self.env_ranks)}" if self.columns else ""

    def who_text(self, who: int) -> str:
        """Which policy acts, for errors, where there are several; see `ProgressSnapshot.who`."""
        return ""


StartMethod = Literal["fork", "forkserver", "spawn"]
START_METHOD: StartMethod = "spawn" if system.WHY_NO_FORK else "forkserver"  #: the default
OnWorkerFailure = Literal["raise", "restart"]


@dataclass(frozen=True)
class PoolOptions:
    """How processes are started, how many seconds they may make no progress, and what happens when one fails."""

    start_method: str
    step_timeout: float | None  #: the limit in a command; None: no limit
    start_timeout: float  #: the limit during the start
    max_restarts: int  #: within `restart_window` seconds; 0: failed workers are not replaced
    restart_window: float
    close_timeout: float = 10.0  #: how many seconds the `close` of one environment may take
    spin_seconds: float = SPIN_SECONDS  #: how long the main process and the workers spin before they sleep
    preload: Sequence[str] = ()  #: modules that the supervisor imports once, so that workers start faster
    keeps_messages: bool = False  #: keep the messages of a dead worker even if it has not completed its command
    has_death_logger: bool = False  #: a thread looks for failures while the main process does not wait
    kind: str = ""  #: the name of the class that the user has made, for traces and `top`
    batch_T: int = 0  #: of a sampler; 0 without batches
    crash_dir: str | os.PathLike[str] | None = None  #: a folder for traces of the first failures
    #: For the status of a worker that has failed: what its failure can be repeated from. It has a text `advice`.
    episode_of: Callable[[Any], Any] | None = None


class PoolKeywords(TypedDict, total=False):
    """The keyword arguments that samplers and vector environments share, for type checkers."""

    start_method: StartMethod
    step_timeout: float | None
    start_timeout: float
    close_timeout: float
    on_worker_failure: OnWorkerFailure
    max_restarts: int
    restart_window: float


@dataclass(frozen=True, kw_only=True)
class PoolArguments:
    """The arguments that samplers and vector environments share, with their checks and defaults. `SamplerConfig`
    documents them."""

    start_method: Annotated[StartMethod, choice(*get_args(StartMethod))] = START_METHOD
    step_timeout: Annotated[float | None, optional(seconds)] = None
    start_timeout: Annotated[float, seconds] = 120.0
    close_timeout: Annotated[float, seconds] = 10.0
    on_worker_failure: Annotated[OnWorkerFailure, choice(*get_args(OnWorkerFailure))] = "raise"
    max_restarts: Annotated[int, between(0)] = 3
    restart_window: Annotated[float, seconds] = 60.0

    def __post_init__(self) -> None:
        check_fields(self)

    def pool_options(self, **others: Any) -> PoolOptions:
        """The options of the pool: these arguments, and the `others`."""
        own = {field.name: getattr(self, field.name) for field in fields(PoolArguments)}
        if own.pop("on_worker_failure") == "raise":
            own["max_restarts"] = 0
        return PoolOptions(**own, **others)


def span(ranks: range) -> str:
    """`ranks` for errors: "3", or "0 to 3"."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def split(n: int, parts: int, unit: int = 1) -> list[range]:
    """`range(n)` in `parts` consecutive ranges whose lengths differ by at most one `unit`, longest first."""
    size, longer = divmod(n // unit, parts)
    bounds = [unit * (i * size + min(i, longer)) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def assign_cpus(affinity: Affinity, n_workers: int, mask: Sequence[int]) -> list[tuple[int, ...]]:
    """The CPUs of every worker. `mask`: the CPUs that this process may use, empty if unknown.

    Raises `ConfigError` for a wrong number of entries or a CPU outside the mask.
    """
    integer("torch_threads", affinity.torch_threads, 1)
    if affinity.cpus is None:
        pin = affinity.pin and len(mask) > 0
        return [(mask[i % len(mask)],) if pin else () for i in range(n_workers)]
    if not affinity.pin:
        raise ConfigError("affinity has both cpus and pin=False: leave one out")
    try:
        entries = [
            (operator.index(entry),) if hasattr(entry, "__index__") else tuple(map(operator.index, entry))
            for entry in affinity.cpus
        ]
    except TypeError:
        raise ConfigError(
            f"affinity must list, for each worker, a CPU number or several, got {affinity.cpus!r}"
        ) from None
    if len(entries) != n_workers:
        raise ConfigError(f"affinity lists CPUs for {len(entries)} workers, there are {n_workers}: give one entry each")
    if not mask:
        text = "affinity has no effect: this system cannot pin a process to CPUs"
        warnings.warn(text, RuntimeWarning, stacklevel=2)  # once in a process
        return [()] * n_workers
    for i, entry in enumerate(entries):
        # The system would silently drop CPUs that are not allowed and pin to the rest.
        outside = sorted(set(entry) - set(mask))
        if not entry or outside:
            raise ConfigError(
                f"affinity pins worker {i} to CPUs {list(entry)}"
                + (f": {outside} are not among those this process may use, {list(mask)}" if entry else "")
            )
    return entries
