"""The shared memory of a vector environment: one row per environment, in the structure of its spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from penstock.buffers.mailbox import Mailbox
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.envs.examples import example_of
from penstock.workers.control import ControlBlock
from penstock.workers.plan import WorkerPlan

__all__ = ["VectorMemory", "taken"]


@dataclass(frozen=True)
class VectorMemory:
    """What the main process and the workers exchange.

    `rows` holds, `[n]` each:

    - `action`, `requested`, `seed`: written by the main process. A request is one more than the last; whatever else
      it is (an action, a reset) has been written before. `seed` is that of the last reset, -1 if there was none.
    - `observation`, `final_observation`, `reward`, `terminated`, `truncated`, `answered`, `told`: written by the
      worker. `answered` is the number of the request that the rest answers, and written last; `told` is the same
      number if an info goes with it, which has been put into the worker's pipe.

    `one_by_one` `[1]`: the main process wants to hear of every environment, not of all of a worker's at once.
    """

    control: ControlBlock
    rows: NamedMemory
    mailbox: Mailbox

    @classmethod
    def allocate(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any], n_envs: int, n_workers: int
    ) -> VectorMemory:
        """Raises `SpaceError` for a space whose elements have no fixed shape, `ConfigError` if there is no room."""

        def row(space: gym.Space[Any], name: str) -> Any:
            return map_leaves(lambda leaf: ArraySpec.like(leaf, n_envs), example_of(space, name))

        count, flag = ArraySpec((n_envs,), np.dtype(np.int64)), ArraySpec((n_envs,), np.dtype(np.bool_))
        specs = NamedArrays(
            observation=row(observation_space, "observation"),
            final_observation=row(observation_space, "observation"),
            action=row(action_space, "action"),
            reward=ArraySpec((n_envs,), np.dtype(np.float64)),
            terminated=flag,
            truncated=flag,
            requested=count,
            answered=count,
            told=count,
            seed=count,
            one_by_one=ArraySpec((1,), np.dtype(np.int64)),
        )
        rows = NamedMemory(specs, shared=True, purpose=f"a vector environment of {n_envs} environments")
        return cls(ControlBlock(n_workers, 1, shared=True), rows, Mailbox())

    def count_finished(self, plan: WorkerPlan, t: int) -> int:
        """No batch, no count of trajectories."""
        return 0

    def close(self) -> None:
        """Give descriptors back; views stay valid."""
        self.rows.close()
        self.control.memory.close()
        self.mailbox.close()


def taken(batch: Any, which: Any) -> Any:
    """A copy of the environments `which` (an index or an array of them) of a batch in Gymnasium's structure."""
    if isinstance(batch, dict):
        return {key: taken(part, which) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(taken(part, which) for part in batch)
    return batch[which].copy()
