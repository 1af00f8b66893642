"""A worker that samples, and puts the samples into a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.agents import Agent
from penstock.cluster.parameters import ParameterClient
from penstock.cluster.pieces import piece_of
from penstock.cluster.policy_worker import AgentPlan
from penstock.cluster.statuses import FINAL
from penstock.cluster.stream_agent import StreamAgent
from penstock.cluster.streams import InferenceClient, Routing, SampleProducer
from penstock.cluster.worker import PollResult, Worker
from penstock.errors import PenstockError
from penstock.samplers import Sampler

_PUT_SECONDS = 0.2  # how long a poll waits for a consumer


class ActorWorker(Worker):
    """Runs any sampler of penstock except `AsyncSampler`, one batch per poll.

    If the policy worker that acts for it ends, it asks another one, which does not have its recurrent state. So with a
    recurrent agent, it drops the batch that it was collecting. The running episodes end, as if truncated after the last
    piece, and new ones begin. The figure `truncated` counts them.

    Args:
        make_sampler: returns a sampler that is not initialized.
        plan: the seed, and how to make the agent for `inference=None`.
        rank, world_size: the number of this actor, and the number of all actors. The env_ranks of its environments
            begin at `rank * batch_B`.
        inference: name of the inference stream whose policy workers act; None: the agent acts here, with the newest
            parameters.
        parameters: name under which the trainer publishes the parameters.
        samples: name of the sample stream.
        routing: of the sample stream; see `SampleProducer`.
        bootstrap_value: as in `sampler.initialize`.
        generation: how often this actor was restarted. Each generation has other random streams.
    """

    def __init__(
        self,
        make_sampler: Callable[[], Sampler],
        plan: AgentPlan,
        *,
        rank: int = 0,
        world_size: int = 1,
        inference: str | None = None,
        parameters: str = "policy",
        samples: str = "train",
        routing: Routing = "any",
        bootstrap_value: bool = True,
        generation: int = 0,
    ) -> None:
        self._make_sampler, self._plan, self._rank, self._world_size = make_sampler, plan, rank, world_size
        self._inference, self._policy, self._stream, self._routing = inference, parameters, samples, routing
        self._bootstrap_value, self._generation = bootstrap_value, generation
        self._sampler: Sampler | None = None
        self._client: InferenceClient | None = None
        self._piece: dict[str, Any] | None = None  # a piece that no consumer has had room for yet
        self._itr = self._version = self._n_truncated = 0

    def _configure(self) -> None:
        self._parameters = ParameterClient(self.wire, self.names, self._policy)
        self._producer = SampleProducer(
            self.wire, self.names, self._stream, routing=self._routing, name=self.name, credit=2
        )
        self._agent: Agent
        if self._inference is None:
            self._agent = self._plan.agent()
        else:
            self._client = InferenceClient(
                self.wire, self.names, self._inference, self.name, is_over=lambda: self.status in FINAL
            )
            self._agent = StreamAgent(self._client)
        # Whether a policy worker has recurrent state for this actor.
        self._is_recurrent = self._client is not None and self._plan.make_agent().recurrent
        self._begin_episodes()

    @property
    def _n_moves(self) -> int:
        """How often the policy worker has changed."""
        return 0 if self._client is None else self._client.n_moves

    def _begin_episodes(self) -> None:
        n_moves = self._n_moves
        self._sampler = self._make_sampler()
        if n_moves:  # every column begins with the first step of an episode, where the recurrent state begins too
            self._sampler.config = replace(self._sampler.config, max_decorrelation_steps=0)
        self._sampler.initialize(
            self._agent,
            # Other random streams for each generation, and for the episodes after each change of the policy worker.
            seed=self._plan.seed + 1_000_003 * self._generation + 10_007 * n_moves,
            bootstrap_value=self._bootstrap_value,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _poll(self) -> PollResult:
        assert self._sampler is not None
        if self._piece is None:
            if self._inference is None:
                self._load_newer_parameters()
            try:
                self._piece = self._collect()
            except PenstockError:
                if self.status in FINAL:  # it must end, and so `InferenceClient.ask` has raised
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
        samples, infos = self._sampler.obtain_samples(self._itr)
        self._itr += 1
        if not self._is_recurrent or self._n_moves == n_moves:
            # The stream keeps the piece until a consumer has taken it. The next batch overwrites the samples before.
            return piece_of(samples.numpy().copy(), infos, self._version, self.name)
        self._n_truncated += self._sampler.batch_B
        self._sampler.shutdown()
        self._begin_episodes()
        return None

    def _load_newer_parameters(self) -> None:
        newer = self._parameters.newer()
        if newer is not None:
            self._agent.write_parameters(newer)
            self._agent.sync_shared_memory()
            self._version = self._parameters.version

    def _stats(self) -> Mapping[str, float]:
        return {"version": self._version} if self._client is None else {"truncated": self._n_truncated}

    def _close(self) -> None:
        if self._sampler is not None:
            self._sampler.shutdown()
