"""The recorder: acts for the columns of one policy in one worker, and records them. The same for all environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.agents.action_masks import mask_in, mask_of
from penstock.agents.agent import Agent, AgentStep, as_agent_step
from penstock.agents.joint import JointSeats
from penstock.agents.outputs import NO_AGENT_INFO, AgentInfoWriter, ErrorText, write_action, write_fields
from penstock.agents.random import draw
from penstock.buffers.named import map_leaves
from penstock.buffers.native import put_cell, put_row
from penstock.buffers.slots import BatchColumns, FirstRow
from penstock.buffers.tree import map_tree
from penstock.collectors.end_writer import EndWriter
from penstock.collectors.tracking import Tracker
from penstock.columns.interface import (
    NO_LEGAL_ACTION,
    NOT_FLAGS,
    BatchedEnds,
    Events,
    PolicyColumns,
    PolicyEvents,
    mask_error,
    require_masks,
)
from penstock.envs.checks import require_number
from penstock.envs.infos import InfoWriter
from penstock.envs.rows import ColumnError, arrays_like
from penstock.envs.seeding import ColumnStreams
from penstock.errors import SpaceError
from penstock.workers.control import WHO_BITS, Phase, Progress


@dataclass(frozen=True)
class PolicyParts:
    """What a worker passes to the recorder of one policy. Everything is for this policy's columns of the worker."""

    columns: PolicyColumns
    agent: Agent  #: a copy of the agent, with a state for each of these columns
    tracker: Tracker  #: follows the trajectories and sends the finished ones to the main process
    slots: Sequence[BatchColumns]  #: where to write, for each slot: arrays `[T, B, ...]`; some have T + 1 rows
    progress: Progress  #: the worker's row of shared words: phase, t, env_rank, heartbeat
    streams: ColumnStreams  #: random generators of these columns
    who: int = 0  #: the policy's index + 1 where there are several, else 0
    policy: str = "agent"  #: the name of the policy; "agent" where one agent acts in all columns


class Slot:
    """What a recorder needs to write one slot."""

    def __init__(self, samples: BatchColumns, columns: PolicyColumns, agent: Agent) -> None:
        self.samples = samples
        self.observations = arrays_like(columns.observation_space, samples.observation)
        # The same arrays, or None if there are optional checks. For None `put_row` writes nothing, and
        # `columns.write_step` writes and checks.
        self.unchecked = None if columns.checks else self.observations
        self.ends = EndWriter(samples, agent, columns)
        self.write_info = AgentInfoWriter(samples.agent_info).write
        self.env_info = None if samples.env_info is None else InfoWriter(samples.env_info)
        self.extra = samples.extra.to_dict()


class Recorder:
    """Acts for the columns of one policy in one worker, and records them.

    The agent acts for idle columns too, so that each column draws the same random numbers whatever the others do.

    Attributes: `policy`, `columns`, `agent`, `tracker`, `progress` and `streams` as in `PolicyParts`; `samples`, the
    slot that is written; `batch_T`; `stateful`, the agents whose state is reset where an episode begins: a collector
    that acts with a second agent appends it; `prev_action` `[B, ...]` and `prev_reward` `[B]`, which the agent gets
    beside the observation. They are zero where an episode starts, while the batch keeps the last action and reward of
    the episode before.
    """

    def __init__(self, parts: PolicyParts, *, waits: bool = False, evaluates: bool = False) -> None:
        """`waits`: columns may be idle because their environments are parked."""
        samples, columns = parts.slots[0], parts.columns
        self.policy, self.columns, self.agent, self.tracker = parts.policy, columns, parts.agent, parts.tracker
        self.progress, self.streams, self.batch_T = parts.progress, parts.streams, samples.batch_T
        self._who, self._evaluates = parts.who << WHO_BITS, evaluates
        self._mask = mask_of(parts.agent)
        # Random steps are legal too where the agent has no mask_key, as a scripted function.
        self._random_mask = self._mask or mask_in(columns.observation_space, columns.action_space)
        self._has_agent_info, self._on_step = len(samples.agent_info) > 0, parts.tracker.on_step
        self.stateful = [parts.agent] if type(parts.agent).reset_one is not Agent.reset_one else []
        # An agent that acts for all seats of an environment has one state for them: that of the game.
        self._is_joint = parts.agent.joint or isinstance(parts.agent, JointSeats)
        # With several seats, their value at an end is that of all together: what they see after step t, by (t, env).
        self._n_joint = parts.agent.k if isinstance(parts.agent, JointSeats) else 1
        self._has_joint_values = self._n_joint > 1 and samples.final_value is not None
        self._joint_rows: dict[tuple[int, int], Any] = {}
        self._waits, self._has_gaps = waits, samples.has_gaps or waits
        self.keeps_infos = samples.env_info is not None
        # What depends on the slot is made once for each slot.
        self._slots = [Slot(slot, columns, parts.agent) for slot in parts.slots]
        self.prev_action: Any = map_leaves(lambda leaf: np.zeros_like(leaf[0]), samples.action)
        self.prev_reward = np.zeros_like(samples.reward[0])
        self._prev_actions, self._prev_rewards = self.prev_action[np.newaxis], self.prev_reward[np.newaxis]
        self.first_t = 0  # the time step of row 0, where an evaluation is collected in several parts
        self.n_steps = 0  # how many steps the last batch had: its valid cells
        self._changed: Any = None  # the columns whose episodes have ended in this row
        self._first_row, self._is_first = FirstRow(samples), True
        self._is_frozen = False  # whether row 0 of the first batch no longer follows `prev_action` and `prev_reward`
        self.use_slot(0)

    def use_slot(self, slot: int) -> None:
        """Write the next batch there."""
        chosen = self._slots[slot]
        self.samples = chosen.samples
        self._observations, self._unchecked, self._ends = chosen.observations, chosen.unchecked, chosen.ends
        self._write_info, self._env_info, self._extra = chosen.write_info, chosen.env_info, chosen.extra
        keep_info = None if chosen.env_info is None else chosen.env_info.kept
        self.columns.watch(self._on_step, keep_info=keep_info, into=chosen.observations)

    # ---- a batch ---------------------------------------------------------------------------

    def begin_batch(self, itr: int) -> None:
        """Write row 0, clear the fields that are written only where an episode ends, and call `sample_mode`."""
        samples, columns, first = self.samples, self.columns, self._first_row
        if self._is_joint:
            columns.take_begun(())  # forget the games that began before: the agent was reset for them
        if self._is_first:
            self._fill_first_row()
        samples.begin_batch(first)
        if not put_row(self._unchecked, 0, columns.observations):
            columns.write_row(self._observations, 0)
        if columns.idle:
            columns.blank_idle(samples.observation_rows[0])
        if self._is_first and self._mask is not None:
            require_masks(columns, self._mask.has_others(samples.observation_rows[0]), NOT_FLAGS)
        self._is_first = False
        self._enter_mode(itr)

    def _enter_mode(self, itr: int) -> None:
        if not self._evaluates:
            self.agent.sample_mode(itr)
        elif self.first_t == 0:  # once in an evaluation
            self.agent.eval_mode(itr)

    def act(self, t: int) -> None:
        """First part of step t: call `agent.step` with `observation[t]`, and record its action and agent_info.

        Afterwards `prev_action` holds the actions for the environments.
        """
        if self._who:
            self.progress.at_env(self._who)
        self.progress.begin_acting(self.first_t + t)
        samples = self.samples
        if self._mask is not None:
            require_masks(self.columns, self._mask.has_none(samples.observation_rows[t]), NO_LEGAL_ACTION)
        step = self.agent.step(samples.observation_rows[t], self.prev_action, self.prev_reward)
        if step.__class__ is not AgentStep:
            step = as_agent_step(step, self.agent)
        action, agent_info = step
        try:
            if not (put_row(self._prev_actions, 0, action) and put_row(samples.action, t + 1, action)):
                write_action(samples.action_rows[t + 1], action)
                self.prev_action[...] = samples.action_rows[t + 1]
            if self._has_agent_info or agent_info is not NO_AGENT_INFO:
                self._write_info(t, agent_info)
        except ColumnError as error:
            raise self.columns.with_env_rank(error.column, error) from None
        if self._has_gaps and self.columns.idle:
            self._skip_idle(t, self.columns.idle)
        if self._on_step is not None:
            self.tracker.set_agent_info(samples.agent_info[t])

    def _skip_idle(self, t: int, idle: Sequence[int]) -> None:
        row, prev_action, valid = self.samples.action_rows[t + 1], self.prev_action, self.samples.valid[t]
        for column in idle:  # cell by cell: an index of several takes numpy longer
            row[column] = prev_action[column] = 0
            valid[column] = False
        if self._has_agent_info:
            self.samples.agent_info[t, idle] = 0

    def record_env_info(self, t: int) -> None:
        """Write the chosen entries of the infos of step t. Does nothing if `env_info` was not asked for."""
        if self._env_info is not None:
            try:
                self.columns.write_infos(self._env_info, t)
            except ColumnError as error:
                raise self.columns.with_env_rank(error.column, error) from None

    def record_extra(self, t: int, fields: Mapping[str, Any], owner: str) -> None:
        """Write fields of `extra_fields` of the class `owner` for step t, each as `[B, ...]`. Raises `SpaceError`."""
        for name, value in fields.items():
            if name not in self._extra:
                raise SpaceError(
                    f"extra_fields of {owner} has no {name!r}, only {list(self._extra)}: declare it there, with a "
                    "space or an example of the value"
                )
            if not put_row(self._extra[name], t, value):
                text = ErrorText(
                    f"{owner} must write", "as extra_fields declares", "convert it, or declare another dtype"
                )
                try:
                    write_fields(map_tree(lambda array: array[t], self._extra[name]), value, f"extra.{name}", text)
                except ColumnError as error:
                    raise self.columns.with_env_rank(error.column, error) from None

    def record(self, t: int, all_events: Events) -> Sequence[int]:
        """Record what has ended in step t, and what the step itself has begun. Call this before the environments and
        the agent are reset. `all_events.policies` has one entry, that of this recorder's policy. Returns the columns
        whose trajectory goes on after the end of its episode."""
        events = all_events.policies[0]
        ends = events.ends
        going: list[int] = []  # `list[int]()` takes many times as long
        self._changed = events.ended
        if ends.__class__ is list:
            self._record_ends(t, ends, going)
        elif ends is not None:
            self._record_batched_ends(t, ends, going)
        if self._has_joint_values:
            self._keep_joint_rows(t, events)
        if events.cut:
            for column in events.cut:
                self._at(column)
                self._record_cut(t, column)
                self.prev_action[column] = 0
            self._changed = [*self._changed, *events.cut]
        if self.stateful and len(events.joined):
            self.begin(events.joined)
        return going

    def _at(self, column: int) -> None:
        """Column is worked on, in case that its agent or its trajectory info fails."""
        self.progress.at_env(self._who | int(self.columns.env_ranks[column]))

    def _record_cut(self, t: int, column: int) -> None:
        """Column's step t has no result. If it is parked, row 0 keeps the observation after the batch before."""
        self.tracker.cut(column, self._ends.cut(t, column), t)
        if not self._waits:
            return
        self._skip_idle(t, [column])
        self._ends.done[t, column] = False
        if t:
            self.samples.observation_rows[t][column] = 0

    def _record_ends(self, t: int, ends: Sequence[Any], going: list[int]) -> None:
        writer, samples, row = self._ends, self.samples, t if self._ends.is_recorded else 0
        for column, observation, reward, terminated, truncated in ends:  # no call for each, since these are many
            writer.done[t, column] = True  # all flags are False before: `begin_batch` has cleared them
            if terminated:
                writer.terminated[t, column] = True
            if truncated:
                writer.truncated[t, column] = True
            if writer.has_checks or not put_cell(writer.arrays, row, column, observation):
                self.columns.write_final(writer.arrays, row, column, observation)
            if truncated and not terminated and samples.final_value is not None:
                self._at(column)  # the policy's value may be computed here
                writer.value_end(t, column, row, reward)
            self.prev_action[column] = 0
            if self._on_step is not None:
                self._at(column)
                if not self.tracker.on_episode_end(self.first_t + t, column, observation):
                    going.append(column)

    def _record_batched_ends(self, t: int, ends: BatchedEnds, going: list[int]) -> None:
        samples, columns = self.samples, ends.columns
        samples.terminated[t], samples.truncated[t], samples.done[t] = ends.terminated, ends.truncated, ends.done
        self._ends.record_rows(t, ends)
        self.prev_action[columns] = 0
        if self._on_step is not None:
            for column, observation in zip(columns.tolist(), ends.finals(), strict=True):
                if not self.tracker.on_episode_end(self.first_t + t, column, observation):
                    going.append(column)

    def write_step(self, t: int) -> None:
        """Last part of step t: write the environments' observations and rewards into row t + 1.

        Afterwards `prev_reward` holds the rewards.
        """
        columns, reward, row = self.columns, self.samples.reward, t + 1
        is_written = columns.written_row == row or put_row(self._unchecked, row, columns.observations)
        if not (is_written and put_row(reward, row, columns.rewards)):
            columns.write_step(self._observations, reward, row)
        if not put_row(self._prev_rewards, 0, self.samples.reward_rows[row]):
            self.prev_reward[...] = reward[row]
        if self._changed is not None:
            changed, self._changed = self._changed, None
            if changed.__class__ is list:
                for column in changed:  # an index of several takes numpy longer
                    self.prev_reward[column] = 0
            else:
                self.prev_reward[changed] = 0
            if columns.idle:
                columns.blank_idle(self.samples.observation_rows[row])

    def end_batch(self, n_rows: int) -> int:
        """So many rows are written: compute the missing values, and send the finished trajectories. Returns how
        many."""
        samples = self.samples
        if samples.has_gaps:
            samples.mark_starts()
        if self._who:
            self.progress.at_env(self._who)
            self.progress.enter(Phase.ACTING)
        if self._has_joint_values:
            self._write_joint_values()
        if samples.bootstrap_value is not None:
            last = samples.observation_rows[-1]
            samples.bootstrap_value[...] = self.agent.value(last, self.prev_action, self.prev_reward)
            if self._has_gaps and self.columns.idle:
                samples.bootstrap_value[self.columns.idle] = 0
        if self._ends.pending:
            self._ends.write_values()
        samples.end_batch(self._first_row)
        self.columns.end_batch()
        self.progress.enter(Phase.SENDING)
        done, valid = samples.done[:n_rows], None
        self.n_steps = done.size
        if self._has_gaps:
            valid = samples.valid[:n_rows]
            self.n_steps = int(np.count_nonzero(valid))
        return self.tracker.end_rows(samples.reward[1 : n_rows + 1], done, self.first_t, valid)

    def _keep_joint_rows(self, t: int, events: PolicyEvents) -> None:
        """Keep what all seats see in the environments where a seat has ended, or was cut: row t + 1 may be that of the
        next game. Absent seats see zeros."""
        k = self._n_joint
        if events.ends:
            row = map_leaves(np.zeros_like, self.samples.observation_rows[t])
            self.columns.write_observations(row)
            for env in {end[0] // k for end in events.ends}:
                self._joint_rows[t, env] = row[env * k : (env + 1) * k]
        for env in {column // k for column in events.cut}:  # the step before is the last one
            row = self.samples.observation_rows[t][env * k : (env + 1) * k]
            # What was kept where a seat has ended is right: row t may be the first of the game that has failed.
            self._joint_rows.setdefault((t - 1, env), map_leaves(np.copy, row))

    def _write_joint_values(self) -> None:
        """The values of episodes that were truncated: each seat of their environment counts with what it sees next."""
        samples, k, pending = self.samples, self._n_joint, self._ends.pending
        for t, env in sorted({(t, column // k) for t, column in pending}):
            seats, row = slice(env * k, (env + 1) * k), self._joint_rows[t, env]
            done = samples.done[t, seats]
            row[done] = samples.final_obs[t, seats][done]
            values = self.agent.value(row, samples.action_rows[t + 1][seats], samples.reward_rows[t + 1][seats])
            cut = done & ~samples.terminated[t, seats]
            samples.final_value[t, seats][cut] = np.asarray(values)[cut]
        pending.clear()
        self._joint_rows.clear()

    # ---- episodes --------------------------------------------------------------------------

    def begin(self, joined: Sequence[int]) -> None:
        """Episodes begin in these columns: reset the state of the agents. That of a joint agent only if the game
        begins."""
        if self.stateful:
            for column in self.columns.take_begun(joined) if self._is_joint else joined:
                self._at(column)
                for agent in self.stateful:
                    agent.reset_one(column)

    def join(self, joined: Sequence[Sequence[int]]) -> None:
        """`begin` in the columns of this recorder's policy. `joined` has one entry, these columns."""
        self.begin(joined[0])

    def rejoin(self, joined: Sequence[int], absent: Sequence[int] = ()) -> None:
        """Between two batches, environments were reset, and episodes begin in these columns. The agents of the columns
        `absent` of these environments are not there."""
        self.begin(joined)
        for column in (*joined, *absent):
            self.prev_action[column], self.prev_reward[column] = 0, 0
            self.tracker.drop(column)  # parked rows are not a trajectory
            self._first_row.episode_start[column] = True

    def start_afresh(self) -> None:
        """No episode has begun: the environments are reset next."""
        self._is_first, self._is_frozen = True, False
        self.prev_action[...], self.prev_reward[...], self._first_row.episode_start[...] = 0, 0, True
        self.tracker.restart()

    # ---- before the first batch --------------------------------------------------------------

    def draw(self, rng: np.random.Generator, columns: Sequence[int]) -> None:
        """A random action in `prev_action` for each of these columns. Legal ones, if there is a mask."""
        mask = self._random_mask
        for column in columns:
            if mask is None:
                row = draw(self.columns.action_space, rng, 1)
            else:
                observation, uniform = self.columns.current(column), rng.random((1, mask.n_components))
                if self._mask is not None and column not in self.columns.idle and mask.has_none(observation).any():
                    raise mask_error(self.columns, column, NO_LEGAL_ACTION)
                row = mask.draw(mask.legal(observation), uniform)
            self.prev_action[column] = 0 if column in self.columns.idle else row[0]

    def note_random(self, acted: Sequence[int], rewards: Mapping[int, list[float]]) -> Sequence[int]:
        """A random step was made, in which these columns have acted. Add their rewards to those of each column. Returns
        the columns whose rewards are complete."""
        for column in acted:
            rewards[column].append(require_number(self.columns.rewards[column], self.columns.env_ranks[column]))
        return acted

    def drop(self, events: PolicyEvents) -> None:
        """Episodes have ended that are not recorded."""
        for column, observation, *_ in events.ends or ():
            self.columns.check_final(column, observation)
        for column in (*events.ended, *events.cut):
            self.tracker.drop(column)
            self.prev_action[column] = 0

    def end_random_steps(self, column: int, rewards: Sequence[float]) -> None:
        """The first batch continues column's episode, which had these rewards so far."""
        self.tracker.preload(column, rewards)
        self._first_row.episode_start[column] = not rewards
        self.prev_reward[column] = rewards[-1] if rewards else 0

    # ---- resuming --------------------------------------------------------------------------

    def column_state(self, column: int) -> dict[str, Any]:
        """What the recorder keeps of one column between two batches, to be pickled."""
        if self._is_first:
            self._fill_first_row()
        first = self._first_row
        state = {"first_action": first.action[column], "first_reward": first.reward[column]}
        state["episode_start"] = bool(first.episode_start[column])
        state |= {"prev_action": self.prev_action[column], "prev_reward": self.prev_reward[column]}
        state = {name: map_leaves(np.copy, value) for name, value in state.items()}
        return {**state, "trajectory": self.tracker.column_state(column)}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        """Before the first batch: continue as the column with this `column_state`."""
        self.freeze_first_row()
        first = self._first_row
        first.action[column], first.reward[column] = state["first_action"], state["first_reward"]
        first.episode_start[column] = state["episode_start"]
        self.prev_action[column], self.prev_reward[column] = state["prev_action"], state["prev_reward"]
        self.tracker.load_column_state(column, state["trajectory"])

    def keep_first_row(self, columns: Sequence[int]) -> None:
        """The first batch begins with what these columns have now."""
        first = self._first_row
        for column in columns:
            first.action[column], first.reward[column] = self.prev_action[column], self.prev_reward[column]

    def freeze_first_row(self) -> None:
        """From now on, the first row of action and reward does not follow `prev_action` and `prev_reward`."""
        self._fill_first_row()
        self._is_frozen = True

    def _fill_first_row(self) -> None:
        """The first batch begins with the previous actions and rewards, unless its first row is frozen."""
        if not self._is_frozen:
            self._first_row.action[...], self._first_row.reward[...] = self.prev_action, self.prev_reward

    # ---- parameters ------------------------------------------------------------------------

    def pull(self, version: int = 0) -> int:
        """Before a batch: the agent gets the newest published parameters, or this version of them. The batch says
        which. Returns their version."""
        version = self.agent.runtime.pull_shared_memory(version)
        self.samples.policy_version[...] = version
        return version
