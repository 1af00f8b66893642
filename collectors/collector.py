"""The collector: the loop over time inside a worker. Subclass it to sample in your own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.agents.action_masks import ActionMask, mask_of
from penstock.agents.agent import Agent, AgentStep, as_agent_step
from penstock.agents.space_draws import draw
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_row
from penstock.buffers.samples import BatchColumns
from penstock.buffers.tree import map_tree
from penstock.collectors.acting import (
    NO_AGENT_INFO,
    AgentInfoWriter,
    Words,
    write_action,
    write_fields,
)
from penstock.collectors.episode_ends import EpisodeEndRecorder
from penstock.collectors.tracking import Tracker
from penstock.columns.episodes import EpisodeRecorder
from penstock.columns.interface import EnvBatch, no_legal_action, require_flags, require_legal_actions, snapshot
from penstock.columns.single_columns import EnvColumns
from penstock.envs.infos import InfoWriter
from penstock.envs.rows import ColumnError, arrays_like
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import ConfigError, SpaceError
from penstock.workers.control import Phase, Progress

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class CollectorParts:
    """What a worker passes to its collector. Everything is for the worker's own columns."""

    envs: EnvBatch  #: the environments: `EnvColumns`, or `VectorColumns` if the collector is `batched`
    agent: Agent  #: a copy of the agent, with a state for each of these columns
    samples: BatchColumns  #: where to write: arrays `[T, B, ...]`; some have T + 1 rows. With several slots, the first
    tracker: Tracker  #: follows the trajectories and sends the finished ones to the main process
    progress: Progress  #: the worker's row of shared words: phase, t, env_rank, heartbeat
    streams: ColumnStreams  #: seeds and random generators of these columns
    max_decorrelation_steps: int  #: most random steps before the first batch
    slots: Sequence[BatchColumns] = ()  #: where to write, for each slot; empty if there is only one
    episodes: EpisodeRecorder | None = None  #: numbers and seeds the episodes, and keeps their actions; None: no need


class MadeByWorker:
    """What a sampler gets as a class, not as an object."""

    def __new__(cls, *parts: object, **named: object) -> Self:
        """Raises `ConfigError` without arguments."""
        if not (parts or named):
            raise ConfigError(
                f"each worker makes its own {cls.__name__}: give the sampler the class itself, without ()"
            )
        return super().__new__(cls)


class Collector(MadeByWorker, ABC):
    """Collects batches of `batch_T` time steps from the environments of one worker.

    A subclass defines `collect_batch`. In it, it calls `begin_batch`, `act`, `write_step`, `record_episode_end`,
    `reset_column` and `end_batch`; `ResetCollector` is the shortest example. It may override the hooks `start_envs`,
    `start_agent` and `reset_if_needed`.

    Attributes: `envs`, `agent`, `samples`, `tracker`, `progress` and `streams` as in `CollectorParts`; `batch_T`;
    `prev_action` `[B, ...]` and `prev_reward` `[B]`, which the agent gets beside the observation; `on_step`, the hook
    to pass to `envs.step`, or None. With several slots, `samples` changes before each batch: do not keep its arrays.
    """

    samples: BatchColumns
    _episode_ends: EpisodeEndRecorder
    _observations: Any
    _unchecked: Any
    _info_writer: InfoWriter | None
    _agent_info_writer: AgentInfoWriter
    _extra_arrays: dict[str, Any]

    #: Whether a worker builds one batched environment, `env_fn(num_envs=n)`, in place of n single ones.
    batched = False

    #: How many columns of a batched environment belong together, such as the players of one game. A worker gets all of
    #: them, so `batch_B`, `eval_n_envs` and `num_envs` are multiples of this number.
    rows_per_env: ClassVar[int] = 1

    #: Fields of a subclass, for each step of each environment: a Gymnasium space by name, or an example of the value (a
    #: number, an array). The collector writes them with `record_extra`, and the learner reads `samples.env.extra.NAME`
    #: `[T, B, ...]`. They are zero where nothing was written. A `Replay` keeps them. A subclass that adds fields
    #: repeats those of its base: `{**Base.extra_fields, ...}`.
    extra_fields: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, parts: CollectorParts) -> None:
        samples = parts.samples
        self.envs, self.agent, self.tracker = parts.envs, parts.agent, parts.tracker
        self.progress, self.streams, self.on_step = parts.progress, parts.streams, parts.tracker.on_step
        self.batch_T, self._episodes = samples.batch_T, parts.episodes
        self._max_decorrelation_steps = parts.max_decorrelation_steps
        self._can_cut = isinstance(parts.envs, EnvColumns) and parts.envs.renewals is not None
        self._mask = mask_of(parts.agent)
        self._agent_has_state = type(parts.agent).reset_one is not Agent.reset_one
        # What depends on the slot is made once for each slot.
        self._slots = [self._writers(slot) for slot in parts.slots or [samples]]
        vars(self).update(self._slots[0])
        self._before = samples  # where the batch before was written
        # Copies, not views of the batch. Where an episode starts these are zero, but the batch keeps the last action
        # and reward of the episode before.
        self.prev_action: Any = map_leaves(lambda leaf: np.zeros_like(leaf[0]), samples.action)
        self.prev_reward = np.zeros_like(samples.reward[0])
        self._prev_actions, self._prev_rewards = self.prev_action[np.newaxis], self.prev_reward[np.newaxis]
        parts.envs.info_writer = self._info_writer
        self._has_agent_info = len(samples.agent_info) > 0
        # `start_envs` does not write to the samples, because the user may still read them while a killed worker is
        # replaced. So the first batch writes the first row.
        self._is_first_batch = True
        self._episode_start = np.ones(len(parts.envs), np.bool_)  # where row 0 starts an episode
        self._first_t = 0  # the time step of row 0, where an evaluation is collected in several parts
        # What the first batch has in row 0 of action and reward. The same arrays, unless a state is loaded.
        self._first_action, self._first_reward = self.prev_action, self.prev_reward

    def _writers(self, samples: BatchColumns) -> dict[str, Any]:
        """The attributes that belong to one slot."""
        observations = arrays_like(self.envs.observation_space, samples.observation)
        return {
            "samples": samples,
            "_episode_ends": EpisodeEndRecorder(samples, self.agent, self.envs),
            "_observations": observations,
            # The same arrays, or None if there are optional checks. For None `put_row` writes nothing, and
            # `envs.write_step` writes and checks.
            "_unchecked": None if self.envs.checks else observations,
            "_info_writer": None if samples.env_info is None else InfoWriter(samples.env_info),
            "_agent_info_writer": AgentInfoWriter(samples.agent_info),
            "_extra_arrays": samples.extra.to_dict(),
        }

    def use_slot(self, slot: int) -> None:
        """The worker calls this before `collect_batch`, if there are several slots: write the next batch there."""
        self._before = self.samples
        vars(self).update(self._slots[slot])

    # ---- hooks -----------------------------------------------------------------------------

    def start_envs(self) -> None:
        """Reset every environment, and make random steps so that their episodes do not end together. Runs once."""
        self.envs.reset_all(self.streams.env_seeds(Purpose.TRAIN))
        self.tracker.restart()
        self.tracker.set_agent_info(map_leaves(lambda leaf: np.zeros_like(leaf[0]), self.samples.agent_info))
        self._decorrelate(self.streams)

    def _decorrelate(self, streams: ColumnStreams, columns: Sequence[int] | None = None) -> None:
        if isinstance(self.envs, EnvColumns):  # the columns of a batched environment cannot be stepped one by one
            rngs = streams.rngs(Purpose.DECORRELATE)
            for b in range(len(rngs)) if columns is None else columns:
                self._make_random_steps(self.envs, b, rngs[b])

    def _make_random_steps(self, envs: EnvColumns, b: int, rng: np.random.Generator) -> None:
        """Step environment b by 0 to `max_decorrelation_steps` random actions: legal ones, if there is a mask. Writes
        what the agent's first step needs of this column: its last action, its reward and whether an episode begins.

        A trajectory that is unfinished at the end continues in the first batch, with the steps made here. A trajectory
        that finishes here is dropped.
        """
        tracker, on_step, mask, episodes = self.tracker, self.on_step, self._mask, envs.episodes
        n = int(rng.integers(0, self._max_decorrelation_steps + 1))
        # With a mask, only random numbers are drawn here. The actions depend on the observations.
        rows: Any = draw(envs.envs[b].action_space, rng, n) if mask is None else rng.random((n, mask.n_components))
        rewards: list[float] = []
        if episodes is not None:
            episodes.plan_steps(b, rows if mask is None else None, n)
        for action in envs.split_actions(rows) if mask is None else _legal_actions(envs, b, mask, rows):
            self.progress.begin_random_step(envs.env_ranks[b])
            if on_step is not None:  # copies, because the environment may reuse its observation and action
                before, given = snapshot(envs.observations[b]), snapshot(action)
            if episodes is not None:
                episodes.begin_step(b)
            try:
                _, reward, terminated, truncated, info = envs.step_one(b, action)
            except envs.renewable as error:
                envs.renew(b, error)
                self._begin_random_steps(envs, b, rewards)
                continue
            if episodes is not None:
                episodes.end_step(b, reward)
            if on_step is not None:
                on_step(b, before, given, reward, terminated, truncated, info)
            rewards.append(reward)
            if terminated or truncated:
                self._begin_random_steps(envs, b, rewards)
        tracker.preload(b, rewards)
        self._episode_start[b] = not rewards
        if rewards:
            self.prev_action[b] = rows[n - 1] if mask is None else action
            self.prev_reward[b] = rewards[-1]

    def _begin_random_steps(self, envs: EnvColumns, b: int, rewards: list[float]) -> None:
        """The episode of environment b has ended, or was cut: drop its trajectory, and begin the next one."""
        self.tracker.drop(b)
        rewards.clear()
        envs.reset_one(b)
        envs.check_observation(b)

    def start_agent(self) -> None:
        """Prepare the agent for the first batch. Runs once, after `start_envs`."""
        self.agent.reset()

    def reset_if_needed(self) -> None:
        """Runs after start-up and after every batch, evaluation and call, while the learner trains.

        It must not write to the samples.
        """

    # ---- resuming --------------------------------------------------------------------------

    def column_state(self, column: int) -> dict[str, Any]:
        """What the collector keeps of one column between two batches, to be pickled; not its environment and agent.

        A collector of your own that keeps more adds it here, and restores it in `load_column_state`. One that has other
        methods than its base must define both: otherwise `sampler.state_dict` does not trust them.
        """
        if self._is_first_batch:
            action, reward = self._first_action[column], self._first_reward[column]
            is_start = self._episode_start[column]
        else:  # as `begin_batch` copies them
            action, reward = self.samples.action_rows[-1][column], self.samples.reward_rows[-1][column]
            is_start = self.samples.valid[-1, column] <= self.samples.done[-1, column]
        state = {"first_action": action, "first_reward": reward, "episode_start": bool(is_start)}
        state |= {"prev_action": self.prev_action[column], "prev_reward": self.prev_reward[column]}
        state = {name: map_leaves(np.copy, value) for name, value in state.items()}
        return {**state, "trajectory": self.tracker.column_state(column)}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        """Before the first batch: continue as the column with this `column_state`."""
        self._separate_first_row()
        self._first_action[column], self._first_reward[column] = state["first_action"], state["first_reward"]
        self.prev_action[column], self.prev_reward[column] = state["prev_action"], state["prev_reward"]
        self._episode_start[column] = state["episode_start"]
        self.tracker.load_column_state(column, state["trajectory"])

    def restart_columns(self, columns: Sequence[int], streams: ColumnStreams) -> None:
        """Before the first batch: start again in these columns, with other seeds."""
        self._separate_first_row()
        seeds = streams.env_seeds(Purpose.TRAIN)
        for column in columns:
            if self._episodes is not None:
                self._episodes.restart(column, streams.generation)
            self.envs.reset_one(column, seeds[column])
            self.tracker.drop(column)
            self.prev_action[column], self.prev_reward[column], self._episode_start[column] = 0, 0, True
        self._decorrelate(streams, columns)
        for column in columns:
            self._first_action[column], self._first_reward[column] = self.prev_action[column], self.prev_reward[column]

    def _separate_first_row(self) -> None:
        if self._first_reward is self.prev_reward:
            self._first_action, self._first_reward = map_leaves(np.copy, self.prev_action), self.prev_reward.copy()

    @abstractmethod
    def collect_batch(self, itr: int) -> None:
        """Write `batch_T` steps into `self.samples`. Trajectories that finish go to `self.tracker`."""

    # ---- pieces for collect_batch ----------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        """Write row 0, clear the fields that are written only where an episode ends, and call `sample_mode`."""
        samples = self.samples
        samples.begin_batch(None if self._is_first_batch else self._before)
        if self._is_first_batch:
            self._is_first_batch = False
            samples.episode_start[...] = self._episode_start
            self.envs.write_observations(samples.observation_rows[0])
            if self._mask is not None:
                require_flags(self._mask, samples.observation_rows[0], self.envs)
            samples.action[0], samples.reward[0] = self._first_action, self._first_reward
        if self._can_cut:
            samples.valid[...] = True
        if self._episodes is not None:
            self._episodes.begin_batch()
        self._enter_mode(itr)

    def _enter_mode(self, itr: int) -> None:
        self.agent.sample_mode(itr)

    def act(self, t: int) -> None:
        """First part of step t: call `agent.step` with `observation[t]`, and record its action and agent_info.

        Afterwards `prev_action` holds the actions for the environments.
        """
        self.progress.begin_acting(t)
        samples = self.samples
        if self._mask is not None:
            require_legal_actions(self._mask, samples.observation_rows[t], self.envs)
        step = self.agent.step(samples.observation_rows[t], self.prev_action, self.prev_reward)
        if step.__class__ is not AgentStep:
            step = as_agent_step(step, self.agent)
        action, agent_info = step
        try:
            if not (put_row(self._prev_actions, 0, action) and put_row(samples.action, t + 1, action)):
                write_action(samples.action_rows[t + 1], action)
                self.prev_action[...] = samples.action_rows[t + 1]
            if self._has_agent_info or agent_info is not NO_AGENT_INFO:
                self._agent_info_writer.write(t, agent_info)
        except ColumnError as error:
            raise self.envs.with_env_rank(error.column, error) from None
        if self.on_step is not None:
            self.tracker.set_agent_info(samples.agent_info[t])

    def write_step(self, t: int) -> None:
        """Second part of step t: write the environments' observations and rewards into row t + 1.

        Afterwards `prev_reward` holds the rewards.
        """
        envs, reward, row = self.envs, self.samples.reward, t + 1
        if not (put_row(self._unchecked, row, envs.observations) and put_row(reward, row, envs.rewards)):
            envs.write_step(self._observations, reward, row)
        if not put_row(self._prev_rewards, 0, self.samples.reward_rows[row]):
            self.prev_reward[...] = reward[row]

    def record_env_info(self, t: int) -> None:
        """Write the chosen entries of the infos of step t. Does nothing if `env_info` was not asked for."""
        if self._info_writer is not None:
            try:
                self._write_infos(self._info_writer, self.samples.env_info[t])
            except ColumnError as error:
                raise self.envs.with_env_rank(error.column, error) from None

    def record_extra(self, t: int, /, **fields: Any) -> None:
        """Write fields of `extra_fields` for step t, each as `[B, ...]`: `self.record_extra(t, cost=cost)`.

        Fields that are left out keep what they have. Raises `SpaceError` with the name of a field that is not declared,
        has another shape, or has a value that would change in the dtype of the field.
        """
        cls, arrays = type(self).__name__, self._extra_arrays
        for name, value in fields.items():
            if name not in arrays:
                raise SpaceError(
                    f"extra_fields of {cls} has no {name!r}, only {list(arrays)}: declare it there, with a space or an "
                    "example of the value"
                )
            if not put_row(arrays[name], t, value):
                words = Words(f"{cls} must write", "as extra_fields declares", "convert it, or declare another dtype")
                try:
                    write_fields(map_tree(lambda array: array[t], arrays[name]), value, f"extra.{name}", words)
                except ColumnError as error:
                    raise self.envs.with_env_rank(error.column, error) from None

    def _write_infos(self, writer: InfoWriter, row: NamedArrays) -> None:
        writer.write(row, self.envs.infos)

    def record_episode_end(
        self, t: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool
    ) -> None:
        """Column's episode ended at step t with `observation`: record flags, final observation and its value.

        Call this before the environment or the agent is reset.
        """
        self._episode_ends.record(t, column, observation, reward, terminated, truncated)
        if self.on_step is not None:
            self.tracker.on_episode_end(self._first_t + t, column, observation)

    def record_cut(self, t: int, column: int) -> None:
        """Column's step t has no result, since its game has failed: its episode has ended with the step before, and
        `valid[t]` is False. Its trajectory is dropped.

        Call this before the agent is reset.
        """
        self.tracker.cut(column, self._episode_ends.cut(t, column), t)

    def reset_column(self, column: int) -> Any:
        """Column's episode has ended: reset its environment, its agent state and its previous action.

        Returns the first observation of the next episode. Set `prev_reward[column]` to zero after `write_step`.
        """
        observation = self.envs.reset_one(column)
        if self._agent_has_state:
            self.agent.reset_one(column)
        self.prev_action[column] = 0
        return observation

    def end_batch(self) -> None:
        """All rows are written: compute the missing values, and send the finished trajectories."""
        samples, progress = self.samples, self.progress
        n_valid = int(np.count_nonzero(samples.valid))
        progress.end_batch(self.batch_T, n_valid)
        if samples.has_gaps:
            samples.mark_starts()
        self._write_values()
        progress.enter(Phase.SENDING)
        if self._episodes is not None:  # after the last phase in which an environment may fail
            self._episodes.end_batch(samples.action[1:], samples.reward[1:])
        valid = None if n_valid == samples.valid.size else samples.valid
        progress.n_results = self.tracker.end_rows(samples.reward[1:], samples.done, valid=valid)

    def _write_values(self) -> None:
        samples = self.samples
        if samples.bootstrap_value is not None:
            last = samples.observation[self.batch_T]
            samples.bootstrap_value[...] = self.agent.value(last, self.prev_action, self.prev_reward)
        if self._episode_ends.pending:
            self._episode_ends.write_values()

    # ---- parameters ------------------------------------------------------------------------

    def pull(self, version: int = 0) -> int:
        """The agent gets the newest published parameters, or this version of them. Returns their version."""
        return self.agent.runtime.pull_shared_memory(version)

    def note_version(self, version: int) -> None:
        """Record which version of the parameters has acted in this batch."""
        self.samples.policy_version[...] = version


def _legal_actions(envs: EnvColumns, column: int, mask: ActionMask, uniform: npt.NDArray[Any]) -> Iterator[Any]:
    """One legal action after the other, for the column's current observation."""
    for numbers in uniform:
        observation = envs.observations[column]
        if mask.has_none(observation).any():
            raise no_legal_action(envs, column)
        row = mask.draw(mask.legal(observation), numbers[None])
        if envs.episodes is not None:
            envs.episodes.plan_next(column, row)
        yield envs.split_actions(row)[0]
