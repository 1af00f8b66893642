"""From a ring with some number of writers to one with another: where final observations lie depends on the writers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.buffers import NamedArrays
from penstock.buffers.named import map_leaves
from penstock.errors import ConfigError
from penstock.replays.ring import NOWHERE, Ring, Shape, lacks_next, writers_of

_FINALS = ("final", "final_obs", "final_step")


def move(old: Ring, new: Ring) -> None:
    """Copy the steps of `old` to `new`. No process may write meanwhile.

    Raises `ConfigError` if the steps have other shapes or dtypes.
    """
    parts = [name for name, _ in old.arrays.items() if name not in ("begun", "done", *_FINALS)]
    layouts = [
        [(name, leaf.shape, leaf.dtype) for name, leaf in ring.arrays.leaves() if name.split(".")[0] in parts]
        for ring in (old, new)
    ]
    if layouts[0] != layouts[1]:
        raise ConfigError(
            f"the replay holds steps of another sampler: it has {layouts[0]}, this sampler gives {layouts[1]}"
        )
    for name in parts:
        new.arrays[name][...] = old.arrays[name]
    n_finals = _move_finals(old, new.arrays, new.shape)
    new.resume(old.first, old.end, n_finals, old.n_lost)


def of_one_writer(ring: Ring) -> tuple[NamedArrays, int, int]:
    """The arrays of `ring` as one writer would have written them, how many final observations there were ever, and how
    many are kept at most. No process may write meanwhile."""
    if not ring.is_shared:
        return ring.arrays, ring.n_finals[0], ring.shape.max_finals
    shape = replace(ring.shape, n_writers=1, max_finals=ring.shape.n_finals, spare_finals=0)
    specs = shape.specs()
    finals = {name: map_leaves(lambda spec: np.zeros(spec.shape, spec.dtype), specs[name]) for name in _FINALS}
    arrays = NamedArrays({**dict(ring.arrays.items()), **finals})
    (n_finals,) = _move_finals(ring, arrays, shape)
    return arrays, n_finals, shape.max_finals


def _move_finals(old: Ring, arrays: NamedArrays, shape: Shape) -> list[int]:
    """Write the final observations of `old` into `arrays` of this `shape`. Returns their number by writer."""
    positions = np.arange(old.first * old.B, old.end * old.B)  # in the order of time
    at = positions % old.size
    is_truncated = lacks_next(old.flags[at])
    at, steps = at[is_truncated], positions[is_truncated] // old.B
    final = arrays.final.reshape(-1)
    final[at] = NOWHERE
    is_kept = old.has_final(at)
    at, steps = at[is_kept], steps[is_kept]
    writer = writers_of(shape.B, shape.n_writers)[at % shape.B]
    counts = []
    for i in range(shape.n_writers):
        own = at[writer == i]
        number = np.arange(len(own))
        final[own] = number
        newest = slice(max(len(own) - shape.max_finals, 0), None)
        place = number[newest] % shape.max_finals
        arrays.final_step[i, place] = steps[writer == i][newest]
        arrays.final_obs[i, place] = old.final_obs(own[newest])
        counts.append(len(own))
    return counts
