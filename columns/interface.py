"""The environments of one worker's columns, as collectors use them: single ones or one batched environment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.agents.action_masks import ActionMask
from penstock.buffers.tree import map_tree, tree_leaves
from penstock.envs.checks import Checks, check_row
from penstock.envs.infos import InfoWriter, element
from penstock.envs.rows import ColumnError, arrays_like, write_cell
from penstock.errors import SpaceError
from penstock.workers.control import Phase, Progress

#: Called for column b after each environment step: (b, observation acted on, action, reward,
#: terminated, truncated, info). Observation and action are copies made before the step.
StepHook = Callable[[int, Any, Any, Any, bool, bool, dict[str, Any]], None]
#: Called when column b's episode ends: (b, final observation, reward, terminated, truncated). Returns the observation
#: that column b has next.
EpisodeEndHook = Callable[[int, Any, Any, bool, bool], Any]


def snapshot(value: object, other: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """A deep copy of an observation or action, whose arrays the environment may reuse. `other` copies what is no array,
    dict, tuple or tensor."""
    if value.__class__ is np.ndarray:
        return value.copy()
    if value.__class__ is dict:
        return {key: snapshot(part, other) for key, part in value.items()}
    if value.__class__ is tuple:
        return tuple(snapshot(part, other) for part in value)
    if hasattr(value, "clone"):  # a tensor, of which not each can be copied in another way
        return value.clone()
    return other(value)


@dataclass(frozen=True)
class EpisodeEnds:
    """The episodes that ended in one step of a batched environment."""

    done: npt.NDArray[np.bool_]  #: `[B]`
    terminated: npt.NDArray[np.bool_]  #: `[B]`
    truncated: npt.NDArray[np.bool_]  #: `[B]`
    columns: npt.NDArray[np.intp]  #: `[k]`, ascending
    reward: npt.NDArray[Any]  #: `[k]`, of the last step
    observation: Any  #: `[k, ...]`, the final observations, as they are recorded
    final: Any  #: the final observations as the environment returned them, for all columns

    def each(self) -> list[Any]:
        """The final observations one by one, in the environment's own structure."""
        return [element(self.final, b) for b in self.columns.tolist()]


class Returned:
    """What the environments of one worker have returned. A row is written when all of them have stepped. So if two of
    them return observations in the same memory, such as one buffer of their class, each is copied at once.

    `copies` says whether to do that. It is True until all have stepped, and afterwards only if two of them share
    memory, or with `always`.
    """

    def __init__(self, n_envs: int, *, always: bool = False) -> None:
        self.copies, self._n_envs, self._always = n_envs > 1, n_envs, always
        self._seen: dict[tuple[int, bool], Any] = {}  # the newest, by environment, of resets and of steps

    def own(self, e: int, observation: Any, *, is_reset: bool = False) -> Any:
        """What to keep of an observation of environment e, or of a dict of them."""
        if not self.copies:
            return observation
        self._seen[e, is_reset] = observation
        return snapshot(observation, other=lambda value: value)  # not each object can be copied

    def of_step(self, e: int, step: Callable[[Any], Any], action: Any) -> Any:
        """What `step(action)` of environment e returns, with its own observation."""
        result = step(action)
        return (self.own(e, result[0]), *result[1:]) if isinstance(result, tuple | list) and result else result

    def steps(self, bound: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The entries of `step_ordinary`, with `of_step`."""
        return [(b, rank, partial(self.of_step, b, step), into) for b, rank, step, into in bound]

    def end_row(self) -> None:
        """The row is written next."""
        if self._always or sum(not is_reset for _, is_reset in self._seen) >= self._n_envs:
            self._always = self.copies = self._always or self._share_memory()
            self._seen.clear()

    def _share_memory(self) -> bool:
        spans = sorted(
            (leaf.__array_interface__["data"][0], leaf.nbytes, e)
            for (e, _), tree in self._seen.items()
            for _, leaf in tree_leaves(tree)
            if isinstance(leaf, np.ndarray)
        )
        end, owner = 0, -1
        for start, n_bytes, e in spans:
            if start < end and e != owner:
                return True
            end, owner = max((end, owner), (start + n_bytes, e))
        return False


class EnvBatch(Protocol):
    """What `EnvColumns` (single environments) and `VectorColumns` (one batched environment) have in common.

    `SeatColumns` only records: `Games` resets and steps its environments. So the methods for that have a body here.

    Raises `SpaceError`, with the field and the env_rank, for data that do not fit. `arrays` are arrays `[T, B, ...]`,
    nested as `arrays_like` returns them.
    """

    envs: Sequence[Any]  #: the environments that were built
    env_ranks: Sequence[int]  #: the env_ranks of the columns, ascending
    observation_space: gym.Space[Any]  #: the observation space of one environment
    checks: Checks  #: the optional checks to make
    parked: list[int]  #: the columns that `step` ignores, ascending
    resetting: Sequence[int] = ()  #: the parked columns that the next `step` resets (`AutoresetMode.NEXT_STEP`)
    info_writer: InfoWriter | None = None  #: writes the infos that `step` leaves in `infos`; None: nobody needs them
    observations: Any  #: the current observations: a list of elements, or a batch
    rewards: Any  #: the rewards of the last step `[B]`: a list or an array
    infos: Any  #: the infos of the last step
    progress: Progress

    def __len__(self) -> int:
        return len(self.env_ranks)

    def __getitem__(self, column: int) -> Any:
        """The environment of this column, to read or set its attributes. Step it with `step`."""
        return self.envs[column]

    def __iter__(self) -> Iterator[Any]:
        return (self[column] for column in range(len(self)))

    def enter(self, phase: Phase, column: int) -> int:
        """Write the phase and this column's env_rank into the progress row. Returns `time.monotonic_ns()`."""
        self.progress.at_env(self.env_ranks[column])
        return self.progress.enter(phase)

    def reset_all(self, seeds: Sequence[int | None]) -> None:
        """Reset every environment, each with its seed if it has one."""
        return None

    def reset_one(self, column: int, seed: int | None = None) -> Any:
        """Reset one environment, unless it resets itself. Returns its first observation. Batched ones take no seed."""
        return None

    def park(self, column: int) -> None:
        """Park this column: from the next `step` on it is ignored, and its reward is zero."""
        return None

    def unpark_all(self) -> None:
        """Use every column again."""
        return None

    def step(
        self,
        action_row: Any,
        on_episode_end: EpisodeEndHook,
        on_step: StepHook | None = None,
        into: tuple[Any, int] | None = None,
    ) -> None:
        """Step every column that is not parked with its action of `action_row` `[B, ...]`.

        `into` is `(arrays, t)`: environments with `step_into` write their observations into row t of `arrays`. Without
        it, their `step` is called.
        """
        return None

    def write_observations(self, row: Any) -> None:
        """Write the current observations into `row` `[B, ...]`, as the samples record observations."""
        self._write_row(arrays_like(self.observation_space, row[np.newaxis]), 0)

    def write_rewards(self, row: Any) -> None:
        """Write the rewards of the last step into `row` `[B]`."""

    def write_step(self, arrays: Any, rewards: Any, t: int) -> None:
        """Write the current observations into row t of `arrays`, and the rewards into row t of `rewards` `[T, B]`."""
        self._write_row(arrays, t)
        self.write_rewards(rewards[t])

    def write_final(self, arrays: Any, t: int, column: int, observation: Any) -> None:
        """Write the final observation of column's episode into `[t, column]`."""
        self._write_one(arrays, t, column, observation, "the final observation")

    def check_final(self, column: int, observation: Any) -> None:
        """Raise `SpaceError` unless the final observation of column's episode fits its space."""

    def _write_row(self, arrays: object, t: int) -> None:
        """Write the current observations into row t."""

    def _write_one(self, arrays: object, t: int, column: int, observation: object, name: str) -> None:
        try:
            write_cell(arrays, t, column, observation, name)
            if self.checks:
                cells = map_tree(lambda array: array[:, column : column + 1], arrays)
                check_row(self.checks, self.observation_space, cells, t, [observation], name)
        except ColumnError as error:
            raise self.with_env_rank(column, error) from None

    def with_env_rank(self, column: int, error: ColumnError) -> SpaceError:
        """`error` with the column's env_rank, which is also written into the progress row."""
        self.progress.at_env(self.env_ranks[column])
        return error.with_env_rank(self.env_ranks[column])


def require_legal_actions(mask: ActionMask, observation: object, envs: EnvBatch) -> None:
    """Raise `SpaceError` with the env_rank if `observation` `[B, ...]` allows no action in a column that is not
    parked."""
    for column in np.flatnonzero(mask.has_none(observation)).tolist():
        if column not in envs.parked:
            raise no_legal_action(envs, column)


def require_flags(mask: ActionMask, observation: object, envs: EnvBatch) -> None:
    """Raise `SpaceError` with the env_rank if a mask in `observation` `[B, ...]` has other numbers than 0 and 1."""
    for column in np.flatnonzero(mask.has_others(observation)).tolist():
        if column not in envs.parked:
            raise not_flags(envs, column)


def not_flags(envs: EnvBatch, column: int) -> SpaceError:
    """The error for a mask with other numbers than 0 and 1."""
    problem = "must be 1 where an action is legal and 0 elsewhere, but has other numbers"
    return envs.with_env_rank(column, ColumnError(column, "the action mask", problem))


def no_legal_action(envs: EnvBatch, column: int) -> SpaceError:
    """The error for a mask without a legal action."""
    problem = "allows no action, but the episode has not ended: end the episode, or allow an action"
    return envs.with_env_rank(column, ColumnError(column, "the action mask", problem))
