"""The collector: the loop over time inside a worker. Subclass it to sample in your own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.agents.base import Agent, AgentStep
from penstock.buffers.named import map_leaves
from penstock.buffers.native import put_row
from penstock.buffers.samples import BatchColumns
from penstock.collectors.acting import NO_AGENT_INFO, AgentInfoWriter, as_agent_step
from penstock.collectors.checks import Checks, write_action
from penstock.collectors.columns import EnvColumns
from penstock.collectors.decorrelation import decorrelate
from penstock.collectors.episode_ends import EpisodeEndRecorder
from penstock.collectors.tracking import StepHook, Tracker
from penstock.envs.infos import InfoWriter
from penstock.envs.rows import arrays_like
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.workers.progress import Phase, Progress

__all__ = ["Collector", "CollectorParts"]


@dataclass(frozen=True)
class CollectorParts:
    """What a worker gives its collector; everything concerns this worker's columns alone."""

    envs: EnvColumns  #: the environments
    agent: Agent  #: a copy with state for these columns
    samples: BatchColumns  #: where to write; `[T, B]` and, for some fields, `[T + 1, B]`
    tracker: Tracker  #: follows trajectories and hands the finished ones over
    progress: Progress  #: shared row: phase, t, env_rank, sign of life
    streams: ColumnStreams  #: seeds and random streams of these columns
    max_decorrelation_steps: int  #: random steps before the first batch, at most


class Collector(ABC):
    """Collects one batch after another from a worker's environments.

    Subclasses override `collect_batch`. The hooks around it have defaults: `start_envs` resets and
    decorrelates, `start_agent` resets the agent, `reset_if_needed` does nothing and runs while the
    learner trains.
    """

    #: True resets an environment at once and goes on recording; False parks it until the batch ends.
    mid_batch_reset = True

    #: True has a worker build one batched environment, `env_fn(num_envs=n)`, instead of n single ones.
    batched = False

    def __init__(self, parts: CollectorParts) -> None:
        self.envs, self.agent, self.samples = parts.envs, parts.agent, parts.samples
        self.tracker, self.progress = parts.tracker, parts.progress
        self.batch_T = parts.samples.batch_T
        self.streams, self._max_decorrelation_steps = parts.streams, parts.max_decorrelation_steps
        self._agent_has_state = type(parts.agent).reset_one is not Agent.reset_one
        self.finals = EpisodeEndRecorder(parts.samples, parts.agent, parts.envs)
        # The agent's inputs beside the observation. Not views of the batch: these are zeroed when an
        # episode starts, where the batch keeps the last action of the episode before.
        self.prev_action: Any = map_leaves(lambda leaf: np.zeros_like(leaf[0]), parts.samples.action)
        self.prev_reward = np.zeros_like(parts.samples.reward[0])
        self._prev_actions, self._prev_rewards = self.prev_action[np.newaxis], self.prev_reward[np.newaxis]
        # The first row is written when the first batch begins, not in `start_envs`: a replacement for a
        # worker that has died may start while the user is still reading the batch before.
        self._has_batch = False
        self._begins = np.ones(len(parts.envs), np.bool_)  # whether a column's first row is an episode's first
        self._info_writer = None if parts.samples.env_info is None else InfoWriter(parts.samples.env_info)
        self.envs.keep_infos = self._info_writer is not None
        # Whether what environments return need only be gathered, if it is as it should be.
        self._gathers = not self.batched and parts.envs.checks == Checks()
        if self._gathers:
            self._observations = arrays_like(parts.envs.envs[0].observation_space, parts.samples.observation)
        self._observation_rows = [self.envs.prepare_row(row) for row in parts.samples.observation_rows]
        self._has_agent_info = len(parts.samples.agent_info) > 0
        self._agent_info_writer = AgentInfoWriter(parts.samples.agent_info)

    def start_envs(self) -> None:
        """Reset every environment and put it out of phase with the others. Runs once."""
        self.envs.reset_all(self.streams.env_seeds(Purpose.TRAIN))
        self.tracker.restart()
        self.tracker.set_agent_info(map_leaves(lambda leaf: np.zeros_like(leaf[0]), self.samples.agent_info))
        if not self.batched:  # the environments of a batch cannot be stepped apart from each other
            decorrelate(
                self.envs,
                self.tracker,
                self.streams.rngs(Purpose.DECORRELATE),
                self._max_decorrelation_steps,
                self.prev_action,
                self.prev_reward,
                self._begins,
            )

    def start_agent(self) -> None:
        """Prepare the agent for the first batch. Runs once, after `start_envs`."""
        self.agent.reset()

    def reset_if_needed(self) -> None:
        """Runs after every batch and evaluation, while the learner trains. Must not touch the samples."""

    @abstractmethod
    def collect_batch(self, itr: int) -> None:
        """Fill `self.samples` with `batch_T` steps and hand over the trajectories that finish."""

    # ---- pieces for collect_batch ----------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        """Write the first row, clear what is only written at episode ends, and put the agent into sample mode."""
        samples = self.samples
        if self._has_batch:
            samples.carry_over()
        else:
            samples.begins[...] = self._begins
            self.envs.write_observations(samples.observation[0])
            samples.action[0], samples.reward[0] = self.prev_action, self.prev_reward
            self._has_batch = True
        samples.clear()
        self.agent.sample_mode(itr)

    def act(self, t: int) -> None:
        """Row t, first half: the agent acts on `observation[t]`; action and agent_info are recorded.

        `prev_action` then holds the actions that the environments are to take.
        """
        self.progress.begin_acting(t)
        samples = self.samples
        step = self.agent.step(samples.observation_rows[t], self.prev_action, self.prev_reward)
        if step.__class__ is not AgentStep:
            step = as_agent_step(step, self.agent)
        action, agent_info = step
        if not (put_row(self._prev_actions, 0, action) and put_row(samples.action, t + 1, action)):
            write_action(samples.action_rows[t + 1], action)
            self.prev_action[...] = samples.action_rows[t + 1]
        if self._has_agent_info or agent_info is not NO_AGENT_INFO:
            self._agent_info_writer.write(t, agent_info)
        if self.tracker.on_step is not None:
            self.tracker.set_agent_info(samples.agent_info[t])

    def end_batch(self) -> None:
        """All rows are written: value what is to be valued and hand the finished trajectories over."""
        samples, progress = self.samples, self.progress
        progress.end_batch(self.batch_T, int(samples.valid.sum()))
        if samples.bootstrap_value is not None:
            last = samples.observation[self.batch_T]
            samples.bootstrap_value[...] = self.agent.value(last, self.prev_action, self.prev_reward)
        self.finals.end_batch()
        progress.enter(Phase.SENDING)
        progress.n_results = self.tracker.end_rows(samples.reward[1:], samples.done)

    @property
    def on_step(self) -> StepHook | None:
        """The hook for `envs.step`: what follows each environment's step, or None if nothing does."""
        return self.tracker.on_step

    def record_env_info(self, t: int) -> None:
        """Row t has been stepped: record what was asked for of the infos, if anything was."""
        if self._info_writer is not None:
            self._info_writer.write(self.samples.env_info[t], self.envs.infos, self.envs.env_ranks)

    def write_step(self, t: int) -> None:
        """All environments have been stepped with the actions of row t: write their observations and rewards into
        row t + 1. `prev_reward` then holds the rewards."""
        samples, envs, gathers = self.samples, self.envs, self._gathers
        if not (gathers and put_row(self._observations, t + 1, envs.observations)):
            envs.write_prepared(self._observation_rows[t + 1])
        rewards = envs.rewards if gathers else None
        if not (put_row(self._prev_rewards, 0, rewards) and put_row(samples.reward, t + 1, rewards)):
            envs.write_rewards(samples.reward_rows[t + 1])
            self.prev_reward[...] = samples.reward_rows[t + 1]

    def record_episode_end(
        self, t: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool
    ) -> None:
        """Column's episode has ended at step t with `observation`: record it. Call before anything is reset, and in a
        batch that `begin_batch` has begun, which leaves False in all flags."""
        self.finals.record(t, column, observation, reward, terminated, truncated)
        if self.tracker.on_step is not None:
            self.tracker.on_episode_end(t, column, observation)

    def reset_column(self, column: int) -> Any:
        """Column's episode has ended: reset its environment, its agent state and its previous action.
        Returns the new first observation. The caller zeroes `prev_reward` once the row is complete."""
        observation = self.envs.reset_one(column)
        if self._agent_has_state:
            self.agent.reset_one(column)
        self.prev_action[column] = 0
        return observation
