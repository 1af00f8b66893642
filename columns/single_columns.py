"""Single environments, which are stepped one after the other; and columns whose results are in lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from operator import attrgetter
from time import monotonic_ns
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.named import map_leaves
from penstock.buffers.native import COMPILED, put_cell
from penstock.buffers.tree import map_tree, snapshot, tree_leaves
from penstock.columns.interface import Columns, End, Events, PolicyColumns, PolicyEvents, Start
from penstock.columns.stepping import WATCH_ALL, WATCH_UNUSUAL, step_ordinary
from penstock.envs.checks import NO_CHECKS, Checks, check_row, checked_reset, checked_step, require_number, reset_with
from penstock.envs.direct_steps import cells_of, flat_step_of, step_into_of, with_observation
from penstock.envs.examples import example_of
from penstock.envs.infos import InfoWriter
from penstock.envs.recorded_episode import follow
from penstock.envs.rows import ColumnError, action_splitter, arrays_like, write_row
from penstock.errors import SpaceError, brief
from penstock.workers.control import ENV_RANK, HEARTBEAT, LONG_RESET_NS, PHASE, RESETTING, Progress

_IS_RESETTING = Progress.IS_RESETTING  # a local name is read faster
_CUT = object()  # stands in the place of a final observation
_START = Start()


def example_rows(space: gym.Space[Any], n: int) -> Any:
    """One row of zeros for `n` columns, `[1, n, ...]`, nested as elements of `space` are."""
    rows = map_leaves(lambda leaf: np.zeros((1, n, *leaf.shape), leaf.dtype), example_of(space))
    return arrays_like(space, rows)


class ListedColumns(PolicyColumns):
    """Columns whose observations, rewards and infos are in lists, with one entry for each column.

    Raises `SpaceError`, with the field and the env_rank, for data that do not fit their space or have a wrong type.
    """

    def __init__(
        self,
        env_ranks: Sequence[int],
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        progress: Progress,
        checks: Checks,
    ) -> None:
        self.env_ranks, (self.observation_space, self.action_space) = env_ranks, spaces
        self.progress, self.checks, n = progress, checks, len(env_ranks)
        self.split_actions = action_splitter(self.action_space)
        example = example_of(self.observation_space)
        self._scratch = example_rows(self.observation_space, n)  # for observations that are only checked
        #: An observation of zeros, as an environment would return it. Numbers are numbers, not arrays without a shape.
        self.zero: Any = map_tree(
            lambda array: array if array.ndim else array[()], arrays_like(self.observation_space, example)
        )
        self.idle: list[int] = []
        self.observations: list[Any] = [None] * n
        self.rewards: list[Any] = [0.0] * n
        self.infos: list[Any] = [None] * n
        self.no_info: Any = None  # that of an idle one

    def write_row(self, arrays: object, t: int) -> None:
        try:
            write_row(arrays, t, self.observations)
            if self.checks:
                check_row(self.checks, self.observation_space, arrays, t, self.observations, skip=self.idle)
        except ColumnError as error:
            raise self.with_env_rank(error.column, error) from None

    def write_rewards(self, row: Any) -> None:
        try:
            array = np.asarray(self.rewards)
        except (TypeError, ValueError, RuntimeError):  # some are arrays of different lengths, or have gradients
            array = None
        if array is None or array.shape != row.shape or array.dtype.kind not in "fiub":
            array = self._numbers()
        try:
            with np.errstate(over="raise"):
                row[...] = array
        except FloatingPointError:  # an overflow
            column = int(np.abs(array).argmax())
            problem = f"must be a number that {row.dtype} can hold, got {brief(self.rewards[column])}"
            raise self.with_env_rank(column, ColumnError(column, "the reward", problem)) from None
        if self.checks.check_finite and not (finite := np.isfinite(row)).all():
            column = int(finite.argmin())
            raise self.not_finite(column, self.rewards[column])

    def _numbers(self) -> Any:
        """The rewards as floats. Raises `SpaceError` for the first that is not a number."""
        numbers = np.empty(len(self.rewards))
        for b, reward in enumerate(self.rewards):
            self.progress.at_env(self.env_ranks[b])
            numbers[b] = require_number(reward, self.env_ranks[b])
        return numbers

    def watched(self) -> None:
        if self.keep_info is not None and self.no_info is None:
            self.no_info = self.keep_info({})
            self.infos = [self.no_info] * len(self)

    def note_info(self, column: int, info: Any) -> None:
        """The last step of this column has this info."""
        if self.keep_info is not None:
            self.infos[column] = self.keep_info(info)

    def write_infos(self, writer: InfoWriter, t: int) -> None:
        writer.write(t, self.infos)

    def blank_idle(self, row: Any) -> None:
        for column in self.idle:
            self.rewards[column], self.infos[column] = 0.0, self.no_info

    def check_column(self, column: int) -> None:
        if self.checks.check_finite and not isfinite(require_number(self.rewards[column], self.env_ranks[column])):
            raise self.not_finite(column, self.rewards[column])
        self._write_current(self._scratch, 0, column, self.current(column))

    def _write_current(self, arrays: Any, t: int, column: int, observation: Any) -> None:
        self._write_one(arrays, t, column, observation, "observation")

    def current(self, column: int) -> Any:
        return self.observations[column]

    def write_column(self, arrays: Any, rewards: Any, t: int, column: int) -> None:
        """As `write_step`, for one column."""
        rewards[t, column] = require_number(self.rewards[column], self.env_ranks[column])
        self._write_current(arrays, t, column, self.observations[column])

    def check_final(self, column: int, observation: Any) -> None:
        self.write_final(self._scratch, 0, column, observation)

    def require_action(self, column: int, action: object) -> None:
        """With `debug`, raise `SpaceError` unless `action` is in its space."""
        if not self.action_space.contains(action):
            self.progress.at_env(self.env_ranks[column])
            raise SpaceError(
                f"the action of env_rank {self.env_ranks[column]}, given by the agent, must be in {self.action_space} "
                f"(debug=True), got {brief(action)}"
            )


class SingleColumns(ListedColumns, Columns):
    """Single environments: each is one column, so these are the columns of the only policy too. See `Columns`.

    With `flatten_wrappers`, the wrappers that `gym.make` adds are stepped without their Python functions. `spaces` are
    what is recorded, in place of the spaces of the environments.
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        env_ranks: Sequence[int],
        progress: Progress,
        checks: Checks = NO_CHECKS,
        flatten_wrappers: bool = True,
        spaces: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__(env_ranks, spaces or (envs[0].observation_space, envs[0].action_space), progress, checks)
        self.envs: list[Any] = list(envs)
        self.policies, self.waiting = (self,), list[int]()
        self._step_of: Callable[[Any], Any] = flat_step_of if flatten_wrappers else attrgetter("step")
        self._words, self._loop_words = progress.words, progress.loop_words
        # One tuple for each environment with all that the loop needs.
        self._bound = self._active = [self._entry(e) for e in range(len(envs))]
        n_stepped = sum(step_into is None for *_, step_into in self._bound)
        self._writes_in_place = n_stepped < len(envs)
        # Where environments with `step_into` write the last row of a batch: the learner never sees it.
        self._last = example_rows(self.observation_space, len(envs)) if self._writes_in_place else None
        self.reset_infos: list[Any] = [{}] * len(envs)  #: of the last resets: errors name a mask that they have
        self._ends: list[End] = []
        self._policy_events = PolicyEvents()
        self._events = Events([], (self._policy_events,))
        self._watch, self._writes_at_once, self._last_row = 0, False, -1
        self._set_waiting([])

    def _entry(self, e: int) -> tuple[Any, ...]:
        env, env_rank = self.envs[e], self.env_ranks[e]
        return e, env_rank, self._step_of(env), step_into_of(env, env_rank)

    def columns_of(self, e: int) -> Sequence[Sequence[int]]:
        return ((e,),)

    def watched(self) -> None:
        super().watched()
        # Hooks and checks need what the environments have returned.
        self._writes_at_once = COMPILED and self.on_step is None and not self.checks
        leaves = [] if self.into is None else [leaf for _, leaf in tree_leaves(self.into)]
        self._last_row = len(leaves[0]) - 1 if leaves else -1  # an empty space has no arrays
        self._watch = WATCH_ALL if self.on_step or self.keep_info else WATCH_UNUSUAL if self.on_info else 0
        self._set_waiting(self.waiting)

    # ---- observations ----------------------------------------------------------------------

    def end_batch(self) -> None:
        if self.written_row >= 0:  # fewer rows were collected
            self.observations = [snapshot(self.current(e)) for e in range(len(self))]
            self.written_row = -1

    def current(self, column: int) -> Any:
        if (t := self.written_row) < 0:
            return self.observations[column]
        return map_tree(lambda array: array[t, column], self.into)

    def _note(self, e: int, observation: Any) -> None:
        """This is the current observation of environment e."""
        if self.written_row < 0:
            self.observations[e] = snapshot(observation)
        elif not put_cell(self.into, self.written_row, e, observation):
            self._write_current(self.into, self.written_row, e, observation)

    # ---- resets ----------------------------------------------------------------------------

    def reset(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> Sequence[Sequence[int]]:
        words, row, phase = self._words, self.written_row, self._words[PHASE]
        is_plain = starts is None and self.log_writer is None and self.renewals is None
        for i, e in enumerate(envs):
            start = _START if starts is None else starts[i]
            if start is not _START and self._continue(e, start):
                continue
            words[PHASE], words[ENV_RANK] = _IS_RESETTING, self.env_ranks[e]
            words[HEARTBEAT] = began = monotonic_ns()
            result = self.envs[e].reset(seed=None) if is_plain else self._begin(e, start)
            words[RESETTING] += (took := monotonic_ns() - began)
            if took >= LONG_RESET_NS:
                self.progress.note_long_reset(began, took)
            if result.__class__ is not tuple or len(result) != 2 or result[1].__class__ is not dict:
                result = checked_reset(result, self.env_ranks[e])
            observation, self.reset_infos[e] = result
            if row < 0 or not put_cell(self.into, row, e, observation):
                self._note(e, observation)
            if self.on_info is not None and result[1]:
                self.on_info(e, result[1])
        words[PHASE] = phase
        if self.waiting:
            self._set_waiting([e for e in self.waiting if e not in envs])
        return (envs,)

    def _begin(self, e: int, start: Start) -> Any:
        """Reset environment e as `start` says. Returns what its `reset` has returned."""
        if self.log_writer is not None:
            start = self.log_writer.begin(e, start)
        seed = start.seed if self.renewals is None else self._seed_after_renewal(e, start.seed)
        while True:
            try:
                result = reset_with(self.envs[e], seed, start.options)
                break
            except self.renewable as error:
                self._renew(e, error, is_cut=False)
                seed = self._seed_after_renewal(e, seed)
        if self.renewals is not None:
            self.renewals.note_reset(e)
        return result

    def save(self, e: int) -> Any:
        return snapshot(self.current(e))

    def _continue(self, e: int, start: Start) -> bool:
        """Let environment e continue a saved run, if `start` says so. Raises `RepeatError` if an episode that is
        repeated differs. Returns whether it continues."""
        observation = self._saved(e, start)
        if start.state is None:
            if start.actions is None:
                return False
            observation = follow(self.envs[e], start, f"the episode of env_rank {self.env_ranks[e]}")
        self._note(e, observation)
        self.check_column(e)
        return True

    def park(self, envs: Sequence[int]) -> None:
        self._set_waiting(sorted({*self.waiting, *envs}))
        for e in envs:
            self._note(e, self.zero)

    def _set_waiting(self, envs: list[int]) -> None:
        self.waiting = self.idle = envs
        self._is_special = self.on_step is not None or self.checks.debug or bool(envs)
        self._is_simple = self._writes_at_once and not (self._writes_in_place or envs)
        self._active = [entry for entry in self._bound if entry[0] not in envs] if envs else self._bound

    # ---- other environments ------------------------------------------------------------------

    def _use(self, e: int, env: Any) -> None:
        self.envs[e] = env
        new = self._entry(e)
        for entries in (self._bound, self._active):
            for i, old in enumerate(entries):
                if old[0] == e:
                    entries[i] = new  # in place: `step` goes through this list

    # ---- steps -----------------------------------------------------------------------------

    def step(self, actions: Sequence[Any], row: int | None = None, which: int | None = None) -> Events | None:
        """See `Columns`. Almost all time that penstock needs per environment step is spent here."""
        active, before, outs, arrays, t = self._active, None, None, None, -1
        if which is None:
            env_actions = self.split_actions(actions[0])
        else:
            env_actions, active = self.split_actions(actions[0][which : which + 1]), [self._bound[which]]
        if self._is_special:
            if which is None and self.waiting:
                env_actions = [env_actions[entry[0]] for entry in active]
            before = self._look(active, env_actions)
        if row is not None and self._writes_at_once and row != self._last_row:
            arrays, t = self.into, row
        self.written_row = t
        if row is not None and not self._is_simple:
            outs = self._begin_row(row)
        watch, observations, rewards, ends, first = self._watch, self.observations, self.rewards, self._ends, 0
        while True:  # step_ordinary returns at each step that needs a check or a hook
            try:
                stop = step_ordinary(
                    self._loop_words, active, env_actions, outs, first, watch, observations, rewards, ends, arrays, t
                )
            except self.renewable as error:
                first = self._cut(active, error)
                continue
            if stop is None:
                break
            first = self._store(active, stop, outs, before)
        return self._take_ends() if ends else None

    def _begin_row(self, row: int) -> list[Any] | None:
        """Some environments wait, or write in place. Returns where those with `step_into` write their observations."""
        if self._writes_at_once:  # otherwise the list has been zero there since `park`
            for e in self.waiting:
                self._note(e, self.zero)
        if not self._writes_in_place:
            return None
        # The last row of a batch stays here: the learner gets the batch.
        arrays, t = (self._last, 0) if row == self._last_row and row else (self.into, row)
        return cells_of(arrays, t, len(self.envs))

    def _look(self, active: Sequence[Any], env_actions: Sequence[Any]) -> dict[int, tuple[Any, Any]] | None:
        """Check the actions, and copy what the hook needs: the environment may change its action, and an observation
        that it has written in place."""
        if self.checks.debug:
            for (e, *_), action in zip(active, env_actions, strict=True):
                self.require_action(e, action)
        if self.on_step is None:
            return None
        pairs, seen = zip(active, env_actions, strict=True), self.observations
        if self._writes_in_place:
            seen = [*map(snapshot, seen)]
        return {e: (seen[e], snapshot(action)) for (e, *_), action in pairs}

    def _store(self, active: Sequence[Any], stop: tuple[int, Any], outs: Any, before: Any) -> int:
        """Check and store a step that is not ordinary. Returns the index in `active` of the next one."""
        i, result = stop
        e, env_rank, _, step_into = active[i]
        if outs is not None and step_into is not None:
            result = with_observation(outs[e], result, env_rank)
        observation, reward, terminated, truncated, info = checked_step(result, env_rank)
        if outs is None or step_into is None:
            if self.written_row < 0 or terminated or truncated:
                observation = self._keep(e, observation)
            else:
                self._note(e, observation)
        if reward.__class__ is not float:
            reward = snapshot(reward)
        if self.keep_info is not None:
            self.infos[e] = self.keep_info(info)
        if info and self.on_info is not None:
            self.on_info(e, info)
        if before is not None and self.on_step is not None:
            seen, action = before[e]
            self.on_step(e, seen, action, reward, terminated, truncated, info)
        if terminated or truncated:
            self._ends.append((e, observation, reward, terminated, truncated))
        if self.written_row < 0:
            self.observations[e] = observation
        self.rewards[e] = reward
        return i + 1

    def _keep(self, e: int, observation: Any) -> Any:
        """A copy of an observation. If it is written at once, it is the last one of an episode, and is written too."""
        t = self.written_row
        if t >= 0 and not put_cell(self.into, t, e, observation):
            self.write_final(self.into, t, e, observation)
        return snapshot(observation)

    def _cut(self, active: Sequence[Any], error: Exception) -> int:
        """The step of the environment that the word ENV_RANK names has raised `error`: its game has failed. Returns the
        index in `active` of the next one."""
        i = next(i for i, entry in enumerate(active) if entry[1] == self._words[ENV_RANK])
        e, phase = active[i][0], self._words[PHASE]
        self._renew(e, error, is_cut=True)
        self._ends.append((e, _CUT, 0.0, False, False))
        self._note(e, self.zero)
        self.rewards[e], self.infos[e], self._words[PHASE] = 0.0, self.no_info, phase
        return i + 1

    def _take_ends(self) -> Events:
        policy_events, events, ends, self._ends = self._policy_events, self._events, self._ends, []
        events.over = policy_events.ended = [ends[0][0]] if len(ends) == 1 else [end[0] for end in ends]
        policy_events.ends = ends
        if self.renewals is not None:
            events.cut = policy_events.cut = [end[0] for end in ends if end[1] is _CUT]
            if policy_events.cut:
                policy_events.ends = [end for end in ends if end[1] is not _CUT]
                policy_events.ended = [end[0] for end in policy_events.ends]
        return events
