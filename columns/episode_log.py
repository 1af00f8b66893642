"""The episode log: the actions and rewards of each environment's last steps, so that its episode can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.buffers.named import ArrayTree, NamedArrays, as_named, map_leaves
from penstock.buffers.object_pipe import Mailbox
from penstock.buffers.shared import ArraySpec, NamedMemory
from penstock.envs.seats import SeatTable

#: The words of an environment. A position counts its rows since its worker was started.
POSITION, EPISODE, START, SEED, FIRST_START, AT, GENERATION, PLAN = range(8)

_WORDS = 8
_MOST_STEPS = 2**15  # of one environment
_MOST_BYTES = 2**22  # of one environment


class EpisodeLog:
    """For each environment: which episode runs, where it began, and the actions and rewards of the rows before this
    batch.

    Workers write their own environments. Row p of the arrays holds position p, p + n_rows, and so on: the oldest are
    overwritten. The rows of the running batch are in the samples buffer only. By environment, `agents` has the agent of
    each seat, and `seats` has its policy and column.

    - POSITION: of the first row of the running batch, or of the next one.
    - EPISODE, SEED, START: the number of the running episode, the seed of its reset, the position of its first row.
    - FIRST_START: the position of the first row of the episode that ran when the last batch began.
    - AT: before the first batch, the position of the step that runs.
    - GENERATION: of the random stream that the episodes' seeds come from.
    - PLAN: the number of the plan that the running episode began with. 0 is the first.

    `plan` has a dict of plans by number, pickled. Workers follow the newest; the first one, while it is empty.
    """

    def __init__(
        self, policies: Sequence[Any], table: SeatTable, sizes: tuple[int, int], n_before: int, *, shared: bool
    ) -> None:
        """`policies`: the arrays of each in a slot, of which `action` is `[rows, columns, ...]`. `table` says who sits
        where. `sizes`: the number of slots, and `batch_T`. `n_before` is the most steps before the first batch."""
        n, float32, actions = len(table.agents), np.dtype(np.float32), [arrays.action for arrays in policies]
        leaves = [leaf for action in actions for _, leaf in NamedArrays(action=action).leaves()]
        n_bytes = (sum(leaf[0].nbytes for leaf in leaves) + sum(map(len, table.agents)) * float32.itemsize) // n
        self.seats, self.agents = [table.places(b) for b in range(n)], table.agents
        self.has_games = table.agents[0][0] is not None
        self.n_before, (n_slots, self.batch_T) = n_before, sizes
        self.n_rows = n_rows = self.batch_T + max(n_before, min(_MOST_STEPS, _MOST_BYTES // n_bytes))
        policy_rows = {
            f"_{p}": NamedArrays(
                reward=ArraySpec((n_rows, len(_first(action)[0])), float32),
                action=map_leaves(lambda leaf: ArraySpec((n_rows, *leaf.shape[1:]), leaf.dtype), action),
            )
            for p, action in enumerate(actions)
        }
        specs = NamedArrays(
            words=ArraySpec((n, _WORDS), np.dtype(np.int64)),
            # For each row of a batch, the number of its episode, and the seed and the plan of the reset that began it.
            begun=ArraySpec((n_slots, self.batch_T, n, 3), np.dtype(np.int64)),
            policies=NamedArrays(policy_rows),
        )
        self.memory = NamedMemory(specs, shared=shared, purpose="the episode log (seed_episodes=True)")
        self.plan = Mailbox()

    def words(self, env: int) -> list[int]:
        """Main process: the words of one environment."""
        words: list[int] = self.memory.arrays.words[env].tolist()
        return words

    def read(self, env: int, start: int, stop: int) -> tuple[Any, npt.NDArray[np.float32]]:
        """A copy of the actions and rewards of one environment, from position `start` to `stop`."""
        rows = np.arange(start, stop) % self.n_rows
        return self.of_env(env, self.memory.arrays.policies.values(), rows)

    def of_env(self, env: int, policies: Sequence[Any], rows: Any) -> tuple[Any, npt.NDArray[np.float32]]:
        """Actions `[n, ...]` and rewards `[n]` of one environment in these rows, out of the arrays of each policy,
        `[rows, columns, ...]`. With several agents: actions as in a Tuple space with a part for each seat, rewards
        `[n, k]`."""
        actions, rewards = self.field(env, policies, "action", rows), self.field(env, policies, "reward", rows)
        return actions, np.stack(rewards.values(), -1) if self.has_games else rewards

    def field(self, env: int, policies: Sequence[Any], name: str, rows: Any) -> Any:
        """This field of one environment in these rows; with several agents, as in a Tuple space."""
        parts = tuple(policies[p][name][rows, column] for p, column in self.seats[env])
        return as_named(parts) if self.has_games else parts[0]

    def write_env(self, env: int, start: int, actions: Any, rewards: npt.NDArray[Any]) -> None:
        """Worker: write what `read` has returned, from position `start` on."""
        for i, (p, column) in enumerate(self.seats[env]):
            rows = (actions[f"_{i}"], rewards[:, i]) if self.has_games else (actions, rewards)
            self.write(p, column, start, *rows)

    def write(self, p: int, columns: slice | int, start: int, action: ArrayTree, reward: npt.NDArray[Any]) -> None:
        """Worker: write rows `[n, ...]` of actions and rewards of policy p, from position `start` on."""
        arrays, n = self.memory.arrays.policies[f"_{p}"], len(reward)
        first = start % self.n_rows
        n_first = min(n, self.n_rows - first)  # the rest begins at row 0 again
        for part, rows in (
            (slice(0, n_first), slice(first, first + n_first)),
            (slice(n_first, n), slice(0, n - n_first)),
        ):
            arrays.action[rows, columns], arrays.reward[rows, columns] = action[part], reward[part]


def _first(action: ArrayTree) -> Any:
    return next(NamedArrays(action=action).leaves())[1]
