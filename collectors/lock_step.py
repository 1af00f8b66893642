"""Several agents in one environment: the loop over time, in which all of them act in each step.

Each policy has a `Desk`, which is a collector whose columns are the policy's seats. `LockStepCollector` steps the
environments between the desks' two parts of a time step. So what is recorded, and how, is as for single agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.agents.action_masks import mask_in, mask_of
from penstock.agents.agent import Agent, AgentStep, as_agent_step
from penstock.agents.joint import JointSeats
from penstock.agents.space_draws import draw
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_row
from penstock.buffers.samples import BatchColumns
from penstock.collectors.acting import NO_AGENT_INFO, AgentInfoWriter, write_action
from penstock.collectors.episode_ends import EpisodeEndRecorder
from penstock.collectors.tracking import Tracker
from penstock.columns.interface import no_legal_action, require_flags, require_legal_actions
from penstock.columns.seat_columns import Games, Place, SeatColumns
from penstock.envs.infos import InfoWriter
from penstock.envs.rows import ColumnError, arrays_like
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.workers.control import WHO_BITS, Phase, Progress, UntimedProgress


@dataclass(frozen=True)
class DeskParts:
    """What a worker passes to a desk."""

    envs: SeatColumns
    agent: Agent
    samples: BatchColumns
    tracker: Tracker
    progress: Progress
    streams: ColumnStreams
    max_decorrelation_steps: int
    slots: Sequence[BatchColumns] = ()


class _Recording:
    """Acts for the seats of one policy, and records them."""

    envs: Any
    samples: BatchColumns
    _episode_ends: EpisodeEndRecorder
    _observations: Any
    _unchecked: Any
    _info_writer: InfoWriter | None
    _agent_info_writer: AgentInfoWriter

    def __init__(self, parts: DeskParts) -> None:
        samples = parts.samples
        self.envs, self.agent, self.tracker = parts.envs, parts.agent, parts.tracker
        self.progress, self.streams, self.on_step = parts.progress, parts.streams, parts.tracker.on_step
        self.batch_T = samples.batch_T
        self._max_decorrelation_steps = parts.max_decorrelation_steps
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
        }

    def use_slot(self, slot: int) -> None:
        """The worker calls this before `collect_batch`, if there are several slots: write the next batch there."""
        self._before = self.samples
        vars(self).update(self._slots[slot])

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

    def _write_values(self) -> None:
        samples = self.samples
        if samples.bootstrap_value is not None:
            last = samples.observation[self.batch_T]
            samples.bootstrap_value[...] = self.agent.value(last, self.prev_action, self.prev_reward)
        if self._episode_ends.pending:
            self._episode_ends.write_values()

    def pull(self, version: int = 0) -> int:
        """The agent gets the newest published parameters, or this version of them. Returns their version."""
        return self.agent.runtime.pull_shared_memory(version)

    def note_version(self, version: int) -> None:
        """Record which version of the parameters has acted in this batch."""
        self.samples.policy_version[...] = version


class Desk(_Recording):
    """Acts for the seats of one policy, and records them.

    The agent acts for idle seats too, and their actions and `agent_info` are then set to zero. So the random numbers
    and the shapes do not depend on which seats are idle. A seat's state is reset when its agent joins.
    """

    envs: SeatColumns

    def __init__(self, parts: DeskParts, who: int = 0, *, evaluates: bool = False) -> None:
        """`who` is the policy's index + 1 where there are several, else 0."""
        super().__init__(parts)
        self._evaluates = evaluates
        self._who = who << WHO_BITS
        self.envs.on_join, self.envs.on_end, self.envs.on_step = self._join, self._end, self.on_step
        self.envs.on_cut = self._cut
        # Random steps are legal too where the agent has no mask_key, as a scripted function.
        self._random_mask = self._mask or mask_in(self.envs.observation_space, self.envs.action_space)
        self._t = -1  # the row that is stepped; -1 outside a batch
        self._changed: list[int] = []  # columns that have joined or ended in this row

    # ---- a time step -----------------------------------------------------------------------

    def begin_batch(self, itr: int, first_t: int = 0) -> None:
        """Row 0 of the batch is row `first_t` of an evaluation."""
        super().begin_batch(itr)
        self._first_t = first_t
        self.samples.valid[...] = True
        self.samples.valid[:, self.envs.parked] = False

    def _enter_mode(self, itr: int) -> None:
        (self.agent.eval_mode if self._evaluates else self.agent.sample_mode)(itr)

    def act(self, t: int) -> None:
        """First part of step t: act for all seats, and give the actions to the environments."""
        if self._who:
            self.progress.at_env(self._who)
        super().act(t)
        envs, self._t = self.envs, t
        if envs.parked:
            row, given = self.samples.action_rows[t + 1], self.prev_action
            for column in envs.parked:  # cell by cell: an index of several takes numpy longer
                row[column] = given[column] = 0
            if self._has_agent_info:
                self.samples.agent_info[t, envs.parked] = 0
        envs.actions = envs.split_actions(self.prev_action)

    def record_step(self, t: int) -> None:
        """Second part of step t: record what the environments have returned."""
        envs = self.envs
        if self._info_writer is not None:
            self.record_env_info(t)
        self.write_step(t)
        if self._changed:
            self.prev_reward[self._changed] = 0
            self._changed.clear()
            envs.zero_idle_rewards()

    def _join(self, column: int) -> None:
        if self._t >= 0:
            self.samples.valid[self._t + 1 :, column] = True
            self._changed.append(column)
        if self._agent_has_state:
            self.agent.reset_one(column)
        self.prev_action[column] = 0

    def _end(self, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        self.prev_action[column] = 0
        if self._t < 0:
            self.envs.check_final(column, observation)
            self.tracker.drop(column)
            return
        self._changed.append(column)
        if self._who:  # the policy's value may be computed here
            self.progress.at_env(self._who | int(self.envs.env_ranks[column]))
        self.record_episode_end(self._t, column, observation, reward, terminated, truncated)
        self.samples.valid[self._t + 1 :, column] = False

    def _cut(self, column: int) -> None:
        """The game has failed in this step: the column's episode has ended with the step before."""
        if self._t < 0:
            self.tracker.drop(column)
            return
        self._changed.append(column)
        if self._who:
            self.progress.at_env(self._who | int(self.envs.env_ranks[column]))
        self.record_cut(self._t, column)
        self.samples.valid[self._t + 1 :, column] = False

    def _write_values(self) -> None:
        if isinstance(self.agent, JointSeats):  # all seats of an environment have a value together
            self._write_joint_values(self.agent.k, self._episode_ends.pending)
        super()._write_values()

    def _write_joint_values(self, k: int, pending: list[tuple[int, int]]) -> None:
        """The values of episodes that were cut: each seat of their environment counts with its next observation."""
        samples = self.samples
        for t, env in sorted({(t, column // k) for t, column in pending}):
            own = slice(env * k, (env + 1) * k)
            row = map_leaves(np.copy, samples.observation_rows[t + 1][own])
            done = samples.done[t, own]
            row[done] = samples.final_obs[t, own][done]
            values = self.agent.value(row, samples.action_rows[t + 1][own], samples.reward_rows[t + 1][own])
            cut = done & ~samples.terminated[t, own]
            samples.final_value[t, own][cut] = np.asarray(values)[cut]
        pending.clear()

    def finish(self, n_rows: int, first_t: int = 0) -> int:
        """The batch is complete: compute the missing values, and send the finished trajectories. Returns how many."""
        samples, self._t = self.samples, -1
        samples.mark_starts()
        if self._who:
            self.progress.at_env(self._who)
            self.progress.enter(Phase.ACTING)
        self._write_values()
        if samples.bootstrap_value is not None:
            samples.bootstrap_value[self.envs.parked] = 0
        rows = slice(None, n_rows)
        return self.tracker.end_rows(samples.reward[1:][rows], samples.done[rows], first_t, samples.valid[rows])

    # ---- before the first row --------------------------------------------------------------

    def start_afresh(self) -> None:
        """Nobody is there, and no episode has begun: the environments are reset next."""
        self.prev_action[...], self.prev_reward[...], self._episode_start[...] = 0, 0, True
        self._first_action, self._first_reward = self.prev_action, self.prev_reward
        self._is_first_batch = True
        self.tracker.restart()

    def draw_actions(self, rng: np.random.Generator, columns: Sequence[int]) -> None:
        """A random action for each of these columns, for a step before the first batch. Legal ones, if there is a
        mask."""
        envs, mask = self.envs, self._random_mask
        actions: list[Any] = [None] * len(envs)
        for column in columns:
            if mask is None:
                row = draw(envs.action_space, rng, 1)
            else:
                observation, uniform = envs.observations[column], rng.random((1, mask.n_components))
                if self._mask is not None and column not in envs.parked and mask.has_none(observation).any():
                    raise no_legal_action(envs, column)
                row = mask.draw(mask.legal(observation), uniform)
            actions[column] = envs.split_actions(row)[0]
            self.prev_action[column] = 0 if column in envs.parked else row[0]
        envs.actions = actions

    def end_random_steps(self, column: int, rewards: Sequence[float]) -> None:
        """The random steps are made: the first batch continues the column's episode, which had these rewards so far."""
        self.tracker.preload(column, rewards)
        self._episode_start[column] = not rewards
        self.prev_reward[column] = rewards[-1] if rewards else 0
        self.envs.rewards[column] = 0.0


class LockStepCollector:
    """Collects batches from the environments of one worker in which several agents act.

    `desks` have one policy each. `tracker` follows the games: the environments' own sums of all rewards.
    """

    def __init__(self, games: Games, desks: Sequence[Desk], tracker: Tracker, streams: ColumnStreams) -> None:
        self.games, self.desks, self.tracker, self.streams = games, desks, tracker, streams
        self.envs, self.progress, self.batch_T = games, games.progress, min(desk.batch_T for desk in desks)
        self._is_training = not isinstance(self.progress, UntimedProgress)
        self._max_steps = desks[0]._max_decorrelation_steps
        n = len(games.envs)
        self._late, self._over = np.zeros((self.batch_T, n), np.float32), np.zeros((self.batch_T, n), np.bool_)
        # For each desk: the columns of each environment that has some; they are neighbours.
        self._columns: list[dict[int, list[int]]] = [{} for _ in desks]
        for e, places in enumerate(games.places):
            for desk, by_env in zip(desks, self._columns, strict=True):
                if own := [column for columns, column in places.values() if columns is desk.envs]:
                    by_env[e] = own

    # ---- what a worker calls ---------------------------------------------------------------

    def use_slot(self, slot: int) -> None:
        """See `Collector.use_slot`."""
        for desk in self.desks:
            desk.use_slot(slot)

    def pull(self, version: int = 0) -> int:
        """The agents get the newest parameters. Returns the version of the first policy's."""
        self._versions = [desk.pull(version) for desk in self.desks]
        return self._versions[0]

    def note_version(self, version: int) -> None:
        """See `Collector.note_version`. With several policies, each notes its own version."""
        for desk, own in zip(self.desks, self._versions, strict=True):
            desk.note_version(version if len(self.desks) == 1 else own)

    def reset_if_needed(self) -> None:
        """Environments are reset within batches."""

    def start(self) -> None:
        """Reset every environment, and make random steps so that their games do not end together. Runs once."""
        for desk in self.desks:
            desk.tracker.set_agent_info(map_leaves(lambda leaf: np.zeros_like(leaf[0]), desk.samples.agent_info))
        self._reset(self.streams.env_seeds(Purpose.TRAIN))
        for e, rng in enumerate(self.streams.rngs(Purpose.DECORRELATE)):
            self._make_random_steps(e, rng)
        for desk in self.desks:
            desk.agent.reset()

    def restart(self, streams: ColumnStreams) -> None:
        """Before the first batch: start again with other streams, because a saved run is continued."""
        self.streams = streams
        for desk in self.desks:
            desk.streams = ColumnStreams(streams.seed, desk.streams.env_ranks, streams.generation, desk.streams.seats)
            desk.agent.seed_columns(desk.streams.rngs(Purpose.ACTION))
        self.start()

    def collect_batch(self, itr: int) -> None:
        """Write `batch_T` steps into the samples of each desk. Finished trajectories go to the trackers."""
        self.progress.n_results = self.collect_rows(itr, self.batch_T)

    # ---- rows ------------------------------------------------------------------------------

    def collect_rows(self, itr: int, n_rows: int, first_t: int = 0, must_stop: Callable[[], bool] | None = None) -> int:
        """Make up to `n_rows` time steps, fewer if `must_stop`. Returns how many trajectories were sent. `rows` says
        how many steps were made."""
        games, desks = self.games, self.desks
        self._late[...], self._over[...] = 0, False
        for desk in desks:
            desk.begin_batch(itr, first_t)
        self.rows = n_rows
        for t in range(n_rows):
            if must_stop is not None and must_stop():
                self.rows = t
                break
            for desk in desks:
                desk.act(t)
            self.progress.begin_stepping(t)
            games.step()
            for e, reward in games.late:
                self._late[t, e] += reward
            if games.late and self._is_training:
                self.progress.add_late_rewards(len(games.late))
            if games.over:
                self._over[t, games.over] = True
            for e in games.cut:
                ends = np.flatnonzero(self._over[:t, e])
                self.tracker.cut(e, int(ends[-1]) + 1 if ends.size else 0, t)
            for desk in desks:
                desk.record_step(t)
        return self._finish(self.rows, first_t)

    def _finish(self, n_rows: int, first_t: int) -> int:
        if self._is_training:
            self.progress.end_batch(n_rows, n_rows * len(self.games.envs))
        n_sent = sum(desk.finish(n_rows, first_t) for desk in self.desks)
        if not n_rows:
            return n_sent
        rewards = self._late[:n_rows]
        for desk, by_env in zip(self.desks, self._columns, strict=True):
            firsts = [columns[0] for columns in by_env.values()]
            rewards[:, list(by_env)] += np.add.reduceat(desk.samples.reward[1 : n_rows + 1], firsts, axis=1)
        self.progress.enter(Phase.SENDING)
        return n_sent + self.tracker.end_rows(rewards, self._over[:n_rows], first_t)

    # ---- before the first row --------------------------------------------------------------

    def _reset(self, seeds: Sequence[int | None], is_used: Callable[[int], bool] = lambda e: True) -> None:
        """Reset the environments that are used. All seats of the others are idle."""
        for desk in self.desks:
            desk.start_afresh()
        self.tracker.restart()
        for e, seed in enumerate(seeds):
            self.games.clear(e)
            if is_used(e):
                self.games.reset(e, seed)
                self._check_observations(e)

    def _check_observations(self, e: int) -> None:
        for columns, column in self.games.acting(e):
            columns.check_column(column)

    def _make_random_steps(self, e: int, rng: np.random.Generator) -> None:
        """Step environment e by 0 to `max_decorrelation_steps` random joint actions."""
        games, totals, rewards = self.games, list[float](), dict[Place, list[float]]()
        for _ in range(int(rng.integers(0, self._max_steps + 1))):
            self.progress.begin_random_step(games.env_ranks[e])
            for desk, by_env in zip(self.desks, self._columns, strict=True):
                desk.draw_actions(rng, by_env.get(e, ()))
            acted = games.acting(e)
            games.late, games.over = [], []
            try:
                games.step_env(e)
            except games.renewable as error:
                games.cut_env(e, error)
                acted, games.over = [], [e]
            for columns, column in acted:
                rewards.setdefault((columns, column), []).append(columns.rewards[column])
            late = sum(reward for _, reward in games.late)
            totals.append(sum(columns.rewards[column] for columns, column in acted) + late)
            if games.over:
                totals, rewards = [], {}
            rewards = {place: rewards[place] for place in games.acting(e) if place in rewards}  # who stays
            for desk in self.desks:
                desk.envs.zero_idle_rewards()
            self._check_observations(e)
        for desk, by_env in zip(self.desks, self._columns, strict=True):
            for column in by_env.get(e, ()):
                desk.end_random_steps(column, rewards.get((desk.envs, column), []))
        self.tracker.preload(e, totals)

    def begin_evaluation(self, seeds: Sequence[int], key: int, is_used: Callable[[int], bool]) -> None:
        """New games with these seeds, and agents with the streams of evaluation number `key`."""
        self._reset(seeds, is_used)
        for desk in self.desks:
            desk.agent.seed_columns(desk.streams.rngs(Purpose.EVAL_ACTION, key))
            desk.agent.reset()
