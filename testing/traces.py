"""Traces: what a collector recorded, what its environments and its agents got, and the same from the reference loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.agents import Agent, AgentStep, RandomAgent
from penstock.agents.joint import DelegatingAgent
from penstock.buffers import NamedArrays, PolicySamples
from penstock.collectors import Collector, TrajInfo
from penstock.envs.factory import EnvContext, env_factories
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.samplers import GpuSampler, Sampler, SerialSampler
from penstock.testing.environments import COLUMN, Event, Log, Setup
from penstock.testing.reference_envs import row_of
from penstock.testing.reference_loop import Column, ReferenceLoop

#: The first `itr` of a trace: not 0, so that a collector that counts for itself is found.
FIRST_ITR = 7


@dataclass(frozen=True)
class CollectorSetup(Setup):
    """The collector to check, and what it runs with."""

    collector_cls: type[Collector]
    agent: Agent | Mapping[str, Agent] | None
    policy_of: Callable[..., str] | None
    n_batches: int
    batched: bool = False

    def sampler(self, cls: type[Sampler], log: Log | None = None, **arguments: Any) -> Sampler:
        return super().sampler(cls, log, collector_cls=self.collector_cls, **arguments)

    def make_agent(self, log: Log | None = None) -> Any:
        """The agent that acts, or those of each policy. Their values are known. With `log`, they log their calls."""
        if isinstance(self.agent, Mapping):
            return {name: _with_known_values(agent, name, log) for name, agent in self.agent.items()}
        return _with_known_values(ProbeAgent(RandomAgent()) if self.agent is None else self.agent, "agent", log)

    @property
    def start(self) -> dict[str, Any]:
        """What `initialize` gets beside the agents."""
        return {"seed": self.seed} | ({} if self.policy_of is None else {"policy_of": self.policy_of})


# ---- agents --------------------------------------------------------------------------------


def probe(observation: object, shape: tuple[int, ...]) -> Any:
    """One number per column, an array of this shape, that depends on every element of the observation."""
    parts = [np.asarray(leaf).reshape(*shape, -1) for _, leaf in NamedArrays(x=observation).leaves()]
    flat = np.concatenate(parts, axis=-1).astype(np.float64)
    weights = np.cos(np.arange(1, flat.shape[-1] + 1))
    return (np.tanh(flat / 100) @ weights).astype(np.float32)


class KnownValues(DelegatingAgent):
    """Its values come from `probe`, for any agent."""

    def value(self, observation: object, prev_action: object, prev_reward: Any) -> Any:
        return probe(observation, prev_reward.shape)


class ProbeAgent(KnownValues):
    """Reports a number beside each action, from `probe` too."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"probe": probe(observation, prev_reward.shape) + prev_reward + 1})


class LoggedAgent(KnownValues):
    """Logs the calls that its copies get."""

    def __init__(self, agent: Agent, log: Log, policy: str = "agent") -> None:
        super().__init__(agent)
        self._log, self._policy = log, policy

    def _note(self, kind: str, data: object = None) -> None:
        self._log.append(Event(kind, self._policy, data))

    def reset_one(self, column: int) -> None:
        self._note("agent.reset_one", column)
        super().reset_one(column)

    def sample_mode(self, itr: int) -> None:
        self._note("agent.sample_mode", itr)
        super().sample_mode(itr)

    def eval_mode(self, itr: int) -> None:
        self._note("agent.eval_mode", itr)
        super().eval_mode(itr)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        given = NamedArrays(observation=observation, prev_action=prev_action, prev_reward=prev_reward)
        n = prev_reward.ndim  # 2 for a joint agent, whose columns are noted one after the other
        self._note("agent.step", given.map(lambda leaf: np.array(leaf).reshape(-1, *leaf.shape[n:])))
        return super().step(observation, prev_action, prev_reward)


def _with_known_values(agent: Agent, policy: str, log: Log | None) -> Agent:
    return KnownValues(agent) if log is None else LoggedAgent(agent, log, policy)


# ---- a run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectedBatch:
    """One batch: the fields of each policy without their groups (`reward`, not `env.reward`), and the trajectories."""

    itr: int
    fields: Mapping[str, NamedArrays]
    infos: Sequence[TrajInfo]


def run(
    setup: CollectorSetup,
    cls: type[Sampler] = SerialSampler,
    *,
    log: Log | None = None,
    fills: bool = False,
    **arguments: Any,
) -> list[CollectedBatch]:
    """The batches of a sampler. With `fills`, each is overwritten before the next one is collected."""
    agents, batches = setup.make_agent(log), list[CollectedBatch]()
    # An inference server has no values of a joint agent.
    has_values = not (issubclass(cls, GpuSampler) and getattr(agents, "joint", False))
    with setup.sampler(cls, log, **arguments) as sampler:
        sampler.initialize(agents, bootstrap_value=has_values, **setup.start)
        for itr in range(FIRST_ITR, FIRST_ITR + setup.n_batches):
            if log is not None:
                log.append(Event("batch"))
            samples, infos = sampler.obtain_samples(itr)
            copies = {name: part.copy().numpy() for name, part in _by_policy(samples).items()}
            batches.append(
                CollectedBatch(itr, {n: NamedArrays(part.env, **part.agent) for n, part in copies.items()}, infos)
            )
            for _, leaf in samples.leaves() if fills else ():
                array = np.asarray(leaf)
                kind = array.dtype.kind
                array[...] = np.iinfo(array.dtype).max if kind in "iu" else True if kind == "b" else np.nan
    return batches


def _by_policy(samples: Any) -> dict[str, Any]:
    return dict(samples.items()) if isinstance(samples, PolicySamples) else {"agent": samples}


# ---- the same from the reference loop ------------------------------------------------------


@dataclass
class Replay(ReferenceLoop):
    """The loop, where the environments are reset when they were, and get the actions that they got. So it says what a
    batch must hold for a collector that begins episodes at other times, or changes actions."""

    calls: Mapping[tuple[int, int], Sequence[Event]] = field(default_factory=dict)  #: see `calls_by_row`
    waits: bool = False  #: whether an environment that is over may wait for the end of the batch

    def __post_init__(self) -> None:
        self._k = -1  # the number of the batch
        self.left, self.cut = list[tuple[int, int, int]](), list[tuple[int, int, int]]()  # see `Trace`
        super().__post_init__()

    def obtain_samples(self, itr: int) -> tuple[Any, list[TrajInfo]]:
        self._k += 1
        return super().obtain_samples(itr)

    def _calls(self, kind: str, t: int) -> Iterator[Event]:
        return (event for event in self.calls[self._k, t] if event.kind == kind)

    def start_envs(self) -> None:
        for event in self.calls[-1, -1]:
            if event.kind == "env.reset":
                self.reset(starts_of(event, self.batch_B))
            else:
                self.random_step(event.who, partial(self._given, event))

    def begin_episodes(self, t: int, over: Collection[int]) -> None:
        if self.batched and self._envs.resets_itself:
            super().begin_episodes(t, over)
        for event in self._calls("env.reset", t):
            starts = starts_of(event, self.batch_B)
            self.cut += [(self._k, t, e) for e in starts if any(column.prev for column in self._of(e))]
            self.reset(starts)
        if t < 0 or not self.waits:
            self.left += [(self._k, t, e) for e in sorted(self._over)]

    def change_action(self, t: int, column: Column, action: Any) -> Any:
        for event in self._calls("env.step", t):
            if event.who in (None, column.env_rank):
                return self._given(event, column)
        return action

    def _given(self, event: Event, column: Column) -> Any:
        """What the environment got for this column."""
        action, *_ = event.data
        if self.batched:
            action = self._envs.actions_of(action)[column.env_rank]
        elif column.agent_id is not None:
            action = action.get(column.agent_id)
        return row_of(column.policy.spaces[1], action)


def starts_of(event: Event, n: int) -> dict[int, dict[str, Any]]:
    """The environments that a reset began, each with its arguments. A batched one has n."""
    given = {name: value for name, value in event.data.items() if value is not None}
    if event.who is not None:
        return {event.who: given}
    mask = given.get("options", {}).get("reset_mask")
    rows = range(n) if mask is None else np.flatnonzero(mask).tolist()
    options = {name: value for name, value in given.get("options", {}).items() if name != "reset_mask"}
    starts: dict[int, dict[str, Any]] = {b: {"options": options} if options else {} for b in rows}
    if "seed" in given:
        seeds = np.broadcast_to(given["seed"], n) if np.ndim(given["seed"]) == 0 else given["seed"]
        for b, seed in zip(rows, seeds if len(seeds) == len(starts) else [seeds[b] for b in rows], strict=True):
            starts[b] |= {} if seed is None else {"seed": int(seed)}
    return starts


def calls_by_row(log: Sequence[Event]) -> Mapping[tuple[int, int], Sequence[Event]]:
    """The calls of environments by the number of the batch and the row: those after the agents have acted in row t.
    Those before row 0 have t = -1, and those before the first batch are (-1, -1)."""
    by_row, k, n_acts = defaultdict[tuple[int, int], list[Event]](list), -1, Counter[Any]()
    for event in log:
        if event.kind == "batch":
            k, n_acts = k + 1, Counter()
        elif event.kind == "agent.step" and k >= 0:
            n_acts[event.who] += 1
        elif event.kind.startswith("env."):
            by_row[k, max(n_acts.values(), default=0) - 1].append(event)
    return by_row


@dataclass(frozen=True)
class Trace:
    """Some batches of a collector in one process, and those of the reference loop."""

    setup: CollectorSetup
    collected: Sequence[CollectedBatch]
    wanted: Sequence[CollectedBatch]
    log: Log
    wanted_log: Log
    #: Of each policy: its columns, and how many of them share a state of the agent.
    columns: Mapping[str, tuple[Sequence[Column], int]]
    #: Which environments were not reset when they should have been, and which while their episode was running: number
    #: of the batch, row before it, env_rank.
    left: Sequence[tuple[int, int, int]]
    cut: Sequence[tuple[int, int, int]]

    def place(self, itr: int, t: int, policy: str, b: int) -> str:
        """One cell of one batch, as messages name it; with t = T, what comes after the last row."""
        column = self.columns[policy][0][b]
        agent = "" if column.agent_id is None else f", agent {column.agent_id!r}"
        row = f", t={t}" if t < self.setup.batch_T else ""
        return f"itr={itr}{row}, env_rank={column.env_rank}{agent}"


def record(setup: CollectorSetup, traj_info_cls: type[TrajInfo] = TrajInfo) -> Trace:
    """Run `setup` in a `SerialSampler`, and then in the reference loop."""
    log, wanted_log = Log(), Log()
    collected = run(setup, log=log, traj_info_cls=traj_info_cls)
    loop = Replay(
        _env_fns(setup),
        setup.make_agent(wanted_log),
        setup.seed,
        setup.batch_T,
        setup.batch_B,
        batched=setup.batched,
        max_decorrelation_steps=setup.max_decorrelation_steps,
        bootstrap_value=True,
        policy_of=setup.policy_of or str,
        traj_info_cls=traj_info_cls,
        calls=calls_by_row(log),
        waits=setup.collector_cls.waits,
    )
    wanted = []
    for batch in collected:
        wanted_log.append(Event("batch"))
        samples, infos = loop.obtain_samples(batch.itr)
        wanted.append(CollectedBatch(batch.itr, samples if isinstance(samples, dict) else {"agent": samples}, infos))
    loop.close()
    columns = {name: (policy.columns, policy.k) for name, policy in loop.policies.items()}
    return Trace(setup, collected, wanted, log, wanted_log, columns, loop.left, loop.cut)


def _env_fns(setup: CollectorSetup) -> Any:
    """The environments of the run, for the loop."""
    kwargs = None if setup.batched else [{COLUMN: b} for b in range(setup.batch_B)]
    seeds = ColumnStreams(setup.seed, range(setup.batch_B)).env_seeds(Purpose.TRAIN)
    contexts = [EnvContext(b, 0, seed, Purpose.TRAIN) for b, seed in enumerate(seeds)]
    factories = env_factories(setup.env_fns(None), kwargs, setup.batch_B)
    if setup.batched:
        return partial(factories[0].batched, context=contexts[0])
    as_they_are = [replace(factory, as_seats=lambda env: env) for factory in factories]
    return [partial(factory, context) for factory, context in zip(as_they_are, contexts, strict=True)]
