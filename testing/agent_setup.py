"""What the agent rules run: copies of the agent act on recorded inputs, the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from penstock.agents import Agent, RandomAgent
from penstock.agents.action_masks import info_key
from penstock.agents.agent import as_agent, as_agent_step
from penstock.buffers import NamedArrays, as_named
from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.tree import tree_leaves
from penstock.envs import ColumnStreams, MaskInObservation, Purpose, build_example_env, env_factories
from penstock.envs.seats import ParallelView
from penstock.errors import ConfigError
from penstock.samplers import Sampler, SerialSampler
from penstock.testing.environments import Setup
from penstock.testing.rules import Violation
from penstock.workers.marking import marked


@dataclass(frozen=True)
class Tape:
    """Recorded inputs `[T, B, ...]` for `agent.step`, and the episode ends `[T, B]`."""

    observation: Any
    prev_action: Any
    prev_reward: Any
    done: Any

    def row(self, t: int, columns: slice = slice(None)) -> tuple[Any, Any, Any]:
        """The inputs of one step, as copies."""
        fields = (self.observation, self.prev_action, self.prev_reward)
        return tuple(map_leaves(lambda leaf: leaf[t, columns].copy(), field) for field in fields)


@dataclass(frozen=True)
class AgentSetup(Setup):
    """The agent to check, and its inputs."""

    make_agent: Callable[[], Agent]

    @cached_property
    def tape(self) -> Tape:
        """Inputs recorded with random actions."""
        with self.sampler(SerialSampler, max_decorrelation_steps=0) as sampler:
            mask_key = getattr(self.make_agent(), "mask_key", None)
            sampler.initialize(RandomAgent(mask_key=mask_key), seed=self.seed)
            sampler.obtain_samples(0)
            samples = sampler.samples_np.copy()
        if self.lead:
            samples = samples.by_env(*self.lead)
        env, agent = samples[:, : self.batch_B].env, samples[:, : self.batch_B].agent
        first = np.concatenate([np.ones_like(env.done[:1]), env.prev_done[1:]])
        for _, leaf in (*tree_leaves(agent.prev_action, ""), *tree_leaves(env.prev_reward, "")):
            leaf[first] = 0
        done = env.done
        if self.lead:  # the game is over where all its agents begin in the next row
            done = np.zeros(done.shape[:2], np.bool_)
            done[:-1] = first[1:].all(axis=2)
        return Tape(env.observation, agent.prev_action, env.prev_reward, done)

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """The dimensions between the columns and an action: the agents of an environment, if the agent is joint."""
        return (len(self._example(self.agent).possible_agents),) if self.agent.joint else ()

    def _example(self, agent: Agent) -> Any:
        """An example environment, which is closed: only its spaces are used."""
        key = info_key(agent.mask_key)
        factory = env_factories(self.env_fn, self.env_kwargs, 1)[0]
        with marked:
            env = build_example_env(replace(factory, as_seats=partial(ParallelView, mask_key=key)))
        env.close()
        if agent.joint and not isinstance(env, ParallelView):
            raise ConfigError("the agent is joint, so env_fn must return an environment of several agents")
        return env if key is None or isinstance(env, ParallelView) else MaskInObservation(env, key)

    @cached_property
    def other_tape(self) -> Tape:
        """The rows and columns in reverse order, with other rewards and without episode ends."""
        tape = self.tape

        def reverse(value: ArrayTree) -> Any:
            return map_leaves(lambda leaf: leaf[::-1, ::-1], value)

        reward = reverse(tape.prev_reward) + 1
        return Tape(reverse(tape.observation), reverse(tape.prev_action), reward, np.zeros_like(tape.done))

    @cached_property
    def agent(self) -> Agent:
        """The learner's agent, initialized."""
        return self.new(self.seed)

    def new(self, seed: int) -> Agent:
        """A further agent, initialized for the environment's spaces."""
        agent = as_agent("what make_agent returns", self.make_agent())
        env = self._example(agent)
        is_one = not isinstance(env, ParallelView)
        spaces = (env.observation_space, env.action_space) if is_one else env.spaces[env.possible_agents[0]]
        agent.runtime.ensure_initialized(spaces[0], spaces[1], seed)
        return agent

    def copy(self, agent: Agent | None = None, columns: range | None = None, seed: int = 0) -> Agent:
        """A copy of `agent` (default: `self.agent`) that acts for `columns`, made as a worker makes it."""
        return self.column_copy((agent or self.agent).runtime.worker_copy(), columns or range(self.batch_B), seed)

    def column_copy(self, worker: Agent, columns: range, seed: int = 0) -> Agent:
        """A copy of `worker`, a worker's copy. It has state for `columns` and is ready to sample."""
        copied = worker.runtime.column_copy(ColumnStreams(self.seed + seed, columns).rngs(Purpose.ACTION))
        copied.runtime.set_columns(columns, self.batch_B)
        copied.sample_mode(0)
        return copied

    def reference(self, agent: Agent | None = None) -> NamedArrays:
        """The actions and agent_info of a new copy on the tape."""
        return act(self.copy(agent), self.tape)

    def sampled(self, cls: type[Sampler], **arguments: Any) -> NamedArrays:
        """What the agent returns in a sampler."""
        with self.sampler(cls, max_decorrelation_steps=0, **arguments) as sampler:
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
    between: Callable[[int], object] | None = None,
) -> NamedArrays:
    """The agent's outputs: actions and agent_info `[T, B, ...]`. `between(t)` is called before each step."""
    outputs = []
    for t in range(len(tape.done)) if rows is None else rows:
        if between is not None:
            between(t)
        outputs.append(step(agent, *tape.row(t, columns)))
        for b in np.flatnonzero(tape.done[t, columns]):
            agent.reset_one(int(b))
    return stack(outputs)


def step(agent: Agent, observation: Any, prev_action: Any, prev_reward: Any) -> NamedArrays:
    """One step's action and agent_info, as copies."""
    result = as_agent_step(agent.step(observation, prev_action, prev_reward), agent)
    both = NamedArrays(action=as_named(result.action), agent_info=as_named(result.agent_info))
    return both.map(np.array)


def stack(rows: Sequence[NamedArrays]) -> NamedArrays:
    """The rows joined to arrays `[T, B, ...]`, by dotted name. Raises `Violation` if fields or shapes differ."""
    steps = [dict(row.leaves()) for row in rows]
    shapes = [{name: f"{list(leaf.shape)} {leaf.dtype}" for name, leaf in output.items()} for output in steps]
    for t, fields in enumerate(shapes):
        if fields != shapes[0]:
            now, first = (
                ", ".join(f"{name}: {shape}" for name, shape in leaves.items()) for leaves in (fields, shapes[0])
            )
            remedy = "return the same fields, with the same shapes and dtypes, at every step"
            raise Violation(f"at t={t}, fields {now}; at t=0, {first}", remedy)
    return NamedArrays({name: np.stack([output[name] for output in steps]) for name in steps[0]})
