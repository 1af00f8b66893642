"""Evaluation: the agent in separate environments. Only finished trajectories are recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.agents.action_masks import mask_of
from penstock.agents.agent import Agent, as_agent_step
from penstock.buffers.named import map_leaves
from penstock.collectors.acting import AgentInfoWriter, write_action
from penstock.collectors.collector import MadeByWorker
from penstock.collectors.tracking import Tracker
from penstock.columns.interface import EnvBatch, require_legal_actions
from penstock.columns.single_columns import EnvColumns
from penstock.envs.rows import ColumnError, arrays_like
from penstock.envs.seeding import ColumnStreams, Purpose, eval_seed
from penstock.workers.control import Phase, Progress

_CHUNK = 128  # finished trajectories are sent after this many rows


@dataclass(frozen=True)
class EvalCollectorParts:
    """What a worker passes to its evaluation collector. Everything is for the worker's own columns."""

    envs: EnvBatch  #: the evaluation environments: `EnvColumns`, or `VectorColumns` for batched ones
    agent: Agent  #: a copy of the agent, with a state for each of these columns
    tracker: Tracker  #: follows the trajectories and sends the finished ones to the main process
    progress: Progress  #: the worker's row of shared words: phase, t, env_rank, heartbeat
    streams: ColumnStreams  #: seeds and random generators of these columns
    max_T: int  #: most time steps of one evaluation
    max_trajectories: int | None  #: the evaluation ends after this many, of all workers together; None for no limit
    episodes: Sequence[int] | None  #: episodes of each column if `eval_episodes` is set, else None
    observation: Any  #: zeros `[B, ...]`, as the samples record observations; to write into
    action: Any  #: zeros `[B, ...]`, as the samples record actions; to write into
    agent_info: Any  #: zeros `[B, ...]`, as the samples record agent_info; to write into


class BaseEvalCollector(MadeByWorker, ABC):
    """Runs evaluations in the evaluation environments of one worker. A subclass defines `collect_evaluation`.

    Attributes: `envs`, `agent`, `tracker`, `progress`, `streams`, `max_T`, `observation` and `agent_info` as in
    `EvalCollectorParts`; `prev_action` `[B, ...]` and `prev_reward` `[B]`, which the agent gets beside the observation.
    """

    def __init__(self, parts: EvalCollectorParts) -> None:
        self.envs, self.agent, self.tracker, self.progress = parts.envs, parts.agent, parts.tracker, parts.progress
        self.streams, self.max_T = parts.streams, parts.max_T
        self._max_trajectories = float("inf") if parts.max_trajectories is None else parts.max_trajectories
        self.observation, self.prev_action, self.agent_info = parts.observation, parts.action, parts.agent_info
        self.prev_reward = np.zeros(len(parts.envs), np.float32)
        self._n_evaluations = 0
        self._mask = mask_of(parts.agent)

    def begin_evaluation(self, itr: int) -> None:
        """Reset the environments with the seeds of their first episodes, and the agent with new ones: an evaluation
        does not depend on the one before."""
        key, n = self._n_evaluations, len(self.envs)
        self._n_evaluations += 1
        self._n_ended, self._seeds = [0] * n, list[int | None]([None] * n)  # of each column: trajectories, next seed
        self.envs.reset_all([self._seed_of(column) for column in range(n)])
        self.agent.seed_columns(self.streams.rngs(Purpose.EVAL_ACTION, key))
        self.agent.reset()
        self.agent.eval_mode(itr)
        self.tracker.restart()
        self.prev_action[...] = 0
        self.prev_reward[...] = 0

    def _seed_of(self, column: int) -> int:
        """The seed of column's next trajectory, which is one of those of all evaluation environments."""
        n_envs = self.agent.n_envs or len(self.envs)
        return eval_seed(self.streams.seed, self._n_ended[column] * n_envs + self.streams.env_ranks[column])

    def pull(self) -> int:
        """The agent gets the newest published parameters. Returns their version."""
        return self.agent.runtime.pull_shared_memory()

    @property
    def must_stop(self) -> bool:
        """Whether to end now: the main process says so, or this worker alone has finished enough trajectories."""
        return self.progress.stop_eval or self.progress.n_results >= self._max_trajectories

    @abstractmethod
    def collect_evaluation(self, itr: int) -> None:
        """Run the agent. Finished trajectories go to `self.tracker`, and `progress.n_results` counts them."""


class EvalCollector(BaseEvalCollector):
    """Runs every environment for `max_T` steps, with resets, or until `max_trajectories` have finished.

    Unfinished trajectories are dropped at the end.
    """

    def __init__(self, parts: EvalCollectorParts) -> None:
        super().__init__(parts)
        self._reward = np.zeros((_CHUNK, len(parts.envs)), np.float32)
        self._done, self._valid = np.zeros((2, _CHUNK, len(parts.envs)), np.bool_)
        rows = map_leaves(lambda leaf: leaf[np.newaxis], self.observation)
        self._observations = arrays_like(parts.envs.observation_space, rows)
        self._agent_info_writer = AgentInfoWriter(map_leaves(lambda leaf: leaf[np.newaxis], self.agent_info))
        self._t = self._row = 0
        if isinstance(self.envs, EnvColumns):
            self.envs.on_cut, self.envs.keeps_seeds = self._on_cut, True

    def collect_evaluation(self, itr: int) -> None:
        self.begin_evaluation(itr)
        self.envs.write_observations(self.observation)
        n_sent = 0
        for first_t in range(0, self.max_T, _CHUNK):
            wanted = min(_CHUNK, self.max_T - first_t)
            self._done[...], self._valid[...] = False, True
            n = self._run_rows(first_t, wanted)
            if n:
                n_sent += self.tracker.end_rows(self._reward[:n], self._done[:n], first_t, self._valid[:n])
            if n < wanted:
                break
        self.progress.enter(Phase.SENDING)
        self.progress.n_results = n_sent

    def _run_rows(self, first_t: int, n_rows: int) -> int:
        """Step all environments `n_rows` times, or until `must_stop`. Returns the number of steps."""
        envs, agent, tracker, progress = self.envs, self.agent, self.tracker, self.progress
        prev_action, prev_reward = self.prev_action, self.prev_reward
        for row in range(n_rows):
            self._t, self._row = first_t + row, row
            progress.begin_row(self._t)
            if self.must_stop:
                return row
            if self._mask is not None:
                require_legal_actions(self._mask, self.observation, envs)
            step = as_agent_step(agent.step(self.observation, prev_action, prev_reward), agent)
            try:
                write_action(prev_action, step.action)
                if tracker.on_step is not None:
                    self._agent_info_writer.write(0, step.agent_info)
                    tracker.set_agent_info(self.agent_info)
            except ColumnError as error:
                raise envs.with_env_rank(error.column, error) from None
            progress.enter(Phase.STEPPING)
            resetting = envs.resetting
            envs.step(prev_action, self._on_episode_end, tracker.on_step)
            envs.write_step(self._observations, self._reward[row : row + 1], 0)
            prev_reward[...] = self._reward[row]
            prev_reward[self._done[row]] = 0
            for column in resetting:  # the episode begins only now
                self._valid[row, column] = False
                self._begin_episode(column)
        return n_rows

    def _on_episode_end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        self._end_episode(column, observation)
        return self._begin_episode(column)

    def _on_cut(self, column: int, error: Exception) -> Any:
        """Column's game has failed in this step: its episode does not count, and another is played."""
        before = np.flatnonzero(self._done[: self._row, column])
        self._valid[self._row, column] = False
        self.tracker.cut(column, int(before[-1]) + 1 if before.size else 0, self._row)
        cast(EnvColumns, self.envs).renew(column, error)
        self._seeds[column] = self._seed_of(column)
        return self._begin_episode(column)

    def _end_episode(self, column: int, observation: Any) -> bool:
        """Returns whether the trajectory has ended too."""
        self.envs.check_final(column, observation)
        self._done[self._row, column] = True
        has_ended = self.tracker.on_episode_end(self._t, column, observation)
        # The main process reads this count, and stops the evaluation when there are enough.
        self.progress.n_results += has_ended
        if has_ended:  # otherwise the next episode continues the trajectory, and so may the game
            self._n_ended[column] += 1
            self._seeds[column] = self._seed_of(column)
        return has_ended

    def _begin_episode(self, column: int) -> Any:
        first_observation = self.envs.reset_one(column, self._seeds[column])
        self._seeds[column] = None
        self.agent.reset_one(column)
        self.prev_action[column] = 0
        return first_observation


class EpisodeEvalCollector(EvalCollector):
    """Runs a fixed number of trajectories in each environment, then parks it. Stops after `max_T` steps.

    The number per environment is fixed, because the first n episodes that end in any environment would be short ones.
    """

    def __init__(self, parts: EvalCollectorParts) -> None:
        super().__init__(parts)
        self._shares = tuple(parts.episodes or ())
        self._left: list[int] = []

    def begin_evaluation(self, itr: int) -> None:
        super().begin_evaluation(itr)
        self.envs.unpark_all()
        self._left = list(self._shares)
        for column, share in enumerate(self._shares):
            if share == 0:
                self.envs.park(column)

    @property
    def must_stop(self) -> bool:
        return super().must_stop or not any(self._left)

    def _on_episode_end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> Any:
        self._left[column] -= self._end_episode(column, observation)
        if self._left[column] > 0:
            return self._begin_episode(column)
        self.envs.park(column)
        return observation
