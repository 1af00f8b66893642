"""What is recorded where an episode ends: flags, the final observation, and its value if it was only truncated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.base import Agent
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.native import put_cell
from penstock.buffers.samples import BatchColumns
from penstock.collectors.checks import Checks
from penstock.collectors.env_batch import EnvBatch
from penstock.envs.rows import arrays_like


class EpisodeEndRecorder:
    """Writes `final_obs` and `final_value`, and for single environments the flags.

    A stateless agent computes all values in one call at the end of the batch: truncations are rare, and a forward pass
    costs almost the same for one row as for many. A recurrent agent computes each value at once, while its state is
    still that of the truncated column.
    """

    def __init__(self, samples: BatchColumns, agent: Agent, envs: EnvBatch) -> None:
        self._samples, self._agent, self._envs = samples, agent, envs
        self._is_recorded, self._has_checks = samples.final_obs is not None, envs.checks != Checks()
        # Final observations that the batch does not keep go into one row `[1, B, ...]`: to be checked and valued.
        scratch = map_leaves(lambda leaf: np.zeros_like(leaf[:1]), samples.observation)
        self._final_obs = samples.final_obs if self._is_recorded else scratch
        self._arrays = arrays_like(envs.observation_space, self._final_obs)
        #: (t, column) of the truncations whose values are due at the end of the batch ...
        self.pending: list[tuple[int, int]] = []
        self._unrecorded: list[Any] = []  # ... and their observations `[k, ...]`, if the batch does not keep them

    def record(self, t: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Column's episode ended at step t with `observation`. Call it before anything is reset.

        Raises `SpaceError` if `observation` does not fit its space, recorded or not.
        """
        samples = self._samples
        samples.done[t, column] = True  # all flags are False before: `begin_batch` has cleared them
        if terminated:
            samples.terminated[t, column] = True
        if truncated:
            samples.truncated[t, column] = True
        row = t if self._is_recorded else 0
        if self._has_checks or not put_cell(self._arrays, row, column, observation):
            self._envs.write_final(self._arrays, row, column, observation)
        if samples.final_value is None or terminated or not truncated:
            return
        last = self._final_obs[row][column : column + 1]
        if self._agent.recurrent:
            samples.final_value[t, column] = self._values_now(t, [column], last, [reward])[column]
        else:
            self.pending.append((t, column))
            if not self._is_recorded:
                self._unrecorded.append(map_leaves(np.copy, last))

    def record_rows(
        self,
        t: int,
        columns: npt.NDArray[Any],
        observation: Any,
        reward: npt.NDArray[Any],
        is_valued: npt.NDArray[np.bool_],
    ) -> None:
        """`record` for several `columns` `[k]` at once, without the flags.

        `observation` `[k, ...]` is known to fit, `reward` is `[k]`, and `is_valued` `[k]` says which were only
        truncated.
        """
        samples = self._samples
        if self._is_recorded:
            samples.final_obs[t, columns] = observation
        if samples.final_value is None or not is_valued.any():
            return
        chosen = columns[is_valued]
        if self._agent.recurrent:
            values = self._values_now(t, columns, observation, reward)
            samples.final_value[t, chosen] = values[chosen]
        else:
            self.pending += [(t, column) for column in chosen.tolist()]
            if not self._is_recorded:
                self._unrecorded.append(map_leaves(lambda leaf: leaf[is_valued], observation))

    def write_values(self) -> None:
        """Compute the values of all `pending` truncations. Call it when all rows of the batch are written."""
        samples = self._samples
        t, column = np.array(self.pending).T
        observation = self._pending_observations(t, column)
        # Row t + 1 holds the action and reward of step t, which are the agent's previous ones here.
        at = (t + 1, column)
        samples.final_value[t, column] = self._agent.value(observation, samples.action[at], samples.reward[at])
        self.pending.clear()
        self._unrecorded.clear()

    def _pending_observations(self, t: npt.NDArray[Any], column: npt.NDArray[Any]) -> Any:
        if self._is_recorded:
            return self._final_obs[t, column]
        observation = map_leaves(lambda leaf: np.empty((len(t), *leaf.shape[2:]), leaf.dtype), self._final_obs)
        i = 0
        for unrecorded in self._unrecorded:
            n = len(next(unrecorded.leaves())[1] if isinstance(unrecorded, NamedArrays) else unrecorded)
            observation[i : i + n] = unrecorded
            i += n
        return observation

    def _values_now(self, t: int, columns: Any, observation: Any, reward: Any) -> Any:
        """Values `[B]` after step t, with `observation` `[k, ...]` and `reward` `[k]` in `columns`."""
        samples = self._samples
        row = map_leaves(lambda leaf: leaf[t].copy(), samples.observation)
        row[columns] = observation
        prev_reward = samples.reward[t].copy()
        prev_reward[columns] = reward
        return self._agent.value(row, samples.action[t + 1], prev_reward)
