"""Traces: what a collector recorded, beside what its environments and its agent say that they did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.agents import Agent, AgentStep, RandomAgent
from penstock.buffers import NamedArrays, Samples
from penstock.buffers.named import map_leaves
from penstock.collectors import Collector, TrajInfo
from penstock.envs import EnvFn, observation_example, row_writer
from penstock.samplers import Sampler, SerialSampler
from penstock.testing.delegation import DelegatingAgent
from penstock.testing.wrapping import COLUMN, wrapping

__all__ = [
    "BatchTrace",
    "BoundedEnv",
    "Event",
    "LoggedAgent",
    "LoggedEnv",
    "Probing",
    "Setup",
    "Step",
    "Trace",
    "bounded",
    "probe",
    "record",
]


@dataclass(frozen=True)
class Event:
    """One call that an environment or the agent received, in the order of calls."""

    kind: str  #: "env.reset", "env.step", "agent.step", "agent.reset", "agent.reset_one", "agent.sample_mode", ...
    column: int = -1
    data: Any = None


@dataclass(frozen=True)
class Setup:
    """What is run: a collector, environments, an agent, sizes and a seed."""

    collector_cls: type[Collector]
    env_fn: EnvFn
    env_kwargs: Mapping[str, Any] | None
    agent: Agent | None
    batch_T: int
    batch_B: int
    n_batches: int
    seed: int
    start_method: str

    def sampler(self, cls: type[Sampler], log: list[Event] | None = None, **arguments: Any) -> Sampler:
        """A sampler of this setup, in bounded environments that keep a log if one is given."""
        return cls(
            bounded(self.env_fn, self.env_kwargs, log),
            env_kwargs=[{COLUMN: column} for column in range(self.batch_B)],
            batch_T=self.batch_T,
            batch_B=self.batch_B,
            collector_cls=self.collector_cls,
            max_decorrelation_steps=10,
            start_method=self.start_method,
            **arguments,
        )

    def make_agent(self) -> Agent:
        """The agent that is to act."""
        return Probing(RandomAgent()) if self.agent is None else self.agent


# ---- what is watched -----------------------------------------------------------------------


class BoundedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Ends episodes after 3 to 11 steps, by truncation, termination or both in turn, whatever `env` does.

    So that there are ends of every kind to look at, in a few batches of any environment.
    """

    def __init__(self, env: gym.Env[Any, Any], column: int) -> None:
        super().__init__(env)
        self._column, self._episode, self._count = column, -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode += 1
        self._count = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self._count += 1
        if self._count >= 3 + (7 * self._column + 5 * self._episode) % 9:
            kind = (self._column + self._episode) % 3
            terminated, truncated = terminated or kind != 0, truncated or kind != 1
        return observation, reward, terminated, truncated, info


class LoggedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Logs each reset and step with what was given and returned."""

    def __init__(self, env: gym.Env[Any, Any], column: int, log: list[Event]) -> None:
        super().__init__(env)
        self._column, self._log = column, log

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        self._log.append(Event("env.reset", self._column, copy.deepcopy(result[0])))
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        given = copy.deepcopy(action)
        result = super().step(action)
        self._log.append(Event("env.step", self._column, (given, *copy.deepcopy(result[:4]))))
        return result


def bounded(
    env_fn: EnvFn, env_kwargs: Mapping[str, Any] | None, log: list[Event] | None = None
) -> Callable[..., gym.Env[Any, Any]]:
    """An env_fn for `BoundedEnv`s, which keep a log if one is given; it takes a column as `COLUMN`."""

    def wrap(env: gym.Env[Any, Any], column: int) -> gym.Env[Any, Any]:
        env = BoundedEnv(env, column)
        return env if log is None else LoggedEnv(env, column, log)

    return wrapping(env_fn, wrap, env_kwargs)


def probe(observation: Any) -> Any:
    """One number `[B]` that hangs on every element of an observation `[B, ...]`."""
    parts = [np.asarray(leaf) for _, leaf in NamedArrays(x=observation).leaves()]
    flat = np.concatenate([np.atleast_2d(p.reshape(len(p), -1)).astype(np.float64) for p in parts], axis=1)
    weights = np.cos(np.arange(1, flat.shape[1] + 1))
    return (np.tanh(flat / 100) @ weights).astype(np.float32)


class Probing(DelegatingAgent):
    """Reports a number of its own beside each action, and values observations by a known function."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"probe": probe(observation) + prev_reward + 1})

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return probe(observation)


class LoggedAgent(DelegatingAgent):
    """Logs what its copy in the worker is called with; values are `probe`'s, whatever the agent."""

    def __init__(self, agent: Agent, log: list[Event]) -> None:
        super().__init__(agent)
        self._log = log

    def _note(self, kind: str, column: int = -1, data: Any = None) -> None:
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

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return probe(observation)


# ---- a trace -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One environment step of one column, and what went before it."""

    before: Any  #: the observation that the environment stood at
    action: Any
    after: Any  #: the observation that it returned
    reward: float
    terminated: bool
    truncated: bool
    agent_call: int  #: which of the agent's steps in this batch came before, from 0
    is_first: bool  #: of its episode
    past_end: bool  #: the episode had ended, and there was no reset
    gave_up: bool  #: the environment was reset in mid-episode before this step
    prev_action: Any  #: of the step before in the same episode, or None
    prev_reward: float  #: likewise, or 0
    env_resets: int  #: resets of the environment since the column's step before; -1 for its first ever
    agent_resets: int  #: resets of the column's agent state since then, until the agent acted
    length: int  #: steps of the episode so far
    return_: float  #: rewards of the episode so far


@dataclass(frozen=True)
class BatchTrace:
    """One batch: what was recorded, handed over and done."""

    itr: int
    samples: Samples  #: a copy
    infos: Sequence[TrajInfo]
    steps: Sequence[Sequence[Step]]  #: of each column
    following: Sequence[Any]  #: the observation that each column stands at afterwards; None at the end of an episode
    agent_steps: Sequence[Any]  #: (observation, prev_action, prev_reward, agent_info) of each call
    modes: Sequence[tuple[int, bool]]  #: itr of each sample_mode, and whether no step had come before it


@dataclass(frozen=True)
class Trace:
    """Some batches of a setup in one process."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    before: Sequence[Step | None]  #: the last step of each column before the first batch
    batches: Sequence[BatchTrace]

    def row_of(self, space: gym.Space[Any], value: Any) -> Any:
        """`value`, an element of `space`, as it is recorded."""
        row = map_leaves(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), observation_example(space))
        writer = row_writer(space)
        writer.write(writer.prepare(row), [value])
        return map_leaves(lambda leaf: leaf[0], row)


def record(
    setup: Setup,
    traj_info_cls: type[TrajInfo] = TrajInfo,
    before_batch: Callable[[Samples], None] | None = None,
) -> Trace:
    """Run `setup` in a `SerialSampler`; `before_batch` is shown the samples before each batch."""
    log: list[Event] = []
    history = _History(setup.batch_B)
    batches = []
    with setup.sampler(SerialSampler, log, traj_info_cls=traj_info_cls) as sampler:
        sampler.initialize(LoggedAgent(setup.make_agent(), log), seed=setup.seed, bootstrap_value=True)
        history.read(log)
        before = [column.last for column in history.columns]
        for itr in range(7, 7 + setup.n_batches):
            log.clear()
            if before_batch is not None:
                before_batch(sampler.samples_np)
            _, infos = sampler.obtain_samples(itr)
            steps = history.read(log)
            agent_steps = [event.data for event in log if event.kind == "agent.step"]
            following = [None if column.over else column.observation for column in history.columns]
            samples = sampler.samples_np.copy()
            batches.append(BatchTrace(itr, samples, infos, steps, following, agent_steps, _modes(log)))
        return Trace(sampler.observation_space, sampler.action_space, before, batches)


def _modes(log: Sequence[Event]) -> list[tuple[int, bool]]:
    modes, acted = [], False
    for event in log:
        acted = acted or event.kind == "agent.step"
        if event.kind == "agent.sample_mode":
            modes.append((event.data, not acted))
    return modes


@dataclass
class _Column:
    observation: Any = None
    last: Step | None = None
    running: bool = False  #: a step has been made since the last reset, and the episode goes on
    over: bool = False
    gave_up: bool = False
    env_resets: int = 0
    agent_resets: int = 0
    agent_resets_acted_on: int = 0


@dataclass
class _History:
    """Turns events into steps, column by column, over all batches."""

    batch_B: int
    columns: list[_Column] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = [_Column() for _ in range(self.batch_B)]

    def read(self, log: Sequence[Event]) -> list[list[Step]]:
        """The steps of each column in these events."""
        steps: list[list[Step]] = [[] for _ in self.columns]
        acted = 0
        for event in log:
            if event.kind == "agent.step":
                acted += 1
                for column in self.columns:
                    column.agent_resets_acted_on = column.agent_resets
            elif event.kind == "env.step":
                steps[event.column].append(self._step(self.columns[event.column], event.data, acted - 1))
            elif event.kind == "env.reset":
                column = self.columns[event.column]
                column.gave_up = column.gave_up or column.running
                column.observation, column.running, column.over = event.data, False, False
                column.env_resets += 1
            elif event.kind in ("agent.reset", "agent.reset_one"):
                for b in range(self.batch_B) if event.kind == "agent.reset" else (event.column,):
                    self.columns[b].agent_resets += 1
        return steps

    def _step(self, column: _Column, data: Any, agent_call: int) -> Step:
        action, after, reward, terminated, truncated = data
        last = column.last if column.running or column.over else None  # in the same episode
        step = Step(
            before=column.observation,
            action=action,
            after=after,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            agent_call=agent_call,
            is_first=last is None,
            past_end=column.over,
            gave_up=column.gave_up,
            prev_action=last.action if last else None,
            prev_reward=last.reward if last else 0.0,
            env_resets=column.env_resets if column.last else -1,
            agent_resets=column.agent_resets_acted_on,
            length=1 + (last.length if last else 0),
            return_=float(reward) + (last.return_ if last else 0.0),
        )
        column.observation, column.last = after, step
        column.over = step.terminated or step.truncated
        column.running = not column.over
        column.agent_resets -= column.agent_resets_acted_on
        column.gave_up, column.env_resets, column.agent_resets_acted_on = False, 0, 0
        return step
