"""A worker that acts for the environments of many actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from penstock.agents.agent import Agent, as_agent_step
from penstock.arguments import integer
from penstock.buffers.named import as_named
from penstock.buffers.tree import map_tree
from penstock.distributed.messages import describe
from penstock.distributed.parameters import PARAMETERS, ParameterClient, by_policy, write_parameters
from penstock.distributed.pieces import to_tree
from penstock.distributed.role import PollResult, Worker
from penstock.distributed.statuses import FINAL
from penstock.distributed.streams import InferenceInbox
from penstock.distributed.wire import Call
from penstock.envs.examples import example_of
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import ConfigError, brief

_WAIT_SECONDS = 0.05  # how long a poll waits for the first request


@dataclass(frozen=True)
class AgentPlan:
    """How to make the agent of an experiment, and what to initialize it with."""

    make_agent: Callable[[], Agent | Mapping[str, Agent]]
    observation_space: Any  #: with a dict of agents, a dict by policy
    action_space: Any
    seed: int
    n_envs: int  #: of all actors together

    def agent(self) -> Any:
        """A new agent, or dict of agents. The first parameters depend on the seed only. Raises `ConfigError` for
        anything else."""
        agent, space, streams = self.make_agent(), self.observation_space, ColumnStreams(self.seed, range(1))
        spaces = {"": (space, self.action_space)}
        if type(space) is dict:
            spaces = {name: (space[name], self.action_space[name]) for name in space}
        policies = by_policy(agent)
        if policies.keys() != spaces.keys() or not all(isinstance(policy, Agent) for policy in policies.values()):
            raise ConfigError(
                "make_agent must return an Agent, or for environments of several agents a dict of Agents with the same "
                f"names in each call, got {brief(agent)}. Wrap a function of your own: FunctionAgent(function)"
            )
        for p, (name, policy) in enumerate(policies.items()):
            model_seed = streams.env_seeds(Purpose.MODEL, *([p] if p else []))[0]
            policy.runtime.ensure_initialized(*spaces[name], model_seed)
        return agent


@dataclass
class _Request:
    """A request of one actor, for its n environments."""

    call: Call
    kind: str  #: "step" or "value", or for an example of what the agent reports "trial step" or "trial value"
    ranks: np.ndarray[Any, Any]  #: env_ranks `[n]`
    starts: np.ndarray[Any, Any]  #: `[n]`, True where the recurrent state begins again
    inputs: tuple[Any, ...] = field(repr=False)  #: observation, prev_action, prev_reward, each `[n, ...]`


@dataclass(frozen=True)
class Policies:
    """`count` policy workers of the inference stream `stream`. After the first request, each waits up to `max_delay`
    seconds for more. It answers several requests together if they have at most `max_batch` environments. `resources`
    is what Ray reserves for each, such as `{"GPU": 0.5}`."""

    count: int
    stream: str = "policy"
    max_batch: int = 256
    max_delay: float = 0.0
    resources: Mapping[str, float] | None = None


class PolicyWorker(Worker):
    """Answers all requests together that came while the model was busy. It keeps the noise and the recurrent state of
    every environment, by env_rank. A request with a mistake fails alone. The `itr` of the agent's
    schedules is the number of the version that acts, minus 1.

    If it ends, its actors ask another policy worker, or this one after a restart. Recurrent state is lost then, and
    `ActorWorker` begins new episodes.

    Args:
        policies: the stream, and how many requests to answer at once.
        plan: how to make the agent.
    """

    def __init__(self, policies: Policies, plan: AgentPlan) -> None:
        self._policies, self._plan = policies, plan
        self._server: InferenceInbox | None = None
        self._next: _Request | None = None  # a request that did not fit into the batch before
        self._n_rows = self._n_batches = 0

    def _configure(self) -> None:
        plan = self._plan
        self._parameters = ParameterClient(self.names, PARAMETERS)
        first = self._parameters.first(lambda: self.status in FINAL or self._misses_panel())
        self._agent = plan.agent().runtime.worker_copy()
        self._inputs = {
            "observation": example_of(plan.observation_space),
            "prev_action": example_of(plan.action_space),
            "prev_reward": np.zeros((), np.float32),
        }
        ranks = range(plan.n_envs)
        # A copy of the agent that acts. It has one column for each environment of all actors: column i is env_rank i.
        self._actor = self._agent.runtime.column_copy(ColumnStreams(plan.seed, ranks).rngs(Purpose.ACTION))
        self._actor.runtime.set_columns(ranks, plan.n_envs)
        self._load(first)
        self._sessions = [""] * plan.n_envs  # of each environment: see `InferenceClient.ask`
        self._server = InferenceInbox(self.wire, self.names, self._policies.stream, self.name)

    def _load(self, parameters: Mapping[str, Any]) -> None:
        write_parameters(self._actor, parameters)
        self._actor.sample_mode(self._parameters.version[1] - 1)

    def _poll(self) -> PollResult:
        newer = self._parameters.newer()
        if newer is not None:
            self._load(newer)
        gathered, steps = self._gather(), list[_Request]()
        try:
            for request in gathered:
                if request.kind != "step":
                    self._answer(request)
                    continue
                # An actor that has lost a server and comes back may ask twice for the same environments.
                if any(np.isin(request.ranks, other.ranks).any() for other in steps):
                    self._step(steps)
                    steps = []
                steps.append(request)
            if steps:
                self._step(steps)
        except Exception as error:
            for call in (request.call for request in gathered if not request.call.is_answered):
                call.fail(f"the policy {self.name} has failed: {describe(error)}")
            raise
        n_rows = sum(len(request.ranks) for request in gathered)
        self._n_rows += n_rows
        self._n_batches += bool(gathered)
        return PollResult(n_rows, int(bool(gathered)))

    def _gather(self) -> list[_Request]:
        """The requests that wait, up to `max_batch` environments."""
        assert self._server is not None
        requests, n_rows, until, most = list[_Request](), 0, 0.0, self._policies.max_batch
        while n_rows < most:
            request, self._next = self._next, None
            if request is None:
                wait = _WAIT_SECONDS if not requests else max(0.0, until - time.monotonic())
                call = self._server.receive(wait)
                if call is None:
                    break
                request = self._read(call)
                if request is None:
                    continue
            n_rows += len(request.ranks)
            if requests and n_rows > most:
                self._next = request
                break
            if not requests:
                until = time.monotonic() + self._policies.max_delay
            requests.append(request)
        return requests

    def _read(self, call: Call) -> _Request | None:
        """The request in `call`. If it has mistakes, this answers that, and returns None."""
        try:
            message = call.message
            kind, ranks, starts = message["kind"], message["env_ranks"], message["starts"]
            if kind not in ("step", "value", "trial step", "trial value"):
                raise ValueError(f"there is no request {kind!r}")
            is_trial, n = kind.startswith("trial"), len(ranks)
            for name, array, dtype in (("env_ranks", ranks, np.int64), ("starts", starts, np.bool_)):
                if not isinstance(array, np.ndarray) or array.shape != (n,) or array.dtype != dtype:
                    raise ValueError(f"{name} must be an array [n] of {np.dtype(dtype)}, got {brief(array)}")
            if not n or ranks.min() < 0 or ranks.max() >= self._plan.n_envs:
                raise ValueError(f"env_ranks must be in range({self._plan.n_envs}), got {brief(ranks)}")
            if not is_trial and len(set(ranks.tolist())) < n:
                raise ValueError(f"env_ranks has a number twice: {brief(ranks)}")
            rows = partial(_rows, n)
            inputs = tuple(map_tree(rows, like, as_named(message[name])) for name, like in self._inputs.items())
            session, generation = str(message["session"]), integer("generation", message["generation"], 0)
        except (LookupError, TypeError, ValueError) as error:
            call.fail(f"this is no request to a policy worker: {describe(error)}")
            return None
        starts = starts.copy()
        if not is_trial:
            new = [i for i, rank in enumerate(ranks.tolist()) if self._sessions[rank] != session]
            starts[new] = True  # another actor or another policy worker acted before
            for rank in ranks[new].tolist():
                self._sessions[rank] = session
            if generation and new:
                streams = ColumnStreams(self._plan.seed, ranks[new].tolist(), generation << 16)
                self._actor.reseed_columns(ranks[new].astype(np.intp), streams.rngs(Purpose.ACTION))
        return _Request(call, kind, ranks.copy(), starts, inputs)

    def _answer(self, request: _Request) -> None:
        """Answer a request that is not for a step."""
        agent, n = self._actor, len(request.ranks)
        if request.kind == "value":
            for rank in request.ranks[request.starts].tolist():
                agent.reset_one(rank)
            agent.select(request.ranks.astype(np.intp))
        else:
            agent = self._agent.runtime.column_copy(ColumnStreams(0, range(n)).rngs(Purpose.ACTION))
            agent.runtime.set_columns([0] * n, self._plan.n_envs)
            agent.sample_mode(0)
        if request.kind == "trial step":
            request.call.reply(self._stepped(agent, request.inputs))
        else:
            request.call.reply({"value": np.asarray(agent.value(*request.inputs))})

    def _step(self, requests: Sequence[_Request]) -> None:
        """Act for all environments of these requests in one call of the agent, and answer them."""
        ranks = np.concatenate([request.ranks for request in requests])
        for rank in ranks[np.concatenate([request.starts for request in requests])].tolist():
            self._actor.reset_one(rank)
        self._actor.select(ranks.astype(np.intp))
        join = (lambda leaf: leaf) if len(requests) == 1 else (lambda *leaves: np.concatenate(leaves))
        inputs = tuple(map_tree(join, *parts) for parts in zip(*(request.inputs for request in requests), strict=True))
        answer = self._stepped(self._actor, inputs)
        start = 0
        for request in requests:
            span = slice(start, start + len(request.ranks))
            request.call.reply(map_tree(lambda rows, span=span: rows[span], answer))
            start = span.stop

    def _stepped(self, agent: Agent, inputs: Sequence[Any]) -> dict[str, Any]:
        step = as_agent_step(agent.step(*inputs), agent)
        info = map_tree(np.asarray, to_tree(step.agent_info))
        info["stream_version"] = np.full((len(inputs[-1]), 2), self._parameters.version, np.int64)
        return {"action": to_tree(step.action), "agent_info": info}

    def _stats(self) -> Mapping[str, float]:
        mean = self._n_rows / self._n_batches if self._n_batches else 0.0
        return {"version": self._parameters.version[1], "mean_batch": mean} if self._server is not None else {}

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()


def _rows(n: int, like: np.ndarray[Any, Any], value: object) -> np.ndarray[Any, Any]:
    """A copy of `value` `[n, ...]`. Raises `ValueError` if it does not fit `like` `[...]`."""
    wanted = (n, *like.shape)
    if (
        not isinstance(value, np.ndarray)
        or value.shape != wanted
        or not np.can_cast(value.dtype, like.dtype, "same_kind")
    ):
        raise ValueError(f"an input must be an array {list(wanted)} of {like.dtype}, got {brief(value)}")
    return value.astype(like.dtype)
