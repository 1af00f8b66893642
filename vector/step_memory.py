"""The shared memory of a vector environment: one row per environment, in the structure of its spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.object_pipe import Mailbox
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.buffers.tree import map_tree
from penstock.envs.examples import example_of
from penstock.vector.objects import ObjectParts, ObjectSlots, shared_part
from penstock.workers.control import Command, ControlBlock
from penstock.workers.plan import WorkerPlan


@dataclass(frozen=True)
class VectorMemory:
    """What the main process and the workers exchange.

    `rows` holds, `[n]` each:

    - `action`, `requested`, `seed`: the main process writes them. `requested` counts requests, and is written last.
      `seed` is that of the last reset, -1 if there was none.
    - `observation`, `final_observation`, `reward`, `terminated`, `truncated`, `info_seq`, `replied`: the worker writes
      them. `replied` is the number of the request that the others belong to, and is written last. `info_seq` is the
      same number if the worker has sent an info with it.
    - `episode` `[n, 2]`: with an episode plan, the worker writes the seed of the environment's episodes, -1 if none was
      given, and the number of the running one.

    With `n_seats`, the data of actions and replies are `[n_seats]` instead, and the worker also writes `valid`, `alive`
    and `late_reward` of each seat.

    `wake_at` `[1]` is written by the main process. With 0, a worker replies for all of its environments together. Above
    0, it replies for one after the other, or for a batched environment. After each reply it counts the environments of
    all workers that have no open request, and wakes the main process if there are at least `wake_at`.
    """

    control: ControlBlock
    rows: NamedMemory
    mailbox: Mailbox
    objects: ObjectSlots | None  #: of spaces without a fixed shape; None if there are none

    @classmethod
    def allocate(
        cls,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        n_envs: int,
        n_workers: int,
        n_seats: int | None = None,
    ) -> VectorMemory:
        """Raises `SpaceError` if two keys of a Dict space have the same text, such as 1 and "1", and `ConfigError` if
        there is not enough memory."""

        n_rows = n_envs if n_seats is None else n_seats

        def row(space: gym.Space[Any], name: str) -> Any:
            fixed = shared_part(space) if n_seats is None else space
            return map_leaves(lambda leaf: ArraySpec.like(leaf, n_rows), example_of(fixed, name))

        count, flag = ArraySpec((n_envs,), np.dtype(np.int64)), ArraySpec((n_rows,), np.dtype(np.bool_))
        number = ArraySpec((n_rows,), np.dtype(np.float64))
        of_seats = {} if n_seats is None else {"valid": flag, "alive": flag, "late_reward": number}
        specs = NamedArrays(
            observation=row(observation_space, "observation"),
            final_observation=row(observation_space, "observation"),
            action=row(action_space, "action"),
            reward=number,
            terminated=flag,
            truncated=flag,
            requested=count,
            replied=count,
            info_seq=count,
            seed=count,
            episode=ArraySpec((n_envs, 2), np.dtype(np.int64)),
            wake_at=ArraySpec((1,), np.dtype(np.int64)),
            **of_seats,
        )
        rows = NamedMemory(specs, shared=True, purpose=f"a vector environment of {n_rows} environments")
        rows.arrays.seed[...] = rows.arrays.episode[...] = -1
        has_objects = ObjectParts(observation_space) or ObjectParts(action_space)
        return cls(ControlBlock(n_workers, 1, shared=True), rows, Mailbox(), ObjectSlots() if has_objects else None)

    def count_lost(self, plan: WorkerPlan, command: Command | None, t: int, n_results: int) -> int:
        """A vector environment counts no trajectories."""
        return 0

    def close(self) -> None:
        """Close the descriptors; views stay valid."""
        self.rows.close()
        self.control.memory.close()
        self.mailbox.file.close()
        if self.objects is not None:
            self.objects.close()


def copy_rows(batch: object, which: int | slice | npt.NDArray[np.intp]) -> Any:
    """A copy of the rows `which`, an index or an array of them, of a batch in Gymnasium's structure."""
    if isinstance(which, np.ndarray):
        return map_tree(lambda rows: rows[which], batch)  # an array of indices makes a copy
    return map_tree(lambda rows: rows[which].copy(), batch)
