"""What an agent is shown in a check, and what copies of it do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.agents import Agent, RandomAgent
from penstock.buffers import NamedArrays, as_named
from penstock.buffers.named import map_leaves
from penstock.collectors.acting import as_agent_step
from penstock.envs import ColumnStreams, EnvFn, Purpose, build_example_env, env_factories
from penstock.errors import ConfigError
from penstock.samplers import Sampler, SerialSampler
from penstock.testing.rules import Violation, leaves
from penstock.testing.traces import bounded
from penstock.testing.wrapping import COLUMN

__all__ = ["Subject", "Tape", "act", "stack", "step"]


@dataclass(frozen=True)
class Tape:
    """Inputs `[T, B, ...]` that agents are shown, whatever they do, and where episodes end."""

    observation: Any
    prev_action: Any
    prev_reward: Any
    done: Any

    def row(self, t: int, columns: slice = slice(None)) -> tuple[Any, Any, Any]:
        """The inputs of one step, in memory of their own."""
        fields = (self.observation, self.prev_action, self.prev_reward)
        return tuple(map_leaves(lambda leaf: leaf[t, columns].copy(), field) for field in fields)


@dataclass(frozen=True)
class Subject:
    """The agent to be checked, and what it is shown."""

    make_agent: Callable[[], Agent]
    env_fn: EnvFn
    env_kwargs: Mapping[str, Any] | None
    batch_T: int
    batch_B: int
    seed: int
    start_method: str

    @property
    def name(self) -> str:
        """The agent's class."""
        return type(self.agent).__name__

    @cached_property
    def tape(self) -> Tape:
        """What random actions lead to."""
        with self._sampler(SerialSampler) as sampler:
            sampler.initialize(RandomAgent(), seed=self.seed)
            sampler.obtain_samples(0)
            env, agent = sampler.samples_np.env.copy(), sampler.samples_np.agent.copy()
        first = np.vstack([np.ones((1, self.batch_B), bool), env.done[:-1]])
        prev_action, prev_reward = agent.prev_action, env.prev_reward
        for _, leaf in (*leaves(prev_action, ""), *leaves(prev_reward, "")):
            leaf[first] = 0
        return Tape(env.observation, prev_action, prev_reward, env.done)

    @cached_property
    def other_tape(self) -> Tape:
        """The same rows in another order, without ends."""
        tape, order = self.tape, np.arange(self.batch_T)[::-1]

        def back(value: Any) -> Any:
            return map_leaves(lambda leaf: leaf[order][:, ::-1], value)

        reward = back(tape.prev_reward) + 1
        return Tape(back(tape.observation), back(tape.prev_action), reward, np.zeros_like(tape.done))

    @cached_property
    def agent(self) -> Agent:
        """The learner's object, initialized."""
        return self.new(self.seed)

    def new(self, seed: int) -> Agent:
        """One more agent, initialized for the environment's spaces."""
        agent = self.make_agent()
        if not isinstance(agent, Agent):
            raise ConfigError(f"make_agent must return a penstock Agent, got {type(agent).__name__}")
        env = build_example_env(env_factories(self.env_fn, self.env_kwargs, 1)[0])
        observation_space, action_space = env.observation_space, env.action_space
        env.close()
        agent.runtime.ensure_initialized(observation_space, action_space, seed)
        return agent

    def copy(self, agent: Agent | None = None, columns: range | None = None, seed: int = 0) -> Agent:
        """A copy to act with, of `self.agent` unless told, as a worker with these columns makes it."""
        return self.settle((agent or self.agent).runtime.worker_copy(), columns or range(self.batch_B), seed)

    def settle(self, worker: Agent, columns: range, seed: int = 0) -> Agent:
        """A copy of a worker's copy, with state for these columns, ready to sample."""
        twin = worker.runtime.column_copy(ColumnStreams(self.seed + seed, columns).rngs(Purpose.ACTION))
        twin.runtime.set_columns(columns, self.batch_B)
        twin.sample_mode(0)
        return twin

    def reference(self, agent: Agent | None = None) -> Any:
        """What a copy does on the tape."""
        return act(self.copy(agent), self.tape)

    def _sampler(self, cls: type[Sampler], **arguments: Any) -> Sampler:
        env_fn, env_kwargs = bounded(self.env_fn, self.env_kwargs), [{COLUMN: b} for b in range(self.batch_B)]
        return cls(
            env_fn,
            env_kwargs=env_kwargs,
            batch_T=self.batch_T,
            batch_B=self.batch_B,
            max_decorrelation_steps=0,
            **arguments,
        )

    def sampled(self, cls: type[Sampler], **arguments: Any) -> NamedArrays:
        """What the agent does in a sampler."""
        with self._sampler(cls, **arguments) as sampler:
            sampler.initialize(self.agent, seed=self.seed)
            sampler.obtain_samples(0)
            agent = sampler.samples_np.agent
            return NamedArrays(action=agent.action, agent_info=agent.agent_info).copy()


# ---- acting on a tape ----------------------------------------------------------------------


def act(
    agent: Agent,
    tape: Tape,
    rows: Sequence[int] | None = None,
    columns: slice = slice(None),
    between: Callable[[int], None] | None = None,
) -> NamedArrays:
    """What `agent` does: actions and agent_info `[T, B, ...]`. `between(t)` is called before each step."""
    found = []
    for t in range(len(tape.done)) if rows is None else rows:
        if between is not None:
            between(t)
        found.append(step(agent, *tape.row(t, columns)))
        for b in np.flatnonzero(tape.done[t, columns]):
            agent.reset_one(int(b))
    return stack(found)


def step(agent: Agent, observation: Any, prev_action: Any, prev_reward: Any) -> NamedArrays:
    """One step's action and agent_info, copied."""
    result = as_agent_step(agent.step(observation, prev_action, prev_reward), agent)
    both = NamedArrays(action=as_named(result.action), agent_info=as_named(result.agent_info))
    return both.map(np.array)


def stack(rows: Sequence[NamedArrays]) -> NamedArrays:
    """The rows as one `[T, B, ...]`, by dotted name; raises `Violation` if they are not of the same shapes."""
    paths = [dict(row.leaves()) for row in rows]
    for t, row in enumerate(paths):
        if {k: (v.shape, v.dtype) for k, v in row.items()} != {k: (v.shape, v.dtype) for k, v in paths[0].items()}:
            raise Violation(
                f"at t={t}, fields {_shapes(row)}; at t=0, {_shapes(paths[0])}",
                "report the same fields of the same shape and dtype at each step",
            )
    return NamedArrays({name: np.stack([row[name] for row in paths]) for name in paths[0]})


def _shapes(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {list(leaf.shape)} {leaf.dtype}" for name, leaf in row.items())
