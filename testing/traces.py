"""Traces: what a collector recorded, and a log of what its environments and its agent really did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.agents import Agent, AgentStep, RandomAgent
from penstock.agents.joint import DelegatingAgent
from penstock.buffers import NamedArrays, Samples
from penstock.buffers.named import map_leaves
from penstock.collectors import Collector, TrajInfo
from penstock.envs import arrays_like, observation_example, write_row
from penstock.samplers import Sampler, SerialSampler
from penstock.testing.environments import Event, Setup


@dataclass(frozen=True)
class CollectorSetup(Setup):
    """The collector to check, and what it runs with."""

    collector_cls: type[Collector]
    agent: Agent | None
    n_batches: int

    def sampler(self, cls: type[Sampler], log: list[Event] | None = None, **arguments: Any) -> Sampler:
        return super().sampler(cls, log, collector_cls=self.collector_cls, **arguments)

    def make_agent(self) -> Agent:
        """The agent that acts."""
        return ProbeAgent(RandomAgent()) if self.agent is None else self.agent


# ---- agents --------------------------------------------------------------------------------


def probe(observation: object) -> Any:
    """One number per column, `[B]`, that depends on every element of the observation `[B, ...]`."""
    parts = [np.asarray(leaf) for _, leaf in NamedArrays(x=observation).leaves()]
    flat = np.concatenate([np.atleast_2d(p.reshape(len(p), -1)).astype(np.float64) for p in parts], axis=1)
    weights = np.cos(np.arange(1, flat.shape[1] + 1))
    return (np.tanh(flat / 100) @ weights).astype(np.float32)


class ProbeAgent(DelegatingAgent):
    """Reports a number beside each action, and has known values: both come from `probe`."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"probe": probe(observation) + prev_reward + 1})

    def value(self, observation: object, prev_action: object, prev_reward: object) -> Any:
        return probe(observation)


class LoggedAgent(DelegatingAgent):
    """Logs the calls that its copy in the worker gets. Its values come from `probe`, for any agent."""

    def __init__(self, agent: Agent, log: list[Event]) -> None:
        super().__init__(agent)
        self._log = log

    def _note(self, kind: str, column: int = -1, data: object = None) -> None:
        if self.in_worker:
            self._log.append(Event(kind, column, data))

    def reset(self) -> None:
        self._note("agent.reset")
        super().reset()

    def reset_one(self, column: int) -> None:
        self._note("agent.reset_one", column)
        super().reset_one(column)

    def sample_mode(self, itr: int) -> None:
        self._note("agent.sample_mode", data=itr)
        super().sample_mode(itr)

    def eval_mode(self, itr: int) -> None:
        self._note("agent.eval_mode", data=itr)
        super().eval_mode(itr)

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        given = copy.deepcopy((observation, prev_action, prev_reward))
        step = super().step(observation, prev_action, prev_reward)
        self._note("agent.step", data=(*given, copy.deepcopy(step.agent_info)))
        return step

    def value(self, observation: object, prev_action: object, prev_reward: object) -> Any:
        return probe(observation)


# ---- a trace -------------------------------------------------------------------------------


def place(itr: int, t: int, b: int) -> str:
    """One cell of one batch, as messages name it."""
    return f"itr={itr}, t={t}, env_rank={b}"


@dataclass(frozen=True)
class Step:
    """One environment step, with the calls before it."""

    itr: int
    t: int  #: the row: number of the last call of agent.step in this batch, from 0; -1 before the first call
    b: int  #: column
    before: Any  #: the observation before the step
    action: Any
    after: Any  #: the observation that the step returned
    reward: float
    terminated: bool
    truncated: bool
    agent_step: Any  #: the last agent.step: observation, prev_action, prev_reward, agent_info; None if there was none
    last: Step | None  #: the step before it, in the same episode
    after_end: bool  #: the episode had ended, and the environment was not reset since
    interrupted: bool  #: a reset since the last step interrupted a running episode
    env_resets: int  #: resets of the environment since the column's last step
    agent_resets: int  #: resets of the column's agent state before the last agent.step, since the column's last step
    length: int  #: steps of the episode so far
    return_: float  #: rewards of the episode so far

    @property
    def done(self) -> bool:
        """Whether the step ended the episode."""
        return self.terminated or self.truncated

    @property
    def where(self) -> str:
        """Its cell, as messages name it."""
        return place(self.itr, self.t, self.b)


@dataclass(frozen=True)
class BatchTrace:
    """One batch: its samples, its trajectories, and the calls while it was collected."""

    itr: int
    samples: Samples  #: a copy
    infos: Sequence[TrajInfo]
    events: Sequence[Event]
    steps: Sequence[Step]  #: in the order of their calls
    following: Sequence[Any]  #: for each column, the observation after the batch; None after the end of an episode


@dataclass(frozen=True)
class Trace:
    """Some batches of a setup in one process."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    batches: Sequence[BatchTrace]

    def cells(self) -> Iterator[tuple[Step, Samples]]:
        """Every step, with the samples of its batch."""
        for batch in self.batches:
            for step in batch.steps:
                yield step, batch.samples

    @staticmethod
    def row_of(space: gym.Space[Any], value: object) -> Any:
        """`value`, an element of `space`, as it is recorded."""
        row = map_leaves(lambda leaf: np.zeros((1, 1, *leaf.shape), leaf.dtype), observation_example(space))
        write_row(arrays_like(space, row), 0, [value])
        return map_leaves(lambda leaf: leaf[0, 0], row)


def record(
    setup: CollectorSetup,
    traj_info_cls: type[TrajInfo] = TrajInfo,
    before_batch: Callable[[Samples], None] | None = None,
) -> Trace:
    """Run `setup` in a `SerialSampler`; `before_batch` gets the samples before each batch."""
    log: list[Event] = []
    columns = [Column() for _ in range(setup.batch_B)]
    batches = []
    with setup.sampler(SerialSampler, log, traj_info_cls=traj_info_cls) as sampler:
        sampler.initialize(LoggedAgent(setup.make_agent(), log), seed=setup.seed, bootstrap_value=True)
        read_steps(columns, log, -1)
        for itr in range(7, 7 + setup.n_batches):
            log.clear()
            if before_batch is not None:
                before_batch(sampler.samples_np)
            _, infos = sampler.obtain_samples(itr)
            steps = read_steps(columns, log, itr)
            following = [None if column.last and column.last.done else column.observation for column in columns]
            batches.append(BatchTrace(itr, sampler.samples_np.copy(), infos, list(log), steps, following))
        return Trace(sampler.observation_space, sampler.action_space, batches)


@dataclass
class Column:
    """The state of one environment after the events that were read so far."""

    observation: Any = None
    last: Step | None = None  #: the last step, if there was no reset after it
    interrupted: bool = False
    env_resets: int = 0
    agent_resets: int = 0  #: since the column's last step
    agent_resets_before_acting: int = 0  #: of these, the ones before the last agent.step

    def reset(self, observation: object) -> None:
        """The environment was reset."""
        self.interrupted = self.interrupted or (self.last is not None and not self.last.done)
        self.observation, self.last = observation, None
        self.env_resets += 1

    def step(self, event: Event, itr: int, t: int, agent_step: object) -> Step:
        """The environment was stepped; returns the step."""
        action, after, reward, terminated, truncated = event.data
        last = self.last
        step = Step(
            itr=itr,
            t=t,
            b=event.column,
            before=self.observation,
            action=action,
            after=after,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            agent_step=agent_step,
            last=last,
            after_end=last is not None and last.done,
            interrupted=self.interrupted,
            env_resets=self.env_resets,
            agent_resets=self.agent_resets_before_acting,
            length=1 + (last.length if last else 0),
            return_=float(reward) + (last.return_ if last else 0.0),
        )
        self.observation, self.last = after, step
        self.agent_resets -= self.agent_resets_before_acting
        self.interrupted, self.env_resets, self.agent_resets_before_acting = False, 0, 0
        return step


def read_steps(columns: Sequence[Column], log: Sequence[Event], itr: int) -> list[Step]:
    """The environment steps in the events of one batch."""
    steps, t, agent_step = list[Step](), -1, None
    for event in log:
        if event.kind == "agent.step":
            t, agent_step = t + 1, event.data
            for column in columns:
                column.agent_resets_before_acting = column.agent_resets
        elif event.kind == "agent.reset":
            for column in columns:
                column.agent_resets += 1
        elif event.kind == "agent.reset_one":
            columns[event.column].agent_resets += 1
        elif event.kind == "env.reset":
            columns[event.column].reset(event.data)
        elif event.kind == "env.step":
            steps.append(columns[event.column].step(event, itr, t, agent_step))
    return steps
