"""One worker's batched environment, which steps all its columns in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.tree import map_tree, snapshot, tree_leaves
from penstock.columns.interface import BatchedEnds, Columns, Events, PolicyColumns, PolicyEvents, Start, StepHook
from penstock.envs.checks import NO_CHECKS, Checks, check_row, require_info, reset_with, step_values
from penstock.envs.direct_steps import step_into_of, with_observation
from penstock.envs.examples import example_of
from penstock.envs.infos import InfoWriter, element, info_of
from penstock.envs.rows import ColumnError, arrays_like, as_dtype, write_row
from penstock.errors import ConfigError, SpaceError, brief
from penstock.workers.control import Phase, Progress

_log = logging.getLogger("penstock")


def _small(seeds: Sequence[int | None]) -> Any:
    """An int64 array of values below 2^31: engines in C often keep a seed in 32 bits with a sign."""
    return np.array(seeds, np.int64) % 2**31


SeedForm = Callable[[Sequence[int | None]], Any]
#: How `reset` may take one seed per column. The list is Gymnasium's form, and the only one that an `AsyncVectorEnv`
#: survives: it ends at a refusal.
_PER_COLUMN: tuple[SeedForm, ...] = (list, _small, lambda seeds: _small(seeds).tolist())
_NOBODY: Sequence[Sequence[int]] = ((),)
#: How it may take one number for all columns.
_FOR_ALL: tuple[SeedForm, ...] = (lambda seeds: int(_small(seeds)[0]),)
REFUSALS = (TypeError, ValueError, OverflowError, AssertionError, gym.error.Error)


class BatchedColumns(PolicyColumns, Columns):
    """One batched environment, with its current observations and the rewards of its last step.

    `reset` gets one seed per column: a list, or what the environment accepts in its place, an int64 array or a list of
    values below 2^31. An environment that accepts only one number gets the first seed. An idle column is stepped with
    the others, and its results are ignored. The mode of autoreset shows only here.
    """

    can_step_one = False

    def __init__(
        self, env: VectorEnv[Any, Any, Any], env_ranks: Sequence[int], progress: Progress, checks: Checks = NO_CHECKS
    ) -> None:
        self.env_ranks, self.progress = env_ranks, progress
        self.checks = checks
        self.policies = (self,)
        self._use(0, env)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        mode = _mode_of(env)
        self._resets_at_once, self._resets_late = mode is AutoresetMode.SAME_STEP, mode is AutoresetMode.NEXT_STEP
        self._resets_itself = mode is not AutoresetMode.DISABLED
        self._over: Sequence[int] = ()  # whose episode has just ended, if the environment resets itself
        self._as_taken: SeedForm | None = None  # one of _PER_COLUMN or _FOR_ALL, when it is known
        # Final observations are written into this row `[1, B, ...]`, which checks and casts them.
        row = map_leaves(
            lambda leaf: np.empty((1, len(env_ranks), *leaf.shape), leaf.dtype), example_of(self.observation_space)
        )
        self._final, self._final_arrays = row, arrays_like(self.observation_space, row)
        self.observations: Any = None  #: as the environment batches them
        self.rewards: Any = np.zeros(len(env_ranks))
        self._flags_shape = (len(env_ranks),)
        self.infos: Mapping[str, Any] = {}  #: as Gymnasium batches them, of the last step
        self.reset_infos: Mapping[str, Any] = {}  #: the same of the last reset
        self.waiting: list[int] = []
        self.idle: list[int] = []
        self._was_idle = self.idle  # in the last step
        self._resetting: list[int] = []  # the columns that the next step only resets (`AutoresetMode.NEXT_STEP`)
        self._policy_events = PolicyEvents()
        self._events = Events([], (self._policy_events,))

    def _use(self, e: int, env: Any) -> None:
        self.env, self.envs, self._step_into = env, [env], step_into_of(env, self.env_ranks[0])

    def columns_of(self, e: int) -> Sequence[Sequence[int]]:
        return ((e,),)

    # ---- resets ----------------------------------------------------------------------------

    def reset(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> Sequence[Sequence[int]]:
        """See `Columns`. An environment that resets itself resets single rows only where their episodes have ended, and
        without `starts`. Rows with the same options are reset by one call, others one by one."""
        if starts is None and envs is self._over:  # the usual case of an environment that resets itself
            self._over = ()
            return _NOBODY
        given = envs
        if starts is None:
            envs = _without(envs, self._over) if self._over else envs
            # {}, not None: where there is a mask, Gymnasium gives the environments a dict, so they always get one.
            calls: Any = [(envs, None if self._resets_itself else {}, [None] * len(envs))] if len(envs) else ()
        elif any(start.actions is not None for start in starts):
            raise ConfigError(f"{self.env} cannot repeat an episode of one row: use single environments")
        elif starts and starts[0].state is not None:
            self.observations, self.waiting, resetting = self._saved(0, starts[0])
            self._note_resetting(resetting)
            return (envs,)
        else:
            calls = _calls(envs, starts)
        for rows, options, seeds in calls:
            if self._resets_itself and len(rows) < len(self):
                raise ConfigError(
                    f"{self.env} resets its rows itself when their episodes end, so env_rank "
                    f"{brief([int(self.env_ranks[row]) for row in envs])} cannot begin an episode at another time, or "
                    "with a seed or options of its own: build the environment with autoreset_mode=AutoresetMode."
                    "DISABLED, reset all its rows with the same options, or use single environments"
                )
            self.reset_rows(rows, seeds, options)
        self._note_decided(given)
        return (envs,)

    def _note_decided(self, envs: Sequence[int]) -> None:
        """The loop has said what follows the episodes of `envs`: nobody waits there any more."""
        if self._over:
            self._over = _without(self._over, envs)
        if self.waiting:
            self.waiting = _without(self.waiting, envs)
            self._note_resetting(self._resetting)

    def reset_rows(self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> None:
        """Reset these rows, ascending, with one call. If they are not all rows, the option `reset_mask` says which; an
        environment that resets itself need not know it."""
        words = self.progress.words
        phase, began = words[Progress.PHASE], self.progress.enter(Phase.RESETTING)
        self.progress.at_env(self.env_ranks[rows[0]])
        reset = partial(self._reset, rows, seeds, options)
        if all(seed is None for seed in seeds):
            result = reset(None)
        elif self._as_taken is None:
            form, result = self._first_reset(reset)
            # A list of small values says nothing about large ones.
            is_sure = form is not list or any((seed or 0) >= 2**31 for seed in seeds)
            self._as_taken = form if is_sure else None
        else:
            result = reset(self._as_taken)
        infos: Mapping[str, Any]
        self.observations, infos = result
        self.reset_infos = infos
        if infos and self.on_info is not None:
            self.on_info(rows[0], infos)
        if self._resetting:
            self._note_resetting(_without(self._resetting, rows))
        self.progress.add_resetting_since(began)
        words[Progress.PHASE] = phase

    def _reset(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: Mapping[str, Any] | None, form: SeedForm | None
    ) -> Any:
        """Reset these rows, with their seeds in this form. None: without seeds."""
        given: list[Any] = [None if form is None else form(seeds)]
        if len(rows) < len(self):
            mask = np.zeros(len(self), np.bool_)
            mask[list(rows)] = True
            options = {**(options or {}), "reset_mask": mask}
            if form in _PER_COLUMN:
                # Some environments, such as ALE's, take seeds only for the rows that they reset. Others take them for
                # all rows, as a list with None, or as an array, which has no None.
                every: list[int | None] = [None if form is list else 0] * len(self)
                for row, seed in zip(rows, seeds, strict=True):
                    every[row] = seed
                given.insert(form is not list, form(every))
        refusals = []
        for seed in given:
            try:  # the dict is a copy: SyncVectorEnv takes the mask out
                result = reset_with(self.env, seed, None if options is None else {**options})
                break
            except REFUSALS as error:
                refusals.append(error)
        else:
            raise refusals[0]
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpaceError(f"reset of {self.env} must return a tuple (observation, infos), got {brief(result)}")
        require_info(result[1], self.env_ranks[0], "reset")
        return result

    def _first_reset(self, reset: Callable[[SeedForm], Any]) -> tuple[SeedForm, Any]:
        """Reset the environment. Returns in which form it takes seeds, and the result.

        It does not take lists if it raises for the list, works with another form, and raises for the list again. Any
        other exception is raised.
        """
        try:
            return list, reset(list)
        except REFUSALS as error:
            refusal = error
        as_taken = self._other_form(reset)
        if as_taken is None:
            raise refusal from None
        try:
            reset(list)
        except type(refusal):
            if as_taken in _FOR_ALL:
                _log.warning(
                    "the batched environment %s does not take a list of seeds (%s: %s), nor an array. It gets the "
                    "first seed of its columns, so its data depend on the number of workers",
                    self.env,
                    type(refusal).__name__,
                    refusal,
                )
            return as_taken, reset(as_taken)
        raise refusal

    def _other_form(self, reset: Callable[[SeedForm], Any]) -> SeedForm | None:
        for form in (*_PER_COLUMN[1:], *_FOR_ALL):
            try:
                reset(form)
            except Exception:
                continue
            return form
        return None

    def save(self, e: int) -> Any:
        return snapshot(self.observations), self.waiting, self._resetting

    def park(self, envs: Sequence[int]) -> None:
        self._note_decided(envs)
        self.waiting = sorted({*self.waiting, *envs})
        self._note_resetting(_without(self._resetting, envs))
        self._reset_idle(envs)

    def _reset_idle(self, columns: Sequence[int]) -> None:
        """These columns are idle, but stepped with the others, so they must not stay at an episode's end."""
        if columns and not self._resets_itself:
            self.reset_rows(columns, [None] * len(columns), {})

    def _note_resetting(self, columns: list[int]) -> None:
        self._resetting, self.idle = columns, sorted({*self.waiting, *columns})

    # ---- steps -----------------------------------------------------------------------------

    def step(self, actions: Sequence[Any], row: int | None = None, which: int | None = None) -> Events | None:
        """See `Columns`: all rows are stepped with one call.

        Raises `SpaceError` for an environment that ended without a final observation, or with one that does not fit.
        """
        joined, self._was_idle = self._resetting, self.idle  # NEXT_STEP: this step only resets them
        self._over = ()
        ends = self._step_rows(actions[0], None if row is None or self.into is None else (self.into, row))
        if ends is None and not joined:
            return None
        policy_events = self._policy_events
        policy_events.ends, policy_events.joined = ends, joined
        if ends is None:
            self._events.over = policy_events.ended = []
            return self._events
        self._events.over, policy_events.ended = ends.columns.tolist(), ends.columns
        if self._resets_itself:
            self._over = self._events.over
        if self._resets_at_once:
            policy_events.joined = self._events.over
        return self._events

    def _step_rows(self, action_row: ArrayTree, into: tuple[Any, int] | None) -> BatchedEnds | None:
        self.progress.at_env(self.env_ranks[0])
        on_step = self.on_step
        is_plain = action_row.__class__ is np.ndarray  # the usual case
        actions = action_row.copy() if is_plain else snapshot(arrays_like(self.action_space, action_row))
        # Copies, because the environment may reuse its observations and actions.
        before = (snapshot(self.observations), snapshot(actions)) if on_step is not None else None
        terminated, truncated = self._advance(actions, into)
        done, ended_idle = np.logical_or(terminated, truncated), []
        if self.idle:  # their results are ignored
            ended_idle = [b for b in self.idle if done[b]]
            self.rewards = np.array(self.rewards)  # a copy, since the array is the environment's
            self.rewards[self.idle], done[self.idle] = 0, False
        if on_step is not None and before is not None:
            self._call_on_step(on_step, *before, terminated, truncated)
        columns = done.nonzero()[0]
        ends = self._ends(columns, done, terminated, truncated) if len(columns) else None
        if ended_idle:
            self._reset_idle(ended_idle)
        if self._resets_late and (ends is not None or self._resetting):
            self._note_resetting([] if ends is None else ends.columns.tolist())
        return ends

    def _advance(self, actions: Any, into: tuple[Any, int] | None = None) -> tuple[Any, Any]:
        """Step the environment. Returns `terminated` and `truncated`; `observations`, `rewards` and `infos` have the
        rest."""
        if into is None or self._step_into is None:
            result = step_values(self.env.step(actions), self.env_ranks[0])
        else:
            arrays, t = into
            out = map_tree(lambda array: array[t], arrays)
            result = with_observation(out, self._step_into(out, actions), self.env_ranks[0])
        self.observations, self.rewards, terminated, truncated, self.infos = result
        if self.infos.__class__ is not dict:
            require_info(self.infos, self.env_ranks[0])
        if self.on_info is not None and self.infos:
            self.on_info(0, self.infos)
        shape = self._flags_shape
        if not (_are_flags(terminated, shape) and _are_flags(truncated, shape)):
            self._require_flags(terminated, "terminated")
            self._require_flags(truncated, "truncated")
        return terminated, truncated

    def _require_flags(self, flags: Any, name: str) -> None:
        if np.shape(flags) != self._flags_shape or np.asarray(flags).dtype.kind not in "biu":
            ranks = f"env_rank {self.env_ranks[0]} to {self.env_ranks[-1]}"
            raise SpaceError(
                f"{name} of the batched environment ({ranks}) must be bools {self._flags_shape}, got {brief(flags)}"
            )

    def _call_on_step(
        self,
        on_step: StepHook,
        before: object,
        actions: object,
        terminated: npt.NDArray[Any],
        truncated: npt.NDArray[Any],
    ) -> None:
        env_actions = list(iterate(self.env.action_space, actions))
        rewards = self.rewards
        for b, observation in enumerate(iterate(self.env.observation_space, before)):
            if b not in self.idle:
                info = info_of(self.infos, b)
                on_step(b, observation, env_actions[b], rewards[b], bool(terminated[b]), bool(truncated[b]), info)

    def _ends(
        self,
        columns: npt.NDArray[np.intp],
        done: npt.NDArray[Any],
        terminated: npt.NDArray[Any],
        truncated: npt.NDArray[Any],
    ) -> BatchedEnds:
        ends = BatchedEnds()
        ends.done, ends.terminated, ends.truncated, ends.columns = done, terminated, truncated, columns
        ends.final = self.infos.get("final_obs") if self._resets_at_once else self.observations
        ends.reward, ends.observation = np.asarray(self.rewards)[columns], self._final_rows(columns, ends.final)
        return ends

    def _final_rows(self, columns: npt.NDArray[Any], final: Any) -> Any:
        """The final observations of `columns`, checked, as they are recorded `[k, ...]`."""
        name = "the final observation"
        if not self.checks and _is_row_of(self._final_arrays, final):
            return final[columns]
        if not self.checks and _is_batch(final):
            self._write_batch(self._final_arrays, 0, final, name)
            return self._final[0][columns]
        observations = [element(final, b) for b in columns.tolist()]
        for b, observation in zip(columns.tolist(), observations, strict=True):
            if observation is None:
                raise SpaceError(
                    f"the batched environment gave no final_obs for env_rank {self.env_ranks[b]}, whose episode ended"
                )
        arrays = map_tree(lambda array: array[:, : len(columns)], self._final_arrays)
        try:
            write_row(arrays, 0, observations, name)
            check_row(self.checks, self.observation_space, arrays, 0, observations, name)
        except ColumnError as error:
            raise self.with_env_rank(int(columns[error.column]), error) from None
        return self._final[0][: len(columns)]

    # ---- recording -------------------------------------------------------------------------

    def end_batch(self) -> None:
        self.observations = snapshot(self.observations)

    def write_row(self, arrays: object, t: int) -> None:
        self._write_batch(arrays, t, self.observations, "observation")
        if self.checks:
            observations = list(iterate(self.env.observation_space, self.observations))
            try:
                check_row(self.checks, self.observation_space, arrays, t, observations)
            except ColumnError as error:
                raise self.with_env_rank(error.column, error) from None

    def _write_batch(self, arrays: Any, t: int, batch: Any, name: str) -> None:
        """Write `batch`, an array `[B, ...]` for each of `arrays`, into row t. Raises `SpaceError` unless it fits."""
        if _is_row_of(arrays, batch):
            arrays[t] = batch
            return
        leaves = dict(tree_leaves(batch, name))
        for leaf_name, array in tree_leaves(arrays, name):
            given, row = np.asarray(leaves.get(leaf_name)), array[t]
            fitting = as_dtype(given, row.dtype) if given.shape == row.shape else None
            if fitting is None:
                raise SpaceError(
                    f"{leaf_name} of the batched environment (env_rank {self.env_ranks[0]} to {self.env_ranks[-1]}) "
                    f"must have shape {row.shape} and dtype {row.dtype}, got {given.shape} {given.dtype}"
                )
            row[...] = fitting

    def write_rewards(self, row: npt.NDArray[Any]) -> None:
        if np.shape(self.rewards) != row.shape:
            raise SpaceError(
                f"the batched environment's rewards must have shape {row.shape}, got {np.shape(self.rewards)}"
            )
        row[...] = self.rewards
        if self.checks.check_finite and not np.isfinite(row).all():
            column = int(np.isfinite(row).argmin())
            raise self.not_finite(column, float(row[column]))

    def write_infos(self, writer: InfoWriter, t: int) -> None:
        writer.write_batched(t, self.infos, self._was_idle)

    def blank_idle(self, row: Any) -> None:
        if row is not None:
            row[self.idle] = 0


def _without(some: Sequence[int], others: Sequence[int]) -> list[int]:
    """`some` without `others`, ascending."""
    return sorted(set(some).difference(others))


def _calls(envs: Sequence[int], starts: Sequence[Start]) -> list[tuple[Sequence[int], Any, Sequence[int | None]]]:
    """The calls of `reset`: the rows, options and seeds of each. One call has one dict of options."""
    try:
        is_one = all(start.options is starts[0].options or start.options == starts[0].options for start in starts)
    except Exception:  # the user's objects may raise anything: arrays have no single truth
        is_one = False
    if is_one and envs:
        return [(envs, starts[0].options, [start.seed for start in starts])]
    return [((e,), start.options, (start.seed,)) for e, start in zip(envs, starts, strict=True)]


def _mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise ConfigError(
            f"{env} does not say when it resets an environment whose episode has ended: set metadata['autoreset_mode'] "
            "in its class, to a gymnasium.vector.AutoresetMode"
        )
    return AutoresetMode(mode)


def _are_flags(flags: Any, shape: tuple[int]) -> bool:
    """Whether these are exactly bools `[B]`, the usual case."""
    return flags.__class__ is np.ndarray and flags.shape == shape and flags.dtype == np.bool_


def _is_row_of(arrays: Any, batch: Any) -> bool:
    """Whether both are single arrays, and `batch` is exactly as a row of `arrays` is. This is the usual case."""
    is_array = batch.__class__ is np.ndarray and arrays.__class__ is np.ndarray
    return is_array and batch.dtype == arrays.dtype and batch.shape == arrays.shape[1:]


def _is_batch(final: object) -> bool:
    """Whether `final` is arrays over all columns. Gymnasium's own environments give one object per column."""
    return all(isinstance(leaf, np.ndarray) and leaf.dtype != object for _, leaf in tree_leaves(final))
