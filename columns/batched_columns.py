"""One worker's batched environment, which steps all its columns in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from penstock.buffers.named import ArrayTree, map_leaves
from penstock.buffers.tree import map_tree, snapshot, tree_leaves
from penstock.columns.interface import (
    Columns,
    EpisodeEnds,
    Events,
    PolicyColumns,
    PolicyEvents,
    Start,
    StepHook,
)
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
_NOBODY: Any = ((),)
#: How it may take one number for all columns.
_FOR_ALL: tuple[SeedForm, ...] = (lambda seeds: int(_small(seeds)[0]),)
REFUSALS = (TypeError, ValueError, OverflowError, AssertionError, gym.error.Error)


class BatchedColumns(PolicyColumns, Columns):
    """One batched environment, with its current observations and the rewards of its last step.

    `reset` gets one seed per column: a list, or what the environment accepts in its place, an int64 array or a list of
    values below 2^31. An environment that accepts only one number gets the first seed. Its options are those of the
    first `Start`. An idle column is stepped with
    the others, and its results are ignored. The mode of autoreset shows only here.
    """

    can_step_one = False

    def __init__(
        self, env: VectorEnv[Any, Any, Any], env_ranks: Sequence[int], progress: Progress, checks: Checks = NO_CHECKS
    ) -> None:
        self.env_ranks, self.progress = env_ranks, progress
        self.checks = checks
        self.policies = (self,)
        self._use(env)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        mode = _mode_of(env)
        self._resets_at_once, self._resets_late = mode is AutoresetMode.SAME_STEP, mode is AutoresetMode.NEXT_STEP
        self._options: dict[str, Any] | None = None  # of the reset that runs
        self._as_taken: SeedForm | None = None  # one of _PER_COLUMN or _FOR_ALL, when it is known
        # Final observations are written into this row `[1, B, ...]`, which checks and casts them.
        row = map_leaves(
            lambda leaf: np.empty((1, len(env_ranks), *leaf.shape), leaf.dtype), example_of(self.observation_space)
        )
        self._final, self._final_arrays = row, arrays_like(self.observation_space, row)
        self.observations: Any = None  #: as the environment batches them
        self._out: Any = None  # where the environment has written the last row
        self.rewards: Any = np.zeros(len(env_ranks))
        self._flags_shape = (len(env_ranks),)
        self.infos: Mapping[str, Any] = {}  #: as Gymnasium batches them, of the last step, or of `reset` with `starts`
        self.waiting: list[int] = []
        self.idle: list[int] = []
        self._was_idle = self.idle  # in the last step
        self._resetting: list[int] = []  # the columns that the next step only resets (`AutoresetMode.NEXT_STEP`)
        self._own = PolicyEvents()
        self._events = Events([], (self._own,))

    def _use(self, env: Any) -> None:
        self.env, self.envs, self._step_into = env, [env], step_into_of(env, self.env_ranks[0])

    def columns_of(self, e: int) -> Sequence[Sequence[int]]:
        return ((e,),)

    # ---- resets ----------------------------------------------------------------------------

    def _reset_all(self, seeds: Sequence[int | None]) -> None:
        began = self.progress.enter(Phase.RESETTING)
        self.progress.at_env(self.env_ranks[0])
        if all(seed is None for seed in seeds):
            result = self._reset(None)
        elif self._as_taken is None:
            form, result = self._first_reset(seeds)
            # A list of small values says nothing about large ones.
            is_sure = form is not list or any((seed or 0) >= 2**31 for seed in seeds)
            self._as_taken = form if is_sure else None
        else:
            result = self._reset(self._as_taken(seeds))
        self.observations, self.infos = result
        self._note_resetting([])
        self.progress.add_resetting_since(began)

    def _reset(self, seed: Any) -> Any:
        try:
            result = self._reset_with(seed)
        except REFUSALS:
            mask = (self._options or {}).get("reset_mask")
            if mask is None or mask.all() or not hasattr(seed, "__len__"):
                raise
            # Some environments, such as ALE's, take seeds only for the rows that they reset.
            own = [each for each, is_reset in zip(seed, mask, strict=True) if is_reset]
            result = self._reset_with(type(seed)(own) if isinstance(seed, list) else np.array(own))
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpaceError(f"reset of {self.env} must return a tuple (observation, infos), got {brief(result)}")
        require_info(result[1], self.env_ranks[0], "reset")
        return result

    def _reset_with(self, seed: Any) -> Any:
        return reset_with(self.env, seed, self._options and {**self._options})

    def _first_reset(self, seeds: Sequence[int | None]) -> tuple[SeedForm, Any]:
        """Reset the environment. Returns in which form it takes seeds, and the result.

        It does not take lists if it raises for the list, works with another form, and raises for the list again. Any
        other exception is raised.
        """
        try:
            return list, self._reset(list(seeds))
        except REFUSALS as error:
            refusal = error
        as_taken = self._other_form(seeds)
        if as_taken is None:
            raise refusal from None
        try:
            self._reset(list(seeds))
        except type(refusal):
            if as_taken in _FOR_ALL:
                _log.warning(
                    "the batched environment %s does not take a list of seeds (%s: %s), nor an array. It gets the "
                    "first seed of its columns, so its data depend on the number of workers",
                    self.env,
                    type(refusal).__name__,
                    refusal,
                )
            return as_taken, self._reset(as_taken(seeds))
        raise refusal

    def _other_form(self, seeds: Sequence[int | None]) -> SeedForm | None:
        for form in (*_PER_COLUMN[1:], *_FOR_ALL):
            try:
                self._reset(form(seeds))
            except Exception:
                continue
            return form
        return None

    def reset(self, envs: Sequence[int], starts: Sequence[Start] | None = None) -> Sequence[Sequence[int]]:
        """See `Columns`. With `starts`, `envs` are all rows: the environment gets all seeds, or one state."""
        if starts is not None and starts[0].state is not None:
            self._continue(*starts[0].state)
            return (envs,)
        if starts is not None:
            self.waiting, self._options = [], starts[0].options
            self._reset_all([start.seed for start in starts])
            return (envs,)
        self._reset_columns(envs)
        return _NOBODY if self._resets_at_once or self._resets_late else (envs,)

    def save(self, e: int) -> Any:
        return snapshot(self.observations), self.waiting, self._resetting

    def _continue(self, kind: str, data: bytes, saved: Any) -> None:
        """Let the environment, and so all rows, continue a saved run."""
        self._use(self._load(self.env, kind, data))
        self.observations, self.waiting, resetting = saved
        self._note_resetting(resetting)

    def _reset_columns(self, columns: Sequence[int]) -> None:
        """Start the next episodes of `columns` with one call, unless the environment resets itself."""
        if self._resets_at_once or self._resets_late or not columns:
            return
        began = self.progress.enter(Phase.RESETTING)
        self.progress.at_env(self.env_ranks[columns[0]])
        mask = np.zeros(len(self), np.bool_)
        mask[columns] = True
        self.observations, _ = self.env.reset(options={"reset_mask": mask})
        self.progress.add_resetting_since(began)
        self.progress.words[Progress.PHASE] = Progress.IS_STEPPING

    def park(self, envs: Sequence[int]) -> None:
        self.waiting = sorted({*self.waiting, *envs})
        self._note_resetting(self._resetting)
        self._reset_columns(envs)  # they are stepped with the others, so they must not stay at an episode's end

    def _note_resetting(self, columns: list[int]) -> None:
        self._resetting, self.idle = columns, sorted({*self.waiting, *columns})

    # ---- steps -----------------------------------------------------------------------------

    def step(self, actions: Sequence[Any], row: int | None = None, which: int | None = None) -> Events | None:
        """See `Columns`: all rows are stepped with one call.

        Raises `SpaceError` for an environment that ended without a final observation, or with one that does not fit.
        """
        joined, self._was_idle = self._resetting, self.idle  # NEXT_STEP: this step only resets them
        ends = self._step_rows(actions[0], None if row is None or self.into is None else (self.into, row))
        if ends is None and not joined:
            return None
        own = self._own
        own.ends, own.joined = ends, joined
        if ends is None:
            self._events.over = own.ended = []
            return self._events
        self._events.over, own.ended = ends.columns.tolist(), ends.columns
        if self._resets_at_once:
            own.joined = self._events.over
        return self._events

    def _step_rows(self, action_row: ArrayTree, into: tuple[Any, int] | None) -> EpisodeEnds | None:
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
            self._reset_columns(ended_idle)
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
            self._out = out = map_tree(lambda array: array[t], arrays)
            result = with_observation(out, self._step_into(out, actions), self.env_ranks[0])
        self.observations, self.rewards, terminated, truncated, self.infos = result
        if self.infos.__class__ is not dict:
            require_info(self.infos, self.env_ranks[0])
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
        each_action = list(iterate(self.env.action_space, actions))
        rewards = self.rewards
        for b, observation in enumerate(iterate(self.env.observation_space, before)):
            if b not in self.idle:
                info = info_of(self.infos, b)
                on_step(b, observation, each_action[b], rewards[b], bool(terminated[b]), bool(truncated[b]), info)

    def _ends(
        self,
        columns: npt.NDArray[np.intp],
        done: npt.NDArray[Any],
        terminated: npt.NDArray[Any],
        truncated: npt.NDArray[Any],
    ) -> EpisodeEnds:
        ends = EpisodeEnds()
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
        each = [element(final, b) for b in columns.tolist()]
        for b, observation in zip(columns.tolist(), each, strict=True):
            if observation is None:
                raise SpaceError(
                    f"the batched environment gave no final_obs for env_rank {self.env_ranks[b]}, whose episode ended"
                )
        arrays = map_tree(lambda array: array[:, : len(columns)], self._final_arrays)
        try:
            write_row(arrays, 0, each, name)
            check_row(self.checks, self.observation_space, arrays, 0, each, name)
        except ColumnError as error:
            raise self.with_env_rank(int(columns[error.column]), error) from None
        return self._final[0][: len(columns)]

    # ---- recording -------------------------------------------------------------------------

    def end_batch(self) -> None:
        if self._out is not None and self.observations is self._out:
            self.observations = map_tree(lambda array: array[0], self.home)
        self._out = None

    def _write_row(self, arrays: object, t: int) -> None:
        self._write_batch(arrays, t, self.observations, "observation")
        if self.checks:
            each = list(iterate(self.env.observation_space, self.observations))
            try:
                check_row(self.checks, self.observation_space, arrays, t, each)
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
            raise SpaceError(
                f"the reward of env_rank {self.env_ranks[column]} must be finite (check_finite=True), got {row[column]}"
            )

    def write_infos(self, writer: InfoWriter, t: int) -> None:
        writer.write_batched(t, self.infos, self._was_idle)

    def blank_idle(self, row: Any) -> None:
        if row is not None:
            row[self.idle] = 0


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
