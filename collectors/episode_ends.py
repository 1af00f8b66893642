"""Final observations: kept where an episode ends, and valued where it was only truncated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from penstock.agents.base import Agent
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_cell
from penstock.buffers.samples import BatchColumns
from penstock.collectors.checks import Checks
from penstock.collectors.columns import EnvColumns
from penstock.envs.rows import arrays_like

__all__ = ["EpisodeEndRecorder"]


#: One leaf of an observation: the keys that lead to it, its array `[T, B, ...]`, its shape and dtype.
_Cells = tuple[tuple[Any, ...], npt.NDArray[Any], tuple[int, ...], np.dtype[Any]]


class EpisodeEndRecorder:
    """Writes `final_obs` and `final_value`, and of single environments the flags too, in the same stroke.

    Values of a stateless agent are asked for once, at the end of the batch, for all truncations
    together: truncations are rare, and a forward pass costs almost the same for one row as for many. A
    recurrent agent is asked at once, while its state is still that of the truncated column.
    """

    def __init__(self, samples: BatchColumns, agent: Agent, envs: EnvColumns) -> None:
        self._samples, self._agent, self._envs = samples, agent, envs
        # Where each leaf of an observation goes, if there is nothing to check but that it is as it should be.
        self._cells: list[_Cells] = []
        if samples.final_obs is not None and envs.checks == Checks():
            self._cells = list(_cells(_space_of(envs.envs[0]), samples.final_obs))
        # The same for `put_cell`; None if there is more to check, or nothing is recorded.
        self._arrays = arrays_like(_space_of(envs.envs[0]), samples.final_obs) if self._cells else None
        # Where observations are written that the batch does not keep.
        self._scratch = map_leaves(lambda leaf: np.zeros_like(leaf[0, :1]), samples.observation)
        self._pending: list[tuple[int, int]] = []  # t, column of what is to be valued ...
        self._unrecorded: list[Any] = []  # ... and their observations [k, ...], if the batch does not keep them

    def record(self, t: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Column's episode has ended at step t with `observation`: this and the flags are written, and the observation
        valued if the episode was only truncated. Call before anything is reset.

        Raises `SpaceError` naming the environment if `observation` does not fit, recorded or not.
        """
        samples = self._samples
        samples.done[t, column], samples.terminated[t, column] = True, terminated
        samples.truncated[t, column] = truncated
        if not (put_cell(self._arrays, t, column, observation) or self._write_plain(t, column, observation)):
            row = self._scratch if samples.final_obs is None else samples.final_obs[t][column : column + 1]
            self._envs.write_final(row, column, observation)
        if samples.final_value is None or terminated or not truncated:
            return
        if self._agent.recurrent:
            samples.final_value[t, column] = self._value_now(t, column, reward)
        else:
            self._pending.append((t, column))
            if samples.final_obs is None:
                self._unrecorded.append(map_leaves(np.copy, self._scratch))

    def record_rows(
        self,
        t: int,
        columns: npt.NDArray[Any],
        observation: Any,
        reward: npt.NDArray[Any],
        is_valued: npt.NDArray[np.bool_],
    ) -> None:
        """`record` for many, but for the flags: `observation` `[k, ...]`, which is known to fit, `reward` `[k]`, and
        which of `columns` `[k]` were only truncated. Call before anything is reset."""
        samples = self._samples
        if samples.final_obs is not None:
            samples.final_obs[t, columns] = observation
        if samples.final_value is None or not is_valued.any():
            return
        chosen = columns[is_valued]
        if self._agent.recurrent:
            values = self._values_now(t, columns, observation, reward)
            samples.final_value[t, chosen] = values[chosen]
        else:
            self._pending += [(t, column) for column in chosen.tolist()]
            if samples.final_obs is None:
                self._unrecorded.append(map_leaves(lambda leaf: leaf[is_valued], observation))

    def end_batch(self) -> None:
        """Value what is still to be valued. Call when all rows of the batch are written."""
        if not self._pending:
            return
        samples = self._samples
        t, column = np.array(self._pending).T
        if samples.final_obs is not None:
            observation = samples.final_obs[t, column]
        else:
            observation = map_leaves(lambda leaf: np.empty((len(t), *leaf.shape[1:]), leaf.dtype), self._scratch)
            i = 0
            for unrecorded in self._unrecorded:
                n = _length(unrecorded)
                observation[i : i + n] = unrecorded
                i += n
        # The agent's previous action and reward are those of step t, which stand in row t + 1.
        previous = (t + 1, column)
        samples.final_value[t, column] = self._agent.value(
            observation, samples.action[previous], samples.reward[previous]
        )
        self._pending.clear()
        self._unrecorded.clear()

    def _write_plain(self, t: int, column: int, observation: Any) -> bool:
        """Write an observation whose leaves are all as they should be, at a tenth of the cost of the checked way.

        False if one is not, which may be fine or wrong: the checked way is then to write all of them.
        """
        try:
            for path, leaf, shape, dtype in self._cells:
                value = observation
                for key in path:
                    value = value[key]
                if value.shape != shape or not (value.dtype == dtype or value.dtype.kind == "f" == dtype.kind):
                    return False
                leaf[t, column] = value
        except (AttributeError, KeyError, IndexError, TypeError, RuntimeWarning):
            return False
        return bool(self._cells)

    def _value_now(self, t: int, column: int, reward: float) -> Any:
        samples = self._samples
        last = self._scratch if samples.final_obs is None else samples.final_obs[t][column : column + 1]
        return self._values_now(t, [column], last, [reward])[column]

    def _values_now(self, t: int, columns: Any, observation: Any, reward: Any) -> Any:
        """Values `[B]` of what follows step t, `observation` `[k, ...]` in `columns`."""
        samples = self._samples
        row = map_leaves(lambda leaf: leaf[t].copy(), samples.observation)
        row[columns] = observation
        prev_reward = samples.reward[t].copy()
        prev_reward[columns] = reward
        return self._agent.value(row, samples.action[t + 1], prev_reward)


def _space_of(env: Any) -> Any:
    return env.single_observation_space if isinstance(env, VectorEnv) else env.observation_space


def _cells(space: Any, arrays: Any, path: tuple[Any, ...] = ()) -> Iterator[_Cells]:
    if isinstance(space, spaces.Dict):
        for key, sub in space.items():
            yield from _cells(sub, arrays[str(key)], (*path, key))
    elif isinstance(space, spaces.Tuple):
        for i, sub in enumerate(space):
            yield from _cells(sub, arrays[f"_{i}"], (*path, i))
    else:
        yield path, arrays, arrays.shape[2:], arrays.dtype


def _length(rows: Any) -> int:
    return len(next(rows.leaves())[1] if isinstance(rows, NamedArrays) else rows)
