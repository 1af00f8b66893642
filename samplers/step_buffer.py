"""The step buffer: one row `[B]` of what environments and a central agent exchange at every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.shared import ArraySpec, NamedMemory


class StepBuffer:
    """Inputs and outputs of the agent for `n_columns` environments, in the structure of a samples buffer.

    A worker writes `observation`, `prev_action`, `prev_reward` and `reset` of its columns, and sends a request. For the
    first row of the next batch it makes an offer instead, and the server writes `observation`. The inference server
    replies with `action` and `agent_info`, or with `value`, and clears `reset`. Neither writes while the other may. One
    exception: a worker that replaces a dead one may write its row while the server still acts for its predecessor; it
    ignores that reply.
    """

    def __init__(self, samples: NamedArrays, n_columns: int, *, shared: bool) -> None:
        def row(field: Any) -> Any:
            return map_leaves(lambda leaf: ArraySpec((n_columns, *leaf.shape[2:]), leaf.dtype), field)

        number = ArraySpec((n_columns,), np.dtype(np.float32))
        specs = NamedArrays(
            observation=row(samples.observation),
            prev_action=row(samples.action),
            prev_reward=number,
            reset=ArraySpec((n_columns,), np.dtype(np.bool_)),
            action=row(samples.action),
            agent_info=row(samples.agent_info),
            value=number,
        )
        self.memory = NamedMemory(specs, shared=shared, purpose=f"a step buffer of {n_columns} environments")

    def columns(self, columns: range) -> NamedArrays:
        """The views that one worker writes and reads."""
        view: NamedArrays = self.memory.arrays[columns.start : columns.stop]
        return view
