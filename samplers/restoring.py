"""The calls of a sampler that repeat an episode, and that save and continue a run."""

from __future__ import annotations

import pickle
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.agents import Agent
from penstock.envs.calls import pickled, single_results
from penstock.envs.factory import descriptions, env_factories
from penstock.envs.replay import EpisodeReplay
from penstock.envs.seeding import ColumnStreams
from penstock.errors import ConfigError, SamplerStateError, brief
from penstock.samplers.saving import RESEEDED, LoadMessage, SaveMessage, StateMessage, restart_agent, untrusted_class
from penstock.workers.arguments import integer, one_of
from penstock.workers.control import Command

if TYPE_CHECKING:
    import gymnasium as gym

    from penstock.samplers.batches import Batches
    from penstock.samplers.config import SamplerConfig
    from penstock.samplers.local import SerialPool
    from penstock.samplers.memory import SamplerMemory
    from penstock.samplers.plan import SamplerPlan
    from penstock.samplers.replaying import Replays
    from penstock.samplers.states import SamplerState
    from penstock.workers.call_guard import CallGuard
    from penstock.workers.pool import WorkerPool

_FORMAT = 1
_MOST_LISTED = 5


@dataclass(frozen=True)
class ResumeReport:
    """How the environments continue after `load_state_dict`, by env_rank."""

    exact: tuple[int, ...]  #: the environments that continue bit by bit
    #: The environments that began new episodes with new seeds, and the reason for each. Their running episodes are
    #: lost.
    reseeded: Mapping[int, str]

    def __str__(self) -> str:
        text = f"{len(self.exact)} environments continue exactly, {len(self.reseeded)} began new episodes"
        return text + (f": {_reasons(self.reseeded)}" if self.reseeded else "")


class RestoringCalls(ABC):
    """A part of `Sampler`."""

    # The attributes of `Sampler` that it uses.
    config: SamplerConfig
    batch_T: int
    batch_B: int
    seed: int | None
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    _guard: CallGuard[SamplerState]
    _idle_states: tuple[Any, ...]
    _central: bool
    _agent: Agent
    _plans: tuple[SamplerPlan, ...]
    _memory: SamplerMemory
    _batches: Batches
    _batch: int
    _pool: WorkerPool | SerialPool | None
    _replays: Replays | None

    #: Why this sampler cannot repeat episodes, and save and continue runs; empty if it can.
    _no_restore = ""

    def _require_pool(self, call: str) -> WorkerPool | SerialPool:
        if self._pool is None:
            raise SamplerStateError(f"{call} was called before initialize: call sampler.initialize(agent) first")
        return self._pool

    def _server_agent(self) -> Agent | None:
        """The agent that acts for the environments of all workers; None if each worker has its own. Raises
        `ConfigError` if it is in another process."""
        return None

    # ---- one episode -----------------------------------------------------------------------

    def replay(self, env_rank: int, t: int) -> EpisodeReplay:
        """The episode of an environment until step t of the last batch. `EpisodeReplay.run` repeats it in this process.
        This needs `seed_episodes=True`.

        Raises `ConfigError` if the environment waited for a reset at t, or for an argument out of range.
        """
        with self._guard.require("replay", *self._idle_states):
            replays, first = self._replays, self._plans[0].env_ranks[0]
            if self._no_restore:
                raise SamplerStateError(f"replay was called {self._no_restore}")
            if replays is None:
                raise ConfigError(
                    "replay needs to know the seeds of the episodes: construct the sampler with seed_episodes=True"
                )
            if not self._batches.held:
                raise SamplerStateError("replay was called before the first batch: call obtain_samples first")
            env_rank = integer("env_rank", env_rank, first, first + self.batch_B - 1)
            t = integer("t", t, 0, self.batch_T - 1)
            statuses = self._require_pool("replay").statuses()
            (plan,) = (status.plan for status in statuses if env_rank in status.plan.env_ranks)
            return replays.at(plan, env_rank, t, (self._batch - 1) % self._batches.n_slots)

    # ---- the whole run ---------------------------------------------------------------------

    def state_dict(self, *, env_state: Literal["auto", "require", "never"] = "auto") -> dict[str, Any]:
        """Everything that a new sampler needs to continue after the last batch, as numbers, text and bytes.

        It contains counters, environments, unfinished trajectories, random streams, noise and recurrent state. It does
        not contain the agent's parameters: save `agent.state_dict()` too. It may contain code: load only your own.

        With `env_state="auto"`, each environment is saved exactly if a check shows that this works (`check_env_state`),
        or if `seed_episodes=True` makes it possible to repeat its running episode. The others are "reseeded": they
        begin new episodes with new seeds. "require" raises a `ConfigError` if there are such environments. With
        "never", all are reseeded.
        """
        one_of("env_state", env_state, ("auto", "require", "never"))
        with self._guard.require("state_dict", *self._idle_states):
            self._check_restorable("state_dict")
            server_agent = self._server_agent()
            untrusted = untrusted_class(self.config.collector_cls, type(self._agent))
            answers = self._send(SaveMessage(env_state != "never", untrusted), "state_dict")
            columns = {rank: column for own, _ in answers for rank, column in own.items()}
            reseeded = {rank: column["why"] for rank, column in columns.items() if column["kind"] == RESEEDED}
            if env_state == "require" and reseeded:
                raise ConfigError(f'state_dict(env_state="require"): {_reasons(reseeded)}')
            if server_agent is not None:
                for b, column in enumerate(columns.values()):
                    column["server"] = pickle.dumps(server_agent.column_state(b))
            control = self._memory.control
            return {
                "format": _FORMAT,
                **self._described(),
                "batches": self._batch,
                "policy_version": self._memory.parameters.version,
                "generation": max(control.generation(plan.worker_rank) for plan in self._plans),
                "columns": columns,
                "evaluations": {rank: list(counts) for _, own in answers for rank, counts in own.items()},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> ResumeReport:
        """Continue the run that `state_dict` has saved. Call this after `initialize`, before the first batch. Load the
        agent's parameters first: this call publishes them. The number of workers, `batch_T` and the kind of sampler may
        differ from those of the saved run. But a central sampler (`GpuSampler`, `AlternatingSampler`) cannot continue
        the run of another kind, or the other way round.

        Returns which environments continue exactly, and which began new episodes. The new seeds depend on how often the
        run was continued, so none of its episodes comes again.

        Raises `ConfigError` if `state` belongs to another run: another seed, other environments, spaces or classes.
        After an `EnvCallError` (an environment could not be loaded), make a new sampler.
        """
        with self._guard.require("load_state_dict", *self._idle_states):
            self._check_restorable("load_state_dict")
            if self._batches.held:
                raise SamplerStateError("load_state_dict must be called after initialize, before the first batch")
            server_agent, control, parameters = self._server_agent(), self._memory.control, self._memory.parameters
            self._check_state(state)
            counts = {tuple(each) for each in state["evaluations"].values()}
            generation = state["generation"] + 1
            # A worker that is replaced from now on gets streams that were never used.
            control.raise_generation(generation)
            self._resume_server(generation)
            # Where workers were replaced, the evaluations differ from column to column: begin new streams.
            evaluations = counts.pop() if len(counts) == 1 else (0, generation)
            message = LoadMessage(state["columns"], evaluations, generation)
            refused = {rank: why for own in self._send(message, "load_state_dict") for rank, why in own.items()}
            if server_agent is not None:
                self._load_server_agent(server_agent, state["columns"], refused, generation)
            self._batch = state["batches"]
            parameters.continue_at(state["policy_version"], self._agent.read_parameters())
            return ResumeReport(tuple(rank for rank in state["columns"] if rank not in refused), refused)

    def _resume_server(self, generation: int) -> None:
        """The inference server's streams are of this generation from now on."""

    def _load_server_agent(
        self, agent: Agent, columns: Mapping[int, Any], refused: Mapping[int, str], generation: int
    ) -> None:
        agent.select(None)
        exact = {b: columns[rank]["server"] for b, rank in enumerate(columns) if rank not in refused}
        if refused:
            assert self.seed is not None
            streams = ColumnStreams(self.seed, range(min(columns), max(columns) + 1), generation)
            restart_agent(agent, [b for b in range(len(columns)) if b not in exact], streams)
        for b, saved in exact.items():
            agent.load_column_state(b, pickle.loads(saved))

    def _check_restorable(self, call: str) -> None:
        if self._no_restore:
            raise SamplerStateError(f"{call} was called {self._no_restore}")
        if self.config.collector_cls.batched:
            raise ConfigError(f"{call} needs single environments: a batched one cannot be divided among other workers")

    def _described(self) -> dict[str, Any]:
        """What a run must have in common with the run that continues it."""
        config = self.config
        return {
            "seed": self.seed,
            "env_ranks": [rank for plan in self._plans for rank in plan.env_ranks],
            "environments": descriptions(env_factories(config.env_fn, config.env_kwargs, config.batch_B)),
            "spaces": [str(self.observation_space), str(self.action_space)],
            "classes": [cls.__qualname__ for cls in (type(self._agent), config.collector_cls, config.traj_info_cls)],
            "central": self._central,
            "seed_episodes": config.seed_episodes,
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise ConfigError(f"load_state_dict needs what state_dict has returned, of format {_FORMAT}")
        parts = ("batches", "policy_version", "generation", "columns", "evaluations")
        missing = [name for name in (*self._described(), *parts) if name not in state]
        if missing:
            raise ConfigError(f"this state is damaged: it has no {', '.join(missing)}")
        for name in ("batches", "policy_version", "generation"):
            integer(f"{name} of the state", state[name], 0)
        for name, own in self._described().items():
            if name == "central" and state[name] != own:
                saved = "GpuSampler or AlternatingSampler" if state[name] else "SerialSampler or ParallelSampler"
                raise ConfigError(f"the state is that of a {saved}, this is a {type(self).__name__}: use a {saved}")
            if state[name] != own:
                hint = f": initialize(agent, seed={state[name]})" if name == "seed" else ""
                raise ConfigError(f"the state has {name}={brief(state[name])}, this sampler has {brief(own)}{hint}")

    def _send(self, message: StateMessage, call: str) -> list[Any]:
        """Let all workers perform `message`. Returns their answers, by env_rank."""
        pool = self._require_pool(call)
        pool.run(
            Command(has_message=True), call, discard=pool.take_messages, message=pickled(message, "the saved state")
        )
        return single_results(call, pool.take_messages())


def _reasons(reseeded: Mapping[int, str]) -> str:
    """Why these environments do not continue exactly. Each reason is named once."""
    ranks: dict[str, list[int]] = {}
    for rank, why in reseeded.items():
        ranks.setdefault(why, []).append(rank)
    parts = [f"env_rank {', '.join(map(str, own))}: {why}" for why, own in list(ranks.items())[:_MOST_LISTED]]
    return "; ".join(parts + ["..."] * (len(ranks) > _MOST_LISTED))
