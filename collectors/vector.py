"""VectorEnvCollector: a worker that holds one batched environment, which steps all its columns in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from penstock.buffers.named import NamedArrays, as_named, map_leaves
from penstock.collectors.checks import Checks, checked_writer
from penstock.collectors.columns import EpisodeEndHook
from penstock.collectors.reset import ResetCollector
from penstock.collectors.tracking import StepHook, kept
from penstock.envs.checks import require_info, step_values
from penstock.envs.examples import example_of
from penstock.envs.infos import element, info_of
from penstock.envs.rows import ColumnError
from penstock.errors import ConfigError, SpaceError
from penstock.workers.progress import Phase, Progress

__all__ = ["VectorColumns", "VectorEnvCollector"]

_NO_OPTIONS = Checks()


class VectorEnvCollector(ResetCollector):
    """A `ResetCollector` on batched environments: `env_fn(num_envs=n)` returns a `gymnasium.vector.VectorEnv`.

    It must reset an environment in the step that ends its episode (`AutoresetMode.SAME_STEP`) or leave
    that to the caller (`AutoresetMode.DISABLED`). In the default mode, NEXT_STEP, a step after each
    episode would be none, with an action that is ignored; `penstock.envs.SameStep` helps.

    Rows are recorded whole. Python looks at single columns only for a stateful agent or a `TrajInfo` of
    the user's own.
    """

    batched = True
    envs: VectorColumns  # type: ignore[assignment]

    def step_envs(self, t: int) -> None:
        self.progress.begin_stepping(t)
        envs, on_step = self.envs, self.tracker.on_step
        ends = envs.step_rows(self.prev_action, on_step)
        self.record_env_info(t)
        if ends is not None:
            self._record_ends(t, ends)
            envs.reset_columns(ends.columns)
        self.write_step(t)
        if ends is not None:
            self.prev_reward[ends.columns] = 0
            self.prev_action[ends.columns] = 0

    def _record_ends(self, t: int, ends: Ends) -> None:
        """`record_episode_end`, and the agent's part of `reset_column`, for all columns that have ended."""
        samples, columns = self.samples, ends.columns
        samples.terminated[t], samples.truncated[t], samples.done[t] = ends.terminated, ends.truncated, ends.done
        self.finals.record_rows(t, columns, ends.observation, ends.reward, ends.only_truncated)
        if self.tracker.on_step is not None:
            for column, observation in zip(columns.tolist(), ends.each(), strict=True):
                self.tracker.on_episode_end(t, column, observation)
        if self._agent_has_state:
            for column in columns.tolist():
                self.agent.reset_one(column)

    def record_env_info(self, t: int) -> None:
        if self._info_writer is not None:
            self._info_writer.write_batched(self.samples.env_info[t], self.envs.infos, self.envs.env_ranks)


@dataclass(frozen=True)
class Ends:
    """The episodes that ended in one step."""

    done: npt.NDArray[np.bool_]  #: `[B]`
    terminated: npt.NDArray[np.bool_]  #: `[B]`
    truncated: npt.NDArray[np.bool_]  #: `[B]`
    columns: npt.NDArray[np.intp]  #: `[k]`, ascending
    reward: npt.NDArray[Any]  #: `[k]`, of the last step
    observation: Any  #: `[k, ...]`, the final observations, as they are recorded
    final: Any  #: the same as the environment gave them

    @property
    def only_truncated(self) -> npt.NDArray[np.bool_]:
        """`[k]`: which of them have a value to be bootstrapped from."""
        only: npt.NDArray[np.bool_] = ~self.terminated[self.columns]
        return only

    def each(self) -> list[Any]:
        """The final observations one by one, in the environment's own structure."""
        return [element(self.final, b) for b in self.columns.tolist()]


class VectorColumns:
    """One batched environment in the place of `EnvColumns`: the same calls, a row at a time.

    Seeds are given as a list, one per column; to an environment that takes a single one, the first of
    them. A parked column is stepped with the others, and what it does is ignored.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], env_ranks: range, progress: Progress, checks: Checks = _NO_OPTIONS
    ) -> None:
        self.env, self.env_ranks, self.checks, self._progress = env, env_ranks, checks, progress
        self.envs = [env]
        self._resets_itself = _mode_of(env) is AutoresetMode.SAME_STEP
        self._space: gym.Space[Any] = env.single_observation_space
        self._writer = checked_writer(self._space, checks)
        self._final_writer = checked_writer(self._space, checks, "the final observation")
        self._example = example_of(self._space)
        # Shape and dtype of batches that need no closer look: those of a single array, unless checks are on.
        is_array = isinstance(self._example, np.ndarray) and checks == _NO_OPTIONS
        self._plain = ((len(env_ranks), *self._example.shape), self._example.dtype) if is_array else None
        self._batch: Any = None  # current observations, as the environment batches them
        self._rewards: Any = np.zeros(len(env_ranks))
        #: The infos of the last step, as Gymnasium batches them.
        self.infos: Mapping[str, Any] = {}
        #: Columns whose environments nobody looks at.
        self.parked: list[int] = []

    def __len__(self) -> int:
        return len(self.env_ranks)

    @property
    def observations(self) -> Sequence[Any]:
        """The current observations, one per column."""
        return list(iterate(self.env.observation_space, self._batch))

    def enter(self, phase: Phase, column: int) -> int:
        """Note in the progress row what is about to be done; returns the time."""
        self._progress.at_env(self.env_ranks[column])
        return self._progress.enter(phase)

    # ---- resets ----------------------------------------------------------------------------

    def reset_all(self, seeds: Sequence[int | None]) -> None:
        """Reset every environment."""
        began = self.enter(Phase.RESETTING, 0)
        try:
            result = self.env.reset(seed=list(seeds))  # type: ignore[arg-type]
        except (TypeError, ValueError, gym.error.Error):
            result = self.env.reset(seed=seeds[0])
        self._batch = result[0]
        self._progress.add_resetting_since(began)

    def reset_one(self, column: int, seed: int | None = None) -> Any:
        """The first observation of column's next episode."""
        self.reset_columns([column], seed)
        return None  # it is part of the batch already

    def reset_columns(self, columns: Any, seed: int | None = None) -> None:
        """Begin the next episodes of `columns` with one call, unless the environment has done it."""
        if self._resets_itself:
            return
        began = self.enter(Phase.RESETTING, columns[0])
        mask = np.zeros(len(self), np.bool_)
        mask[columns] = True
        self._batch, _ = self.env.reset(seed=seed, options={"reset_mask": mask})
        self._progress.add_resetting_since(began)

    def park(self, column: int) -> None:
        """Ignore column from now on. Its environment goes on, so it must not stay at an episode's end."""
        self.parked = [*self.parked, column]
        self.reset_one(column)

    def unpark_all(self) -> None:
        """Look at every column again."""
        self.parked = []

    # ---- steps -----------------------------------------------------------------------------

    def step(self, action_row: Any, on_episode_end: EpisodeEndHook, on_step: StepHook | None = None) -> None:
        """Step all environments with one call, and hear of every end."""
        ends = self.step_rows(action_row, on_step)
        if ends is None:
            return
        flags = zip(ends.columns.tolist(), ends.each(), ends.reward.tolist(), strict=True)
        for b, observation, reward in flags:
            on_episode_end(b, observation, reward, bool(ends.terminated[b]), bool(ends.truncated[b]))
        self._progress.words[Progress.PHASE] = Progress.IS_STEPPING

    def step_rows(self, action_row: Any, on_step: StepHook | None = None) -> Ends | None:
        """Step all environments with one call; returns what ended, or None. The caller then calls `reset_columns`.

        Raises `SpaceError` naming an environment that ended without a final observation, or with one
        that does not fit.
        """
        self._progress.at_env(self.env_ranks[0])
        actions = _batched_actions(self.env.single_action_space, action_row)
        # The environment may write into both.
        told = (kept(self._batch), kept(actions)) if on_step is not None else None
        result = step_values(self.env.step(actions), self.env_ranks[0])
        self._batch, self._rewards, terminated, truncated, self.infos = result
        if self.infos.__class__ is not dict:
            require_info(self.infos, self.env_ranks[0])
        if self.parked:
            self._rewards[self.parked] = 0
        if on_step is not None and told is not None:
            self._tell(on_step, *told, terminated, truncated)
        done = np.logical_or(terminated, truncated)
        if self.parked:
            over = [b for b in self.parked if done[b]]
            done[self.parked] = False
        ends = self._ends(done, terminated, truncated) if done.any() else None
        if self.parked and over:
            self.reset_columns(over)
        return ends

    def _tell(self, on_step: StepHook, before: Any, actions: Any, terminated: Any, truncated: Any) -> None:
        each_action = list(iterate(self.env.action_space, actions))
        rewards = self._rewards
        for b, observation in enumerate(iterate(self.env.observation_space, before)):
            if b not in self.parked:
                info = info_of(self.infos, b)
                on_step(b, observation, each_action[b], rewards[b], bool(terminated[b]), bool(truncated[b]), info)

    def _ends(self, done: Any, terminated: Any, truncated: Any) -> Ends:
        columns = np.flatnonzero(done)
        final = self.infos.get("final_obs") if self._resets_itself else self._batch
        rows = self._final_rows(columns, final)
        return Ends(done, terminated, truncated, columns, np.asarray(self._rewards)[columns], rows, final)

    def _final_rows(self, columns: Any, final: Any) -> Any:
        """The rows `columns` of `final`, checked, as they are to be recorded."""
        if self._is_plain(final):
            return final[columns]
        rows = map_leaves(lambda leaf: np.empty((len(columns), *leaf.shape), leaf.dtype), self._example)
        if self.checks == _NO_OPTIONS and _is_batch(final):
            given = _taken(final, columns)
            _check_leaves(rows, as_named(given), self.env_ranks, "the final observation")
            rows[...] = as_named(given)
            return rows
        each = [element(final, b) for b in columns.tolist()]
        for b, observation in zip(columns.tolist(), each, strict=True):
            if observation is None:
                raise SpaceError(
                    f"the batched environment gave no final_obs for env_rank {self.env_ranks[b]}, which ended"
                )
        try:
            self._final_writer.write(self._final_writer.prepare(rows), each)
        except ColumnError as error:
            raise self._blaming(int(columns[error.column]), error) from None
        return rows

    # ---- recording -------------------------------------------------------------------------

    def check_final(self, column: int, observation: Any) -> None:
        """It has been checked by `step`."""

    def prepare_row(self, row: Any) -> Any:
        """Nothing is to be worked out."""
        return row

    def write_prepared(self, prepared: Any) -> None:
        """Write the current observations into `prepared`, a row `[B, ...]`."""
        if self._is_plain(self._batch):
            prepared[...] = self._batch
            return
        batch = as_named(self._batch)
        _check_leaves(prepared, batch, self.env_ranks)
        prepared[...] = batch
        if self.checks != _NO_OPTIONS:
            try:
                self._writer.write(self._writer.prepare(prepared), self.observations)
            except ColumnError as error:
                raise self._blaming(error.column, error) from None

    write_observations = write_prepared

    def _is_plain(self, batch: Any) -> bool:
        """Whether `batch` is one array, as it should be, so that there is nothing more to look at."""
        return type(batch) is np.ndarray and (batch.shape, batch.dtype) == self._plain

    def write_rewards(self, row: Any) -> None:
        """Write the rewards of the last step into their row `[B]`."""
        if np.shape(self._rewards) != row.shape:
            raise SpaceError(
                f"the batched environment's rewards must have shape {row.shape}, got {np.shape(self._rewards)}"
            )
        row[...] = self._rewards
        if self.checks.check_finite and not np.isfinite(row).all():
            column = int(np.isfinite(row).argmin())
            raise SpaceError(f"the reward of env_rank {self.env_ranks[column]} must be finite, got {row[column]}")

    def write_final(self, row: Any, column: int, observation: Any) -> None:
        """Write the last observation of column's episode into `row` `[1, ...]`."""
        self._final_writer.write(self._final_writer.prepare(row), [observation])

    def _blaming(self, column: int, error: ColumnError) -> SpaceError:
        self._progress.at_env(self.env_ranks[column])
        return error.naming(self.env_ranks[column])


def _mode_of(env: Any) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    if mode is AutoresetMode.NEXT_STEP:
        raise ConfigError(
            f"{env} resets an environment in the step after its episode's end (AutoresetMode.NEXT_STEP): build it with "
            "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP (make_vec: in vector_kwargs). For one that has no "
            "such mode, penstock.envs has SameStep to subclass, BatchedCartPole and BatchedEnvPool"
        )
    return AutoresetMode(mode)


def _batched_actions(space: gym.Space[Any], row: Any) -> Any:
    """A recorded row in the form in which Gymnasium batches actions; a copy, to be kept or changed."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _batched_actions(sub, row[str(key)]) for key, sub in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_batched_actions(sub, row[f"_{i}"]) for i, sub in enumerate(space))
    return row.copy()


def _is_batch(final: Any) -> bool:
    """Whether `final` is arrays over all columns, and not one object for each, as Gymnasium's own environments give."""
    if isinstance(final, Mapping):
        return all(_is_batch(part) for part in final.values())
    if isinstance(final, tuple):
        return all(_is_batch(part) for part in final)
    return isinstance(final, np.ndarray) and final.dtype != object


def _taken(batch: Any, columns: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _taken(part, columns) for key, part in batch.items()}
    return tuple(_taken(part, columns) for part in batch) if isinstance(batch, tuple) else batch[columns]


def _check_leaves(row: Any, batch: Any, env_ranks: range, name: str = "observation") -> None:
    rows = row.leaves(f"{name}.") if isinstance(row, NamedArrays) else [(name, row)]
    given = dict(batch.leaves(f"{name}.") if isinstance(batch, NamedArrays) else [(name, batch)])
    for path, leaf in rows:
        array = np.asarray(given.get(path))
        if array.shape != leaf.shape or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise SpaceError(
                f"{path} of the batched environment (env_rank {env_ranks[0]} to {env_ranks[-1]}) must have shape "
                f"{leaf.shape} and dtype {leaf.dtype}, got {array.shape} {array.dtype}"
            )
