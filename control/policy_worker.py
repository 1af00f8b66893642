"""A worker that acts for the environments of many actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.agents import Agent
from penstock.buffers.named import as_named
from penstock.buffers.tree import map_tree
from penstock.collectors.acting import as_agent_step
from penstock.control.parameters import ParameterClient
from penstock.control.pieces import to_tree
from penstock.control.streams import InferenceInbox
from penstock.control.wire import Letter
from penstock.control.worker import PollResult, Worker
from penstock.envs.seeding import ColumnStreams, Purpose

_WAIT_SECONDS = 0.05  # how long a poll waits for the first request


@dataclass(frozen=True)
class AgentPlan:
    """How to make the agent of an experiment, and what to initialize it with."""

    make_agent: Callable[[], Agent]
    observation_space: Any
    action_space: Any
    seed: int
    n_envs: int  #: of all actors together

    def agent(self) -> Agent:
        """A new agent. Its first parameters depend on the seed only."""
        agent = self.make_agent()
        model_seed = ColumnStreams(self.seed, range(1)).env_seeds(Purpose.MODEL)[0]
        agent.runtime.ensure_initialized(self.observation_space, self.action_space, model_seed)
        return agent


@dataclass
class _StepRequest:
    """A request of one actor for a step of its n environments."""

    letter: Letter
    ranks: np.ndarray[Any, Any]  #: env_ranks `[n]`
    starts: np.ndarray[Any, Any]  #: `[n]`, True where the recurrent state begins again
    inputs: tuple[Any, Any, Any] = field(repr=False)  #: observation, prev_action, prev_reward, each `[n, ...]`


class PolicyWorker(Worker):
    """Answers all requests together that came while the model was busy. It keeps the noise and the recurrent state of
    every environment, by env_rank.

    If it ends, its actors ask another policy worker, or this one after a restart. Recurrent state is lost then, and
    `ActorWorker` begins new episodes.

    Args:
        plan: how to make the agent.
        stream: name of the inference stream.
        parameters: name under which the trainer publishes the parameters.
        max_batch: the most environments that the agent acts for at once, if there are several requests.
        max_delay: seconds to wait for more requests after the first.
    """

    def __init__(
        self,
        plan: AgentPlan,
        *,
        stream: str = "policy",
        parameters: str = "policy",
        max_batch: int = 256,
        max_delay: float = 0.0,
    ) -> None:
        self._plan, self._stream, self._policy = plan, stream, parameters
        self._max_batch, self._max_delay = max_batch, max_delay
        self._server: InferenceInbox | None = None
        self._next: Letter | None = None  # a request that did not fit into the batch before
        self._n_rows = self._n_batches = 0

    def _configure(self) -> None:
        plan = self._plan
        self._agent = plan.agent().runtime.worker_copy()
        ranks = range(plan.n_envs)
        # A copy of the agent that acts. It has one column for each environment of all actors: column i is env_rank i.
        self._actor = self._agent.runtime.column_copy(ColumnStreams(plan.seed, ranks).rngs(Purpose.ACTION))
        self._actor.runtime.set_columns(ranks, plan.n_envs)
        self._actor.sample_mode(0)
        self._sessions = [""] * plan.n_envs  # of each environment: see `InferenceClient.ask`
        self._parameters = ParameterClient(self.wire, self.names, self._policy)
        self._server = InferenceInbox(self.wire, self.names, self._stream, self.name)

    def _poll(self) -> PollResult:
        newer = self._parameters.newer()
        if newer is not None:
            self._actor.write_parameters(newer)
        letters = self._gather()
        requests: list[_StepRequest] = []
        try:
            for letter in letters:
                request = self._read(letter)
                if request is None:
                    continue
                # An actor that has lost a server and comes back may ask twice for the same environments.
                if any(np.isin(request.ranks, other.ranks).any() for other in requests):
                    self._step(requests)
                    requests = []
                requests.append(request)
            if requests:
                self._step(requests)
        except Exception as error:
            for letter in (letter for letter in letters if not letter.is_answered):
                letter.fail(f"the policy {self.name} has failed: {type(error).__name__}: {error}")
            raise
        n_rows = sum(len(letter.message["env_ranks"]) for letter in letters)
        self._n_rows += n_rows
        self._n_batches += bool(letters)
        return PollResult(n_rows, int(bool(letters)))

    def _gather(self) -> list[Letter]:
        """The requests that wait, up to `max_batch` environments."""
        assert self._server is not None
        letters, n_rows, until = list[Letter](), 0, 0.0
        while n_rows < self._max_batch:
            wait = _WAIT_SECONDS if not letters else max(0.0, until - time.monotonic())
            letter, self._next = self._next or self._server.receive(wait), None
            if letter is None:
                break
            n_rows += len(letter.message["env_ranks"])
            if letters and n_rows > self._max_batch:
                self._next = letter
                break
            if not letters:
                until = time.monotonic() + self._max_delay
            letters.append(letter)
        return letters

    def _read(self, letter: Letter) -> _StepRequest | None:
        """The request in `letter`, if it is for a step. Other requests are answered here."""
        message = letter.message
        inputs = (
            map_tree(np.copy, as_named(message["observation"])),
            map_tree(np.copy, as_named(message["prev_action"])),
            message["prev_reward"].copy(),
        )
        ranks, kind = message["env_ranks"].copy(), message["kind"]
        if kind.startswith("trial"):  # the actor wants an example of what the agent reports
            trial = self._agent.runtime.column_copy(ColumnStreams(0, range(len(ranks))).rngs(Purpose.ACTION))
            trial.runtime.set_columns([0] * len(ranks), self._plan.n_envs)
            trial.sample_mode(0)
            letter.reply(self._stepped(trial, inputs) if kind == "trial step" else _valued(trial, inputs))
            return None
        starts = self._begin_sessions(message, ranks)
        if kind == "value":
            for rank in ranks[starts].tolist():
                self._actor.reset_one(rank)
            self._actor.select(ranks)
            letter.reply(_valued(self._actor, inputs))
            return None
        return _StepRequest(letter, ranks, starts, inputs)

    def _begin_sessions(self, message: Mapping[str, Any], ranks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where the recurrent state begins again: a new episode begins, or another policy worker acted before."""
        starts: np.ndarray[Any, Any] = message["starts"].copy()
        for i, rank in enumerate(ranks.tolist()):
            if self._sessions[rank] != message["session"]:
                self._sessions[rank], starts[i] = message["session"], True
        return starts

    def _step(self, requests: Sequence[_StepRequest]) -> None:
        """Act for all environments of these requests in one call of the agent, and answer them."""
        ranks = np.concatenate([request.ranks for request in requests])
        for rank in ranks[np.concatenate([request.starts for request in requests])].tolist():
            self._actor.reset_one(rank)
        self._actor.select(ranks.astype(np.intp))
        join = (lambda leaf: leaf) if len(requests) == 1 else (lambda *leaves: np.concatenate(leaves))
        inputs = tuple(map_tree(join, *each) for each in zip(*(request.inputs for request in requests), strict=True))
        answer = self._stepped(self._actor, inputs)
        start = 0
        for request in requests:
            own = slice(start, start + len(request.ranks))
            request.letter.reply(map_tree(lambda rows, own=own: rows[own], answer))
            start = own.stop

    def _stepped(self, agent: Agent, inputs: Sequence[Any]) -> dict[str, Any]:
        step = as_agent_step(agent.step(*inputs), agent)
        info = map_tree(np.asarray, to_tree(step.agent_info))
        info["stream_version"] = np.full(len(inputs[-1]), self._parameters.version, np.int64)
        return {"action": to_tree(step.action), "agent_info": info}

    def _stats(self) -> Mapping[str, float]:
        mean = self._n_rows / self._n_batches if self._n_batches else 0.0
        return {"version": self._parameters.version, "mean_batch": mean} if self._server is not None else {}

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()


def _valued(agent: Agent, inputs: Sequence[Any]) -> dict[str, Any]:
    return {"value": np.asarray(agent.value(*inputs))}
