"""Final observations: kept where an episode ends, and valued where it was only truncated."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.agents.base import Agent
from penstock.buffers.named import map_leaves
from penstock.buffers.samples import BatchColumns
from penstock.envs.rows import ColumnError, row_writer

__all__ = ["FinalObservations"]


class FinalObservations:
    """Writes `final_obs` and `final_value`.

    Values of a stateless agent are asked for once, at the end of the batch, for all truncations
    together: truncations are rare, and a forward pass costs almost the same for one row as for many. A
    recurrent agent is asked at once, while its state is still that of the truncated column.
    """

    def __init__(self, samples: BatchColumns, agent: Agent, env_ranks: range) -> None:
        self._samples, self._agent, self._env_ranks = samples, agent, env_ranks
        self._writer = row_writer(agent.observation_space, "the final observation")
        plain = isinstance(samples.observation, np.ndarray) and samples.observation.dtype.kind == "f"
        self._plain_shape = samples.observation.shape[2:] if plain else None
        self._pending: list[tuple[int, int, Any]] = []  # t, column, observation

    def record(self, t: int, column: int, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Column's episode has ended at step t with `observation`. Call before anything is reset."""
        samples = self._samples
        if samples.final_obs is None:
            pass
        elif type(observation) is np.ndarray and observation.shape == self._plain_shape:
            samples.final_obs[t, column] = observation  # a third of the cost of the checked way
        else:
            self._write_one(samples.final_obs[t], column, observation)
        if samples.final_value is None or terminated or not truncated:
            return
        if self._agent.recurrent:
            samples.final_value[t, column] = self._value_now(t, column, observation, reward)
        else:
            self._pending.append((t, column, observation))

    def end_batch(self) -> None:
        """Value what is still to be valued. Call when all rows of the batch are written."""
        if not self._pending:
            return
        samples = self._samples
        t, column = np.array([pending[:2] for pending in self._pending]).T
        observation = map_leaves(lambda leaf: np.empty((len(t), *leaf.shape[2:]), leaf.dtype), samples.observation)
        self._writer.write(self._writer.prepare(observation), [pending[2] for pending in self._pending])
        # The agent's previous action and reward are those of step t, which stand in row t + 1.
        previous = (t + 1, column)
        samples.final_value[t, column] = self._agent.value(
            observation, samples.action[previous], samples.reward[previous]
        )
        self._pending.clear()

    def _value_now(self, t: int, column: int, observation: Any, reward: float) -> Any:
        samples = self._samples
        row = map_leaves(lambda leaf: leaf[t].copy(), samples.observation)
        self._write_one(row, column, observation)
        prev_reward = samples.reward[t].copy()
        prev_reward[column] = reward
        return self._agent.value(row, samples.action[t + 1], prev_reward)[column]

    def _write_one(self, row: Any, column: int, observation: Any) -> None:
        try:
            self._writer.write(self._writer.prepare(row[column : column + 1]), [observation])
        except ColumnError as error:  # told of the one column that was written
            raise error.naming(self._env_ranks[column]) from None
