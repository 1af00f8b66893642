"""One worker's columns: what all of them record, and single environments, which are stepped row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from time import monotonic_ns
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.named import map_leaves
from penstock.columns.episodes import EpisodeRecorder
from penstock.columns.interface import EnvBatch, EpisodeEndHook, Returned, StepHook, snapshot
from penstock.columns.renewal import Renewals
from penstock.columns.stepping import step_ordinary
from penstock.envs.checks import NO_CHECKS, Checks, check_row, checked_reset, checked_step, require_number
from penstock.envs.direct_steps import cells_of, flat_step_of, step_into_of, with_observation
from penstock.envs.examples import example_of
from penstock.envs.rows import ColumnError, action_splitter, arrays_like, write_row
from penstock.envs.video import recorded
from penstock.errors import SpaceError, brief
from penstock.workers.control import ENV_RANK, HEARTBEAT, PHASE, RESETTING, Phase, Progress

_IS_RESETTING = Progress.IS_RESETTING  # a local name is read faster


class ListedColumns(EnvBatch):
    """Columns whose observations, rewards and infos are in lists, with one entry for each column.

    Raises `SpaceError`, with the field and the env_rank, for data that do not fit their space or have a wrong type.
    """

    def __init__(
        self, env_ranks: Sequence[int], observation_space: gym.Space[Any], progress: Progress, checks: Checks
    ) -> None:
        self.env_ranks, self.observation_space = env_ranks, observation_space
        self.progress, self.checks, n = progress, checks, len(env_ranks)
        example = map_leaves(lambda leaf: np.zeros((1, n, *leaf.shape), leaf.dtype), example_of(observation_space))
        self._scratch = arrays_like(observation_space, example)  # for observations that are only checked
        self.parked: list[int] = []
        self.observations: list[Any] = [None] * n
        self.rewards: list[Any] = [0.0] * n
        self.infos: list[Any] = [{}] * n  # one per column; {} for a parked one

    def _write_row(self, arrays: object, t: int, skip: Collection[int] = ()) -> None:
        """`skip`: see `check_row`."""
        try:
            write_row(arrays, t, self.observations)
            check_row(self.checks, self.observation_space, arrays, t, self.observations, skip=skip)
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
            self.progress.at_env(self.env_ranks[column])
            raise SpaceError(
                f"the reward of env_rank {self.env_ranks[column]} must be a number that {row.dtype} can hold, got "
                f"{brief(self.rewards[column])}"
            ) from None
        if self.checks.check_finite and not (finite := np.isfinite(row)).all():
            column = int(finite.argmin())
            raise self._not_finite(column, self.rewards[column])

    def _numbers(self) -> Any:
        """The rewards as floats. Raises `SpaceError` for the first that is not a number."""
        numbers = np.empty(len(self.rewards))
        for b, reward in enumerate(self.rewards):
            self.progress.at_env(self.env_ranks[b])
            numbers[b] = require_number(reward, self.env_ranks[b])
        return numbers

    def _not_finite(self, column: int, reward: object) -> SpaceError:
        env_rank = self.env_ranks[column]
        self.progress.at_env(env_rank)
        return SpaceError(f"the reward of env_rank {env_rank} must be finite (check_finite=True), got {brief(reward)}")

    def check_observation(self, column: int) -> None:
        """Raise `SpaceError` unless column's current observation fits its space."""
        self._write_one(self._scratch, 0, column, self.observations[column], "observation")

    def check_final(self, column: int, observation: Any) -> None:
        self.write_final(self._scratch, 0, column, observation)

    def keep_info(self, column: int) -> None:
        """Column's episode has ended: copy of its info what is written, since a reset may change it."""
        if self.info_writer is not None:
            self.infos[column] = self.info_writer.kept(self.infos[column])


class EnvColumns(ListedColumns):
    """The single environments of some columns, with their current observations and the rewards of their last step.

    `step` advances all of them by one time step, and calls an `EpisodeEndHook` where an episode ends.

    With `flatten_wrappers`, the wrappers that `gym.make` adds are stepped without their Python functions.
    `episodes`, if there is one, gives every reset its seed.
    """

    episodes: EpisodeRecorder | None = None
    renewals: Renewals | None = None
    keeps_seeds = False  #: whether a new environment gets the seed that its reset was given
    #: What an environment raises whose game has failed; () if a failure is a failure of the worker.
    renewable: tuple[type[Exception], ...] = ()
    #: Column's step has no result, since its game has failed: end its episode, call `renew`. Returns its next
    #: observation.
    on_cut: Callable[[int, Exception], Any]

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        env_ranks: Sequence[int],
        progress: Progress,
        checks: Checks = NO_CHECKS,
        flatten_wrappers: bool = True,
    ) -> None:
        super().__init__(env_ranks, envs[0].observation_space, progress, checks)
        self.envs = envs
        self._step_of = flat_step_of if flatten_wrappers else attrgetter("step")
        self._words = progress.words
        self._loop_words = progress.loop_words
        self._action_space = envs[0].action_space if checks.debug else None
        self.split_actions = action_splitter(envs[0].action_space)
        # One tuple for each environment with all that the loop needs.
        self._bound = self._active = [
            (b, env_rank, self._step_of(env), step_into_of(env, env_rank))
            for b, (env_rank, env) in enumerate(zip(env_ranks, envs, strict=True))
        ]
        n_stepped = sum(step_into is None for *_, step_into in self._bound)
        self._returned = Returned(n_stepped, always=checks.debug)
        self._first_seeds: dict[int, int] = {}  # of environments that were built again, and not reset yet
        self._writes_in_place = any(step_into is not None for *_, step_into in self._bound)

    # ---- resets ----------------------------------------------------------------------------

    def reset_one(self, column: int, seed: int | None = None) -> Any:
        words, (_, env_rank, _, _) = self._words, self._bound[column]
        words[PHASE], words[ENV_RANK] = _IS_RESETTING, env_rank
        words[HEARTBEAT] = began = monotonic_ns()
        if self._first_seeds:
            seed = self._begin_again(column, seed)
        if self.episodes is not None:
            seed = self.episodes.begin(column)
        while True:
            try:
                result: Any = self.envs[column].reset(seed=seed)
                break
            except self.renewable as error:
                self.renew(column, error, is_cut=False)
                new_seed = self._begin_again(column, seed)
                seed = new_seed if self.episodes is None else seed
        words[RESETTING] += monotonic_ns() - began
        if self.renewals is not None:
            self.renewals.note_reset(column)
        observation = self._returned.own(column, checked_reset(result, env_rank)[0], is_reset=True)
        self.observations[column] = observation
        return observation

    def reset_all(self, seeds: Sequence[int | None]) -> None:
        for column, seed in enumerate(seeds):
            self.reset_one(column, seed)
            self.check_observation(column)

    @contextmanager
    def recorded(self, column: int, folder: str, itr: int) -> Iterator[None]:
        """While the context lasts, the environment of `column` is stepped and reset through a wrapper that records its
        first episode as a video. See `penstock.envs.video`."""
        bound, envs = self._bound, self.envs
        _, env_rank, _, _ = bound[column]
        renewable, self.renewable = self.renewable, ()  # a new environment would have no wrapper
        with recorded(envs[column], folder, itr) as wrapper:
            self.envs = [*envs[:column], wrapper, *envs[column + 1 :]]
            self._bound = [*bound[:column], (column, env_rank, wrapper.step, None), *bound[column + 1 :]]
            self.unpark_all()
            try:
                yield
            finally:
                self._bound, self.envs, self.renewable = bound, envs, renewable
                self.unpark_all()

    def replace_env(self, column: int, env: gym.Env[Any, Any], observation: Any) -> None:
        """Use this environment from now on; `observation` is its last one. No column is parked."""
        self._use(column, env)
        self.observations[column] = observation
        self.check_observation(column)

    def _use(self, column: int, env: gym.Env[Any, Any]) -> None:
        (_, env_rank, _, _), envs = self._bound[column], list(self.envs)
        envs[column] = env
        new = column, env_rank, self._step_of(env), step_into_of(env, env_rank)
        for entries in (self._bound, self._active):
            for i, entry in enumerate(entries):
                if entry[0] == column:
                    entries[i] = new  # in place: `step` goes through this list
        self.envs = envs

    def renew(self, column: int, error: Exception, *, is_cut: bool = True) -> None:
        """Column's game has failed with `error`: build its environment again. `reset_one` then gives it its seed."""
        if self.renewals is None or self.renewals.is_exhausted:
            raise error
        env, self._first_seeds[column] = self.renewals.renew(column, self.envs[column], error, is_cut=is_cut)
        self._use(column, env)

    def _begin_again(self, column: int, seed: int | None) -> int | None:
        """The seed of the next reset. The first one of a new environment waits for its game."""
        if column in self._first_seeds:
            self._words[PHASE] = Phase.RENEWING
        first_seed = self._first_seeds.pop(column, seed)
        return first_seed if seed is None or not self.keeps_seeds else seed

    def _cut(self, active: Sequence[Any], error: Exception) -> int:
        """The step of the environment that the word ENV_RANK names has raised `error`. Returns the index in `active` of
        the next one."""
        if self.renewals is None or self.renewals.is_exhausted:
            raise error
        i = next(i for i, entry in enumerate(active) if entry[1] == self._words[ENV_RANK])
        b = active[i][0]
        self.observations[b], self.rewards[b], self.infos[b] = self.on_cut(b, error), 0.0, {}
        self._words[PHASE] = Progress.IS_STEPPING
        return i + 1

    def park(self, column: int) -> None:
        self.parked = sorted([*self.parked, column])
        self._active = [bound for bound in self._active if bound[0] != column]

    def unpark_all(self) -> None:
        self.parked, self._active = [], self._bound

    # ---- steps -----------------------------------------------------------------------------

    def step(  # noqa: C901 - it is called for each row
        self,
        action_row: Any,
        on_episode_end: EpisodeEndHook,
        on_step: StepHook | None = None,
        into: tuple[Any, int] | None = None,
    ) -> None:
        """Step every environment with its action. `observations` and `rewards` then hold the results.

        Almost all time that penstock needs per environment step is spent here. So values are only put into lists, and
        `write_step` writes whole rows.
        """
        words, observations, rewards = self._loop_words, self.observations, self.rewards
        is_watched = on_step is not None or self.info_writer is not None
        actions = self.split_actions(action_row)
        if on_step is not None:  # copies, because the environment may reuse its observations and actions
            before, given = [snapshot(observation) for observation in observations], self.split_actions(action_row)
        if self.parked or self._action_space is not None:
            actions = self._select(actions)
        outs = None if into is None or not self._writes_in_place else cells_of(*into, len(self.envs))
        # A hook that parks a column replaces self._active, and not this list.
        active, first = self._returned.steps(self._active) if self._returned.copies else self._active, 0
        # step_ordinary returns at each step that needs a check or another hook. `first` says where to continue.
        while True:
            try:
                stop = step_ordinary(
                    words, active, actions, outs, first, is_watched, observations, rewards, on_episode_end
                )
            except self.renewable as error:
                first = self._cut(active, error)
                continue
            if stop is None:
                break
            i, result = stop
            b, env_rank, _, step_into = active[i]
            if outs is not None and step_into is not None:
                result = with_observation(outs[b], result, env_rank)
            observation, reward, terminated, truncated, info = checked_step(result, env_rank)
            if is_watched:
                self.infos[b] = info
                if on_step is not None:
                    on_step(b, before[b], given[b], reward, terminated, truncated, info)
            if terminated or truncated:
                self.keep_info(b)
                observation = on_episode_end(b, observation, reward, terminated, truncated)
                self._words[PHASE] = Progress.IS_STEPPING  # the hook may have reset the environment
            observations[b], rewards[b], first = observation, reward, i + 1
        if self._returned.copies:
            self._returned.end_row()

    def step_one(self, column: int, action: Any) -> tuple[Any, float, bool, bool, Any]:
        """Step one environment with an action drawn at random, outside the loop over time.

        Returns observation, reward, terminated, truncated and info, all checked.
        """
        if self._action_space is not None:
            self._check_action(column, action, "drawn at random")
        _, env_rank, step, _ = self._bound[column]
        result = self._returned.of_step(column, step, action)
        observation, reward, terminated, truncated, info = checked_step(result, env_rank)
        if self.checks.check_finite and not math.isfinite(reward):
            raise self._not_finite(column, reward)
        self.observations[column] = observation
        if terminated or truncated:
            self.check_final(column, observation)
        else:
            self.check_observation(column)
        return observation, reward, terminated, truncated, info

    # ---- actions ---------------------------------------------------------------------------

    def _select(self, actions: Sequence[Any]) -> Sequence[Any]:
        """The actions of the columns that are not parked. Parked ones get a reward of zero."""
        if self.parked:
            actions = [actions[b] for b, *_ in self._active]
            for b in self.parked:
                self.rewards[b] = 0.0
                self.infos[b] = {}
        if self._action_space is not None:
            for (column, *_), action in zip(self._active, actions, strict=True):
                self._check_action(column, action, "given by the agent")
        return actions

    def _check_action(self, column: int, action: object, origin: str) -> None:
        space = self._action_space
        if space is not None and not space.contains(action):
            self.progress.at_env(self.env_ranks[column])
            raise SpaceError(
                f"the action of env_rank {self.env_ranks[column]}, {origin}, must be in {space} (debug=True), "
                f"got {brief(action)}"
            )
