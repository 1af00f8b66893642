"""RaySampler: one sampler on many machines. Ray places the shards, moves their data, and notices when one is lost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from penstock.arguments import integer, must_be, number, one_of, seconds
from penstock.buffers import Samples, pickling
from penstock.buffers.slots import batch_view, layouts_of
from penstock.collectors import TrajInfo
from penstock.distributed.placement import connect, node_resources
from penstock.distributed.ray_pool import RayOptions, ShardPool
from penstock.distributed.shard import ShardPlan, ShardSpec
from penstock.envs import EnvFn
from penstock.errors import ConfigError
from penstock.samplers.allocation import Allocation
from penstock.samplers.asynchronous import AsyncSampler
from penstock.samplers.config import SamplerConfig, SamplerState
from penstock.samplers.refusals import NEW_CHOOSER, NODE_RESTART, PLAN, RAY, SEEDED, refuse
from penstock.samplers.sampler import ParallelSampler, Sampler, SerialSampler
from penstock.samplers.sampler_plan import EnvRange, make_plans
from penstock.samplers.seating import PolicyOf
from penstock.samplers.stats import SamplerStats
from penstock.samplers.who_acts import Acting
from penstock.workers.call_guard import GuardedCall
from penstock.workers.control import Command
from penstock.workers.launcher import unpicklable
from penstock.workers.plan import Affinity, PoolOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.samplers.config import SamplerOptions


@dataclass(frozen=True)
class Piece:
    """One shard's part of a batch, as `RaySampler.pieces` yields it.

    `samples` are torch tensors `[batch_T, n, ...]` of the shard's n environments. They are in memory of Ray, which can
    only be read: copy what you want to change. The memory is freed with the piece. With a dict of agents, they are
    `PolicySamples`, with the shard's columns of each policy.
    """

    samples: Samples
    traj_infos: list[TrajInfo]
    shard: int
    env_ranks: range  #: of the columns
    policy_version: Any  #: of the parameters that acted; with a dict of agents, a dict of the version of each
    staleness: int  #: how many versions newer the newest parameters were when you got it; the largest of all policies
    itr: int  #: the number of this piece of the shard; the first has the `itr` of `pieces`


@dataclass(frozen=True)
class ShardStats:
    """One shard since the sampler was initialized, with the processes that were lost and replaced.

    `batches` counts the batches and pieces that you got from it, and `missing` the batches without its columns. Two
    counts are of what was dropped: `late` came after its batch, or after the end of the loop, and `stale` pieces were
    too old. `lost_trajectories` counts the trajectories that were lost with its processes.
    """

    shard: int
    node: str | None  #: None while it waits for a place
    env_ranks: range
    batches: int
    missing: int
    late: int
    stale: int
    restarts: int
    lost_trajectories: int


@dataclass(frozen=True)
class RayStats(SamplerStats):
    """As `SamplerStats`, with the workers of all shards. Their ranks continue from shard to shard.

    The figures of a shard are those of its last reply.
    """

    shards: tuple[ShardStats, ...] = ()

    @property
    def restarts(self) -> int:
        """How many workers and shards have been replaced."""
        return super().restarts + sum(shard.restarts for shard in self.shards)

    @property
    def lost_trajectories(self) -> int:
        """How many trajectories were lost with workers and shards that were replaced."""
        return super().lost_trajectories + sum(shard.lost_trajectories for shard in self.shards)


class ShardsAct(Acting):
    """Shards on the nodes of a Ray cluster, each with a sampler."""

    refused_as = RAY
    has_records = False

    def __init__(self, options: RayOptions) -> None:
        self._options = options

    def plans(
        self, config: SamplerConfig, affinity: Affinity, env_range: EnvRange, resources: ExitStack
    ) -> tuple[ShardPlan, ...]:
        self._config, self._affinity, self._env_range = config, affinity, env_range
        options, n_built = self._options, config.n_built
        resources.callback(connect((options.n_shards or 1) * (config.n_workers or 1)))
        nodes = node_resources()
        n_workers = 1 if issubclass(options.sampler_cls, SerialSampler) else config.n_workers
        n_usable = sum(self._room([node], n_workers or 1) > 0 for node in nodes)
        n_shards = options.n_shards or max(1, min(n_usable, n_built))
        for name, n in (("min_shards", options.min_shards), ("min_ready", options.min_ready)):
            must_be(name, n, n is None or n <= n_shards, f"at most n_shards={n_shards}")
        most = math.ceil(n_built / n_shards)
        if n_workers is None:
            n_workers = next((n for n in range(most, 1, -1) if self._room(nodes, n) >= n_shards), 1)
        self._workers_per_shard = min(most, n_workers)
        unit = config.rows_per_env
        plans = make_plans(*config.env_counts, [()] * n_shards, env_range, unit=unit)
        return tuple(
            ShardPlan(**vars(plan), n_workers=min(self._workers_per_shard, len(plan.columns) // unit)) for plan in plans
        )

    def _needs(self, n_workers: int) -> dict[str, float]:
        """What a shard with `n_workers` needs of Ray."""
        return {"CPU": float(n_workers), **self._options.resources}

    def _room(self, nodes: list[dict[str, float]], n_workers: int) -> int:
        """How many such shards fit on the nodes, if nobody else uses these."""
        needs, all_of_them = self._needs(n_workers), self._config.n_built
        fitting = [[int(node.get(name, 0) / n + 1e-6) for name, n in needs.items() if n] for node in nodes]
        return sum(min(numbers, default=all_of_them) for numbers in fitting)

    def start(self, allocation: Allocation, options: PoolOptions, resources: ExitStack) -> ShardPool:
        config, program, layout = self._config, allocation.program, allocation.layout
        seating = program.seating
        if seating.has_games and config.eval_max_trajectories:
            raise ConfigError(
                "a RaySampler of environments with several agents counts the games of an evaluation with "
                "eval_episodes: leave eval_max_trajectories out"
            )
        recorded = [name for p, name in enumerate(seating.policies) if p not in program.unrecorded]
        agents = dict(zip(seating.policies, program.agents, strict=True))
        spec = ShardSpec(
            sampler_cls=self._options.sampler_cls,
            sampler_options=self._options.sampler_options,
            config=config,
            agents=program.agents[0] if seating.is_shared else agents,
            plans=tuple(plan for plan in layout.plans if isinstance(plan, ShardPlan)),
            n_cpus=self._workers_per_shard,
            affinity=self._affinity,
            setup={
                "seed": program.seed,
                "bootstrap_value": "bootstrap_value" in layouts_of(layout.memory.slots[0])[0],
                "traj_info_kwargs": program.traj_info_kwargs,
                "n_envs": self._env_range.n_envs,
                "n_eval_envs": self._env_range.n_eval_envs,
                "record": None if seating.is_shared else recorded,
            },
            seats=allocation.seats,
        )
        try:
            pickled = pickling.dumps(spec)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            parts = {"agent": spec.agents, "policy_of": seating.chooser, **vars(config)}
            raise unpicklable(parts, error) from error
        needs = self._needs(self._workers_per_shard)
        return ShardPool(spec.plans, needs, pickled, config, layout.memory, self._options, resources)


class RaySampler(Sampler):
    """Samples on many machines, with the same calls and, for the same seed, the same batches as on one.

    The environments are divided into shards: consecutive ranges of `env_rank`. A shard is one actor of Ray, which holds
    one sampler on its node. All shards collect their columns of a batch. The columns are copied into one buffer as they
    arrive. With `pieces`, you get the part of each shard as it arrives, without a copy.

    This uses the cluster that the process has joined before (`ray.init`), or the one that RAY_ADDRESS names. If there
    is none, penstock starts Ray on this machine and ends it at `shutdown`. Other machines cannot reach this Ray.

    Args, in addition to the arguments of every sampler:
        n_shards: the number of shards; by default one for each node that has room for one.
        n_workers: worker processes of each shard. A shard takes this number of Ray's CPUs. By default, the largest
            number with which all shards fit on the nodes.
        sampler_cls: the sampler of each shard: ParallelSampler, SerialSampler, GpuSampler, AlternatingSampler, or a
            subclass. A shard cannot be a RaySampler.
        sampler_options: arguments of this class alone, for example `{"server": "process"}`.
        on_node_failure: what happens when a shard is lost. "raise" raises a `NodeLostError`, and the sampler cannot be
            used any more. "restart" builds the shard again, on a node that has room, with new random streams, which
            depend on the seed. It then collects its columns of the running batch. `max_restarts` and `restart_window`
            limit this too, for each shard.
        min_ready: a batch is complete when this many shards have answered. The columns of the others are zero, and
            `valid` is False there. Their replies are dropped when they come, and counted. None: wait for all.
        min_shards: with "restart", continue without lost shards as long as this many are left. A lost shard takes part
            again as soon as a node has room for it. None: wait for all.
        unavailable_timeout: seconds that the process of a shard may answer nothing before the shard counts as lost. A
            shard is asked only while it works. If its connection breaks, it is lost at once.
        resources: what each shard needs of Ray besides CPUs, for example `{"GPU": 1}`.
    """

    def __init__(
        self,
        env_fn: EnvFn,
        *,
        n_shards: int | None = None,
        sampler_cls: type[Sampler] = ParallelSampler,
        sampler_options: Mapping[str, Any] | None = None,
        on_node_failure: Literal["raise", "restart"] = "raise",
        min_ready: int | None = None,
        min_shards: int | None = None,
        unavailable_timeout: float = 15.0,
        resources: Mapping[str, float] | None = None,
        **options: Unpack[SamplerOptions],
    ) -> None:
        super().__init__(env_fn, **options)
        refuse({PLAN: self.config.episode_plan is not None, SEEDED: self.config.seed_episodes, RAY: True})
        if n_shards is not None:
            integer("n_shards", n_shards, 1, self.config.n_built)
        is_one = isinstance(sampler_cls, type) and issubclass(sampler_cls, Sampler)
        if not is_one or issubclass(sampler_cls, AsyncSampler | RaySampler):
            raise ConfigError(
                f"sampler_cls must be a synchronous sampler class, for example ParallelSampler, got {sampler_cls!r}. A "
                "shard cannot be a RaySampler: for groups of nodes, give each learner its own (rank, world_size)"
            )
        one_of("on_node_failure", on_node_failure, ("raise", "restart"))
        if min_shards is not None and on_node_failure == "raise":
            raise ConfigError('min_shards needs on_node_failure="restart"')
        self._options = RayOptions(
            n_shards=n_shards,
            sampler_cls=sampler_cls,
            sampler_options=dict(sampler_options or {}),
            is_restarted=on_node_failure == "restart",
            min_ready=None if min_ready is None else integer("min_ready", min_ready, 1),
            min_shards=None if min_shards is None else integer("min_shards", min_shards, 1),
            unavailable_timeout=seconds("unavailable_timeout", unavailable_timeout),
            resources={name: number(f"resources[{name!r}]", n) for name, n in (resources or {}).items()},
        )
        # Raises an error for a wrong argument of the shards' sampler here, and not later on a node.
        sampler_cls(env_fn, **{**options, **self._options.sampler_options})

    def acting(self) -> Acting:
        """The workers of the shards act, or their inference servers."""
        return ShardsAct(self._options)

    def set_policy_of(self, policy_of: PolicyOf) -> None:
        """As `Sampler.set_policy_of`. Raises `ConfigError` with `on_node_failure="restart"` too: a shard that is built
        again would begin with the first function."""
        refuse({NEW_CHOOSER: True, NODE_RESTART: self._options.is_restarted})
        super().set_policy_of(policy_of)

    # ---- pieces ----------------------------------------------------------------------------

    def pieces(self, *, itr: int = 0, max_in_flight: int = 2, max_staleness: int | None = 1) -> Iterator[Piece]:
        """Yield the shards' pieces as they arrive, until you end the loop. Nothing is copied.

        Every shard has up to `max_in_flight` orders. Pieces that have arrived, and that you have not taken, count too.
        So the shard samples while you train, and the memory is bounded. When you ask for the next piece, the newest
        published parameters go to all shards. Each shard acts with them from its next piece on.

        Pieces that are more than `max_staleness` versions old are dropped, and counted in `stats()`. With None, you get
        all pieces. If you have n shards and publish after every piece, the pieces are about n versions old.

        `itr` is the `itr` of each shard's first piece. When you end the loop, pieces that have not arrived are dropped
        and counted as late.
        """
        integer("itr", itr)
        integer("max_in_flight", max_in_flight, 1, 8)
        if max_staleness is not None:
            integer("max_staleness", max_staleness, 0)
        return self._yield_pieces(itr, max_in_flight, max_staleness)

    def _yield_pieces(self, itr: int, max_in_flight: int, max_staleness: int | None) -> Iterator[Piece]:
        with GuardedCall(self._guard, "pieces", SamplerState.READY):
            pool = self._shard_pool("pieces")
            pool.submit(Command(itr), depth=max_in_flight)
            self._guard.state = SamplerState.YIELDING
        try:
            while True:
                with GuardedCall(self._guard, "pieces", SamplerState.YIELDING):
                    piece = self._next_piece(pool, max_staleness)
                yield piece
        finally:
            if self.state is SamplerState.YIELDING:
                self._guard.state = SamplerState.READY

    def _next_piece(self, pool: ShardPool, max_staleness: int | None) -> Piece:
        run = self.run
        memory, seating = run.memory, run.seating
        newest = [copy.version for copy in memory.parameters]
        shard, reply, itr, staleness = pool.next_piece(newest, max_staleness)
        run.policy_version = run.by_policy(dict(zip(run.agents, reply.versions, strict=True)))
        traj_infos = run.as_infos(reply.results)
        arrays = iter([reply.arrays[path] for path, _ in memory.slots[0].leaves()])
        n_seats = run.by_policy({name: seating.n_seats(p) for p, name in enumerate(seating.policies)})
        view: Any = batch_view(memory.slots[0].map(lambda _: next(arrays)), self.batch_T, n_seats)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            samples = view.torch()
        run.check_published(len(run.plans))
        run.metrics.training.extend(traj_infos)
        if run.seating.has_games:
            run.count_agents(samples)
        return Piece(
            samples=samples,
            traj_infos=traj_infos,
            shard=shard.plan.worker_rank,
            env_ranks=shard.plan.env_ranks,
            policy_version=run.policy_version,
            staleness=staleness,
            itr=itr,
        )

    # ---- inspection ------------------------------------------------------------------------

    @property
    def n_workers(self) -> int:
        """The number of workers of all shards; 0 before `initialize`."""
        plans = () if self._run is None else self._run.plans
        return sum(plan.n_workers for plan in plans if isinstance(plan, ShardPlan))

    def _shard_pool(self, call: str) -> ShardPool:
        pool = self._require_run(call).pool
        assert isinstance(pool, ShardPool)
        return pool

    def stats(self) -> RayStats:
        """Where the workers' time went since `initialize`, and what happened to each shard."""
        pool = self._shard_pool("stats")
        totals = [worker for shard in pool.shards for worker in shard.totals()]
        workers = tuple(replace(worker, worker_rank=rank) for rank, worker in enumerate(totals))
        shards = tuple(
            ShardStats(
                shard=(rank := shard.plan.worker_rank),
                node=shard.started.node if shard.started else None,
                env_ranks=shard.plan.env_ranks,
                batches=shard.batches,
                missing=shard.missing,
                late=shard.late,
                stale=shard.stale,
                restarts=pool.restarts.per_worker[rank],
                lost_trajectories=pool.restarts.lost_per_worker[rank],
            )
            for shard in pool.shards
        )
        nbytes, difference = self.run.memory.nbytes, self.run.inference_difference
        return RayStats(workers, nbytes, difference, shards=shards)

    def __repr__(self) -> str:
        state, shards = self._guard.state, [] if self._run is None else self._shard_pool("repr").shards
        heading = f"{type(self).__name__} {state.name.lower()}: batch_T={self.batch_T}, batch_B={self.batch_B}"
        if not shards:
            return f"<{heading}>"
        lines = [f"<{heading}, seed={self.seed}, {len(shards)} shards"]
        return "\n".join([*lines, *(f"  {shard}" for shard in shards[:16])]) + ">"
