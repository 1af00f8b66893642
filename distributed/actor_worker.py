"""A worker that samples, and puts the samples into a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents import Agent, AgentStep
from penstock.arguments import integer
from penstock.buffers.named import as_named
from penstock.buffers.samples import for_each_policy
from penstock.distributed.parameters import PARAMETERS, ParameterClient, by_policy, write_parameters
from penstock.distributed.pieces import piece_of, to_tree
from penstock.distributed.policy_worker import AgentPlan
from penstock.distributed.role import PollResult, Worker
from penstock.distributed.statuses import FINAL
from penstock.distributed.streams import InferenceClient, SampleProducer
from penstock.errors import ConfigError, PenstockError
from penstock.samplers import Sampler
from penstock.samplers.seating import PolicyOf

_PUT_SECONDS = 0.2  # how long a poll waits for a consumer
_ANSWER_SECONDS = 600.0  # how long it waits for a policy worker, which may be silent or be started again


@dataclass(frozen=True)
class Actors:
    """`count` actors, each with a sampler that `make_sampler` returns, for example
    `partial(AlternatingSampler, "CartPole-v1", batch_T=64, batch_B=16)`. The sampler must not be initialized yet.
    `bootstrap_value`, `policy_of` and `record` are those of `sampler.initialize`.

    With `inference`, the name of a stream of policy workers, these act for the actors. Otherwise each actor acts
    itself, with the newest parameters. `samples` is the name of the stream for the samples. `resources` is what Ray
    reserves for each, such as `{"CPU": 2}`.

    `joining` more actors may join from other machines, at any time: `actor/count` and those after it, see
    `Experiment.join`.
    """

    count: int
    make_sampler: Callable[[], Sampler]
    inference: str | None = None
    samples: str = "train"
    bootstrap_value: bool = True
    resources: Mapping[str, float] | None = None
    joining: int = 0
    policy_of: PolicyOf | None = None
    record: Sequence[str] | None = None

    @property
    def joining_names(self) -> list[str]:
        """The names of the actors that may join."""
        return [f"actor/{i}" for i in range(self.count, self.count + self.joining)]


class ActorWorker(Worker):
    """Runs any sampler of penstock except `AsyncSampler`, one batch per poll.

    If the policy worker that acts for it ends, it asks another one, which does not have its recurrent state. So with a
    recurrent agent, it drops the batch that it was collecting. The running episodes end, as if truncated after the last
    piece, and new ones begin. The figure `truncated` counts them.

    Args:
        actors: the sampler and the streams.
        plan: the seed, and how to make the agent, which acts here unless `actors.inference` names a stream.
        rank, world_size: the number of this actor, and the number of all actors. The env_ranks of its environments
            begin at `rank * batch_B`.
        credit: how many pieces of this actor may be under way. It samples the next one when there is room for it.

    `configure` has the argument `generation`: how often this actor was started again. Each generation has other random
    streams. The `itr` of a batch is the number of the version that acts, minus 1. So schedules go on after a restart.
    """

    def __init__(
        self,
        actors: Actors,
        plan: AgentPlan,
        *,
        rank: int = 0,
        world_size: int = 1,
        credit: int = 3,
    ) -> None:
        self._actors, self._plan, self._rank, self._world_size = actors, plan, rank, world_size
        self._credit = credit
        self._sampler: Sampler | None = None
        self._client: InferenceClient | None = None
        self._piece: dict[str, Any] | None = None  # a piece that no consumer has had room for yet
        self._version, self._n_truncated = (0, 0), 0

    def _configure(self, generation: int = 0) -> None:
        self._generation = integer("generation", generation, 0)
        self._agent: Any  # an agent, or a dict of agents
        if self._actors.inference is None:
            self._parameters = ParameterClient(self.names, PARAMETERS)
            self._agent = self._plan.agent()
            write_parameters(self._agent, self._parameters.first(self._must_end))
            self._version = self._parameters.version
        else:
            self._client = InferenceClient(
                self.wire,
                self.names,
                self._actors.inference,
                self.name,
                timeout=_ANSWER_SECONDS,
                is_over=self._must_end,
                generation=generation,
            )
            self._agent = StreamAgent(self._client, self._plan.make_agent())
        self._producer = SampleProducer(self.wire, self.names, self._actors.samples, credit=self._credit)
        # Whether a policy worker has recurrent state for this actor.
        self._is_recurrent = self._client is not None and self._agent.recurrent
        self._begin_episodes()

    def _must_end(self) -> bool:
        """Whether to stop waiting for a policy worker, or for the trainer: they are silent too, if the panel is."""
        return self.status in FINAL or self._misses_panel()

    @property
    def _n_moves(self) -> int:
        """How often the policy worker has changed."""
        return 0 if self._client is None else self._client.n_moves

    def _begin_episodes(self) -> None:
        n_moves = self._n_moves
        self._sampler = self._actors.make_sampler()
        if n_moves:  # every column begins with the first step of an episode, where the recurrent state begins too
            self._sampler.config = replace(self._sampler.config, max_decorrelation_steps=0)
        # Other random streams for each generation, and for the episodes after each change of the policy worker. The
        # lowest bits count the worker processes that the sampler replaces.
        generation = self._generation << 16 if self._client is None else self._client.generation
        self._sampler.generation = generation << 16
        self._sampler.initialize(
            self._agent,
            seed=self._plan.seed,
            bootstrap_value=self._actors.bootstrap_value,
            policy_of=self._actors.policy_of,
            record=self._actors.record,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _poll(self) -> PollResult:
        assert self._sampler is not None
        if self._piece is None:
            has_room = self._producer.has_room()
            if self._client is None:  # after `has_room`: the trainer publishes before it makes room
                self._load_newer_parameters()
            if not has_room:
                return PollResult()
            try:
                self._piece = self._collect()
            except PenstockError:
                if self._must_end():  # and so `InferenceClient.ask` has raised
                    return PollResult()
                raise
        if self._piece is None or not self._producer.put(self._piece, _PUT_SECONDS):
            return PollResult()
        self._piece = None
        return PollResult(self._sampler.batch_T * self._sampler.batch_B, 1)

    def _collect(self) -> dict[str, Any] | None:
        """A batch as a piece. None if the recurrent state was lost during the batch: then new episodes begin."""
        assert self._sampler is not None
        n_moves = self._n_moves
        samples, infos = self._sampler.obtain_samples(max(0, self._version[1] - 1))
        if not self._is_recurrent or self._n_moves == n_moves:
            # The stream keeps the piece until a consumer has taken it. The next batch overwrites the samples before.
            copied = for_each_policy(lambda part: part.numpy().copy(), samples)
            piece = piece_of(copied, infos, self._version, self.name)
            self._version = (piece["lineage"], piece["version"])
            return piece
        self._n_truncated += self._sampler.batch_B
        self._sampler.shutdown()
        self._begin_episodes()
        return None

    def _load_newer_parameters(self) -> None:
        newer = self._parameters.newer()
        if newer is not None:
            write_parameters(self._agent, newer)
            for agent in by_policy(self._agent).values():
                agent.sync_shared_memory()
            self._version = self._parameters.version

    def _stats(self) -> Mapping[str, float]:
        version = {"version": self._version[1]}
        return version if self._client is None else {**version, "truncated": self._n_truncated}

    def _close(self) -> None:
        if self._sampler is not None:
            self._sampler.shutdown()


class StreamAgent(Agent):
    """Sends one message per step for all its columns. The policy worker keeps the noise and the recurrent state.

    `agent_info` is what the agent of the policy worker reports, and `stream_version`: the version of the parameters
    that acted. Use this agent in a sampler that acts in the actor's own process: `GpuSampler`, `AlternatingSampler` or
    `SerialSampler`.

    Args:
        client: of the inference stream.
        agent: one like that of the policy workers. It does not act.
    """

    def __init__(self, client: InferenceClient, agent: Any) -> None:
        self._client, self.recurrent, self.mask_key = client, agent.recurrent, agent.mask_key

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._starts: npt.NDArray[np.bool_] = np.ones(len(rngs), np.bool_)

    def reset(self) -> None:
        self._starts[:] = True

    def reset_one(self, column: int) -> None:
        self._starts[column] = True

    def eval_mode(self, itr: int) -> None:
        raise ConfigError("an inference stream does not serve evaluations: evaluate in the trainer, with its own agent")

    def step(self, observation: object, prev_action: object, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        columns = np.arange(len(self._starts)) if self.selected is None else self.selected
        answer = self._ask("step", columns, observation, prev_action, prev_reward)
        return AgentStep(as_named(answer["action"]), as_named(answer["agent_info"]))

    def value(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> Any:
        columns = np.arange(len(self._starts)) if self.selected is None else self.selected
        if self.recurrent:
            return self._ask("value", columns, observation, prev_action, prev_reward)["value"]
        # The rows may be of any columns, some several times, for example where episodes were truncated.
        parts = [slice(i, i + len(self._starts)) for i in range(0, len(prev_reward), len(self._starts))]
        inputs = [(observation[part], prev_action[part], prev_reward[part]) for part in parts]
        return np.concatenate([self._ask("value", np.arange(len(row[2])), *row)["value"] for row in inputs])

    def _ask(
        self,
        kind: str,
        columns: npt.NDArray[np.intp],
        observation: object,
        prev_action: object,
        prev_reward: npt.NDArray[np.float32],
    ) -> Any:
        assert self.env_ranks is not None
        ranks, starts = np.array(self.env_ranks, np.int64)[columns], self._starts[columns]
        if len(set(ranks.tolist())) < len(ranks):  # `initialize` tries the agent, with observations of no environment
            kind = f"trial {kind}"
        elif kind == "step" or self.recurrent:
            self._starts[columns] = False
        else:
            starts[:] = False  # these rows begin no episode
        message = {
            "kind": kind,
            "env_ranks": ranks,
            "starts": starts,
            "observation": to_tree(observation),
            "prev_action": to_tree(prev_action),
            "prev_reward": prev_reward,
        }
        return self._client.ask(message)
