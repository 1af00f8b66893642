"""The collector: the loop over time inside a worker. Subclass it to sample in your own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym
import numpy as np

from penstock.agents.agent import Agent
from penstock.arguments import must_be
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.slots import BatchColumns
from penstock.collectors.recorder import PolicyParts, Recorder
from penstock.collectors.tracking import Tracker
from penstock.columns.interface import Columns, Events, Start
from penstock.envs.examples import example_of
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import ConfigError, SpaceError
from penstock.workers.control import Phase, Progress

if TYPE_CHECKING:
    from typing_extensions import Self

    from penstock.collectors.recorder_group import RecorderGroup


@dataclass(frozen=True)
class EvalLimits:
    """When an evaluation ends."""

    max_T: int  #: most time steps of one evaluation
    max_trajectories: int | None  #: it ends after this many, of all workers together; None: no limit
    episodes: Sequence[int] | None  #: how many each environment of this worker plays; None: as many as fit
    n_envs: int  #: evaluation environments of all workers


@dataclass(frozen=True)
class CollectorParts:
    """What a worker passes to its collector. Everything is for the worker's own environments."""

    columns: Columns  #: the environments
    policies: Sequence[PolicyParts]  #: one for each policy that acts in them
    progress: Progress  #: the worker's row of shared words: phase, t, env_rank, heartbeat
    streams: ColumnStreams  #: seeds and random generators of the environments
    max_decorrelation_steps: int = 0  #: most random steps before the first batch
    limits: EvalLimits | None = None  #: of an `EvalCollector`
    recorder_cls: type[Recorder] = Recorder  #: what records the columns of each policy
    #: Where several agents share an environment: the recorders as one.
    group_cls: type[RecorderGroup] | None = None
    game_tracker: Tracker | None = None  #: follows whole games, the environments' own sums of all rewards


class MadeByWorker:
    """What a sampler gets as a class, not as an object."""

    def __new__(cls, *parts: object, **named: object) -> Self:
        """Raises `ConfigError` without arguments."""
        if not (parts or named):
            raise ConfigError(
                f"each worker makes its own {cls.__name__}: give the sampler the class itself, without ()"
            )
        return super().__new__(cls)


class Collector(MadeByWorker):
    """Collects batches of `batch_T` time steps from the environments of one worker, of any kind.

    `ResetCollector` and `WaitResetCollector` say what happens where an episode has ended: `begin_episodes`. A collector
    of your own overrides that, `collect_batch`, `act` or `step_envs`, or one of the hooks `start_envs`, `start_agent`
    and `reset_if_needed`.

    Attributes: `columns`, `progress` and `streams` as in `CollectorParts`; `envs`, the environments that were built;
    `recorders`, one for each policy with columns in this worker; `batch_T`. With one policy, `samples`, `agent`,
    `tracker`, `prev_action` `[B, ...]` and `prev_reward` `[B]` are those of its recorder. With several slots, `samples`
    changes before each batch: do not keep its arrays.
    """

    #: Whether `begin_episodes` leaves environments parked until the batch ends.
    waits: ClassVar[bool] = False
    #: Whether the agents evaluate: `eval_mode` in place of `sample_mode`.
    evaluates: ClassVar[bool] = False

    #: Fields of a subclass, for each step of each environment: a Gymnasium space by name, or an example of the value (a
    #: number, an array). The collector writes them with `record_extra`, and the learner reads `samples.env.extra.NAME`
    #: `[T, B, ...]`. They are zero where nothing was written. A `Replay` keeps them. A subclass that adds fields
    #: repeats those of its base: `{**Base.extra_fields, ...}`.
    extra_fields: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, parts: CollectorParts) -> None:
        self.columns, self.progress, self.streams = parts.columns, parts.progress, parts.streams
        options = {"waits": self.waits, "evaluates": self.evaluates}
        self.recorders = [parts.recorder_cls(policy, **options) for policy in parts.policies]
        self.batch_T = min(recorder.batch_T for recorder in self.recorders)
        self._max_decorrelation_steps, self._log_writer = parts.max_decorrelation_steps, parts.columns.log_writer
        self._actions = tuple(recorder.prev_action for recorder in self.recorders)
        self._keeps_infos = any(recorder.keeps_infos for recorder in self.recorders)
        self.game_tracker = parts.game_tracker
        # What acts and records: the only recorder, or the group of several agents' recorders.
        self._recorder: Recorder | RecorderGroup = self.recorders[0]
        if parts.group_cls is not None and parts.game_tracker is not None:
            self._recorder = parts.group_cls(self.recorders, parts.game_tracker, parts.columns, parts.progress)
        if parts.streams.generation and not self.evaluates:  # this worker replaces another
            self._lose_games(range(len(parts.columns.env_ranks)))

    @property
    def envs(self) -> Sequence[Any]:
        """The environments that were built, to read or set their attributes. A batched one is one of them."""
        return self.columns.envs

    @property
    def samples(self) -> BatchColumns:
        """Where this batch is written: arrays `[T, B, ...]`; some have T + 1 rows."""
        return self.recorders[0].samples

    @property
    def agent(self) -> Any:
        """This worker's copy of the agent."""
        return self.recorders[0].agent

    @property
    def tracker(self) -> Tracker:
        """Follows the trajectories, and sends the finished ones to the main process."""
        return self.recorders[0].tracker

    @property
    def prev_action(self) -> Any:
        """The last actions `[B, ...]`, zero where an episode begins."""
        return self.recorders[0].prev_action

    @property
    def prev_reward(self) -> Any:
        """The last rewards `[B]`, zero where an episode begins."""
        return self.recorders[0].prev_reward

    # ---- the loop --------------------------------------------------------------------------

    def collect_batch(self, itr: int) -> None:
        """Write `batch_T` steps into the samples. Trajectories that finish go to the trackers."""
        # The whole loop, for environments of one agent. Row t + 1 of action and reward is step t.
        #
        #   row 0 = the last row of the batch before; flags = False; agent.sample_mode(itr)  begin_batch
        #   for t in range(batch_T):
        #       action = prev_action = agent.step(observation[t], prev_action, prev_reward)  act
        #       record action[t + 1] and agent_info[t]
        #       for each environment:                                                        step_envs: columns.step
        #           observation[t + 1, e], reward[t + 1, e], *flags[t, e], info = env.step(action[e])
        #       for each episode that has ended:                                             settle: record
        #           record done[t, e], terminated[t, e], truncated[t, e], final_obs[t, e]
        #           prev_action[e] = 0
        #           observation[t + 1, e] = env.reset()                                      begin_episodes
        #           agent.reset_one(e)                                                       join
        #       prev_reward = reward[t + 1], but 0 where an episode begins                   write_step
        #   bootstrap_value = agent.value(observation[batch_T]); send the trajectories       end_batch
        self.begin_batch(itr)
        for t in self.columns.rounds(self.batch_T):
            self.act(t)
            self.step_envs(t)
        self.end_batch()

    def begin_batch(self, itr: int) -> None:
        """Write row 0, clear the fields that are written only where an episode ends, and call `sample_mode`."""
        self._recorder.begin_batch(itr)
        if self._log_writer is not None:
            self._log_writer.begin_batch()

    def act(self, t: int) -> None:
        """First part of step t: call `agent.step` with row t, and record its actions and agent_info.

        Afterwards `prev_action` holds the actions for the environments.
        """
        self._recorder.act(t)

    def step_envs(self, t: int) -> None:
        """Second part of step t: step the environments, and settle what has happened."""
        self.progress.begin_stepping(t)
        self.settle(t, self.columns.step(self._actions, t + 1))

    def settle(self, t: int, events: Events | None) -> None:
        """What `columns.step` has returned for step t: record it, begin episodes, and write observations and rewards
        into row t + 1. Afterwards `prev_reward` holds the rewards."""
        recorder = self._recorder
        if self._keeps_infos:
            recorder.record_env_info(t)
        if events is not None:
            joined = self.begin_episodes(events, recorder.record(t, events))
            if recorder.stateful:
                recorder.join(joined)
        recorder.write_step(t)

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        """The episodes of the environments `events.over` have ended, and are recorded. Begin the next ones with
        `columns.reset`, or leave them with `columns.park`. Returns what `columns.reset` returns.

        `going`: those of them whose trajectory goes on (`TrajInfo.traj_done`).
        """
        raise NotImplementedError(f"{type(self).__name__} must say what follows an episode: subclass ResetCollector")

    def end_batch(self) -> None:
        """All rows are written: compute the missing values, and send the finished trajectories."""
        recorder, T, ended = self._recorder, self.batch_T, monotonic_ns()
        n_sent = recorder.end_batch(T)
        n_rows = T if self.columns.n_rounds is None else self.columns.n_rounds
        self.progress.end_batch(n_rows, recorder.n_steps, ended)
        if self._log_writer is not None:  # last: until here the worker may fail, and its episodes are repeated
            self._log_writer.end_batch([recorder.samples for recorder in self.recorders])
        self.progress.n_results = n_sent

    def end_rows(self, n_rows: int) -> int:
        """So many rows of an evaluation are complete. Returns how many trajectories were sent."""
        return self._recorder.end_batch(n_rows)

    def record_extra(self, t: int, policy: str | None = None, /, **fields: Any) -> None:
        """Write fields of `extra_fields` for step t, each as `[B, ...]`: `self.record_extra(t, cost=cost)`.

        With several policies, each has its own columns, so say whose they are: `self.record_extra(t, recorder.policy,
        cost=cost)` for each of `self.recorders`. A policy without a column in this worker has no recorder.

        Fields that are left out keep what they have. Raises `SpaceError` with the name of a field that is not declared,
        has another shape, or has a value that would change in the dtype of the field; or if `policy` has no columns
        here.
        """
        recorders = [recorder for recorder in self.recorders if policy in (None, recorder.policy)]
        if len(recorders) != 1:
            names = [recorder.policy for recorder in self.recorders]
            raise SpaceError(
                f"record_extra needs the name of one of the policies {names} of this worker, got {policy!r}: call "
                "record_extra(t, recorder.policy, ...) for each of self.recorders"
            )
        recorders[0].record_extra(t, fields, type(self).__name__)

    # ---- hooks -----------------------------------------------------------------------------

    def start_envs(self) -> None:
        """Reset every environment, and make random steps so that their episodes do not end together. Runs once."""
        for recorder in self.recorders:
            recorder.tracker.set_agent_info(
                map_leaves(lambda leaf: np.zeros_like(leaf[0]), recorder.samples.agent_info)
            )
        self.reset_envs(self.streams.env_seeds(Purpose.TRAIN))
        self._decorrelate(range(len(self.columns.env_ranks)))

    def _lose_games(self, envs: Sequence[int]) -> None:
        """Before the first batch: the games that ran here before are lost. They are reported as cut, so that no agent
        that has ended in them shares (env_rank, number) with one of the next game."""
        if self.game_tracker is not None:
            for e in envs:
                self.game_tracker.cut(e, 1, -1)  # before row 0: no row of this batch belongs to them

    def start_agent(self) -> None:
        """Prepare the agents for the first batch. Runs once, after `start_envs`."""
        for recorder in self.recorders:
            recorder.agent.reset()

    def reset_if_needed(self) -> None:
        """Runs after start-up and after every batch, evaluation and call, while the learner trains: environments that
        are parked begin their next episodes.

        It must not write to the samples.
        """
        if waiting := self.columns.waiting:
            self.progress.leave_batch()
            self.reset_now(waiting)

    # ---- episodes --------------------------------------------------------------------------

    def reset_now(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> None:
        """Between two batches: begin episodes in `envs`, ascending. Those that are running there are dropped. `starts`:
        see `columns.reset`."""
        joined, of_envs = self.columns.reset(envs, starts), [self.columns.columns_of(e) for e in envs]
        for p, recorder in enumerate(self.recorders):
            absent = {column for columns in of_envs for column in columns[p]}.difference(joined[p])
            recorder.rejoin(joined[p], sorted(absent))
        if self.game_tracker is not None:
            for e in envs:
                self.game_tracker.drop(e)

    def reset_envs(self, seeds: Sequence[int | None], used: Sequence[int] | None = None) -> None:
        """Begin episodes in all environments, or in those of `used`; the others are parked."""
        for recorder in self.recorders:
            recorder.start_afresh()
        if self.game_tracker is not None:
            self.game_tracker.restart()
        columns, everyone = self.columns, range(len(self.columns.env_ranks))
        chosen = everyone if used is None or not columns.can_step_one else used
        generation = self.streams.generation
        joined = columns.reset(chosen, [Start(seeds[e], generation=generation) for e in chosen])
        self.progress.enter(Phase.RESETTING)  # what is wrong with a first observation is a fault of the reset
        for joining, recorder in zip(joined, self.recorders, strict=True):
            for column in joining:
                recorder.columns.check_column(column)
        if used is not None and len(used) < len(everyone):
            columns.park([e for e in everyone if e not in used])

    def _decorrelate(self, envs: Sequence[int]) -> None:
        rngs = self.streams.rngs(Purpose.DECORRELATE)
        for e in envs if self.columns.can_step_one else ():
            self._make_random_steps(e, rngs[e])

    def _make_random_steps(self, e: int, rng: np.random.Generator) -> None:
        """Step environment e by 0 to `max_decorrelation_steps` random actions: legal ones, if there is a mask. Writes
        what the agent's first step needs of its columns: last action, reward and whether an episode begins.

        A trajectory that is unfinished at the end continues in the first batch, with the steps made here. A trajectory
        that finishes here is dropped.
        """
        env_columns = self.columns.columns_of(e)
        rewards: list[dict[int, list[float]]] = [{column: [] for column in columns} for columns in env_columns]
        n, totals = int(rng.integers(0, self._max_decorrelation_steps + 1)), list[float]()
        if self._log_writer is not None:
            self._log_writer.plan_steps(e, n)
        for _ in range(n):
            self._make_random_step(e, env_columns, rng, rewards, totals)
        if self.game_tracker is not None:
            self.game_tracker.preload(e, totals)
        for recorder, kept in zip(self.recorders, rewards, strict=True):
            for column, column_rewards in kept.items():
                recorder.end_random_steps(column, column_rewards)

    def _make_random_step(
        self,
        e: int,
        env_columns: Sequence[Sequence[int]],
        rng: np.random.Generator,
        rewards: Sequence[dict[int, list[float]]],
        totals: list[float],
    ) -> None:
        """One random step of environment e, which has these columns of each policy. Adds their `rewards`, and the sum
        of all to `totals`."""
        recorders, log_writer = list(zip(self.recorders, env_columns, rewards, strict=True)), self._log_writer
        self.progress.begin_random_step(self.columns.env_ranks[e])
        for recorder, columns, _ in recorders:
            recorder.draw(rng, columns)
        if log_writer is not None:
            log_writer.begin_step(e, self._actions)
        acting = [[b for b in columns if b not in recorder.columns.idle] for recorder, columns, _ in recorders]
        events = self.columns.step(self._actions, None, e)
        totals.append(0.0 if events is None else sum(reward for _, reward in events.late))
        for i, ((recorder, _, kept), columns) in enumerate(zip(recorders, acting, strict=True)):
            for column in recorder.note_random(columns, kept):
                totals[-1] += kept[column][-1]
                if log_writer is not None:
                    log_writer.note_reward(e, i, column, kept[column][-1])
        if events is not None:
            self._settle_random_step(events, rewards, totals)
        for recorder, columns, _ in recorders:
            recorder.columns.blank_idle(None)
            for column in columns:
                if column not in recorder.columns.idle:
                    recorder.columns.check_column(column)

    def _settle_random_step(
        self, events: Events, rewards: Sequence[dict[int, list[float]]], totals: list[float]
    ) -> None:
        """Episodes have ended, or begin: drop their trajectories."""
        if events.over:
            totals.clear()
        for recorder, kept, policy_events in zip(self.recorders, rewards, events.policies, strict=True):
            recorder.drop(policy_events)
            kept.update((column, []) for column in (*policy_events.ended, *policy_events.cut))
        joined = self.columns.reset(events.over)
        for recorder, policy_events, columns in zip(self.recorders, events.policies, joined, strict=True):
            recorder.begin([*policy_events.joined, *columns])

    # ---- what a worker calls -----------------------------------------------------------------

    def use_slot(self, slot: int) -> None:
        """Before `collect_batch`, if there are several slots: write the next batch there."""
        self._recorder.use_slot(slot)

    def pull(self, version: int = 0) -> int:
        """Before a batch: the agents get the newest published parameters, or this version of them. The batch says
        which. Returns the version of the first."""
        return self._recorder.pull(version)

    # ---- resuming --------------------------------------------------------------------------

    def column_state(self, e: int) -> dict[str, Any]:
        """What the collector keeps of the columns of environment e between two batches, to be pickled; not the
        environment and the agents. With one agent in each environment, its only column is column e.

        A collector of your own that keeps more adds it here, and restores it in `load_column_state`. One that has other
        methods than its base must define both: otherwise `sampler.state_dict` does not trust them.
        """
        pairs = self._columns_in(e)
        state: dict[str, Any] = {recorder.policy: [*map(recorder.column_state, columns)] for recorder, columns in pairs}
        return state if self.game_tracker is None else {**state, "the game": self.game_tracker.column_state(e)}

    def load_column_state(self, e: int, state: Mapping[str, Any]) -> None:
        """Before the first batch: continue as the environment with this `column_state`."""
        for recorder, columns in self._columns_in(e):
            for column, column_state in zip(columns, state[recorder.policy], strict=True):
                recorder.load_column_state(column, column_state)
        if self.game_tracker is not None:
            self.game_tracker.load_column_state(e, state["the game"])

    def agent_states(self, e: int) -> dict[str, list[Any]]:
        """What each agent keeps of its columns of environment e, by policy, to be pickled."""
        pairs = self._columns_in(e)
        return {recorder.policy: [recorder.agent.column_state(b) for b in columns] for recorder, columns in pairs}

    def load_agent_states(self, e: int, states: Mapping[str, Sequence[Any]]) -> None:
        """Continue with these `agent_states`."""
        for recorder, columns in self._columns_in(e):
            for column, state in zip(columns, states[recorder.policy], strict=True):
                recorder.agent.load_column_state(column, state)

    def _columns_in(self, e: int) -> list[tuple[Recorder, Sequence[int]]]:
        """The recorders that have columns in environment e, with these columns."""
        return [pair for pair in zip(self.recorders, self.columns.columns_of(e), strict=True) if pair[1]]

    def restart_envs(self, envs: Sequence[int], streams: ColumnStreams) -> None:
        """Before the first batch: start again in these environments, with other seeds, and other streams and new states
        of the agents there."""
        self.streams, seeds = streams, streams.env_seeds(Purpose.TRAIN)
        for recorder in self.recorders:
            recorder.freeze_first_row()
        self.reset_now(envs, [Start(seeds[e], generation=streams.generation) for e in envs])
        self._lose_games(envs)
        self._decorrelate(envs)
        for p, recorder in enumerate(self.recorders):
            columns = [b for e in envs for b in self.columns.columns_of(e)[p]]
            recorder.keep_first_row(columns)
            recorder.streams = replace(recorder.streams, generation=streams.generation)
            if columns:
                restart_agent(recorder.agent, columns, recorder.streams)


def restart_agent(agent: Agent, columns: Sequence[int], streams: ColumnStreams) -> None:
    """Give these columns of the agent new random streams, and reset their state. `streams` are those of all columns."""
    rngs = streams.rngs(Purpose.ACTION)
    if len(columns) == len(rngs):
        agent.seed_columns(rngs)
        agent.reset()
        return
    agent.reseed_columns(np.asarray(columns, np.intp), [rngs[column] for column in columns])
    for column in columns:
        agent.reset_one(column)


class ResetCollector(Collector):
    """Resets in the middle of a batch. So every cell of the batch holds a real step, and `valid` is True.

    Exceptions: a step whose game has failed; a batched environment that takes a step for its reset (Gymnasium's mode
    `NEXT_STEP`); an agent that is not in the game.
    """

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        return self.columns.reset(events.over)


class WaitResetCollector(Collector):
    """Resets between batches, for environments with a slow reset. At most one episode ends per environment and batch.

    After its episode's end, the environment is parked until the batch ends: it is not stepped, every field is zero and
    `samples.env.valid` is False. `reset_if_needed` resets it while the learner trains. The next batch starts with the
    new episode's first observation.
    """

    waits = True

    def begin_episodes(self, events: Events, going: Sequence[int]) -> Sequence[Sequence[int]]:
        self.columns.park(events.over)
        return [()] * len(self.recorders)


def extra_example(cls: type[Collector]) -> NamedArrays | None:
    """Zeros for one step of the `extra_fields` of a collector; None if there are none. Raises `ConfigError` or
    `SpaceError` for what cannot be a field."""
    fields: Any = cls.extra_fields
    fits = isinstance(fields, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in fields)
    wanted = 'a dict of names and spaces or examples, such as {"cost": np.float32(0)}'
    must_be(f"extra_fields of {cls.__name__}", fields, fits, wanted)
    for name in fields:
        if iskeyword(name) or name.startswith("_") or hasattr(NamedArrays, name):
            raise ConfigError(
                f"extra_fields of {cls.__name__} must not contain {name!r}: samples.env.extra.{name} is a method of "
                "NamedArrays, a private name or not Python. Give the field another name"
            )
    examples = {name: _example_of_field(cls, name, value) for name, value in fields.items()}
    return NamedArrays(examples) if examples else None


def _example_of_field(cls: type[Collector], name: str, declared: Any) -> Any:
    where = f"extra_fields[{name!r}] of {cls.__name__}"
    if isinstance(declared, gym.Space):
        return example_of(declared, where)
    array = np.asarray(declared)
    must_be(where, declared, array.dtype.kind in "biufc", "a space, a number or an array of numbers")
    return np.zeros_like(array)
