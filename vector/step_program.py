"""What a worker of a vector environment runs: it steps and resets its environments and writes the results into rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.buffers.native import put_row
from penstock.buffers.object_pipe import MessageKind, ObjectMessage
from penstock.buffers.ordering import fence
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import snapshot, tree_leaves
from penstock.columns.batched_columns import BatchedColumns
from penstock.columns.builder import EnvBuilder
from penstock.columns.interface import BatchedEnds, Events, Start
from penstock.columns.seat_columns import LockStepColumns, SeatColumns
from penstock.columns.single_columns import SingleColumns
from penstock.envs.calls import EnvCall, perform, pickled
from penstock.envs.checks import NO_CHECKS
from penstock.envs.factory import EnvContext, EnvFactory
from penstock.envs.infos import mask_name
from penstock.envs.rows import arrays_like
from penstock.envs.seats import SeatTable
from penstock.envs.seeding import EpisodePlan, Purpose, episode_options, episode_seed, seed_generators
from penstock.errors import ConfigError, SpaceError, brief
from penstock.vector.objects import ObjectParts, shared_part
from penstock.vector.step_memory import VectorMemory, copy_rows
from penstock.vector.vector_infos import FINAL_INFO, FINAL_OBS, RESTARTED, InfoOutbox, keeps_types
from penstock.workers.control import Command, Phase, Progress
from penstock.workers.program import WorkerContext

_EVERYONE = slice(None)
_FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")


@dataclass(frozen=True)
class ResetMessage:
    """Reset the environments that have a request."""

    seeds: Sequence[int | None]  #: of all environments
    options: Sequence[dict[str, Any] | None]  #: of all environments; one dict or None for each

    def dumps(self) -> bytes:
        """The message, pickled. Raises `ConfigError` if that is impossible."""
        return pickled(self, "the options of reset")


@dataclass
class VectorProgram:
    """The `WorkerProgram` of vector environments. The data of a worker is the list of its environments' factories; of
    batched environments, the list of the only one.

    Environments of several agents have a row for each seat. Of a batched environment, each row is an environment, but
    all are stepped, and reset, by one call.
    """

    build_seeds: Sequence[int]  #: `[n]`, for factories that want an `EnvContext`
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    autoreset_mode: AutoresetMode
    flatten_wrappers: bool
    may_be_replaced: bool  #: whether a worker that dies is replaced
    seats: SeatTable | None = None  #: where environments have several agents
    is_batched: bool = False
    episode_plan: EpisodePlan | None = None

    data_name = "env_fns"

    def pickled_parts(self) -> dict[str, Any]:
        """The data that is an argument of the user, by the name of the argument."""
        return {"autoreset_mode": self.autoreset_mode, "episode_plan": self.episode_plan}

    def build(self, context: WorkerContext) -> None:
        """Build this worker's environments."""
        memory: VectorMemory = context.memory
        plan, self._progress = context.plan, context.progress
        self._context, self._plan, self._mailbox, self._objects = context, plan, memory.mailbox, memory.objects
        rows = memory.rows.arrays
        known = int(rows.seed[plan.columns.start])  # of the last reset, before a replacement
        seeds = known if known >= 0 else self.build_seeds[0], plan.worker_rank, plan.generation
        self._builder = EnvBuilder(self._progress, self.observation_space, self.action_space, seeds)
        self._envs = self._build_envs(context.data)
        counters = rows[plan.columns.start : plan.columns.stop]
        self._wake_at, self._all_requested, self._all_replied = memoryview(rows.wake_at), rows.requested, rows.replied
        # Items of memoryviews are Python integers and cost a third of numpy's.
        self._requested, self._replied = memoryview(counters.requested), memoryview(counters.replied)
        self._info_seq, self._seeds = memoryview(counters.info_seq), memoryview(counters.seed)
        # If this worker replaces another: the environments that were not reset since then, and among them those whose
        # episodes were not cut yet.
        self._unseeded = set(range(len(plan.columns))) if plan.generation > 0 else set[int]()
        self._uncut = set(self._unseeded)
        self._episodes, self._generations = counters.episode, [plan.generation] * len(plan.columns)
        self._bind(rows)

    def _build_envs(self, factories: Sequence[EnvFactory]) -> list[Any]:
        plan = self._plan
        contexts = [EnvContext(i, plan.worker_rank, self.build_seeds[i], Purpose.TRAIN) for i in plan.columns]
        if self.is_batched:
            return [self._builder.build_batched(factories[0], len(contexts), contexts[0])]
        envs = [self._builder.build(*pair) for pair in zip(factories, contexts, strict=True)]
        if len({id(env.unwrapped) for env in envs}) < len(envs):
            raise ConfigError(
                f"two of the env_fns of env_rank {plan.env_ranks.start} to {plan.env_ranks.stop - 1} return the same "
                "environment: each must build its own"
            )
        return envs

    def _bind(self, all_rows: Any) -> None:
        """What steps the environments, and where their results go."""
        space, envs = self.observation_space, self._plan.columns
        table = self.seats or SeatTable.of_single(len(self.build_seeds), 0)
        cells = table.cells(0, envs)
        rows = self._rows = all_rows[cells.start : cells.stop]
        self._env_of = [e - envs.start for e, _, _ in table.seats(0, envs)]
        firsts = [table.cells(0, range(e)).stop - cells.start for e in (*envs, envs.stop)]
        self._ranges = [range(*pair) for pair in pairwise(firsts)]  # the rows of each environment
        self._spans = [slice(span.start, span.stop) for span in self._ranges]  # the same, as arrays take them
        self._action = (rows.action,)
        self._reward, self._terminated, self._truncated = rows.reward[np.newaxis], rows.terminated, rows.truncated
        if self.seats is not None:
            self._alive, self._valid, self._late = rows.alive, rows.valid, rows.late_reward
        self._observation = arrays_like(space, rows.observation[np.newaxis])
        self._final = arrays_like(space, rows.final_observation[np.newaxis])
        self._last = arrays_like(space, rows.observation)
        self._observation_parts, self._action_parts = ObjectParts(space), ObjectParts(self.action_space)
        self._sends_objects = bool(self._observation_parts)
        self._columns = columns = self._make_columns(table)
        self._is_same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        # An environment that was built alone begins again in the next step; a batched one does so itself.
        self._parks = self.autoreset_mode is AutoresetMode.NEXT_STEP and not self.is_batched
        self._recorder = recorder = columns.policies[0]
        self._infos = InfoOutbox(recorder.env_ranks, self._env_of, cells.start)
        # Parts without a fixed shape have no place to step into. A worker that may be replaced does not write there
        # during a step: if it dies in it, the place must still have the last observation.
        self._row = None if self._observation_parts or self.may_be_replaced else 0
        recorder.watch(
            None, into=self._observation, on_info=self._put_batch_infos if self.is_batched else self._infos.put
        )
        if self._uncut and not self.is_batched:
            columns.park(sorted(self._uncut))

    def _make_columns(self, table: SeatTable) -> Any:
        plan, progress, spaces = self._plan, self._progress, (self.observation_space, self.action_space)
        if self.is_batched:
            env, ranks = self._envs[0], plan.env_ranks
            batched = BatchedColumns(env, ranks, progress)
            if (mode := AutoresetMode(env.metadata["autoreset_mode"])) is not self.autoreset_mode:
                raise ConfigError(
                    f"the batched environment of env_rank {ranks.start} has the autoreset mode {mode.name}, that of "
                    f"the example environment, or the argument autoreset_mode, is {self.autoreset_mode.name}: they "
                    "must be the same"
                )
            return batched
        if self.seats is None:
            fixed = shared_part(spaces[0]), shared_part(spaces[1])
            single = SingleColumns(self._envs, plan.env_ranks, progress, NO_CHECKS, self.flatten_wrappers, fixed)
            if self._action_parts:
                self._split, single.split_actions = single.split_actions, self._split_with_objects
            return single
        for i, e in enumerate(plan.columns):
            if (agents := self._envs[i].possible_agents) != (wanted := table.agents[e]):
                raise SpaceError(
                    f"possible_agents of env_rank {e} are {brief(agents)}, those of its example environment "
                    f"{brief(wanted)}: each call of a function must return the same; give different functions for "
                    "different agents"
                )
        return LockStepColumns(
            self._envs, [SeatColumns(table.ranks(0, plan.columns), spaces, progress)], plan.env_ranks
        )

    def idle(self) -> None:
        """There is nothing to do without a request."""

    def run(self, command: Command) -> None:
        """Step the environments that have a request, or do what the message in the mailbox says."""
        wanted, replied = self._requested, self._replied
        requested = [i for i in range(len(wanted)) if wanted[i] != replied[i]]
        if command.has_message:
            message = pickle.loads(self._mailbox.read())
            if not isinstance(message, ResetMessage):
                self._call(message)
            elif requested:
                seeds = [message.seeds[self._plan.columns[i]] for i in requested]
                if given := [seed for seed in seeds if seed is not None]:
                    seed_generators(given[0], self._plan.worker_rank)
                self._reset(message, requested)
        elif requested:
            self._progress.enter(Phase.STEPPING)
            alone = self._wake_at[0] or len(requested) < len(self._requested)
            for e in requested if alone and self._columns.can_step_one else (None,):
                self._step(e)
                if self._wake_at[0]:
                    assert self._context.gate is not None
                    self._context.gate.wake_main_if(self._are_enough)

    def _are_enough(self) -> bool:
        """Whether there are as many replies, of all workers, as the main process waits for."""
        return bool(np.count_nonzero(self._all_replied == self._all_requested) >= self._wake_at[0])

    def close(self) -> None:
        """Close every environment; the first exception is raised when all have been closed."""
        self._builder.close()

    # ---- stepping --------------------------------------------------------------------------

    def _step(self, which: int | None) -> None:
        """Step all environments, or only `which`, and reply."""
        rows, self._which = _EVERYONE if which is None else self._spans[which], which
        columns = self._columns
        self._terminated[rows] = self._truncated[rows] = False
        if self.seats is not None:
            self._valid[rows], self._late[rows] = self._alive[rows], 0.0
            self._recorder.blank_idle(None)
        if columns.waiting or self._unseeded:
            events = self._step_or_restart(which)
        elif (events := columns.step(self._action, self._row, which)) is not None:
            self._settle(events)
        self._write(which)
        if events is not None and self._parks:
            columns.park(events.over)
        self._reply(which)

    def _step_or_restart(self, which: int | None) -> Events | None:
        """Step the environments that do not wait, then begin again in those that do."""
        # All rows of a batched environment wait, or none. No row is given: columns write zeros where they wait.
        waiting, n, events = self._columns.waiting or range(len(self._spans)), len(self._spans), None
        if which is not None:
            waiting, n = [which] if which in waiting else (), 1
        if len(waiting) < n and (events := self._columns.step(self._action, None, which)) is not None:
            self._settle(events)
        if waiting:
            self._restart(waiting)
        return events

    def _settle(self, events: Events) -> None:
        """Write how episodes have ended, then begin the next ones when the autoreset mode says so."""
        policy_events, is_same_step = events.policies[0], self._is_same_step
        if isinstance(ends := policy_events.ends, BatchedEnds):
            self._terminated[:], self._truncated[:] = ends.terminated, ends.truncated
            if is_same_step:
                self._rows.final_observation[ends.columns] = ends.observation
        else:
            for row, observation, _, self._terminated[row], self._truncated[row] in ends or ():
                if is_same_step:
                    self._write_final(row, observation)
                    self._infos.end(row)
        if self.seats is not None:
            self._alive[policy_events.ended] = False
            for row, reward in policy_events.late:
                self._late[row] += reward
            self._join(policy_events.joined)
        if is_same_step:
            self._begin(events.over)

    def _restart(self, envs: Sequence[int]) -> None:
        """These environments wait, so this is no step of theirs. Either their episodes ended in the step before, or a
        worker before this one has left them: then they are cut first."""
        is_next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        for row in [row for e in envs for row in self._ranges[e]]:
            self._recorder.rewards[row] = 0.0
        if lost := [e for e in envs if e in self._uncut] if is_next_step else envs:
            self._cut(lost)
        if self.is_batched and len(self._unseeded) < len(self._spans):
            self._unseeded.clear()  # it was reset in parts, and this step shows all of them
        elif is_next_step:
            self._begin([e for e in envs if e not in lost])
        elif self._is_same_step:
            self._begin(envs)

    def _begin(self, envs: Sequence[int]) -> None:
        """Reset environments whose episode is over."""
        is_given = self._unseeded or self.episode_plan is not None
        starts = [self._start_of(e) for e in envs] if is_given else None
        joined = self._columns.reset(envs, starts)[0]
        if self.seats is not None:
            self._join(joined)

    def _join(self, rows: Sequence[int]) -> None:
        """The agents of these rows act from now on. Where none did so far, and none has ended, an idle stretch ends."""
        for row in rows:
            self._alive[row] = True
            if not (self._valid[row] or self._terminated[row] or self._truncated[row]):
                self._truncated[row] = True
                self._recorder.write_final(self._final, 0, row, self._recorder.zero)

    def _cut(self, envs: Sequence[int]) -> None:
        """These episodes end where the worker before this one has left them. Who was idle in a game is not known, so
        all of its seats are cut off."""
        recorder, rows = self._recorder, [row for e in envs for row in self._ranges[e]]
        self._uncut.difference_update(envs)
        self._truncated[rows] = True
        if self.seats is not None:
            self._alive[rows] = self._valid[rows] = False
        if self.is_batched:
            self._unseeded.update(envs)  # also if some of its rows were reset since
            recorder.observations, everywhere = snapshot(self._last), np.ones(len(rows), np.bool_)
            self._infos.put(0, {RESTARTED: everywhere, mask_name(RESTARTED): everywhere})
        for row in rows:
            if not self.is_batched:
                self._infos.put(row, {RESTARTED: True})
            if self._is_same_step:
                self._write_final(row, self._last_observation(row))
                self._infos.end(row)
            elif not self.is_batched:
                recorder.observations[row] = self._last_observation(row)

    def _write(self, which: int | None) -> None:
        """Write observations and rewards of all environments, or of `which`."""
        recorder = self._recorder
        if self._sends_objects:
            for e in range(len(self._envs)) if which is None else (which,):
                recorder.observations[e] = self._send_objects(e, recorder.observations[e])
        if which is None:
            # The fast path; `write_step` raises errors.
            if not (
                put_row(self._observation, 0, recorder.observations) and put_row(self._reward, 0, recorder.rewards)
            ):
                recorder.write_step(self._observation, self._reward, 0)
        else:
            for row in self._ranges[which]:
                recorder.write_column(self._observation, self._reward, 0, row)

    def _reply(self, only: int | None = None) -> None:
        """Announce the results of all environments, or of one."""
        if self._infos.pickled:
            requested, columns = self._requested, self._plan.columns
            by_env = self._infos.take()
            self._context.put([ObjectMessage(MessageKind.INFO, requested[e], columns[e], part) for e, part in by_env])
            for e, _ in by_env:
                self._info_seq[e] = requested[e]
        fence()
        cells = _EVERYONE if only is None else slice(only, only + 1)
        self._replied[cells] = self._requested[cells]  # last: it announces the rest

    # ---- observations and actions ------------------------------------------------------------

    def _write_final(self, row: int, observation: object) -> None:
        """The last observation of an episode. It is pickled only if the arrays cannot keep its types."""
        arrays_only, objects = self._observation_parts.take_out(observation)
        self._recorder.write_final(self._final, 0, row, arrays_only)
        if objects or not keeps_types(self._final, observation):
            self._infos.put(row, {FINAL_OBS: observation}, FINAL_OBS)

    def _put_batch_infos(self, row: int, infos: Mapping[str, Any]) -> None:
        """Send the infos of all rows with the reply of `row`. Final observations and their masks are in the rows."""
        if "env_id" in infos:  # ALE's name for the index of a row, here among those of all workers
            infos = {**infos, "env_id": infos["env_id"] + self._plan.columns.start}
        if self._is_same_step and "final_obs" in infos:
            if final_info := infos.get("final_info"):
                self._infos.put(row, final_info, FINAL_INFO)
            infos = {key: value for key, value in infos.items() if key not in _FINAL}
        if infos:
            self._infos.put(row, infos)

    def _last_observation(self, i: int) -> Any:
        """The observation that the worker before this one left."""
        observation = copy_rows(self._last, i)
        if not self._observation_parts:
            return observation
        assert self._objects is not None
        objects = self._objects.read_observation(self._plan.columns[i], self._requested[i] - 1)
        return self._observation_parts.put_in(observation, objects or self._observation_parts.defaults())

    def _send_objects(self, i: int, observation: object) -> Any:
        """Send the parts of an observation that have no fixed shape; returns it with placeholders."""
        assert self._objects is not None
        rest, objects = self._observation_parts.take_out(observation)
        try:
            self._objects.write_observation(self._plan.columns[i], self._requested[i], objects)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            self._progress.at_env(self._plan.env_ranks[i])
            raise SpaceError(
                f"the observation of env_rank {self._plan.env_ranks[i]} cannot be sent to the main process: "
                f"{in_one_line(error)}"
            ) from error
        return rest

    def _split_with_objects(self, action_rows: object) -> list[Any]:
        """The actions of all environments, or of the one that steps, with their parts that have no fixed shape."""
        assert self._objects is not None
        parts, read, columns = self._action_parts, self._objects.read_action, self._plan.columns
        which = range(len(columns)) if self._which is None else (self._which,)
        actions = zip(which, self._split(action_rows), strict=True)
        return [parts.put_in(action, read(columns[i])) for i, action in actions]

    # ---- resetting and calling -------------------------------------------------------------

    def _reset(self, message: ResetMessage, requested: Sequence[int]) -> None:
        """Reset these environments one after the other. One call resets rows of a batched one."""
        recorder, first, n = self._recorder, self._plan.columns.start, len(self._spans)
        for envs in [requested] if self.is_batched else [[e] for e in requested]:
            others = self._unseeded.difference(envs) if self.is_batched else None
            if others and len(self._unseeded) == n:  # a batched environment resets some rows only after all
                self._begin(range(n))
                self._infos.take()  # nobody has asked for them
            starts = [self._start_of(e, message.seeds[first + e], message.options[first + e]) for e in envs]
            rows: Any = envs if self.is_batched else self._spans[envs[0]]
            joined = () if self.is_batched else self._columns.reset(envs, starts)[0]
            if others is not None:
                self._columns.reset_rows(envs, [start.seed for start in starts], starts[0].options)
                self._unseeded = others
            elif self._uncut:
                self._uncut.difference_update(envs)
            self._progress.words[Progress.PHASE] = Progress.IS_RESETTING  # errors in what follows belong to the reset
            self._terminated[rows] = self._truncated[rows] = False
            if self.seats is not None:
                self._valid[rows], self._late[rows], self._alive[rows] = False, 0.0, False
                self._alive[joined] = True
            if others is not None:
                self._reward[0, rows] = 0.0
                self._write_some(envs, may_change=bool(others))
                self._reply()
            else:
                recorder.rewards[rows] = [0.0] * len(self._ranges[envs[0]])
                self._write(envs[0])
                self._reply(envs[0])

    def _write_some(self, rows: Sequence[int], *, may_change: bool) -> None:
        """Write the observations of these rows of a batched environment, which were reset; the others stay. If they
        `may_change`, the environment has reset them too."""
        others = np.setdiff1d(self._env_of, rows)
        kept = copy_rows(self._last, others)
        self._recorder.write_observations(self._rows.observation)
        for _, row, last in tree_leaves(self._last, "", kept):
            if not may_change and row[others].tobytes() != last.tobytes():
                raise ConfigError(
                    f"{self._envs[0]} does not know the option reset_mask: it has reset rows that the mask leaves out. "
                    "Reset all environments at once"
                )
            row[others] = last

    def _start_of(self, i: int, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """How the next episode of environment i begins. With a plan, `seed` is that of its episodes from 0 on."""
        if self.episode_plan is None:
            return Start(self._seed_of(i, seed), copy.deepcopy(options))  # others have got the same
        self._unseeded.discard(i)
        words = self._episodes[i]
        words[1] += 1
        if seed is not None:
            words[:], self._generations[i] = (seed, 0), 0
        first, episode = words.tolist()
        key = first if first >= 0 else self.build_seeds[0], self._plan.columns[i], episode, self._generations[i]
        return Start(episode_seed(*key), episode_options(self.episode_plan, *key))

    def _seed_of(self, i: int, given: int | None) -> int | None:
        """The seed of this reset. After a replacement, the first has another than before, but a reproducible one."""
        if i in self._unseeded:
            self._unseeded.remove(i)
            if given is None and (seed := self._seeds[i]) >= 0:
                return int(np.random.SeedSequence([seed, self._plan.generation]).generate_state(1)[0])
        return given

    def _call(self, call: EnvCall) -> None:
        self._progress.enter(Phase.CALLING)
        rank, envs, columns, env_ranks = self._plan.worker_rank, self._envs, self._plan.columns, self._plan.env_ranks
        if self.is_batched:
            columns, env_ranks = range(rank, rank + 1), env_ranks[:1]
        elif self.seats is not None and call.verb == "apply":  # a function gets the user's environment
            envs = [view.env for view in envs]
        results = perform(call, envs, columns, env_ranks)
        self._context.put(results)
        self._progress.n_results = len(results)
